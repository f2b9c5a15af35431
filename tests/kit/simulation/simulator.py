"""Run seeds: one at a time, with everything patched once."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from ckptstore import program
from ckptstore.config import RetryConfig, StoreConfig
from ckptstore.format.provenance import Provenance
from ckptstore.storage import open as opening
from kit.simulation import alone, keyvalue, programs
from kit.simulation.fast_tier import fast_jobs, node_disks
from kit.simulation.ledger import Violation
from kit.simulation.plan import Actor, Plan, draw
from kit.simulation.virtual.patches import ModuleState, load, patched
from kit.simulation.virtual.scheduler import Deadlock, Scheduler, Stuck, running
from kit.simulation.world import DIRECTORY_MARK, World

_MODULES = (
    "ckptstore",
    "ckptstore.opening",
    "ckptstore.extensions.exchange.copying",
    "ckptstore.loading.newest",
    "ckptstore.loading.restoring",
    "ckptstore.loading.story",
    "ckptstore.extensions.history.thinning",
    "ckptstore.loading.verify",
    "ckptstore.saving.background",
    "ckptstore.saving.directory_shard",
    "ckptstore.saving.log_publisher",
    "ckptstore.transfer.fetch",
    "ckptstore.transfer.reads",
    "ckptstore.transfer.upload",
    "ckptstore.extensions.history.cursor_file",
    "ckptstore.extensions.history.follow",
    "ckptstore.upkeep.garbage",
    "ckptstore.upkeep.leases",
    "ckptstore.upkeep.retain",
    "ckptstore.node_cache",
    "tenacity",
    "tenacity.nap",
    "ckptstore.group.storage_board",
    "ckptstore.integrations.ray.worker_group",
    "ckptstore.integrations.ray.kept_by_ray.ray_keeps",
    "ckptstore.integrations.ray.kept_by_ray.ray_shards",
    "ckptstore.integrations.ray.kept_by_ray.wrapping",
    "ckptstore.saving.save_state",
    "ckptstore.extensions.tier.guest",
    "ckptstore.extensions.tier.saver",
    "ckptstore.loading.load_state",
    "ckptstore.group.torch_board",
    "ckptstore.saving.state_shard",
    "ckptstore.stock.stock_read",
    "kit.simulation.states",
)
_ENVIRONMENT = {
    "CKPTSTORE_NUM_THREADS": "3",
    "CKPTSTORE_NUM_REQUESTS": "3",
    "CKPTSTORE_MEMORY_BUDGET_BYTES": str(4 << 20),
}
_DEFAULTS: dict[str, Any] = {
    item.name: item.default for config in (RetryConfig, StoreConfig) for item in fields(config)
}
_RETRIED_SHARE = _DEFAULTS["retry_deadline_seconds"] / _DEFAULTS["rank_timeout_seconds"]
LIMIT_SECONDS = 60.0
_QUIET_SECONDS = 500_000.0
_DESCRIPTORS = "/proc/self/fd"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run."""

    plan: Plan
    failure: str
    """"" when every promise held."""
    rule: str
    trace: tuple[str, ...]
    digest: str
    steps: int
    """Hand-overs of the baton."""
    virtual_seconds: float
    requests: int = 0
    """Requests of all processes to all storages."""
    struck: tuple[str, ...] = ()
    num_records: int = 0

    @property
    def ok(self) -> bool:
        """True if every promise held."""
        return not self.failure


_worlds: list[World] = []


def _open_storage(uri: Any, **options: Any) -> Any:
    if running() is None or not str(uri).startswith("sim://"):
        return _real_open_storage(uri, **options)
    return _worlds[-1].open_storage(uri, **options)


_real_open_storage = opening.open_storage


def _provenance(*, num_hosts: int | None = None) -> Provenance:
    """Describe no program: the real one is found out by a thread, in real time, once for each real process."""
    return Provenance(argv=("simulated",), num_hosts=num_hosts)


