"""Report what ckptstore does, as it does it, to listeners and to the log.

A listener is any callable that takes an event. It is called on the thread where the event happens, so it is quick and
does not raise: what it raises is logged and dropped. Without a listener of your own, events go to the log
"ckptstore", at the level of their class.
"""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
