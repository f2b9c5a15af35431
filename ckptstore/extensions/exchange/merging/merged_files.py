"""Add up the tensors of several checkpoints while the files of the result are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ckptstore.errors import InvalidInput, InvalidState
from ckptstore.extensions.exchange.merging.sums import (
    CHUNK_ELEMENTS,
    SumMemories,
    SumMemory,
    add_terms,
    chunks_of,
    has_lost,
    narrow_to,
)
from ckptstore.extensions.exchange.places import ExportPlace
from ckptstore.extensions.exchange.safetensors_file import check_shard_size, lay_out
from ckptstore.extensions.exchange.selection import select
from ckptstore.extensions.exchange.streaming import stream_tensors
from ckptstore.extensions.exchange.to_safetensors import write_safetensors
from ckptstore.extensions.exchange.training_form import training_form, warn_of_training_form
from ckptstore.format.manifest import sha256_of
from ckptstore.group.base import Group
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.loading.load_state import is_stock, open_alone
from ckptstore.state.index.key_paths import KeyPaths
from ckptstore.state.index.part import Tensor
from ckptstore.state.live.matching import Saved
from ckptstore.state.live.patterns import fitting
from ckptstore.state.read.read_plan import grouped, halves
from ckptstore.state.read.stored import StoredState
from ckptstore.state.tensors.boxes import Box, whole, within
from ckptstore.state.tensors.segments import narrowed
from ckptstore.transfer.executor import Executor, InProcess

_PASS_BYTES = 16 << 20
"""The most bytes of sums that one thread holds."""
_PARTS_BYTES = 32 << 20
"""The bytes of checkpoints that one thread reads before it adds them up, unless one part is larger."""
_LEAST_SINE = 1e-4
"""Below it two tensors have nearly one direction, and the arc between them is the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """The result of a merge."""

    uri: str
    """The location of the files."""
    files: tuple[str, ...]
    """Names of the files."""
    steps: tuple[int, ...]
    """The steps of the checkpoints, in the order in which they were merged."""
    coefficients: tuple[float, ...]
    """The share of each checkpoint; with "slerp" its share of the arc."""
    num_tensors: int
    """Number of tensors by name; tied ones count once each."""
    size_bytes: int
    """Bytes of all tensors; tied ones count once."""
    left_out: Mapping[str, str]
    """Tensors that are not in the result, each with the reason."""
    notices: tuple[str, ...]
    """For people: what the files hold in another form."""


def write_merged(
    source: MergeSource,
    place: ExportPlace,
    *,
    steps: tuple[int, ...],
    include: str | Sequence[str] | None,
    strip_prefix: str,
    shard_size_bytes: int,
    group: Group,
    executor: Executor | None,
) -> MergeReport:
    """Write the safetensors files of a merge. Collective; see `merge`."""
    dtype = getattr(torch, source.dtype, None) if isinstance(source.dtype, str) else None
    if source.dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidInput(f"dtype is {source.dtype!r}, which is no dtype of floats", hint='For example "bfloat16"')
    if dtype is not None:
        try:
            torch.zeros(1, device="cpu").to(dtype)
        except (RuntimeError, NotImplementedError) as error:
            raise InvalidInput(f"torch {torch.__version__} cannot cast to {source.dtype}: {error}") from None
    check_shard_size(shard_size_bytes)
    merged = source.opened()
    saved, left_out = merged.agreed(fitting(include))
    if not saved.tensors and left_out:
        key, why = next(iter(left_out.items()))
        raise InvalidInput(f"No tensor is the same in all checkpoints. For example {key}: {why}")
    selection = select(saved, all_keys=merged.all_keys(), include=include, strip_prefix=strip_prefix, paths=KeyPaths())
    layout = lay_out(merged, selection, shard_size_bytes=shard_size_bytes)
    if source.is_arc:
        with group.meeting("angles") as meeting:
            source = replace(source, arcs=meeting.tell(lambda: merged.arcs(layout.keys.values())))
    training = merged.training_form({*selection.sources, *selection.sources.values()})
    warn_of_training_form(training if group.rank == 0 else ())
    identity, executor = source.identity(), executor or InProcess()
    names = write_safetensors(source, layout, place, identity=identity, group=group, executor=executor)
    return MergeReport(
        uri=place.uri,
        files=(*names, *(file.name for file in place.beside if file.name not in names)),
        steps=steps,
        coefficients=source.coefficients,
        num_tensors=len(selection.sources),
        size_bytes=layout.size_bytes,
        left_out=left_out,
        notices=(*training, *merged.notices(selection.sources.values(), layout.tied), *place.notices),
    )


