"""All that the core takes from extensions and integrations, loaded on first use: it is whole without them.

`extended.pyi` beside it is the table.
"""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
