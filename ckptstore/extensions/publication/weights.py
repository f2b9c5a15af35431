"""The weights of a model as one rank holds them: names and dtypes of the export, owners, and whole tensors in memory.

Each tensor has one owner, which publishes it whole, since the format knows no parts. Owners are dealt among the ranks
that have the tensor, by size. A tensor that is cut among ranks is gathered, one at a time, in the order of the names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch

from ckptstore.errors import InvalidInput, InvalidState
from ckptstore.extensions.exchange.safetensors_file import NAMES
from ckptstore.extensions.publication.codec import Memory, digest_of, num_threads
from ckptstore.extensions.publication.wire import check_tensor_names
from ckptstore.runtime.new_memory import new_memory
from ckptstore.runtime.parallel import mapped
from ckptstore.state.live.apply import collect
from ckptstore.state.tensors.placement import dtype_and_shape, is_distributed, is_dtensor, name_of
from ckptstore.state.tensors.tensor_memory import digest_of as fingerprint_of

_ROOT = "weights"
_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor that a rank has, whole or in part."""

    tensor: torch.Tensor
    dtype: torch.dtype
    """The dtype of the export."""
    shape: tuple[int, ...]
    is_cut: bool
    """True if ranks have parts of it."""
    lowest_rank_counts: bool

    @property
    def size_bytes(self) -> int:
        """The bytes of the whole tensor in the export."""
        return prod(self.shape) * self.dtype.itemsize

    def described(self) -> list[Any]:
        """Return what the ranks must agree on: dtype and shape, and whether it is cut."""
        return [NAMES[name_of(self.dtype)], list(self.shape), self.is_cut]

    def compared(self) -> str | None:
        """Return a digest of the bytes that ranks must have alike; None where they may differ."""
        return None if self.is_cut else "lowest" if self.lowest_rank_counts else fingerprint_of(self.tensor)


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a rank, by the names of the export, in their order."""

    tensors: Mapping[str, Weight]
    left_out: Sequence[str]
    """The keys of plain values, which the format does not hold."""

    def described(self) -> dict[str, list[Any]]:
        """Return what the ranks must agree on, by name."""
        return {name: weight.described() for name, weight in self.tensors.items()}

    def offered(self, *, compares: bool) -> dict[str, list[Any]]:
        """Return `described` with the digest of `compared` for each tensor; without it where nothing `compares`."""
        return {
            name: [*weight.described(), weight.compared() if compares else None]
            for name, weight in self.tensors.items()
        }

    def structure(self) -> str:
        """Return a digest of `described`."""
        return hashlib.sha256(json.dumps(self.described()).encode()).hexdigest()


def collect_weights(weights: Any, *, strip_prefix: str, dtype: torch.dtype | None) -> Weights:
    """Return the tensors of a module, or of a flat mapping, under the names of the export. Collective under FSDP1.

    Raises InvalidInput and InvalidState, with the names, for what cannot be published.
    """
    if not isinstance(weights, torch.nn.Module):
        if not isinstance(weights, Mapping):
            raise InvalidInput(
                f"weights is a {type(weights).__name__}", hint="Give a module, or a mapping of names to tensors"
            )
        bad = [str(name) for name, item in weights.items() if not isinstance(item, torch.Tensor)]
        bad += [repr(name) for name in weights if not isinstance(name, str)]
        if bad:
            raise InvalidInput(f"A mapping of weights has names of text, and tensors alone: {', '.join(bad[:5])}")
    flat = collect({_ROOT: weights})
    groups: dict[str, list[str]] = {}
    for key in (*flat.tensors, *flat.aliases):
        name = key.removeprefix(f"{_ROOT}.").removeprefix(strip_prefix)
        groups.setdefault(flat.aliases.get(key, key), []).append(name)
    found: dict[str, Weight] = {}
    for key, names in groups.items():
        entry = flat.tensors[key]
        stored, shape = dtype_and_shape(entry.tensor)
        exported = dtype if dtype is not None and stored.is_floating_point else stored
        # Of tied weights the input embedding, as in an export.
        name = min(names, key=lambda name: ("embed" not in name and "wte" not in name, name))
        if name in found:
            raise InvalidInput(f"Two tensors would both be called {name!r}")
        is_cut = is_distributed(entry.tensor)
        found[name] = Weight(entry.tensor, exported, shape, is_cut, entry.lowest_rank_counts)
    refused = [f"{name} ({name_of(item.dtype)})" for name, item in found.items() if name_of(item.dtype) not in NAMES]
    refused += [repr(name) for name in check_tensor_names(list(found))]
    if refused:
        raise InvalidState(f"A publication has no place for {', '.join(sorted(refused)[:10])}")
    values = [key.removeprefix(f"{_ROOT}.") for key in flat.values if key != _ROOT]
    return Weights(dict(sorted(found.items())), values)


def deal(offered: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, int]:
    """Return the owner of each tensor: of the ranks that have it, the one that owns fewest bytes so far.

    Of a buffer that only the lowest rank has right, that is the one. Raises InvalidState if ranks have different
    tensors under one name.
    """
    holders: dict[str, list[int]] = {}
    for rank, tensors in enumerate(offered):
        for name, item in tensors.items():
            first = holders.setdefault(name, [rank])[0]
            other = offered[first][name]
            if list(other) != list(item):
                mine, others = _shown(item), _shown(other)
                what = f"is {mine} on rank {rank} and {others} on rank {first}"
                if mine == others:
                    what = f"has other numbers on rank {rank} than on rank {first}"
                raise InvalidState(f"{name} {what}", ranks=(first, rank))
            if first != rank:
                holders[name].append(rank)
    if not holders:
        raise InvalidInput("There is no tensor to publish")
    owned_bytes = [0] * len(offered)
    owners = {}
    sized = [(prod(offered[ranks[0]][name][1]), name) for name, ranks in holders.items()]
    for size, name in sorted(sized, reverse=True):
        is_of_lowest = offered[holders[name][0]][name][3] == "lowest"
        owner = min(holders[name], key=lambda rank: (not is_of_lowest and owned_bytes[rank], rank))
        owners[name] = owner
        owned_bytes[owner] += size
    return owners


def _shown(item: Sequence[Any]) -> str:
    return f"{item[0]} {list(item[1])}{', cut' if item[2] else ''}"


@dataclass(slots=True)
class HostCopy:
    """Whole tensors in host memory, in the dtypes of the export: what a rank publishes, and the base of its deltas."""

    places: Mapping[str, tuple[int, int]]
    """The offset and the bytes of each tensor, by name."""
    memory: Memory
    digests: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(sizes_bytes: Mapping[str, int]) -> HostCopy:
        """Allocate memory for tensors of these sizes. Raises InvalidState where there is none."""
        places, at = {}, 0
        for name, size_bytes in sizes_bytes.items():
            places[name] = (at, size_bytes)
            at += -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        try:
            memory = np.frombuffer(new_memory(max(at, 1)), np.uint8)
        except OSError as error:
            raise InvalidState(f"There is no memory for {at} bytes of weights: {error.strerror}") from error
        return HostCopy(places, memory)

    def bytes_of(self, name: str) -> Memory:
        """Return the bytes of a tensor, without a copy."""
        offset, size_bytes = self.places[name]
        return self.memory[offset : offset + size_bytes]

    @property
    def sizes_bytes(self) -> dict[str, int]:
        """The bytes of each tensor, by name."""
        return {name: size_bytes for name, (_, size_bytes) in self.places.items()}

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(self.sizes_bytes.values())

    def digested(self, checksum: str) -> dict[str, str]:
        """Return the digests of all tensors; calculated once."""
        left = [name for name in self.places if name not in self.digests]
        found = mapped(
            lambda name: digest_of(self.bytes_of(name), checksum),
            left,
            num_threads=num_threads(),
            name="ckptstore-digest",
        )
        self.digests.update(zip(left, found, strict=True))
        return self.digests


def stage(weights: Weights, owners: Mapping[str, int], rank: int, copy: Callable[[], HostCopy]) -> HostCopy:
    """Copy the tensors that a rank owns. Collective where a tensor is cut: all ranks that have it take part.

    An error is raised at the end, so that the other ranks are not left alone in a collective.
    """
    error: Exception | None = None
    target: HostCopy | None = None
    try:
        target = copy()
    except Exception as failure:
        error = failure
    with torch.no_grad():
        for name, weight in weights.tensors.items():
            is_own = owners[name] == rank
            try:
                whole = _gathered(weight, owners[name]) if weight.is_cut else weight.tensor.detach()
                if is_own and target is not None and error is None and weight.size_bytes:
                    assert whole is not None  # this rank is the one to which it is gathered
                    memory = torch.frombuffer(target.bytes_of(name).data, dtype=weight.dtype)
                    memory.view(weight.shape).copy_(whole)
            except Exception as failure:
                error = error or failure
    if error is not None or target is None:
        raise error or InvalidState("Nothing was copied")
    return target


def _gathered(weight: Weight, owner: int) -> torch.Tensor | None:
    """Return a cut tensor whole; None on ranks that need not have it."""
    tensor: Any = weight.tensor
    if is_dtensor(tensor):
        return tensor.full_tensor()
    out = None
    if torch.distributed.get_rank() == owner:
        out = torch.empty(weight.shape, dtype=dtype_and_shape(tensor)[0], device=_device_of(tensor))
    tensor.gather(dst=owner, out=out)
    return out


def _device_of(sharded: Any) -> torch.device:
    shards = sharded.local_shards()
    return shards[0].tensor.device if shards else torch.device("cpu")
