"""Train on one device, or over the ranks by FSDP2. The parameters and moments are the state to save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.gpu.llama import SHAPES, Llama, Shape, parallel_model

_STATE_TENSORS = 3
"""The parameters, and both moments of AdamW."""
_TOKENS = {"cuda": (4, 2048), "cpu": (1, 32)}
"""Number of sequences in a step, and their length."""


def shape_within(size_bytes: int, itemsize: int) -> Shape:
    """Return the shape of the largest model whose state has at most so many bytes, or of the smallest model."""
    found = next(iter(SHAPES.values()))
    for shape in SHAPES.values():
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in Llama(shape).parameters())
        if count * _STATE_TENSORS * itemsize <= size_bytes:
            found = shape
    return found


class Training:
    """Steps of a Llama with AdamW over random tokens. At most one step waits on the device while another one runs."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._device = torch.device(case.device)
        self._shape = shape_within(case.size_bytes, 2 if case.is_cuda else 4)
        self._model, self._optimizer = parallel_model(self._shape, self._device, None if case.alone else "fsdp")
        self._before: Any = None
        self._step(lambda: None)  # the optimizer makes its moments

    def state(self) -> Mapping[str, Any]:
        """Return the tensors themselves, which each step changes."""
        found = {f"model.{name}": tensor for name, tensor in self._model.state_dict().items()}
        for name, parameter in self._model.named_parameters():
            moments = self._optimizer.state[parameter]
            found |= {f"optimizer.{name}.{key}": moments[key] for key in ("exp_avg", "exp_avg_sq")}
        return found

    def steps(self, is_wanted: Callable[[int], bool], before_update: Callable[[], None]) -> int:
        """Take steps as long as any rank wants one more, and wait for them; return their number, the same on all ranks.

        `is_wanted` gets the number of steps taken. `before_update` is called when a step is about to change the state.
        """
        count = 0
        while self._any(is_wanted(count)):
            self._step(before_update)
            count += 1
        self._case.synchronize()
        return count

    def _any(self, is_wanted: bool) -> bool:
        if self._case.alone:
            return is_wanted
        flag = torch.tensor([int(is_wanted)])  # on the CPU: the device goes on with its steps
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _step(self, before_update: Callable[[], None]) -> None:
        num_sequences, length = _TOKENS[self._device.type]
        tokens = torch.randint(self._shape.vocabulary, (num_sequences, length + 1), device=self._device)
        logits = self._model(tokens[:, :-1])
        loss: Any = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        before_update()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._case.is_cuda:
            cuda: Any = torch.cuda
            ended = cuda.Event()
            ended.record()
            if self._before is not None:
                self._before.synchronize()
            self._before = ended
