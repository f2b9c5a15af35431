"""Run one plan: its storages, its processes and their programs."""

from __future__ import annotations

import functools
import hashlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptstore.errors import CkptstoreError
from kit.simulation.fast_tier.node_disks import NodeDisks
from kit.simulation.ledger import Violation
from kit.simulation.model import Model, Tag
from kit.simulation.network import Network, Outage
from kit.simulation.plan import Action, Actor, Plan, Trouble
from kit.simulation.ray_model import RayModel
from kit.simulation.virtual import storages
from kit.simulation.virtual.scheduler import Process, Scheduler

STORE_URI = "sim://store"
COPY_URI = "sim://copy"
RUN_URI = "sim://run"
"""The directory of a run of Ray, which keeps the checkpoints in it."""
DIRECTORY_MARK = "ckptstore-simulation-"
"""The beginning of the names of the runs' real directories."""
LONGEST_CALL_SECONDS = 20_000.0
"""More than the timeouts and retries of one call can add up to."""
LAST_CALM_SECONDS = 60_000.0


@dataclass
class Attempted:
    """One action of one rank."""

    began: float
    was_closed: bool = False
    ended: float | None = None
    result: Any = None
    error: BaseException | None = None


@dataclass
class Member:
    """One process of an actor."""

    actor: Actor
    rank: int
    process: Process
    store: Any = None
    job: Any = None
    """The job of the store, None where Ray keeps the checkpoints."""
    is_closed: bool = False
    has_saved: bool = False
    """True if a save to the disks of nodes has succeeded."""
    num_broadcasts: int = 0
    is_done: bool = False
    stopped_seconds: float = 0.0
    stopped_at: float = -1.0
    last_error: BaseException | None = None
    in_flight: list[tuple[int, Action, Attempted, Any]] = field(default_factory=list)
    """Asynchronous saves that are not handled yet."""
    seen: list[BaseException] = field(default_factory=list)
    """Errors of asynchronous saves: a later call may raise them again."""


