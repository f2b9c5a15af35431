"""A run that resumes into `all_state` takes the steps of one that never ended, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks

import ckptstore

pytestmark = pytest.mark.slow

Steps = dict[int, tuple[float, list[float]]]
"""For each step its loss and its samples."""


class Run:
    """Train with dropout, shuffled data, and noise from each generator that a training draws from."""

    def __init__(self, layout: str, num_workers: int = 0) -> None:
        import random

        import numpy as np
        from torchdata.stateful_dataloader import StatefulDataLoader

        rank = torch.distributed.get_rank() if layout in ("ddp", "fsdp2") else 0
        torch.manual_seed(0)
        np.random.seed(rank)
        random.seed(rank)
        self.noise = torch.Generator().manual_seed(rank)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
        self.model = _in_layout(net, layout)
        torch.manual_seed(100 + rank)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        data = torch.arange(20.0) + 100 * rank
        self.loader = StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers)
        if layout.startswith("accelerat"):
            from accelerate import Accelerator, DataLoaderConfiguration

            seeded = (
                {"use_seedable_sampler": True, "dispatch_batches": "dispatched" in layout} if layout[-1] != "e" else {}
            )
            config = DataLoaderConfiguration(use_stateful_dataloader=True, **seeded)
            accelerator = Accelerator(cpu=True, dataloader_config=config)
            data = torch.arange(20.0 * accelerator.num_processes)  # which it deals out
            plain = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
            parts = (self.model, optimizer, plain if seeded else self.loader, self.scheduler)
            self.model, optimizer, self.loader, self.scheduler = accelerator.prepare(*parts)
        if layout.startswith("accelerator"):
            found = [accelerator, self.scaler, self.noise]
        else:
            found = [self.model, self.scaler, self.loader, self.noise, self.scheduler]
        self.state = ckptstore.all_state(*found, epoch=0, step=0)
        self.optimizer = self.state["optimizer"]
        assert self.optimizer is optimizer

    def steps(self, store: Any, *, save_at: int = -1, at_the_end: bool = False) -> Steps:
        """Train from where the store is to the end, or until a save of that step, which is the last."""
        found: Steps = {}
        state = self.state
        store.resume(state)
        while state["epoch"] < 3:
            for batch in self.loader:
                found[state["step"]] = self.step(batch), batch.tolist()
                state["step"] += 1
                if state["step"] == save_at and not at_the_end:
                    store.save(save_at, state)
                    return found
            state["epoch"] += 1
            if state["step"] == save_at:
                store.save(save_at, state)
                return found
        return found

    def step(self, batch: torch.Tensor) -> float:
        import random

        import numpy as np

        self.optimizer.zero_grad()
        noise = np.random.rand() + random.random() + torch.rand((), generator=self.noise)
        loss = self.model(batch[:, None].expand(-1, 4) * noise).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss.item()


def _in_layout(net: Any, layout: str) -> Any:
    if layout == "ddp":
        return torch.nn.parallel.DistributedDataParallel(net)
    if layout == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(net)
    return net


def differences(
    directory: Path, layout: str, save_at: int, *, num_workers: int = 0, at_the_end: bool = False
) -> list[int]:
    """The steps of an interrupted run that are not those of one without an end."""
    with ckptstore.open_store(directory / "never") as store:
        whole = Run(layout, num_workers).steps(store)
    torch.manual_seed(999)  # another process begins with other numbers
    with ckptstore.open_store(directory / "ended") as store:
        before = Run(layout, num_workers).steps(store, save_at=save_at, at_the_end=at_the_end)
        after = Run(layout, num_workers).steps(store)
    assert list(before) == list(range(save_at))
    assert list(after) == list(range(save_at, 15))
    assert len({loss for loss, _ in whole.values()}) == 15
    return [step for step, found in whole.items() if {**before, **after}[step] != found]


@pytest.mark.parametrize(
    ("save_at", "at_the_end", "num_workers"),
    [(1, False, 0), (7, False, 0), (10, False, 0), (10, True, 0), (7, False, 2), (10, True, 2)],
)
def test_one_process(tmp_path: Path, save_at: int, at_the_end: bool, num_workers: int) -> None:
    assert not differences(tmp_path, "one", save_at, num_workers=num_workers, at_the_end=at_the_end)


def in_ranks(directory: Path) -> dict[str, list[int]]:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return {
        f"{layout} {save_at}": differences(directory / layout / str(save_at), layout, save_at, at_the_end=save_at == 10)
        for layout in ("ddp", "fsdp2")
        for save_at in (7, 10)
    }


def test_two_ranks(tmp_path: Path) -> None:
    for found in run_ranks(2, in_ranks, tmp_path):
        assert found == {"ddp 7": [], "ddp 10": [], "fsdp2 7": [], "fsdp2 10": []}


def with_accelerate(directory: Path, layouts: list[tuple[str, int]]) -> dict[str, list[int]]:
    torch.set_num_threads(1)
    return {
        f"{layout} {save_at}": differences(directory / layout / str(save_at), layout, save_at, at_the_end=save_at == 10)
        for layout, save_at in layouts
    }


def test_the_wrappers_of_accelerate(tmp_path: Path) -> None:
    (found,) = run_ranks(
        1, with_accelerate, tmp_path, [(layout, step) for layout in ("accelerate", "accelerator") for step in (7, 10)]
    )
    assert found == {layout: [] for layout in found}


def test_an_accelerator_on_two_ranks(tmp_path: Path) -> None:
    for found in run_ranks(
        2, with_accelerate, tmp_path, [("accelerator", 7), ("accelerator", 10), ("accelerator, dispatched", 10)]
    ):
        assert found == {layout: [] for layout in found}


def of_an_accelerator(directory: Path) -> dict[str, Any]:
    """What an `Accelerator` has in a state, what comes back, and what is refused."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from torch.utils.data import DataLoader

    def prepared(seed: int, **config: bool) -> tuple[Any, Any]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        net, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        torch.manual_seed(seed)
        loader = DataLoader(torch.arange(16.0), batch_size=2, shuffle=True)
        parts = accelerator.prepare(net, other, optimizer, schedule, loader)
        accelerator.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        return accelerator, parts

    found: dict[str, Any] = {}
    accelerator, (model, _, _, schedule, loader) = prepared(1, use_stateful_dataloader=True, use_seedable_sampler=True)
    found["keys"] = sorted(ckptstore.all_state(accelerator, model, epoch=1))
    with ckptstore.open_store(directory, group="solo") as store:
        accelerator.step, accelerator.project_configuration.iteration = 3, 4
        orders = [torch.cat(list(loader)).tolist() for _ in range(3)]
        store.save(1, ckptstore.all_state(accelerator))
        later = torch.cat(list(loader)).tolist()
        again, parts = prepared(2, use_stateful_dataloader=True, use_seedable_sampler=True)  # another seed
        store.resume(ckptstore.all_state(again))
        found["counts"] = again.step, again.project_configuration.iteration
        found["order"] = later == torch.cat(list(parts[-1])).tolist() and later not in orders

        def refused(**config: bool) -> str:
            accelerator, parts = prepared(1, **config)
            try:
                state = ckptstore.all_state(accelerator)
                for _ in parts[-1]:
                    store.save(2, state)
            except ckptstore.InvalidState as error:
                return str(error)
            return "not refused"

        found["no position"] = refused()
        plain = {"use_stateful_dataloader": True}  # torch's own RandomSampler, whose order nobody else keeps
        accelerator, parts = prepared(1, **plain)
        state, left = ckptstore.all_state(accelerator), []
        for number, batch in enumerate(parts[-1]):
            left += batch.tolist() if number > 2 else []
            if number == 2:
                store.save(5, state)
        again, parts = prepared(2, **plain)
        store.resume(ckptstore.all_state(again))
        found["left"] = torch.cat(list(parts[-1])).tolist() == left
        with pytest.raises(ckptstore.InvalidState, match=r"data\.train is a DataLoaderShard.*use_stateful"):
            store.save(3, {"data": {"train": prepared(1)[1][-1]}})
    found["parts"] = sorted(ckptstore.all_state(model, schedule))
    return found