@dataclass(frozen=True, slots=True)
class MergeSource:
    """Several checkpoints and the way to add them up. It can be pickled; see `to_safetensors.ExportSource`."""

    files: tuple[CheckpointFiles, ...]
    coefficients: tuple[float, ...]
    dtype: str | None
    is_arc: bool
    arcs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The coefficients of each tensor, where they are not the same for all."""

    @property
    def uri(self) -> str:
        """The names of the checkpoints, for people."""
        return f"{len(self.files)} checkpoints from {self.files[0].uri} to {self.files[-1].uri}"

    def identity(self) -> bytes:
        """Return bytes that distinguish this merge from every other one."""
        manifests = [sha256_of(one.read_manifest()[1]) for one in self.files]
        return repr((manifests, self.coefficients, self.dtype, self.is_arc)).encode()

    def opened(self) -> MergedState:
        """Open the checkpoints in this process."""
        states = []
        for one in self.files:
            if is_stock(one.read_manifest()[0]):
                hint = "Import it into a store, and merge that"
                raise InvalidInput(f"{one.uri} was written by torch's DCP, and has no digests to check", hint=hint)
            state = open_alone(one)
            states.append(_Opened(state, state.saved(lambda key: False), one.uri))
        return MergedState(self, states)


@dataclass(slots=True)
class _Opened:
    """One of the checkpoints. It reads as a `StoredState` does, but by all keys, the tied ones too, and in the dtypes
    that tensors had in the state."""

    state: StoredState
    saved: Saved
    uri: str

    @property
    def buffer_bytes(self) -> int:
        """The most that buffers of a read take."""
        return self.state.buffer_bytes

    @buffer_bytes.setter
    def buffer_bytes(self, size_bytes: int) -> None:
        self.state.buffer_bytes = size_bytes

    def find(self, key: str) -> Tensor | None:
        """Return the entry of a tensor, None if this checkpoint has none."""
        return self.saved.tensors.get(self._source_of(key))

    def entry(self, key: str) -> Tensor:
        """Return the entry of a tensor that all checkpoints have."""
        entry = self.find(key)
        if entry is None:
            raise KeyError(key)
        return entry

    def fill_boxes(self, wanted: Sequence[_Wanted]) -> None:
        """See `StoredState.fill_boxes`."""
        self.state.fill_boxes([(self._source_of(key), box, memory) for key, box, memory in wanted])

    def _source_of(self, key: str) -> str:
        return self.saved.aliases.get(key, key)


_Wanted = tuple[str, Box, torch.Tensor]
"""The key of a tensor, a box of it, and the memory for that."""


class MergedState:
    """The sum of the checkpoints; it reads as a `StoredState` does."""

    def __init__(self, source: MergeSource, states: Sequence[_Opened]) -> None:
        self._source = source
        self._states = states
        self._scratch = SumMemories()

    @property
    def buffer_bytes(self) -> int:
        """The most that buffers of a read take."""
        return self._states[0].buffer_bytes

    @buffer_bytes.setter
    def buffer_bytes(self, size_bytes: int) -> None:
        for opened in self._states:
            opened.buffer_bytes = size_bytes

    def all_keys(self) -> set[str]:
        """Return the keys of tensors and of plain values of all checkpoints."""
        return {key for opened in self._states for key in opened.state.all_keys()}

    def agreed(self, fits: Callable[[str], bool]) -> tuple[Saved, dict[str, str]]:
        """Return the tensors that fit and that all checkpoints have with one shape and dtype, tied if they are in all;
        and the others that fit, each with the reason."""
        tensors: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        left_out: dict[str, str] = {}
        last = self._states[-1].saved
        keys = {key for opened in self._states for key in (*opened.saved.tensors, *opened.saved.aliases)}
        for key in sorted(filter(fits, keys)):
            found = [opened.find(key) for opened in self._states]
            first = found[-1]
            lacking = [opened.uri for opened, entry in zip(self._states, found, strict=True) if entry is None]
            forms = {entry.form for entry in found if entry is not None}
            if lacking or first is None:
                others = f" and {len(lacking) - 1} more" if lacking[1:] else ""
                left_out[key] = f"it is not in {lacking[0]}{others}"
            elif len(forms) > 1:
                left_out[key] = f"it is {' and '.join(sorted(f'{dtype} {shape}' for dtype, shape in forms))}"
            elif all(opened.saved.aliases.get(key) == last.aliases.get(key, "") for opened in self._states):
                aliases[key] = last.aliases[key]
            else:
                tensors[key] = self._entry(key, first)
        for key in [key for key, target in aliases.items() if target not in tensors]:  # the other name does not fit
            tensors[key] = self.entry(key)
            del aliases[key]
        return Saved(tensors, {}, aliases), left_out

    def entry(self, key: str) -> Tensor:
        """Return the tensor of the result, for a key that all checkpoints have."""
        return self._entry(key, self._states[-1].entry(key))

    def _entry(self, key: str, last: Tensor) -> Tensor:
        is_cast = self._source.dtype is not None and last.torch_dtype.is_floating_point
        return Tensor(key, self._source.dtype if is_cast and self._source.dtype else last.dtype, last.shape)

    def training_form(self, keys: Collection[str]) -> list[str]:
        """Report optimizers that hold weights of any of the checkpoints in the form of their training."""
        every = (training_form(each.state.whole_index(), keys) for each in self._states)
        return [*dict.fromkeys(line for lines in every for line in lines)]

    def notices(self, keys: Iterable[str], tied: Mapping[str, str]) -> list[str]:
        """Report what somebody might not expect of the result."""
        entries = {key: self._states[-1].entry(key) for key in keys}
        whole = sorted(key for key, entry in entries.items() if not _is_added(entry))
        apart = sorted(key for key, entry in entries.items() if entry.per_rank)
        found = [f"{key} is no tensor of floats, it is that of the last checkpoint" for key in whole]
        found += [f"{key} differs between ranks, the lowest rank's is taken" for key in apart]
        return [*found, *(f"{name} is tied to {other}, and stored as that" for name, other in tied.items())]

    def fill_boxes(self, wanted: Sequence[_Wanted]) -> None:
        """Fill memory with boxes of the result; safe for threads. Raises CheckpointDamaged, and InvalidState for a
        value out of range."""
        last = self._states[-1]
        copied = [(key, box, memory) for key, box, memory in wanted if not _is_added(last.entry(key))]
        added = [(key, box, memory) for key, box, memory in wanted if _is_added(last.entry(key))]
        if copied:
            last.fill_boxes(copied)
        with self._scratch.lent() as scratch:
            for some in self._passes(added):
                self._add(some, *scratch)

    def _passes(self, added: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
        """Return the boxes, large ones in parts, in groups whose sums fit into the memory for them."""

        def element_bytes(key: str) -> int:
            return _wide(self._states[-1].entry(key)).itemsize

        parts = (
            (key, within(part, box), narrowed(memory, part))
            for key, box, memory in added
            for part in halves(whole(box.sizes), box.sizes, _PASS_BYTES // element_bytes(key))
        )
        return grouped(parts, lambda part: part[1].volume * element_bytes(part[0]), _PASS_BYTES)

    def _add(self, added: Sequence[_Wanted], sums_memory: SumMemory, parts_memory: SumMemory) -> None:
        """Fill memory with boxes of sums, with scratch memory for the sums and for elements of some checkpoints."""
        forms = [(box.sizes, self._states[-1].entry(key)) for key, box, _ in added]
        sums = sums_memory.divided([(sizes, _wide(form)) for sizes, form in forms])
        coefficients = [self._source.arcs.get(key, self._source.coefficients) for key, _, _ in added]
        part_bytes = sum(math.prod(sizes) * form.torch_dtype.itemsize for sizes, form in forms)
        at_once = max(1, _PARTS_BYTES // part_bytes)
        for first in range(0, len(self._states), at_once):
            numbers = range(first, min(first + at_once, len(self._states)))
            parts = parts_memory.divided([(sizes, form.torch_dtype) for sizes, form in forms] * len(numbers))
            for place, number in enumerate(numbers):
                if any(each[number] for each in coefficients):  # else its infinities do not count either
                    memories = parts[place * len(added) : (place + 1) * len(added)]
                    self._states[number].fill_boxes(
                        [(key, box, part) for (key, box, _), part in zip(added, memories, strict=True)]
                    )
            for index, total in enumerate(sums):
                shares = (coefficients[index][number] for number in numbers)
                terms = [term for term in zip(shares, parts[index :: len(added)], strict=True) if term[0]]
                add_terms(total, terms, is_first=first == 0)
        for (key, box, memory), total in zip(added, sums, strict=True):
            if not narrow_to(total, memory) and (has_lost(total, memory) or self._is_beyond(key, box, memory)):
                hint = "Choose a dtype of a wider range, or other weights"
                raise InvalidState(f"{key} has values that {memory.dtype} cannot hold", hint=hint)

    def _is_beyond(self, key: str, box: Box, memory: torch.Tensor) -> bool:
        """Return True if an element is finite in all checkpoints that count, and not in the sum. Reads them again."""
        wide = _wide(self._states[-1].entry(key))
        lost = ~memory.to(wide).isfinite()
        part = torch.empty(box.sizes, dtype=self._states[-1].entry(key).torch_dtype, device="cpu")
        for state, share in zip(self._states, self._source.arcs.get(key, self._source.coefficients), strict=True):
            if share:
                state.fill_boxes([(key, box, part)])
                lost &= part.to(wide).isfinite()
        return bool(lost.any())

    def arcs(self, keys: Iterable[str]) -> dict[str, tuple[float, float]]:
        """Return the coefficients of each of these tensors of floats on the arc from the first checkpoint to the
        second. Reads both.

        The angle is that of all elements together. Pairs without an angle, of one direction or of zeros, are on a line.
        """
        floats = [key for key in dict.fromkeys(keys) if self.entry(key).torch_dtype.is_floating_point]
        products, share = dict.fromkeys(floats, (0.0, 0.0, 0.0)), self._source.coefficients[1]
        streams = [stream_tensors(opened, floats) for opened in self._states]
        wide = torch.empty((2, CHUNK_ELEMENTS), dtype=torch.float64, device="cpu")
        for (key, first), (_, second) in zip(*streams, strict=True):
            dtype = self._states[-1].entry(key).torch_dtype
            chunks = (chunks_of(torch.frombuffer(one, dtype=dtype)) if len(one) else () for one in (first, second))
            for pair in zip(*chunks, strict=True):
                a, b = (row[: elements.shape[0]].copy_(elements) for row, elements in zip(wide, pair, strict=True))
                dot, one, other = products[key]
                products[key] = dot + float(a @ b), one + float(a @ a), other + float(b @ b)
        return {key: _arc(dot, math.sqrt(one * other), share) for key, (dot, one, other) in products.items()}


def _is_added(entry: Tensor) -> bool:
    return entry.torch_dtype.is_floating_point or entry.torch_dtype.is_complex


def _wide(entry: Tensor) -> torch.dtype:
    """Return the dtype in which elements are added up."""
    dtype = entry.torch_dtype
    return dtype if dtype.is_complex or dtype == torch.float64 else torch.float32


def _arc(dot: float, length: float, share: float) -> tuple[float, float]:
    angle = math.acos(max(-1.0, min(1.0, dot / length))) if length and math.isfinite(length) else 0.0
    if math.sin(angle) < _LEAST_SINE:
        return 1 - share, share
    return math.sin((1 - share) * angle) / math.sin(angle), math.sin(share * angle) / math.sin(angle)
