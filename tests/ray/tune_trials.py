"""Functions for Ray Tune; they run in trials."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from keeping import note

import ckptstore

STEPS = 6


def climb(config: dict[str, Any]) -> None:
    """Add `lr` to a value in each step, from what Tune hands back; by a state, or by a directory."""
    from ray import tune

    trial, state = tune.get_context().get_trial_id(), {"step": 0, "value": 0.0}
    found = tune.get_checkpoint()
    if found is not None:
        checkpoint = ckptstore.ray.wrap(found)
        if config["how"] == "state":
            checkpoint.load(state)
        else:
            with checkpoint.as_directory() as directory:
                state["value"], state["step"] = float((directory / "value").read_text()), checkpoint.step
        note(config, "resumed", f"{trial} {state['step']} {state['value']}")
    else:
        note(config, "started", f"{trial} {config['lr']}")
        refused(config)
    for step in range(state["step"] + 1, STEPS + 1):
        state["step"], state["value"] = step, state["value"] + config["lr"]
        metrics = {"value": state["value"]}
        if config["how"] == "state":
            made = ckptstore.ray.report(metrics, state=state, step=step)
        else:
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "value").write_text(str(state["value"]))
                made = ckptstore.ray.report(metrics, directory=directory, step=step)
        assert made is not None
        assert made.step == step
        assert made.metrics == metrics
        if step == config.get("fail_at") and found is None:
            raise RuntimeError("a failure in the first start")
    ckptstore.ray.report({"value": state["value"]})


def refused(config: dict[str, Any]) -> None:
    """What is for Ray Train alone says so."""
    for name, call in (
        ("store", ckptstore.ray.store),
        ("store", lambda: ckptstore.ray.store("/tmp/never")),
        ("resume", ckptstore.ray.resume),
        ("upload_fn", ckptstore.ray.upload_fn),
        ("report", lambda: ckptstore.ray.report({}, storage_options={"key": "k"})),
    ):
        try:
            call()
        except ckptstore.InvalidInput as error:
            note(config, "refused", f"{name} {error}")
