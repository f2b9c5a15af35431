"""Load a state: the same checkpoint on all ranks, only the bytes that this rank needs, straight into its tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from ckptstore.errors import (
    CacheError,
    CheckpointThinned,
    InvalidInput,
    StorageFull,
    StoreMissing,
)
from ckptstore.format.layout import DCP_METADATA_NAME
from ckptstore.format.manifest import Manifest
from ckptstore.group import Group
from ckptstore.job import Job
from ckptstore.loading.checkpoint_files import CheckpointFiles, files_of
from ckptstore.loading.index_read import IndexReader
from ckptstore.loading.load_report import Dtype, LoadReport, ReadOnce
from ckptstore.loading.load_watch import LoadWatch, watched
from ckptstore.loading.newest import Candidates, Order, first_usable, newest_first, told_resumed
from ckptstore.loading.story import NodeCopies
from ckptstore.log.identity import read_identity
from ckptstore.state.index.outline import INDEX_NAME
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.live.apply import Loading, begin_load
from ckptstore.state.live.flatten import Kind, check_state, is_loader, takes_all_ranks, units_of
from ckptstore.state.live.matching import Mismatch, Saved, Target
from ckptstore.state.live.patterns import fitting, patterns_of
from ckptstore.state.read.settle import unsettled
from ckptstore.state.read.shared_reads import SharedSteps
from ckptstore.state.read.stored import PerRank, StoredState
from ckptstore.storage.base import Disk
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.traffic import counting
from ckptstore.transfer import RangeRead, Transfer

if TYPE_CHECKING:
    from ckptstore.stock.stock_read import StockState

logger = logging.getLogger("ckptstore")

_SPARE_BYTES = 1 << 20
"""The bytes by which plain values and names may let a file of a rank grow from save to save."""
_MOST_SHOWN = 10
"""The most keys in a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The options of a load of a state; see `CheckpointStore.load`."""

    include: str | Sequence[str] | None = None
    strict: bool = True
    device: Any = None
    read_once: ReadOnce = "rank"
    per_rank: PerRank = "error"
    allow_pickle: bool = False
    dtype: Dtype = "same"

    def __post_init__(self) -> None:
        object.__setattr__(self, "include", patterns_of(self.include))
        if self.dtype not in get_args(Dtype):
            raise InvalidInput(f"dtype is {self.dtype!r}, it is one of {', '.join(get_args(Dtype))}")
        if self.read_once not in get_args(ReadOnce):
            raise InvalidInput(f"read_once is {self.read_once!r}, it is one of {', '.join(get_args(ReadOnce))}")


class Loaded(NamedTuple):
    """The result of `load_newest`."""

    files: CheckpointFiles
    report: LoadReport
    sizes_bytes: tuple[int, ...]
    """The likely sizes of the files that this rank will write in the next save."""


def load_newest(
    job: Job, state: Mapping[str, Any], options: LoadOptions, *, claim: bool, order: Order = newest_first
) -> Loaded | None:
    """Load the newest whole checkpoint, the same on all ranks; None in an empty store. Collective.

    `claim` claims the store first. `order` gives the order in which checkpoints are tried: all ranks move on from a
    damaged one to the next. Raises StoreMissing if there is no store and none is claimed; NoUsableCheckpoint if no
    checkpoint is left (the state may hold anything then); StateMismatch for one that does not fit.
    """
    group = job.group
    offered: Candidates | None = None
    with watched(group.rank, job.storage.uri) as load:
        if claim and job.tier is not None:
            offered = job.tier.candidates(job, order, is_loaded=True)
        passed_over = [*offered.passed_over] if offered is not None else []
        found = first_usable(
            offered.files if offered is not None else _candidates(job, load, claim=claim, order=order),
            partial(_load, group, state, options, load),
            passed_over,
        )
        if offered is not None:
            offered.resumed(None if found is None else found[0])
    if found is None:
        return None
    files, (report, manifest) = found
    report = replace(report, passed_over=tuple(passed_over))
    if claim:
        if report.left_out and options.include is None and group.rank == 0:
            logger.warning(
                "step %d has %s besides, which the resumed state does not name: not loaded, and not in the next save",
                files.step,
                ", ".join(map(repr, report.left_out)),
            )
        told_resumed(job, files)
    return Loaded(files, report, _likely_sizes_bytes(manifest, group))


def _likely_sizes_bytes(manifest: Manifest, group: Group) -> tuple[int, ...]:
    """Estimate the sizes of this rank's files in the next save, if it saves the state that was loaded."""
    files = [receipt for receipt in manifest.files if receipt.name.endswith(".distcp")]
    own = [receipt.size_bytes for receipt in files if receipt.rank == group.rank]
    if group.world_size == manifest.world_size:
        return tuple(size_bytes + _SPARE_BYTES for size_bytes in own)
    share = sum(receipt.size_bytes for receipt in files) // group.world_size // max(1, len(own))
    return (share + _SPARE_BYTES,) * max(1, len(own))


