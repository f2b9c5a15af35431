"""Testing tools of ckptstore itself, for tests of your own back-ends and jobs. Only `StorageContract` needs pytest."""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
