"""Copy checkpoints to other places, and convert states to and from the files of other tools.

It may know stores, checkpoints and states. It gives users `export` and `import_state`, and the command line copies of
checkpoints and stores too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.runtime.lazy import exports

if TYPE_CHECKING:
    from ckptstore.interchange.exporting import export
    from ckptstore.interchange.importing import import_state

__all__ = ["export", "import_state"]

__getattr__ = exports(__name__, {"export": "exporting", "import_state": "importing"}, extra="torch")
