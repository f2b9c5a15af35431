"""Simulate the disks of nodes and their connections, and check fast checkpoints after every change."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from ckptstore.errors import StorageError, StorageUnavailable
from ckptstore.extensions.tier.certificate import CERTIFICATE_NAME, Certificate
from ckptstore.extensions.tier.nodes import node_disk, node_server
from ckptstore.extensions.tier.tier import FastTier
from ckptstore.format.digest import Digest
from ckptstore.format.layout import CHECKPOINT_PREFIX, Attempt
from ckptstore.format.order import SaveOrder, void_of
from ckptstore.retention import KeepEvery
from kit.simulation.ledger import Violation
from kit.simulation.model import Model, Tag, calls_in
from kit.simulation.network import Network
from kit.simulation.plan import Actor, Plan
from kit.simulation.virtual import storages
from kit.simulation.virtual.scheduler import Process, Scheduler, running

KEEP = 2


@dataclass
class SavedOnNodes:
    """A fast checkpoint that had a certificate on some node."""

    certificate: Certificate
    tag: Tag

    @property
    def order(self) -> SaveOrder:
        """Its place among all saves."""
        return self.certificate.order


class _NodeStore(storages.DiskStore):
    """Reads the mark of an epoch from the real directory, to which it is written without the storage."""

    def read(self, key: str) -> bytes:
        path = self.local_path(key)
        return path.read_bytes() if key == "epoch" and path.exists() else super().read(key)


class NodeDisks:
    """The disks of all nodes, and the judge of their changes. Nodes of one name share a disk."""

    def __init__(
        self, scheduler: Scheduler, plan: Plan, trace: Callable[[str], None], directory: Path, durable: Model
    ) -> None:
        self.scheduler, self.plan, self.durable = scheduler, plan, durable
        self.directory = directory / "nodes"
        calm = replace(plan, storage="disk", error_rate=0.0, slow_rate=0.0)
        self.network = Network(scheduler, calm, lambda line: trace(f"node {line}"))
        self.spaces: dict[str, storages.Space] = {}
        self.saved: dict[str, SavedOnNodes] = {}
        self.servers: list[tuple[SimulatedServer, Process]] = []
        self._locks: dict[str, tuple[Process, object]] = {}
        self._begun: dict[str, float] = {}
        self._lost_at: dict[str, float] = {}
        self._homes: dict[Process, str] = {}
        self._deaf_until: dict[str, float] = {}
        self._mute_until: dict[str, float] = {}
        self._harmed: set[tuple[str, str]] = set()
        """Nodes and attempts that were damaged from outside of ckptstore, only there."""
        self._is_struck = False

    def tier(self, actor: Actor, rank: int) -> FastTier:
        """Return the fast tier of a rank of a job."""
        node = actor.nodes[rank]
        self._homes[self.network.caller().process] = node
        self.directory.mkdir(exist_ok=True)
        copies = cast(Literal[1, 2], self.plan.fast_copies)
        copies = copies if len(set(actor.nodes)) > 1 else 1
        drain = KeepEvery(steps=1000) if self.plan.chance("drain") < 0.5 else None
        return FastTier(self.directory / node, copies=copies, keep=KEEP, node=node, drain=drain)

    def open_storage(self, path: Path, **_: Any) -> Any:
        """Open a disk in place of `node_disk.disk_storage`."""
        node = path.parent.name
        if node not in self.spaces:
            space = storages.Space(self.scheduler, str(path), real=path)
            space.watchers.append(lambda key, before, after: self._changed(node, key, before, after))
            self.spaces[node] = space
        return self.network.connect(_NodeStore(self.spaces[node]))

    @contextmanager
    def locked(self, path: str) -> Iterator[None]:
        """Lock in place of `node_disk.locked`: the lock of a killed process is free."""
        me, until = (self.network.caller().process, object()), self.scheduler.now + node_disk.LOCK_SECONDS
        while (holder := self._locks.get(path)) is not None and not holder[0].is_dead:
            if self.scheduler.now > until:
                raise StorageError(f"{path} is locked")
            self.scheduler.sleep(0.05)
        self._locks[path] = me
        try:
            yield
        finally:
            if self._locks.get(path) is me:
                del self._locks[path]

    def lose(self, node: str) -> None:
        """Remove the disk of a node with everything on it."""
        self._lost_at[node] = self.scheduler.now
        if (space := self.spaces.pop(node, None)) is not None:
            space.watchers.clear()
            space.real = self.directory.parent / "lost"  # requests on their way arrive nowhere
        shutil.rmtree(self.directory / node, ignore_errors=True)

    def damage(self, node: str, which: float) -> None:
        """Flip a bit of a file of a fast checkpoint on a node."""
        space = self.spaces.get(node)
        keys = sorted(key for key in space.files if key.startswith(CHECKPOINT_PREFIX)) if space else []
        if space is not None and keys:
            key = keys[int(which * len(keys))]
            self._harmed.add((node, key.split("/")[1]))
            data = space.files[key].data
            self._is_struck = True
            space.put(key, bytes([data[0] ^ 1]) + data[1:] if data else b"x")
            self._is_struck = False

    def cut_off(self, node: str, seconds: float, *, is_mute: bool) -> None:
        """Cut a node off for a while: nobody reaches its server, or, if mute, it reaches nobody."""
        which = self._mute_until if is_mute else self._deaf_until
        which[node] = max(which.get(node, 0.0), self.scheduler.now + seconds)

    def is_cut(self, source: str, target: str) -> bool:
        """True if one node cannot reach another now."""
        until = max(self._mute_until.get(source, 0.0), self._deaf_until.get(target, 0.0))
        return not self.network.is_calm and self.scheduler.now < until

    def was_cut(self, node: str, since: float) -> bool:
        """True if a node could not be reached, or could reach nobody, at some time since then."""
        return max(self._mute_until.get(node, 0.0), self._deaf_until.get(node, 0.0)) > since

    def home(self, process: Process) -> str:
        """Return the node of a process."""
        return self._homes[process]

    # Promises

    def _changed(self, node: str, key: str, before: storages.File | None, after: storages.File | None) -> None:
        if not key.startswith(CHECKPOINT_PREFIX) or self._is_struck:
            return
        name, _, file = key.removeprefix(CHECKPOINT_PREFIX).partition("/")
        self._begun.setdefault(name, self.scheduler.now)
        if file == CERTIFICATE_NAME:
            if after is not None:
                self._certified(node, name, after.data)
            elif before is not None:
                self._deleted(node, name)
        elif after is None or (before is not None and before.data != after.data):
            certificate = f"{CHECKPOINT_PREFIX}{name}/{CERTIFICATE_NAME}"
            if certificate in self.spaces[node].files:
                raise Violation("a certificate goes before its files", f"{key} changed on {node}")

    def _certified(self, node: str, name: str, data: bytes) -> None:
        certificate = Certificate.decode(data)
        is_left = self._is_void(certificate.order)  # then a later job may have deleted it before it was certified
        for holder, ranks in () if is_left else certificate.holders.items():
            if (holder, name) in self._harmed or self._lost_at.get(holder, -1.0) >= self._begun[name]:
                continue
            if name in self.saved and holder != node:
                continue  # judged when the first was written: a later job may have deleted it there since
            for rank in certificate.by_rank:
                if rank in ranks and not self._is_whole(holder, certificate, rank):
                    text = f"{name} is certified on {node}, files of rank {rank} are not whole on {holder}"
                    raise Violation("a certificate means that all is whole", text)
        if name not in self.saved:
            self.saved[name] = SavedOnNodes(certificate, self._tag(node, certificate))

    def _tag(self, node: str, certificate: Certificate) -> Tag:
        space = self.spaces[node]
        prefix = certificate.attempt.prefix
        calls = {call for key, file in space.files.items() if key.startswith(prefix) for call in calls_in(file.data)}
        tags = {tag for tag, _ in calls}
        if len({self.durable.step_of(tag) for tag in tags}) > 1 or len({job for job, _ in tags}) > 1:
            raise Violation("no checkpoint mixes attempts", f"{certificate.attempt} on {node}: {sorted(calls)}")
        return max(tags, default=("", -1))

    def _deleted(self, node: str, name: str) -> None:
        saved = self.saved.get(name)
        if saved is None or self._is_void(saved.order) or name in self.durable.by_attempt:
            return
        newest, space = self.durable.newest, self.spaces[node]
        mark = space.real / "epoch" if space.real else None
        marked = int(mark.read_text() or 0) if mark is not None and mark.exists() else 0
        # on nodes without a later job a fenced one does not know it: its own void saves supersede there
        behind = marked if newest is not None and marked < newest.state.epoch else None
        newer = [
            one.order
            for other, one in self.saved.items()
            if one.order > saved.order
            and (one.order.epoch == behind or not self._is_void(one.order))
            and not any((where, other) in self._harmed for where in one.certificate.holders)
        ]
        if not newer:
            raise Violation("what is neither durable nor superseded stays", f"{name} was deleted from {node}")

    def _is_void(self, order: SaveOrder) -> bool:
        newest = self.durable.newest
        return newest is not None and void_of(newest.state.void, order) is not None

    def _is_whole(self, node: str, certificate: Certificate, rank: int) -> bool:
        files = self.spaces[node].files if node in self.spaces else {}
        for receipt in certificate.by_rank.get(rank, ()):
            file = files.get(certificate.attempt.key(receipt.name))
            if file is None or len(file.data) != receipt.size_bytes:
                return False
            if receipt.digest is not None and receipt.digest.like(file.data) != receipt.digest:
                return False
        return True

    def is_void(self, order: SaveOrder) -> bool:
        """True if the log voids it, so that no job may resume from it."""
        return self._is_void(order)

    def usable(self, nodes: Sequence[str]) -> Mapping[str, SaveOrder]:
        """Return the attempts from which a job on these nodes may resume now: whole there, or in the store."""
        found = {}
        for name, saved in self.saved.items():
            key, data = f"{CHECKPOINT_PREFIX}{name}/{CERTIFICATE_NAME}", saved.certificate.encode()
            files = {node: self.spaces[node].files.get(key) for node in nodes if node in self.spaces}
            shown = [node for node, file in files.items() if file is not None and file.data == data]
            trusted = [node for node, file in files.items() if file is None or file.data == data]
            whole = all(
                any(self._is_whole(node, saved.certificate, rank) for node in trusted)
                for rank in saved.certificate.by_rank
            )
            if shown and whole and not self._is_void(saved.order):
                found[name] = saved.order
        for live in self.durable.resumable():
            change: Any = self.durable.records[live.number].change
            found[live.attempt] = change.entry.order
        return found


class SimulatedServer:
    """Stands in for a `NodeServer`: others reach the disk while its process lives."""

    def __init__(self, nodes: NodeDisks, disk: node_disk.NodeDisk) -> None:
        self.disk, self.is_closed = disk, False
        process = nodes.network.caller().process
        nodes.servers.append((self, process))
        self.addresses = [(str(len(nodes.servers) - 1), 0)]

    def close(self) -> None:
        """Stop serving."""
        self.is_closed = True


class SimulatedClient:
    """Stands in for a `NodeClient`: every request is one to the disk of the other node."""

    def __init__(self, nodes: NodeDisks, node: str, addresses: Sequence[tuple[str, int]]) -> None:
        self.node = node
        self._server, self._process = nodes.servers[int(addresses[0][0])]
        self._nodes = nodes
        self._own_node = nodes.home(nodes.network.caller().process)

    def _reached(self) -> Any:
        if self._server.is_closed or self._process.is_dead or self._nodes.is_cut(self._own_node, self.node):
            raise StorageUnavailable(f"{self.node} cannot be reached")
        return self._server.disk.storage

    def read_into(self, attempt: Attempt, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """See `NodeClient.read_into`."""
        self._reached().read_into(attempt.key(name), offset, views)
        self._reached()

    def write(
        self, attempt: Attempt, name: str, source: Any, scratch: memoryview, *, algorithm: str, given_up: Any
    ) -> Digest:
        """See `NodeClient.write`."""
        if given_up.is_set():
            raise StorageUnavailable(f"Nobody wants {name} on {self.node} any more")
        data = bytearray()
        with source.open() as read:
            for offset in range(0, source.size_bytes, len(scratch)):
                for view in read(offset, min(len(scratch), source.size_bytes - offset), scratch):
                    data += view
        key = attempt.key(name)
        self._reached().write(key, [memoryview(bytes(data))])
        self._reached().persist([key])
        self._reached()
        return Digest.of(data, algorithm=algorithm)

    def interrupt(self) -> None:
        """Do nothing: a simulated write ends by itself."""

    def close(self) -> None:
        """Do nothing: no resources are held."""


def replaced(nodes: Callable[[], NodeDisks]) -> dict[int, tuple[Any, Any]]:
    """Return the replacements for `patched`; outside of a simulated thread the real ones work."""
    real_locked = node_disk.locked
    real_open, real_server, real_client = node_disk.disk_storage, node_server.NodeServer, node_server.NodeClient

    def open_storage(path: Path, **options: Any) -> Any:
        return real_open(path, **options) if running() is None else nodes().open_storage(path)

    def locked(path: str) -> AbstractContextManager[None]:
        return real_locked(path) if running() is None else nodes().locked(path)

    def server(disk: Any, keys: Any, **options: Any) -> Any:
        return real_server(disk, keys, **options) if running() is None else SimulatedServer(nodes(), disk)

    def client(node: str, addresses: Any, keys: Any, **options: Any) -> Any:
        if running() is None:
            return real_client(node, addresses, keys, **options)
        return SimulatedClient(nodes(), node, addresses)

    pairs: list[tuple[Any, Any]] = [
        (real_open, open_storage),
        (real_locked, locked),
        (real_server, server),
        (real_client, client),
    ]
    return {id(real): (real, simulated) for real, simulated in pairs}
