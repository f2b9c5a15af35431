"""Run jobs with a fast tier on simulated nodes: their plans, their actions, and the judgement of their results."""

from __future__ import annotations

from random import Random
from typing import Any

from ckptstore.catalogue import job_of
from ckptstore.checkpoint import files_behind
from ckptstore.errors import CkptstoreError, NoUsableCheckpoint, StoreFenced
from ckptstore.extensions.tier.fast_files import FastFiles
from kit.simulation.alone import open_for
from kit.simulation.ledger import Violation
from kit.simulation.plan import Action, Actor, Plan, Trouble
from kit.simulation.virtual.clocks import sleep
from kit.simulation.world import LONGEST_CALL_SECONDS, Member, World, kind_of

DURABLE_SECONDS = 30_000.0
_NODES = ("a", "b", "c")
_CUTS = frozenset({"node deaf", "node mute"})


def draw_fast(seed: int) -> Plan:
    """Draw the plan of a seed: jobs in turn or concurrently on three nodes, and their troubles."""
    rng = Random(f"fast plan {seed}")
    copies = rng.choice([1, 2])
    jobs: list[Actor] = []
    step = 0
    ranks = rng.choice([1, 2, 2, 3])
    for index in range(rng.choice([1, 2, 3, 4])):
        ranks = ranks if rng.random() < 0.7 else rng.choice([1, 2, 3])
        first = rng.choice([0, 0, 0, 1])
        nodes = tuple(_NODES[(first + rank) % rng.choice([2, 2, 3])] for rank in range(ranks))
        actions = [Action("resume", after_seconds=rng.random())] if index or rng.random() < 0.3 else []
        for _ in range(rng.choice([2, 3, 5])):
            step += 10
            kind = rng.choice(["state", "async", "async"])
            actions.append(Action(kind, step=step, after_seconds=rng.choice([0.1, 1.0, 100.0]) * rng.random()))
        if rng.random() < 0.8:
            actions.append(Action("close"))
        is_concurrent = rng.random() < 0.3
        begins = "at once" if index == 0 or is_concurrent else f"after job{index}"
        late = rng.choice([0.0, 1.0, 30.0]) if index else 0.0
        jobs.append(
            Actor(f"job{index + 1}", tuple(actions), ranks=ranks, begins=begins, after_seconds=late, nodes=nodes)
        )
    troubles = [_trouble(rng, rng.choice(jobs)) for _ in range(rng.choice([0, 1, 2, 3]))]
    apart = Random(f"fast bucket {seed}")
    if apart.random() < 0.3:
        who = f"{apart.choice(jobs).name}.0"
        seconds = apart.choice([120.0, 900.0, 7200.0])
        away = Trouble("away", who, at_call=apart.randrange(5, 120), seconds=seconds)
        troubles = [away, *troubles[: apart.choice([0, 0, 1, 3])]]
    ways = Random(f"fast ways {seed}")
    if ways.random() < 0.3:
        cuts = [_cut(ways, jobs) for _ in range(ways.choice([1, 1, 2]))]
        troubles = [*cuts, *troubles[: ways.choice([0, 0, 1])]]
    return Plan(
        seed=seed,
        board=apart.choice(["storage", "torch"]),
        storage=rng.choice(["objects", "objects", "disk"]),
        contents="state",
        policy=rng.choice(["all", "latest 2"]),
        rank_timeout_seconds=rng.choice([6.0, 24.0]),
        fast_copies=copies,
        actors=(*jobs, *_others(Random(f"fast admin {seed}"))),
        troubles=tuple(troubles),
    )


def _others(rng: Random) -> list[Actor]:
    """Somebody at the command line, in some runs."""
    if rng.random() > 0.25:
        return []
    kinds = [rng.choice(["roll back", "roll back", "pin", "prune"]) for _ in range(rng.choice([1, 2, 4]))]
    actions = tuple(Action(kind, after_seconds=rng.choice([1.0, 30.0]) * rng.random()) for kind in kinds)
    return [Actor("admin", actions, ranks=0, begins="when saved")]


