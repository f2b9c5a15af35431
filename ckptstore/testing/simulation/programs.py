"""What the processes of a run do, with the public interface of ckptstore, and what they must see."""

from __future__ import annotations

from typing import Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.copying import copy_store, open_target
from ckptstore.errors import (
    CheckpointDamaged,
    CheckpointGone,
    CkptstoreError,
    FileMissing,
    InvalidInput,
    NoUsableCheckpoint,
    RankFailed,
    SaveBusy,
    StepExists,
    StorageError,
    StoreFenced,
    StoreMissing,
)
from ckptstore.group import StorageGroup
from ckptstore.load import files_of
from ckptstore.log import Log
from ckptstore.opening import open_store
from ckptstore.retain import retain
from ckptstore.retention import KeepLatest
from ckptstore.testing.simulation.model import Violation, payload, told_in
from ckptstore.testing.simulation.plan import POLICIES, Action, Actor
from ckptstore.testing.simulation.primitives import sleep
from ckptstore.testing.simulation.world import (
    COPY_URI,
    LONGEST_CALL_SECONDS,
    STORE_URI,
    Attempted,
    Member,
    World,
    kind_of,
)

COLLECTIVE = frozenset({"resume", "directory", "state", "async", "load", "close"})
SAVES = frozenset({"directory", "state", "async"})


def open_for(world: World, member: Member, uri: str = STORE_URI) -> Any:
    """The store as a process opens it."""
    plan, actor = world.plan, member.actor
    group: object = None
    if actor.ranks:
        token = f"{actor.name}-start"
        group = StorageGroup(member.rank, actor.ranks, token, f"node-{member.rank % 2}")
        if plan.board == "torch" and actor.ranks > 1:
            from ckptstore.testing.simulation.keyvalue import KeyValueGroup

            group = KeyValueGroup(world, actor.name, member.rank, actor.ranks)
    return open_store(
        uri,
        retention=POLICIES[plan.policy],
        missing="worst",
        group=group,
        grace_seconds=plan.grace_seconds,
        rank_timeout_seconds=plan.rank_timeout_seconds,
        single_writer=plan.storage == "plain objects" or None,
    )


def rank_program(world: World, member: Member) -> None:
    """One rank of a job."""
    actor = member.actor
    member.store = open_for(world, member)
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


def settle(world: World, member: Member, *, wait: bool = False) -> None:
    """Look after the asynchronous saves that have ended; with `wait` after all."""
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
    """Do one action, and judge what came of it."""
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
    if action.kind == "close":
        member.is_closed = True
        return store.close()
    raise AssertionError(action.kind)


def _save_state(world: World, member: Member, index: int, action: Action) -> Any:
    from ckptstore.testing.simulation.states import state_of

    incremental = {"incremental": True, "reference": "reference"}.get(action.option, False)
    asked = {"metrics": {"loss": round(world.plan.chance("loss", index), 3)}, "incremental": incremental}
    state = state_of((member.actor.name, index), member.rank)
    if action.kind == "state":
        return member.store.save(action.step, state, **asked)
    on_busy = "skip" if action.option == "skip" else "wait"
    return member.store.save_async(action.step, state, on_busy=on_busy, max_failures=1000, **asked)


def _load(world: World, member: Member, action: Action) -> Any:
    store = member.store
    if world.plan.contents != "state":
        return store.resume() if action.kind == "resume" else store.latest()
    from ckptstore.testing.simulation.states import empty_state, problem_of

    state = empty_state()
    found = (store.resume if action.kind == "resume" else store.load)(state, per_rank="first")
    if found is not None and (problem := problem_of(state, world.model.saved[found.number].tag)):
        world.fail("what is read is what was saved", f"{member.process.name}, record {found.number}: {problem}")
    return found


def judge(world: World, member: Member, index: int, action: Action, mine: Attempted) -> None:
    """Compare what came of an action with what must."""
    model, actor = world.model, member.actor
    tag = (actor.name, index)
    where = f"{actor.name}.{member.rank}, action {index} ({action.kind} {action.step})"
    error, result = mine.error, mine.result
    assert mine.ended is not None
    stopped = sum(other.stopped_seconds for other in world.members)
    if mine.ended - mine.began > LONGEST_CALL_SECONDS + stopped:
        world.fail("every call ends", f"{where} took {mine.ended - mine.began:.0f} s")
    if error is not None and not isinstance(error, CkptstoreError | TimeoutError):
        raise Violation("every error is a CkptstoreError", f"{where}: {type(error).__name__}: {error}") from error
    if mine.was_closed and action.kind != "close":
        if error is None:
            world.fail("a closed store does nothing", f"{where} returned after close()")
        return
    if action.kind in SAVES:
        if isinstance(error, CkptstoreError) and error.committed is False:
            if tag in model.by_tag:
                world.fail(
                    "committed=False never becomes visible", f"{where}: record {model.by_tag[tag]}: {kind_of(error)}"
                )
            model.refused.add(tag)
        if error is None and model.by_tag.get(tag) != result.number:
            world.fail(
                "what returned is committed", f"{where}: record {result.number}, the log has {model.by_tag.get(tag)}"
            )
    if action.kind in ("resume", "load"):
        _judge_resume(world, where, mine)
    _judge_together(world, member, index, action, where)


