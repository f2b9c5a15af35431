"""Every private name of torch that ckptstore uses: here and nowhere else. Importing this file does not load torch.

`TRIED_VERSIONS` are the releases on which the tests passed; a test refuses any other until it has been tried.
"""

from __future__ import annotations

from typing import Any

TRIED_VERSIONS = ("2.13.0",)


def default_store() -> Any:
    """The key-value store through which the processes of this job met, None when there is none to be had.

    None without `init_process_group`, and with back-ends that meet by other means (MPI).
    """
    try:
        from torch.distributed.distributed_c10d import _get_default_store
    except ImportError:
        return None
    try:
        return _get_default_store()
    except (ValueError, KeyError, RuntimeError):
        return None


def cloned(store: Any) -> Any:
    """A client of the same store with a connection of its own, so that blocking in one does not block the other.

    The store itself where torch cannot clone it.
    """
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store
