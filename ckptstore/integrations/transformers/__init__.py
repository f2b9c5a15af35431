"""Hugging Face Transformers: a callback that stores a Trainer's checkpoints from its disk, and restores them.

transformers is loaded with the callback, on first use.
"""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, extra="transformers")
