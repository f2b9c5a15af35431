"""ckptstore: distributed checkpoint storage for PyTorch.

Names are loaded on first use, so that `import ckptstore` costs next to nothing and needs no third party.
"""

import sys

from ckptstore.runtime.lazy import attach_stub

if sys.platform == "win32":
    raise ImportError(
        "ckptstore does not run on Windows, whose file system has neither the locks nor the directory syncs that a "
        "commit needs. Use Linux, or WSL with the store on WSL's own disk"
    )

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, own=("__version__",))
