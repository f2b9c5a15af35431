"""What the processes of the tests of casts run: sharded states that are saved in a smaller dtype, and loaded again."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckptstore import CkptstoreError, open_store


def model_and_optimizer(seed: int, *, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make a module under FSDP2 over all ranks, with an optimizer that has stepped."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(600, 1100), torch.nn.Linear(1100, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 600)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def numbers_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all of what the optimizer holds, whole."""
    every = [value for one in optimizer.state.values() for value in one.values()]
    return [value.full_tensor() if isinstance(value, DTensor) else value.clone() for value in every]


def save_cast(root: str, incremental: Any) -> dict[str, Any]:
    """Save under FSDP2 with the optimizer in bfloat16, and resume into another one."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = model_and_optimizer(1, steps=2)
    own = {"late": torch.full((300_000,), 0.1 + rank)} if rank == 1 else {}
    with open_store(root, durable=False) as store:
        state = {"model": model, "optimizer": optimizer, **own}
        casts = {"optimizer.*": "bfloat16", "late": torch.float16}
        plain = store.save(1, state)
        store.save(2, state, dtype=casts, incremental=incremental)
        cast = store.save_async(3, state, dtype=casts, incremental=incremental).result()
        others = model_and_optimizer(2, steps=1)
        late = {"late": torch.zeros(300_000)} if rank == 1 else {}
        cast.load({"model": others[0], "optimizer": others[1], **late})
        saved, loaded = numbers_of(optimizer), numbers_of(others[1])
        again = model_and_optimizer(3, steps=1)
        own = {"late": torch.zeros(300_000)} if rank == 1 else {}
        cast.load({"model": again[0], "optimizer": again[1], **own}, read_once="job")
        shared = numbers_of(again[1])
        errors = []
        mixed = {"mixed": torch.ones(5, dtype=torch.float64 if rank else torch.float32)}
        for wrong, what in [
            ({"nothing.*": "bfloat16"}, state),
            ({"model.*": "bfloat16" if rank else "float16"}, state),
            ({"mixed": "bfloat16"}, mixed),
        ]:
            try:
                store.save(4, what, dtype=wrong)
            except CkptstoreError as error:
                errors.append(f"{type(error).__name__}: {error}")
        try:
            store.warm_up(state, dtype={"model.*": "bfloat16" if rank else "float16"})
        except CkptstoreError as error:
            errors.append(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
    return {
        "sizes": (plain.size_bytes, cast.size_bytes),
        "is_equal": [
            torch.equal(one if not one.dim() else one.bfloat16().float(), other)
            for one, other in zip(saved, loaded, strict=True)
        ],
        "is_equal_shared": [torch.equal(one, other) for one, other in zip(loaded, shared, strict=True)],
        "dtypes": {str(one.dtype) for one in loaded},
        "late": late["late"][0].item() if late else None,
        "errors": errors,
    }


def resume_alone(root: str) -> list[torch.Tensor]:
    """Load what was cast under another number of ranks, and return the numbers of the optimizer."""
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer(3, steps=1)
    with open_store(root, durable=False) as store:
        assert store.resume({"model": model, "optimizer": optimizer}) is not None
    found = numbers_of(optimizer)
    dist.destroy_process_group()
    assert os.environ["WORLD_SIZE"]
    return found
