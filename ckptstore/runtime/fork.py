"""Renew objects with threads or locks in a forked child, where the threads are gone and held locks stay held for ever.

An owner of threads or locks registers a function that renews it. Nothing else of ckptstore runs in a child before.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_renewals: dict[int, tuple[weakref.ref[Any], Callable[[Any], None]]] = {}
"""The owners and their functions, by the identity of the owner, which need not be hashable."""


def in_forked_child(owner: T, renew: Callable[[T], None]) -> None:
    """Call `renew(owner)` first in every forked child, as long as the owner lives. `renew` must not refer to it."""
    number = id(owner)
    _renewals[number] = weakref.ref(owner, lambda _: _renewals.pop(number, None)), renew


def new_lock_in_child(owner: Any, name: str) -> None:
    """Give the owner a new lock under that name in every forked child."""
    in_forked_child(owner, lambda found: setattr(found, name, threading.Lock()))


def _renew_all() -> None:
    for reference, renew in list(_renewals.values()):
        owner = reference()
        if owner is not None:
            renew(owner)


os.register_at_fork(after_in_child=_renew_all)
