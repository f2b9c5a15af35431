"""Gathering what a report says of a store: from its log, the newest manifests, and the indexes of a few checkpoints.

What never changes is read once: records, manifests, indexes. So who looks again pays for what is new. Nothing is
written to the store, no lease either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptstore.catalogue import job_of
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    CheckpointDamaged,
    CkptstoreError,
    InvalidInput,
    StorageError,
    StoreMissing,
    UnsupportedVersion,
)
from ckptstore.format.changes import RESUMED_FROM, StoreState
from ckptstore.format.layout import parse_record_key
from ckptstore.loading.checkpoint_files import files_of
from ckptstore.log.identity import KEPT_BY_CKPTSTORE, StoreIdentity, read_store_json
from ckptstore.retention import Candidate, Mode, mode_of, ranked
from ckptstore.runtime.extras import not_installed
from ckptstore.runtime.parallel import mapped
from ckptstore.store import CheckpointStore
from ckptstore.tools.report.condition import LISTED_FILES, Condition, look_around
from ckptstore.tools.report.document import Bounds, Health, SeenCheckpoint, SeenStore, as_float, finite
from ckptstore.tools.report.history import History, Life
from ckptstore.tools.report.lines import Lines, can_be_named
from ckptstore.tools.report.node import SeenNode, look_at_node
from ckptstore.tools.report.trees import Forest, ReadTree, read_tree

NUM_TIMINGS = 200
"""The number of newest live checkpoints whose manifest is read."""
NUM_TREES = 8
TREE_TENSORS = 400_000
"""At 13 characters for each digest, what a page takes without becoming slow."""
MOST_TOLD = 20
"""The most checkpoints with trouble that are named."""
_NUM_THREADS = 32
_BATCH_RECORDS = 1000

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(slots=True)
class Sighting:
    """One store, looked at once or again and again."""

    store: CheckpointStore
    num_trees: int = NUM_TREES
    needs_options: Sequence[str] = ()
    """The names of the storage options with which the store was opened."""
    fast_directory: str = ""
    """The directory of fast checkpoints on this node; "" without one."""
    price: float | None = None
    """The price of a TB for a month."""
    rest_seconds: float = 0.0
    """The least pause between two listings of the files; it is at least 20 times as long as a listing took."""
    _history: History = field(default_factory=History)
    _identity: StoreIdentity | None = None
    _saves: dict[int, Mapping[str, Any] | None] = field(default_factory=dict)
    """By number, the timings and the provenance in the manifest."""
    _trees: dict[int, ReadTree | None] = field(default_factory=dict)
    _damage: dict[int, str] = field(default_factory=dict)
    """By number, why a checkpoint could not be looked into."""
    _failed: set[int] = field(default_factory=set)
    """Those of them that the next look tries again."""
    _condition: Condition = field(default_factory=Condition)
    _listed_until: float = 0.0

    def look(self) -> SeenStore:
        """Return what the store holds now.

        Raises StoreMissing where there is none, or another one than at the first look, InvalidInput where Ray keeps it,
        StorageError when its log cannot be read. What else cannot be read, or is damaged, is trouble in what is
        returned.
        """
        job = job_of(self.store)
        identity = _own_identity(read_store_json(job.storage), self.store.uri)
        self._identity = self._identity or identity
        if identity.store_id != self._identity.store_id:
            raise StoreMissing(f"Another store is at {self.store.uri} now", hint="Start again to see that one")
        self._read_log()
        for number in self._failed:
            self._damage.pop(number, None)
            self._saves.pop(number, None)
            self._trees.pop(number, None)
        self._failed.clear()
        history = self._history
        state = history.settle()
        live = [life for life in history.in_order() if life.status == "live"]
        self._look_around()
        modes, best = _best(live)
        self._read_manifests([life.number for life in live[-NUM_TIMINGS:]])
        forest = self._read_trees(_worth_a_tree(live, state, best))
        lines = Lines(self.store.uri, state, history.lives)
        node = self._look_at_node(self._identity.store_id)
        grace_seconds = job.config.grace_seconds
        return SeenStore(
            uri=self.store.uri,
            store_id=self._identity.store_id,
            metrics=tuple(
                sorted(
                    {name for life in history.lives.values() for name in life.entry.metrics}
                    | {name for one in node.fast for name in one.metrics}
                )
            ),
            metric_modes=modes,
            checkpoints=tuple(
                self._seen(life, state, best, lines, grace_seconds=grace_seconds) for life in history.in_order()
            ),
            changes=tuple(history.changes),
            resumes=tuple(history.resumes),
            fast_directory=self.fast_directory,
            fast=node.fast,
            torn=tuple(self._condition.torn),
            sizes=tuple(history.sizes),
            usage=history.usage(self.price),
            layouts=tuple(forest.layouts),
            dtype_names=tuple(forest.dtype_names),
            trees=forest.trees,
            commands=lines.of_store(),
            needs_options=tuple(self.needs_options),
            bounds=_bounds(self.num_trees, grace_seconds),
            health=self._health(live[-1] if live else None, node),
        )

    def _read_log(self) -> None:
        """Add the records that are new to the history."""
        log, history = job_of(self.store).log, self._history
        try:
            newest = log.newest()
            top = newest.number if newest else 0
        except (CheckpointDamaged, UnsupportedVersion) as error:
            top = parse_record_key(error.file or "") or 0
            if not top:
                raise
        for start in range(len(history.changes) + 1, top + 1, _BATCH_RECORDS):
            for found in log.found(range(start, min(start + _BATCH_RECORDS, top + 1))):
                history.add(found)

    def _look_around(self) -> None:
        newest, began = self._history.newest, time.monotonic()
        if newest is None or began < self._listed_until:
            return
        self._condition = look_around(job_of(self.store), newest, self._history.lives)
        ended = time.monotonic()
        self._listed_until = ended + max(self.rest_seconds, 20 * (ended - began))

    def _look_at_node(self, store_id: str) -> SeenNode:
        if not self.fast_directory:
            return SeenNode()
        return look_at_node(job_of(self.store), self.fast_directory, store_id, newest=self._history.newest)

    def _read_manifests(self, numbers: Sequence[int]) -> None:
        def read(number: int) -> Mapping[str, Any] | None:
            checkpoint = self._checkpoint(number)
            found = {"timings": checkpoint.timings, "provenance": checkpoint.provenance}
            return {name: value.to_json() for name, value in found.items() if value is not None}

        self._keep(self._saves, numbers, read)

    def _read_trees(self, numbers: Iterable[int]) -> Forest:
        """Return the trees of the first of these, as many as the bounds allow."""
        chosen = list(numbers)[: self.num_trees]
        self._keep(self._trees, chosen, lambda number: read_tree(self._checkpoint(number)))
        forest, left = Forest(), TREE_TENSORS
        for number in chosen:
            tree = self._trees.get(number)
            if tree is not None and len(tree.keys) <= left:
                left -= len(tree.keys)
                forest.add(number, tree)
        return forest

    def _keep(
        self, known: dict[int, Result | None], numbers: Sequence[int], read: Callable[[int], Result | None]
    ) -> None:
        """Read what is not known yet of these checkpoints, in parallel, and forget others. What is damaged is not read
        again at every look; what the storage failed to give is."""

        def tried(number: int) -> Result | None:
            try:
                return read(number)
            except (CkptstoreError, ModuleNotFoundError) as error:
                reported = error if isinstance(error, CkptstoreError) else not_installed(error)
                if reported is None:
                    raise
                self._damage[number] = reported.message
                if isinstance(reported, StorageError):
                    self._failed.add(number)
                return None

        for number in known.keys() - set(numbers):
            del known[number]
            self._damage.pop(number, None)
        missing = [number for number in numbers if number not in known and number not in self._damage]
        known.update(zip(missing, _in_parallel(tried, missing), strict=True))

    def _checkpoint(self, number: int) -> Checkpoint:
        job = job_of(self.store)
        return Checkpoint(files_of(job, job.log.records([number])[0]))

    def _seen(
        self, life: Life, state: StoreState, best: Mapping[str, int], lines: Lines, *, grace_seconds: float
    ) -> SeenCheckpoint:
        entry, number = life.entry, life.number
        best_of = tuple(metric for metric, found in best.items() if found == number)
        in_trash = life.status == "trash" and life.removed_at is not None
        return SeenCheckpoint(
            number=number,
            step=entry.step,
            epoch=entry.epoch,
            attempt=entry.attempt,
            kind=entry.kind,
            status=life.status,
            created_at=entry.created_at,
            committed_at=life.committed_at,
            save_number=entry.save_number,
            saves_before=life.saves_before,
            world_size=entry.world_size,
            size_bytes=entry.size_bytes,
            metrics={name: finite(value) for name, value in entry.metrics.items()},
            bases=tuple(entry.bases),
            dropped=entry.thinned.dropped if entry.thinned else (),
            whole_bytes=entry.thinned.size_bytes if entry.thinned else None,
            is_latest=number == state.latest,
            is_pinned=number in state.pinned,
            best_of=best_of,
            resumed_by=tuple(life.resumed_by),
            kept_because=_kept_because(number, state, best_of) if life.status == "live" else (),
            removed_because=life.removed_because,
            removed_at=life.removed_at,
            deletes_at=life.removed_at + grace_seconds if in_trash and life.removed_at is not None else None,
            held_by=_held_by(number, state) if in_trash else (),
            commands=lines.of_checkpoint(life),
            timings=(self._saves.get(number) or {}).get("timings"),
            provenance=(self._saves.get(number) or {}).get("provenance"),
        )

    def _health(self, latest: Life | None, node: SeenNode) -> Health:
        history, condition = self._history, self._condition
        steps = {number: history.lives[number].entry.step for number in self._damage if number in history.lives}
        damaged = [
            f"step {steps[number]}, number {number}: {text}"
            for number, text in sorted(self._damage.items())[:MOST_TOLD]
        ]
        if len(self._damage) > MOST_TOLD:
            damaged.append(f"{len(self._damage) - MOST_TOLD} more checkpoints have such trouble")
        trouble = [*damaged, *condition.trouble, *node.trouble]
        if not can_be_named(self.store.uri):
            trouble.append("there are no lines to copy: a shell elsewhere could not be given this URI")
        committed_at = None
        if latest is not None:
            committed_at = latest.entry.committed_at or history.changes[latest.number - 1].at
        return Health(
            last_durable_at=committed_at,
            last_durable_step=latest.entry.step if latest else None,
            last_fast_at=node.newest.created_at if node.newest else None,
            last_fast_step=node.newest.step if node.newest else None,
            not_durable_since=node.not_durable_since,
            gaps=tuple(history.problems if history.newest else job_of(self.store).log.verify_chain()),
            garbage_bytes=condition.garbage_bytes,
            garbage_files=condition.garbage_files,
            stored_bytes=condition.stored_bytes,
            leases=tuple(condition.leases),
            trouble=tuple(trouble),
        )


def unseen(uri: str, error: CkptstoreError, *, num_trees: int = NUM_TREES) -> SeenStore:
    """Return a store of which nothing could be read: the error is its trouble."""
    bounds = _bounds(num_trees, 0.0)
    return SeenStore(uri=uri, store_id="", bounds=bounds, health=Health(trouble=(f"{error.code}: {error.message}",)))


def _bounds(num_trees: int, grace_seconds: float) -> Bounds:
    return Bounds(
        timings=NUM_TIMINGS,
        trees=num_trees,
        tree_tensors=TREE_TENSORS,
        listed_files=LISTED_FILES,
        grace_seconds=grace_seconds,
    )


def _own_identity(found: StoreIdentity | None, uri: str) -> StoreIdentity:
    """Return the identity of a store that has a log of its own."""
    if found is None:
        raise StoreMissing(f"There is no store at {uri}")
    if found.kept_by != KEPT_BY_CKPTSTORE:
        raise InvalidInput(
            f"The checkpoints at {uri} are kept by {found.kept_by}, and its rules: there is no log to report from",
            hint="`ckptstore show` tells of one checkpoint directory",
        )
    return found


def _best(live: Sequence[Life]) -> tuple[dict[str, Mode], dict[str, int]]:
    """Return the way in which metrics are better, if their names tell, and the number of the best live checkpoint."""
    candidates = [
        Candidate(
            number=life.number,
            step=life.entry.step,
            committed_at=0.0,
            metrics={name: as_float(value) for name, value in life.entry.metrics.items()},
        )
        for life in live
    ]
    modes: dict[str, Mode] = {}
    best: dict[str, int] = {}
    for metric in sorted({name for life in live for name in life.entry.metrics}):
        try:
            modes[metric] = mode_of(metric, None)
        except InvalidInput:  # nobody could say which one is best
            continue
        if found := ranked(candidates, metric, modes[metric]):
            best[metric] = found[0].number
    return modes, best


def _worth_a_tree(live: Sequence[Life], state: StoreState, best: Mapping[str, int]) -> list[int]:
    """Return live checkpoints with a state, the most interesting first."""
    newest_first = [life.number for life in reversed(live) if life.entry.kind == "state"]
    known = set(newest_first)
    pinned = [number for number in sorted(state.pinned, reverse=True) if number in known]
    first = [number for number in best.values() if number in known]
    return list(dict.fromkeys([*newest_first[:1], *first, *pinned, *newest_first]))


def _kept_because(number: int, state: StoreState, best_of: Sequence[str]) -> tuple[str, ...]:
    """Return the reasons that the log knows. The policy of a job is not in it."""
    reasons = ["the latest"] if number == state.latest else []
    reasons += ["pinned"] if number in state.pinned else []
    reasons += [RESUMED_FROM] if number == state.resume_from else []
    reasons += [f"the best by {metric}" for metric in best_of]
    users = state.bases.get(number, ())
    reasons += [f"{len(users)} checkpoints refer to its files"] if users else []
    return tuple(reasons) or ("no retention has dropped it",)


def _held_by(number: int, state: StoreState) -> tuple[str, ...]:
    users = state.bases.get(number, ())
    reasons = [RESUMED_FROM] if number == state.resume_from else []
    return (*reasons, *([f"{len(users)} checkpoints refer to it"] if users else []))


def _in_parallel(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return mapped(work, items, num_threads=_NUM_THREADS, name="ckptstore-report")