def _trouble(rng: Random, job: Actor) -> Trouble:
    who = f"{job.name}.{rng.randrange(job.ranks)}"
    kind = rng.choice(["kill", "node kill", "node kill", "node lost", "node full", "node damage", "stop", "outage"])
    at_call = rng.randrange(5, 120) if kind in ("kill", "stop", "outage") else rng.randrange(1, 80)
    seconds = rng.choice([30.0, 200.0, 3600.0])
    return Trouble(kind, who, at_call=at_call, seconds=seconds, what="lost " if kind == "outage" else "")


def _cut(rng: Random, jobs: list[Actor]) -> Trouble:
    """Return a node whose server accepts no connection, or one behind a proxy that lets nothing out."""
    job = rng.choice(jobs)
    kind = rng.choice(sorted(_CUTS))
    at_call, seconds = rng.randrange(1, 60), rng.choice([2.0, 30.0, 3600.0])
    return Trouble(kind, f"{job.name}.{rng.randrange(job.ranks)}", at_call=at_call, seconds=seconds)


def fast_program(world: World, member: Member) -> None:
    """Run one rank of a job with a fast tier."""
    member.store = open_for(world, member)
    member.job = job_of(member.store)
    for index, action in enumerate(member.actor.actions):
        sleep(action.after_seconds + 0.05 * member.rank)
        error = act(world, member, index, action)
        if error is not None and (isinstance(error, StoreFenced) or action.kind == "resume"):
            break
    world.wait_calm(member)


def act(world: World, member: Member, index: int, action: Action) -> BaseException | None:
    """Do one action, and judge its result."""
    where = f"{member.process.name}, action {index} ({action.kind} {action.step})"
    began = world.scheduler.now
    world.trace(f"{where} begins")
    error: BaseException | None = None
    try:
        if action.kind == "resume":
            _resume(world, member, where)
        elif action.kind == "close":
            member.is_closed = True
            member.store.close()
        else:
            _save(world, member, index, action, where)
    except Violation:
        raise
    except Exception as raised:
        error = raised
    world.trace(f"{where} ends: {kind_of(error)}")
    stopped = sum(other.stopped_seconds for other in world.members)
    if world.scheduler.now - began > LONGEST_CALL_SECONDS + stopped:
        world.fail("every call ends", f"{where} took {world.scheduler.now - began:.0f} s")
    if error is not None and not isinstance(error, CkptstoreError | TimeoutError):
        raise Violation("every error is a CkptstoreError", f"{where}: {type(error).__name__}: {error}") from error
    member.last_error = error
    if error is not None and not isinstance(error, StoreFenced) and not _is_disturbed(world, member, action, began):
        world.fail("a call that nothing disturbs succeeds", f"{where}: {kind_of(error)}")
    return error


def _is_disturbed(world: World, member: Member, action: Action, began: float) -> bool:
    """True if something may make the action fail."""
    plan = world.plan
    # Unreachable nodes disturb no save, but a resume, which must not take something older for that reason. A bucket
    # that is away disturbs no save of a job that has claimed the store and whose ranks do not meet there.
    if any(other.begins == "at once" for other in plan.actors[1:]):
        return True
    kinds = {trouble.kind for trouble in plan.troubles}
    if kinds and kinds <= _CUTS:
        return action.kind == "resume" and any(world.nodes.was_cut(node, began) for node in member.actor.nodes)
    if kinds != {"away"}:
        return True
    meets_there = plan.board == "storage" and member.actor.ranks > 1
    return bool(plan.troubles) and (meets_there or not member.has_saved or action.kind in ("resume", "close"))


