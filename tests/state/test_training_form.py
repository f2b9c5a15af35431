"""An export or merge of weights that an optimizer holds in the form of its training says so."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore import merge, open_store
from ckptstore.interchange import export


class ScheduleFree(torch.optim.SGD):
    """As the schedule-free optimizers are: each group says in which mode the weights are."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group.update(settings)


def _averaging(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter]["swa_buffer"] = torch.zeros_like(parameter)
    return optimizer


class Wrapper:
    """An optimizer that is none of torch's."""

    def __init__(self, params: Any) -> None:
        self.base = torch.optim.SGD(params, lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"train_mode": True, "base_optimizer": self.base.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


Make = Callable[[torch.nn.Module], Any]
FORMS: dict[str, tuple[Make, str]] = {
    "train": (lambda model: ScheduleFree(model.parameters(), train_mode=True), "training mode.*eval.. before the save"),
    "eval": (lambda model: ScheduleFree(model.parameters(), train_mode=False), ""),
    "eval with settings": (lambda model: ScheduleFree(model.parameters(), train_mode=False, lr_max=0.1), ""),
    "without a mode": (lambda model: ScheduleFree(model.parameters(), lr_max=0.1), "may be those.*eval.. before"),
    "state dict": (lambda model: ScheduleFree(model.parameters(), train_mode=True).state_dict(), "training mode"),
    "nested": (lambda model: [{"of": ScheduleFree(model.parameters(), train_mode=True).state_dict()}], "training mode"),
    "wrapper": (lambda model: Wrapper(model.parameters()), "training mode"),
    "averages": (lambda model: _averaging(model.parameters()), "averages of the weights in its state .swa_buffer."),
    "plain": (lambda model: torch.optim.Adam(model.parameters()), ""),
    "configuration": (lambda model: {"train_mode": True, "seed": 1}, ""),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_in_training_form_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str) -> None:
    make, words = FORMS[form]
    model = torch.nn.Linear(2, 2)
    with open_store(tmp_path / "store", durable=False) as store:
        state = {"model": model, "other": torch.ones(2), "opt": make(model)}
        checkpoints = [store.save(step, state) for step in (1, 2)]
        for number, call in enumerate(
            (
                *(
                    lambda to, kind=kind: export(checkpoints[0], to, to=kind, include="model.*")
                    for kind in ("safetensors", "torch", "dcp")
                ),
                lambda to: merge(checkpoints, to, include="model.*"),
            )
        ):
            caplog.clear()
            report = call(tmp_path / f"{number}")
            logged = [it.getMessage() for it in caplog.records if it.levelno == logging.WARNING]
            assert [line for line in report.notices if "optimizer at" in line] == logged
            assert len(logged) == bool(words)
            for line in logged:
                assert "the optimizer at 'opt" in line
                assert re.search(words, line)
        caplog.clear()
        export(checkpoints[0], tmp_path / "other", to="safetensors", include="other")
        if form in ("train", "without a mode", "averages"):
            assert not caplog.records