def _candidates(job: Job, load: LoadWatch, *, claim: bool, order: Order) -> list[CheckpointFiles]:
    """Return the live checkpoints in the order to try them, as the leader sees them. Collective."""

    def find() -> Any:
        newest = job.claim(job.log.newest() if job.epoch is not None else None) if claim else job.log.newest()
        if newest is None and read_identity(job.storage) is None:
            raise StoreMissing(
                f"There is no store at {job.storage.uri}, so there is nothing to load",
                hint="`resume` creates one where there is none; look for a typo in the URI",
            )
        records = job.log.annotated(job.log.readable(order(newest.state.in_order()) if newest else ()), newest)
        if claim and not (newest and newest.state.live):
            job.log.confirm()
        claimed = job.claimed() if claim else None
        found = [record.to_wire() for record in records]
        return {"claimed": claimed, "records": found, **load.told()}

    with job.group.meeting("resume with a state" if claim else "find") as meeting:
        told = meeting.tell(find)
    load.hear(told)
    if told["claimed"] is not None:
        job.join_claim(told["claimed"])
    return [files_of(job, job.log.from_wire(record)) for record in told["records"]]


def load_state(group: Group, files: CheckpointFiles, state: Mapping[str, Any], options: LoadOptions) -> LoadReport:
    """Load one checkpoint. Collective in `group`; an error of any rank is raised on all ranks."""
    with watched(group.rank, files.storage.uri) as load:
        return _load(group, state, options, load, files)[0]


def _load(
    group: Group, state: Mapping[str, Any], options: LoadOptions, load: LoadWatch, files: CheckpointFiles
) -> tuple[LoadReport, Manifest]:
    load.enter("open")
    if files.record is not None:
        load.found(files.record.entry.step, files.record)
    with ExitStack() as stack:
        reader = _Reader(files, options, stack)
        stored, saved, manifest = _open(group, files, reader, state, options, load)
        loading, mismatch = _match(group, stored, saved, state, options)
        load.enter("read")
        cast, (apart, others) = loading.casts, loading.divided()
        try:
            if options.dtype == "state":  # nothing is written before all that is cast was found to fit
                _fill(group, stored, apart, options, then=loading.check_casts)
            _fill(group, stored, others, options)
        except BaseException:
            loading.abandon()
            raise
        load.enter("apply")
        with group.meeting("finish the load") as meeting:
            all_ranks = stored.states_of_all_ranks() if isinstance(stored, StoredState) else {}
            every = meeting.gather([*loading.finish(stored.fill, all_ranks)])
        _warn_of_writes(every)
    made = loading.materialised
    report = LoadReport(
        missing=tuple(sorted(mismatch.missing)),
        unexpected=tuple(sorted(mismatch.unexpected)),
        left_out=tuple(sorted(mismatch.left_out)),
        remade=tuple(key for item in made for key in item.remade),
        left_on_meta=tuple(key for item in made for key in item.left),
        cast=cast,
    )
    return report, manifest


