"""The interface for users who call `dcp.save` and `dcp.load` of torch themselves: see `ckptstore.integrations.dcp`."""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, extra="torch")
