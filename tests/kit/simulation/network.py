"""Connect processes to a storage: every request passes the scheduler, takes virtual time, and may fail by the plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ckptstore.errors import (
    AccessDenied,
    CkptstoreError,
    FileMissing,
    StorageError,
    StorageFull,
    StorageThrottled,
    StorageUnavailable,
)
from ckptstore.format.digest import Digest
from ckptstore.storage import base
from kit.simulation.plan import Plan
from kit.simulation.virtual.scheduler import Killed, Process, Scheduler
from kit.simulation.virtual.storages import Space

_CHANGES = frozenset(
    [
        *("write", "write_many", "create", "delete", "copy", "copy_from", "write_part", "finish", "persist", "link"),
        *("open_parts", "abort", "make_directory", "remove_directories", "abort_unfinished"),
    ]
)
_OTHER_CHANGES = frozenset(["make_directory", "remove_directories", "abort_unfinished"])
_LATE = frozenset(["write", "create", "delete", "finish"])
"""Requests that may take effect after their caller has given up."""
_NO_REQUEST = frozenset(["part_bytes", "useful_threads", "local_path", "close", "uri", "resolved"])
_DISK_REQUESTS = frozenset(["persist", "free_bytes", "make_directory", "remove_directories"])
"""Requests that do nothing on a storage that is no disk."""
_READS = frozenset(["read", "read_into", "read_steps"])


@dataclass
class Outage:
    """A time in which requests of one process fail."""

    kind: str
    prefix: str
    until: float
    tries: dict[str, int] = field(default_factory=dict)
    """Number of tries by request, for requests that succeed in the end."""

    def kind_of(self, verb: str, key: str, now: float) -> str | None:
        """Return the fault of a request now, None for none."""
        if now >= self.until or not key.startswith(self.prefix):
            return None
        changes = verb in _CHANGES
        if self.kind == "flaky":
            if key.startswith("probe/"):
                return None
            self.tries[key] = self.tries.get(key, 0) + 1
            return "flaky" if self.tries[key] % 5 else None
        if self.kind in ("answers", "full"):
            return {"answers": "answer", "full": "full"}[self.kind] if changes else None
        return "lost" if self.kind == "answer" and not changes else self.kind


@dataclass
class Client:
    """One process and the faults of its requests."""

    process: Process
    calls: int = 0
    outages: list[Outage] = field(default_factory=list)
    at_calls: dict[int, list[Callable[[], None]]] = field(default_factory=dict)
    """Actions by the number of the request at which they happen."""
    failures: dict[int, float] = field(default_factory=dict)
    """By thread, the number of recent failures; each success takes a quarter of one away."""
    failing_since: dict[int, float] = field(default_factory=dict)
    hard_at: float = -1.0
    """The time at which a request failed more often than retries allow; below 0 for never."""
    slow_at: float = -1.0
    flaky_at: float = -1.0
    max_seconds: float = 0.0
    is_corrupted: bool = False
    """True while its reads of checkpoints return other bytes, until it takes another way."""
    honest_until_call: int = 0
    last_read: bytes = b""
    """The contents of the last file that it read whole."""


class Network:
    """All requests of all processes."""

    def __init__(self, scheduler: Scheduler, plan: Plan, trace: Callable[[str], None]) -> None:
        self.scheduler = scheduler
        self.plan = plan
        self.trace = trace
        self.is_calm = False
        self.away_until = -1.0
        """The end of a time in which no request is answered."""
        self.on_read: Callable[[int, str], None] = lambda pid, key: None
        """Called when a process reads the bytes of a file."""
        self.on_delete: Callable[[Process, str], None] = lambda process, keys: None
        """Called when a process requests the deletion of files, with their keys separated by blanks."""
        self.clients: dict[Process, Client] = {}
        self.struck: list[str] = []
        """Requests with a random fault."""
        self.undeleted: set[str] = set()
        """Files whose deletion failed, as far as their processes know."""
        self._is_disk = plan.storage == "disk"
        self._unanswered_seconds = 0.0 if self._is_disk else plan.rank_timeout_seconds / 60
        """The time that a client waits for an answer."""
        self._latency_seconds = 0.0005 if self._is_disk else 0.02

    def client(self, process: Process) -> Client:
        """Return the client of a process."""
        if process not in self.clients:
            self.clients[process] = Client(process)
        return self.clients[process]

    def caller(self) -> Client:
        """Return the client of the calling thread."""
        current = self.scheduler.current
        assert current is not None
        return self.client(current.owner)

    def connect(self, storage: Any, mirror: Space | None = None) -> Any:
        """Return the storage as a process reaches it: with exactly the same powers.

        `mirror` is updated with the storage's contents after each change; a storage of the simulation needs none.
        """
        powers = tuple(power for power in base.POWERS if isinstance(storage, power))
        return _class_for(powers)(self, storage, mirror)

    def request(self, verb: str, key: str, perform: Callable[[], Any], size_bytes: int = 0) -> Any:
        """Have a request travel, take effect and be answered; or fail."""
        scheduler = self.scheduler
        me = scheduler.current
        assert me is not None
        if me.killed:
            raise Killed
        client = self.client(me.owner)
        client.calls += 1
        if verb in _READS:
            self.on_read(me.owner.pid, key)
        if verb == "delete":
            self.on_delete(me.owner, key)
        site = f"{me.owner.name}:{client.calls}"
        shown = f"{verb} {key}"
        changes = verb in _CHANGES
        fault, travels = self._fault(client, site, verb, key)
        self.trace(f"{site} {me.name.partition('/')[2]}: {shown}{f' [{fault}]' if fault else ''}")
        for action in client.at_calls.pop(client.calls, ()):
            scheduler.at(scheduler.now + travels * scheduler.rng.random() * 2, action)
        box = self._travel(site, fault, travels, perform, changes=changes)
        if scheduler.rng.random() < 0.2:
            scheduler.block(travels * scheduler.rng.random())
        if fault is not None and fault != "slow":
            if verb == "delete":
                self.undeleted.update(key.split(" "))
            if fault == "flaky":
                client.flaky_at = scheduler.now
            else:
                self._failed(client, me.number)
            raise _error(fault, shown, key)
        if me.number in client.failures:
            client.failures[me.number] = max(0.0, client.failures[me.number] - 0.25)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def _travel(
        self, site: str, fault: str | None, seconds: float, perform: Callable[[], Any], *, changes: bool
    ) -> list[Any]:
        """Have a request take effect, or not, after its travel; return the result and the error."""
        scheduler, box = self.scheduler, [None, None]
        me = scheduler.current
        assert me is not None

        def effect() -> None:
            try:
                box[0] = perform()
            except CkptstoreError as error:
                box[1] = error  # type: ignore[call-overload]
            scheduler.wake(me)

        if fault in ("lost", "throttled", "denied", "full", "flaky"):
            scheduler.block(seconds)
        elif fault == "late":
            late_seconds = self.plan.chance(site, "late") * 4 * self.plan.rank_timeout_seconds
            scheduler.at(scheduler.now + late_seconds, effect_only(perform))
            scheduler.block(seconds)
        elif changes:
            # it arrives even if its process is dead by then
            scheduler.at(scheduler.now + seconds, effect)
            scheduler.block()
        else:
            scheduler.block(seconds)
            effect()
        return box

    def corrupted(self, key: str, result: Any, views: Sequence[memoryview]) -> Any:
        """Return the read result for the calling process, or change `views`, with other bytes if the plan says so."""
        client = self.caller()
        is_file = key.startswith("checkpoints/")
        if self.is_calm or not (is_file or key.startswith("log/")):
            return result
        site = f"{client.process.name}:{client.calls}"
        other, client.last_read = client.last_read, bytes(result) if isinstance(result, bytes) else client.last_read
        if client.calls >= client.honest_until_call and self.plan.chance(site, "lie") < self.plan.lie_rate:
            client.is_corrupted = True
        if not client.is_corrupted:
            return result
        if isinstance(result, bytes) and other and (not is_file or self.plan.chance(site, "other") < 0.5):
            self.trace(f"{site}: what another file has comes of {key}")
            return other
        if not is_file:  # records have no digest of their own
            return result
        self.trace(f"{site}: other bytes come of {key}")
        if isinstance(result, bytes) and result:
            middle = len(result) // 2
            return result[:middle] + bytes([result[middle] ^ 1]) + result[middle + 1 :]
        for view in views:
            if view:
                view[-1] ^= 1
                break
        return result

    def doubted(self) -> None:
        """Switch the calling process to another way, which returns correct bytes for a while."""
        client = self.caller()
        client.is_corrupted, client.honest_until_call = False, client.calls + 300

    def _failed(self, client: Client, thread: int) -> None:
        count = client.failures.get(thread, 0.0) + 1
        client.failures[thread] = count
        now = self.scheduler.now
        if count <= 1:
            client.failing_since[thread] = now
        lasts = now - client.failing_since[thread] > self.plan.rank_timeout_seconds / 5
        if self._is_disk or count > self.plan.retry_attempts - 1 or lasts:
            client.hard_at = now

    def _fault(self, client: Client, site: str, verb: str, key: str) -> tuple[str | None, float]:
        """Return the fault of a request, and its duration."""
        seconds = self._latency_seconds * (0.1 + self.scheduler.rng.random())
        if self.is_calm:
            return None, seconds
        now = self.scheduler.now
        if now < self.away_until:
            return "lost", seconds + self._unanswered_seconds
        for outage in client.outages:
            kind = outage.kind_of(verb, key, now)
            if kind is not None:
                if kind in ("denied", "full"):
                    client.hard_at = now
                return kind, seconds + (0.0 if kind in ("denied", "full") else self._unanswered_seconds)
        return self._fault_by_chance(client, site, verb, seconds)

    def _fault_by_chance(self, client: Client, site: str, verb: str, seconds: float) -> tuple[str | None, float]:
        now = self.scheduler.now
        plan = self.plan
        if not plan.error_rate and not plan.slow_rate:
            return None, seconds
        if site in plan.without:
            return None, seconds
        chance = plan.chance(site)
        if chance < plan.error_rate:
            self.struck.append(site)
            which = plan.chance(site, "which")
            if verb in _LATE and plan.chance(site, "is late") < plan.late_rate:
                return "late", seconds + self._unanswered_seconds
            if which < 0.9:
                is_lost = which < 0.45 or verb not in _CHANGES
                return "lost" if is_lost else "answer", seconds + self._unanswered_seconds * which
            return "throttled", seconds
        if chance > 1 - plan.slow_rate and site.startswith(plan.slow_who):
            self.struck.append(site)
            extra = plan.chance(site, "slow") ** 3 * plan.rank_timeout_seconds * 0.6
            client.slow_at = now + extra
            return "slow", seconds + extra
        return None, seconds


def effect_only(perform: Callable[[], Any]) -> Callable[[], None]:
    """Return `perform` without its result or error, for a caller that has given up."""

    def effect() -> None:
        try:
            perform()
        except StorageError:
            """It came too late for that."""

    return effect


def _error(fault: str, shown: str, key: str) -> StorageError:
    if fault == "denied":
        return AccessDenied(f"{shown} was refused", file=key)
    if fault == "full":
        return StorageFull(f"{shown}: there is no room", file=key)
    if fault == "throttled":
        return StorageThrottled(f"{shown}: too many requests", file=key)
    return StorageUnavailable(f"{shown} was not answered", file=key)


class _Connected(base.Storage):
    def __init__(self, network: Network, inner: Any, mirror: Space | None) -> None:
        self.network = network
        self.inner = inner
        self.mirror = mirror

    def mirrored(self, keys: Sequence[str], perform: Callable[[], Any]) -> Callable[[], Any]:
        """Return `perform` followed by an update of the mirror."""
        if self.mirror is None:
            return perform
        mirror = self.mirror

        def performed() -> Any:
            try:
                return perform()
            finally:
                for key in keys:
                    try:
                        mirror.put(key, self.inner.read(key), is_durable=True)
                    except FileMissing:
                        mirror.remove(key)

        return performed

    @property
    def uri(self) -> str:
        return str(self.inner.uri)

    def __repr__(self) -> str:
        return repr(self.inner)

    def list(self, prefix: str) -> Any:
        return iter(self.network.request("list", prefix, lambda: [*self.inner.list(prefix)]))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete: on a disk one request for each file."""
        step = 1 if self.network._is_disk else 1000
        for first in range(0, len(keys), step):
            some = list(keys[first : first + step])
            perform = self.mirrored(some, functools.partial(self.inner.delete, some))
            self.network.request("delete", " ".join(some), perform)


