"""Describe what the shapes find in a folder: checkpoints that it may hold, and what each of them still lacks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ckptstore.errors import InvalidInput
from ckptstore.tools.run.folders.snapshot import FolderSnapshot, Sign
from ckptstore.tools.run.folders.whole import number_in, torn

T = TypeVar("T")

_CLOCKS_DIFFER_NS = 2 * 10**9
"""The difference between clocks of nodes that write to one file system; some keep times of two seconds."""
_MAX_MARKER_BYTES = 64 << 20
"""trainer_state.json grows with the run; a longer one is no marker."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A small file next to a checkpoint that leads to it: its text, or where it leads as a symbolic link."""

    text: str | None = None
    link: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of the caller for checkpoints that no known framework writes. Raises InvalidInput."""

    patterns: tuple[str, ...] = ()
    """Names relative to the folder, with "*" and "?" in a part: "step_*", "ckpts/*.pt". The last number is the step."""
    marker: str | None = None
    """The file that is written last: inside of a directory, and beside a file with its name before it."""
    quiet_seconds: float = 30.0
    """The time for which nothing may have changed, if nothing else shows the end."""
    metrics_file: str | None = None
    """A JSON object of numbers in the checkpoint, for retention and `best`."""

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            if not pattern or pattern.startswith("/") or ".." in pattern.split("/"):
                raise InvalidInput(f"The pattern {pattern!r} leads out of the folder", hint="Write it relative to it")
        for name in (self.marker, self.metrics_file):
            if name is not None and (not name or name.startswith("/") or ".." in name.split("/")):
                raise InvalidInput(f"{name!r} leads out of the checkpoint", hint="Give the name of a file in it")
        if self.marker is not None and not self.patterns:
            raise InvalidInput(f"The marker {self.marker!r} belongs to no pattern", hint="Give a pattern too")
        if not self.quiet_seconds > 0:
            raise InvalidInput(f"A quiet time of {self.quiet_seconds} s is none", hint="Give a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """Something in a folder that has the name of a checkpoint."""

    name: str
    """Relative to the folder."""
    shape: str
    step: int | None
    is_directory: bool
    files: Mapping[str, Sign]
    """The files of a directory relative to it, others relative to their parent."""
    beside: Mapping[str, Beside] = field(default_factory=dict)
    """Relative to the parent."""
    lacks: str | None = None
    """Why it cannot be whole, None when nothing that should be there is missing."""
    is_certain: bool = True
    """True if the shape shows the end; else it takes a quiet time."""
    tells_all: bool = False
    """True if what shows the end was written after all ranks had written, those on other nodes too."""

    @property
    def parent(self) -> str:
        """The directory that it lies in, "" for the folder itself."""
        return self.name.rpartition("/")[0]

    def path_of(self, file: str) -> str:
        """Return the path of a file of it, relative to the folder."""
        above = self.name if self.is_directory else self.parent
        return f"{above}/{file}" if above else file


def fingerprint(candidate: Prospect) -> str:
    """Return the same text for as long as the candidate does not change.

    Of several files the one that gives the name counts: a `last.ckpt` beside it will be of another step soon.
    """
    files = candidate.files
    if not candidate.is_directory:
        own = candidate.name.rpartition("/")[2]
        files = {own: files[own]}
    facts = [(name, sign.size_bytes, sign.mtime_ns, sign.link) for name, sign in sorted(files.items())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


class MarkerReader:
    """Reads the few files whose contents matter, each version of each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, str], tuple[Sign, Any]] = {}

    def text(self, name: str, sign: Sign) -> str | None:
        """Return the text of a small file; None for one that is not text, or has gone."""
        return self._once("text", name, sign, self._read)

    def torn(self, name: str, sign: Sign) -> str | None:
        """See `ckptstore.tools.run.folders.whole.torn`; a file that has gone is torn."""
        return self._once("torn", name, sign, _torn_or_gone)

    def number(self, name: str, sign: Sign, key: str) -> int | None:
        """See `ckptstore.tools.run.folders.whole.number_in`."""
        return self._once(key, name, sign, lambda path: number_in(path, key))

    def forget(self, files: Mapping[str, Sign]) -> None:
        """Keep what is known of these files alone."""
        self._known = {key: value for key, value in self._known.items() if key[1] in files}

    def _once(self, what: str, name: str, sign: Sign, read: Callable[[Path], T]) -> T:
        known = self._known.get((what, name))
        if known is None or known[0] != sign:
            known = self._known[what, name] = (sign, read(self._folder / name))
        result: T = known[1]
        return result

    @staticmethod
    def _read(path: Path) -> str | None:
        try:
            if path.stat().st_size > _MAX_MARKER_BYTES:
                return None
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None


def _torn_or_gone(path: Path) -> str | None:
    try:
        return torn(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at a folder, as the shapes see it."""

    snapshot: FolderSnapshot
    contents: MarkerReader
    rules: Rules
    ranks: frozenset[int] | None
    """The ranks whose files this node gets, empty for a job of one process; None when they are unknown."""

    def text(self, name: str) -> str | None:
        """Return the text of a file, None where there is none."""
        sign = self.snapshot.files.get(name)
        return None if sign is None else self.contents.text(name, sign)

    def number(self, name: str, key: str) -> int | None:
        """Return the integer under a key of what torch.save wrote."""
        sign = self.snapshot.files.get(name)
        return None if sign is None else self.contents.number(name, sign, key)

    def torn_among(self, candidate_files: Mapping[str, str]) -> str | None:
        """Return the first file without its end, in words. By the names to be shown, those in the folder."""
        for shown, name in candidate_files.items():
            sign = self.snapshot.files[name]
            if sign.link is None and (why := self.contents.torn(name, sign)) is not None:
                return f"{shown} {why}"
        return None

    @property
    def has_leader(self) -> bool:
        """True if rank 0, which writes what there is once, may be on this node."""
        return not self.ranks or 0 in self.ranks


def outdated(marker: str, sign: Sign | None, files: Mapping[str, Sign]) -> str | None:
    """Return a fault if files that are written before the marker are newer than it: then it is of an earlier save under
    the same name, which is being replaced, or was when its job died. In words; None without a marker."""
    if sign is None:
        return None
    late = [file for file, it in files.items() if it.mtime_ns > sign.mtime_ns + _CLOCKS_DIFFER_NS and it.link is None]
    return f"{min(late)} is newer than {marker}, which is written last" if late else None


def last_number(name: str) -> int | None:
    """Return the last number in a name, which is its step; None without one."""
    found = re.findall(r"\d+", name)
    return int(found[-1]) if found else None
