"""FSDP1 over tensor parallelism: torch mixes up the optimizer states of the ranks, so the optimizer is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_ranks import run_ranks


def save(directory: Path) -> list[str]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import ckptstore

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    parallel = parallelize_module(layers, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = FullyShardedDataParallel(
        parallel, device_mesh=mesh["data"], use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.Adam(model.parameters())
    told = []
    with ckptstore.open_store(directory, durable=False) as store:
        for has_stepped in (False, True):
            if has_stepped:
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
            try:
                store.save(1, {"model": model, "optim": optimizer})
            except ckptstore.InvalidState as error:
                told.append(str(error))
        store.save(2, {"model": model})
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        store.load({"model": model})
        assert all(map(torch.equal, model.parameters(), expected))
    dist.destroy_process_group()
    return told


@pytest.mark.slow
def test_the_optimizer_is_refused_by_name_and_the_module_is_not(tmp_path: Path) -> None:
    for told in run_ranks(4, save, tmp_path, timeout_seconds=240, env={"PYTHONWARNINGS": "ignore"}):
        assert len(told) == 2
        assert all(
            "the optimizer at 'optim' is of parameters under FSDP1 and tensor parallelism" in text for text in told
        )
