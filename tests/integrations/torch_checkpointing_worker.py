"""What the ranks of the tests of torch_checkpointing do, and a configuration whose storage has faults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder

from ckptstore.integrations.torch_checkpointing import StoreStorageConfig
from ckptstore.storage.retry import with_retries, without_retries
from ckptstore.testing import Hook, hook_from_environment, wrap
from ckptstore.transfer import Transfer
from ckptstore.transfer.opened import OpenedPlace


@dataclass
class FaultyConfig(StoreStorageConfig):
    """With a hook around every call of the storage: the one given, else the one that the environment asks for."""

    hook: Hook | None = None

    def opened(self) -> OpenedPlace:
        """The place, wrapped."""
        place, hook = super().opened(), self.hook or hook_from_environment()
        if hook is None:
            return place
        storage = with_retries(wrap(without_retries(place.storage), hook), place.config.retry)
        transfer = Transfer(storage, config=place.config.transfer, retry=place.config.retry)
        return OpenedPlace(storage=storage, transfer=transfer, config=place.config)


def manager_of(
    config: StoreStorageConfig, *, asynchronous: bool = False, resharded: str | None = None
) -> CheckpointManager:
    """A manager of this rank; `resharded` is an item that may be loaded by other numbers of ranks."""
    made = CheckpointManager.Config.with_async_save() if asynchronous else CheckpointManager.Config()
    if not asynchronous:
        made.save = SyncCheckpointSaverConfig()
    made.storage_config = config
    if resharded is not None:
        made.items = {resharded: ItemSpec(resharder=DefaultResharder())}
    return CheckpointManager(made)


def state_of(seed: int) -> dict[str, Any]:
    """More than a block of one tensor, and things that are small."""
    made = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(600, 700, generator=made),
        "half": torch.randn(5, generator=made, dtype=torch.float64).to(torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "lr": seed / 7,
    }


def save_alone(root: str, step: int, seed: int) -> None:
    """A job of one rank that saves one step."""
    manager = manager_of(FaultyConfig(root))
    manager.save(f"step_{step}", {"model": state_of(seed), "trainer": {"seed": seed}})
    manager.close()


def ranks_save_and_load(root: str, options: dict[str, Any] | None, asynchronous: bool) -> dict[str, Any]:
    """Two saves of a sharded model and its optimizer, and a load of each into another one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def built(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.Linear(4096, 8))
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def local(state: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {key: (item.to_local() if isinstance(item, DTensor) else item).clone() for key, item in state.items()}

    config = StoreStorageConfig(root, storage_options=options)
    manager = manager_of(config, asynchronous=asynchronous)
    model, optimizer = built(1)
    saved = {}
    for step in (10, 20):
        with manager.lock():
            trained(model, optimizer)
        rng = torch.full((3,), dist.get_rank())
        future = manager.save(
            f"step_{step}", {"model": model.state_dict(), "optim": optimizer.state_dict(), "rng": {"rng": rng}}
        )
        saved[step] = local(model.state_dict())
        if future is not None:
            future.result()
        dist.barrier()  # rank 0 commits after the ranks have met
    same = []
    for step in saved:
        other, other_optimizer = built(2)
        trained(other, other_optimizer)
        into = {
            "model": other.state_dict(),
            "optim": other_optimizer.state_dict(),
            "rng": {"rng": torch.zeros(3, dtype=torch.int64)},
        }
        loaded = manager.load(f"step_{step}", into=into, strict=True)
        found = local(other.state_dict())
        same += [bool(torch.equal(found[key], saved[step][key])) for key in found]
        same.append(bool((loaded["rng"]["rng"] == dist.get_rank()).all()))
    storage = config.create_storage()
    seen = {"ls": storage.ls(Path()), "files": storage.ls(Path("step_10")), "tmp": storage.exists(Path("tmp_step_10"))}
    manager.close()
    dist.destroy_process_group()
    return {"same": same, **seen}
