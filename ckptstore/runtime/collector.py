"""Pause the garbage collector, which looks again and again at many small objects that are all still needed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause cyclic garbage collection of this process while the context lasts, if it was on. Keep the context short."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
