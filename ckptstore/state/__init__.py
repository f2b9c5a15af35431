"""Tensor state: what a nested state becomes on disk, and how any number of ranks gets it back.

It may know the transfer and the group, and nothing of jobs and stores. It gives saves what to write and loads what to
fill: `tensors`, `index`, `live`, `write`, `read`, each above the one before. `replicated` is for users: it says of a
tensor that it is the same on all ranks. Modules load torch; importing the package does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.runtime.lazy import exports

if TYPE_CHECKING:
    from ckptstore.state.live.flatten import replicated

__all__ = ["replicated"]

__getattr__ = exports(__name__, {"replicated": "live.flatten"})
