"""Run processes that are no job: readers, and commands."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from ckptstore.catalogue import job_of
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    CheckpointDamaged,
    CheckpointGone,
    CkptstoreError,
    FileMissing,
    InvalidInput,
    NoUsableCheckpoint,
    StoreFenced,
    StoreMissing,
)
from ckptstore.events import CheckpointSkipped, Event, listening
from ckptstore.extensions.exchange.copying import copy_store
from ckptstore.format.changes import Change, Pin, Remove, Restore, Unpin
from ckptstore.format.layout import HINT_KEY, MANIFEST_NAME
from ckptstore.format.record import Record
from ckptstore.group import StorageGroup
from ckptstore.opening import open_store
from ckptstore.retention import KeepLatest, KeepWeights
from ckptstore.transfer.opened import open_place
from kit.simulation.ledger import Violation
from kit.simulation.model import Model, SavedCheckpoint, calls_in
from kit.simulation.plan import POLICIES, Action
from kit.simulation.virtual.clocks import sleep
from kit.simulation.world import COPY_URI, STORE_URI, Member, World, kind_of


def open_for(world: World, member: Member, uri: str = STORE_URI) -> Any:
    """Open the store as a process does."""
    plan, actor = world.plan, member.actor
    group: object = None
    if actor.ranks:
        token = f"{actor.name}-start"
        group = StorageGroup(member.rank, actor.ranks, token, f"node-{member.rank % 2}")
        if plan.board == "torch" and actor.ranks > 1:
            from kit.simulation.keyvalue import KeyValueGroup

            group = KeyValueGroup(world, actor.name, member.rank, actor.ranks)
        if plan.board == "ray":
            from kit.simulation.ray_jobs import SimWorkers, worker_of

            group = SimWorkers(worker_of(world, member))
    policy = POLICIES[plan.policy]
    if plan.contents == "state":  # no rule drops these keys, and people do
        policy |= KeepWeights(policy, ("model.*", "own"))
    return open_store(
        uri,
        retention=policy,
        missing="worst",
        group=group,
        grace_seconds=plan.grace_seconds,
        rank_timeout_seconds=plan.rank_timeout_seconds,
        fast=world.nodes.tier(actor, member.rank) if actor.nodes else None,
        single_writer=plan.storage == "plain objects" or None,
        provenance=False,  # it takes a thread and a process of this machine
    )


_REFUSED = frozenset({"break a rule", "remove", "remove all", "restore", "roll back", "thin"})
"""Changes that a rule may forbid."""
_ON_ONE = _REFUSED | {"pin", "unpin", "annotate", "verify", "copy to a directory", "directory on this node", "cp"}
"""Actions on checkpoints that somebody else may remove first."""
_LEASED = frozenset({"directory on this node", "copy to a directory", "follow"})
"""Readers that must find every byte until they are done."""


def other_program(world: World, member: Member) -> None:
    """Run a reader, or a command line."""
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
    if action.kind == "cp" and len(world.copy.claims_since(began)) > 1:
        return True  # another copy to the same place has claimed it
    if action.kind == "follow" and isinstance(error, CkptstoreError) and error.retryable:
        return True  # it tries again only as long as its caller waits
    seen = world.model.numbers_between(began, world.scheduler.now)
    if isinstance(error, StoreMissing):
        return None in seen or world.model.vanished_at is not None or action.kind == "gc of the copy"
    if isinstance(error, InvalidInput):
        return action.kind in _REFUSED
    if isinstance(error, CheckpointGone) and len(seen) + (action.kind == "break a rule") > 1:
        return action.kind in _ON_ONE  # somebody else has changed something meanwhile
    if isinstance(error, CheckpointDamaged | CheckpointGone | FileMissing | NoUsableCheckpoint):
        damaged = any(saved.is_damaged for saved in world.model.saved.values())
        removed = any(
            (saved.removed_at or 0.0) >= began - 60.0 for saved in world.model.saved.values() if saved.removed_at
        )
        return damaged or removed
    return isinstance(error, StoreFenced) and bool(world.model.claims_since(began))


def _alone(world: World, member: Member, index: int, action: Action) -> None:
    uri = COPY_URI if action.kind == "gc of the copy" else STORE_URI
    with open_for(world, member, uri) as store:
        if action.kind in ("gc", "gc --claim", "gc of the copy"):
            store.collect_garbage(claim=action.kind == "gc --claim")
        elif action.kind == "prune":
            store.prune()
        elif action.kind == "restore":
            _restore(world, member, index, store)
        elif action.kind == "retain":
            store.retain(KeepLatest(1))
        elif action.kind == "break a rule":
            _break_a_rule(world, f"{member.process.name}/{index}", store)
        elif action.kind == "tear the hint":
            _tear_hint(world, index)
        elif action.kind == "clean the cache":
            _clean_cache(world, index)
        elif action.kind == "cp":
            _copy(world, store)
        elif action.kind == "list":
            _list(world, store)
        elif action.kind == "latest":
            _look_latest(world, store)
        elif action.kind == "follow":
            follow(world, f"{member.process.name}/{index}", action, store)
        else:
            _with_checkpoint(world, member, index, action, store)


def _restore(world: World, member: Member, index: int, store: Any) -> None:
    """Restore something in the trash; the choice, and its pin, follow from the seed."""
    where = f"{member.process.name}/{index}"
    trashed = world.model.newest.state.trash if world.model.newest else {}
    if trashed:
        number = sorted(trashed)[int(world.plan.chance("which", where) * len(trashed))]
        saved = world.model.saved[number]
        found = store.restore(saved.step, number=number, pin=world.plan.chance("pin", where) < 0.5)
        if found.number != number:
            world.fail("what is asked for is restored", f"{where}: {found.number} in place of {number}")


def _thin(world: World, where: str, store: Any, steps: list[int]) -> None:
    """Drop some keys, or all tensors, from one of the steps; the choice follows from the seed."""
    step = steps[int(world.plan.chance("thinned", where) * len(steps))]
    drop = ("model.*",) if world.plan.chance("drop", where) < 0.5 else ("model.*", "own")
    report = store.thin(step, drop, force=world.plan.chance("force", where) < 0.5)
    if report.freed_bytes <= 0:
        world.fail("what is thinned is smaller", f"{where}: {report}")


def _break_a_rule(world: World, where: str, store: Any) -> None:
    """Ask the log for a change that no rule allows."""

    def change(newest: Record | None) -> Change | None:
        if newest is None:
            return None
        state, unknown = newest.state, newest.number + 1
        wrong: list[Change] = [Pin((unknown,)), Remove(trash=(unknown,)), Remove(drop=(unknown,)), Restore((unknown,))]
        for number in state.live:
            wrong += [Remove(drop=(number,)), Restore((number,))]
        for number in state.trash:
            wrong += [Pin((number,)), Unpin((number,)), Remove(trash=(number,))]
        wrong += [Remove(trash=(number,)) for number in state.pinned]
        wrong += [Remove(drop=(number,)) for number in {*state.pinned, state.resume_from or unknown}]
        if len(state.live) > 2 and state.latest is not None:
            wrong.append(Remove(trash=(state.latest, state.in_order()[0])))
        return wrong[int(world.plan.chance("rule", where) * len(wrong))]

    if job_of(store).log.append(change) is not None:
        world.fail("a change that breaks a rule is refused", where)


def _tear_hint(world: World, index: int) -> None:
    """Lose the hint or a part of it, as something else than ckptstore may."""
    space = world.spaces[STORE_URI]
    if (hint := space.files.get(HINT_KEY)) is not None:
        space.remove(HINT_KEY)
        if (left := int(world.plan.chance("hint", index) * 2 * len(hint.data))) < len(hint.data):
            space.put(HINT_KEY, hint.data[:left], is_durable=True)


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


def _list(world: World, store: Any) -> None:
    """Look at the metrics of all live checkpoints: none may be older than the call."""
    before = {number: dict(metrics) for number, metrics in world.model.ledger.metrics.items()}
    for entry in store.entries():
        number, found = world.model.ledger.place(entry.checkpoint.number or 0), entry.checkpoint.metrics
        if not before.get(number, {}).keys() <= found.keys():
            world.fail("what is annotated is found", f"{number} has {found}, and was annotated with {before[number]}")


def follow(world: World, where: str, action: Action, store: Any) -> None:
    """Work on each checkpoint that comes with the cursor `option`; stop in the work on that of the number `step`."""
    model, cursor, place = world.model, action.option, None
    began = world.scheduler.now

    def note(event: Event) -> None:
        if isinstance(event, CheckpointSkipped) and event.number is not None:
            try:
                model.passed_over(cursor, event.number, began)
            except Violation as broken:  # whoever tells an event takes no error
                world.scheduler.fail(broken)

    timeout_seconds = [0.0, 5.0, 60.0][int(3 * world.plan.chance("timeout", where))]
    with listening(note), closing(store.follow(cursor=cursor, timeout_seconds=timeout_seconds)) as follower:
        for count, checkpoint in enumerate(follower, 1):
            if place is not None:
                model.followed[cursor].done.add(place)
            place = model.comes(cursor, checkpoint.number, where)
            world.trace(f"{where} works on record {checkpoint.number}, place {place}")
            _work(world, f"{where}/{count}", store, checkpoint)
            if count == action.step:
                return  # in the middle of the work: it comes again
            model.followed[cursor].worked.add(place)
            began = world.scheduler.now
    if place is not None:
        model.followed[cursor].done.add(place)


def _work(world: World, where: str, store: Any, checkpoint: Checkpoint) -> None:
    """Work on a checkpoint for a while, which may be long; nothing of it may be deleted meanwhile."""
    chance, saved = world.plan.chance("work", where), world.model.saved[checkpoint.number or 0]
    sleep(1500.0 if chance > 0.96 else 5.0 * chance)
    files = world.spaces[STORE_URI].files
    held = {name: files.get(f"checkpoints/{saved.attempt}/{name}") for name in saved.files}
    lost = [name for name, file in held.items() if file is None or file.data != saved.files[name]]
    # A disk tries nothing again: a lease that could not be written is told in a warning, and the reader goes on.
    has_lease = world.plan.storage != "disk" or not any(
        site.startswith(f"{where.partition('/')[0]}:") for site in world.network.struck
    )
    if lost and has_lease and not saved.is_damaged:
        world.fail("what a follower works on stays", f"{where}: {lost} of record {saved.number}")
    if world.plan.chance("annotates", where) < 0.3:
        store.annotate(checkpoint, {f"metric {where}": chance})


def check_followed(world: World, store: Any) -> None:
    """Check at the end that each cursor's followers get, with one more start, all that was committed."""
    for cursor, followed in world.model.followed.items():
        follow(world, f"the last follower of {cursor}", Action("follow", option=cursor), store)
        if missing := followed.due(world.model.records, len(world.model.records) + 1):
            world.fail("each commit has its turn", f"{sorted(missing)} never came with the cursor {cursor}")


