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
    "claim", "commit", "remove", "prune", "rollback", "pin", "unpin", "restore", "resume", "noop", "unreadable"
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
    """Whether it holds files as they were given, or a state."""
    status: Status
    """One of "live", "trash", or "deleted" when the log has dropped it for good."""
    created_at: float
    """When it was saved, in seconds since the epoch by the leader's clock."""
    committed_at: float
    """When its record was written, by the same clock. With a fast tier that is when it came into the store."""
    save_number: int
    """The number of the save among those of its job, from 1; 0 where the record does not tell."""
    saves_before: int
    """How many saves of its job since the checkpoint before are not in the store: they failed or, with a fast tier, a
    newer one was there first or they were not due."""
    world_size: int
    """How many ranks wrote it."""
    size_bytes: int
    """Of all files, the manifest apart; those that lie in the directories of its bases too."""
    metrics: Mapping[str, float | str]
    """By name. A float that JSON lacks is "NaN", "Infinity" or "-Infinity"."""
    bases: tuple[int, ...] = ()
    """The numbers of the checkpoints whose files it refers to."""
    is_latest: bool = False
    """Whether it is the live one with the highest number."""
    is_pinned: bool = False
    """Whether it is kept until it is unpinned."""
    best_of: tuple[str, ...] = ()
    """The metrics by which no live checkpoint is better; only metrics whose name tells which way is better."""
    resumed_by: tuple[int, ...] = ()
    """The writer epochs of the jobs for which it was the latest when they claimed the store."""
    kept_because: tuple[str, ...] = ()
    """Why it is live, as far as the log says: a store does not hold the rule that its jobs were given."""
    removed_because: str = ""
    """Why it is live no more; "" where it is, or where the record gives no reason."""
    removed_at: float | None = None
    """When it went to the trash or, if it is deleted, when the log dropped it; by the clock of who did it."""
    deletes_at: float | None = None
    """When a prune may delete it from the trash: its removal and the grace period. None where it is not there."""
    held_by: tuple[str, ...] = ()
    """What keeps it from being deleted from the trash even after that."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Lines to copy into a shell, quoted for it, by name: those that apply of pin, unpin, restore, rollback, prune, cp,
    verify. None where the URI cannot stand in one, or names another checkpoint of the step."""
    timings: Mapping[str, Any] | None = None
    """What the manifest says of how long the save took, rank by rank; None without that, or beyond the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenChange:
    """One record of the log."""

    number: int
    """Of the record."""
    at: float
    """When it was written, in seconds since the epoch by the writer's clock."""
    kind: ChangeKind
    """What it did. "prune" drops checkpoints from the trash, "remove" and "rollback" put them there."""
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
    """Of the record that says so."""
    at: float
    """When it was written, by the writer's clock."""
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
    """When it was saved by the leader's clock or, without a certificate, when its newest file was written; None for an
    empty directory."""
    world_size: int | None
    """How many ranks wrote it; None without a certificate."""
    size_bytes: int
    """Of all its files on all nodes; without a certificate of those that are here."""
    here_bytes: int
    """Of the files that are here."""
    nodes: tuple[str, ...]
    """The nodes that had its files when it was complete."""
    metrics: Mapping[str, float | str]
    """As those of a checkpoint."""
    standing: Standing
    """What it is to the store: "durable" when the store has it, "superseded" when the store has a newer one, "void"
    when nobody may resume from it, "only-here" when the store has neither it nor a newer one, "unfinished" without a
    certificate, "damaged" when that cannot be read, "foreign" when it is of another store or another history."""
    reason: str
    """Why, in words."""
    number: int | None
    """Of the checkpoint in the store, where it is durable."""
    num_missing: int
    """How many files this node should have and does not."""
    is_usable: bool
    """Whether it is certified and whole here, and a job may resume from it. Digests are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TornAttempt:
    """An attempt that no record committed."""

    attempt: str
    """The name of its directory below `checkpoints/`."""
    step: int | None
    """What it was to save; None where the name does not say."""
    epoch: int | None
    """The writer epoch of the job that began it; None where the name does not say."""
    size_bytes: int
    """Of the files that are there."""
    modified_at: float | None
    """When the last of its files was written, by the storage's clock; None for an empty directory."""
    in_flight: bool
    """Whether the job that owns the store began it, so that it may still be committed."""
    why: str
    """What it is, in words, and what removes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePoint:
    """How large the store was after a record, by the sizes of its checkpoints: a file that several refer to counts for
    each of them."""

    at: float
    """When the record was written."""
    number: int
    """Of the record."""
    live_bytes: int
    """Of the live checkpoints."""
    trash_bytes: int
    """Of those in the trash."""
    freed_bytes: int
    """Of all that was dropped for good until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLayout:
    """The tensors of a state, shared by the checkpoints that have the same. The arrays are parallel."""

    keys: tuple[str, ...]
    """The key of each tensor, in the order of the index."""
    dtypes: tuple[int, ...]
    """Where the dtype stands in `dtype_names` of the store."""
    shapes: tuple[tuple[int, ...], ...]
    """The shape of the whole tensor."""
    size_bytes: tuple[int, ...]
    """Of the whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenTree:
    """The tensors of one checkpoint."""

    layout: int
    """Where its layout stands in `layouts` of the store."""
    digests: tuple[str | None, ...] | None
    """For each key "PLACE/CONTENT". Where the whole text is the same in two checkpoints, the tensor is. Where PLACE is
    the same and CONTENT is not, it has changed. Where PLACE differs, ranks had divided it in another way, so nothing is
    known; nor is it of None, a small tensor whose bytes are not read. None for all where the index has no digests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLease:
    """Somebody reads a checkpoint on a disk."""

    holder: str
    """The host and process, as the lease is named."""
    number: int
    """Of the checkpoint."""
    age_seconds: float
    """Since it was renewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether a person has to do something."""

    last_durable_at: float | None = None
    """When the latest live checkpoint was committed; None when nothing is live."""
    last_durable_step: int | None = None
    """The step of it."""
    last_fast_at: float | None = None
    """When the newest fast checkpoint on this node was saved from which a job could resume; None where there is none,
    and where nobody asked for those on this node."""
    last_fast_step: int | None = None
    """The step of it."""
    not_durable_since: float | None = None
    """When the oldest fast checkpoint on this node was saved that is newer than what the store has; None where there is
    none."""
    gaps: tuple[str, ...] = ()
    """What is wrong with the records of the log, or with their order."""
    garbage_bytes: int = 0
    """Of attempts that a garbage collection removes."""
    garbage_files: int = 0
    """Their files, and unfinished uploads and files that killed writers left."""
    stored_bytes: int | None = None
    """Of all files that lie below `checkpoints/` now; None where they were not listed."""
    leases: tuple[SeenLease, ...] = ()
    """Who reads now."""
    trouble: tuple[str, ...] = ()
    """What could not be read, and is therefore missing here, and what is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What was left out so that a large store stays quick. Checkpoints and records are never left out."""

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
    """Which way a metric is better, where its name tells."""
    checkpoints: tuple[SeenCheckpoint, ...] = ()
    """Every one that the log knows, oldest first."""
    changes: tuple[SeenChange, ...] = ()
    """Every record, oldest first."""
    resumes: tuple[SeenResume, ...] = ()
    """From where jobs with a fast tier went on, oldest first."""
    fast_directory: str = ""
    """Where fast checkpoints on this node were looked for; "" where nobody asked for those."""
    fast: tuple[SeenFast, ...] = ()
    """What is there, in the order of the saves."""
    torn: tuple[TornAttempt, ...] = ()
    """Attempts without a commit."""
    sizes: tuple[SizePoint, ...] = ()
    """After every record that changed them."""
    layouts: tuple[SeenLayout, ...] = ()
    """What trees refer to."""
    dtype_names: tuple[str, ...] = ()
    """What layouts refer to."""
    trees: Mapping[str, SeenTree] = field(default_factory=dict)
    """By the number of the checkpoint."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """As those of a checkpoint, for the whole store: ls, prune, gc, verify, cp."""
    needs_options: tuple[str, ...] = ()
    """The names of the storage options that the commands need as well. Their values are not told."""
    bounds: Bounds
    """What was left out."""
    health: Health
    """Whether a person has to do something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What `report --json` prints, and what the page shows."""

    version: int = VERSION
    """Of this schema."""
    created_at: float
    """When it was gathered, in seconds since the epoch by this machine's clock; of a live one, when it last changed."""
    command: str
    """What was called, without secrets."""
    live: bool
    """Whether a server keeps it up to date."""
    stores: tuple[SeenStore, ...]
    """In the order of the command line."""

    def to_json(self) -> dict[str, Any]:
        """As in the schema: dicts, lists and values that JSON has."""
        value: dict[str, Any] = _plain(self)
        return value


def finite(value: float) -> float | str:
    """A metric as the document has it: the name of it where JSON has no such float."""
    value = as_float(value)
    return value if math.isfinite(value) else float_name(value)


def as_float(value: float) -> float:
    """A metric of a record as a float: it may be an integer that no float can hold, which becomes an infinity."""
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
