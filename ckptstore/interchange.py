"""States to and from the files of other tools: the public names of `ckptstore.extensions.exchange`."""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, extra="torch")
