"""Checkpoints of Ray Train runs; `ckptstore.ray` has the public names.

It can be imported without Ray: a training function that runs under torchrun, or in a plain process, calls the same
names.
"""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
