"""What calls end with."""

from __future__ import annotations

from collections.abc import Callable

from ckptstore.errors import CkptstoreError


def error_of(call: Callable[[], object]) -> CkptstoreError | None:
    """The error that it raises, None if it returns."""
    try:
        call()
    except CkptstoreError as error:
        return error
    return None
