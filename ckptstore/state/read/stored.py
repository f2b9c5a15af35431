"""A stored state, as one rank reads it: its keys, its plain values, and its tensors straight into memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch

from ckptstore.errors import CheckpointDamaged, InvalidInput, StateMismatch
from ckptstore.runtime.collector import collector_paused
from ckptstore.state.index.outline import ModuleMetadata
from ckptstore.state.index.part import Tensor
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.live.flatten import TensorRef, map_tensors
from ckptstore.state.live.matching import Saved, Target, above
from ckptstore.state.live.patterns import fits
from ckptstore.state.live.random_states import holds_random_state
from ckptstore.state.live.values import Decoder, decode_metadata, needs_code, references
from ckptstore.state.read.read_plan import SCATTERED_BYTES, Read, ReadPlan, RunSteps, Small, Step, run_steps
from ckptstore.state.tensors.boxes import Box
from ckptstore.state.tensors.dense import dense_of
from ckptstore.state.tensors.placement import Piece, dtype_and_shape, name_of, pieces_of
from ckptstore.state.tensors.tensor_memory import check_memory, outside_inference

logger = logging.getLogger("ckptstore")

Choice = Literal["error", "first", "skip"]
"""The treatment of values that differed between ranks, at another world size: refuse, the lowest rank's, leave out."""
PerRank = Choice | Mapping[str, Choice]
"""One choice for all keys, or one by pattern of a key or of one above it; the first that fits counts, else "error"."""


def check_per_rank(per_rank: PerRank) -> None:
    """Raise InvalidInput unless the choice, or each choice of a mapping, is one that there is."""
    for choice in per_rank.values() if isinstance(per_rank, Mapping) else (per_rank,):
        if choice not in ("error", "first", "skip"):
            raise InvalidInput(
                f"per_rank is {choice!r}, it is 'error', 'first' or 'skip', or a mapping of patterns to these"
            )


