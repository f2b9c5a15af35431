"""Run the ranks of a job, through the public interface of ckptstore, from the first action to the last restart."""

from __future__ import annotations

from typing import Any

from ckptstore.catalogue import job_of
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import NoUsableCheckpoint, StoreFenced
from kit.simulation.alone import check_followed, open_for
from kit.simulation.judge import is_fenced, judge
from kit.simulation.model import payload
from kit.simulation.plan import Action
from kit.simulation.ray_jobs import RunOfRay
from kit.simulation.virtual.clocks import sleep
from kit.simulation.world import STORE_URI, Attempted, Member, World, kind_of


def rank_program(world: World, member: Member) -> None:
    """Run one rank of a job."""
    actor = member.actor
    _open(world, member)
    for index, action in enumerate(actor.actions):
        sleep(action.after_seconds + 0.05 * member.rank)
        if action.kind == "idle":
            continue
        error = perform(world, member, index, action)
        if error is not None and error in member.seen:  # that of an earlier save
            error = perform(world, member, index, action)
        if isinstance(error, StoreFenced) or (error is not None and not actor.goes_on):
            break
    settle(world, member, wait=True)
    world.wait_calm(member)
    survive(world, member)


def _open(world: World, member: Member) -> Any:
    if world.plan.keeper == "ray":
        member.store = RunOfRay(world, member)
    else:
        member.store = open_for(world, member)
        member.job = job_of(member.store)
    return member.store


def settle(world: World, member: Member, *, wait: bool = False) -> None:
    """Handle the asynchronous saves that have ended; with `wait`, all of them."""
    left = []
    for item in member.in_flight:
        index, action, attempted, pending = item
        if not wait and not pending.done():
            left.append(item)
            continue
        try:
            attempted.result = pending.result()
        except Exception as error:
            attempted.error = error
            member.seen.append(error)
        _ended(world, member, index, action, attempted)
    member.in_flight = left


def perform(world: World, member: Member, index: int, action: Action) -> BaseException | None:
    """Do one action, and judge its result."""
    actor = member.actor
    name = f"{actor.name}.{member.rank}"
    attempted = Attempted(world.scheduler.now, was_closed=member.is_closed)
    world.attempts.setdefault((actor.name, index), {})[member.rank] = attempted
    world.trace(f"{name} begins {index} {action.kind} {action.step or ''} {action.option}")
    try:
        attempted.result = _act(world, member, index, action)
    except Exception as error:
        attempted.error = error
    settle(world, member, wait=action.kind == "close")
    if attempted.error is not None and attempted.error in member.seen:
        world.trace(f"{name} hears at {index} {action.kind} of an earlier save: {kind_of(attempted.error)}")
        del world.attempts[actor.name, index][member.rank]
        return attempted.error
    if action.kind == "async" and attempted.error is None:
        pending = attempted.result
        if pending.skipped:
            del world.attempts[actor.name, index][member.rank]
        else:
            member.in_flight.append((index, action, attempted, pending))
        world.trace(f"{name} has staged {index}{' (skipped)' if pending.skipped else ''}")
        return None
    _ended(world, member, index, action, attempted)
    return attempted.error


def _ended(world: World, member: Member, index: int, action: Action, attempted: Attempted) -> None:
    attempted.ended = world.scheduler.now
    member.last_error = attempted.error
    shown = f"{kind_of(attempted.error)} {_shown(attempted.result)}"
    world.trace(f"{member.process.name} ends {index} {action.kind}: {shown}")
    judge(world, member, index, action, attempted)


def _shown(result: Any) -> str:
    return f"record {result.number}" if isinstance(result, Checkpoint) else ""


def _act(world: World, member: Member, index: int, action: Action) -> Any:
    store, actor = member.store, member.actor
    if action.kind == "directory":
        path = world.source(
            actor.name,
            index,
            member.rank,
            action,
            lambda name: payload((actor.name, index), member.rank, name, action.size_bytes),
        )
        loss = round(world.plan.chance("loss", actor.name, index), 3)
        return store.save_directory(action.step, path, metrics={"loss": loss}, exists=action.option or "replace")
    if action.kind in ("state", "async"):
        return _save_state(world, member, index, action)
    if action.kind in ("resume", "load"):
        world.model.careful.add(member.process.pid)
        try:
            return _load(world, member, action)
        finally:
            world.model.ends_reading(member.process.pid)
            world.model.careful.discard(member.process.pid)
    if action.kind == "report":
        return store.report(index, action)
    if action.kind == "close":
        member.is_closed = True
        return store.close()
    raise AssertionError(action.kind)


def _save_state(world: World, member: Member, index: int, action: Action) -> Any:
    from kit.simulation.states import state_of

    incremental = {"incremental": True, "reference": "reference"}.get(action.option, False)
    options = {"metrics": {"loss": round(world.plan.chance("loss", index), 3)}, "incremental": incremental}
    state = state_of((member.actor.name, index), member.rank)
    if action.kind == "state":
        return member.store.save(action.step, state, **options)
    on_busy = "skip" if action.option == "skip" else "wait"
    return member.store.save_async(action.step, state, on_busy=on_busy, max_failures=1000, **options)


