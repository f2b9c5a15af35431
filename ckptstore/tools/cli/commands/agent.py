"""Commands that go with a training: `run`, `watch-folder`, `restore-folder` for its folder, `follow` for its store."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import InvalidInput
from ckptstore.events import RequestRetried, ResumeForgotten, emit
from ckptstore.opening import open_store
from ckptstore.runtime.near import nearest
from ckptstore.runtime.shown import printable
from ckptstore.tools.cli.command import Answer, Call, command
from ckptstore.tools.cli.options import DURATION, KEEP, STORAGE_OPTION, STORE, complete_store, option
from ckptstore.tools.cli.output import checkpoint_json, json_text, picked
from ckptstore.tools.run import story
from ckptstore.tools.run.explain import explained, pattern_for
from ckptstore.tools.run.folders import Folder, JobSeen, RestoreReport, Rules, newest_first, read_shapes
from ckptstore.tools.run.folders import restore_folder as restore
from ckptstore.tools.run.nodes import find_nodes
from ckptstore.tools.run.notices import CommandEnded
from ckptstore.tools.run.signals import ENDING, Signals
from ckptstore.tools.run.trainer import TrainerProcess, check_command

_SHORTEST_SECONDS = 0.1
_QUIET_SECONDS = 60.0
"""The pause between two lines about requests that are tried again: a storage that is away fails many."""
_TICK_SECONDS = 0.25
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
FIELDS = ("uri", "step", "number", "store")

AGENT = (
    KEEP,
    option(
        "--pattern GLOB ...",
        "Names of checkpoints of an unknown project, such as 'step_{step}'; repeatable.",
        "patterns",
    ),
    option("--step-from REGEX", "With --pattern: regular expression whose group is the step, such as 'ba(\\d+)'."),
    option("--shapes FILE", "TOML file with checkpoint layouts of your own, tried before the known ones."),
    option(
        "--beside GLOB ...",
        "Files of at most 1 MiB next to a checkpoint, to store and restore with it; one with {step}, the step, is "
        "waited for; repeatable.",
    ),
    option("--no-follow", "Ignore links to directories outside of the folder."),
    option("--marker NAME", "Name of the file in a checkpoint that is written last."),
    option(
        "--quiet TIME",
        "Without a marker, a checkpoint is complete after this long unchanged.",
        type=DURATION,
        show_default="30s",
    ),
    option("--metrics NAME", "Name of the JSON file in each checkpoint that has its metrics."),
    option("--interval TIME", "Time between two looks into the folder.", type=DURATION, default="5s"),
    option(
        "--grace TIME",
        "Time limit for the last uploads after the trainer has ended.",
        type=DURATION,
        show_default="no limit",
    ),
    option("--delete-local", "Delete stored checkpoints from the folder, except the newest 2."),
    option("--require-commit", "Fail if a finished checkpoint is not in the store at the end."),
    option("--nodes N", "Number of nodes.", type=int, show_default="from the launcher, else 1"),
    option("--node-rank R", "Number of this node, from 0.", type=int, show_default="from the launcher, else 0"),
    option("--run-id ID", "Name of this start of the job, the same on all nodes.", show_default="from the launcher"),
    STORAGE_OPTION,
    option("--json", "Print events as lines of JSON on stderr.", "as_json"),
    option("--events FILE", "Append events as lines of JSON to FILE, too."),
)


@command(
    option("--store STORE", "Store for the checkpoints; created if needed.", shell_complete=complete_store),
    option(
        "--folder DIR",
        "Folder that the trainer writes checkpoints to.",
        show_default="found by the command, or by what it writes",
    ),
    option("--dry-run DIR", "Print which checkpoints in DIR would be stored, and exit."),
    *AGENT,
    click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND..."),
    common=(),
    context_settings={"allow_interspersed_args": False},
)
def run(call: Call) -> Answer:
    """Run a trainer, and store each checkpoint that it writes.

    COMMAND is a trainer that writes checkpoints to a folder; its code needs no change. First the newest intact
    checkpoint of the store is restored into the folder, unless the folder has a newer one that is finished. Then each
    finished checkpoint is committed while the training goes on: a storage that is slow or away never blocks it. Pending
    uploads are reported.

    Signals are passed on to COMMAND, and its exit code is returned. On several nodes, start one `ckptstore run` on
    each. A restarted job fences off the old one.
    """
    if call.dry_run is not None:
        yield from _found(call)
        return
    if call.store is None or not call.words:
        raise click.UsageError("Give --store URI, and the command of the trainer after --")
    call.open(logged_events(as_json=call.as_json, events_file=call.events))
    call.exit_code = story.run(_plan(call), call.words)


@command(
    click.Argument(["folder"]),
    STORE,
    option("--once", "Store what is finished now, and exit."),
    *AGENT,
    common=(),
)
def watch_folder(call: Call) -> None:
    """Store each finished checkpoint that appears in FOLDER.

    For a trainer that something else starts, or with --once for the folder of an earlier run. Runs until SIGTERM or
    Ctrl-C, or fails once nothing more can be stored. It restores nothing; `ckptstore restore-folder` does. A checkpoint
    that is in the store already is skipped.
    """
    call.open(logged_events(as_json=call.as_json, events_file=call.events))
    call.exit_code = story.watch(_plan(call), once=call.once)


@command(
    STORE,
    click.Argument(["folder"], type=click.Path(file_okay=False)),
    option("--step N", "Restore this step, and no other one if it is damaged.", type=int),
    option("--pattern GLOB ...", "Names of checkpoints of an unknown project, as for `run`; repeatable.", "patterns"),
    option("--marker NAME", "Name of the file that is written last, as for `run`."),
)
def restore_folder(call: Call) -> Answer:
    """Put the newest intact checkpoint of STORE into FOLDER.

    For checkpoints that `run` or `watch-folder` has stored: they return to where the trainer wrote them. Nothing is
    restored if FOLDER has a newer checkpoint that is finished; with --step, newer ones are moved out of FOLDER instead.
    Files that are there already are not downloaded again. No trainer may write to FOLDER meanwhile.
    """
    rules = Rules(patterns=call.patterns, marker=call.marker)
    newest = newest_first(call.open_store(), call.step)
    report = restore(Folder(call.folder, rules), newest, keeps_newer=call.step is None)
    yield {"restored": None if report is None else asdict(report)}
    yield _restored(report)


def _restored(report: RestoreReport | None) -> list[str]:
    """Return a report in words."""
    if report is None:
        return ["the store has no checkpoint: nothing is restored"]
    lines = [f"passed over: {why}" for why in report.skipped]
    lines += [f"moved aside: {what}" for what in report.moved_aside]
    if not report.is_restored:
        return [*lines, f"step {report.step} is not restored: {report.why_not}"]
    sizes = f"{report.fetched_bytes:,} bytes fetched, {report.kept_bytes:,} were there"
    name = report.name if report.best is None else f"{report.name}, with {report.best}"
    return [*lines, f"step {report.step} is restored as {name}: {sizes}"]


def _rules(call: Call) -> Rules:
    """Return the rules for the folder that the options describe. Raises InvalidInput."""
    return Rules(
        **picked(call, "patterns", "step_from", "marker", "beside"),
        metrics_file=call.metrics,
        shapes=() if call.shapes is None else read_shapes(Path(call.shapes)),
        follows=not call.no_follow,
        **({} if call.quiet is None else {"quiet_seconds": call.quiet}),
    )


def _plan(call: Call) -> story.AgentPlan:
    """Return the plan that the options describe. Raises InvalidInput."""
    if call.interval < _SHORTEST_SECONDS:
        raise InvalidInput(f"--interval is {call.interval:g} s, it must be at least {_SHORTEST_SECONDS:g} s")
    if call.grace is not None and call.grace < 0:
        raise InvalidInput(f"--grace is {call.grace:g} s, it must be at least 0")
    return story.AgentPlan(
        **picked(call, "store", "delete_local", "require_commit", "storage_options"),
        folder=None if call.folder is None else Path(call.folder),
        rules=_rules(call),
        retention=call.keep,
        nodes=find_nodes(call.nodes, call.node_rank, call.run_id),
        interval_seconds=call.interval,
        grace_seconds=call.grace,
    )


def _found(call: Call) -> Answer:
    """Show what would be taken of a folder, after two looks; the exit code is that of nothing found if nothing is."""
    folder = Folder(call.dry_run, _rules(call))
    if not folder.path.is_dir():
        raise InvalidInput(f"There is no folder {call.dry_run}")
    folder.look(JobSeen(), notes=False)
    look = folder.look(JobSeen(), notes=False)
    rows = explained(look)
    unseen = {name: why for name, why in look.refused.items() if name not in {row["name"] for row in rows}}
    yield {"found": rows, "unknown": list(look.unknown), "passed_over": unseen}
    for row in rows:
        yield f"{row['name']}  {row['shape']}  {row['step']}  {row['verdict']}"
    for name in look.unknown:
        yield f"{name}  no known shape: --pattern {pattern_for(name)!r} takes it"
    for name, why in unseen.items():
        yield f"{name}  {why}"
    if not rows and not look.unknown and not unseen:
        yield f"nothing in {call.dry_run} has the shape of a checkpoint; --pattern GLOB says what one is called"
    call.exit_code = 0 if rows else story.NOTHING_FOUND


@contextmanager
def logged_events(*, as_json: bool, events_file: str | None) -> Iterator[None]:
    """Write events to stderr, and to `events_file` if it is not None: lines for people, or JSON."""
    logger = logging.getLogger("ckptstore")
    with ExitStack() as stack:
        handlers: list[logging.Handler] = [_Lines(sys.stderr, as_json=as_json)]
        if events_file is not None:
            try:
                file = stack.enter_context(open(events_file, "a", encoding="utf-8"))
            except OSError as error:
                raise InvalidInput(f"--events {events_file} cannot be written: {error.strerror}") from error
            handlers.append(_Lines(file, as_json=True))
        stack.callback(setattr, logger, "propagate", logger.propagate)
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        for handler in handlers:
            logger.addHandler(handler)
            stack.callback(logger.removeHandler, handler)
        yield


class _Lines(logging.Handler):
    """The log as lines; those of requests that are tried again now and then."""

    def __init__(self, stream: TextIO, *, as_json: bool) -> None:
        super().__init__()
        self._stream, self._as_json = stream, as_json
        self._retry_shown_at = -_QUIET_SECONDS

    def emit(self, record: logging.LogRecord) -> None:
        event: Mapping[str, Any] = getattr(record, "event", {"event": "Log"})
        if event["event"] == ResumeForgotten.__name__:
            return  # the agent has compared the folder with the store itself
        if event["event"] == RequestRetried.__name__:
            if time.monotonic() - self._retry_shown_at < _QUIET_SECONDS:
                return
            self._retry_shown_at = time.monotonic()
        message = record.getMessage()
        line = {"event": "", "level": record.levelname.lower(), "time": record.created, **event, "message": message}
        text = json_text(line) if self._as_json else f"ckptstore: {printable(message)}"
        try:
            self._stream.write(f"{text}\n")
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads; the training goes on
            self.handleError = lambda record: None  # type: ignore[method-assign]


@command(
    STORE,
    option(
        "--after STEP|latest",
        "Begin after this step, or with what comes from now on.",
        show_default="all that are live",
    ),
    option("--latest-only", "Leave out checkpoints that have a later one when it is their turn."),
    option("--cursor NAME|./FILE", "Keep the place over restarts, in STORE or in a file."),
    option("--timeout TIME", "End after so long without a new checkpoint.", type=DURATION),
    option("--keep-going", "Go on with the next checkpoint after COMMAND has failed."),
    click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]"),
    common=(STORAGE_OPTION, option("--json", "Print a line of JSON for each checkpoint.", "as_json")),
    indent=None,
)
def follow(call: Call) -> Answer:
    """Run COMMAND for each checkpoint of STORE, in their order.

    Each checkpoint has its turn once, in the order of the commits, first those that are live, and none is deleted while
    COMMAND works on it. In its words {uri}, {step}, {number} and {store} are replaced; it finds the same in
    CKPTSTORE_FOLLOW_URI, ..._STEP, ..._NUMBER and ..._STORE. No shell reads them. Without COMMAND the URI of each
    checkpoint is printed.

    When COMMAND fails, its exit code is returned, and the cursor stays before this checkpoint; with --keep-going both
    go on. A storage that is away is waited for, and so is a store that does not exist yet.
    """
    if call.keep_going and not call.words:
        raise InvalidInput("--keep-going means nothing without a command", hint="Write the command after --")
    if call.words:
        check_command(call.words)
        _check_placeholders(call.words)
    how = {"after": _after(call.after), "timeout_seconds": call.timeout, **picked(call, "latest_only", "cursor")}
    call.open(logged_events(as_json=call.as_json and bool(call.words), events_file=None))
    signals = call.open(Signals())
    store = call.open(open_store(call.store, storage_options=call.storage_options, group="solo"))
    checkpoints = call.open(closing(store.follow(**how)))
    if call.words:
        call.exit_code = _run_each(checkpoints, call, store.uri, signals)
    else:
        for checkpoint in checkpoints:
            yield {"checkpoint": checkpoint_json(checkpoint)}
            yield [checkpoint.uri]


def _after(text: str | None) -> Any:
    if text is None or text == "latest":
        return text
    if not text.isdecimal():
        raise click.UsageError(f"--after is {text!r}, it is a step or latest")
    return int(text)


def _check_placeholders(words: Sequence[str]) -> None:
    """Raise InvalidInput for a placeholder with a typing error; other braces belong to the command."""
    for name in {name for word in words for name in _PLACEHOLDER.findall(word)} - set(FIELDS):
        if (meant := nearest(name, FIELDS)) is not None:
            raise InvalidInput(f"{{{name}}} is no placeholder", hint=f"Did you mean {{{meant}}}?")


def _run_each(checkpoints: Iterator[Checkpoint], call: Call, store: str, signals: Signals) -> int:
    """Run the command for each checkpoint, and return the exit code: that of the first failure, or 0."""
    for checkpoint in checkpoints:
        values = dict(zip(FIELDS, (checkpoint.uri, checkpoint.step, checkpoint.number, store), strict=True))
        started = time.monotonic()
        code, taken = _run(call.words, {name: str(value) for name, value in values.items()}, signals)
        seconds = time.monotonic() - started
        emit(CommandEnded(step=checkpoint.step, number=checkpoint.number, code=code, seconds=seconds))
        if taken is not None:
            return 128 + taken
        if code and not call.keep_going:
            return code
    return 0


def _run(words: Sequence[str], values: Mapping[str, str], signals: Signals) -> tuple[int, int | None]:
    """Run the command once. Return its exit code, and the signal that came meanwhile, which it got too."""
    filled = [_PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), word) for word in words]
    variables = {f"CKPTSTORE_FOLLOW_{name.upper()}": value for name, value in values.items()}
    ended, taken = threading.Event(), list[int]()
    process = TrainerProcess(filled, ended=lambda _: ended.set(), variables=variables)

    def hand_on(number: int) -> None:
        taken.append(number)
        process.hand_on(number)

    signals.taken = hand_on
    try:
        while not ended.wait(_TICK_SECONDS):
            continue
    finally:
        signals.taken = None
        process.release()
    code = process.code
    assert code is not None  # it has ended
    return code, next((number for number in taken if number in ENDING), None)
