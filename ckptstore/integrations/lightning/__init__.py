"""PyTorch Lightning: a callback that saves and resumes a Trainer, every rank its own part, through a store.

Lightning is loaded with the callback, on first use.
"""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, extra="lightning")
