"""Draw the demo's runs: their losses with the checkpoints kept, and digits with the model's readings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROWS, COLUMNS = 3, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One run for the picture."""

    title: str
    losses: Sequence[float]
    """The loss of every training step."""
    eval_losses: Sequence[float]
    """After every epoch; epochs are the steps of the checkpoints, from 1."""
    kept: Mapping[int, float]
    """The evaluation loss of each checkpoint that the store has kept, by step."""
    best_step: int
    kill_step: int
    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]
    read: np.ndarray[Any, Any]
    """The digits that the actor read in the images."""


def draw(runs: Sequence[Shown], path: Path) -> None:
    """Write the picture as PNG. Raises OSError when it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(runs), 2, squeeze=False, width_ratios=(1, 1))
    for run, (left, right) in zip(runs, parts, strict=True):
        _draw_losses(left, run)
        _draw_digits(right, run)
    figure.savefig(path, dpi=110)


def _draw_losses(part: Any, run: Shown) -> None:
    axes = part.subplots()
    epochs = len(run.eval_losses)
    steps = np.arange(1, len(run.losses) + 1) * epochs / len(run.losses)
    axes.plot(steps, run.losses, color="0.7", linewidth=1, label="training, every step")
    axes.plot(range(1, epochs + 1), run.eval_losses, color="tab:blue", label="evaluation, every epoch")
    axes.axvline(run.kill_step, color="tab:red", linestyle=":", label="a worker gets SIGKILL in its upload")
    axes.scatter(run.kept.keys(), run.kept.values(), color="tab:green", s=90, zorder=3, label="checkpoints kept")
    best = (run.best_step, run.kept[run.best_step])
    axes.scatter(*best, color="tab:orange", marker="*", s=80, zorder=4, label="the best one, which reads the digits")
    axes.set(title=run.title, xlabel="epoch", ylabel="cross-entropy", yscale="log", xlim=(0, epochs + 0.2))
    axes.legend(fontsize=8)


def _draw_digits(part: Any, run: Shown) -> None:
    """Draw the misread digits first."""
    wrong = run.read != run.labels
    chosen = np.argsort(~wrong, kind="stable")[: ROWS * COLUMNS]
    part.suptitle(f"{(~wrong).sum()} of {len(wrong)} digits read right; read as (in red: wrong)", fontsize=11)
    for axes, index in zip(part.subplots(ROWS, COLUMNS).flat, chosen, strict=False):
        axes.imshow(run.images[index, 0], cmap="gray_r")
        axes.set_title(str(run.read[index]), color="tab:red" if wrong[index] else "black", fontsize=11)
        axes.axis("off")
