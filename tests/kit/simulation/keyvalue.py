"""Simulate the key-value store of torch.distributed: a server in the process of rank 0, and clients that wait."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ckptstore.config import StoreConfig
from ckptstore.group import Group
from ckptstore.group.torch_board import TorchBoard, TorchGroup, agree_on_start
from ckptstore.runtime import torch_private
from ckptstore.storage.base import Storage
from kit.simulation.virtual.scheduler import Process

if TYPE_CHECKING:
    from kit.simulation.world import World

_LATENCY_SECONDS = 0.001


@dataclass
class Server:
    """The values of one job. They are lost with the process of rank 0."""

    process: Process
    values: dict[str, bytes] = field(default_factory=dict)
    answers_nobody: bool = False
    """True if the machine is gone, so clients wait; else they get an error at once."""


class SimStore:
    """A client, with the methods that a board uses."""

    def __init__(self, world: World, server: Server, prefix: str = "") -> None:
        self._world = world
        self._server = server
        self._prefix = prefix

    def below(self, prefix: str) -> SimStore:
        """Return a client with a prefix for all keys."""
        return SimStore(self._world, self._server, f"{self._prefix}{prefix}/")

    def _request(self, what: str, key: str) -> str:
        scheduler = self._world.scheduler
        client = self._world.network.caller()
        self._world.trace(f"{client.process.name} key-value store: {what} {key}")
        scheduler.sleep(_LATENCY_SECONDS * (0.1 + scheduler.rng.random()))
        is_cut_off = any(scheduler.now < outage.until and not outage.prefix for outage in client.outages)
        if is_cut_off and not self._world.is_calm:
            client.hard_at = scheduler.now
            raise RuntimeError("Connection reset by peer")
        if self._server.process.is_dead:
            if self._server.answers_nobody:
                scheduler.block()
            raise RuntimeError("Connection reset by peer")
        return self._prefix + key

    def set(self, key: str, value: Any) -> None:
        name = self._request("set", key)
        self._server.values[name] = bytes(value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        name = self._request("compare_set", key)
        if name not in self._server.values and not expected:
            self._server.values[name] = bytes(desired)
        return self._server.values.get(name, b"")

    def add(self, key: str, amount: int) -> int:
        name = self._request(f"add {amount} to", key)
        count = int(self._server.values.get(name, b"0")) + amount
        self._server.values[name] = str(count).encode()
        return count

    def check(self, keys: Sequence[str]) -> bool:
        name = self._request("check", " ".join(keys))
        assert name
        return all(self._prefix + key in self._server.values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._request("multi_get", " ".join(keys))
        values = self._server.values
        while not all(self._prefix + key in values for key in keys):
            self._world.scheduler.sleep(0.1)  # it waits, as torch's does
        return [values[self._prefix + key] for key in keys]

    def delete_key(self, key: str) -> bool:
        name = self._request("delete_key", key)
        return self._server.values.pop(name, None) is not None


@dataclass(frozen=True)
class KeyValueGroup:
    """Ranks that meet at a simulated key-value store: for `open_store(group=...)`."""

    world: World
    job: str
    rank: int
    world_size: int

    def open_group(self, storage: Storage, config: StoreConfig) -> Group:
        """Open the group, as `open_torch_group` does."""
        world, members = self.world, self.world.members_of(self.job)
        server = world.servers.get(self.job)
        if server is None:
            gone = world.plan.chance("machine", self.job) < 0.5
            server = world.servers[self.job] = Server(members[0].process, answers_nobody=gone)
        board = TorchBoard(
            SimStore(world, server),
            prefix="ckptstore/world",
            world_size=self.world_size,
            timeout_seconds=config.rank_timeout_seconds,
            server_ranks=(0,),
        )
        group = TorchGroup(
            board,
            rank=self.rank,
            world_size=self.world_size,
            rank_timeout_seconds=config.rank_timeout_seconds,
            node=f"node-{self.rank % 2}",
        )
        return agree_on_start(group, board)


def _prefix_store(prefix: str, store: Any) -> Any:
    return store.below(prefix) if isinstance(store, SimStore) else dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def _cloned(store: Any) -> Any:
    return store if isinstance(store, SimStore) else _real_cloned(store)


_real_cloned = torch_private.cloned
_changed = types.ModuleType(dist.__name__)
_changed.__dict__.update({**vars(dist), "PrefixStore": _prefix_store})

REPLACED: dict[int, tuple[Any, Any]] = {
    id(dist): (dist, _changed),
    id(_real_cloned): (_real_cloned, _cloned),
}
"""The replacements by which a board takes a simulated store."""