class _ConnectedWriter:
    def __init__(self, storage: _Connected, key: str, inner: Any) -> None:
        self._storage = storage
        self._network = storage.network
        self._key = key
        self._inner = inner

    def write_part(self, offset: int, views: Sequence[memoryview], digest: Digest | None = None) -> None:
        data = [memoryview(b"".join(views))]
        self._network.request("write_part", self._key, lambda: self._inner.write_part(offset, data, digest))

    def finish(self) -> None:
        self._network.request("finish", self._key, self._storage.mirrored([self._key], self._inner.finish))

    def abort(self) -> None:
        try:
            self._network.request("abort", self._key, self._inner.abort)
        except StorageError:
            """The storage did not learn of it: the parts stay until a cleaner removes them."""


def _open_parts(self: _Connected, key: str, size_bytes: int) -> Any:
    writer = self.network.request("open_parts", key, lambda: self.inner.open_parts(key, size_bytes))
    return _ConnectedWriter(self, key, writer)


def _copy_from(self: _Connected, source: Any, source_key: str, key: str) -> bool:
    source = getattr(source, "inner", source)
    perform = self.mirrored([key], lambda: self.inner.copy_from(source, source_key, key))
    return bool(self.network.request("copy_from", key, perform))


def _doubt(self: _Connected, key: str, offset: int = 0, size_bytes: int | None = None) -> None:
    self.network.doubted()


