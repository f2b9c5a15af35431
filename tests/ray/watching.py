"""What Ray's controller sees at the moment when it registers a checkpoint."""

from __future__ import annotations

from typing import Any

from keeping import note
from ray.train import UserCallback

import ckptstore
from ckptstore import CkptstoreError


class Watcher(UserCallback):
    """Notes, for every checkpoint that Ray registers, what it leads to right then."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        if checkpoint is None:
            note(self.config, "registered", f"{metrics[0]['ckptstore_step']} metrics")
            return
        try:
            found = ckptstore.ray.resolve(checkpoint)
            what = "good" if found.verify().ok else "damaged"
        except CkptstoreError as error:
            what = error.code
        note(self.config, "registered", f"{metrics[0]['ckptstore_step']} {what}")
