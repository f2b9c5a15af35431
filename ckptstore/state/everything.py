"""The state of a whole run. Loads nothing until it is called."""

from __future__ import annotations

from typing import Any


def all_state(*objects: Any, **named: Any) -> dict[str, Any]:
    """Return a state with these objects, with what belongs to them, and with the random numbers of this process.

    Objects without a name are known by their kind: "model", "optimizer", "scheduler", "scaler", "loader", "generator".
    Of a kind that there is more than once, and of an object of another kind, each needs a name:
    `all_state(model, optimizer, ema=ema, epoch=0)`. The optimizer of a scheduler is found if it is not given. An
    `Accelerator` stands for what it has prepared and registered: "model", "model_1", "loader", "custom" ... "rng" has
    the random numbers of torch, numpy and Python, and of each accelerator that has a tensor of the modules. Data
    loaders and samplers are marked with `per_rank`, since the same position means other samples on other ranks.

    A run that resumes into such a state takes the same steps as one that never ended, if its loader can give its
    position (torchdata's StatefulDataLoader does), if each rank's loader and random numbers come back to that rank, and
    if its computation gives the same numbers twice. Everything else that changes in the run needs a name here.

    Raises InvalidState for an object without a state (torch's own DataLoader has none), for one whose kind is not
    known, and for two with one name.
    """
    from ckptstore.state.live.run_state import state_of

    return state_of(objects, named)