@dataclass(slots=True)
class StoredState:
    """The state of one checkpoint for one rank."""

    index: TensorIndex
    read: Read
    prefix: str
    rank: int
    world_size: int
    per_rank: PerRank = "error"
    allow_pickle: bool = False
    buffer_bytes: int = 256 << 20
    """The most that buffers of a read take."""
    checked: bool = True
    asked: Callable[[str], bool] = lambda key: True
    """The predicate of the keys that the caller wants. Other keys may differ between ranks, whatever `per_rank` says:
    they are left out."""
    loaders: Mapping[str, bool] = field(default_factory=dict)
    """The keys of data loaders and samplers that are loaded, whose positions belong to their number of ranks; True for
    what takes the states of all ranks, where there were others."""
    more: Callable[[Iterable[int]], TensorIndex] | None = None
    """The function that returns the index with the parts of these ranks too; None if all parts were read."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held while parts of the index are read, which only one thread at a time may do."""
    _ranks: dict[str, int] = field(default_factory=dict)
    """The rank whose value is taken, for each key that differs between ranks."""

    def __post_init__(self) -> None:
        check_per_rank(self.per_rank)

    @outside_inference()
    def saved(self, wanted: Callable[[str], bool] = lambda key: True) -> Saved:
        """Return the content of the checkpoint for this rank, with the plain values whose keys are wanted. Reads the
        tensors beside those values.

        Raises StateMismatch, naming the keys, when ranks had values of their own, the number of ranks is another one
        now, and `per_rank` is "error".
        """
        own = self._own_keys()
        skipped = frozenset(key for key, rank in own.items() if rank is None)
        self._ranks = {key: rank for key, rank in own.items() if rank is not None}
        with collector_paused():
            tied, left_out = self.index.aliases, skipped.union(self.index.aliases)
            tensors = self.index.tensors
            if (outline := self.index.outline) is not None and outline.live:
                tensors = {key: entry.restored for key, entry in tensors.items()}
            if left_out or not self.index.is_common:
                tensors = {
                    key: entry
                    for key, lowest in tensors.items()
                    if key not in left_out and (entry := self._as_taken(lowest)) is not None and not entry.beside_value
                }
        aliases = {key: first for key, first in tied.items() if key not in skipped}
        encoded = {key: (self.rank, value) for key, value in self.index.common_values().items()}
        for rank in {self.rank, *self._ranks.values()}:
            for key, value in self.index.own_values(rank).items():
                if self._ranks.get(key) == rank:
                    encoded[key] = rank, value
        unread = {key for key, (_, value) in encoded.items() if wanted(key) and self._stays_unread(key, value)}
        values = self._decoded({key: value for key, value in encoded.items() if wanted(key) and key not in unread})
        self._warn_of_same_random_numbers(tensors, values)
        return Saved(tensors, {**values, **dict.fromkeys(unread)}, aliases, skipped, self._noted_modules())

    def _stays_unread(self, key: str, value: Any) -> bool:
        """Return True for a value that code would have to read and nobody asks for: it counts as a key alone."""
        is_wanted = self.asked(key) or any(map(self.asked, references(value)))
        return not is_wanted and not self.allow_pickle and needs_code(value)

    def _noted_modules(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return the functions that return the metadata of modules, by key."""
        entries = () if self.index.outline is None else self.index.outline.modules
        return {entry.key: partial(self._metadata_of, entry.key, entries) for entry in entries}

    def _metadata_of(self, key: str, entries: Sequence[ModuleMetadata]) -> dict[str, Any]:
        """Return the metadata of a module. Of ranks that have different ones, this rank's counts first, then the lowest
        rank's: a module that another rank had before may be on this rank now."""
        is_same_size = self.index.world_size == self.world_size
        found: dict[str, Any] = {}
        for entry in sorted(entries, key=lambda it: not (is_same_size and self.rank in it.ranks)):
            if entry.key == key:
                found = {**decode_metadata(entry.content, path=key, allow_pickle=self.allow_pickle), **found}
        return found

    def _warn_of_same_random_numbers(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Warn, on rank 0, of generators that all ranks get from one: they would draw the same numbers from now on."""
        if self.rank != 0 or self.world_size == 1 or self.index.world_size == self.world_size:
            return
        taken = [key for key in self._ranks if self.asked(key)]
        found = [key for key in taken if holds_random_state(key, tensors, values.get(key))]
        shown = sorted(key for key in found if not above(key).intersection(found))
        if shown:
            logger.warning(
                'per_rank="first" gives all %d ranks the random numbers of one: they draw the same from now on, by %s. '
                'per_rank={"%s": "skip"} leaves each rank its own',
                self.world_size,
                ", ".join(shown),
                shown[0],
            )

    def _as_taken(self, lowest: Tensor) -> Tensor | None:
        """Return this rank's entry of a tensor, from the lowest rank's."""
        own = self.index.entry(lowest.key, self.source_rank(lowest.key)) if lowest.per_rank else lowest
        return own and own.restored

    def entry(self, key: str) -> Tensor:
        """Return this rank's entry of a tensor. Raises CheckpointDamaged for one that the index lacks."""
        found = self.index.entry(key, self.source_rank(key))
        if found is None:
            raise CheckpointDamaged(f"the checkpoint has no tensor {key!r}")
        return found

    def source_rank(self, key: str) -> int:
        """Return the rank whose tensor or value of that key this rank takes, if ranks differ."""
        return self._ranks.get(key, self.rank)

    def _own_keys(self) -> dict[str, int | None]:
        """Return, for each key that differs between ranks, the rank whose value this rank takes, None to leave it
        out."""
        ranks = self.index.value_ranks()
        for fqn, entry in () if self.index.is_common else self.index.tensors.items():
            if entry.per_rank and not entry.beside_value:
                ranks[fqn] = self.index.ranks_of(fqn)
        if self.index.world_size == self.world_size:
            return dict.fromkeys(ranks, self.rank)
        everyone = [*range(self.index.world_size)]
        common = self.index.common_values()
        for key in filter(common.__contains__, self.loaders):  # alike, and other samples to another number of ranks
            inside = (fqn for fqn in self.index.tensors if fqn.startswith(f"{key}."))
            ranks |= dict.fromkeys((key, *inside), everyone)
        refused = sorted(key for key in ranks if self._choice(key) == "error" and self.asked(key))
        if refused:
            shown = ", ".join(refused[:10]) + (f" and {len(refused) - 10} more" if len(refused) > 10 else "")
            raise StateMismatch(
                f"each of the {self.index.world_size} ranks that saved had its own {shown}, and there are "
                f"{self.world_size} ranks now",
                hint=self._ways_out(refused),
            )
        return {key: holders[0] if self._choice(key) == "first" else None for key, holders in ranks.items()}

    def _ways_out(self, refused: Sequence[str]) -> str:
        """Return what helps against keys that another number of ranks cannot take."""
        loaders = sorted({place for key in refused for place in (key, *above(key)) if place in self.loaders})
        advice = (
            'per_rank="first" takes the lowest rank\'s, per_rank="skip" leaves them as they are, '
            f'per_rank={{"{refused[0]}": "skip"}} chooses for one key or pattern'
        )
        if not loaders:
            return advice
        return (
            f"Where {', '.join(loaders)} was means other samples on another number of ranks. Resume on "
            f"{self.index.world_size} ranks until the epoch ends; or begin the epoch anew with "
            f'per_rank={{"{loaders[0]}": "skip"}}; or train with a loader of ckptstore.integrations.loaders, which any '
            f"number of ranks resumes. {advice}"
        )

    def _choice(self, key: str) -> Choice:
        """Return the treatment of a key that differs between ranks."""
        places = (key, *above(key))
        takes_all = any(self.loaders.get(place) for place in places)
        if not isinstance(self.per_rank, Mapping):
            return "skip" if takes_all else self.per_rank
        fitting = (choice for pattern, choice in self.per_rank.items() if any(fits(place, pattern) for place in places))
        return next(fitting, "skip" if takes_all else "error")

    def states_of_all_ranks(self) -> dict[str, list[Any]]:
        """Return, for each object that takes them and that `per_rank` does not name, the states of all ranks that
        saved, in their order; nothing if there are as many ranks now."""
        if self.index.world_size == self.world_size:
            return {}
        named = self.per_rank if isinstance(self.per_rank, Mapping) else ()
        wanted = [key for key, takes_all in self.loaders.items() if takes_all]
        wanted = [key for key in wanted if not any(fits(place, it) for it in named for place in (key, *above(key)))]
        found = {key: self.value_of_each_rank(key) for key in wanted}
        return {key: states * (self.index.world_size if len(states) == 1 else 1) for key, states in found.items()}

    def all_keys(self) -> set[str]:
        """Return the keys of tensors and of plain values, of all ranks."""
        index = self.whole_index()
        tensors = {key for key, entry in index.tensors.items() if not entry.beside_value}
        return {*tensors, *index.aliases, *index.common_values(), *index.value_ranks()}

    @outside_inference()
    def value_of_each_rank(self, key: str) -> list[Any]:
        """Return a plain value or tensor of every rank that has its own, in the order of ranks; one, if all are equal.
        Tensors are read to the host."""
        ranks = self._apart(key)
        if ranks:
            return [self._of_rank(key, rank) for rank in ranks]
        is_known = key in self.index.tensors or key in self.index.common_values()
        return [self._of_rank(key, 0)] if is_known else []

    def _apart(self, key: str) -> list[int]:
        """Return the ranks that have a value or tensor of their own, or a tensor of their own in a value that is alike;
        none if all are equal. Reads the parts of all ranks if some differ: an index without them knows the lowest of
        these ranks alone."""
        inside = {*references(self.index.common_values().get(key))}

        def ranks_in(index: TensorIndex) -> list[int]:
            ranks = index.value_ranks().get(key) or index.ranks_of(key)
            return ranks or sorted({rank for name in inside for rank in index.ranks_of(name)})

        return ranks_in(self.whole_index()) if ranks_in(self.index) else []

    def _of_rank(self, key: str, rank: int) -> Any:
        """Return one rank's value or tensor, with the tensors in it."""

        def read(name: str) -> torch.Tensor:
            entry = self.index.entry(name, rank)
            if entry is None:
                raise CheckpointDamaged(f"the checkpoint has no tensor {name!r}, to which {key!r} refers")
            tensor = torch.empty(entry.shape, dtype=entry.restored.torch_dtype, device="cpu")
            self._fill([(name, rank, pieces_of(tensor, name))])
            return tensor

        values = {**self.index.common_values(), **self.index.own_values(rank)}
        if key not in values:
            return read(key)
        value = self._decoded({key: (rank, values[key])})[key]
        return map_tensors(value, (key,), lambda _, leaf: read(leaf.key))

    def _decoded(self, encoded: Mapping[str, tuple[int, Any]]) -> dict[str, Any]:
        arrays: dict[tuple[str, int], torch.Tensor] = {}
        for rank, value in encoded.values():
            for name in references(value):
                entry = self.index.entry(name, rank)
                if entry is not None and entry.beside_value:
                    arrays[name, rank] = torch.empty(entry.shape, dtype=entry.torch_dtype, device="cpu")
        self._fill([(name, rank, pieces_of(tensor, name)) for (name, rank), tensor in arrays.items()])
        found = {}
        for key, (rank, value) in encoded.items():

            def fetch(name: str, rank: int = rank) -> Any:
                tensor = arrays.get((name, rank))
                return TensorRef(name) if tensor is None else tensor

            found[key] = Decoder(fetch, allow_pickle=self.allow_pickle).decode(value, path=key)
        return found

    def fill(self, targets: Mapping[str, tuple[torch.Tensor, str] | Target], *, run: RunSteps = run_steps) -> None:
        """Read tensors into memory: for each name the tensor to fill, plain or distributed, and the key it is stored
        under. Every block that is read is checked. `run` carries the reads out.

        Raises StateMismatch when shape or dtype differ, CheckpointDamaged.
        """
        small, others = self._small(targets)
        self._fill((self._wanted(name, tensor, source) for name, (tensor, source, *_) in others.items()), run, small)

    def _small(
        self, targets: Mapping[str, tuple[torch.Tensor, str] | Target]
    ) -> tuple[list[Small], Mapping[str, tuple[torch.Tensor, str] | Target]]:
        """Return the targets that are planned all together, and the others: large ones, and all that need a look."""
        small, others = list[Small](), dict[str, tuple[torch.Tensor, str] | Target]()
        if not (self.index.is_whole and self.index.is_common):
            return small, targets
        tensors = self.index.tensors
        for name, target in targets.items():
            tensor, source, *_ = target
            dense = target.dense if type(target) is Target else dense_of(tensor)
            entry = tensors.get(source)
            if (
                dense is None
                or entry is None
                or dense.form.size_bytes >= SCATTERED_BYTES
                or entry[1:3] != (dense.form.dtype, dense.form.shape)
                or not dense.is_held_by(tensor)
            ):
                others[name] = target
            else:
                small.append((entry, dense, tensor))
        return small, others

    def _wanted(self, name: str, tensor: torch.Tensor, source: str) -> tuple[str, int, list[Piece]]:
        rank = self.source_rank(source)
        entry = self.index.entry(source, rank)
        dtype, shape = dtype_and_shape(tensor)
        wanted_dtype = name_of(dtype)
        if entry is None or (wanted_dtype, shape) not in (entry.form, entry.restored.form):
            has = f"{entry.dtype} {entry.shape}" if entry else "nothing"
            raise StateMismatch(f"{name} is {wanted_dtype} {shape}, the checkpoint has {has}")
        return source, rank, pieces_of(tensor, name)

    def fill_boxes(self, wanted: Sequence[tuple[str, Box, torch.Tensor]]) -> None:
        """Read boxes of stored tensors, each into memory of its shape and dtype, the stored one or the one that it had
        in the state. Safe for threads. Raises CheckpointDamaged."""
        self._fill([(key, self.source_rank(key), [Piece(box, memory)]) for key, box, memory in wanted])

    def whole_index(self) -> TensorIndex:
        """Return the index with the parts of all ranks."""
        if self.more is not None and not self.index.is_whole:
            self.index = self.more(range(self.index.world_size))
        return self.index

    def _know(self, wanted: Iterable[tuple[str, int, list[Piece]]]) -> None:
        """Read the parts of the index that have chunks of these boxes."""
        if self.more is None or self.index.is_whole:
            return
        with self._lock:
            lacking = {
                holder
                for source, rank, pieces in wanted
                for piece in pieces
                for holder in self.index.lacking(source, rank, piece.box)
            }
            if lacking:
                self.index = self.more(lacking)

    def _fill(
        self, wanted: Iterable[tuple[str, int, list[Piece]]], run: RunSteps = run_steps, small: Sequence[Small] = ()
    ) -> None:
        with torch.inference_mode():  # in which all tensors may be written to, inference tensors too
            run(self._steps(wanted, small), self.read, self.buffer_bytes)

    def _steps(self, wanted: Iterable[tuple[str, int, list[Piece]]], small: Sequence[Small]) -> Iterator[Step]:
        """Yield the steps of a read. All that can fail comes after the first is asked for, where `run` is prepared."""
        # Some classes of tensors cannot be detached in inference mode, in which the reads are.
        with collector_paused(), torch.inference_mode(False):
            pieces_of_all = list(wanted)
        self._know(pieces_of_all)
        plan = ReadPlan(self.index, prefix=self.prefix, checked=self.checked)
        with collector_paused(), torch.inference_mode(False):
            left = plan.add_small(small)
            pieces_of_all += [(key, self.rank, pieces_of(tensor, key)) for key, tensor in left]
            for source, rank, pieces in pieces_of_all:
                for piece in pieces:
                    check_memory(piece.tensor, source)
                plan.add(source, pieces, rank=rank)
        yield from plan.steps()


class Fills(Protocol):
    """A stored state whose tensors can be read into memory."""

    def fill(self, targets: Mapping[str, tuple[torch.Tensor, str]]) -> None:
        """Read tensors into memory; see `StoredState.fill`."""


@outside_inference()
def read_whole(stored: Fills, entries: Mapping[str, Tensor]) -> dict[str, torch.Tensor]:
    """Return these tensors whole, in new memory of the host. Raises CheckpointDamaged."""
    found = {key: torch.empty(entry.shape, dtype=entry.torch_dtype, device="cpu") for key, entry in entries.items()}
    stored.fill({key: (tensor, key) for key, tensor in found.items()})
    return found
