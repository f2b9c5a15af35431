"""Trackers of experiments hear of each commit: a reference, never a copy. From a reference a call leads back.

    with open_store("runs/first") as store, follow(store, tracker):
        ...  # every save of this job, of whatever kind, is told to the tracker

`ckptstore.integrations.mlflow` and its siblings bring trackers; anything with the methods of `Tracker` is one.
"""

from ckptstore.integrations.trackers.choosing import choose
from ckptstore.integrations.trackers.following import Following, Tracker, follow
from ckptstore.integrations.trackers.reference import Reference

__all__ = ["Following", "Reference", "Tracker", "choose", "follow"]
