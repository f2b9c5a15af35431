"""The boxes of a distributed tensor that each rank has, by arithmetic: from a mesh of ranks and how it cuts. Pure.

A mesh dimension cuts one dimension of the tensor as `torch.chunk` does, or copies it to every rank. Cuts follow each
other in the order of mesh dimensions, so each element is on one rank, or on one of each set of copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np

from ckptstore.format.encoding import as_list, as_number
from ckptstore.state.tensors.boxes import REPLICATED, Box, Cut, Sizes, runs_of

_Array = np.ndarray[Any, Any]
_MAX_RANKS = 1 << 20
_MAX_DIMS = 32
_MAX_RUNS = 1 << 22
"""The most runs of all ranks along one dimension of a tensor."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """An array of ranks. Equal by value."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """The ranks in row-major order, each once."""

    @cached_property
    def grid(self) -> _Array:
        return np.array(self.ranks, np.int64).reshape(self.shape)

    @cached_property
    def _place_of(self) -> Mapping[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.ranks))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self is other or (hash(self), self.shape, self.ranks) == (hash(other), other.shape, other.ranks)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a rank, None for one that is not in the mesh."""
        place = self._place_of.get(rank)
        return None if place is None else tuple(int(at) for at in np.unravel_index(place, self.shape))

    def to_json(self) -> dict[str, Any]:
        """Return the mesh as JSON: ranks that follow from the first one and steps along the dimensions are not
        listed."""
        steps = [int(step) for step in _steps(self.grid)]
        if np.array_equal(_regular(self.ranks[0], self.shape, steps), self.grid):
            return {"shape": list(self.shape), "first": self.ranks[0], "steps": steps}
        return {"shape": list(self.shape), "ranks": list(self.ranks)}

    @staticmethod
    def from_json(value: Mapping[str, Any], *, num_ranks: int = _MAX_RANKS) -> Mesh:
        """Read the output of `to_json` without trust, for a group of `num_ranks` ranks. Raises ValueError, KeyError or
        TypeError."""
        shape = tuple(as_number(size, 1, num_ranks + 1) for size in as_list(value["shape"]))
        if len(shape) > _MAX_DIMS or prod(shape) > num_ranks:
            raise ValueError("a mesh is huge")
        if "ranks" in value:
            ranks = [as_number(rank, 0, num_ranks) for rank in as_list(value["ranks"])]
        else:
            steps = [as_number(step, 0, num_ranks) for step in as_list(value["steps"])]
            first = as_number(value["first"], 0, num_ranks)
            as_number(first + sum(step * (size - 1) for step, size in zip(steps, shape, strict=True)), 0, num_ranks)
            ranks = _regular(first, shape, steps).reshape(-1).tolist()
        if len(ranks) != prod(shape) or len(set(ranks)) != len(ranks):
            raise ValueError("a mesh has a rank twice, or not enough")
        return Mesh(shape, tuple(ranks))


def _steps(grid: _Array) -> Iterator[Any]:
    first = grid[(0,) * grid.ndim]
    for dim, size in enumerate(grid.shape):
        second = tuple(int(other == dim) for other in range(grid.ndim))
        yield max(0, grid[second] - first) if size > 1 else 0


def _regular(first: int, shape: Sequence[int], steps: Sequence[int]) -> _Array:
    grid = np.full(tuple(shape), first, np.int64)
    for dim, (size, step) in enumerate(zip(shape, steps, strict=True)):
        along = np.arange(size) * step
        grid += along.reshape([size if other == dim else 1 for other in range(len(shape))])
    return grid


