"""The contribution of one worker to a checkpoint that Ray keeps: its directory, or its part of a state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore.format.layout import RAY_METADATA_NAME, Attempt
from ckptstore.format.naming import Offer
from ckptstore.saving.directories import Directory, scan
from ckptstore.saving.directory_shard import DirectoryShard
from ckptstore.saving.shard import Contents, Decision, Plan
from ckptstore.storage.base import Disk

if TYPE_CHECKING:
    from ckptstore.integrations.ray.kept_by_ray.ray_keeps import Run


class RayDirectoryShard:
    """The files of a directory, as a `ckptstore.saving.shard.Shard`.

    Ranks that bring one and the same directory, of one node or of the run, bring it once. Metadata of Ray's checkpoint
    stay where Ray looks for them; those of the lowest rank that has some count.
    """

    def __init__(
        self,
        run: Run,
        directory: str | os.PathLike[str] | None,
        *,
        ranks: Sequence[int],
        shared: Collection[str] = (),
    ) -> None:
        """Create the shard; `ranks` are those that take part, in the order of the group."""
        self._run = run
        self._directory = directory
        self._ranks = ranks
        self._metadata: str | None = None
        self._is_muted = False
        """True if another rank brings the same directory."""
        self.beside: Mapping[str, bytes] = {}
        self._inner = DirectoryShard(
            find=self._find,
            rank=run.worker.rank,
            storage=run.storage,
            transfer=run.transfer,
            suffix="auto",
            shared=shared,
            link=False,
        )

    def _find(self) -> Directory:
        found = scan(self._directory)
        source = found.files.pop(RAY_METADATA_NAME, None)
        if source is not None:
            self._metadata = Path(source.path).read_text()
        return found

    def describe(self) -> dict[str, Any]:
        """See `Shard.describe`."""
        offer = self._inner.describe()  # finds the metadata
        return {"where": self._where(), "metadata": self._metadata, "offer": offer}

    def _where(self) -> list[Any] | None:
        """Identify the directory by its node; one inside the run's directory is the same on all nodes."""
        if self._directory is None:
            return None
        worker, path = self._run.worker, Path(os.path.realpath(self._directory))
        if isinstance(self._run.storage, Disk) and path.is_relative_to(os.path.realpath(worker.run_path)):
            return ["run", str(path)]
        status = os.stat(self._directory)
        return [worker.node_id, status.st_dev, status.st_ino]

    def decide(self, descriptions: Sequence[Any]) -> Decision:
        """See `Shard.decide`. Names follow from Ray's ranks, also of those that take no part."""
        nothing = Offer("auto").to_json()
        offers = dict.fromkeys(range(self._run.worker.world_size), nothing)
        muted, seen = [], set()
        for rank, head in zip(self._ranks, descriptions, strict=True):
            where = json.dumps(head["where"])
            if head["where"] is not None and where in seen:
                muted.append(rank)
                continue
            seen.add(where)
            offers[rank] = head["offer"]
            if head["metadata"] is not None and not self.beside:
                self.beside = {RAY_METADATA_NAME: head["metadata"].encode()}
        decision = self._inner.decide([offers[rank] for rank in sorted(offers)])
        return decision._replace(told={"muted": muted, "naming": decision.told})

    def hear(self, told: Any) -> None:
        """See `Shard.hear`."""
        self._is_muted = self._run.worker.rank in told["muted"]
        self._inner.hear(told["naming"])

    def plan(self) -> Plan:
        """See `Shard.plan`."""
        plan = self._inner.plan()
        return _Muted(plan.join) if self._is_muted else plan


@dataclass(frozen=True, slots=True)
class _Muted:
    """The plan of a rank whose directory another rank brings."""

    join: Callable[[Attempt, Sequence[Any]], Contents]

    def store(self, attempt: Attempt) -> list[Any]:
        """See `Plan.store`. Nothing is stored, and no event says so."""
        return []
