"""The interface for users who call `dcp.save` and `dcp.load` of torch themselves.

It may know saves, states and storages. It gives `StoreWriter`, `StoreReader` and `translated`, and the targets that a
writer takes. Modules load torch; importing the package does not.
"""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, extra="torch")
