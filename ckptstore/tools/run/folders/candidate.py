"""Describe what the shapes find in a folder: checkpoints that it may hold, and what each of them still lacks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ckptstore.errors import InvalidInput, InvalidName
from ckptstore.format.layout import check_name, check_user_name, known_step
from ckptstore.tools.run.folders.shape import Shape
from ckptstore.tools.run.folders.snapshot import FolderSnapshot, Sign
from ckptstore.tools.run.folders.whole import checksums, ends, number_in
from ckptstore.transfer.sources import refuse_shortage

T = TypeVar("T")

_MOST_DIGITS = 255
"""The number of digits that a name can have. Python refuses to read an integer of many more, as a damaged tracker may
hold."""
_CLOCKS_DIFFER_NS = 2 * 10**9
"""The difference between clocks of nodes that write to one file system; some keep times of two seconds."""
_MAX_MARKER_BYTES = 64 << 20
"""trainer_state.json grows with the run; a longer one is no marker."""
MAX_BESIDE_BYTES = 1 << 20
"""The most bytes of a file beside a checkpoint that comes along: it goes into the metadata."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A file next to a checkpoint that leads to it or belongs to it."""

    text: str | None = None
    """The text of a small file."""
    data: str | None = None
    """The bytes of a small file that is not text, in base64."""
    link: str | None = None
    """The target of a symbolic link."""
    copy: str | None = None
    """The file of the checkpoint that it is another name or a copy of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of the caller, above all for checkpoints that no known project writes. Raises InvalidInput."""

    patterns: tuple[str, ...] = ()
    """Names relative to the folder, with "*" and "?" in a part: "step_*", "ckpts/*.pt". "{step}" is the step; without
    it the number that may be the step is a guess."""
    step_from: str | None = None
    """A regular expression for the name; its group is the step."""
    shapes: tuple[Shape, ...] = ()
    """Shapes of the caller's, before those that are known."""
    beside: tuple[str, ...] = ()
    """Names of small files that come along, relative to the directory that a checkpoint lies in, with "*" and "?" in
    the last part. "{step}" is the step: without such a file the checkpoint is not whole."""
    follows: bool = True
    """True if a link to a directory outside of the folder counts as that directory."""
    marker: str | None = None
    """The file that is written last: inside of a directory, and beside a file with its name before it. Without patterns
    every checkpoint of a known shape must have it besides."""
    quiet_seconds: float = 30.0
    """The time for which nothing may have changed, if nothing else shows the end."""
    metrics_file: str | None = None
    """A JSON object of numbers in the checkpoint, for retention and `best`."""

    def __post_init__(self) -> None:
        self._check_patterns()
        for name in (self.marker, self.metrics_file):
            if name is not None and (not name or name.startswith("/") or ".." in name.split("/")):
                raise InvalidInput(f"{name!r} leads out of the checkpoint", hint="Give the name of a file in it")
        for glob in self.beside:
            above = glob.rpartition("/")[0]
            if glob.startswith("/") or ".." in glob.split("/") or set("*?[") & set(above):
                raise InvalidInput(
                    f"--beside {glob!r} cannot be followed", hint="Write it relative, with * in the last part alone"
                )
        if not self.quiet_seconds > 0:
            raise InvalidInput(f"A quiet time of {self.quiet_seconds} s is none", hint="Give a number above 0")
        if self.step_from is not None and not self.patterns:
            raise InvalidInput("--step-from belongs to no pattern", hint="Give a pattern too")
        try:
            groups = 1 if self.step_from is None else re.compile(self.step_from).groups
        except re.error as error:
            raise InvalidInput(f"--step-from {self.step_from!r} is no regular expression: {error}") from None
        if groups != 1:
            raise InvalidInput(
                f"--step-from {self.step_from!r} has {groups} groups", hint="Put the step in the one pair of brackets"
            )

    def _check_patterns(self) -> None:
        for pattern in self.patterns:
            if not pattern or pattern.startswith("/") or ".." in pattern.split("/"):
                raise InvalidInput(f"The pattern {pattern!r} leads out of the folder", hint="Write it relative to it")
            if pattern.count("{step}") > 1:
                raise InvalidInput("A pattern has {step} twice")
        for pattern in (*self.patterns, *self.beside):
            if other := re.search(r"\{\w*\}", pattern.replace("{step}", "")):
                raise InvalidInput(f"{pattern!r} has {other[0]}, and {{step}} is all that a pattern knows")

    def step_of(self, name: str, pattern: str) -> tuple[int | None, bool]:
        """Return the step of a name that fits a pattern, and True if the caller has said where it is."""
        if self.step_from is not None:
            found = re.search(self.step_from, name)
            return (int(found[1]), True) if found and (found[1] or "").isdecimal() else (None, False)
        if "{step}" in pattern:
            before, after = (re.escape(part) for part in pattern.split("{step}"))
            wild = [part.replace(r"\*", "[^/]*").replace(r"\?", "[^/]") for part in (before, after)]
            found = re.fullmatch(rf"{wild[0]}(\d+){wild[1]}", name)
            return (int(found[1]), True) if found else (None, False)
        return guessed_step(name.rpartition("/")[2]), False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """Something in a folder that has the name of a checkpoint."""

    name: str
    """Relative to the folder."""
    shape: str
    step: int | None
    """The step; None if nothing says it."""
    is_exact: bool = True
    """False if the step is a guess."""
    is_rewritten: bool = False
    """True if one name gets one state after the other, so that each of them is a checkpoint."""
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
    metrics_place: str | None = None
    """See `Shape.metrics`."""

    @property
    def fault(self) -> str:
        """The reason why it can never be stored, "" if it can."""
        try:
            check_name(self.name)
            for file in self.files:  # the format reserves names at the top level
                (check_name if "/" in file else check_user_name)(file)
        except InvalidName as error:
            return error.message
        return next((f"{file} {sign.fault}" for file, sign in sorted(self.files.items()) if sign.fault), "")

    @property
    def parent(self) -> str:
        """The directory that it lies in, "" for the folder itself."""
        return self.name.rpartition("/")[0]

    @property
    def written_at_ns(self) -> int:
        """The time of the last change of its files, since the epoch by the clock of its file system."""
        return max((sign.mtime_ns for sign in self.files.values()), default=0)

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
        self._known: dict[tuple[Callable[..., Any], str, tuple[str, ...]], tuple[Sign, Any]] = {}

    def read(self, name: str, sign: Sign, reader: Callable[..., T], *arguments: str) -> T:
        """Return what `reader` makes of a file, which it gets as a path, and of further arguments."""
        known = self._known.get((reader, name, arguments))
        if known is None or known[0] != sign:
            known = self._known[reader, name, arguments] = (sign, reader(self._folder / name, *arguments))
        result: T = known[1]
        return result

    def forget(self, files: Mapping[str, Sign]) -> None:
        """Keep what is known of these files alone."""
        self._known = {key: value for key, value in self._known.items() if key[1] in files}


