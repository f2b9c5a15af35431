"""The local directory of an export: it is filled beside its target, and takes its place when it is complete.

A file beside both says what this process makes: `.NAME.export-XXXXXXXX`, locked as long as it lives. By such a file,
and by nothing else, the next export knows what one that was killed has left, and goes on with it or removes it.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptstore.extensions.exchange.replacing import finish_replacement, replace_directory
from ckptstore.format.encoding import as_list, as_text, parse_json
from ckptstore.runtime.file_locks import Exclusive

logger = logging.getLogger("ckptstore")

_LOCK_SECONDS = 5.0
"""Longer than another export looks at the file."""

IsOwn = Callable[[str], bool]
"""True for the name of a file that an export writes."""


@contextmanager
def appearing(target: Path, *, is_own: IsOwn, copied: Collection[str]) -> Iterator[Path]:
    """Yield a new directory next to the target that takes its place when complete. After an error nothing is left."""
    token = secrets.token_hex(4)
    made = target.with_name(f".{target.name}.partial-{token}")
    made.parent.mkdir(parents=True, exist_ok=True)
    with _noted(made, target, token, copied):
        try:
            made.mkdir()
            yield made
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        _put(made, target, token, _or_in(copied, is_own))


def put_export(made: Path, target: Path, *, finish: Callable[[], None], is_own: IsOwn, copied: Collection[str]) -> None:
    """Move the directory of an export to its place once `finish` has completed it, and remove the files of the export
    before."""
    token = secrets.token_hex(4)
    with _noted(made, target, token, copied):
        finish()
        _put(made, target, token, _or_in(copied, is_own))


def finish_others(target: Path, *, is_own: IsOwn) -> None:
    """Finish what exports to the target have begun that were killed: the export before is in its place again, or the
    new one is, and their other files are removed. One that is at work is left alone."""
    pattern = re.compile(re.escape(f".{target.name}.export-") + r"([0-9a-f]{8})")
    found = target.parent.iterdir() if target.parent.is_dir() else iter(())
    for note, match in [(path, match) for path in found if (match := pattern.fullmatch(path.name))]:
        lock = Exclusive(note)
        is_held = False
        with suppress(OSError, NotImplementedError):  # where nothing can be locked, nobody can tell
            is_held = lock.take()
        if not is_held:
            continue
        try:
            said = _read(note)
            if said is None:
                if not note.stat().st_size:  # it was killed before it made anything
                    note.unlink()
                continue
            made = target.with_name(said[0])
            old = _aside(target, match[1])
            if finish_replacement(made, target, aside=old):
                logger.info("%s is what it was before an export that was killed", target)
            for left in (made, old):
                _remove(left, _or_in(said[1], is_own))
            note.unlink(missing_ok=True)
        finally:
            lock.give_back()


def _put(made: Path, target: Path, token: str, is_own: IsOwn) -> None:
    try:
        old = replace_directory(made, target, aside=_aside(target, token))
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    if old is not None:
        _remove(old, is_own)


def _or_in(names: Collection[str], is_own: IsOwn) -> IsOwn:
    return lambda name: is_own(name) or name in names


def _aside(target: Path, token: str) -> Path:
    return target.with_name(f".{target.name}.replaced-{token}")


@contextmanager
def _noted(made: Path, target: Path, token: str, copied: Collection[str]) -> Iterator[None]:
    """Keep the file that says what this process makes, for as long as the context lasts."""
    note = target.with_name(f".{target.name}.export-{token}")
    lock = Exclusive(note)
    try:
        with suppress(OSError, NotImplementedError):  # then others do not touch it either
            lock.take(wait_seconds=_LOCK_SECONDS)
        note.write_text(json.dumps({"directory": made.name, "beside": sorted(copied)}))
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.give_back()


def _read(note: Path) -> tuple[str, frozenset[str]] | None:
    """Return the name of the directory, and the names of files that were copied into it; None if it is no such file."""
    try:
        said = parse_json(note.read_bytes())
        name, copied = as_text(said["directory"]), frozenset(map(as_text, as_list(said["beside"])))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (name, copied) if "/" not in name and name.startswith(".") else None


def _remove(directory: Path, is_own: IsOwn) -> None:
    """Remove the files of an export, and their directory unless it holds others too."""
    if directory.is_symlink() or not directory.is_dir():
        return
    foreign = []
    for item in directory.iterdir():
        if is_own(item.name) and not (item.is_dir() and not item.is_symlink()):
            item.unlink()
        else:
            foreign.append(item.name)
    if foreign:
        logger.warning("%s stays: it holds %s, which no export wrote", directory, min(foreign))
    else:
        directory.rmdir()
