"""An accelerator for tests on machines without one: torch's PrivateUse1, in a small C++ extension, built once.

Its memory is out of the host's reach, its copies end late, it has devices, streams, events and pinned memory of its
own, and each thread has a current device. Mistakes with these that fail on a GPU now and then fail each time on it.
Operators run on the host, so nothing is fast.
"""

from kit.accelerator.building import CannotBuild
from kit.accelerator.stand_in import (
    DEVICE_COUNT,
    NAME,
    Gate,
    delayed_copies,
    draw_from_host,
    forget_contexts,
    has_context,
    limited_memory,
    load,
    pinned_bytes,
    sleep,
    synchronize,
)

__all__ = [
    "DEVICE_COUNT",
    "NAME",
    "CannotBuild",
    "Gate",
    "delayed_copies",
    "draw_from_host",
    "forget_contexts",
    "has_context",
    "limited_memory",
    "load",
    "pinned_bytes",
    "sleep",
    "synchronize",
]
