"""Commands that change a store: `annotate`, `pin`, `unpin`, `rollback`, `restore`, `rm`, `thin`, `prune` and `gc`."""

from __future__ import annotations

from dataclasses import asdict

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import InvalidInput
from ckptstore.format.layout import store_of
from ckptstore.retention import Verdict
from ckptstore.runtime.shown import show_duration, show_size
from ckptstore.tools.cli.command import Answer, Call, checkpoint_in, command
from ckptstore.tools.cli.options import DRY_RUN, DURATION, KEEP, STORE, TARGET, complete_store, option
from ckptstore.tools.cli.output import aligned, checkpoint_json, picked, show_metrics


@command(TARGET, click.Argument(["words"], nargs=-1, required=True, metavar="NAME=VALUE..."))
def annotate(call: Call) -> Answer:
    """Add metrics to a checkpoint, such as those of an evaluation.

    TARGET is STORE@STEP, or the URI of a checkpoint in a store. A metric of the same name is replaced. The job that
    saves goes on: retention by this metric, `ls` and `best` see it from now on.
    """
    metrics = dict(map(_metric, call.words))
    wanted = call.find_target()
    uri = store_of(wanted.uri) if wanted.step is None else wanted.uri
    if uri is None:
        message = f"{call.target} names no checkpoint in a store"
        raise InvalidInput(message, hint="Write STORE@STEP, or what `latest` prints")
    store = call.open_store(uri)
    if isinstance(wanted.step, int):
        store.annotate(wanted.step, metrics)  # which may be in the trash
    elif wanted.step is None:
        store.annotate(Checkpoint.from_uri(wanted.uri, storage_options=call.storage_options), metrics)
    else:
        store.annotate(checkpoint_in(store, wanted.step), metrics)
    yield {"target": call.target, "metrics": metrics}
    yield f"annotated with {show_metrics(metrics)}"


def _metric(word: str) -> tuple[str, float]:
    name, _, value = word.rpartition("=")
    try:
        if name:
            return name, float(value)
    except ValueError:
        """It is refused below."""
    raise click.UsageError(f"{word!r} is not like eval_loss=0.25")


def _pinned(call: Call, is_pinned: bool) -> Answer:
    store, step = call.open_step()
    (store.pin if is_pinned else store.unpin)(step)
    yield {"uri": store.uri, "step": step, "is_pinned": is_pinned}
    yield f"step {step} is {'' if is_pinned else 'not '}pinned"


@command(TARGET)
def pin(call: Call) -> Answer:
    """Protect STORE@STEP from retention until it is unpinned."""
    return _pinned(call, True)


@command(TARGET)
def unpin(call: Call) -> Answer:
    """Let retention remove STORE@STEP again."""
    return _pinned(call, False)


@command(TARGET)
def rollback(call: Call) -> Answer:
    """Make STORE@STEP the latest; move newer ones to the trash."""
    store, step = call.open_step()
    before = {item.number: item.step for item in store}
    checkpoint = store.roll_back(step)
    after = {item.number for item in store}
    trashed = [found for number, found in before.items() if number not in after]
    yield {"checkpoint": checkpoint_json(checkpoint), "trashed_steps": trashed}
    yield f"step {step} is the latest"
    if trashed:
        yield f"in the trash: {', '.join(map(str, trashed))}; `ckptstore restore` brings them back"


@command(
    click.Argument(["target"], shell_complete=complete_store),
    option("--pin/--no-pin", "Pin it, so that retention does not remove it again.", default=True),
    option("--number N", "Number in `ls --trash`, if the trash has the step more than once.", type=int),
)
def restore(call: Call) -> Answer:
    """Bring STORE@STEP back from the trash.

    It must still have all its files; `ckptstore ls --trash` lists what there is. It is pinned, because the rule that
    removed it would remove it again at the next save.
    """
    wanted = call.find_target()
    if not isinstance(wanted.step, int):
        raise InvalidInput(f"{call.target} names no step", hint="Write STORE@STEP; `ls --trash` lists what is there")
    store = call.open_store(wanted.uri)
    checkpoint = store.restore(wanted.step, number=call.number, pin=call.pin)
    is_latest = checkpoint == store.latest()
    yield {"checkpoint": checkpoint_json(checkpoint), "is_pinned": call.pin, "is_latest": is_latest}
    yield f"step {checkpoint.step} is live again{', and the latest' if is_latest else ''}"
    if call.pin:
        yield f"it is pinned; `ckptstore unpin {call.target}` gives it back to retention"
    else:
        yield "it is not pinned: the next save drops it again if its retention does not keep it"


