"""How the workers of a Ray Train run reach each other: the group of a store inside a worker."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ckptstore.config import StoreConfig
from ckptstore.group import Group, SoloGroup
from ckptstore.integrations.ray.context import Worker
from ckptstore.integrations.ray.ray_board import open_ray_group
from ckptstore.storage.base import Storage


@dataclass(frozen=True)
class RayWorkers:
    """The workers of this start of the run, with Ray's ranks and Ray's nodes: a value for `open_store(group=...)`.

    Over the process group of torch where the workers have one with Ray's ranks (a gloo group of the store's own, so
    no collective of the training is used), else through an actor of Ray. Lost workers are Ray's to find: it ends the
    others.
    """

    worker: Worker

    def open_group(self, storage: Storage, config: StoreConfig) -> Group:
        """The group at work. Collective among the workers that open this storage."""
        worker = self.worker
        if worker.world_size == 1:
            return SoloGroup(node=worker.node_id)
        if self._has_torch_group():
            from ckptstore.group.torch_board import open_torch_group

            return open_torch_group(rank_timeout_seconds=config.rank_timeout_seconds, node=worker.node_id)
        return open_ray_group(worker, storage.uri, rank_timeout_seconds=config.rank_timeout_seconds)

    def _has_torch_group(self) -> bool:
        distributed = getattr(sys.modules.get("torch"), "distributed", None)
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return False
        there = (distributed.get_rank(), distributed.get_world_size())
        return bool(there == (self.worker.rank, self.worker.world_size))
