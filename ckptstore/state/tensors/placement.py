"""The boxes of a distributed tensor that a rank has, from its placements. Arithmetic; DTensor and ShardedTensor
alike."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from ckptstore.errors import InvalidState
from ckptstore.runtime.torch_private import is_wrapper
from ckptstore.state.tensors.boxes import REPLICATED, Box, Cut, runs_of, whole
from ckptstore.state.tensors.layouts import Mesh, MeshLayout
from ckptstore.state.tensors.wrapped import Wrapped, WrappedPart, key_of_part, unwrap

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor


PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of most tensors. A tensor of these is not distributed or wrapped, so its attributes need no look."""


class Piece(NamedTuple):
    """A box of a tensor, and the memory on this rank that holds it."""

    box: Box
    tensor: torch.Tensor


class MeshShare(NamedTuple):
    """This rank's share of a DTensor, in torch's numbers of the ranks."""

    layout: MeshLayout | None
    """The layout by which the mesh cuts it; None if its parts say themselves which boxes they are, or are too many for
    arithmetic."""
    num_copies: int
    """The number of ranks of the mesh that have each box."""
    sharers: tuple[int, ...]
    """Those that have the pieces of this rank, itself with them; not all of them need have the tensor. Empty outside of
    the mesh."""
    position: int
    """The place of this rank among them."""
    group: int
    """The lowest rank of the mesh."""
    member: int
    """This rank; -1 outside of the mesh."""


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


def mesh_share(tensor: DTensor) -> MeshShare:
    coordinate = tensor.device_mesh.get_coordinate()
    place = None if coordinate is None else tuple(coordinate)
    share = _mesh_share(tensor.device_mesh, tuple(tensor.placements), tensor.ndim, place)
    return share._replace(layout=None) if hasattr(tensor._local_tensor, "local_shards") else share


@lru_cache(maxsize=256)
def _mesh_share(
    mesh: DeviceMesh, placements: tuple[Any, ...], num_dims: int, coordinate: tuple[int, ...] | None
) -> MeshShare:
    ranks = Mesh(tuple(mesh.mesh.shape), tuple(mesh.mesh.reshape(-1).tolist()))
    layout = MeshLayout(ranks, tuple(_cut_of(placement, num_dims) for placement in placements))
    member = -1 if coordinate is None else int(mesh.mesh[coordinate])
    sharers = layout.sharers_of(member)
    position = sharers.index(member) if sharers else 0
    held = None if layout.is_fine else layout
    return MeshShare(held, layout.num_copies, sharers, position, min(ranks.ranks), member)


def lowest_shard_rank(tensor: Any) -> int:
    """Return the lowest of the ranks over which a ShardedTensor is distributed."""
    ranks = [shard.placement.rank() for shard in tensor.metadata().shards_metadata if shard.placement is not None]
    return min((rank for rank in ranks if rank is not None), default=0)


def dtype_and_shape(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    # Any attribute of a ShardedTensor but its metadata warns.
    if type(tensor) not in PLAIN_TYPES and hasattr(tensor, "local_shards"):
        metadata: Any = tensor.metadata()  # type: ignore[attr-defined]
        return metadata.tensor_properties.dtype, tuple(metadata.size)
    return tensor.dtype, tuple(tensor.shape)


@cache
def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, without the module."""
    return str(dtype).removeprefix("torch.")


def is_on_meta(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has no numbers. A ShardedTensor, which raises where this rank has no one shard of it,
    always has some."""
    return (type(tensor) in PLAIN_TYPES or not hasattr(tensor, "local_shards")) and tensor.is_meta


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return True if ranks have parts of it: a DTensor or FSDP1's ShardedTensor."""
    return type(tensor) not in PLAIN_TYPES and (is_dtensor(tensor) or hasattr(tensor, "local_shards"))


def _cut_of(placement: Any, num_dims: int) -> Cut:
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
    cuts = [_cut_of(placement, tensor.ndim) for placement in tensor.placements]
    runs = runs_of(tuple(tensor.shape), tuple(tensor.device_mesh.mesh.shape), cuts, coordinate)
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


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    return type(value) not in PLAIN_TYPES and _is_of("torch.distributed.tensor", "DTensor", value)


def is_fsdp1(value: object) -> TypeGuard[FullyShardedDataParallel]:
    return _is_of("torch.distributed.fsdp", "FullyShardedDataParallel", value)


def _is_of(module: str, name: str, value: object) -> bool:
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(value, found)
