"""What calls end with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptstore.errors import CkptstoreError


def error_of(call: Callable[[], object]) -> CkptstoreError | None:
    """The error that it raises, None if it returns."""
    try:
        call()
    except CkptstoreError as error:
        return error
    return None


def end_of(call: Callable[[], Any]) -> Any:
    """Return what it returns, or the error that it raises."""
    try:
        return call()
    except CkptstoreError as error:
        return error