def _fill(
    group: Group,
    stored: StoredState | StockState,
    targets: Mapping[str, Target],
    options: LoadOptions,
    *,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Read tensors into memory, and do what follows. Collective."""
    if options.read_once == "job":
        stored.fill(targets, run=SharedSteps(group))
        with group.meeting("look at the casts"):
            then()
    else:
        with group.meeting("read"):
            stored.fill(targets)
            then()


def _warn_of_writes(every: Sequence[tuple[dict[str, str], dict[str, str]]]) -> None:
    """Warn, on the leader, of what the code of objects wrote over while they were loaded, on any rank."""
    for number, what in enumerate(
        (
            "code of an object of the state wrote over what was loaded, and the saved values were put back",
            "the load leaves these other than they were saved",
        )
    ):
        found = {key: words for part in reversed(every) for key, words in part[number].items()}
        if found:
            shown = ", ".join(f"{key} ({words})" for key, words in sorted(found.items())[:_MOST_SHOWN])
            more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
            logger.warning("%s: %s%s", what, shown, more)


def _refuse_thinned(manifest: Manifest, state: Mapping[str, Any], options: LoadOptions) -> None:
    """Raise CheckpointThinned if the load would take anything that may have been dropped."""
    thinned = manifest.thinned
    if thinned is None or not options.strict:
        return
    if thinned.meets([f"{name}.*" for name in state] if options.include is None else options.include):
        raise CheckpointThinned(
            f"step {manifest.step} {thinned}",
            step=manifest.step,
            hint='Load the rest with include="model.*", say, or with strict=False; `restore` brings the whole one '
            "back as long as it is in the trash",
        )


class _Reader:
    """A reader of ranges from the nearest place: copies of whole files on this node, or the storage."""

    def __init__(self, files: CheckpointFiles, options: LoadOptions, stack: ExitStack) -> None:
        self._files = files
        self._stack = stack
        self._is_near = options.read_once == "node" and not isinstance(files.storage, Disk)
        self._copies: tuple[NodeCopies, Transfer] | None = None
        """The copies on this node, and the transfer that reads them."""
        self._elsewhere: dict[str, str] = {}
        """The keys of files that lie in the directories of other checkpoints, by the key that they would have in this
        one."""
        self._sizes_bytes: Mapping[str, int] = {}
        self._index: IndexReader
        """Set by `open`."""

    def hold(self) -> None:
        """Protect the files from deletion until the load is over; see `CheckpointFiles.held`."""
        self._stack.enter_context(self._files.held())

    def open(self, manifest: Manifest, *, share: bool, rank: int | None = None) -> TensorIndex:
        """Return the index. With `share`, the processes of the node share one download of it.

        A large index has only the parts with plain values that `IndexReader.opened` selects for `rank`.
        """
        files = self._files
        if share and self._copies is None and not isinstance(files.storage, Disk):
            copies = NodeCopies(files, manifest, self._stack)
            config = files.config
            disk = LocalStorage(copies.root, durable=False)
            local = Transfer(disk, config=config.transfer, retry=config.retry)
            self._stack.callback(local.close)
            self._copies = copies, local
        self._elsewhere = {
            files.prefix + receipt.name: files.key_of(receipt) for receipt in manifest.files if receipt.attempt
        }
        if manifest.kind != "state" or not has_state(manifest):
            raise InvalidInput(
                f"Step {manifest.step} is a directory checkpoint, and has no state to load",
                hint="Use as_directory() or to_directory()",
            )
        self._sizes_bytes = {item.name: item.size_bytes for item in manifest.files}
        self._index = IndexReader.of(manifest, self._read_index, files.prefix)
        return self._checked(self._index.opened(rank=rank))

    def _read_index(self, ranges: Sequence[RangeRead]) -> None:
        """Read ranges of the index, from this node's copy of its main file if there is one."""
        is_main = bool(ranges) and ranges[0].key == f"{self._files.prefix}{INDEX_NAME}"
        if not (is_main and self._is_read_near(ranges)):
            self._files.read(ranges)

    def _checked(self, index: TensorIndex) -> TensorIndex:
        index.check_files(self._sizes_bytes)
        return index

    def more(self, ranks: Iterable[int]) -> TensorIndex:
        """See `StoredState.more`."""
        return self._checked(self._index.with_parts(ranks))

    def read(self, ranges: Sequence[RangeRead]) -> None:
        """See `Transfer.read`."""
        if self._is_near and self._is_read_near(ranges):
            return
        if self._elsewhere:
            ranges = [replace(item, key=self._elsewhere.get(item.key, item.key)) for item in ranges]
        self._files.read(ranges)

    def _is_read_near(self, ranges: Sequence[RangeRead]) -> bool:
        """Read from the copies on this node. Return False if there are none, or they cannot be used from now on: the
        storage decides what is damaged."""
        if self._copies is None:
            return False
        copies, local = self._copies
        try:
            names = {item.key: copies.path(item.key.removeprefix(self._files.prefix)) for item in ranges}
            keys = {key: path.relative_to(copies.root).as_posix() for key, path in names.items()}
            with copies.reading(), counting():  # the download was counted already; a read of the copy is no traffic
                local.read([replace(item, key=keys[item.key]) for item in ranges])
        except (CacheError, StorageFull) as error:
            logger.warning("the rest of this load passes the node cache by, and reads the storage: %s", error)
            self._copies = None
            return False
        return True


def has_state(manifest: Manifest) -> bool:
    """Return True if the checkpoint has the index of a state."""
    return INDEX_NAME in manifest.by_name


def is_stock(manifest: Manifest) -> bool:
    """Return True if the checkpoint is a directory that torch's DCP wrote on its own."""
    return not has_state(manifest) and DCP_METADATA_NAME in manifest.by_name and not manifest.store_id


def _open_stock(files: CheckpointFiles, reader: _Reader, manifest: Manifest, options: LoadOptions) -> StockState:
    """Open a state that torch's DCP wrote. No code in it is run."""
    from ckptstore.stock.stock_pickles import load_metadata
    from ckptstore.stock.stock_read import StockState

    metadata = load_metadata(files.read_file(manifest.by_name[DCP_METADATA_NAME]))
    return StockState(
        metadata,
        reader.read,
        files.prefix,
        {receipt.name: receipt.size_bytes for receipt in manifest.files},
        allow_pickle=options.allow_pickle,
        buffer_bytes=files.config.transfer.memory_budget_bytes // 2,
    )


def _open(
    group: Group,
    files: CheckpointFiles,
    reader: _Reader,
    state: Mapping[str, Any],
    options: LoadOptions,
    load: LoadWatch,
) -> tuple[StoredState | StockState, Saved, Manifest]:
    """Open the stored state, and return it as this rank sees it, with its keys and values and the manifest.
    Collective."""
    included = fitting(options.include)
    names: set[str] = set()

    def asked(key: str) -> bool:
        return included(key) and any(key == name or key.startswith(f"{name}.") for name in names)

    stored: StoredState | StockState
    with group.meeting("open") as meeting:
        check_state(state)
        names.update(state)
        if group.rank == 0:  # one lease for all ranks: this one leaves last
            reader.hold()
        manifest, _ = files.read_manifest()
        load.found(manifest.step, files.record)
        _refuse_thinned(manifest, state, options)
        if is_stock(manifest):
            stored = _open_stock(files, reader, manifest, options)
            saved = stored.saved(included)
        else:
            share = group.world_size > 1 or options.read_once == "node"
            is_same_size = 1 < group.world_size == manifest.world_size
            stored = StoredState(
                reader.open(manifest, share=share, rank=group.rank if is_same_size else None),
                reader.read,
                files.prefix,
                rank=group.rank,
                world_size=group.world_size,
                per_rank=options.per_rank,
                allow_pickle=options.allow_pickle,
                buffer_bytes=files.config.transfer.memory_budget_bytes // 2,
                asked=asked,
                loaders=_loaders_in(state, included) if group.world_size != manifest.world_size else {},
                more=reader.more,
            )
            saved = _by_parameter(stored.saved(), state)
        load.hear(meeting.tell(load.told))
    return stored, saved, manifest


def _by_parameter(saved: Saved, state: Mapping[str, Any]) -> Saved:
    """Return the same, with the settings of optimizers under the names of parameters: a `StoreWriter` got those of
    torch's `get_state_dict` by group, each with the names in it."""
    heads = tuple(f"{unit.key}.param_groups." for unit in units_of(state) if unit.kind is Kind.OPTIMIZER)
    grouped = {key: value for key, value in saved.values.items() if key.startswith(heads)} if heads else {}
    if not any(key.endswith(".params") for key in grouped):
        return saved
    from ckptstore.stock.stock_read import by_parameter

    others = {key: value for key, value in saved.values.items() if key not in grouped}
    return replace(saved, values={**others, **by_parameter(grouped)})


def _match(
    group: Group,
    stored: StoredState | StockState,
    saved: Saved,
    state: Mapping[str, Any],
    options: LoadOptions,
) -> tuple[Loading, Mismatch]:
    """Match the stored state to the live one, and agree on the keys that do not fit. Collective.

    Reads data only where several keys are for the same memory, to compare them.
    """
    with ExitStack() as undo:
        with group.meeting("match") as meeting:
            loading = begin_load(
                state, saved, include=options.include, device=options.device, casts=options.dtype == "state"
            )
            undo.callback(loading.abandon)
            loading.mismatch.differing.update(unsettled(loading.conflicts, stored.fill_boxes))
            offers = meeting.gather((loading.mismatch.to_json(), options.strict, options.read_once))
            joined = meeting.tell(lambda: _judged(offers))
        undo.pop_all()
    return loading, Mismatch.from_json(joined)


def matched(
    group: Group, files: CheckpointFiles, state: Mapping[str, Any], options: LoadOptions, stack: ExitStack
) -> tuple[Loading, Saved]:
    """Match a checkpoint to a state as a load does, without the comparison of tied tensors, and without reading any
    tensor of its own. Nothing is filled; the caller has to abandon the load. `stack` holds the files."""
    with watched(group.rank, files.storage.uri) as load:
        _, saved, _ = _open(group, files, _Reader(files, options, stack), state, options, load)
        casts = options.dtype == "state"
        return begin_load(state, saved, include=options.include, device=options.device, casts=casts), saved


def _judged(offers: list[Any]) -> dict[str, Any]:
    """Return the keys that do not fit, over all ranks, or raise as `Mismatch.check` does if any rank is strict. Warn of
    names of the state that the load leaves out, and tell of modules that take what their `state_dict()` returned.
    Raises InvalidInput for ranks that read in different ways: some would wait for bytes that nobody sends."""
    mismatches, stricts, ways = zip(*offers, strict=True)
    for rank, way in enumerate(ways):
        if way != ways[0]:
            raise InvalidInput(f"rank {rank} loads with read_once={way!r}, rank 0 with {ways[0]!r}", ranks=(0, rank))
    joined = Mismatch.joined(map(Mismatch.from_json, mismatches))
    joined.check(strict=any(stricts))
    for name in sorted(joined.from_dicts):
        logger.info("%r was saved as what state_dict() returned, and is loaded into the module itself", name)
    for name in sorted(joined.absent):
        logger.warning("the load leaves %r of the state as it is: %s", name, joined.absence(name))
    return joined.to_json()


def _loaders_in(state: Mapping[str, Any], included: Callable[[str], bool]) -> dict[str, bool]:
    """Return the value of `StoredState.loaders` for a state."""
    units = [unit for unit in units_of(state) if unit.kind is Kind.STATEFUL and included(unit.key)]
    found = {unit.key: takes_all_ranks(unit.item) for unit in units}
    return {unit.key: found[unit.key] for unit in units if found[unit.key] or is_loader(unit.item)}


def values_of_ranks(files: CheckpointFiles, key: str) -> list[Any]:
    """Return the plain value of every rank that had one of its own; see `Checkpoint.per_rank`."""
    with files.held():
        return open_alone(files).value_of_each_rank(key)


def open_alone(
    files: CheckpointFiles, *, per_rank: PerRank = "first", wanted: Callable[[str], bool] = lambda key: True
) -> StoredState:
    """Open the stored state for a process on its own. Of values that differ between ranks it has the lowest rank's,
    unless `per_rank` says otherwise for those that are wanted."""
    reader = _Reader(files, LoadOptions(), ExitStack())
    index = reader.open(files.read_manifest()[0], share=False)
    return StoredState(
        index,
        reader.read,
        files.prefix,
        rank=0,
        world_size=1,
        per_rank=per_rank,
        asked=wanted,
        more=reader.more,
    )


def open_any(
    files: CheckpointFiles, *, per_rank: PerRank = "first", wanted: Callable[[str], bool] = lambda key: True
) -> StoredState | StockState:
    """Open as `open_alone` does, or a directory that torch's DCP wrote on its own. Raises InvalidInput for a checkpoint
    without a state."""
    manifest = files.read_manifest()[0]
    if is_stock(manifest):
        options = LoadOptions()
        return _open_stock(files, _Reader(files, options, ExitStack()), manifest, options)
    return open_alone(files, per_rank=per_rank, wanted=wanted)
