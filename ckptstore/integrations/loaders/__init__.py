"""Data loaders whose position any number of ranks can resume from. torch is loaded with them, on first use."""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, extra="torch")
