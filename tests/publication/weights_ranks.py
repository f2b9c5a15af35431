"""What ranks do that publish together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from weights_made import bytes_of

import ckptstore


def net() -> nn.Module:
    """A tied model with sizes that no number of ranks divides."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(13, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 13, bias=False))
    model[3].weight = model[0].weight
    return model


def publish_in_layouts(uri: str, options: dict[str, Any]) -> list[Any]:
    """Publish one model in several layouts, with the same bytes, and return those of each version."""
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    expected = []
    for version, layout in enumerate(("ddp", "fsdp2", "fsdp1", "mapping"), 1):
        plain = net()
        weights: Any = plain
        if layout == "ddp":
            weights = DistributedDataParallel(plain)
        elif layout == "fsdp2":
            fully_shard(weights, mesh=mesh)
        elif layout == "fsdp1":
            weights = FullyShardedDataParallel(plain, device_id=torch.device("cpu"), use_orig_params=True)
        else:
            weights = {name: distribute_tensor(item, mesh, [Shard(0)]) for name, item in net().state_dict().items()}
            weights["mine"] = distribute_tensor(torch.arange(5.0), mesh, [Replicate()])
            weights |= {f"stage.{rank}": torch.full((3,), float(rank))}
        with ckptstore.open_publication(uri, keep=9, **options) as publication:
            publication.publish(2 * version, weights)
            with torch.no_grad():
                for tensor in weights.parameters() if isinstance(weights, nn.Module) else weights.values():
                    (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)
            publication.publish_async(2 * version + 1, weights).result()
        expected.append(bytes_of({name: item + 1 for name, item in net().state_dict().items()}))
    dist.destroy_process_group()
    return expected


def publish_apart(uri: str) -> list[str]:
    """Publish what the ranks do not have alike; return the errors."""
    dist.init_process_group("gloo")
    rank, errors = dist.get_rank(), []
    with ckptstore.open_publication(uri) as publication:
        for version, weights in (
            (1, {"a": torch.ones(2 + rank)}),
            (1, {"a": torch.full((2,), float(rank))}),
            (3, {"a": torch.ones(2)} if rank else {"a": "none"}),
        ):
            try:
                publication.publish(version, weights)
            except ckptstore.CkptstoreError as error:
                errors.append(f"{type(error).__name__}: {error}")
        publication.publish(5, {"a": torch.ones(2)})
    both = {"a": torch.ones(2), "b": torch.ones(3)}
    with ckptstore.open_publication(uri, checksum="adler32") as publication:  # which cannot prove what is stored
        try:
            publication.publish(4, both)
        except ckptstore.CkptstoreError as error:
            errors.append(f"{type(error).__name__}: {error}")
        publication.publish(6, both)
    dist.destroy_process_group()
    return errors
