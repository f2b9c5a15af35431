"""CheckpointStore: the facade. Every method forwards to the module that tells its story."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ckptstore.checkpoint import Checkpoint
from ckptstore.config import StoreConfig, TransferConfig
from ckptstore.directory_shard import DirectoryShard
from ckptstore.errors import CheckpointGone, InvalidInput, StoreMissing
from ckptstore.garbage import Garbage, collect_garbage
from ckptstore.identity import read_identity
from ckptstore.job import Job
from ckptstore.load import CheckpointFiles, attempt_prefix
from ckptstore.log import Log
from ckptstore.prune import Trashed, prune, trash
from ckptstore.records import Change, Pin, Record, Remove, Unpin
from ckptstore.request import check_step
from ckptstore.resume import resume
from ckptstore.retention import KeepAll, Mode, Policy, ranked
from ckptstore.save import save
from ckptstore.storage.open import open_storage
from ckptstore.transfer import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One live checkpoint in a listing."""

    checkpoint: Checkpoint
    is_pinned: bool
    is_latest: bool
    is_resume_source: bool


def open_store(
    uri: str | os.PathLike[str],
    *,
    retention: Policy | None = None,
    missing: str = "error",
    grace_seconds: float | None = None,
    durable: bool | None = None,
    engine: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    group: object = None,
    rank_timeout_seconds: float | None = None,
    memory_budget_bytes: int | None = None,
    single_writer: bool | None = None,
) -> CheckpointStore:
    """Open the store at `uri`; it need not exist, the first save creates it. Nothing is written and no rank is waited
    for: the ranks meet at the first collective call.

    Args:
        uri: a path, file://, memory://, s3://, gs://, az://, abfs:// or any fsspec URL.
        retention: which checkpoints stay live; all of them by default.
        missing: "error" when a metric that retention ranks by must be given with every save, else "worst".
        grace_seconds: how long what retention drops stays in the trash, by the storage's clock (3600).
        durable: whether a disk is told to make everything durable before a commit (True).
        engine: "fsspec" or "obstore", None for the faster one that fits.
        storage_options: credentials and the like in fsspec's names; never written anywhere, never logged.
        group: a torch ProcessGroup or a `StorageGroup`; None for torch.distributed where it is initialised.
        rank_timeout_seconds: how long a rank may give no sign of life (600).
        memory_budget_bytes: the most memory that transfers of this process take for buffers (512 MiB).
        single_writer: promise that no other job ever writes, for storages without create-if-absent.

    Raises InvalidInput for an unknown scheme or a bad value.
    """
    if missing not in ("error", "worst"):
        raise InvalidInput(f"missing is {missing!r}, it is 'error' or 'worst'")
    policy = KeepAll() if retention is None else retention
    if not isinstance(policy, Policy):
        raise InvalidInput(f"retention is {retention!r}, it is a policy such as KeepLatest(3)")
    transfer_config = TransferConfig.from_env(durable=durable, memory_budget_bytes=memory_budget_bytes)
    config = StoreConfig.from_env(
        grace_seconds=grace_seconds,
        rank_timeout_seconds=rank_timeout_seconds,
        single_writer=single_writer,
        transfer=transfer_config,
    )
    storage = open_storage(
        os.fspath(uri), storage_options=storage_options, engine=engine, durable=transfer_config.durable
    )
    return CheckpointStore(
        Job(
            storage=storage,
            log=Log(storage, retry=config.retry, single_writer=config.single_writer),
            transfer=Transfer(storage, config=config.transfer, retry=config.retry),
            config=config,
            policy=policy,
            missing=missing,
            given_group=group,
        )
    )


