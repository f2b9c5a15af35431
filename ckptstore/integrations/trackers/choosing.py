"""Choose among the references of a run: that of a step, the best, or the last."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckptstore.errors import CheckpointGone, InvalidInput
from ckptstore.integrations.trackers.reference import Reference
from ckptstore.retention import Candidate, Mode, check_metric_exists, ranked


def choose(
    references: Sequence[Reference],
    *,
    run: str,
    step: int | None = None,
    best: str | None = None,
    mode: Mode | None = None,
    store: str | None = None,
) -> Reference:
    """Choose a reference; the one committed last without `step` and `best`.

    Of a step that was committed several times the last commit counts. `best` is the name of a metric; `mode` as for
    `CheckpointStore.best`. `run` names the run in errors. `store` is the root of the store, for a run with references
    to several.

    Raises CheckpointGone when the run has no such reference, InvalidMetric when none has the metric, InvalidInput for
    contradicting arguments and for a run with several stores without `store`.
    """
    if step is not None and best is not None:
        raise InvalidInput(f"step={step!r} and best={best!r}: give one of them")
    if mode is not None and best is None:
        raise InvalidInput(f"mode={mode!r} needs a metric: best=...")
    stores = sorted({item.store for item in references})
    if store is not None:
        references = [item for item in references if item.store == store]
    elif len(stores) > 1:
        raise InvalidInput(f"{run} has checkpoints of {len(stores)} stores", hint=f"Give store=, of {stores[:5]}")
    if not references:
        of_store = f" of {store}" if store is not None else ""
        known = f"; it has those of {', '.join(stores[:5])}" if stores else ""
        raise CheckpointGone(f"{run} has no reference to a checkpoint{of_store}{known}")
    ordered = sorted(references, key=lambda item: item.number)
    if best is not None:
        return _best(ordered, run, best, mode)
    found = ordered if step is None else [item for item in ordered if item.step == step]
    if not found:
        steps = ", ".join(str(item.step) for item in ordered[-10:])
        raise CheckpointGone(f"{run} has no reference to step {step}; it has {steps}", step=step)
    return found[-1]


def _best(references: Sequence[Reference], run: str, metric: str, mode: Mode | None) -> Reference:
    candidates = [
        Candidate(number=item.number, step=item.step, committed_at=math.nan, metrics=item.metrics)
        for item in references
    ]
    check_metric_exists(candidates, metric)
    order = ranked(candidates, metric, mode)
    if not order:
        raise CheckpointGone(f"{run} has no checkpoint with a finite value of {metric!r}")
    return next(item for item in references if item.number == order[0].number)
