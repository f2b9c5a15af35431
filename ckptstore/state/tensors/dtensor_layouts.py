"""The layout of a DTensor."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckptstore.state.tensors.layouts import Mesh, MeshLayout
from ckptstore.state.tensors.placement import cut_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def layout_of(tensor: DTensor) -> MeshLayout | None:
    """Return the layout by which the mesh of a DTensor cuts it, in torch's numbers of the ranks. Return None if its
    parts say themselves which boxes they are, or are too many for arithmetic."""
    if hasattr(tensor._local_tensor, "local_shards"):
        return None
    return _layout(tensor.device_mesh, tuple(tensor.placements), tensor.ndim)


@lru_cache(maxsize=256)
def _layout(mesh: DeviceMesh, placements: tuple[Any, ...], num_dims: int) -> MeshLayout | None:
    ranks = Mesh(tuple(mesh.mesh.shape), tuple(mesh.mesh.reshape(-1).tolist()))
    layout = MeshLayout(ranks, tuple(cut_of(placement, num_dims) for placement in placements))
    return None if layout.is_fine else layout
