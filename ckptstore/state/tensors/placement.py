"""The boxes of a distributed tensor that a rank has, from its placements. Arithmetic; DTensor and ShardedTensor
alike."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import accumulate, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckptstore.errors import InvalidState
from ckptstore.runtime.torch_private import is_wrapper
from ckptstore.state.tensors.boxes import Box, whole
from ckptstore.state.tensors.cuts import REPLICATED, Cut, runs_of
from ckptstore.state.tensors.loaded import is_dtensor
from ckptstore.state.tensors.wrapped import Wrapped, WrappedPart, key_of_part, unwrap

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of most tensors. A tensor of these is not distributed or wrapped, so its attributes need no look."""


class Piece(NamedTuple):
    """A box of a tensor, and the memory on this rank that holds it."""

    box: Box
    tensor: torch.Tensor


class Sharers(NamedTuple):
    """The ranks that have the same pieces of a DTensor by its mesh, and the position of this one among them. No ranks
    for one outside of the mesh."""

    num_ranks: int
    ranks: tuple[int, ...]
    position: int
    member: int
    """Torch's number of this rank; -1 outside of the mesh."""


def pieces_of(tensor: torch.Tensor, key: str) -> list[Piece]:
    """Return the pieces of a plain or distributed tensor that this rank holds, detached, in the rank's own memory; none
    for a rank outside of the mesh. Leave pieces without elements out.

    Raises InvalidState for a placement that is neither Shard nor Replicate.
    """
    if type(tensor) in PLAIN_TYPES:
        detached = tensor.detach() if tensor.requires_grad else tensor
        return [Piece(whole(tuple(tensor.shape)), detached)] if tensor.numel() else []
    if is_dtensor(tensor):
        return [piece for piece in _dtensor_pieces(tensor, key) if piece.box.volume]
    shards = getattr(tensor, "local_shards", None)
    if shards is not None:
        return [
            Piece(Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)), shard.tensor.detach())
            for shard in shards()
            if shard.tensor.numel()
        ]
    return [Piece(whole(tuple(tensor.shape)), tensor.detach())] if tensor.numel() else []


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Return True if a tensor, or a DTensor's part on this rank, keeps its numbers in other tensors and names them."""
    if type(tensor) in PLAIN_TYPES:
        return False
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    return type(local) not in PLAIN_TYPES and not hasattr(local, "local_shards") and is_wrapper(local)


def wrapped_in(tensor: torch.Tensor, key: str) -> dict[str, Wrapped]:
    """Return the inner tensors of a tensor for which `is_wrapped` holds, by the key of the value that stands for it:
    its own key, or for a DTensor that of its box of the whole. Empty for all others, and for a rank that has no part.

    Raises InvalidState, with the key, for a tensor that cannot be taken apart.
    """
    if not is_wrapped(tensor):
        return {}
    if not is_dtensor(tensor):
        return {key: unwrap(tensor, key)}
    pieces = pieces_of(tensor, key)
    if len(pieces) > 1:
        raise InvalidState(
            f"{key} is a {type(tensor._local_tensor).__name__} whose part here is no one box of {tensor.placements}",
            hint="Apply tensor parallelism and FSDP2 to different dimensions of it",
        )
    found = {}
    for box, _ in pieces:
        part = WrappedPart(key, box.offsets, tuple(tensor.shape))
        found[key_of_part(key, box.offsets)] = unwrap(tensor._local_tensor, key, part)
    return found


def sharers_of(tensor: DTensor) -> Sharers:
    """Return the ranks that have the same pieces of a DTensor. Its mesh names the candidates; not all of them need have
    the tensor."""
    coordinate = tensor.device_mesh.get_coordinate()
    dims = tuple(dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate())
    return _sharers(tensor.device_mesh, None if coordinate is None else tuple(coordinate), dims)