@command(
    TARGET,
    option("--all", "Remove all checkpoints of STORE, the latest too."),
    option("--yes", "Do not ask for confirmation of --all."),
    option("--force", "Remove it even if it is the latest, pinned, or needed by others."),
)
def rm(call: Call) -> Answer:
    """Put a checkpoint, or all of a store, in the trash.

    The latest, a pinned one, the one that the running job resumed from and one with files that others refer to are
    refused without --force. --all is refused if one is pinned. A prune deletes what was in the trash for the grace
    period; until then `ckptstore restore` brings it back.
    """
    wanted = call.find_target()
    if call.all == (wanted.step is not None):
        raise InvalidInput(
            f"{call.target} names {'one checkpoint, and --all means a store' if call.all else 'no checkpoint'}",
            hint="Write STORE@STEP for one checkpoint, or STORE --all",
        )
    store = call.open_store(wanted.uri)
    found = list(store) if wanted.step is None else [checkpoint_in(store, wanted.step)]
    steps, size_bytes = [item.step for item in found], sum(item.size_bytes for item in found)
    if not call.all:
        store.remove(steps[0], force=call.force)
    else:
        if found and not call.yes:
            if call.as_json:
                raise InvalidInput("--json cannot ask whether all checkpoints may go", hint="Give --yes")
            what = f"all {len(found)} checkpoints of {store.uri} ({show_size(size_bytes)})"
            click.confirm(f"Put {what} in the trash?", abort=True, err=True)
        store.remove_all(force=call.force)
    latest = store.latest()
    held = {item.step: item.held_by for item in store.trash() if item.held_by is not None and item.step in steps}
    yield {
        "uri": store.uri,
        "trashed_steps": steps,
        "size_bytes": size_bytes,
        "latest_step": None if latest is None else latest.step,
    }
    yield f"in the trash: step {', '.join(map(str, steps))}" if steps else "there was nothing to remove"
    if latest is None:
        yield "no checkpoint is live: the next start begins at the beginning"
    elif call.force:
        yield f"step {latest.step} is the latest"
    if steps:
        yield "`ckptstore restore` brings it back"
        yield f"`ckptstore prune --grace 0 {wanted.uri}` frees {show_size(size_bytes)}"
    for step, why in held.items():
        yield f"step {step} stays in the trash: {why}"


@command(
    TARGET,
    option("--drop PATTERN ...", "Drop the keys that fit, such as 'optimizer.*'. Repeatable.", required=True),
    DRY_RUN,
    option("--force", "Thin it even if it is pinned, or needed by others."),
)
def thin(call: Call) -> Answer:
    """Drop the optimizer, or other keys, from STORE@STEP.

    What stays is a checkpoint in its place. The whole one goes to the trash: `ckptstore restore` brings it back, and a
    prune deletes it after the grace period. The latest and the one that the running job resumed from are refused, for a
    job must be able to resume from them; a pinned one and one with files that others refer to need --force.
    """
    store, step = call.open_step()
    report = store.thin(step, call.drop, force=call.force, dry_run=call.dry_run)
    yield {
        "uri": store.uri,
        "dry_run": call.dry_run,
        "step": step,
        "number": None if call.dry_run else store[step].number,
        **picked(report, "dropped", "num_keys", "size_bytes", "left_bytes"),
    }
    before, after = show_size(report.size_bytes), show_size(report.left_bytes)
    if call.dry_run:
        yield "dry run: nothing is changed"
    yield f"step {step} without {', '.join(report.dropped)}: {report.num_keys} keys, {before} before, {after} now"
    if not call.dry_run:
        yield f"the whole one is in the trash; `ckptstore restore {call.target}` brings it back"
        yield f"`ckptstore prune --grace 0 {store.uri}` frees {show_size(report.freed_bytes)}"
    for item in store.trash():
        if item.held_by is not None and item.step == step:
            yield f"it stays in the trash: {item.held_by}"


