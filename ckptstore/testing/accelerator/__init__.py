"""An accelerator for tests on machines that have none: torch's PrivateUse1, in a small C++ extension, built once.

Its memory lies where the host cannot read it, its copies end late, it has devices, streams, events and pinned memory of
its own, and each thread has a current device. What a program gets wrong with these on a GPU now and then goes wrong
here each time. Operators run on the host, so nothing is fast.
"""

from ckptstore.testing.accelerator.building import CannotBuild
from ckptstore.testing.accelerator.stand_in import (
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
