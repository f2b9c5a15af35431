"""Connect the workers of a Ray Train run: the group of a store inside a worker."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.group import Group, SoloGroup
from ckptstore.integrations.ray.context import Worker
from ckptstore.storage.base import Storage

_opened: Counter[str] = Counter()
"""Counts how often this process has joined a group of a name: all ranks join in the same order."""
_lock = threading.Lock()


def open_among(worker: Worker, ranks: Sequence[int], config: StoreConfig, *, name: str) -> Group:
    """Open a group of this worker with `ranks`, at a key-value store that the first of them serves.

    All join it under one name, equally often. The first waits for nobody, the others for its address.
    """
    from ckptstore.group.torch_board import open_served_group

    token = _joined(name)
    return open_served_group(
        _RayNotice(f"ckptstore/{token}"),
        rank=ranks.index(worker.rank),
        world_size=len(ranks),
        start_token=token,
        rank_timeout_seconds=config.rank_timeout_seconds,
        node=worker.node_id,
    )


class _RayNotice:
    """See `Notice`; the address lies in the key-value store of Ray's cluster."""

    hint = (
        "Look for its process and its log. Collective calls are made by every worker; one that reads alone gives "
        "group='solo'"
    )

    def __init__(self, key: str) -> None:
        import ray
        from ray.experimental import internal_kv

        self._key = key
        self._values: Any = internal_kv
        self.host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def announce(self, address: str) -> None:
        """See `Notice.announce`."""
        self._values._internal_kv_put(self._key, address)

    def look(self) -> str | None:
        """See `Notice.look`."""
        address: bytes | None = self._values._internal_kv_get(self._key)
        return None if address is None else address.decode()

    def withdraw(self) -> None:
        """See `Notice.withdraw`."""
        self._values._internal_kv_del(self._key)


def _joined(name: str) -> str:
    """Return the token of a group that this process joins now."""
    with _lock:
        _opened[name] += 1
        joined = f"{start_token()}/{name}/{_opened[name]}"
    return hashlib.sha256(joined.encode()).hexdigest()[:32]


def start_token() -> str:
    """Return a token that is equal on all workers and new for every start of them."""
    from ray.train.v2._internal.execution.context import get_train_context

    context: Any = get_train_context()
    # They share one actor of Ray's that is made with them.
    return str(context.get_synchronization_actor()._actor_id.hex())


@dataclass(frozen=True)
class RayWorkers:
    """The workers of this start of the run, with Ray's ranks and Ray's nodes: a value for `open_store(group=...)`.

    Over the process group of torch if the workers have one with Ray's ranks (a gloo group of the store's own, so
    no collective of the training is used), else at a key-value store that rank 0 serves: a store opened by `report`,
    which nobody closes, leaves nothing in the storage. Lost workers are Ray's to find: it ends the others.
    """

    worker: Worker

    def open_group(self, storage: Storage, config: StoreConfig) -> Group:
        """Open the group. All workers open this storage, equally often."""
        worker = self.worker
        if worker.world_size == 1:
            return SoloGroup(node=worker.node_id)
        if self._has_torch_group():
            from ckptstore.group.torch_board import open_torch_group

            return open_torch_group(rank_timeout_seconds=config.rank_timeout_seconds, node=worker.node_id)
        return open_among(worker, range(worker.world_size), config, name=storage.uri)

    def _has_torch_group(self) -> bool:
        distributed = getattr(sys.modules.get("torch"), "distributed", None)
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return False
        joined = (distributed.get_rank(), distributed.get_world_size())
        return bool(joined == (self.worker.rank, self.worker.world_size))