@dataclass(frozen=True)
class MeshLayout:
    """The rule by which a mesh cuts a tensor of any shape."""

    mesh: Mesh
    cuts: tuple[Cut, ...]
    """One for each dimension of the mesh."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.mesh.ranks

    @property
    def is_fine(self) -> bool:
        """True if it cuts a dimension into more runs than are worth the arithmetic; an index lists the boxes then."""
        dims = {cut.dim for cut in self.cuts if cut.dim != REPLICATED}
        return any(prod(shares * by for shares, by in self._cutters(dim)[1]) > _MAX_RUNS for dim in dims)

    @cached_property
    def num_copies(self) -> int:
        pairs = zip(self.mesh.shape, self.cuts, strict=True)
        return prod(size for size, cut in pairs if cut.dim == REPLICATED)

    def boxes_of(self, rank: int, shape: Sizes) -> tuple[Box, ...]:
        """Return the boxes that a rank has of a tensor of that shape; none for one outside of the mesh. Leave empty
        boxes out."""
        coordinate = self.mesh.coordinate(rank)
        if coordinate is None:
            return ()
        runs = runs_of(shape, self.mesh.shape, self.cuts, coordinate)
        return tuple(
            Box(tuple(start for start, _ in each), tuple(size for _, size in each))
            for each in product(*runs)
            if all(size for _, size in each)
        )

    def sharers_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have the boxes of a rank, itself with them; none for one outside of the mesh."""
        coordinate = self.mesh.coordinate(rank)
        if coordinate is None:
            return ()
        pairs = zip(self.cuts, coordinate, strict=True)
        place = tuple(slice(None) if cut.dim == REPLICATED else at for cut, at in pairs)
        return tuple(self.mesh.grid[place].reshape(-1).tolist())

    def ranks_meeting(self, shape: Sizes, wanted: Box) -> _Array:
        """Return the ranks that have elements of a box."""
        meets = np.ones((1,) * len(self.cuts), bool)
        for dim, (size, low, extent) in enumerate(zip(shape, *wanted, strict=True)):
            first, stop = max(low, 0), min(low + extent, size)
            if first >= stop:
                return np.zeros(0, np.int64)
            axes, cutters = self._cutters(dim)
            if axes:
                places, starts, stops = _runs(size, cutters)
                here = np.zeros(prod(shares for shares, _ in cutters), bool)
                here[places[(starts < stop) & (stops > first)]] = True
                meets = meets & here.reshape([size if axis in axes else 1 for axis, size in enumerate(self.mesh.shape)])
        found: _Array = self.mesh.grid[np.broadcast_to(meets, self.mesh.shape)]
        return found

    def num_boxes(self, shape: Sizes) -> int:
        """Return the number of boxes that all ranks together have, counting those of copies once."""
        return prod(len(_runs(size, self._cutters(dim)[1])[0]) for dim, size in enumerate(shape))

    def _cutters(self, dim: int) -> tuple[list[int], tuple[tuple[int, int], ...]]:
        """Return the mesh dimensions that cut a dimension of the tensor, and the size and the split factor of each."""
        axes = [axis for axis, cut in enumerate(self.cuts) if cut.dim == dim]
        return axes, tuple((self.mesh.shape[axis], self.cuts[axis].split_factor) for axis in axes)

    def renumbered(self, numbers: Mapping[int, int]) -> MeshLayout | None:
        """Return the same layout with other numbers for its ranks, None if a rank has none."""
        ranks = tuple(numbers.get(rank, -1) for rank in self.ranks)
        if -1 in ranks:
            return None
        return self if ranks == self.ranks else MeshLayout(Mesh(self.mesh.shape, ranks), self.cuts)

    def to_json(self) -> dict[str, Any]:
        return {"mesh": self.mesh.to_json(), "cuts": [list(cut) for cut in self.cuts]}

    @staticmethod
    def from_json(value: Mapping[str, Any], *, num_ranks: int = _MAX_RANKS) -> MeshLayout:
        """Read the output of `to_json` without trust, for a group of `num_ranks` ranks. Raises ValueError, KeyError or
        TypeError."""
        mesh = Mesh.from_json(value["mesh"], num_ranks=num_ranks)
        cuts = tuple(
            Cut(as_number(dim, REPLICATED, _MAX_DIMS), as_number(by, 1, 1 << 31)) for dim, by in as_list(value["cuts"])
        )
        if len(cuts) != len(mesh.shape):
            raise ValueError("a layout has not one cut for each dimension of its mesh")
        layout = MeshLayout(mesh, cuts)
        if layout.is_fine:
            raise ValueError("a layout has too many runs")
        return layout


@lru_cache(maxsize=512)
def _runs(size: int, cutters: tuple[tuple[int, int], ...]) -> tuple[_Array, _Array, _Array]:
    """Return the runs of `runs_of` along one dimension for all places at once, from the (shares, split factor) of each
    mesh dimension: the place of each, row-major in those mesh dimensions, its start, and its stop. They are in the
    order of places; neighbours of one place are joined."""
    place, start, stop = (np.array([number] if size else [], np.int64) for number in (0, 0, size))
    num_places = 1
    for shares, factor in cutters:
        split_factor = min(factor, max(1, size))  # further chunks are empty
        # Runs and chunks both divide the elements, place after place, into stretches that follow each other.
        ends = np.cumsum(stop - start)
        run_starts = ends - (stop - start)
        chunk_starts = _chunk_starts(place, ends, num_places, shares, split_factor)
        firsts = distinct(np.concatenate([run_starts, chunk_starts[chunk_starts < size]]))
        lasts = np.append(firsts[1:], size)[: len(firsts)]
        chunk = np.searchsorted(chunk_starts, firsts, side="right") - 1  # of equal starts only the last has elements
        run = np.searchsorted(run_starts, firsts, side="right") - 1
        place = chunk // (split_factor * shares) * shares + chunk % shares
        start = start[run] + firsts - run_starts[run]
        order = np.argsort(place, kind="stable")
        place, start, stop = place[order], start[order], (start + lasts - firsts)[order]
        num_places *= shares
    begins = np.append(True, (place[1:] != place[:-1]) | (start[1:] != stop[:-1]))[: len(place)]
    return place[begins], start[begins], stop[np.append(begins[1:], True)[: len(place)]]


def _chunk_starts(place: Any, ends: Any, num_places: int, shares: int, split_factor: int) -> _Array:
    """Return the start of each share of each chunk of each place, if the runs of all places are laid one after the
    other."""
    bounds = np.append(0, ends)[np.searchsorted(place, np.arange(num_places + 1))]
    lengths = np.diff(bounds)[:, None]
    sizes = -(-lengths // split_factor)
    outer = np.minimum(lengths, np.arange(split_factor + 1) * sizes)
    inner = np.diff(outer)[..., None]
    starts = np.minimum(inner, np.arange(shares) * -(-inner // shares))
    flat: _Array = (bounds[:-1, None, None] + outer[:, :-1, None] + starts).reshape(-1)
    return flat


def distinct(numbers: Any) -> np.ndarray[Any, Any]:
    """Return the different ones of some numbers, in ascending order."""
    found: np.ndarray[Any, Any] = np.unique(numbers, return_counts=True)[0]  # else numpy imports its masked arrays
    return found