def _copy(world: World, store: Any) -> None:
    began, target = world.scheduler.now, open_place(COPY_URI, config=job_of(store).config)
    try:
        left_out = copy_store(store, target).left_out
    finally:
        target.close()
    if len(world.copy.claims_since(began)) > 1:
        return  # another copy to the same place has another view
    copies = {_origin(world.copy, saved): saved for saved in world.copy.live()}
    seen = [world.model.records[at].state.live for at in world.model.numbers_between(began, world.scheduler.now) if at]
    for saved in world.model.saved.values():
        if saved.is_damaged or saved.attempt in left_out or not all(saved.number in live for live in seen):
            continue
        copy = copies.get(_origin(world.model, saved))
        is_alike = copy is not None and copy.is_thinned == saved.is_thinned  # it is not thinned with its original
        names = {*saved.files, *saved.elsewhere} - {MANIFEST_NAME} if is_alike else set[str]()
        other = {name for name in names if copy and copy.files.get(name) != world.model.bytes_of(saved, name)}
        if copy is None or other:
            world.fail("a copy has what is live", f"record {saved.number}: {sorted(other) or 'it is not there'}")


def _origin(model: Model, saved: SavedCheckpoint) -> str:
    """Return what a copy has in common with its original, thinned or not: the step and the suffix of the attempt."""
    thinned = model.records[saved.number].entry.thinned
    step, _, suffix = (saved.attempt if thinned is None else thinned.attempt).rpartition("-")
    return step.rpartition("-")[0] + suffix


