"""Simulate jobs of Ray Train without Ray: workers that end together, and checkpoints in Ray's directory."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.config import StoreConfig
from ckptstore.group import Group, SoloGroup, StorageGroup
from ckptstore.group.base import new_start_token
from ckptstore.integrations.ray.context import Worker
from ckptstore.integrations.ray.kept_by_ray.ray_keeps import RayAttempt, RayPublisher, Run, default_directory
from ckptstore.integrations.ray.kept_by_ray.ray_shards import RayDirectoryShard
from ckptstore.integrations.ray.kept_by_ray.wrapping import files_at
from ckptstore.saving import transaction
from ckptstore.saving.shard import Shard
from ckptstore.storage.base import Storage
from ckptstore.storage.retry import with_retries
from ckptstore.transfer import Transfer
from kit.simulation.model import payload
from kit.simulation.plan import Action
from kit.simulation.ray_model import DIRECTORY_PREFIX
from kit.simulation.world import RUN_URI, Member, World

_LONGEST_POLL_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class SimWorker(Worker):
    """A worker whose values are broadcast in the simulation."""

    world: World = field(repr=False)
    member: Member = field(repr=False)

    def broadcast(self, value: Any) -> Any:
        """Broadcast as Ray does: wait without a deadline; Ray ends this worker when another one has ended."""
        world, member = self.world, self.member
        scheduler, job = world.scheduler, member.actor.name
        member.num_broadcasts += 1
        values = world.broadcasts.setdefault((job, member.num_broadcasts), {})
        values[member.rank] = value
        world.trace(f"{member.process.name} broadcasts, or is given, value {member.num_broadcasts}")
        seconds = 0.01
        while len(values) < self.world_size:
            if any(world.is_over(other) for other in world.members_of(job)):
                scheduler.at(scheduler.now, functools.partial(world.kill, member))
                scheduler.block()
            scheduler.sleep(seconds)
            seconds = min(2 * seconds, _LONGEST_POLL_SECONDS)
        return values[0]


@dataclass(frozen=True)
class SimWorkers:
    """Stands in for `RayWorkers`: the workers meet through the storage, which has faults."""

    worker: SimWorker

    def open_group(self, storage: Storage, config: StoreConfig) -> Group:
        """Open the group. Collective."""
        worker = self.worker
        if worker.world_size == 1:
            return SoloGroup(node=worker.node_id)
        group = StorageGroup(worker.rank, worker.world_size, worker.broadcast(new_start_token()), worker.node_id)
        return group.open(storage, rank_timeout_seconds=config.rank_timeout_seconds)


def worker_of(world: World, member: Member) -> SimWorker:
    """Create the worker for a rank of a job."""
    return SimWorker(
        rank=member.rank,
        world_size=member.actor.ranks,
        node_id=f"node-{member.rank % 2}",
        run_path=str(world.directory / "run"),
        filesystem=None,  # nothing asks for it: the run is open
        world=world,
        member=member,
    )


class RunOfRay:
    """Stands in for a store when Ray keeps a worker's checkpoints."""

    def __init__(self, world: World, member: Member) -> None:
        self._world, self._member = world, member
        config = StoreConfig.from_env(rank_timeout_seconds=world.plan.rank_timeout_seconds)
        storage = with_retries(world.open_storage(RUN_URI), config.retry)
        transfer = Transfer(storage, config=config.transfer, retry=config.retry, rank=member.rank)
        self._workers = SimWorkers(worker_of(world, member))
        self.run = Run(worker=self._workers.worker, config=config, storage=storage, transfer=transfer)

    def report(self, index: int, action: Action) -> RayAttempt:
        """Store as `ckptstore.ray.report`, without reporting: the ranks meet in a new group each time."""
        run = self.run
        name = f"{DIRECTORY_PREFIX}{action.option}" if action.option else default_directory(action.step)
        group = self._workers.open_group(run.storage, run.config)
        try:
            is_state = self._world.plan.contents == "state"
            options = {"step": action.step, "metrics": None, "metadata": None, "exists": "replace"}
            request = transaction.checked(group, kind="state" if is_state else "directory", **options)
            if is_state:
                return transaction.save(group, RayPublisher(run, name), self._state(group, index, action), request)
            shard = self._directory(index, action)
            return transaction.save(group, RayPublisher(run, name, lambda: shard.beside), shard, request)
        finally:
            group.close()

    def _directory(self, index: int, action: Action) -> RayDirectoryShard:
        world, job, rank = self._world, self._member.actor.name, self._member.rank
        contents = lambda name: payload((job, index), rank, name, action.size_bytes)  # noqa: E731
        path = world.source(job, index, rank, action, contents)
        ranks = range(self.run.worker.world_size)
        return RayDirectoryShard(self.run, path, ranks=ranks)

    def _state(self, group: Group, index: int, action: Action) -> Shard:
        from ckptstore.saving.state_shard import StateShard
        from ckptstore.state.live.apply import collect
        from ckptstore.state.write.assignment import SaveMemo
        from kit.simulation.states import state_of

        state = state_of((self._member.actor.name, index), self._member.rank)
        return StateShard(
            lambda: collect(state),
            rank=group.rank,
            world_size=group.world_size,
            memo=SaveMemo(),
            storage=self.run.storage,
            upload=self.run.transfer.upload,
        )

    def check_all(self) -> None:
        """Check that every checkpoint that was ever visible can be read, with its bytes."""
        world = self._world
        for directory in world.kept_by_ray.files:
            report = Checkpoint(files_at(self.run.storage, self.run.config, prefix=f"{directory}/")).verify()
            if not report.ok:
                world.fail("what is committed verifies", f"{directory}: {report.problems}")

    def close(self) -> None:
        """End the worker."""
        self.run.transfer.close()
        self.run.storage.close()
