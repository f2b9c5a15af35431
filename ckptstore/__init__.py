"""ckptstore: distributed checkpoint storage for PyTorch.

Names are loaded on first use, so that `import ckptstore` costs next to nothing and needs no third party.
"""

from ckptstore.runtime.lazy import attach_stub

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, own=("__version__",))
