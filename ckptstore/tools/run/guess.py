"""Find the folder of a trainer's checkpoints, where the user has not named it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ckptstore.catalogue import Catalogue
from ckptstore.checkpoint import files_behind
from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.tools.run.folders import Folder, Rules, candidates_of, folder_of

_WORDS = re.compile(
    r"(?:--?|\+{0,2})(?:[\w.]*\.)?"
    r"(?:(?:output|out|save|checkpoints?|ckpt|work|project|default[-_]root|default[-_]local)[-_]?(?:dir|folder|directory)"
    r"|output[-_]path|save[-_]path|dirpath)(?:=(?P<value>.+))?"
)
_FILE = re.compile(r".*\.[A-Za-z]\w{0,9}")
"""A name with a suffix is that of a file, which may not exist yet."""
_NOT_LOOKED_AT = frozenset({".git", "node_modules", "__pycache__", ".venv", "venv", "site-packages"})
_MAX_ENTRIES = 20_000


def folder_in_command(command: Sequence[str]) -> Path | None:
    """Return the one directory that an option of the command names as the place of output; None if there is none, or
    more than one."""
    found: set[str] = set()
    for number, word in enumerate(command):
        match = _WORDS.fullmatch(word)
        if match is None or not (word.startswith("-") or match["value"]):
            continue
        value = match["value"] or (command[number + 1] if number + 1 < len(command) else "")
        if value and not value.startswith("-") and "://" not in value and not _FILE.fullmatch(Path(value).name):
            found.add(os.path.realpath(value))
    return Path(found.pop()) if len(found) == 1 else None


def folder_in_store(store: Catalogue) -> Path | None:
    """Return the folder of the newest checkpoint, as its metadata have it; None if they do not."""
    try:
        checkpoint = store.latest()
        return None if checkpoint is None else folder_of(files_behind(checkpoint).read_manifest()[0].metadata)
    except CkptstoreError:
        return None


def folder_written(place: Path, rules: Rules, *, since_seconds: float) -> Path | None:
    """Return the directory below a place in which the first checkpoint of a known shape was written since then.

    Raises InvalidInput where there is too much below the place to look at all of it again and again."""
    if _is_large(place):
        raise InvalidInput(
            f"Below {place} are more than {_MAX_ENTRIES:,} files and directories, so no checkpoint is looked for there",
            hint="Give --folder, the one that the trainer writes its checkpoints to",
        )
    found = [
        candidate
        for candidate in candidates_of(Folder(place, rules))
        if any(sign.mtime_ns / 1e9 >= since_seconds for sign in candidate.files.values())
    ]
    if not found:
        return None
    return place / min(found, key=lambda it: min(sign.mtime_ns for sign in it.files.values())).parent


def _is_large(place: Path) -> bool:
    """Return True if there is too much below a directory to look at all of it."""
    count = 0
    for _, directories, files in os.walk(place):
        directories[:] = [name for name in directories if name not in _NOT_LOOKED_AT]
        count += len(directories) + len(files)
        if count > _MAX_ENTRIES:
            return True
    return False
