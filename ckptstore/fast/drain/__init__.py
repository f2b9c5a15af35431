"""Fast checkpoints come from the disks of the nodes into the store, behind the training.

It may know the job, the fast tier, the transfer and the commit. It gives `Drainer`, which each process of a job has.
"""

from ckptstore.fast.drain.book import Drain
from ckptstore.fast.drain.drainer import Drainer

__all__ = ["Drain", "Drainer"]
