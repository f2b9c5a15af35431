"""OpenTelemetry: a listener that makes spans and metrics of ckptstore's events, through the API alone.

The caller's providers export them. OpenTelemetry is loaded with `instrument`, on first use.
"""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, extra="otel")