def _judge_resume(world: World, where: str, mine: Attempted) -> None:
    model, error = world.model, mine.error
    assert mine.ended is not None
    usable = set()
    for number in model.numbers_between(mine.began, mine.ended):
        record = model.records.get(number or 0)
        live = [model.saved[item] for item in record.state.live] if record else []
        whole = [saved.number for saved in live if not saved.is_damaged]
        usable.add(whole[-1] if whole else None)
        # damage that a size does not show is found when it is read
        hidden = [saved for saved in live if saved.is_damaged and not saved.is_visibly_damaged]
        usable |= {saved.number for saved in hidden if not whole or saved.number > whole[-1]}
    if error is None:
        number = None if mine.result is None else mine.result.number
        if number not in usable:
            world.fail("a restart finds the newest", f"{where}: got {number}, it is one of {usable}")
    elif isinstance(error, NoUsableCheckpoint):
        if None not in usable and all(number is None or not model.saved[number].is_damaged for number in usable):
            world.fail("a restart finds the newest", f"{where}: {kind_of(error)}")
    elif isinstance(error, FileMissing | CheckpointDamaged | CheckpointGone):
        world.fail("a missing file is damage, passed over", f"{where}: {kind_of(error)}")


def _judge_together(world: World, member: Member, index: int, action: Action, where: str) -> None:
    """All ranks return the same or raise the same, unless something explains it."""
    actor = member.actor
    attempts = world.attempts[actor.name, index]
    mine = attempts[member.rank]
    others = [item for rank, item in attempts.items() if rank != member.rank and item.ended is not None]
    if action.kind in SAVES or action.kind == "resume":
        numbers = {getattr(item.result, "number", None) for item in [mine, *others] if item.error is None}
        if len(numbers) > 1:
            world.fail("all ranks return the same", f"{where}: records {numbers}")
    if mine.error is None:
        return
    since = min(item.began for item in attempts.values())
    late = max(item.began for item in attempts.values()) - since > world.plan.rank_timeout_seconds / 2
    late = late or len(attempts) < actor.ranks
    excuse = "a rank calls late" if late else world.excuse(actor.name, since)
    if isinstance(mine.error, StorageError):  # all tries of something together took too long
        clients = [world.network.client(other.process) for other in world.members_of(actor.name)]
        excuse = excuse or ("the storage hardly answered" if any(c.flaky_at >= since for c in clients) else None)
    excuse = excuse or _excuse_before(world, actor, index) or _allowed(world, member, action, mine.error)
    if excuse is None:
        world.fail("a call that nothing disturbs succeeds", f"{where}: {kind_of(mine.error)}")


def _excuse_before(world: World, actor: Actor, index: int) -> str | None:
    """A job may hear once that a call before has failed on some rank."""
    for earlier in range(index - 1, -1, -1):
        attempts = world.attempts.get((actor.name, earlier))
        is_load = earlier < len(actor.actions) and actor.actions[earlier].kind == "load"
        if attempts is None or is_load:
            continue
        if any(item.error is not None for item in attempts.values()) or len(attempts) < actor.ranks:
            return f"action {earlier} failed on a rank"
        if any(item.ended is None for item in attempts.values()):
            return f"action {earlier} has not ended on a rank"
        return None
    return None


def _allowed(world: World, member: Member, action: Action, error: BaseException) -> str | None:
    if isinstance(error, StepExists) and action.option == "error":
        return "it was asked for"
    if isinstance(error, StoreFenced):
        return _is_fenced(world, member)
    if isinstance(error, NoUsableCheckpoint):
        return "judged above"
    if isinstance(error, SaveBusy):
        return "it was asked for"
    return None


def _is_fenced(world: World, member: Member) -> str | None:
    epoch, newest = member.store._job.epoch, world.model.newest
    if newest is None or epoch is None or newest.state.epoch == epoch:
        return None
    return "a later job has claimed the store"