class CheckpointStore:
    """The checkpoints of one training run, at one URI.

    Collective, so called by all ranks in the same order: `save_directory`, `resume`, `close`. Everything else is per
    process. A store is used by one process and, for what is not collective, from any of its threads.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def uri(self) -> str:
        """The root, without secrets."""
        return self._job.storage.uri

    def save_directory(
        self,
        step: int,
        path: str | os.PathLike[str] | None,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        exists: str = "replace",
        suffix: str = "auto",
        shared: Collection[str] = (),
        link: bool = False,
    ) -> Checkpoint:
        """Save the files of every rank's directory as one checkpoint. Collective.

        Returns on all ranks when the checkpoint is committed: durable, and visible whole. Or raises the same error on
        all ranks, with `error.committed` False (it can never become visible, and what was written was removed) or None
        (unknown: the leader or the storage was lost at the very commit). The directory may be deleted afterwards.

        Args:
            step: an integer of at least 0, the same on all ranks.
            path: this rank's directory, None where it has none. Links are followed inside the directory only.
            metrics: numbers for retention and `best`; those of rank 0 count.
            metadata: anything that JSON holds; that of rank 0 counts.
            exists: "replace" puts an earlier checkpoint of this step into the trash with the commit, "error" refuses.
            suffix: "auto" puts "-rank=00003" before the extension of names that several ranks bring, "always" of all
                names; with "never" such a collision is an error.
            shared: names that have the same bytes on all ranks that bring them; stored once, and checked.
            link: on a disk, make the files hard links where that is possible. Nothing is copied or read, so such files
                have no digest, and who writes to the source afterwards changes the checkpoint.

        Raises InvalidInput and its kin before anything is written, SourceChanged, StorageError, RankFailed,
        RankTimeout, StoreFenced.
        """
        shard = DirectoryShard(
            self._job,
            step,
            path,
            metrics=metrics,
            metadata=metadata,
            exists=exists,
            suffix=suffix,
            shared=shared,
            link=link,
        )
        return self._checkpoint(save(self._job, shard))

    def resume(self) -> Checkpoint | None:
        """Claim the store for this job, and return the newest checkpoint that is whole. Collective.

        All ranks get the same one; None in an empty store. From here on a job that claimed the store before is fenced:
        nothing that it still writes can become visible. A checkpoint with a missing or damaged manifest, or a file
        that is missing or has another size, is passed over with a `CheckpointSkipped` event that says why.

        Raises NoUsableCheckpoint when there are checkpoints and none of them can be used.
        """
        record = resume(self._job)
        return self._checkpoint(record) if record else None

    def latest(self) -> Checkpoint | None:
        """The checkpoint that was committed last and is live; None in an empty store. At most two requests."""
        record = self._job.log.latest()
        return self._checkpoint(record) if record else None

    def best(self, metric: str, mode: Mode = "min") -> Checkpoint | None:
        """The live checkpoint with the best finite value of `metric`, the later of equals; None if none has one."""
        if mode not in ("min", "max"):
            raise InvalidInput(f"mode is {mode!r}, it is 'min' or 'max'")
        found = ranked(self._job.candidates(self._job.log.newest()), metric, mode)
        return self._checkpoint(self._job.log.records([found[0].number])[0]) if found else None

    def __getitem__(self, step: int) -> Checkpoint:
        """The live checkpoint of a step, the newest if there are several. Raises CheckpointGone, which names others."""
        return self._checkpoint(self._record_of(step, self._job.log.newest()))

    def __iter__(self) -> Iterator[Checkpoint]:
        """All live checkpoints, in the order of their commits."""
        return (entry.checkpoint for entry in self.entries())

    def __len__(self) -> int:
        newest = self._job.log.newest()
        return len(newest.state.live) if newest else 0

    def __contains__(self, step: object) -> bool:
        return any(checkpoint.step == step for checkpoint in self)

    def entries(self) -> list[Entry]:
        """All live checkpoints in the order of their commits, with what protects them."""
        newest = self._job.log.newest()
        if newest is None:
            return []
        state = newest.state
        return [
            Entry(
                checkpoint=self._checkpoint(record),
                is_pinned=record.number in state.pinned,
                is_latest=record.number == state.latest,
                is_resume_source=record.number == state.resume_from,
            )
            for record in self._job.log.records(state.live)
        ]

    def trash(self) -> list[Trashed]:
        """What retention dropped and no prune has deleted yet, with the time left and what holds it."""
        return trash(self._job.log, self._job.storage, grace_seconds=self._job.config.grace_seconds)

    def pin(self, step: int) -> None:
        """Protect the live checkpoint of a step from retention, until `unpin`. Raises CheckpointGone."""
        self._change(lambda newest: Pin((self._record_of(step, newest).number,), self._job.epoch))

    def unpin(self, step: int) -> None:
        """Give the checkpoint of a step back to retention. Raises CheckpointGone."""
        self._change(lambda newest: Unpin((self._record_of(step, newest).number,), self._job.epoch))

    def roll_back(self, step: int) -> Checkpoint:
        """Make the checkpoint of `step` the latest: all that were committed after it go to the trash.

        Raises CheckpointGone when the step is not live, InvalidInput when a later one is pinned.
        """

        def change(newest: Record | None) -> Change | None:
            target = self._record_of(step, newest)
            assert newest is not None  # else there was no such step
            later = tuple(number for number in newest.state.live if number > target.number)
            reason = f"roll back to step {step}"
            return Remove(trash=later, epoch=self._job.epoch, reason=reason) if later else None

        self._change(change)
        return self[step]

    def prune(self, *, dry_run: bool = False) -> list[Trashed]:
        """Delete what has been in the trash for the grace period and that nothing protects; returns it.

        A save does this in the background. A dry run returns the same list and deletes nothing. Raises StoreFenced.
        """
        job = self._job
        return prune(job.log, job.storage, job.config, epoch=job.epoch, dry_run=dry_run)

    def collect_garbage(self, *, claim: bool = False, dry_run: bool = False) -> Garbage:
        """Remove what crashes left behind: attempts that no record names and whose job was superseded.

        `claim` takes the store over from a dead job first, so that its attempts count; a job that is alive is fenced.
        """
        return collect_garbage(self._job.log, self._job.storage, claim=claim, dry_run=dry_run)

    def close(self) -> None:
        """Finish what runs in the background and give connections back. Collective where a save was."""
        self._job.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"CheckpointStore({self.uri!r})"

    def _change(self, change: Any) -> None:
        if read_identity(self._job.storage) is None:
            raise StoreMissing(f"There is no store at {self.uri}")
        self._job.log.append(change)

    def _record_of(self, step: int, newest: Record | None) -> Record:
        step = check_step(step)
        records = self._job.log.records(newest.state.live if newest else ())
        found = [record for record in records if record.entry.step == step]
        if not found:
            steps = [record.entry.step for record in records]
            shown = f"{', '.join(map(str, steps[-10:]))}" if steps else "none"
            raise CheckpointGone(f"There is no live checkpoint of step {step}; live ones: {shown}", step=step)
        return found[-1]

    def _checkpoint(self, record: Record) -> Checkpoint:
        job = self._job
        return Checkpoint(
            CheckpointFiles(
                storage=job.storage,
                transfer=job.transfer,
                config=job.config,
                prefix=attempt_prefix(record),
                record=record,
            )
        )