def _save(world: World, member: Member, index: int, action: Action, where: str) -> None:
    from kit.simulation.states import state_of

    state = state_of((member.actor.name, index), member.rank)
    if action.kind == "state":
        found = member.store.save(action.step, state)
    else:
        found = member.store.save_async(action.step, state, max_failures=1000).result()
    member.has_saved = True
    files = files_behind(found)
    if not isinstance(files, FastFiles):
        if found.number not in world.model.saved:
            world.fail("what returned is complete", f"{where}: record {found.number} is not in the log")
    elif str(files.certificate.attempt) not in world.nodes.saved:
        world.fail("what returned is complete", f"{where}: {files.certificate.attempt} has no certificate")


def _resume(world: World, member: Member, where: str) -> Any:
    from kit.simulation.states import empty_state, problem_of

    nodes, began = list(dict.fromkeys(member.actor.nodes)), world.scheduler.now
    before = world.nodes.usable(nodes)
    state = empty_state()
    found = member.store.resume(state, per_rank="first")
    after = world.nodes.usable(nodes)
    newest = max(before.values(), default=None)
    if any(world.nodes.was_cut(node, began) for node in nodes):
        nodes = [node for node in nodes if not world.nodes.was_cut(node, began)]
        before = {name: order for name, order in world.nodes.usable(nodes).items() if name in before}
    needed = max((before[name] for name in before.keys() & after.keys()), default=None)
    if found is None:
        if needed is not None:
            world.fail("a resume takes the newest", f"{where}: nothing was found, there is {needed}")
        if newest is not None and _is_left_alone(world.plan):
            world.fail("what a resume passes over is told", f"{where}: nothing was found, there was {newest}")
        return None
    files = files_behind(found)
    if isinstance(files, FastFiles):
        attempt, order = str(files.certificate.attempt), files.certificate.order
    else:
        assert files.record is not None  # it is of the store
        attempt, order = files.record.entry.attempt, files.record.entry.order
    if needed is not None and order < needed:
        world.fail("a resume takes the newest", f"{where}: got {order}, there is {needed}")
    report = found.load_report
    is_reported = report is not None and bool(report.passed_over)
    if newest is not None and order < newest and not is_reported and _is_left_alone(world.plan):
        world.fail("what a resume passes over is told", f"{where}: got {order}, there was {newest}")
    if attempt not in world.model.by_attempt and attempt not in before and world.nodes.is_void(order):
        world.fail("nothing void is resumed from", f"{where}: {attempt} is {order}")
    fast = world.nodes.saved.get(attempt)
    tag = fast.tag if fast is not None else world.model.by_attempt[attempt].tag
    if problem := problem_of(state, tag):
        world.fail("what is read is what was saved", f"{where}, {attempt}: {problem}")
    return found


def _is_left_alone(plan: Plan) -> bool:
    """True if only the resuming job changes the nodes' contents."""
    harms = {"node lost", "node full", "node damage"}
    is_concurrent = any(actor.begins == "at once" or not actor.ranks for actor in plan.actors[1:])
    return not is_concurrent and harms.isdisjoint(trouble.kind for trouble in plan.troubles)


def fast_finale(world: World, member: Member) -> None:
    """Resume in a new job after all troubles, save, wait for the store, and check that nothing is left behind."""
    from kit.simulation.programs import check_clean
    from kit.simulation.states import state_of

    member.store = open_for(world, member)
    member.job = job_of(member.store)
    if (error := act(world, member, 0, Action("resume"))) is not None:
        if isinstance(error, NoUsableCheckpoint) and not world.nodes.usable(member.actor.nodes):
            return  # the one copy of the one checkpoint was harmed
        world.fail("a restart always works", kind_of(error))
    pending = member.store.save_async(999_999, state_of(("final", 0), member.rank))
    saved = pending.durable(DURABLE_SECONDS)
    if saved.number not in world.model.saved:
        world.fail("what is durable is in the log", f"record {saved.number}")
    member.store.close()
    sleep(30.0)
    check_clean(world, member)
