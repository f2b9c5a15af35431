"""torch_checkpointing: its manager on a local disk, with its own settings for machines without CUDA.

Its storage opens files with O_DIRECT by default and then writes lengths that are no multiple of the disk's blocks.
ext4 refuses these, so it runs with `use_direct_io=False`. It makes nothing durable by itself. It gets no resharder,
whose collectives need CUDA: each rank loads what it saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptstore.bench.case import Case
from ckptstore.bench.peers.base import Contender, Wait, make_durable

_ITEM = "model"
"""A manager saves named items; one of them holds the tensors, as in its own examples."""


class TorchCheckpointing(Contender):
    """`CheckpointManager.save` and `.load`, synchronous. The manager lives as long as the contender, as in a job."""

    name, family = "torch_checkpointing", "torch_checkpointing"
    modules = packages = ("torch_checkpointing",)

    @classmethod
    def objection(cls, case: Case) -> str | None:
        return super().objection(case) or (None if case.place.is_local else "its one storage is the local disk")

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=self._saver(),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def _saver(self) -> Any:
        from torch_checkpointing.config import SyncCheckpointSaverConfig

        return SyncCheckpointSaverConfig()

    def save(self, place: str) -> Wait | None:
        self._manager.save(place, {_ITEM: dict(self.case.state)})
        self.case.gather(None)  # rank 0 renames the directory: the others do not wait for it by themselves
        self._persist(place)
        return None

    def _persist(self, place: str) -> None:
        if self.case.durable and self.case.rank == 0:
            make_durable(Path(place))
        self.case.gather(None)

    def load(self, place: str) -> None:
        self._manager.load(place, into={_ITEM: dict(self.case.target)}, strict=True)

    def close(self) -> None:
        self._manager.close()


class AsyncTorchCheckpointing(TorchCheckpointing):
    """The same from its background process. The copy is made before the call returns, as with everybody else here:
    by default it goes on afterwards, and the next change of the state waits for it."""

    name = "torch_checkpointing, async"

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        return [{"use_async_staging": False}]

    def _saver(self) -> Any:
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig

        staging = CheckpointStagerConfig(use_async_staging=self.settings.get("use_async_staging", False))
        return AsyncCheckpointSaverConfig(staging_config=staging)

    def save(self, place: str) -> Wait | None:
        future = self._manager.save(place, {_ITEM: dict(self.case.state)})

        def wait() -> None:
            assert future is not None  # an asynchronous saver gives one
            future.result()
            self.case.gather(None)
            self._persist(place)

        return wait