_OWN: dict[str, Callable[..., Any]] = {"open_parts": _open_parts, "copy_from": _copy_from, "doubt": _doubt}


def _corrupted(network: Network, key: str, perform: Callable[[], Any], views: Sequence[memoryview]) -> Any:
    return network.corrupted(key, perform(), views)


def _request(name: str) -> Callable[..., Any]:
    def call(self: _Connected, *arguments: Any, **keywords: Any) -> Any:
        key = arguments[0] if arguments else ""
        if name == "write":  # the views are not kept, and it may arrive late
            arguments = (key, [memoryview(b"".join(arguments[1]))])
        if name == "copy":
            key = arguments[1]
        shown, perform = str(key), lambda: getattr(self.inner, name)(*arguments, **keywords)
        if name == "write_many":
            files = [(key, [memoryview(b"".join(views))]) for key, views in arguments[0]]
            shown, arguments = " ".join(key for key, _ in files), (files,)
            perform = self.mirrored([key for key, _ in files], perform)
        elif name == "link":
            keys = [target for _, target in arguments[0]]
            shown, perform = " ".join(keys), self.mirrored(keys, perform)
        elif name == "persist":
            shown = " ".join(key)
        elif name in _CHANGES and name not in _OTHER_CHANGES:
            perform = self.mirrored([key], perform)
        elif name in ("read", "read_into") and self.network.plan.lie_rate:
            views = arguments[2] if name == "read_into" else ()
            perform = functools.partial(_corrupted, self.network, shown, perform, views)
        return self.network.request(name, shown, perform)

    return call


def _through(name: str) -> Callable[..., Any]:
    def call(self: _Connected, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self.inner, name)(*arguments, **keywords)

    return call


@cache
def _class_for(powers: tuple[Any, ...]) -> type[_Connected]:
    names = frozenset().union(*map(base.methods_of, (base.Storage, *powers))) - vars(_Connected).keys()
    no_request = _NO_REQUEST if base.Disk in powers else _NO_REQUEST | _DISK_REQUESTS
    methods = {name: _OWN.get(name) or (_through if name in no_request else _request)(name) for name in names}
    return type("ConnectedStorage", (_Connected,), methods)
