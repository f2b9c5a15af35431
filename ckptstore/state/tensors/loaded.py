"""Checks for classes of torch that take long to import. They import nothing: before its module is loaded, a class has
no objects."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return True for a DTensor."""
    return _is_of("torch.distributed.tensor", "DTensor", value)


def is_fsdp1(value: object) -> TypeGuard[FullyShardedDataParallel]:
    """Return True for a module that FSDP1 wraps."""
    return _is_of("torch.distributed.fsdp", "FullyShardedDataParallel", value)


def _is_of(module: str, name: str, value: object) -> bool:
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(value, found)