class Simulation:
    """Runs plans, as often as one likes, during its context. Not safe for threads."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._state: ModuleState | None = None

    def __enter__(self) -> Simulation:
        load(*_MODULES)
        replaced: dict[int, tuple[Any, Any]] = {id(_real_open_storage): (_real_open_storage, _open_storage)}
        replaced[id(program.provenance)] = (program.provenance, _provenance)
        replaced |= node_disks.replaced(lambda: _worlds[-1].nodes)
        replaced |= keyvalue.REPLACED
        self._state = ModuleState()
        self._stack.enter_context(patched(replaced))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, plan: Plan, *, prepare: Callable[[World], None] | None = None) -> Outcome:
        """Run one plan to its end, or to the first broken promise."""
        before = set(_left_open())  # of killed processes in earlier runs: nobody closes them
        outcome = self._run(plan, prepare)
        was_killed = any(mark in line for line in outcome.trace for mark in ("--- kill", "--- power", "--- node"))
        if outcome.ok and not was_killed and set(_left_open()) - before:
            gc.collect()  # files held only by a cycle are closed eventually
            if left := sorted(set(_left_open()) - before):
                rule = "no file descriptor is left"
                outcome = replace(outcome, failure=f"Violation: {rule}: {', '.join(left)}", rule=rule)
        return outcome

    def _run(self, plan: Plan, prepare: Callable[[World], None] | None) -> Outcome:
        assert self._state is not None, "use it as a context"
        scheduler = Scheduler(plan.seed, swap=self._state.swap)
        world = World(plan, scheduler)
        scheduler.environment = {
            **_ENVIRONMENT,
            "CKPTSTORE_RETRY_ATTEMPTS": str(plan.retry_attempts),
            # the same share of the timeout of a rank as by default
            "CKPTSTORE_RETRY_DEADLINE_SECONDS": str(plan.rank_timeout_seconds * _RETRIED_SHARE),
            "CKPTSTORE_RETRY_WAIT_MAX_SECONDS": str(plan.rank_timeout_seconds / 30),
            "CKPTSTORE_CACHE_DIR": str(world.directory / "cache"),
            "CKPTSTORE_CACHE_WAIT_SECONDS": "60",  # nobody takes the turn from a killed process in a run
        }
        _worlds.append(world)
        failure, rule = "", ""
        try:
            if prepare is not None:
                prepare(world)
            _begin(world)
            scheduler.run(limit_seconds=LIMIT_SECONDS)
        except Exception as error:
            failure, rule = _described(error), getattr(error, "rule", type(error).__name__)
        finally:
            _worlds.pop()
            world.close()
        return Outcome(
            plan,
            failure,
            rule,
            tuple(world.events),
            world.digest,
            scheduler.steps,
            scheduler.now,
            sum(client.calls for client in world.network.clients.values()),
            tuple(world.network.struck),
            len(world.model.records),
        )


def _left_open() -> list[str]:
    """Return the open files of this process in the directories of past runs. Needs /proc."""
    found = []
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with contextlib.suppress(OSError):  # that of the listing itself
            path = os.readlink(f"{_DESCRIPTORS}/{name}")
            if DIRECTORY_MARK in path:
                found.append(path)
    return found


def _described(error: BaseException) -> str:
    known = isinstance(error, Violation | Deadlock | Stuck)
    texts = [f"{type(error).__name__}: {error}"] if known else traceback.format_exception(error)
    while (cause := error.__cause__) is not None:
        texts.append(f"{type(cause).__name__}: {cause}")
        error = cause
    return "\n".join(texts)


def _begin(world: World) -> None:
    """Start a process that starts all others in time, and ends the run."""
    director = world.process("director")
    world.scheduler.spawn(director, functools.partial(_direct, world), "main")


def _direct(world: World) -> None:
    scheduler, plan = world.scheduler, world.plan
    waiting = list(plan.actors)
    rank_program = fast_jobs.fast_program if plan.fast_copies else programs.rank_program
    scheduler.at(_QUIET_SECONDS, functools.partial(_fail_late, world))

    def ready(actor: Actor) -> bool:
        if actor.begins == "when saved":
            return bool(world.model.saved) or all(member.is_done for member in world.members)
        before = actor.begins.removeprefix("after ")
        known = any(other.name == before for other in plan.actors)
        return actor.begins == "at once" or not known or world.has_ended(before)

    while waiting:
        for actor in [actor for actor in waiting if ready(actor)]:
            waiting.remove(actor)
            world.start(actor, rank_program if actor.ranks else alone.other_program)
        if waiting:
            world.wait_until(lambda: any(map(ready, waiting)))
    world.wait_until(lambda: all(member.is_done for member in world.members))
    scheduler.sleep(5 * plan.rank_timeout_seconds)  # late requests arrive
    if world.model.vanished_at is not None:
        scheduler.finish()
        return
    world.trace("--- calm")
    world.is_calm = world.network.is_calm = world.nodes.network.is_calm = True
    for member in world.members:
        member.is_done = member.process.is_dead or member.is_done
    world.look()
    scheduler.sleep(20 * plan.rank_timeout_seconds + 4_000.0)
    ranks = next((actor.ranks for actor in plan.actors if actor.ranks), 1)
    nodes = next((actor.nodes for actor in plan.actors if actor.ranks), ())
    final = Actor("final", (), ranks=max(1, ranks), nodes=nodes)
    world.start(final, fast_jobs.fast_finale if plan.fast_copies else programs.finale)
    world.wait_until(lambda: world.has_ended("final"))
    scheduler.finish()


def _fail_late(world: World) -> None:
    world.fail("every call ends", f"after {_QUIET_SECONDS:g} s of virtual time\n{world.scheduler.describe()}")


def report(outcome: Outcome, *, lines: int = 80) -> str:
    """Return a failure for people."""
    shown = outcome.trace if lines <= 0 else outcome.trace[-lines:]
    cut = len(outcome.trace) - len(shown)
    head = [
        f"seed {outcome.plan.seed}: {outcome.failure}",
        f"storage: {outcome.plan.storage}, group: {outcome.plan.board}",
    ]
    more = [f"... {cut} lines before"] if cut else []
    again = f"again: python -m kit.simulation{_arguments_of(outcome.plan)}"
    return "\n".join([*head, *more, *shown, again])


def _arguments_of(plan: Plan) -> str:
    """Return the arguments by which the program runs a plan again: its seed, or a file if no seed has this plan."""
    if plan == fast_jobs.draw_fast(plan.seed):
        return f" --fast-tier --seed {plan.seed}"
    return f" --seed {plan.seed}" if plan == draw(plan.seed) else f" --plan FILE, with this in it:\n{plan.to_json()}"


def shrink(simulation: Simulation, outcome: Outcome, *, seconds: float = 30.0) -> Outcome:
    """Return a smaller plan that breaks the same promise: without needless actors, actions, troubles and errors."""
    until = time.monotonic() + seconds
    best = outcome
    changed = True
    while changed and time.monotonic() < until:
        changed = False
        for smaller in _smaller(best):
            if time.monotonic() > until:
                break
            found = simulation.run(smaller)
            if found.rule == best.rule:
                best, changed = found, True
                break
    return best


def _smaller(outcome: Outcome) -> Iterator[Plan]:
    plan = outcome.plan
    for trouble in plan.troubles:
        yield replace(plan, troubles=tuple(item for item in plan.troubles if item is not trouble))
    for actor in plan.actors:
        yield replace(plan, actors=tuple(item for item in plan.actors if item is not actor))
    if plan.slow_rate:
        yield replace(plan, slow_rate=0.0)
    if plan.lie_rate:
        yield replace(plan, lie_rate=0.0)
    if plan.error_rate:
        yield replace(plan, error_rate=0.0)
    for index, actor in enumerate(plan.actors):
        for action in actor.actions:
            less = replace(actor, actions=tuple(item for item in actor.actions if item is not action))
            yield replace(plan, actors=(*plan.actors[:index], less, *plan.actors[index + 1 :]))
        if actor.ranks > 2:
            less = replace(actor, ranks=2)
            yield replace(plan, actors=(*plan.actors[:index], less, *plan.actors[index + 1 :]))
    for site in reversed(outcome.struck):
        yield replace(plan, without=(*plan.without, site))


def write(text: str) -> None:
    """Print a line now."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