def _with_checkpoint(world: World, member: Member, index: int, action: Action, store: Any) -> None:
    checkpoints = list(store)
    if not checkpoints:
        return
    where = f"{member.process.name}/{index}"
    checkpoint = checkpoints[int(world.plan.chance("which", where) * len(checkpoints))]
    force = world.plan.chance("force", where) < 0.7
    changes = {
        "pin": store.pin,
        "unpin": store.unpin,
        "annotate": lambda step: store.annotate(step, {f"metric {where}": world.plan.chance("metric", where)}),
        "roll back": store.roll_back,
        "remove": lambda step: store.remove(step, force=force),
        "thin": lambda step: _thin(world, where, store, [item.step for item in checkpoints[:-1]] or [step]),
        "remove all": lambda step: store.remove_all(force=force),
    }
    if action.kind in changes:
        changes[action.kind](checkpoint.step)
    elif action.kind == "verify":
        report = checkpoint.verify()
        saved = world.model.saved[checkpoint.number]
        if not report.ok and not saved.is_damaged and saved.removed_at is None:
            world.fail("what is committed verifies", f"{where}: {report.problems}")
    elif action.kind == "copy to a directory":
        path = checkpoint.to_directory(world.directory / where.replace("/", "-"))
        _compare(world, where, checkpoint, {item.name: item.read_bytes() for item in path.iterdir()})
    elif action.kind == "directory on this node":
        names = [receipt.name for receipt in checkpoint.files]  # a request: others would go on before the next check
        with checkpoint.as_directory() as path:
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
        if data != world.model.bytes_of(saved, name) and not saved.is_damaged:
            world.fail("what is read is what was saved", f"{where}: {name} of record {saved.number}: {calls_in(data)}")
