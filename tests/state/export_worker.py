"""What the processes of the export tests run: a sharded save, and an export whose memory is measured."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptstore import open_store


def sharded_tensors() -> dict[str, torch.Tensor]:
    """The whole tensors that `save_sharded` saves in pieces."""
    generator = torch.Generator().manual_seed(5)
    return {
        "rows": torch.randn(1501, 700, generator=generator),
        "columns": torch.randn(700, 1501, generator=generator).bfloat16(),
        "small": torch.randn(7, 3, generator=generator),
    }


def save_sharded(root: str) -> None:
    """Save DTensors, a tensor that all ranks have, and one and a value that differ between them."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = sharded_tensors()
    state = {
        "model": {
            "rows": distribute_tensor(whole["rows"], mesh, [Shard(0)]),
            "columns": distribute_tensor(whole["columns"], mesh, [Shard(1)]),
            "small": distribute_tensor(whole["small"], mesh, [Shard(0)]),
            "same": torch.arange(5),
            "own": torch.full((3,), rank),
        },
        "seed": 100 + rank,
        "epoch": 4,
    }
    with open_store(root, rank_timeout_seconds=60) as store:
        store.save(1, state)
    dist.barrier()
    dist.destroy_process_group()


def main(uri: str, directory: str, *kinds: str) -> None:
    """Export in these formats; print by how many bytes that raised the peak of this process's memory."""
    from ckptstore import Checkpoint
    from ckptstore.interchange import export

    checkpoint = Checkpoint.from_uri(uri)
    for kind in kinds:  # what is loaded on first use
        export(checkpoint, f"{directory}/{kind}-small", to=kind, include="small")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = status_bytes("VmRSS")
    for kind in kinds:
        export(checkpoint, f"{directory}/{kind}", to=kind, include="*")
    print(status_bytes("VmHWM") - before)


def status_bytes(field: str) -> int:
    """Memory of this process as the kernel counts it."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
