"""Saving a finished checkpoint of a folder into a store, as the checkpoint of a directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.format.digest import Digest
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.saving.directory_shard import directory_of
from ckptstore.saving.shard import Plan, Shard
from ckptstore.store import CheckpointStore, save_shard
from ckptstore.tools.run.folders.folder import Held
from ckptstore.tools.run.folders.found import Found


def save_found(store: CheckpointStore, found: Found, held: Held, **options: Any) -> Checkpoint:
    """Save what `held` has of `found`. Collective over the agents of a job; the keywords are `save_directory`'s.

    The files are looked at once more after the last of them is stored and before anything is committed: what was
    rewritten in place meanwhile raises SourceChanged on all nodes, and is never committed. No two nodes may hold the
    same name. Raises what `save_directory` raises.
    """
    own = {"step": found.step, "metrics": found.metrics, "metadata": found.metadata(held.folder), "suffix": "never"}
    options = {**own, **options}

    def make(job: Any) -> tuple[Any, Shard]:
        request, shard = directory_of(job, options.pop("step"), held.files if held.names else None, **options)
        return request, _Looked(shard, held.check)

    return save_shard(store, make)


class _Looked:
    """A shard whose files are looked at again when they are stored."""

    def __init__(self, shard: Shard, check: Callable[[Mapping[str, Digest | None]], None]) -> None:
        self._shard, self._check = shard, check
        self.describe, self.decide, self.hear = shard.describe, shard.decide, shard.hear

    def plan(self) -> Plan:
        return _LookedPlan(self._shard.plan(), self._check)


class _LookedPlan:
    """See `_Looked`."""

    def __init__(self, plan: Plan, check: Callable[[Mapping[str, Digest | None]], None]) -> None:
        self._plan, self._check = plan, check
        self.join = plan.join

    def store(self, attempt: Attempt) -> Any:
        stored = self._plan.store(attempt)
        self._check({receipt.name: receipt.digest for receipt in map(Receipt.from_json, stored)})
        return stored
