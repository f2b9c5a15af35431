"""The parts that make a checkpoint of ours readable by stock DCP: `.metadata`, plain values framed as DCP does it, and
the names of torch for the contents of an optimizer; and the contribution of a save of a state to them."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from ckptstore.runtime.collector import collector_paused
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.live.flatten import FlatState, join_path, stock_leaves
from ckptstore.state.tensors.boxes import Box, Sizes
from ckptstore.state.tensors.frames import MAX_PAYLOAD_BYTES, pickle_frame, template, value_frame
from ckptstore.state.write.agree import Agreement
from ckptstore.state.write.assignment import SaveMemo
from ckptstore.state.write.shard_files import ShardFiles
from ckptstore.stock.stock_pickle import MetadataPickle, StockPlace

logger = logging.getLogger("ckptstore")

MAX_CHUNKS = 200_000
"""The most chunks and values for which `.metadata` is written without a request: it takes stock readers gigabytes to
read it."""
MAX_NESTED_VALUES = 10_000
"""The same for the values of dicts and lists, into which stock DCP takes them apart. Each of them takes some 600 bytes
for stock readers alone."""

_OF_TORCH = b"ctorch"
"""The bytes before the name of a function of torch in a pickle. Without any, `torch.save` makes the same pickle."""

_SECTIONS = (".state.", ".param_groups.")
"""The parts of an optimizer's state in its keys."""

Paths = Mapping[str, tuple[str | int, ...]]
IsMeant = Callable[[str, Collection[str]], bool]
"""A function that is True for the key of an optimizer whose contents stock readers know by the names in the second
argument."""


def has_many_values(flat: FlatState, keys: Iterable[str]) -> bool:
    """Return True if stock DCP would take the dicts and lists of these plain values apart into more than
    `MAX_NESTED_VALUES`, or if there are more than `MAX_CHUNKS` values. Stop counting there."""
    nested = 0
    for count, key in enumerate(keys, 1):
        value = flat.values[key]
        if isinstance(value, Mapping | list):
            nested += sum(1 for _ in islice(stock_leaves(value, flat.paths[key]), MAX_NESTED_VALUES + 1 - nested))
        if nested > MAX_NESTED_VALUES or count + nested > MAX_CHUNKS:
            return True
    return False


def stock_frames(flat: FlatState, keys: Iterable[str]) -> tuple[dict[str, bytes], dict[str, tuple[str | int, ...]]]:
    """Return the frames of these plain values, leaf by leaf as stock DCP flattens them, and the path of each leaf."""
    frames: dict[str, bytes] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    made: dict[bytes, bytes] = {}
    for key in keys:
        for path, leaf in stock_leaves(flat.values[key], flat.paths[key]):
            text = pickle.dumps(leaf, 2)  # equal values are framed once; thousands of hyperparameters are
            if text not in made:
                has_no_tensor = _OF_TORCH not in text and len(text) < MAX_PAYLOAD_BYTES
                made[text] = pickle_frame(text) if has_no_tensor else value_frame(leaf)
            frames[join_path(path)] = made[text]
            paths[join_path(path)] = path
    return frames, paths


@collector_paused()
def stock_metadata(index: TensorIndex, places: Mapping[str, StockPlace], paths: Paths, is_meant: IsMeant) -> bytes:
    """Return `.metadata` as stock DCP writes it. For a tensor that differs between ranks it has the lowest rank's.
    `is_meant` as in `stock_names`."""
    metadata = MetadataPickle()
    names = stock_names({*index.tensors, *places}, is_meant)

    def named(key: str) -> tuple[str, tuple[str | int, ...]]:
        name = names.get(key, key)
        return name, stock_path(paths.get(key, (key,)), key, name)

    for fqn, dtype, shape, chunks in stock_tensors(index):
        if fqn not in places:
            metadata.add_tensor(*named(fqn), dtype, shape, chunks)
    for key, place in places.items():
        metadata.add_value(*named(key), place)
    return metadata.encode()


def stock_tensors(
    index: TensorIndex, rank_of: Callable[[str], int | None] | None = None
) -> Iterator[tuple[str, torch.dtype, Sizes, list[tuple[Box, StockPlace]]]]:
    """Yield key, dtype, shape, and the box and frame of each chunk of the tensors of an index. Of a tensor that differs
    between ranks, that of the rank which `rank_of` returns, none for None; without `rank_of`, the lowest rank's."""
    rank_of = rank_of or (lambda key: index.ranks_of(key)[0])
    for fqn, lowest in index.tensors.items():
        rank = rank_of(fqn) if lowest.per_rank else 0
        entry = None if rank is None else index.entry(fqn, rank)
        if rank is None or entry is None or entry.beside_value:
            continue
        dtype = entry.torch_dtype
        chunks = []
        for chunk in index.chunks(fqn, rank):
            frame = template(dtype, chunk.box.sizes)
            place = index.files[chunk.file], chunk.offset - len(frame.header), frame.size_bytes
            chunks.append((chunk.box, place))
        yield fqn, dtype, entry.shape, chunks


