"""Tensor state: what a nested state becomes on disk, and how any number of ranks gets it back.

It may know the transfer and the group, and nothing of jobs and stores. It gives saves what to write and loads what to
fill: `tensors`, `index`, `live`, `write`, `read`, each above the one before. For users are `replicated`, which
says of a tensor that it is the same on all ranks, and `per_rank`, which says of anything that each rank has its own.
Modules load torch; importing the package does not.
"""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