@lru_cache(maxsize=256)
def _sharers(mesh: DeviceMesh, coordinate: tuple[int, ...] | None, dims: tuple[int, ...]) -> Sharers:
    count = prod(mesh.size(dim) for dim in dims)
    if coordinate is None:
        return Sharers(count, (), 0, -1)
    place = tuple(slice(None) if dim in dims else at for dim, at in enumerate(coordinate))
    ranks = tuple(mesh.mesh[place].reshape(-1).tolist())
    member = int(mesh.mesh[coordinate])
    return Sharers(count, ranks, ranks.index(member), member)


def group_of(tensor: torch.Tensor) -> int:
    """Return the lowest of the ranks over which a distributed tensor is distributed."""
    if is_dtensor(tensor):
        return _lowest_rank(tensor.device_mesh)
    metadata: Any = tensor.metadata()  # type: ignore[attr-defined]
    ranks = [shard.placement.rank() for shard in metadata.shards_metadata if shard.placement is not None]
    return min((rank for rank in ranks if rank is not None), default=0)


@lru_cache(maxsize=64)
def _lowest_rank(mesh: DeviceMesh) -> int:
    return int(mesh.mesh.min())


def dtype_and_shape(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and the shape of the whole tensor."""
    # Any attribute of a ShardedTensor but its metadata warns.
    if type(tensor) not in PLAIN_TYPES and hasattr(tensor, "local_shards"):
        metadata: Any = tensor.metadata()  # type: ignore[attr-defined]
        return metadata.tensor_properties.dtype, tuple(metadata.size)
    return tensor.dtype, tuple(tensor.shape)


@cache
def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, without the module."""
    return str(dtype).removeprefix("torch.")


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return True if ranks have parts of it: a DTensor or FSDP1's ShardedTensor."""
    return type(tensor) not in PLAIN_TYPES and (is_dtensor(tensor) or hasattr(tensor, "local_shards"))


def cut_of(placement: Any, num_dims: int) -> Cut:
    """Return the cut that a placement makes in a tensor of `num_dims` dimensions."""
    if placement.is_replicate():
        return Cut(REPLICATED)
    return Cut(placement.dim % num_dims, getattr(placement, "split_factor", 1))


def _dtensor_pieces(tensor: DTensor, key: str) -> Iterator[Piece]:
    for placement in tensor.placements:
        if not (placement.is_replicate() or placement.is_shard()) and not hasattr(placement, "split_factor"):
            raise InvalidState(f"{key} has the placement {placement!r}, which has no numbers to store yet")
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return
    with torch.no_grad():
        local = tensor.to_local().detach()
    mesh_shape, cuts = (
        tuple(tensor.device_mesh.mesh.shape),
        [cut_of(placement, tensor.ndim) for placement in tensor.placements],
    )
    runs = runs_of(tuple(tensor.shape), mesh_shape, cuts, coordinate)
    sizes = tuple(sum(size for _, size in each) for each in runs)
    if hasattr(local, "local_shards"):  # several boxes, each with memory of its own and its place in the whole
        shards: Any = local
        for shard, offsets in zip(shards.local_shards(), shards.local_offsets(), strict=True):
            yield Piece(Box(tuple(offsets), tuple(shard.shape)), shard.detach())
        return
    if sizes != tuple(local.shape):
        raise InvalidState(f"{key} has the local shape {tuple(local.shape)} where {tensor.placements} give {sizes}")
    if all(len(each) == 1 for each in runs):
        yield Piece(Box(tuple(each[0][0] for each in runs), sizes), local)
        return
    starts = [[0, *accumulate(size for _, size in each)] for each in runs]
    for place in product(*(range(len(each)) for each in runs)):
        box = Box(
            tuple(each[index][0] for each, index in zip(runs, place, strict=True)),
            tuple(each[index][1] for each, index in zip(runs, place, strict=True)),
        )
        slices = tuple(slice(start[index], start[index + 1]) for start, index in zip(starts, place, strict=True))
        yield Piece(box, local[slices])