def stock_names(keys: Iterable[str], is_meant: IsMeant = lambda optimizer, names: True) -> dict[str, str]:
    """Return the names without the key of the module, for keys of optimizers over one module:
    `optim.state.0.weight.exp_avg` for `optim.state.model.0.weight.exp_avg`. A module inside a container of the state
    keeps its key.

    What may be an optimizer is recognised by its names: each contains the key of a tensor. A state dict of torch's may
    look the same, and keeps its keys: `is_meant` tells the two apart. If such a name is taken, return none.
    """
    known = set(keys)
    tops: dict[str, set[str]] = {}
    found: dict[str, list[tuple[str, str, str]]] = {}
    for key in known:
        for section in _SECTIONS:
            optimizer, _, rest = key.partition(section)
            if rest:
                top = rest.partition(".")[0]
                tops.setdefault(optimizer, set()).add(top if _holds_key(rest, known) else "")
                found.setdefault(optimizer, []).append((key, f"{optimizer}{section}{top}.", f"{optimizer}{section}"))
                break
    names: dict[str, str] = {}
    for optimizer, each in found.items():
        if len(tops[optimizer]) == 1 and "" not in tops[optimizer]:
            renamed = {key: new + key.removeprefix(old) for key, old, new in each}
            names |= renamed if is_meant(optimizer, renamed.values()) else {}
    return {} if not known.isdisjoint(names.values()) else names


def _holds_key(rest: str, known: set[str]) -> bool:
    end = rest.find(".")
    while end >= 0:
        if rest[:end] in known:
            return True
        end = rest.find(".", end + 1)
    return False


def stock_path(path: tuple[str | int, ...], key: str, name: str) -> tuple[str | int, ...]:
    """Return the path of the key that stock readers call `name`, from the path of the key."""
    removed = len(key) - len(name)
    if not removed:
        return path
    for place, part in enumerate(path):
        for section in _SECTIONS:
            if isinstance(part, str) and part.startswith(section[1:]):
                begin = len(section) - 1
                return (*path[:place], part[:begin] + part[begin + removed :], *path[place + 1 :])
    return (name,)


class StockShare:
    """One rank's share: its plain values, once more as DCP frames them, and on the leader `.metadata`."""

    def __init__(
        self,
        flat: FlatState,
        keys: Sequence[str],
        files: ShardFiles,
        agreement: Agreement,
        *,
        rank: int,
        at_any_size: bool,
    ) -> None:
        """Add the values to the files of a rank that stores those of these keys: stock readers know one value for each
        key, the lowest rank's. Unless `at_any_size`, add none if there are very many."""
        self._at_any_size = at_any_size
        self._places: Mapping[str, StockPlace] | None = None
        self._paths: dict[str, tuple[str | int, ...]] = {}
        self._optimizers = flat.optimizers
        self._is_leader = rank == 0
        mine = [key for key in keys if agreement.holders(key)[0] == rank]
        if at_any_size or not has_many_values(flat, mine):
            frames, paths = stock_frames(flat, mine)
            self._places = files.add_frames(frames)
            self._paths.update(paths)
            if rank == 0 or (agreement.classes and agreement.classes.index(agreement.classes[rank]) == rank):
                self._paths.update(flat.paths)

    def report(self) -> list[Any]:
        """Return this rank's report to the leader, in types of JSON. The leader leaves out its own paths."""
        return [self._places, {} if self._is_leader else self._paths, sorted(self._optimizers)]

    @collector_paused()
    def metadata(
        self,
        reports: Sequence[Sequence[Any]],
        layout: bytes,
        num_chunks: int,
        index: Callable[[], TensorIndex],
        memo: SaveMemo,
    ) -> bytes | None:
        """Leader: return `.metadata`, from the reports of all ranks. Return None, with a warning once for a store, if
        it has more than stock readers can be expected to take. `layout` is the `layout_digest` of the index, which is
        made only if it is another one than before."""
        found = [places for places, _, _ in reports if places is not None]
        if num_chunks + sum(map(len, found)) > MAX_CHUNKS:
            num_chunks = index().num_chunks  # without those that several ranks have stored alike
        is_large = len(found) < len(reports) or num_chunks + sum(map(len, found)) > MAX_CHUNKS
        if is_large and not self._at_any_size:
            memo.cached("warning of stock", True, _warn)
            return None
        places: dict[str, StockPlace] = {}
        paths: dict[str, tuple[str | int, ...]] = {}
        for of_rank, own_paths, _ in reversed(reports):  # the lowest rank has priority
            places.update(of_rank)
            paths.update((key, tuple(path)) for key, path in own_paths.items())
        optimizers = {key for _, _, keys in reports for key in keys}
        wanted = layout, list(places.items()), [*paths.items(), *self._paths.items()], optimizers

        def make() -> bytes:
            return stock_metadata(index(), places, {**paths, **self._paths}, lambda key, _: key in optimizers)

        return memo.cached("stock metadata", wanted, make)


def _warn() -> None:
    logger.warning(
        "torch's own DCP cannot read these checkpoints: they have more than %d chunks and plain values, or a "
        "rank has more than %d plain values in dicts and lists. stock_readable=True writes what DCP needs at "
        "any size, False never does; ckptstore reads them either way",
        MAX_CHUNKS,
        MAX_NESTED_VALUES,
    )
