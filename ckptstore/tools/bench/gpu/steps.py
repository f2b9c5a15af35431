"""Measure how a save in the background slows the steps of a training, and if it holds the state of its call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.figures.report import Sample
from ckptstore.tools.bench.gpu.training import parallel_model, shape_within
from ckptstore.tools.bench.measure import Meter
from ckptstore.tools.bench.peers.base import Contender
from ckptstore.tools.bench.shapes import difference, size_of
from ckptstore.tools.bench.turns import Contest, Tell

_TOKENS = {"cuda": (4, 2048), "cpu": (1, 32)}
"""Number of sequences in a step, and their length."""
_ALONE_SECONDS = {"cuda": 3.0, "cpu": 0.05}
_LEAST_STEPS = 3
_LEAST_SECONDS = 0.001
"""The least loss counted: steps vary by more, and a ratio to nothing says nothing."""


class Steps(Contest):
    """Measures the seconds that the training of a Llama loses to one save: the call, and the longer steps beside it.

    The state is that of the training, and each step changes all of it.
    """

    def __init__(self, case: Case, action: str, *, figure: str, tell: Tell) -> None:
        super().__init__(case, action, figure=figure, tell=tell)
        self._device = torch.device(case.device)
        self._shape = shape_within(case.size_bytes, 2 if case.is_cuda else 4)
        self._model, self._optimizer = parallel_model(self._shape, self._device, None if case.alone else "fsdp")
        self._last: Any = None
        self._step(lambda: None)  # the optimizer makes its moments
        state = {f"model.{name}": tensor for name, tensor in self._model.state_dict().items()}
        for name, parameter in self._model.named_parameters():
            moments = self._optimizer.state[parameter]
            state |= {f"optimizer.{name}.{key}": moments[key] for key in ("exp_avg", "exp_avg_sq")}
        case.state, case.target = state, {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        case.local, case.local_target = ({n: _own(t) for n, t in found.items()} for found in (case.state, case.target))
        case.rank_bytes = size_of(case.local)
        self._seconds_alone(_LEAST_STEPS)  # the first ones choose kernels
        wanted = math.ceil(_ALONE_SECONDS[self._device.type] / self._seconds_alone(_LEAST_STEPS))
        self._num_alone = max(_LEAST_STEPS, *case.gather(wanted))

    def timed(self, contender: Contender, call: Callable[[], Any]) -> Sample:
        """Take steps alone, the call, and steps until everything is stored.

        Raises TurnFailed when the stored state is not that of the call.
        """
        case = self.case
        alone = self._seconds_alone(self._num_alone)
        at_call = {name: tensor.clone() for name, tensor in case.local.items()}
        case.synchronize()
        case.gather(None)
        with ThreadPoolExecutor(1) as pool, Meter() as meter:
            stored: Future[object] = Future()
            try:
                stored = pool.submit(call() or (lambda: None))
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # torch's is none of Exception; and other ranks still take steps
                stored.set_exception(error)
            meter.returned()
            began = time.perf_counter()
            count = self._steps(lambda _: not stored.done(), contender.staged)
            seconds = time.perf_counter() - began

        def check() -> None:
            contender.load(self.case.uri(f"turn-{self._number}"))
            if name := difference(self.case.local_target, at_call):
                raise ValueError(f"what was saved of {name} is not what was there at the call")

        self._together(stored.result)
        contender.note("steps_per_second_alone", 1 / alone)
        if count:
            contender.note("steps_per_second", count / seconds)
        self._together(check)
        lost = max(_LEAST_SECONDS, meter.total_seconds - count * alone)
        retries = meter.retries if contender.role == "ckptstore" else None
        return replace(meter.sample(), total_seconds=lost, retries=retries)

    def _seconds_alone(self, num_steps: int) -> float:
        """Return the seconds of a step, by the mean of some."""
        self.case.synchronize()
        began = time.perf_counter()
        self._steps(lambda count: count < num_steps, lambda: None)
        return (time.perf_counter() - began) / num_steps

    def _steps(self, is_wanted: Callable[[int], bool], before_update: Callable[[], None]) -> int:
        """Take steps as long as any rank wants one more, and wait for them; return their number, the same on all ranks.

        `is_wanted` gets the number of steps taken. `before_update` is called when a step is about to change the state.
        """
        count = 0
        while self._any(is_wanted(count)):
            self._step(before_update)
            count += 1
        self.case.synchronize()
        return count

    def _any(self, is_wanted: bool) -> bool:
        if self.case.alone:
            return is_wanted
        flag = torch.tensor([int(is_wanted)])  # on the CPU: the device goes on with its steps
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _step(self, before_update: Callable[[], None]) -> None:
        """Take a step with random tokens. At most one step waits on the device while another one runs."""
        num_sequences, length = _TOKENS[self._device.type]
        tokens = torch.randint(self._shape.words, (num_sequences, length + 1), device=self._device)
        logits = self._model(tokens[:, :-1])
        loss: Any = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        before_update()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self.case.is_cuda:
            cuda: Any = torch.cuda
            ended = cuda.Event()
            ended.record()
            if self._last is not None:
                self._last.synchronize()
            self._last = ended


def _own(tensor: Any) -> torch.Tensor:
    """Return this rank's part, in the same memory."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