@dataclass
class World:
    """Everything in one run."""

    plan: Plan
    scheduler: Scheduler
    servers: dict[str, Any] = field(default_factory=dict)
    """The key-value store of each job."""
    broadcasts: dict[tuple[str, int], dict[int, Any]] = field(default_factory=dict)
    """Each rank's value, by job and number of the broadcast among Ray's workers."""
    events: list[str] = field(default_factory=list)
    """The trace."""
    members: list[Member] = field(default_factory=list)
    attempts: dict[tuple[str, int], dict[int, Attempted]] = field(default_factory=dict)
    """Each rank's result, by job and number of the action."""
    is_calm: bool = False

    def __post_init__(self) -> None:
        self.network = Network(self.scheduler, self.plan, self.trace)
        self.directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_MARK, dir=_memory_directory()))
        self.spaces: dict[str, storages.Space] = {}
        for uri in (STORE_URI, COPY_URI, RUN_URI):
            self._space(uri)
        ranks_of, step_of = functools.partial(_ranks_of, self), functools.partial(_step_of, self)
        now = lambda: self.scheduler.now  # noqa: E731
        self.model = Model(self.spaces[STORE_URI], self.plan, now, ranks_of, step_of)
        self.network.on_read = self.model.reads_file
        self.model.on_commit = self.look
        self.copy = Model(self.spaces[COPY_URI], self.plan, now, ranks_of, step_of, is_copy=True)
        self.kept_by_ray = RayModel(self.spaces[RUN_URI], ranks_of, step_of)
        self.network.on_delete = self._deletes
        self.nodes = NodeDisks(self.scheduler, self.plan, self.trace, self.directory, self.model)
        self._digest = hashlib.sha256()
        self._sources: dict[tuple[str, int, int, int], Path] = {}
        self._waiting: list[Any] = []
        self._pids = 1000

    def close(self) -> None:
        """Remove the real directories."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def trace(self, text: str) -> None:
        """Record one line of the trace."""
        line = f"{self.scheduler.now:12.4f} {text}"
        self._digest.update(line.encode())
        self.events.append(line)

    @property
    def digest(self) -> str:
        """A digest of the trace, the same for the same run."""
        return self._digest.hexdigest()[:16]

    # Storages

    def open_storage(self, uri: Any, **_: Any) -> Any:
        """Open a storage in place of `ckptstore.storage.open.open_storage`."""
        return self.network.connect(storages.KINDS[self.plan.storage](self._space(str(uri))))

    def _space(self, uri: str) -> storages.Space:
        if uri not in self.spaces:
            real = self.directory / uri.replace("/", "-") if self.plan.storage == "disk" else None
            self.spaces[uri] = storages.Space(self.scheduler, uri, real=real)
        return self.spaces[uri]

    # Processes

    def process(self, name: str, *, clock_ahead_seconds: float = 0.0) -> Process:
        """Create a process."""
        self._pids += 1
        return Process(name, self._pids, clock_ahead_seconds=clock_ahead_seconds)

    def start(self, actor: Actor, program: Callable[[World, Member], None]) -> None:
        """Start the processes of an actor when its time has come."""
        members = []
        for rank in range(max(1, actor.ranks)):
            name = f"{actor.name}.{rank}" if actor.ranks else actor.name
            process = self.process(name, clock_ahead_seconds=actor.clock_ahead_seconds)
            members.append(Member(actor, rank, process))
        self.members += members
        for member in members:
            self._prepare(member)
            self.scheduler.spawn(member.process, functools.partial(self._run, member, program), "main")

    def _run(self, member: Member, program: Callable[[World, Member], None]) -> None:
        self.scheduler.sleep(member.actor.after_seconds)
        program(self, member)
        self.done(member)

    def _prepare(self, member: Member) -> None:
        client = self.network.client(member.process)
        for trouble in self.plan.troubles:
            if trouble.who == member.process.name:
                happens = functools.partial(self._strike, trouble, member)
                on_node = trouble.kind.startswith("node ")
                where = self.nodes.network.client(member.process) if on_node else client
                where.at_calls.setdefault(trouble.at_call, []).append(happens)

    def _strike(self, trouble: Trouble, member: Member) -> None:
        if self.is_calm or member.is_done:
            return
        self.trace(f"--- {trouble.kind} {trouble.what} of {member.process.name} for {trouble.seconds:g} s")
        if trouble.kind in ("kill", "node kill"):
            self.kill(member)
        elif trouble.kind.startswith("node "):
            self._strike_node(trouble, member)
        elif trouble.kind == "power":
            for other in self.members:
                if not other.is_done:
                    self.kill(other)
            for uri in (STORE_URI, RUN_URI):
                self.spaces[uri].lose_power(lambda key: self.plan.chance("power", key))
        elif trouble.kind == "stop":
            member.stopped_seconds += trouble.seconds
            member.stopped_at = self.scheduler.now + trouble.seconds
            self.scheduler.stop(member.process, trouble.seconds)
        elif trouble.kind == "outage":
            kind, _, prefix = trouble.what.partition(" ")
            client = self.network.client(member.process)
            client.outages.append(Outage(kind, prefix, self.scheduler.now + trouble.seconds))
        elif trouble.kind == "away":
            self.network.away_until = self.scheduler.now + trouble.seconds
        else:
            self._harm(trouble)

    def _strike_node(self, trouble: Trouble, member: Member) -> None:
        node = member.actor.nodes[member.rank]
        if trouble.kind == "node full":
            until = self.scheduler.now + trouble.seconds
            self.nodes.network.client(member.process).outages.append(Outage("full", "checkpoints/", until))
        elif trouble.kind == "node damage":
            self.nodes.damage(node, self.plan.chance("node damage", trouble.at_call))
        elif trouble.kind in ("node deaf", "node mute"):
            self.nodes.cut_off(node, trouble.seconds, is_mute=trouble.kind == "node mute")
        else:
            for other in self.members:
                if not other.is_done and other.actor.nodes and other.actor.nodes[other.rank] == node:
                    self.kill(other)
            self.nodes.lose(node)

    def _harm(self, trouble: Trouble) -> None:
        if trouble.kind == "vanish":
            self.model.vanish(trouble.what)
            return
        live = [saved for saved in self.model.live() if not saved.is_damaged]
        if live:
            names = sorted(name for name in live[-1].files)
            name = names[int(self.plan.chance("damage", trouble.at_call) * len(names))]
            self.trace(f"--- {name} of record {live[-1].number} is {trouble.what}")
            self.model.damage(live[-1], name, trouble.what)

    def _deletes(self, process: Process, keys: str) -> None:
        for key in keys.split():
            self.model.gives_back(process.pid, key)
        rank = next((member.rank for member in self.members if member.process is process), 0)
        try:
            self.kept_by_ray.check_delete(process.name, rank, keys.split())
        except Violation as broken:  # the caller would take it for its own error
            self.scheduler.fail(broken)

    def kill(self, member: Member) -> None:
        """Kill the process."""
        self._unlock_leases(member.process.pid)
        self.scheduler.kill(member.process)
        self.model.ends_reading(member.process.pid)
        self.model.careful.discard(member.process.pid)  # its lease may still arrive
        self.done(member)

    def _unlock_leases(self, pid: int) -> None:
        """End the locks of a process on its leases: its descriptors stay open in this one, so the files are others."""
        for space in self.spaces.values():
            for path in [] if space.real is None else [*(space.real / "leases").glob(f"*-{pid}-*")]:
                copied = path.with_name(f"{path.name}.copy")
                copied.write_bytes(path.read_bytes())
                copied.replace(path)

    def done(self, member: Member) -> None:
        """Note that it does nothing any more."""
        member.is_done = True
        self.look()

    # Waiting for each other

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is checked whenever a process ends or waits."""
        while not condition():
            assert self.scheduler.current is not None
            self._waiting.append(self.scheduler.current)
            self.scheduler.block()

    def look(self) -> None:
        """Wake all threads that wait for a condition."""
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            self.scheduler.wake(thread)

    def wait_calm(self, member: Member) -> None:
        """Wait until nobody is at work and no more faults happen."""
        member.is_done = True
        self.look()
        self.wait_until(lambda: self.is_calm)

    def is_over(self, member: Member) -> bool:
        """True if a process is dead, or has ended before the calm."""
        return member.process.is_dead or (member.is_done and not self.is_calm)

    def has_ended(self, name: str) -> bool:
        """True if all processes of an actor have ended, or it never began."""
        members = [member for member in self.members if member.actor.name == name]
        return bool(members) and all(member.is_done for member in members)

    # Directories to save

    def source(self, job: str, index: int, rank: int, action: Action, contents: Callable[[str], bytes]) -> Path:
        """Return a real directory with the files of one rank."""
        path = self.directory / f"{job}-{index}-{rank}"
        if not path.exists():
            path.mkdir()
            for name in ("model.bin", "more.bin") if action.size_bytes > 50 else ("model.bin",):
                (path / name).write_bytes(contents(name))
        return path

    # Facts about a job

    def members_of(self, name: str) -> list[Member]:
        """Return the processes of an actor."""
        return [member for member in self.members if member.actor.name == name]

    def excuse(self, name: str, since: float) -> str | None:
        """Return a fault of an actor's processes since then that may make its calls fail, None for none."""
        for member in self.members_of(name):
            client = self.network.client(member.process)
            if member.process.is_dead:
                return f"{member.process.name} is dead"
            if member.stopped_at >= since:
                return f"{member.process.name} was stopped"
            if client.hard_at >= since:
                return f"{member.process.name} could not reach the storage"
            if client.slow_at >= since:
                return f"{member.process.name} waited long for the storage"
        return None

    def fail(self, rule: str, text: str) -> None:
        """Raise Violation for a broken promise."""
        raise Violation(rule, text)


def _ranks_of(world: World, job: str) -> int:
    for member in world.members:
        if member.actor.name == job:
            return member.actor.ranks
    return 0


def _step_of(world: World, tag: Tag) -> int | None:
    job, index = tag
    for member in world.members:
        if member.actor.name == job and index < len(member.actor.actions):
            step: int = member.actor.actions[index].step
            return step
    return None


def _memory_directory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def kind_of(error: BaseException | None) -> str:
    """Format an error."""
    if error is None:
        return "ok"
    committed = f" committed={error.committed}" if isinstance(error, CkptstoreError) else ""
    return f"{type(error).__name__}{committed}: {error}"
