"""The training function of `ray_train.py`. Workers import it by name."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckptstore
from ckptstore.tools.bench.figures.report import Sample
from ckptstore.tools.bench.measure import Meter
from ckptstore.tools.bench.training import SHAPES, parallel_model


def train(config: dict[str, Any]) -> None:
    """The training function: the whole measurement in a first start, the end of the curve again in a second one."""
    import ray.train.torch

    device = ray.train.torch.get_device()
    model, optimizer = parallel_model(SHAPES[config["model"]], device, config["parallel"])
    state = {"model": model, "optimizer": optimizer}
    store = ckptstore.ray.store(retention=ckptstore.KeepLatest(2), grace_seconds=0)
    report = again(config, store, state, device) if config["again"] else measure(config, store, state, device)
    store.close()
    if dist.get_rank() == 0:
        Path(config["told"]).write_text(json.dumps(report))


class Training:
    """Steps over batches that depend on the step alone."""

    def __init__(self, config: dict[str, Any], state: dict[str, Any], device: torch.device) -> None:
        self.config, self.device = config, device
        self.model, self.optimizer = state["model"], state["optimizer"]
        self.losses: dict[int, float] = {}

    def step(self, number: int) -> float:
        """One step; its seconds."""
        started = time.perf_counter()
        generator = torch.Generator().manual_seed(number * 1000 + dist.get_rank())
        shape = (self.config["batch"], self.config["length"] + 1)
        tokens = torch.randint(SHAPES[self.config["model"]].words, shape, generator=generator).to(self.device)
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses[number] = loss.item()  # waits for the device
        return time.perf_counter() - started

    def steps(self, first: int, while_: Callable[[int], bool]) -> list[float]:
        """Steps as long as the condition on their count holds; on all ranks equally many."""
        seconds: list[float] = []
        while agreed(while_(len(seconds)), self.device):
            seconds.append(self.step(first + len(seconds)))
        return seconds


def agreed(wish: bool, device: torch.device) -> bool:
    """Whether any rank wishes to go on."""
    flag = torch.tensor([int(wish)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def measure(config: dict[str, Any], store: Any, state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Steps alone, asynchronous saves with steps beside them, a save that is waited for, a restore."""
    training = Training(config, state, device)
    training.steps(0, lambda done: done < 3)
    size_bytes = sum(local_bytes(state))
    number = 3
    alone = training.steps(number, lambda done: done < config["steps"])
    number += len(alone)
    copies = copies_to_host(state, device)
    store.warm_up(state)
    stalls, beside = [], []
    for _ in range(config["saves"]):
        with Meter() as meter:
            pending = store.save_async(number, state)
            meter.returned()
            steps = training.steps(number + 1, lambda done, pending=pending: not pending.done() or done < 1)
            pending.result()
        stalls.append(meter.sample())
        number += 1 + len(steps)
        beside.append(steps)
    with Meter() as saving:
        store.save(number, state)
    at = number
    after = training.steps(number + 1, lambda done: done < config["steps"])
    with Meter() as loading:
        store.load(state)
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "state_bytes_of_rank_0": size_bytes,
        "copies": [asdict(sample) for sample in copies],
        "stalls": [asdict(sample) for sample in stalls],
        "saves": [asdict(saving.sample())],
        "loads": [asdict(loading.sample())],
        "devices_in_use": devices_in_use(device),
        "step_seconds_alone": statistics.median(alone),
        "step_seconds_beside_an_upload": statistics.median(seconds for steps in beside for seconds in steps),
        "seconds_lost_to_one_upload": statistics.median(
            sum(steps) - len(steps) * statistics.median(alone) for steps in beside
        ),
        "saved_at": at,
        "losses": {step: training.losses[step] for step in range(at + 1, at + 1 + len(after))},
    }


def again(config: dict[str, Any], store: Any, state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A new start of the run: resume, and go on as the first one did."""
    started = time.perf_counter()
    checkpoint = ckptstore.ray.resume(state, store)
    seconds = time.perf_counter() - started
    assert checkpoint is not None
    training = Training(config, state, device)
    training.steps(checkpoint.step + 1, lambda done: done < config["steps"])
    return {"resumed_at": checkpoint.step, "resume_seconds": seconds, "losses": training.losses}


def devices_in_use(device: torch.device) -> list[int]:
    """The GPUs on which this process has a context; any but its own would take memory from another rank."""
    if device.type != "cuda":
        return []
    found = [index for index in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(index)]
    assert found == [device.index or 0], f"a save opened contexts on {found}, and this rank works on {device}"
    return found


def local_tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    """What this rank holds of the model and the optimizer."""
    optimizer = state["optimizer"]
    tensors = [*state["model"].parameters()]
    tensors += [value for item in optimizer.state.values() for value in item.values() if torch.is_tensor(value)]
    return [tensor.detach() for tensor in tensors]


def local_bytes(state: dict[str, Any]) -> list[int]:
    found = [getattr(tensor, "_local_tensor", tensor) for tensor in local_tensors(state)]
    return [tensor.numel() * tensor.element_size() for tensor in found]


def copies_to_host(state: dict[str, Any], device: torch.device) -> list[Sample]:
    """Three copies of this rank's tensors to memory that is there, pinned where the device is a GPU."""
    tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in local_tensors(state)]
    is_gpu = device.type == "cuda"
    hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_gpu) for tensor in tensors]
    found = []
    for _ in range(4):
        with Meter() as meter:
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            if is_gpu:
                torch.cuda.synchronize()
        found.append(meter.sample())
    return found[1:]
