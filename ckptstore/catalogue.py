"""The per-process half of `CheckpointStore`, which finds checkpoints and changes the set of live ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ckptstore import extended
from ckptstore.boundary import bounded
from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.errors import InvalidInput, InvalidMetric, StoreMissing
from ckptstore.format.changes import Change, Pin, Unpin
from ckptstore.format.record import Record
from ckptstore.job import Job, annotation, record_of_step
from ckptstore.log.identity import read_identity
from ckptstore.retention import Mode, Policy, Verdict, as_metrics, check_metric_exists, ranked

if TYPE_CHECKING:
    from ckptstore.extended import SaveHistory, ThinReport
    from ckptstore.loading.newest import Near
    from ckptstore.upkeep.garbage import Garbage
    from ckptstore.upkeep.prune import Trashed


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One checkpoint in a listing: a live one or, if requested, a fast one."""

    checkpoint: Checkpoint
    is_pinned: bool = False
    is_latest: bool = False
    """True if it is the latest of the store."""
    is_resume_source: bool = False
    is_durable: bool = True
    """True if it is in the store."""
    is_fast: bool = False
    """True if it is on the disk of this node and the listing includes fast checkpoints."""


@bounded
class Catalogue:
    """The checkpoints of one store, for one process. No method is collective."""

    def __init__(self, job: Job) -> None:
        self._held = job

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: a store has locks, connections and a part in a job."""
        raise InvalidInput(
            "A store cannot be sent to another process", hint="Send its URI and open it there, or send a Checkpoint"
        )

    @property
    def uri(self) -> str:
        """The root, without secrets."""
        return self._held.storage.uri

    @property
    def retention(self) -> Policy:
        """The rule that says which checkpoints stay live: the argument of `open_store`."""
        return self._job.policy

    def exists(self) -> bool:
        """Return True if there is a store at the URI; the first save creates it. Costs one request."""
        return read_identity(self._job.storage) is not None

    def _near(self) -> Sequence[Near]:
        if self._job.tier is None:
            raise InvalidInput(
                "The store was opened without a fast tier, so there is no directory to look at",
                hint='Write open_store(..., fast=FastTier("/the/directory"))',
            )
        return self._job.tier.near(self._job)

    @property
    def _job(self) -> Job:
        """The job of the open store. Raises InvalidInput if it is closed."""
        self._held.check_open()
        return self._held

    def latest(self, *, fast: bool = False) -> Checkpoint | None:
        """Return the live checkpoint that was committed last; None in an empty store. Costs at most two requests.

        With `fast`, it is the newest usable one, in the store or on the disk of this node; `is_durable` of it is True
        if it is in the store. Void ones, those of other stores and those that lack files are passed over, with
        `CheckpointSkipped` events. Digests are compared when it is read. This takes a few more requests.

        No other process is involved: this one sees the certificates on its own node only, and a newer checkpoint may be
        complete elsewhere. It reads the files on this node and, if its job has saved or resumed, those on the other
        nodes of the job. For a file that only another node has, StorageError names step, rank, file and node. Ranks may
        see different checkpoints: to continue from one, call `resume`.

        A fast checkpoint stays while it is read. Between two calls it may be deleted from the node: then it is read
        from the store if it was drained, otherwise CheckpointGone is raised. Raises InvalidInput if the store was
        opened without a fast tier.
        """
        if fast:
            newer = [near for near in self._near() if not near.is_durable and not near.is_superseded]
            if newer:
                return Checkpoint(newer[-1].files)
        record = self._job.log.latest()
        return self._checkpoint(record) if record else None

    def best(self, metric: str, mode: Mode | None = None) -> Checkpoint | None:
        """Return the live checkpoint with the best finite value of `metric`, the later of equals; None if none has one.

        `mode` is "min" or "max", and may be left out if the metric's name implies it, such as "eval_loss". Raises
        InvalidMetric, with the existing metrics, if no live checkpoint has this one.
        """
        log = self._job.log
        newest = log.newest()
        candidates = self._job.candidates(newest)
        check_metric_exists(candidates, metric)
        found = ranked(candidates, metric, mode)
        return self._checkpoint(log.annotated(log.records([found[0].number]), newest)[0]) if found else None

    def __getitem__(self, step: int) -> Checkpoint:
        """Return the newest live checkpoint of a step. Raises CheckpointGone, which names live steps."""
        return self._checkpoint(self._record_of(step, self._job.log.newest()))

    def __iter__(self) -> Iterator[Checkpoint]:
        """Iterate over all live checkpoints, in the order of their commits."""
        return (entry.checkpoint for entry in self.entries())

    def __len__(self) -> int:
        """Return the number of live checkpoints."""
        newest = self._job.log.newest()
        return len(newest.state.live) if newest else 0

    def __bool__(self) -> bool:
        """Return True: an empty store is a store too."""
        return True

    def __contains__(self, step: object) -> bool:
        return any(checkpoint.step == step for checkpoint in self)

    def entries(self, *, fast: bool = False) -> list[Entry]:
        """Return all live checkpoints in the order of their commits, each with the marks that protect it.

        With `fast`, also return the usable ones on the disk of this node, all in the order of their saves; see
        `latest`.
        """
        near = {one.attempt: one for one in self._near()} if fast else {}
        newest = self._job.log.newest()
        if newest is None:
            return []
        state = newest.state
        records = self._job.log.annotated(self._job.log.readable(state.in_order()), newest)
        entries = [
            Entry(
                checkpoint=self._checkpoint(record),
                is_pinned=record.number in state.pinned,
                is_latest=record.number == state.latest,
                is_resume_source=record.number == state.resume_from,
                is_fast=near.pop(record.entry.attempt, None) is not None,
            )
            for record in records
        ]
        if not near:
            return entries
        ordered = [(record.entry.order, entry) for record, entry in zip(records, entries, strict=True)]
        ordered += [
            (one.order, Entry(checkpoint=Checkpoint(one.files), is_durable=False, is_fast=True))
            for one in near.values()
        ]
        return [entry for _, entry in sorted(ordered, key=lambda pair: pair[0])]

    def follow(
        self,
        *,
        after: Checkpoint | int | Literal["latest"] | None = None,
        latest_only: bool = False,
        cursor: str | os.PathLike[str] | None = None,
        timeout_seconds: float | None = None,
    ) -> Generator[Checkpoint, None, None]:
        """Yield each checkpoint once it is committed, in the order of the commits: first those that are live, then what
        comes.

        The checkpoint is not deleted while the body of the loop works on it: a lease protects it, on every storage. It
        is done, and the cursor moves past it, when the next one is taken from the iterator. So an error in the body, a
        `break` and a kill leave the cursor before it. One that was removed before its turn is named in a
        `CheckpointSkipped` event, which is logged as a warning.

        A storage that is away is waited for, and so is a store that does not exist yet. The job that saves is not
        fenced, and need not know.

        Args:
            after: begin behind this checkpoint, or the newest of this step; "latest" for what comes from now on.
                Without effect once the cursor exists.
            latest_only: go on with the latest checkpoint each time, and leave out those between.
            cursor: keeps the place over restarts: a name, as an object in the store, or the path of a file, with a
                slash ("./evaluated"). Each has one follower at a time: two would both get all checkpoints.
            timeout_seconds: end the loop after so long without a new checkpoint; None to go on for ever. If the storage
                is away then, or there is no store yet, its error is raised.

        Raises InvalidInput for a cursor of another log and once another store is in the place of this one,
        CheckpointGone for a step that is gone.
        """
        start = (files_behind(after).uri, files_behind(after).record) if isinstance(after, Checkpoint) else after
        return extended.Follower(self._job, start, latest_only, cursor, timeout_seconds).follow(self._checkpoint)

    def history(self) -> SaveHistory:
        """Return every save that was ever committed, in the order of the commits, also those that are deleted.

        The log keeps of a deleted checkpoint its step, metrics, time, epoch, number of ranks and size, and the reason
        for which it went. Metadata, names of files and timings went with its files. Reads all records, once.
        """
        return extended.past_saves(self._job.log)

    def verify_log(self) -> list[str]:
        """Read every record of the log, and return the faults of the records and of their order; empty if all is well.

        The files of the checkpoints are not checked: `Checkpoint.verify` does that.
        """
        return self._job.log.verify_chain()

    def trash(self) -> list[Trashed]:
        """Return the dropped checkpoints that no prune has deleted yet, with the time left and the reason to stay."""
        from ckptstore.upkeep.prune import trash

        return trash(self._job.log, self._job.storage, grace_seconds=self._job.config.grace_seconds)

    def pin(self, step: int) -> None:
        """Protect the live checkpoint of a step from retention, until `unpin`. Raises CheckpointGone."""
        self._change(lambda newest: Pin((self._record_of(step, newest).number,), self._job.epoch))

    def unpin(self, step: int) -> None:
        """Undo `pin`. Raises CheckpointGone."""
        self._change(lambda newest: Unpin((self._record_of(step, newest).number,), self._job.epoch))

    def annotate(self, checkpoint: Checkpoint | int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a committed checkpoint, such as those of an evaluation; retention, `best`, listings and
        `history` use them from now on. One that exists by its name is replaced, that of the save included.

        Any process may call it beside the job that saves, which is not fenced, and several may at once: each name keeps
        the value that was annotated last. Of a step, it is the newest live checkpoint, else the newest in the trash. A
        `Checkpoint` of this store is that one, even if its step was saved again since.

        Raises CheckpointGone if it was deleted, InvalidMetric for a value that is no number and without any,
        InvalidInput for a checkpoint that is not in this store, StoreFenced in a job that was fenced.
        """
        job, found = self._job, as_metrics(metrics)
        if not found:
            raise InvalidMetric("There is no metric to annotate the checkpoint with")

        def change(newest: Record | None) -> Change:
            if isinstance(checkpoint, Checkpoint):
                files = files_behind(checkpoint)
                place = extended.place_of(job.log, newest, files.uri, files.record)
            else:
                place = extended.place_of_step(job.log, newest, checkpoint)
            return annotation(job.log, newest, place, found, epoch=job.epoch)

        self._change(change)

    def roll_back(self, step: int) -> Checkpoint:
        """Make the checkpoint of `step` the latest: all that were committed after it go to the trash.

        Newer fast checkpoints are void from then on. Raises CheckpointGone if the step is not live, InvalidInput if a
        later one is pinned.
        """
        job = self._job

        from ckptstore.upkeep.retain import roll_back

        def change(newest: Record | None) -> Change | None:
            target = self._record_of(step, newest)
            return roll_back(newest, target, epoch=job.epoch, next_save=job.next_fast_save)

        self._change(change)
        return self[step]

    def remove(self, step: int, *, force: bool = False) -> None:
        """Put the live checkpoint of a step in the trash, from which `restore` brings it back; a prune deletes it.

        The latest, a pinned one, the one that the job resumed from and one with files that others refer to are refused
        without `force`. With it, a pinned one loses its pin in the same record, and the checkpoint before the latest
        becomes the latest, as after a roll back; it must be a whole one. No file is deleted that a job, a reader on a
        disk or another checkpoint needs: a prune leaves it in the trash. Raises CheckpointGone if the step is not live,
        InvalidInput.
        """
        job = self._job

        from ckptstore.upkeep.retain import remove

        self._change(
            lambda newest: remove(job.log, newest, step, epoch=job.epoch, next_save=job.next_fast_save, force=force)
        )

    def remove_all(self, *, force: bool = False) -> None:
        """Put all live checkpoints in the trash, the latest too: the next start finds none, and begins at the
        beginning.

        The log stays, and a job that runs goes on saving. Pinned ones are refused without `force`, and then none goes.
        """
        job = self._job

        from ckptstore.upkeep.retain import roll_back

        self._change(
            lambda newest: roll_back(newest, None, epoch=job.epoch, next_save=job.next_fast_save, unpins=force)
        )

    def thin(self, step: int, drop: str | Sequence[str], *, force: bool = False, dry_run: bool = False) -> ThinReport:
        """Drop the keys that fit `drop` ("optimizer.*"), one pattern or several, from the live checkpoint of a step.

        What stays is a checkpoint of its own in the place of the whole one, with its pin. The whole one goes to the
        trash: `restore` brings it back, and a prune deletes it. A load of what is left names it, with `include` or with
        strict=False, and a resume passes over the checkpoint.

        The latest and the one that the job resumed from are refused; a pinned one and one with files that others refer
        to without `force`. Raises InvalidInput then, for a pattern that fits no key, and if nothing would be freed;
        CheckpointGone if the step is not live; CheckpointDamaged; StoreFenced if a job claims the store meanwhile.
        """
        return extended.thin(self._job, step, drop, force=force, dry_run=dry_run)

    def restore(self, step: int, *, number: int | None = None, pin: bool = True) -> Checkpoint:
        """Make a checkpoint in the trash live again, and `pin` it: otherwise the next save may drop it once more.

        Of several of the step, the last is restored, or that with `number`. Raises CheckpointGone if it is not in the
        trash; CheckpointDamaged if a file is missing (none is read); InvalidInput if the step is live or Ray keeps it.
        """
        from ckptstore.loading.restoring import restore

        return self._checkpoint(restore(self._job, step, number=number, pin=pin))

    def retain(self, policy: Policy, *, dry_run: bool = False) -> list[Verdict]:
        """Put every live checkpoint that `policy` does not keep in the trash, and return the verdict on each. Those of
        which it keeps the weights alone are thinned.

        The latest, pinned ones and the resume source stay. No job is fenced: a running one applies its own policy at
        its next save. A dry run returns the same verdicts and changes nothing. Raises InvalidMetric for a metric that
        no live checkpoint has, though they have others, or that is all the policy goes by.
        """
        from ckptstore.upkeep.retain import retain

        if not policy.thins() or dry_run:
            return retain(self._job.log, policy, dry_run=dry_run)

        planned = {it.number: it.drops for it in retain(self._job.log, policy, dry_run=True)}
        for error in extended.thin_as_decided(self._job, planned, dry_run=True).values():
            raise error  # before anything goes
        verdicts = retain(self._job.log, policy)
        for error in extended.thin_as_decided(self._job, {it.number: it.drops for it in verdicts}).values():
            raise error
        gone = [verdict for verdict in verdicts if not verdict.keep]
        return gone + retain(self._job.log, policy)  # only now a budget knows what they take

    def prune(self, *, dry_run: bool = False) -> list[Trashed]:
        """Delete, and return, the checkpoints that were in the trash for the grace period and that nothing protects.

        A save does this in the background. A dry run returns the same list and deletes nothing. Raises StoreFenced.
        """
        job = self._job
        from ckptstore.upkeep.prune import prune

        return prune(job.log, job.storage, job.config, epoch=job.epoch, dry_run=dry_run)

    def collect_garbage(self, *, claim: bool = False, dry_run: bool = False) -> Garbage:
        """Remove the leftovers of crashes: attempts that no record names and whose job was superseded.

        `claim` first takes the store over from a dead job, so that its attempts go too. It fences a job that is alive.
        """
        from ckptstore.upkeep.garbage import collect_garbage

        return collect_garbage(self._job.log, self._job.storage, claim=claim, dry_run=dry_run)

    def _repr_html_(self) -> str:
        rows = [(it.checkpoint.step, it.checkpoint.metrics, "latest" if it.is_latest else "") for it in self.entries()]
        from ckptstore.runtime.notebook import html_table

        return html_table(self.uri, [("step", "metrics", ""), *rows])

    def __repr__(self) -> str:
        return f"CheckpointStore({self.uri!r})"

    def _change(self, change: Callable[[Record | None], Change | None]) -> None:
        if not self.exists():
            raise StoreMissing(f"There is no store at {self.uri}")
        self._job.log.append(change)

    def _record_of(self, step: int, newest: Record | None) -> Record:
        return record_of_step(self._job.log, newest, step)

    def _checkpoint(self, record: Record) -> Checkpoint:
        from ckptstore.loading.checkpoint_files import files_of

        return Checkpoint(files_of(self._job, record))


def job_of(catalogue: Catalogue) -> Job:
    """Return the job of an open store, for use inside ckptstore. Raises InvalidInput if the store is closed."""
    return catalogue._job
