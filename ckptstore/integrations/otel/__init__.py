"""OpenTelemetry: one listener that makes spans and metrics of what ckptstore does, through the API alone.

Where they go is up to the providers of the caller. OpenTelemetry is loaded with `instrument`, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.runtime.lazy import exports

if TYPE_CHECKING:
    from ckptstore.integrations.otel.telemetry import Telemetry, instrument

__all__ = ["Telemetry", "instrument"]

__getattr__ = exports(__name__, {"Telemetry": "telemetry", "instrument": "telemetry"}, extra="otel")