def survive(world: World, member: Member) -> None:
    """After all troubles: a job that is whole saves again, after one error at most."""
    actor = member.actor
    members = world.members_of(actor.name)
    whole = all(not other.process.is_dead for other in members)
    if not whole or member.is_closed or any(isinstance(other.last_error, StoreFenced) for other in members):
        return
    if any(not other.actor.goes_on and other.last_error is not None for other in members):
        return
    count = len(actor.actions)
    errors = []
    for extra in range(2):
        error = perform(world, member, count + extra, _last_save(world, 900_000 + extra))
        if error is not None and error in member.seen:
            error = perform(world, member, count + extra, _last_save(world, 900_000 + extra))
        errors.append(kind_of(error))
        if error is None or isinstance(error, StoreFenced):
            break
        sleep(world.plan.rank_timeout_seconds * 3)
    else:
        if _is_fenced(world, member) is None:
            world.fail("no rank is out of step for ever", f"{actor.name}.{member.rank}: {errors}")
    perform(world, member, count + 2, Action("close"))
    sleep(30.0)
    check_clean(world, member)


def _last_save(world: World, step: int) -> Action:
    return Action("state" if world.plan.contents == "state" else "directory", step=step)


def check_clean(world: World, member: Member) -> None:
    """Nothing is left of a process whose store is closed."""
    left = [thread.name for thread in member.process.threads if not thread.name.endswith("/main")]
    if left:
        world.fail("close leaves no thread", f"{member.process.name}: {', '.join(left)}")
    mark = f"-{member.process.pid}-"
    if leases := [key for key in world.spaces[STORE_URI].files if key.startswith("leases/") and mark in key]:
        world.fail("close leaves no lease", f"{member.process.name}: {leases}")


# Processes on their own

_LEASED = frozenset({"directory on this node", "copy to a directory"})
"""Who reads so must find every byte until it is done."""


def other_program(world: World, member: Member) -> None:
    """A reader, or somebody at the command line."""
    pid = member.process.pid
    for index, action in enumerate(member.actor.actions):
        sleep(action.after_seconds)
        world.trace(f"{member.process.name} begins {action.kind}")
        if action.kind in _LEASED:
            world.model.careful.add(pid)
        client, began = world.network.client(member.process), world.scheduler.now
        error: BaseException | None = None
        try:
            _alone(world, member, index, action)
        except Exception as raised:
            error = raised
        world.model.ends_reading(pid)
        world.model.careful.discard(pid)
        world.trace(f"{member.process.name} ends {action.kind}: {kind_of(error)}")
        if error is not None and not isinstance(error, CkptstoreError):
            if isinstance(error, AssertionError):
                raise error
            where = f"{member.process.name}, {action.kind}"
            raise Violation("every error is a CkptstoreError", f"{where}: {type(error).__name__}: {error}") from error
        disturbed = client.hard_at >= began or client.slow_at >= began
        if error is not None and not disturbed and not _may_fail(world, action, error, began):
            world.fail(
                "a call that nothing disturbs succeeds", f"{member.process.name}, {action.kind}: {kind_of(error)}"
            )


def _may_fail(world: World, action: Action, error: BaseException, began: float) -> bool:
    if isinstance(error, StoreMissing | CheckpointGone | InvalidInput):
        return True
    if isinstance(error, CheckpointDamaged | FileMissing | NoUsableCheckpoint):
        damaged = any(saved.is_damaged for saved in world.model.saved.values())
        removed = any(
            (saved.removed_at or 0.0) >= began - 60.0 for saved in world.model.saved.values() if saved.removed_at
        )
        return damaged or removed
    return isinstance(error, StoreFenced)


def _alone(world: World, member: Member, index: int, action: Action) -> None:
    uri = COPY_URI if action.kind == "gc of the copy" else STORE_URI
    with open_for(world, member, uri) as store:
        if action.kind in ("gc", "gc of the copy"):
            store.collect_garbage()
        elif action.kind == "gc --claim":
            store.collect_garbage(claim=True)
        elif action.kind == "prune":
            store.prune()
        elif action.kind == "retain":
            retain(store._job.log, KeepLatest(1))
        elif action.kind == "clean the cache":
            _clean_cache(world, index)
        elif action.kind == "cp":
            _copy(store)
        elif action.kind == "list":
            [entry.checkpoint.step for entry in store.entries()]
        elif action.kind == "latest":
            _look_latest(world, store)
        else:
            _with_checkpoint(world, member, index, action, store)


def _clean_cache(world: World, index: int) -> None:
    """Remove a file of a copy on the node, as a cleaner of temporary directories does."""
    found = sorted((world.directory / "cache").glob("*/*.bin"))
    if found:
        found[int(world.plan.chance("clean", index) * len(found))].unlink()


