"""The names of attributes, as the semantic conventions of OpenTelemetry make them: a namespace, then what it is."""

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
"""Of the semantic conventions themselves."""
