"""The names of attributes, by the semantic conventions of OpenTelemetry: a namespace, then the attribute."""

from __future__ import annotations

from typing import Final

STEP: Final = "ckptstore.step"
ATTEMPT: Final = "ckptstore.attempt"
NUMBER: Final = "ckptstore.number"
RANK: Final = "ckptstore.rank"
STORE: Final = "ckptstore.store"
IN_BACKGROUND: Final = "ckptstore.save.background"
IS_FAST: Final = "ckptstore.save.fast"
IS_SUPERSEDED: Final = "ckptstore.drain.superseded"
SIZE: Final = "ckptstore.size"
REQUESTS: Final = "ckptstore.requests"
RETRIES: Final = "ckptstore.retries"
DIRECTION: Final = "ckptstore.io.direction"
OPERATION: Final = "ckptstore.operation"
ERROR_TYPE: Final = "error.type"
"""A name of the semantic conventions themselves."""
