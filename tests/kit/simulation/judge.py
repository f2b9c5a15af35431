"""Judge the result of a rank's action."""

from __future__ import annotations

from typing import Any

from ckptstore.errors import (
    CheckpointDamaged,
    CheckpointGone,
    CkptstoreError,
    FileMissing,
    NoUsableCheckpoint,
    RankFailed,
    SaveBusy,
    StepExists,
    StorageError,
    StoreFenced,
    StoreMissing,
)
from ckptstore.integrations.ray.kept_by_ray.ray_keeps import RayAttempt
from kit.simulation.ledger import Violation
from kit.simulation.model import Call
from kit.simulation.plan import Action, Actor
from kit.simulation.world import LONGEST_CALL_SECONDS, Attempted, Member, World, kind_of

SAVES = frozenset({"directory", "state", "async", "report"})


def judge(world: World, member: Member, index: int, action: Action, mine: Attempted) -> None:
    """Compare the result of an action with the promises."""
    model = world.kept_by_ray if action.kind == "report" else world.model
    actor = member.actor
    call = ((actor.name, index), member.rank)
    where = f"{actor.name}.{member.rank}, action {index} ({action.kind} {action.step})"
    error = mine.error
    assert mine.ended is not None
    stopped = sum(other.stopped_seconds for other in world.members)
    if mine.ended - mine.began > LONGEST_CALL_SECONDS + stopped:
        world.fail("every call ends", f"{where} took {mine.ended - mine.began:.0f} s")
    if error is not None and not isinstance(error, CkptstoreError | TimeoutError):
        raise Violation("every error is a CkptstoreError", f"{where}: {type(error).__name__}: {error}") from error
    if (vanished_at := world.model.vanished_at) is not None:
        is_late = action.kind in SAVES and mine.began > vanished_at and not world.model.has_arrived
        if is_late and not isinstance(error, StoreMissing):
            world.fail("a store that is gone takes no save", f"{where} {kind_of(error) if error else 'returned'}")
        return
    if mine.was_closed and action.kind != "close":
        if error is None:
            world.fail("a closed store does nothing", f"{where} returned after close()")
        return
    if action.kind in SAVES:
        _judge_save(world, model, call, where, mine)
    if action.kind == "resume" or (action.kind == "load" and world.plan.contents == "state"):
        _judge_resume(world, where, mine)
    _judge_together(world, member, index, action, where)


def checkpoint_of(result: Any) -> int | str | None:
    """Return the checkpoint of a call: the number of its record, or the directory where Ray keeps."""
    return result.directory if isinstance(result, RayAttempt) else getattr(result, "number", None)


def _judge_save(world: World, model: Any, call: Call, where: str, mine: Attempted) -> None:
    error, visible = mine.error, model.by_call.get(call)
    if error is None and visible != checkpoint_of(mine.result):
        world.fail("what returned is committed", f"{where}: {checkpoint_of(mine.result)}, there is {visible}")
    if not isinstance(error, CkptstoreError) or error.committed is None:
        return
    if error.committed and visible is None:
        world.fail("committed=True is visible", f"{where}: {kind_of(error)}")
    if not error.committed:
        if visible is not None:
            world.fail("committed=False never becomes visible", f"{where}: {visible}: {kind_of(error)}")
        model.refused.add(call)


def _judge_resume(world: World, where: str, mine: Attempted) -> None:
    model, error = world.model, mine.error
    assert mine.ended is not None
    usable: set[int | None] = set()
    for number in model.numbers_between(mine.began, mine.ended):
        record = model.records.get(number or 0)
        live = [model.saved[item] for item in record.state.in_order()] if record else []
        live = [saved for saved in live if not saved.is_thinned]
        whole = [saved.number for saved in live if not saved.is_damaged]
        usable |= {saved.number for saved in live if saved.damaged_at >= mine.began}
        if world.plan.contents == "state":  # what was lost may be a file that this state did not need
            usable |= {saved.number for saved in live if not whole or saved.number > whole[-1]}
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
    """Check that all ranks return the same or raise the same, unless something explains the difference."""
    actor = member.actor
    attempts = world.attempts[actor.name, index]
    mine = attempts[member.rank]
    others = [item for rank, item in attempts.items() if rank != member.rank and item.ended is not None]
    if action.kind in SAVES or action.kind == "resume":
        found = {checkpoint_of(item.result) for item in [mine, *others] if item.error is None}
        if len(found) > 1:
            world.fail("all ranks return the same", f"{where}: {found}")
    if mine.error is None:
        return
    since = min(item.began for item in attempts.values())
    late = max(item.began for item in attempts.values()) - since > world.plan.rank_timeout_seconds / 2
    late = late or len(attempts) < actor.ranks
    excuse = "a rank calls late" if late else world.excuse(actor.name, since)
    failed = [item.error for item in attempts.values()]
    if isinstance(mine.error, StorageError | RankFailed) and any(isinstance(error, StorageError) for error in failed):
        # All tries of something together took too long; the others have waited for that rank.
        clients = [world.network.client(other.process) for other in world.members_of(actor.name)]
        excuse = excuse or ("the storage hardly answered" if any(c.flaky_at >= since for c in clients) else None)
    excuse = excuse or _excuse_before(world, actor, index) or _allowed(world, member, action, mine.error)
    if excuse is None:
        world.fail("a call that nothing disturbs succeeds", f"{where}: {kind_of(mine.error)}")


def _excuse_before(world: World, actor: Actor, index: int) -> str | None:
    """Return an excuse if an earlier call failed on some rank, which a later call may raise once."""
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
        return is_fenced(world, member)
    if isinstance(error, NoUsableCheckpoint):
        return "judged above"
    if isinstance(error, SaveBusy):
        return "it was asked for"
    if isinstance(error, StoreMissing) and error.file and error.file not in world.model.space.files:
        return "it has lost what it saved"
    return None


def is_fenced(world: World, member: Member) -> str | None:
    """Return the reason why nothing of this job can be committed any more, None while it can."""
    if world.plan.keeper == "ray":
        return None
    epoch, newest = member.job.epoch, world.model.newest
    if newest is None or epoch is None or newest.state.epoch == epoch:
        return None
    return "a later job has claimed the store"