def _load(world: World, member: Member, action: Action) -> Any:
    store = member.store
    if world.plan.contents != "state":
        return store.resume() if action.kind == "resume" else store.latest()
    from kit.simulation.states import empty_state, problem_of

    state = empty_state()
    found = (store.resume if action.kind == "resume" else store.load)(state, per_rank="first")
    if found is not None and (problem := problem_of(state, world.model.saved[found.number].tag)):
        world.fail("what is read is what was saved", f"{member.process.name}, record {found.number}: {problem}")
    return found


def survive(world: World, member: Member) -> None:
    """Check after all troubles that a whole job saves again, after two errors at most.

    Ranks that come to the first call a timeout apart do not meet; the second call synchronizes them.
    """
    actor = member.actor
    members = world.members_of(actor.name)
    whole = all(not other.process.is_dead for other in members)
    if world.model.vanished_at is not None:
        return
    if not whole or member.is_closed or any(isinstance(other.last_error, StoreFenced) for other in members):
        return
    if any(not other.actor.goes_on and other.last_error is not None for other in members):
        return
    count = len(actor.actions)
    errors = []
    for extra in range(3):
        error = perform(world, member, count + extra, _last_save(world, 900_000 + extra))
        if error is not None and error in member.seen:
            error = perform(world, member, count + extra, _last_save(world, 900_000 + extra))
        errors.append(kind_of(error))
        if error is None or isinstance(error, StoreFenced):
            break
        sleep(world.plan.rank_timeout_seconds * 3)
    else:
        if is_fenced(world, member) is None:
            world.fail("no rank is out of step for ever", f"{actor.name}.{member.rank}: {errors}")
    perform(world, member, count + 2, Action("close"))
    sleep(30.0)
    check_clean(world, member)


def _last_save(world: World, step: int) -> Action:
    if world.plan.keeper == "ray":
        return Action("report", step=step)
    return Action("state" if world.plan.contents == "state" else "directory", step=step)


def check_clean(world: World, member: Member) -> None:
    """Check that nothing is left of a process whose store is closed."""
    left = [thread.name for thread in member.process.threads if not thread.name.endswith("/main")]
    if left:
        world.fail("close leaves no thread", f"{member.process.name}: {', '.join(left)}")
    mark = f"-{member.process.pid}-"
    held = {key for key in world.spaces[STORE_URI].files if key.startswith("leases/") and mark in key}
    # one that the storage would not delete grows old, and a prune removes it
    if leases := sorted(held - world.network.undeleted):
        world.fail("close leaves no lease", f"{member.process.name}: {leases}")


# The end


def finale(world: World, member: Member) -> None:
    """Start a new job at the end, which finds the newest checkpoint, saves, and cleans up."""
    store = _open(world, member)
    if world.plan.keeper == "ckptstore":
        _restart(world, member)
    perform(world, member, 0, _last_save(world, 999_999))
    if member.last_error is not None:
        world.fail("a restart always works", kind_of(member.last_error))
    if world.plan.keeper == "ray":
        store.check_all()
    elif member.rank == 0:
        sleep(world.plan.grace_seconds + 8_000.0)
        while store.prune():  # what others referred to goes in the next round
            pass
        store.collect_garbage()
        _check_store(world)
        check_followed(world, store)
    perform(world, member, 1, Action("close"))
    sleep(30.0)
    check_clean(world, member)


def _restart(world: World, member: Member) -> None:
    model = world.model
    whole = [saved for saved in model.resumable() if not saved.is_damaged]
    try:
        found = _load(world, member, Action("resume"))
    except NoUsableCheckpoint as error:
        if whole:
            world.fail("a restart always works", f"record {whole[-1].number} is whole: {kind_of(error)}")
        found = None
    if whole and (found is None or found.number < whole[-1].number):
        world.fail("a restart finds the newest", f"record {whole[-1].number} is whole, got {found}")


def _check_store(world: World) -> None:
    """Check that every live checkpoint has its bytes, and that nothing else exists."""
    model, files = world.model, world.spaces[STORE_URI].files
    newest = model.newest
    assert newest is not None
    if stayed := newest.state.trash.keys() - newest.state.bases.keys() - {newest.state.resume_from}:
        world.fail("a prune deletes what is due", f"{sorted(stayed)} are there at the end")
    named = {saved.attempt for saved in model.saved.values() if saved.removed_at is None}
    for saved in model.live():
        for name, data in saved.files.items():
            file = files.get(f"checkpoints/{saved.attempt}/{name}")
            if not saved.is_damaged and (file is None or file.data != data):
                world.fail("nothing committed loses a byte", f"{name} of record {saved.number} at the end")
    for key in files:
        head, _, rest = key.partition("/")
        known = head in ("store.json", "latest.json", "log", "group", "probe", "cursors") or (
            head == "checkpoints" and rest.partition("/")[0] in named
        )
        if not known and head == "checkpoints" and world.plan.storage == "plain objects":
            known = True
        if not known and head == "leases":
            known = any(member.process.is_dead and f"-{member.process.pid}-" in key for member in world.members)
        if not known:
            world.fail("garbage is collected", f"{key} is there at the end")
