"""torch_checkpointing: its manager on a local disk, with its own settings for machines without CUDA.

Its storage opens files with O_DIRECT by default and then writes lengths that are no multiple of the disk's blocks.
ext4 refuses these, so it runs with `use_direct_io=False`. It makes nothing durable by itself. It gets no resharder,
whose collectives need CUDA: each rank loads what it saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.peers.base import ZIPPED, Contender, Wait, make_durable, shares_of


class TorchCheckpointing(Contender):
    """`CheckpointManager.save` and `.load`, synchronous. The manager lives as long as the contender, as in a job.

    It saves named items, each to a file, and has threads for several of them: so there are as many items as threads.
    """

    name, family = "torch_checkpointing", "torch_checkpointing"
    modules = packages = ("torch_checkpointing",)
    checks = ZIPPED
    warmed = ("save",)

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return None if case.place.is_local else "its one storage is the local disk"

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        if action == "load":
            found: list[dict[str, Any]] = [{"mmap": True}, {"mmap": False}]
            # It cannot copy tensors of safetensors into a DTensor.
            return [*found, {"format": "safetensors"}] if case.alone else found
        return [*({"thread_count": count} for count in (1, 2, 4)), {"thread_count": 2, "format": "safetensors"}]

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import CheckpointLoaderConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        count = settings.get("thread_count", 1)
        self._items = {f"model{number}": names for number, names in enumerate(shares_of(case.local, count))}
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                items={name: self._spec(name) for name in self._items},
                save=self._saver(count),
                load=CheckpointLoaderConfig(use_mmap=settings.get("mmap", True)),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def _spec(self, name: str) -> Any:
        from torch_checkpointing import ItemSpec
        from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization

        if self.settings.get("format") != "safetensors":
            return ItemSpec()
        return ItemSpec(layout=LayoutInfo(f"{name}_{{rank}}.safetensors", SafetensorsSerialization()))

    def _saver(self, num_threads: int) -> Any:
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import SyncCheckpointSaverConfig

        return SyncCheckpointSaverConfig(writer_config=CheckpointWriterConfig(file_write_max_threads=num_threads))

    def _payload(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {item: {name: state[name] for name in names} for item, names in self._items.items()}

    def save(self, place: str) -> Wait | None:
        self._manager.save(place, self._payload(self.case.state))
        self.case.gather(None)  # rank 0 renames the directory: the others do not wait for it by themselves
        self._persist(place)
        return None

    def _persist(self, place: str) -> None:
        if self.case.durable and self.case.rank == 0:
            make_durable(Path(place))
        self.case.gather(None)

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

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        return [{"thread_count": 2, "shared_memory": shared} for shared in (True, False)]

    def _saver(self, num_threads: int) -> Any:
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig

        shared = self.settings.get("shared_memory", True)
        return AsyncCheckpointSaverConfig(
            writer_config=CheckpointWriterConfig(file_write_max_threads=num_threads),
            staging_config=CheckpointStagerConfig(use_async_staging=False, use_shared_memory=shared),
        )

    def save(self, place: str) -> Wait | None:
        future = self._manager.save(place, self._payload(self.case.state))

        def wait() -> None:
            assert future is not None  # an asynchronous saver returns one
            future.result()
            self.case.gather(None)
            self._persist(place)

        return wait
