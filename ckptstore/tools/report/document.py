"""The document of a report: plain values, and the JSON that they become. Pure.

`docs/reference/report-schema.json` is made of these classes and the texts below their fields. Numbers are raw. A text
may come from a store, so none is to be trusted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptstore.format.encoding import float_name

VERSION = 1

Status = Literal["live", "trash", "deleted"]
Standing = Literal["durable", "superseded", "void", "only-here", "unfinished", "damaged", "foreign", "unknown"]
ChangeKind = Literal[
    "claim",
    "commit",
    "annotate",
    "remove",
    "prune",
    "rollback",
    "pin",
    "unpin",
    "restore",
    "thin",
    "resume",
    "noop",
    "unreadable",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCheckpoint:
    """One checkpoint that the log knows, also after it was deleted."""

    number: int
    """The number of the record that committed it."""
    step: int
    """The step that it was saved for."""
    epoch: int
    """The writer epoch of the job that saved it."""
    attempt: str
    """The name of its directory below `checkpoints/`."""
    kind: Literal["directory", "state"]
    """"directory" for the files of a directory, or "state"."""
    status: Status
    """One of "live", "trash", or "deleted" when the log has dropped it for good."""
    created_at: float
    """The time of its save, in seconds since the epoch by the leader's clock."""
    committed_at: float
    """The time of its record, by the same clock. With a fast tier it came into the store then."""
    save_number: int
    """The number of the save among those of its job, from 1; 0 where the record does not tell."""
    saves_before: int
    """The number of saves of its job since the checkpoint before that are not in the store: they failed or, with a fast
    tier, a newer one was there first or they were not due."""
    world_size: int
    """The number of ranks that wrote it."""
    size_bytes: int
    """The size of all files, the manifest apart; those in the directories of its bases included."""
    metrics: Mapping[str, float | str]
    """By name. A float that JSON lacks is "NaN", "Infinity" or "-Infinity"."""
    bases: tuple[int, ...] = ()
    """The numbers of the checkpoints whose files it refers to."""
    dropped: tuple[str, ...] = ()
    """The patterns of the keys that were dropped from it after its save; then its number is that of this record."""
    whole_bytes: int | None = None
    """Its size before that; None if it is whole."""
    is_latest: bool = False
    """True for the latest of the store."""
    is_pinned: bool = False
    """True if it is kept until it is unpinned."""
    best_of: tuple[str, ...] = ()
    """The metrics by which no live checkpoint is better; only metrics whose name tells which way is better."""
    resumed_by: tuple[int, ...] = ()
    """The writer epochs of the jobs for which it was the latest when they claimed the store."""
    kept_because: tuple[str, ...] = ()
    """Why it is live, as far as the log says: a store does not hold the rule of its jobs."""
    removed_because: str = ""
    """Why it is live no more; "" where it is, or where the record gives no reason."""
    removed_at: float | None = None
    """The time when it went to the trash or, if it is deleted, when the log dropped it; by the clock of who did it."""
    deletes_at: float | None = None
    """The time from which a prune may delete it: its removal and the grace period. None if it is not in the trash."""
    held_by: tuple[str, ...] = ()
    """The reason that keeps it in the trash even after that."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Lines to copy into a shell, quoted for it, by name: those that apply of pin, unpin, restore, rollback, prune, cp,
    verify. None where the URI cannot stand in one, or names another checkpoint of the step."""
    timings: Mapping[str, Any] | None = None
    """The timings of the save in the manifest, rank by rank; None without them, or beyond the bound."""
    provenance: Mapping[str, Any] | None = None
    """The program that saved it, as in the manifest: commit, is_dirty, argv, versions, num_hosts, each only where it is
    known; None without it, or beyond the bound of timings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenChange:
    """One record of the log."""

    number: int
    """The number of the record."""
    at: float
    """The time of the record, in seconds since the epoch by the writer's clock."""
    kind: ChangeKind
    """The kind of change. "prune" drops checkpoints from the trash, "remove" and "rollback" put them there."""
    text: str
    """The change in words."""
    numbers: tuple[int, ...] = ()
    """The checkpoints that it made live, or changed."""
    epoch: int | None = None
    """The writer epoch of the job that wrote it; None for a command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenResume:
    """A job with a fast tier said from where it goes on."""

    number: int
    """The number of the record that says so."""
    at: float
    """The time of the record, by the writer's clock."""
    epoch: int
    """The writer epoch of the job."""
    attempt: str
    """The directory of what it resumed from; "" where it found nothing."""
    step: int | None
    """The step of that; None where it found nothing."""
    source: int | None
    """The number of the checkpoint, where it was in the store; None for a fast one that was on the nodes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFast:
    """One attempt on the disk of this node."""

    attempt: str
    """The name of its directory."""
    step: int
    """The step that it was saved for."""
    epoch: int
    """The writer epoch of the job that saved it."""
    save_number: int | None
    """The number of the save among those of its job; None without a certificate that can be read."""
    created_at: float | None
    """The time of the save by the leader's clock or, without a certificate, of its newest file; None for an
    empty directory."""
    world_size: int | None
    """The number of ranks that wrote it; None without a certificate."""
    size_bytes: int
    """The size of all its files on all nodes; without a certificate of those on this node."""
    here_bytes: int
    """The size of its files on this node."""
    nodes: tuple[str, ...]
    """The nodes that had its files when it was complete."""
    metrics: Mapping[str, float | str]
    """As those of a checkpoint."""
    standing: Standing
    """Its standing in the store: "durable" when the store has it, "superseded" when the store has a newer one, "void"
    when nobody may resume from it, "only-here" when the store has neither it nor a newer one, "unfinished" without a
    certificate, "damaged" when that cannot be read, "foreign" when it is of another store or another history."""
    reason: str
    """Why, in words."""
    number: int | None
    """The number of the checkpoint in the store, if it is durable."""
    num_missing: int
    """The number of files that this node should have and does not."""
    is_usable: bool
    """True if it is certified and whole on this node, and a job may resume from it. Digests are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TornAttempt:
    """An attempt that no record committed."""

    attempt: str
    """The name of its directory below `checkpoints/`."""
    step: int | None
    """The step that it was to save; None where the name does not say."""
    epoch: int | None
    """The writer epoch of the job that began it; None where the name does not say."""
    size_bytes: int
    """The size of its files."""
    modified_at: float | None
    """The time of the last write to its files, by the storage's clock; None for an empty directory."""
    in_flight: bool
    """True if the job that owns the store began it, so that it may still be committed."""
    why: str
    """A description in words, and what removes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePoint:
    """The size of the store after a record, by the sizes of its checkpoints: a file that several refer to counts for
    each of them."""

    at: float
    """The time of the record."""
    number: int
    """The number of the record."""
    live_bytes: int
    """The size of the live checkpoints."""
    trash_bytes: int
    """The size of those in the trash."""
    freed_bytes: int
    """The size of all that was dropped for good until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenUsage:
    """The bytes that a store takes: the files of its checkpoints, each counted once."""

    live_bytes: int = 0
    """Those of the live checkpoints."""
    trash_bytes: int = 0
    """Those of the checkpoints in the trash."""
    bytes_per_day: float | None = None
    """The growth of both together over the last week, or since the first record; None in the first hour."""
    price_per_month: float | None = None
    """The price of both together for a month; None unless the report was asked for it with the price of a TB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLayout:
    """The tensors of a state, shared by the checkpoints that have the same. The arrays are parallel."""

    keys: tuple[str, ...]
    """The key of each tensor, in the order of the index."""
    dtypes: tuple[int, ...]
    """The position of the dtype in `dtype_names` of the store."""
    shapes: tuple[tuple[int, ...], ...]
    """The shape of the whole tensor."""
    size_bytes: tuple[int, ...]
    """The shape of the whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenTree:
    """The tensors of one checkpoint."""

    layout: int
    """The position of its layout in `layouts` of the store."""
    digests: tuple[str | None, ...] | None
    """For each key "PLACE/CONTENT". Where the whole text is the same in two checkpoints, the tensor is. Where PLACE is
    the same and CONTENT is not, it has changed. Where PLACE differs, ranks had divided it in another way, or its
    digests are by another algorithm, so nothing is known; nor is it of None, a small tensor whose bytes are not read.
    None for all where the index has no digests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLease:
    """Somebody reads a checkpoint on a disk."""

    holder: str
    """The host and process, as the lease is named."""
    number: int
    """The number of the checkpoint."""
    age_seconds: float
    """Since it was renewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state of a store that decides if a person has to do something."""

    last_durable_at: float | None = None
    """The time of the commit of the latest live checkpoint; None when nothing is live."""
    last_durable_step: int | None = None
    """The step of it."""
    last_fast_at: float | None = None
    """The time of the save of the newest fast checkpoint on this node that a job could resume from; None where there is
    none, and where nobody asked for those on this node."""
    last_fast_step: int | None = None
    """The step of it."""
    not_durable_since: float | None = None
    """The time of the save of the oldest fast checkpoint on this node that is newer than what the store has; None
    without one."""
    gaps: tuple[str, ...] = ()
    """Faults of the records of the log, or of their order."""
    garbage_bytes: int = 0
    """The size of the attempts that a garbage collection removes."""
    garbage_files: int = 0
    """Their files, and unfinished uploads and files that killed writers left."""
    stored_bytes: int | None = None
    """The size of all files below `checkpoints/` now; None where they were not listed."""
    leases: tuple[SeenLease, ...] = ()
    """The processes that read now."""
    trouble: tuple[str, ...] = ()
    """Parts that could not be read, and are therefore missing in the report, and what is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits that keep the report of a large store quick. Checkpoints and records are never left out."""

    timings: int
    """Timings are of so many of the newest live checkpoints."""
    trees: int
    """Trees are of so many live checkpoints: the latest, pinned, best and newest ones."""
    tree_tensors: int
    """All trees together have at most so many tensors."""
    listed_files: int
    """Files are listed, for attempts without a commit and for garbage, where the log speaks of at most so many."""
    grace_seconds: float
    """The grace period that `deletes_at` follows from: the store does not hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenStore:
    """One store."""

    uri: str
    """The root, without secrets."""
    store_id: str
    """Random, equal in copies; "" where `store.json` cannot be read."""
    metrics: tuple[str, ...] = ()
    """The names of all metrics."""
    metric_modes: Mapping[str, Literal["min", "max"]] = field(default_factory=dict)
    """The way in which a metric is better, if its name tells."""
    checkpoints: tuple[SeenCheckpoint, ...] = ()
    """Every one that the log knows, oldest first."""
    changes: tuple[SeenChange, ...] = ()
    """Every record, oldest first."""
    resumes: tuple[SeenResume, ...] = ()
    """From where jobs with a fast tier went on, oldest first."""
    fast_directory: str = ""
    """The directory of fast checkpoints on this node; "" without one."""
    fast: tuple[SeenFast, ...] = ()
    """The fast checkpoints of that directory, in the order of the saves."""
    torn: tuple[TornAttempt, ...] = ()
    """Attempts without a commit."""
    sizes: tuple[SizePoint, ...] = ()
    """After every record that changed them."""
    usage: SeenUsage = SeenUsage()
    """The bytes that the store takes."""
    layouts: tuple[SeenLayout, ...] = ()
    """The layouts that trees refer to."""
    dtype_names: tuple[str, ...] = ()
    """The dtypes that layouts refer to."""
    trees: Mapping[str, SeenTree] = field(default_factory=dict)
    """By the number of the checkpoint."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """As those of a checkpoint, for the whole store: ls, prune, gc, verify, cp."""
    needs_options: tuple[str, ...] = ()
    """The names of the storage options that the commands need as well. Their values are left out."""
    bounds: Bounds
    """The limits, and what was left out."""
    health: Health
    """The state of a store that decides if a person has to do something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The document that `report --json` prints and the page shows."""

    version: int = VERSION
    """The version of this schema."""
    created_at: float
    """The time when it was gathered, in seconds since the epoch by this machine's clock; of a live one, of its last
    change."""
    command: str
    """The command line, without secrets."""
    live: bool
    """True if a server keeps it up to date."""
    stores: tuple[SeenStore, ...]
    """In the order of the command line."""

    def to_json(self) -> dict[str, Any]:
        """Convert it to dicts, lists and values that JSON has, as in the schema."""
        value: dict[str, Any] = _plain(self)
        return value


def finite(value: float) -> float | str:
    """Return a metric for the document: the name of a float that JSON lacks."""
    value = as_float(value)
    return value if math.isfinite(value) else float_name(value)


def as_float(value: float) -> float:
    """Convert a metric of a record to a float: it may be an integer that no float can hold, which becomes an
    infinity."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


_ATOMS = frozenset({str, int, float, bool, type(None)})
_NAMES: dict[type, tuple[str, ...]] = {}
"""The fields of the classes above: asking each of 10,000 objects for its own takes a second."""


def _plain(value: Any) -> Any:
    if type(value) in _ATOMS:
        return value
    if isinstance(value, tuple | list):
        return [item if type(item) in _ATOMS else _plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: item if type(item) in _ATOMS else _plain(item) for name, item in value.items()}
    names = _NAMES.get(type(value))
    if names is None:
        names = _NAMES[type(value)] = tuple(item.name for item in dataclasses.fields(value))
    return {name: _plain(getattr(value, name)) for name in names}
