"""Bring fast checkpoints from the disks of the nodes into the store, behind the training.

It may know the job, the fast tier, the transfer and the commit. Each process of a job has one `Drainer`.
"""

from ckptstore.extensions.tier.drain.book import Drain
from ckptstore.extensions.tier.drain.drainer import Drainer

__all__ = ["Drain", "Drainer"]
