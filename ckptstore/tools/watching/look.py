"""Define the results of one look at a store, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ckptstore.format.record import Record

AttemptStatus = Literal["writing", "committing", "silent"]
ChangeKind = Literal["claim", "commit", "begin", "end", "log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenAttempt:
    """An attempt of the job that owns the store, without a record in the log so far."""

    attempt: str
    """The name of its directory."""
    step: int
    epoch: int
    status: AttemptStatus
    """"committing" once its manifest is there, "silent" after `SILENT_SECONDS` without growth or a sign of life."""
    num_files: int
    size_bytes: int
    """The bytes that are stored so far. On a disk that is what was written, also of files that have their room already.
    An object store shows a file when it is finished."""
    num_uploads: int | None
    """Uploads in parts that are begun and not finished; None where the storage does not tell."""
    expected_bytes: int | None
    """A guess: what the checkpoint of `expected_as_step` has stored. None where there is none to go by."""
    expected_as_step: int | None
    bytes_per_second: float | None
    """From the differences between looks, over about half a minute; None before anything has grown."""
    left_seconds: float | None
    """A guess, from the two above."""
    silent_seconds: float
    """Since something of it was last seen to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCommit:
    """A checkpoint, as its record in the log has it."""

    number: int
    step: int
    epoch: int
    kind: str
    created_at: float
    world_size: int
    size_bytes: int
    metrics: Mapping[str, float]
    dropped: tuple[str, ...] = ()
    """The patterns of the keys that it lacks since it was thinned; then its size is what is left."""

    @staticmethod
    def of(record: Record) -> SeenCommit:
        """Read it from the record that commits it."""
        entry = record.entry
        return SeenCommit(
            number=record.number,
            step=entry.step,
            epoch=entry.epoch,
            kind=entry.kind,
            created_at=entry.created_at,
            world_size=entry.world_size,
            size_bytes=entry.size_bytes,
            metrics=entry.metrics,
            dropped=entry.thinned.dropped if entry.thinned else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenOnNode:
    """The fast checkpoints of this store on the node of whoever watches."""

    step: int | None
    """The step of the newest that a job could resume from; None where there is none."""
    created_at: float | None
    """The time of its save, by the clock of its leader."""
    is_durable: bool
    """True if the store has that one, or a newer one."""
    not_durable_since: float | None
    """The time of the save of the oldest that is newer than what the store has; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSigns:
    """Signs of life that the ranks of the owner gave in the store.

    Ranks give them while they meet or store, and only if a `StorageGroup` connects them.
    """

    num_ranks: int
    """The number of ranks that have given one since the job began."""
    last_seconds: float
    """The seconds since the last sign of any rank."""
    oldest_rank: int
    """The rank whose last sign is the oldest."""
    oldest_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """A change since the look before."""

    kind: ChangeKind
    text: str
    """For people."""
    step: int | None = None
    number: int | None = None
    """The number of its record, if the log has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A store at one moment."""

    at: float
    """Seconds since the epoch, by the clock of whoever watches."""
    uri: str
    epoch: int
    """The highest writer epoch, 0 before the first claim."""
    num_live: int
    durable: SeenCommit | None
    """The latest live checkpoint: what a resume would find."""
    on_node: SeenOnNode | None
    """None without a directory of fast checkpoints."""
    commits: tuple[SeenCommit, ...]
    """The last ones, the newest first. Some may be in the trash."""
    attempts: tuple[SeenAttempt, ...]
    """Those that may be in flight, the newest step first."""
    signs: SeenSigns | None
    changes: tuple[Happening, ...]
    """Since the look before; nothing in the first one."""
    notes: tuple[str, ...]
    """Errors of this look, in words."""