def test_what_an_accelerator_has(tmp_path: Path) -> None:
    (found,) = run_ranks(1, of_an_accelerator, tmp_path)
    kinds = ["accelerator", "custom", "epoch", "loader", "model", "model_1", "optimizer", "rng", "scheduler"]
    assert found["keys"] == kinds
    assert found["parts"] == ["model", "optimizer", "rng", "scheduler"]
    assert found["counts"] == (3, 4)
    assert found["order"], "the fourth pass has the order that its seed gives it"
    assert "loader is a DataLoaderShard" in found["no position"]
    assert "use_stateful_dataloader=True" in found["no position"]
    assert found["left"], "the rest of a pass comes in the order that it had"


def test_what_has_no_name_or_no_state_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ckptstore.InvalidState, match=r"'model'.*model_a="):
        ckptstore.all_state(model, torch.nn.Linear(2, 2))
    with pytest.raises(ckptstore.InvalidState, match="'model'"):
        ckptstore.all_state(model, model=torch.nn.Linear(2, 2))
    with pytest.raises(ckptstore.InvalidState, match=r"what a dict is called.*name="):
        ckptstore.all_state(model, {"epoch": 3})
    with pytest.raises(ckptstore.InvalidState, match=r"loader is a DataLoader.*no state_dict.*StatefulDataLoader"):
        ckptstore.all_state(model, torch.utils.data.DataLoader(range(3)))
    with pytest.raises(ckptstore.InvalidState, match="'rng'"):
        ckptstore.all_state(model, rng=1)
    with pytest.raises(ckptstore.InvalidState, match="two objects"):
        ckptstore.all_state(model, torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1), optimizer=1)
