"""OpenTelemetry: a listener that makes spans and metrics of ckptstore's events, through the API alone.

The caller's providers export them. OpenTelemetry is loaded with `instrument`, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.runtime.lazy import exports

if TYPE_CHECKING:
    from ckptstore.integrations.otel.telemetry import Telemetry, instrument

__all__ = ["Telemetry", "instrument"]

__getattr__ = exports(__name__, {"Telemetry": "telemetry", "instrument": "telemetry"}, extra="otel")
