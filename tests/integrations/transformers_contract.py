"""One training for each of Trainer's save options: the checkpoints that it leaves, and those of the store beside them.

A new run then goes on from each of the two.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers_worker import QUIET, Notes

from ckptstore import open_store, retention
from ckptstore.format.layout import MANIFEST_NAME
from ckptstore.integrations.transformers import CheckpointStoreCallback

warnings.simplefilter("ignore")

LAST_STEP = 8
RISES = {step: step / 20 for step in range(2, 14, 2)}
RISES_TO_4 = {2: 0.5, 4: 0.9, 6: 0.2, 8: 0.3, 10: 0.1, 12: 0.4}
"""The score at each evaluation. The best one is not the last."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Options of TrainingArguments, and the retention that stands for them in a store."""

    arguments: Mapping[str, Any]
    retention: str = "KeepAll()"
    scores: Mapping[int, float] = field(default_factory=lambda: RISES_TO_4)


_LOAD_BEST = {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
_BOTH = 'KeepLatest(1) | KeepBest(1, metric="eval_score", mode="max")'
SCENARIOS: dict[str, Scenario] = {
    'save_strategy="no"': Scenario(arguments={"save_strategy": "no"}),
    'save_strategy="steps", save_steps=2': Scenario(arguments={"save_steps": 2}),
    'save_strategy="epoch"': Scenario(arguments={"save_strategy": "epoch"}),
    'save_strategy="best"': Scenario(arguments={"save_strategy": "best", **_LOAD_BEST}),
    "save_steps=0.25": Scenario(arguments={"save_steps": 0.25}),
    "save_only_model": Scenario(arguments={"save_steps": 4, "save_only_model": True}),
    "save_total_limit=2": Scenario(arguments={"save_steps": 2, "save_total_limit": 2}, retention="KeepLatest(2)"),
    "load_best_model_at_end": Scenario(arguments={"save_steps": 2, **_LOAD_BEST}),
    "load_best_model_at_end, save_total_limit=2": Scenario(
        arguments={"save_steps": 2, "save_total_limit": 2, **_LOAD_BEST}, retention=_BOTH
    ),
    "the same, and the last is the best": Scenario(
        arguments={"save_steps": 2, "save_total_limit": 2, **_LOAD_BEST}, retention=_BOTH, scores=RISES
    ),
    "load_best_model_at_end, save_total_limit=1": Scenario(
        arguments={"save_steps": 2, "save_total_limit": 1, **_LOAD_BEST}, retention=_BOTH
    ),
}


class Line(torch.nn.Module):
    """A linear model, as Trainer takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        guess = self.layer(x).squeeze(-1)
        return {"loss": (guess - labels).square().mean(), "logits": guess}


def trained(
    scenario: Scenario, output_dir: Path, callbacks: list[TrainerCallback], *, last_step: int, resume_from: str | None
) -> tuple[Trainer, dict[int, float]]:
    """A Trainer after its training, and its losses. An epoch has four steps."""
    torch.manual_seed(0 if resume_from is None else 1)
    numbers = torch.Generator().manual_seed(3)
    rows = [{"x": torch.randn(4, generator=numbers), "labels": torch.tensor(1.0)} for _ in range(16)]
    notes = Notes(None)
    chosen: dict[str, Any] = {"output_dir": str(output_dir), "max_steps": last_step, "learning_rate": 1e-2}
    chosen |= {
        "lr_scheduler_type": "constant",
        "eval_strategy": "steps",
        "eval_steps": 2,
        **QUIET,
        **scenario.arguments,
    }
    trainer = Trainer(
        Line(),
        TrainingArguments(**chosen),
        train_dataset=rows,
        eval_dataset=rows[:4],
        compute_metrics=lambda _: {"score": scenario.scores[trainer.state.global_step]},
        callbacks=[*callbacks, notes],
    )
    trainer.train(resume_from_checkpoint=resume_from)
    return trainer, notes.losses


def contents(directory: str | Path | None) -> dict[str, bytes]:
    """The files of a checkpoint, without the manifest of ckptstore."""
    if directory is None:
        return {}
    return {path.name: path.read_bytes() for path in Path(directory).iterdir() if path.name != MANIFEST_NAME}


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in directory.glob("checkpoint-*"))


def outcome(root: str, name: str) -> dict[str, Any]:
    """What Trainer leaves and what the store has after the same training, and what a new run makes of each."""
    scenario, stock, store = SCENARIOS[name], Path(root, "stock"), f"{root}/store"
    options = {"retention": eval(scenario.retention, vars(retention)), "missing": "worst"}
    callback = CheckpointStoreCallback(store, **options)
    assert callback.resume() is None
    trainer, _ = trained(scenario, stock, [callback], last_step=LAST_STEP, resume_from=None)
    stock_best = trainer.state.best_model_checkpoint
    with open_store(store, group="solo") as opened:
        scores = {one.step: one.metrics["eval_score"] for one in opened if "eval_score" in one.metrics}
        found: dict[str, Any] = {
            "stock_steps": steps_in(stock),
            "store_steps": [one.step for one in opened],
            "stock_best": stock_best and int(stock_best.rpartition("-")[2]),
            "store_best": max(scores, key=lambda step: scores[step]) if stock_best else None,
        }
    last = get_last_checkpoint(str(stock)) if stock.is_dir() else None
    again = CheckpointStoreCallback(store, **options)
    resumed = again.resume()
    found |= {
        "stock_resumes": last and int(last.rpartition("-")[2]),
        "store_resumes": again.resumed.step if again.resumed else None,
        "same_files": contents(last) == contents(resumed) if again.resumed else last is None,
        "names": sorted(contents(resumed)),
    }
    _, from_stock = trained(scenario, stock, [], last_step=LAST_STEP + 4, resume_from=last)
    ours, from_store = trained(scenario, Path(root, "new"), [again], last_step=LAST_STEP + 4, resume_from=resumed)
    best_after = ours.state.best_model_checkpoint
    found |= {"losses": (from_stock, from_store), "best_after": best_after and int(best_after.rpartition("-")[2])}
    return found


def outcomes(root: str) -> dict[str, dict[str, Any]]:
    """Of all scenarios."""
    found = {}
    for number, name in enumerate(SCENARIOS):
        (Path(root) / str(number)).mkdir()
        found[name] = outcome(f"{root}/{number}", name)
    return found
