"""Report commits to trackers of experiments, as references instead of copies, and open checkpoints from them.

    with open_store("runs/first") as store, follow(store, tracker):
        ...  # the tracker gets every save of this job, of whatever kind

`ckptstore.integrations.mlflow` and its siblings bring trackers; anything with the methods of `Tracker` is one.
"""

from ckptstore.integrations.trackers.following import Following, Tracker, follow
from ckptstore.integrations.trackers.reference import Reference, choose

__all__ = ["Following", "Reference", "Tracker", "choose", "follow"]
