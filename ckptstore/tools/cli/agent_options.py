"""Define what the commands of the agent share: their options, and the output of events."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click

from ckptstore.errors import InvalidInput
from ckptstore.events import RequestRetried, ResumeForgotten
from ckptstore.format.encoding import dump_json
from ckptstore.runtime.shown import printable
from ckptstore.tools.cli.kinds import DURATION
from ckptstore.tools.cli.options import keep_option, storage_option, together
from ckptstore.tools.cli.output import print_json
from ckptstore.tools.run.explain import explained, pattern_for
from ckptstore.tools.run.folders import Folder, JobSeen, Rules, read_shapes
from ckptstore.tools.run.nodes import find_nodes
from ckptstore.tools.run.story import NOTHING_FOUND, AgentPlan

_SHORTEST_SECONDS = 0.1
_QUIET_SECONDS = 60.0
"""The pause between two lines about requests that are tried again: a storage that is away fails many."""

agent_options = together(
    keep_option,
    click.option(
        "--pattern",
        "patterns",
        multiple=True,
        metavar="GLOB",
        help="Names of checkpoints of an unknown project, such as 'step_{step}'; repeatable.",
    ),
    click.option(
        "--step-from",
        metavar="REGEX",
        help="With --pattern: regular expression whose group is the step, such as 'ba(\\d+)'.",
    ),
    click.option(
        "--shapes",
        "shapes_file",
        metavar="FILE",
        help="TOML file with checkpoint layouts of your own, tried before the known ones.",
    ),
    click.option(
        "--beside",
        multiple=True,
        metavar="GLOB",
        help="Files of at most 1 MiB next to a checkpoint, to store and restore with it; one with {step}, the "
        "step, is waited for; repeatable.",
    ),
    click.option(
        "--no-follow",
        "follows",
        is_flag=True,
        default=True,
        flag_value=False,
        help="Ignore links to directories outside of the folder.",
    ),
    click.option("--marker", metavar="NAME", help="Name of the file in a checkpoint that is written last."),
    click.option(
        "--quiet",
        "quiet_seconds",
        type=DURATION,
        metavar="TIME",
        show_default="30s",
        help="Without a marker, a checkpoint is complete after this long unchanged.",
    ),
    click.option(
        "--metrics",
        "metrics_file",
        metavar="NAME",
        help="Name of the JSON file in each checkpoint that has its metrics.",
    ),
    click.option(
        "--interval",
        type=DURATION,
        default="5s",
        show_default=True,
        metavar="TIME",
        help="Time between two looks into the folder.",
    ),
    click.option(
        "--grace",
        type=DURATION,
        metavar="TIME",
        show_default="no limit",
        help="Time limit for the last uploads after the trainer has ended.",
    ),
    click.option(
        "--delete-local", is_flag=True, help="Delete stored checkpoints from the folder, except the newest 2."
    ),
    click.option(
        "--require-commit", is_flag=True, help="Fail if a finished checkpoint is not in the store at the end."
    ),
    click.option("--nodes", type=int, metavar="N", show_default="from the launcher, else 1", help="Number of nodes."),
    click.option(
        "--node-rank",
        type=int,
        metavar="R",
        show_default="from the launcher, else 0",
        help="Number of this node, from 0.",
    ),
    click.option(
        "--run-id",
        metavar="ID",
        show_default="from the launcher",
        help="Name of this start of the job, the same on all nodes.",
    ),
    storage_option,
    click.option("--json", "as_json", is_flag=True, help="Print events as lines of JSON on stderr."),
    click.option("--events", "events_file", metavar="FILE", help="Append events as lines of JSON to FILE, too."),
)


def rules_of(options: Mapping[str, Any]) -> Rules:
    """Return the rules for the folder that the options describe. Raises InvalidInput."""
    quiet = {} if options["quiet_seconds"] is None else {"quiet_seconds": options["quiet_seconds"]}
    return Rules(
        patterns=options["patterns"],
        step_from=options["step_from"],
        marker=options["marker"],
        metrics_file=options["metrics_file"],
        shapes=() if options["shapes_file"] is None else read_shapes(Path(options["shapes_file"])),
        beside=options["beside"],
        follows=options["follows"],
        **quiet,
    )


def plan_of(store: str, folder: str | None, options: Mapping[str, Any]) -> AgentPlan:
    """Return the plan that the options describe. Raises InvalidInput."""
    if options["interval"] < _SHORTEST_SECONDS:
        raise InvalidInput(f"--interval is {options['interval']:g} s, it must be at least {_SHORTEST_SECONDS:g} s")
    if options["grace"] is not None and options["grace"] < 0:
        raise InvalidInput(f"--grace is {options['grace']:g} s, it must be at least 0")
    return AgentPlan(
        store=store,
        folder=None if folder is None else Path(folder),
        rules=rules_of(options),
        retention=options["keep"],
        nodes=find_nodes(options["nodes"], options["node_rank"], options["run_id"]),
        interval_seconds=options["interval"],
        grace_seconds=options["grace"],
        delete_local=options["delete_local"],
        require_commit=options["require_commit"],
        storage_options=options["storage_options"],
    )


def print_explained(directory: str, rules: Rules, *, as_json: bool) -> int:
    """Print what would be taken of a folder, after two looks; return the exit code, that of nothing found if nothing
    is."""
    folder = Folder(directory, rules)
    if not folder.path.is_dir():
        raise InvalidInput(f"There is no folder {directory}")
    folder.look(JobSeen(), notes=False)
    look = folder.look(JobSeen(), notes=False)
    rows = explained(look)
    unseen = {name: why for name, why in look.refused.items() if name not in {row["name"] for row in rows}}
    if as_json:
        print_json(found=rows, unknown=list(look.unknown), passed_over=unseen)
    else:
        for row in rows:
            click.echo(printable(f"{row['name']}  {row['shape']}  {row['step']}  {row['verdict']}"))
        for name in look.unknown:
            click.echo(printable(f"{name}  no known shape: --pattern {pattern_for(name)!r} takes it"))
        for name, why in unseen.items():
            click.echo(printable(f"{name}  {why}"))
        if not rows and not look.unknown and not unseen:
            click.echo(f"nothing in {directory} has the shape of a checkpoint; --pattern GLOB says what one is called")
    return 0 if rows else NOTHING_FOUND


@contextmanager
def logged_events(*, as_json: bool, events_file: str | None) -> Iterator[None]:
    """Write events to stderr, and to `events_file` if it is not None: lines for people, or JSON."""
    logger = logging.getLogger("ckptstore")
    handlers: list[logging.Handler] = [_Lines(sys.stderr, as_json=as_json)]
    file = None
    if events_file is not None:
        try:
            file = open(events_file, "a", encoding="utf-8")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise InvalidInput(f"--events {events_file} cannot be written: {error.strerror}") from error
        handlers.append(_Lines(file, as_json=True))
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
        logger.level, logger.propagate = before
        if file is not None:
            file.close()


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
        text = self._json(record, event) if self._as_json else f"ckptstore: {printable(record.getMessage())}"
        try:
            self._stream.write(f"{text}\n")
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads; the training goes on
            self.handleError = lambda record: None  # type: ignore[method-assign]

    def _json(self, record: logging.LogRecord, event: Mapping[str, Any]) -> str:
        line = {"event": "", "level": record.levelname.lower(), "time": record.created, **event}
        return json.dumps(
            json.loads(dump_json({"version": 1, **line, "message": record.getMessage()}, what="an event"))
        )
