"""Move all payload bytes of ckptstore: in parallel, over files and inside them, each byte hashed on its way.

Nothing of an operation runs on after it has returned or raised, and the buffers of all operations of a `Transfer`
together stay within `TransferConfig.memory_budget_bytes`, whatever the size of the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.runtime.beat import Beat, no_beat
from ckptstore.runtime.fork import in_forked_child
from ckptstore.storage.base import Storage
from ckptstore.transfer.engine import Engine, Peers
from ckptstore.transfer.moves import Checked, FinishedCopy, PlannedFile, RangeRead, Stored, Wanted

__all__ = ["Checked", "RangeRead", "Stored", "Transfer", "Wanted"]


class Transfer:
    """Moves bytes between this process and one storage. Safe for threads; a pickle makes a new one for the storage.

    The calling thread gives signs of life while bytes move. All operations raise the first error that occurs, and name
    the file in it; requests that may go through later are tried again.
    """

    def __init__(
        self, storage: Storage, *, config: TransferConfig, retry: RetryConfig, rank: int = 0, peers: Peers | None = None
    ) -> None:
        """Do not take over the storage, which the caller closes. Threads are started when they are needed.

        What has digests is read from `peers` first, which it closes; a pickle has none.
        """
        self._engine = Engine(storage, config, retry, rank, peers)
        in_forked_child(self, Transfer._after_fork)

    def _after_fork(self) -> None:
        """Give a forked child threads, locks and buffers of its own."""
        engine = self._engine
        self._engine = Engine(engine.storage, engine.config, engine.retry, engine.rank, engine.peers)

    def __reduce__(self) -> tuple[Any, ...]:
        engine = self._engine
        return partial(Transfer, config=engine.config, retry=engine.retry, rank=engine.rank), (engine.storage,)

    @property
    def rank(self) -> int:
        """The rank in the events of this transfer; 0 until it is set."""
        return self._engine.rank

    def set_rank(self, rank: int) -> None:
        """Set the rank in events from now on."""
        self._engine.rank = rank

    @property
    def algorithm(self) -> str:
        """The algorithm of the digests of written files, unless a file names another."""
        return self._engine.config.digest

    @property
    def num_tasks(self) -> int:
        """The number of files or parts that move at once."""
        return self._engine.pool.num_threads

    def upload(self, files: Sequence[PlannedFile], *, check: Beat = no_beat) -> list[Stored]:
        """Write each source to its key, durable on a disk unless the configuration says otherwise.

        The result has the order of the files. A file that the disk failed to keep is written again from the beginning,
        once. `check` is called before each part and each try of a request, by the threads that make it; an error that
        it raises ends the upload, even while nothing moves. After an error files may exist, whole or torn. Raises
        SourceChanged for a source that changes or vanishes meanwhile, and the errors of the storage.
        """
        from ckptstore.transfer.upload import upload

        return upload(self._engine, files, check)

    def download(
        self,
        wanted: Sequence[tuple[Wanted, str | os.PathLike[str]]],
        *,
        read_only: bool = False,
        durable: bool = True,
    ) -> None:
        """Fetch files to paths that do not exist yet; directories are created. With `read_only` nobody may write to the
        files. They are durable as after `upload`, unless `durable` is False.

        A file with a wrong digest is fetched a second time, then CheckpointDamaged is raised. After an error complete
        files stay, torn ones do not. Raises StorageFull when the local disk is full.
        """
        places = [(item, os.fspath(path)) for item, path in wanted]
        durable = durable and self._engine.config.durable
        from ckptstore.transfer.fetch import download

        download(self._engine, places, read_only=read_only, durable=durable)

    def check(self, wanted: Sequence[Wanted]) -> list[Checked]:
        """Read every byte of the files and compare size and digest; the result has the order of the files.

        Raises the error that keeps the files from being read, AccessDenied for instance.
        """
        from ckptstore.transfer.fetch import check

        return check(self._engine, wanted)

    def read(self, ranges: Sequence[RangeRead]) -> None:
        """Fill the views of all ranges, and check every stretch that has a digest.

        A stretch with a wrong digest is read a second time, then CheckpointDamaged is raised. The views may hold
        anything after an error. Raises ValueError when the checks of a range do not cover it.
        """
        from ckptstore.transfer.reads import read_tasks

        self._engine.pool.run(read_tasks(self._engine, ranges))

    def offer(self, copy_key: str, names: Iterable[tuple[str, str]], finished: FinishedCopy) -> None:
        """Serve files from a finished copy on this node to peers, where there are any; see `Peers`."""
        if self._engine.peers is not None:
            self._engine.peers.offer(copy_key, names, finished)

    def close(self) -> None:
        """End the threads and give the buffers back. Other nodes that still ask this one are served for a while."""
        self._engine.pool.close()
        if self._engine.peers is not None:
            self._engine.peers.close()
        self._engine.scratch.trim(0)
