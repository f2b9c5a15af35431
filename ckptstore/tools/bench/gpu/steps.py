"""Measure how a save in the background slows the steps of a training, and if it holds the state of its call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.figures.report import Sample
from ckptstore.tools.bench.gpu.training import Training
from ckptstore.tools.bench.measure import Meter
from ckptstore.tools.bench.peers.base import Contender, Wait
from ckptstore.tools.bench.shapes import difference, size_of
from ckptstore.tools.bench.turns import Contest, Tell

_ALONE_SECONDS = {"cuda": 3.0, "cpu": 0.05}
_LEAST_STEPS = 3
_LEAST_SECONDS = 0.001
"""The least loss counted: steps vary by more, and a ratio to nothing says nothing."""


class Steps(Contest):
    """Measures the seconds that the training loses to one save: the call, and the longer steps beside it.

    The state is that of the training, and each step changes all of it.
    """

    def __init__(self, case: Case, action: str, *, figure: str, tell: Tell) -> None:
        super().__init__(case, action, figure=figure, tell=tell)
        self._training = Training(case)
        case.state = self._training.state()
        case.target = {name: torch.zeros_like(tensor) for name, tensor in case.state.items()}
        case.local, case.local_target = ({n: _own(t) for n, t in state.items()} for state in (case.state, case.target))
        case.rank_bytes = size_of(case.local)
        self._steps_alone(_LEAST_STEPS)  # the first ones choose kernels
        seconds = self._steps_alone(_LEAST_STEPS) / _LEAST_STEPS
        wanted = math.ceil(_ALONE_SECONDS[torch.device(case.device).type] / seconds)
        self._num_alone = max(_LEAST_STEPS, *case.gather(wanted))

    def timed(self, contender: Contender, call: Callable[[], Any]) -> Sample:
        """Take steps alone, the call, and steps until everything is stored.

        Raises TurnFailed when the stored state is not that of the call.
        """
        case = self.case
        alone = self._steps_alone(self._num_alone) / self._num_alone
        at_call = {name: tensor.clone() for name, tensor in case.local.items()}
        case.synchronize()
        case.gather(None)
        with ThreadPoolExecutor(1) as pool, Meter() as meter:
            stored = _begun(call, pool)
            meter.returned()
            began = time.perf_counter()
            count = self._training.steps(lambda _: not stored.done(), contender.staged)
            seconds = time.perf_counter() - began
        self._together(stored.result)
        contender.note("steps_per_second_alone", 1 / alone)
        if count:
            contender.note("steps_per_second", count / seconds)
        self._together(lambda: self._check(contender, at_call))
        lost = meter.total_seconds - count * alone
        retries = meter.retries if contender.role == "ckptstore" else None
        return replace(meter.sample(), total_seconds=max(_LEAST_SECONDS, lost), retries=retries)

    def _steps_alone(self, num_steps: int) -> float:
        self.case.synchronize()
        began = time.perf_counter()
        self._training.steps(lambda count: count < num_steps, lambda: None)
        return time.perf_counter() - began

    def _check(self, contender: Contender, at_call: dict[str, torch.Tensor]) -> None:
        contender.load(self.case.uri(f"turn-{self._number}"))
        if name := difference(self.case.local_target, at_call):
            raise ValueError(f"what was saved of {name} is not what was there at the call")


def _begun(call: Callable[[], Wait | None], pool: ThreadPoolExecutor) -> Future[object]:
    """Return the end of the call's work, which a failing call has reached: other ranks still take steps."""
    try:
        wait = call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is none of Exception
        failed: Future[object] = Future()
        failed.set_exception(error)
        return failed
    return pool.submit(wait or (lambda: None))


def _own(tensor: Any) -> torch.Tensor:
    """Return this rank's part, in the same memory."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