def _look_latest(world: World, store: Any) -> None:
    began = world.scheduler.now
    found = store.latest()
    number = found.number if found else None
    possible = {
        world.model.records[at].state.latest if at else None
        for at in world.model.numbers_between(began, world.scheduler.now)
    }
    if number not in possible:
        world.fail("latest is not older than the call", f"{number}, it was one of {possible}")


def _copy(store: Any) -> None:
    job = store._job
    target = open_target(COPY_URI, storage_options=None, config=job.config)
    try:
        copy_store(job.log, job.storage, target, lambda record: files_of(job, record))
    finally:
        target.close()


def _with_checkpoint(world: World, member: Member, index: int, action: Action, store: Any) -> None:
    checkpoints = list(store)
    if not checkpoints:
        return
    where = f"{member.process.name}/{index}"
    checkpoint = checkpoints[int(world.plan.chance("which", where) * len(checkpoints))]
    if action.kind == "pin":
        store.pin(checkpoint.step)
    elif action.kind == "unpin":
        store.unpin(checkpoint.step)
    elif action.kind == "roll back":
        store.roll_back(checkpoint.step)
    elif action.kind == "verify":
        report = checkpoint.verify()
        saved = world.model.saved[checkpoint.number]
        if not report.ok and not saved.is_damaged and saved.removed_at is None:
            world.fail("what is committed verifies", f"{where}: {report.problems}")
    elif action.kind == "copy to a directory":
        path = checkpoint.to_directory(world.directory / where.replace("/", "-"))
        _compare(world, where, checkpoint, {item.name: item.read_bytes() for item in path.iterdir()})
    elif action.kind == "directory on this node":
        with checkpoint.as_directory() as path:
            names = [receipt.name for receipt in checkpoint.files]
            lost = [name for name in names if not (path / name).exists()]
            if lost and not world.model.saved[checkpoint.number].is_damaged:
                world.fail("what is handed out is whole", f"{where}: {lost} are not in {path.name}")
            _compare(world, where, checkpoint, {name: (path / name).read_bytes() for name in set(names) - set(lost)})
            if action.option:
                sleep(900.0)
    else:
        raise AssertionError(action.kind)


def _compare(world: World, where: str, checkpoint: Checkpoint, found: dict[str, bytes]) -> None:
    saved = world.model.saved[checkpoint.number or 0]
    for name, data in found.items():
        if data != saved.files[name] and not saved.is_damaged:
            world.fail("what is read is what was saved", f"{where}: {name} of record {saved.number}: {told_in(data)}")


# The end


def finale(world: World, member: Member) -> None:
    """After all that: a new job starts, finds the newest checkpoint, saves, and cleans up."""
    model = world.model
    store = member.store = open_for(world, member)
    whole = [saved for saved in model.live() if not saved.is_damaged]
    try:
        found = _load(world, member, Action("resume"))
    except NoUsableCheckpoint as error:
        if whole:
            world.fail("a restart always works", f"record {whole[-1].number} is whole: {kind_of(error)}")
        found = None
    if whole and (found is None or found.number < whole[-1].number):
        world.fail("a restart finds the newest", f"record {whole[-1].number} is whole, got {found}")
    perform(world, member, 0, _last_save(world, 999_999))
    if member.last_error is not None:
        world.fail("a restart always works", kind_of(member.last_error))
    if member.rank == 0:
        sleep(world.plan.grace_seconds + 8_000.0)
        store.prune()
        store.collect_garbage()
        _check_store(world)
    perform(world, member, 1, Action("close"))
    sleep(30.0)
    check_clean(world, member)


def _check_store(world: World) -> None:
    """Every checkpoint that is live has its bytes, and nothing else is there."""
    model, files = world.model, world.spaces[STORE_URI].files
    newest = model.newest
    assert newest is not None
    named = {saved.attempt for saved in model.saved.values() if saved.removed_at is None}
    for saved in model.live():
        for name, data in saved.files.items():
            file = files.get(f"checkpoints/{saved.attempt}/{name}")
            if not saved.is_damaged and (file is None or file.data != data):
                world.fail("nothing committed loses a byte", f"{name} of record {saved.number} at the end")
    for key in files:
        head, _, rest = key.partition("/")
        known = head in ("store.json", "latest.json", "log", "group", "probe") or (
            head == "checkpoints" and rest.partition("/")[0] in named
        )
        if not known and head == "checkpoints" and world.plan.storage == "plain objects":
            known = True
        if not known and head == "leases":
            known = any(member.process.is_dead and f"-{member.process.pid}-" in key for member in world.members)
        if not known:
            world.fail("garbage is collected", f"{key} is there at the end")


__all__ = ["CkptstoreError", "Log", "RankFailed", "StorageError", "finale", "other_program", "rank_program"]
