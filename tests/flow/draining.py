"""Jobs with a fast tier for tests of the drain: fast checkpoints of a few small files, made without torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ckptstore import FastTier, open_store
from ckptstore.config import RetryConfig, StoreConfig
from ckptstore.fast.certificate import Certificate
from ckptstore.fast.drain import Drain, Drainer
from ckptstore.fast.partner import doubled_upload
from ckptstore.format.digest import Digest
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Manifest, Receipt, sorted_receipts
from ckptstore.group import SoloGroup, StorageGroup
from ckptstore.group.board_group import BoardGroup
from ckptstore.job import Job
from ckptstore.log import Log
from ckptstore.storage.base import Storage
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.testing import Hook, wrap
from ckptstore.transfer import Transfer
from ckptstore.transfer.moves import PlannedFile, Upload
from ckptstore.transfer.sources import MemorySource

RETRY = RetryConfig(retry_attempts=2, retry_wait_initial_seconds=0.01)
FILES_OF_A_RANK = 3


def payload(step: int, rank: int, index: int, size_bytes: int) -> bytes:
    """What a file holds."""
    return (b"%d %d %d " % (step, rank, index) * (size_bytes // 6 + 1))[:size_bytes]


@dataclass
class Rank:
    """One rank of a job with a fast tier."""

    job: Job
    drainer: Drainer

    def fast(self, step: int, save_number: int, *, size_bytes: int = 1000) -> Certificate:
        """Save a fast checkpoint as this rank: its files on the disk of the node, and the certificate."""
        job, place = self.job, self.job.tier.place
        attempt, ranks = Attempt(step, place.epoch, f"{save_number:08x}"), range(len(place.members.nodes))
        contents = {
            f"part-{index}-rank={rank:05d}.bin": (rank, payload(step, rank, index, size_bytes))
            for rank in ranks
            for index in range(FILES_OF_A_RANK)
        }
        own = {name: data for name, (rank, data) in contents.items() if rank == place.members.rank}
        upload: Upload = place.transfer.upload
        if place.tier.copies == 2:
            upload = partial(doubled_upload, place, upload)
        upload([PlannedFile(attempt.key(name), MemorySource([memoryview(data)])) for name, data in own.items()])
        receipts = [Receipt(name, len(data), Digest.of(data), rank) for name, (rank, data) in contents.items()]
        manifest = Manifest(
            store_id=job.store_id(),
            step=step,
            epoch=place.epoch,
            attempt=str(attempt),
            kind="directory",
            world_size=len(ranks),
            created_at=1.5,
            files=tuple(sorted_receipts(receipts)),
            metrics={"loss": 1 / (1 + step)},
        )
        return Certificate.decode(place.certificate(manifest.encode(), save_number).encode())

    def offer(self, step: int, save_number: int, *, is_due: bool = True, **more: Any) -> Drain:
        """Save one, and offer it."""
        return self.drainer.offer(self.fast(step, save_number, **more), is_due=is_due)


@contextlib.contextmanager
def opened(
    uri: str | Path,
    disks: Path,
    *,
    rank: int = 0,
    size: int = 1,
    board: Storage | None = None,
    hook: Hook | None = None,
    timeout_seconds: float = 60,
    bytes_per_second: float | None = None,
    close_seconds: float | None = None,
    copies: Literal[1, 2] = 1,
    node: Callable[[int], str] = "node{}".format,
    **more: Any,
) -> Iterator[Rank]:
    """One rank of a job, whose ranks meet at a board of their own, so that the store may be away. Collective."""
    config = StoreConfig(rank_timeout_seconds=timeout_seconds, retry=RETRY)
    group: SoloGroup | BoardGroup = SoloGroup()
    if size > 1:
        assert board is not None
        seat = StorageGroup(rank, size, "start", node=node(rank))
        group = seat.open(board, rank_timeout_seconds=timeout_seconds, retry=RETRY)
    tier = FastTier(disks / node(rank), node=node(rank), copies=copies, drain_bytes_per_second=bytes_per_second)
    job = open_store(uri, group=group, fast=tier, **more)._job
    storage = job.storage if hook is None else wrap(job.storage, hook)
    transfer = Transfer(storage, config=config.transfer, retry=config.retry)
    job = replace(job, storage=storage, config=config, log=Log(storage, retry=config.retry), transfer=transfer)
    drainer = Drainer(job, job.tier.open(job))
    try:
        yield Rank(job, drainer)
    finally:
        drainer.close(close_seconds)
        job.close()


def board_at(path: Path) -> LocalStorage:
    """Where the ranks of a job meet."""
    return LocalStorage(path / "board")