@command(
    STORE,
    DRY_RUN,
    option(
        "--grace TIME",
        "Time in the trash before a checkpoint is deleted; 0 deletes at once.",
        type=DURATION,
        show_default="1h",
    ),
    KEEP,
)
def prune(call: Call) -> Answer:
    """Remove checkpoints by --keep rules, and empty the trash.

    With --keep, every checkpoint that no rule keeps goes to the trash. The latest, pinned ones and the one that the
    running job resumed from always stay. A rule with "weights:" before it keeps checkpoints without the optimizer. Then
    checkpoints that have been in the trash for the grace period are deleted. Without --keep, that is all. Try it with
    --dry-run.
    """
    store = call.open_store(grace_seconds=call.grace)
    verdicts = [] if call.keep is None else store.retain(call.keep, dry_run=call.dry_run)
    removed = store.prune(dry_run=call.dry_run)
    gone = {item.number for item in removed}
    left = [item for item in store.trash() if item.number not in gone]
    names = ("number", "step", "size_bytes", "due_in_seconds", "held_by")
    yield {
        "uri": store.uri,
        "dry_run": call.dry_run,
        "verdicts": [asdict(item) for item in verdicts],
        "removed": [picked(item, *names) for item in removed],
        "left": [picked(item, *names) for item in left],
        "removed_bytes": sum(item.size_bytes for item in removed),
    }
    rows = [(str(item.step), _decision(item), item.reason) for item in verdicts]
    rows += [(str(item.step), "delete", f"{show_size(item.size_bytes)}, long enough in the trash") for item in removed]
    for item in left:
        why = item.held_by or f"{show_size(item.size_bytes)}, may be deleted in {show_duration(item.due_in_seconds)}"
        rows.append((str(item.step), "in the trash", why))
    if not rows:
        yield "nothing to delete"
    elif call.dry_run:
        yield "dry run: nothing is changed"
    yield aligned(("step", "decision", "why"), rows)
    waiting = [item for item in left if item.held_by is None]
    if waiting:
        size = show_size(sum(item.size_bytes for item in waiting))
        seconds = show_duration(max(item.due_in_seconds for item in waiting))
        yield f"a prune frees {size} more in {seconds}, or with --grace 0 now"


def _decision(item: Verdict) -> str:
    if item.drops:
        return f"keep without {', '.join(item.drops)}"
    return "keep" if item.keep else "to the trash"


@command(
    STORE,
    DRY_RUN,
    option(
        "--claim",
        "Take the store over from a dead job first. A job that is alive is fenced off: it cannot commit any more.",
    ),
)
def gc(call: Call) -> Answer:
    """Delete what crashed saves have left behind.

    That is saves that can never be committed, and uploads that were never finished. Those of the job or copy that owns
    the store are left, since it may be alive, unless --claim takes the store over. Messages of ranks that only read are
    left too, and on a disk files that are being read or linked.
    """
    store = call.open_store()
    found = store.collect_garbage(claim=call.claim, dry_run=call.dry_run)
    yield {
        "uri": store.uri,
        "dry_run": call.dry_run,
        "attempts": [{"directory": name, "size_bytes": size} for name, size in found.attempts.items()],
        **picked(found, "unfinished", "exchanges", "size_bytes"),
        "left": [{"name": name, "reason": reason} for name, reason in found.left.items()],
    }
    lines = [f"{name}, {show_size(size_bytes)}" for name, size_bytes in found.attempts.items()]
    lines += [*(f"unfinished: {name}" for name in found.unfinished), *found.exchanges]
    for line in lines:
        yield f"{'would be removed' if call.dry_run else 'removed'}: {line}"
    for name, reason in found.left.items():
        yield f"left: {name}: {reason}"
    if not lines and not found.left:
        yield "nothing to remove"