def _data(path: Path) -> bytes | None:
    """Return the bytes of a small file; None for one that has gone."""
    try:
        return path.read_bytes() if path.stat().st_size <= _MAX_MARKER_BYTES else None
    except OSError as error:
        refuse_shortage(error, path)
        return None


def text_of(path: Path) -> str | None:
    """Return the text of a small file; None for one that is not text, or has gone."""
    try:
        data = _data(path)
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return None


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
        return self._read(name, text_of)

    def data(self, name: str) -> bytes | None:
        """Return the bytes of a file, None where there is none."""
        return self._read(name, _data)

    def number(self, name: str, key: str) -> int | None:
        """Return the integer under a key of what torch.save wrote."""
        return self._read(name, number_in, key)

    def _read(self, name: str, reader: Callable[..., T | None], *arguments: str) -> T | None:
        sign = self._readable(name)
        return None if sign is None else self.contents.read(name, sign, reader, *arguments)

    def is_copy(self, name: str, other: str) -> bool:
        """Return True if a file is another name of one, or a copy: a zip file with the same checksums."""
        signs = self._readable(name), self._readable(other)
        if signs[0] is None or signs[1] is None or signs[0].size_bytes != signs[1].size_bytes:
            return False
        if signs[0].inode == signs[1].inode or signs[0].size_bytes == 0:
            return True
        found = self.contents.read(name, signs[0], checksums)
        return found is not None and found == self.contents.read(other, signs[1], checksums)

    def _readable(self, name: str) -> Sign | None:
        """Return the sign of a regular file; None for anything else, which is never opened."""
        sign = self.snapshot.files.get(name)
        return None if sign is None or sign.fault else sign

    def ends_among(self, candidate_files: Mapping[str, str]) -> tuple[str | None, bool]:
        """Return the first file without its end, in words, None if there is none; and True if all files show that they
        have theirs. By the names to be shown, those in the folder."""
        is_evident = bool(candidate_files)
        for shown, name in candidate_files.items():
            sign = self._readable(name)
            if sign is None or sign.link is not None:
                is_evident = False
                continue
            why, is_shown = self.contents.read(name, sign, ends)
            if why is not None:
                return f"{shown} {why}", False
            is_evident = is_evident and is_shown
        return None, is_evident

    @property
    def has_leader(self) -> bool:
        """True if rank 0, which writes what there is once, may be on this node."""
        return not self.ranks or 0 in self.ranks


def outdated(marker: str, sign: Sign | None, files: Mapping[str, Sign]) -> str | None:
    """Return a fault if files that are written before the marker are newer than it: then it is of an earlier save under
    the same name, which is being replaced, or was when its job died. In words; None without a marker.

    A time that a copying program has set says nothing.
    """
    if sign is None:
        return None
    late = [file for file, it in files.items() if it.mtime_ns > sign.mtime_ns + _CLOCKS_DIFFER_NS and it.is_original]
    return f"{min(late)} is newer than {marker}, which is written last" if late else None


_NAMED_STEP = re.compile(r"(?i)(?:step|iter(?:ation)?|batch|ba|update|checkpoint|ckpt|epoch|ep)[-_=]?(\d+)(?![.\d])")
_INTEGER = re.compile(r"(?<!\d)(?<!\d\.)(\d+)(?!\d)(?!\.\d)")


def guessed_step(name: str) -> int | None:
    """Return the number in a name that is its step, as far as one can tell; None without one. A decimal is none."""
    for word in ("step", "iter", "batch", "ba", "update", "checkpoint", "ckpt", "epoch", "ep"):
        for match in _NAMED_STEP.finditer(name):
            if match[0].lower().startswith(word):
                return known_step(int(match[1]))
    found = _INTEGER.findall(name)
    return known_step(int(found[-1])) if found else None


def last_number(name: str) -> int | None:
    """Return the last number in a name; None without one, or for one that is no number of steps."""
    found = re.findall(r"\d+", name)
    return int(found[-1]) if found and len(found[-1]) <= _MOST_DIGITS else None
