"""Tensor state: a nested state becomes files, and any number of ranks reads it back.

It may know the transfer and the group, and nothing of jobs and stores. It gives saves the sources to write and loads
the targets to fill: `tensors`, `index`, `live`, `write`, `read`, each above the one before. Users call `replicated`,
which marks a tensor as the same on all ranks, and `per_rank`, which marks anything as each rank's own. Modules load
torch; importing the package does not.
"""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
