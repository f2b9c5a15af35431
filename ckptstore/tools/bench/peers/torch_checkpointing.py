"""torch_checkpointing: its manager on a local disk, with its own settings for machines without CUDA.

Its storage opens files with O_DIRECT by default and then writes lengths that are no multiple of the disk's blocks.
ext4 refuses these, so it runs with `use_direct_io=False`. It makes nothing durable by itself. It gets no resharder,
whose collectives need CUDA: each rank loads what it saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.peers.base import ZIPPED, Contender, Settings, Wait, shares_of


class TorchCheckpointing(Contender):
    """`CheckpointManager.save` and `.load`, synchronous. The manager lives as long as the contender, as in a job.

    It saves named items, each to a file, and has threads for several of them: so there are as many items as threads.
    """

    name = family = "torch_checkpointing"
    modules = packages = ("torch_checkpointing",)
    needs = ("disk", "its one storage is the local disk")
    checks = ZIPPED
    warmed = ("save",)
    tried = (*({"thread_count": count} for count in (1, 2, 4)), {"thread_count": 2, "format": "safetensors"})
    tried_in_load = ({"mmap": True}, {"mmap": False}, {"format": "safetensors"})

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[Settings]:
        found = super().sweep(case, action)
        # It cannot copy tensors of safetensors into a DTensor.
        return found if case.alone or action == "save" else [each for each in found if "format" not in each]

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import CheckpointLoaderConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        def spec(name: str) -> Any:
            if settings.get("format") != "safetensors":
                return ItemSpec()
            return ItemSpec(layout=LayoutInfo(f"{name}_{{rank}}.safetensors", SafetensorsSerialization()))

        count = settings.get("thread_count", 1)
        self._items = {f"model{number}": names for number, names in enumerate(shares_of(case.local, count))}
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                items={name: spec(name) for name in self._items},
                save=self.saver(CheckpointWriterConfig(file_write_max_threads=count)),
                load=CheckpointLoaderConfig(use_mmap=settings.get("mmap", True)),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def saver(self, writer: Any) -> Any:
        """Return the configuration of its way to save."""
        from torch_checkpointing.config import SyncCheckpointSaverConfig

        return SyncCheckpointSaverConfig(writer_config=writer)

    def _payload(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {item: {name: state[name] for name in names} for item, names in self._items.items()}

    def start(self, place: str) -> Wait | None:
        future = self._manager.save(place, self._payload(self.case.state))

        def wait() -> None:
            if future is not None:
                future.result()
            self.case.gather(None)  # rank 0 renames the directory: the others do not wait for it by themselves
            if self.case.rank == 0:
                self.persist(place)
            self.case.gather(None)

        return wait

    def load(self, place: str) -> None:
        self._manager.load(place, into=self._payload(self.case.target), strict=True)

    def close(self) -> None:
        self._manager.close()


class AsyncTorchCheckpointing(TorchCheckpointing):
    """`CheckpointManager.save` from its background process.

    The copy is made before the call returns, as with all peers: by default it goes on afterwards, and the next change
    of the state waits for it.
    """

    name = "torch_checkpointing, async"
    tried = ({"thread_count": 2, "shared_memory": True}, {"thread_count": 2, "shared_memory": False})
    in_background = True

    def saver(self, writer: Any) -> Any:
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig

        shared = self.settings["shared_memory"]
        staging = CheckpointStagerConfig(use_async_staging=False, use_shared_memory=shared)
        return AsyncCheckpointSaverConfig(writer_config=writer, staging_config=staging)
