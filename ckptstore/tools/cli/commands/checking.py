"""Commands that check: `verify` what is stored, `check-load` whether code loads it, `doctor` whether a place is fit."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
from dataclasses import asdict
from importlib import import_module
from typing import Any

import click

from ckptstore.catalogue import job_of
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CheckpointDamaged, CheckpointGone, CkptstoreError, InvalidInput
from ckptstore.format.entry import Thinning
from ckptstore.format.layout import MANIFEST_NAME
from ckptstore.format.record import Record
from ckptstore.loading.checkpoint_files import files_of
from ckptstore.loading.verify import Fault, Problem, VerifyReport, parse_sample
from ckptstore.runtime.extras import needs
from ckptstore.runtime.near import meant, nearest
from ckptstore.runtime.shown import show_size
from ckptstore.store import CheckpointStore
from ckptstore.tools.cli.command import Answer, Call, checkpoints_of_ray, command
from ckptstore.tools.cli.options import ENGINE, TARGET, option
from ckptstore.tools.cli.output import picked
from ckptstore.tools.cli.terminal import is_terminal
from ckptstore.tools.doctor.examination import Examination, examine

DIFFERS = 1
"""The exit code if it does not fit."""
_MOST_SHOWN = 20


@command(
    TARGET,
    option("--sample SHARE", "Read a random share of the files, such as 5%; check the size of all."),
    option("--all", "Check all checkpoints of STORE, and its log."),
    ENGINE,
)
def verify(call: Call) -> Answer:
    """Check every byte of a checkpoint against its digests.

    For a store without a step, that is its latest checkpoint. Files that are missing, truncated, flipped, swapped or
    extra are named, and the exit code is 3, that of checkpoint-damaged. With --sample the presence and size of every
    file are still checked. With --all one that is damaged keeps no other from being checked.
    """
    parse_sample(call.sample)
    executor = call.open_executor()
    reports: list[tuple[str, VerifyReport]] = []
    store = None
    if not call.all:
        checkpoints = [call.open_checkpoint(call.target)]
    else:
        named = call.find_target()
        if named.step is not None:
            raise InvalidInput(
                f"--all checks a whole store, and {call.target} names a checkpoint",
                hint=f"Write `ckptstore verify {call.target}`, or `ckptstore verify --all {named.uri}`",
            )
        store = call.open_store(call.target)
        damaged: dict[str, CheckpointDamaged] = {}
        of_ray = checkpoints_of_ray(store, call.storage_options, damaged=damaged)
        reports += [(uri, _unopened(error.step, "manifest", error.message)) for uri, error in damaged.items()]
        checkpoints = _recorded(store) if of_ray is None else of_ray
        store = store if of_ray is None else None  # Ray's run has no log
    log_problems = [] if store is None else store.verify_log()
    for uri, report in reports:
        yield from _lines(uri, report)
    for checkpoint in checkpoints:
        total = checkpoint.size_bytes if call.sample is None else None
        try:
            with call.progress(f"step {checkpoint.step}", total):
                report = checkpoint.verify(sample=call.sample, executor=executor)
        except CheckpointGone:
            if store is None:
                raise
            newest = job_of(store).log.newest()
            if newest is None or checkpoint.number not in newest.state.live:
                click.echo(f"left out: step {checkpoint.step}: it was removed meanwhile", err=True)
                continue
            report = _unopened(checkpoint.step, "missing", "nothing")
        reports.append((checkpoint.uri, report))
        yield from _lines(f"step {checkpoint.step}", report, checkpoint.thinned)
    is_ok = not log_problems and all(report.ok for _, report in reports)
    yield {
        "ok": is_ok,
        "reports": [{"uri": uri, "ok": report.ok, **asdict(report)} for uri, report in reports],
        "log_problems": log_problems,
    }
    if not reports:
        yield "no checkpoints"
    for problem in [] if store is None else log_problems or ["ok"]:
        yield f"log: {problem}"
    call.exit_code = 0 if is_ok else CheckpointDamaged.exit_code


def _recorded(store: CheckpointStore) -> list[Checkpoint]:
    """Return the live checkpoints whose records can be read: the faults of others are those of the log."""
    job = job_of(store)
    try:
        newest = job.log.newest()
    except CheckpointDamaged:
        return []
    found = job.log.found(newest.state.in_order()) if newest else []
    return [Checkpoint(files_of(job, record)) for record in found if isinstance(record, Record)]


def _unopened(step: int | None, fault: Fault, found: str) -> VerifyReport:
    """Return the report of a checkpoint whose manifest cannot be read."""
    problem = Problem(file=MANIFEST_NAME, fault=fault, rank=None, expected="the committed one", found=found)
    return VerifyReport(step=step, num_files=0, num_read=0, read_bytes=0, num_without_digest=0, problems=(problem,))


def _lines(name: str, report: VerifyReport, thinned: Thinning | None = None) -> Answer:
    read = f"{report.num_read} of {report.num_files} files read, {show_size(report.read_bytes)}"
    linked = f", {report.num_without_digest} linked without a digest" if report.num_without_digest else ""
    without = f", thinned: without {', '.join(thinned.dropped)}" if thinned else ""
    yield f"{name}: {'ok' if report.ok else 'DAMAGED'}, {read}{linked}{without}"
    for problem in report.problems:
        yield f"  {problem}"


@command(
    click.Argument(["function"], metavar="MODULE:FUNCTION"),
    TARGET,
    option("--name NAME", "Name in the state of a module that is returned.", default="model"),
    option("--include PATTERN ...", 'Look only at keys like "model.*"; repeatable.'),
    option("--no-strict", "Allow keys that one side lacks, as a load with strict=False."),
    option("--dtype [same|state]", "With state, floating-point tensors are cast, as in a load.", default="same"),
)
def check_load(call: Call) -> Answer:
    """Find out if the checkpoint TARGET fits what FUNCTION builds.

    FUNCTION is called without arguments, with the meta device as torch's default, so that its tensors take no memory;
    it is imported from MODULE, in this directory or installed. It returns a module, or the state as it is given to
    save. What a load would miss, leave out, cast or refuse is listed, with keys that may have been renamed. No tensor
    is read.

    Exit codes: 0 if a load would succeed, 1 if not.
    """
    needs("torch")
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no part of the answer
        build = _function(call.function)
        checkpoint = call.open_checkpoint(call.target)
        from ckptstore.state.live.module_load import on_meta

        state = on_meta(build, call.name)
        check = checkpoint.check_load(state, include=call.include or None, strict=not call.no_strict, dtype=call.dtype)
    yield {"uri": checkpoint.uri, "fits": check.fits, **asdict(check)}
    yield f"step {check.step} {'fits' if check.fits else 'does not fit'}"
    renamed = {key: f"{key}, perhaps {other} in the checkpoint" for key, other in check.renamed.items()}
    parts = {
        "differ": [f"{key} {how}" for key, how in check.differing.items()],
        "missing in the checkpoint": [renamed.get(key, key) for key in check.missing],
        "without a place in the state": list(check.unexpected),
        "cast": [f"{key} from {how}" for key, how in check.cast.items()],
        "of the checkpoint not named by the state": list(check.left_out),
    }
    for title, lines in parts.items():
        if lines:
            yield f"{len(lines)} {title}:"
        for line in lines[:_MOST_SHOWN]:
            yield f"  {line}"
        if len(lines) > _MOST_SHOWN:
            yield f"  and {len(lines) - _MOST_SHOWN} more, which --json lists"
    if check.num_tied:
        yield f"{check.num_tied} tied tensors are stored apart: a load compares them, this command does not"
    call.exit_code = 0 if check.fits else DIFFERS


def _function(text: str) -> Any:
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise click.UsageError(f"{text!r} is not like package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module)
    except CkptstoreError:
        raise
    except (Exception, SystemExit) as error:  # which would end the command, perhaps with 0
        raise InvalidInput(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        outer, found = found, getattr(found, part, None)
        if found is None:
            raise InvalidInput(f"{module} has no {name}{meant(nearest(part, dir(outer)))}")
    if not callable(found):
        raise InvalidInput(f"{text} is a {type(found).__name__}, not a function")
    return found


@command(
    click.Argument(["uri"]),
    option("--engine [native|fsspec]", "Use this storage engine, or fail."),
    option("--fast DIR", "Check DIR for fast checkpoints on this node, too."),
)
def doctor(call: Call) -> Answer:
    """Check whether a store can be used at URI, and is intact.

    Tries what a store needs: permissions, conditional creates, clocks, speed, locks. Of a store that is there, checks
    the log, and that all files of the live checkpoints exist with their sizes; the bytes are read by `ckptstore verify
    --all`. For a run of Ray Train, also checks Ray's own list of checkpoints.

    With --fast, also checks whether DIR is private, its file system, free space, locks and speed, its checkpoints, and
    how far the store is behind them.

    Writes about 30 MiB below probe/, and 32 MiB below DIR, and removes them again. The exit code is 0 if nothing
    failed, even with warnings, else that of the first failure.
    """
    found = examine(call.uri, storage_options=call.storage_options, engine=call.engine, fast_directory=call.fast)
    fields = ("name", "status", "detail", "hint", "code")
    findings = [picked(finding, *fields) for finding in found.findings]
    yield {"uri": found.uri, "engine": found.engine, "ok": found.ok, "findings": findings}
    yield lines_of(found)
    call.exit_code = found.exit_code


def lines_of(found: Examination) -> list[str]:
    """Return the findings as lines that fit the terminal."""
    width = max(len(finding.name) for finding in found.findings)
    columns = max(60, shutil.get_terminal_size().columns) if is_terminal(sys.stdout) else 10**6
    below = " " * (width + 11)
    lines = []
    for finding in found.findings:
        text = f"{finding.status:8} {finding.name.ljust(width)}  {finding.detail}"
        for line in text.splitlines():
            lines += textwrap.wrap(line, columns, subsequent_indent=below, break_long_words=False)
        if finding.hint and finding.status != "ok":
            lines.append(f"{below}{finding.hint}")  # not folded: it may be a command to copy
    return lines
