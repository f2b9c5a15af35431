"""The layout of a store below its root, and the rules for legal names. Pure.

A name is relative to its checkpoint ("model-rank=00003.pt"); a key is relative to the root of the storage
("checkpoints/step-0000012000-e0007-3f9a1c2e/model-rank=00003.pt").
"""

from __future__ import annotations

import operator
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import InvalidName, InvalidStep
from ckptstore.format.encoding import shortened

STORE_KEY = "store.json"
HINT_KEY = "latest.json"
LOG_PREFIX = "log/"
LEASE_PREFIX = "leases/"
CHECKPOINT_PREFIX = "checkpoints/"
CURSOR_PREFIX = "cursors/"
GROUP_PREFIX = "group/"
AGAIN = "~"
"""Stands below it between a start token and the number of times that its ranks have met, from the second time on."""
PROBE_PREFIX = "probe/"

MANIFEST_NAME = "ckptstore.json"
USER_METADATA_NAME = "user-metadata.json"
DCP_METADATA_NAME = ".metadata"
RESERVED_NAMES = frozenset({MANIFEST_NAME, USER_METADATA_NAME})
RAY_METADATA_NAME = ".metadata.json"
"""The file of Ray with a user's metadata of a checkpoint, which may change at any time."""
UNLISTED_NAMES = RESERVED_NAMES | {RAY_METADATA_NAME}
"""The files that may lie beside those of a checkpoint without being in its manifest."""

PART_NAME = re.compile(r"(^|/)\.part-[0-9a-f]{16}-[^/]*$")
"""The names of the parts from which GCS composes a file. They stay behind where they could not be deleted."""

MAX_NAME_BYTES = 1024
MAX_PART_BYTES = 255
MAX_STEP = 10**10 - 1
MAX_NUMBER = 10**10 - 1

_PLAIN = re.compile(r"(?:[\w=+-][\w=+.-]{0,120}/){0,6}[\w=+-][\w=+.-]{0,120}", re.ASCII)
_RECORD = re.compile(r"log/([0-9]{10})\.json")
_ATTEMPT = re.compile(r"step-([0-9]{10})-e([0-9]{4}|[1-9][0-9]{4,17})-([0-9a-f]{8})")
_LEASE = re.compile(r"leases/([0-9]{10})-([0-9a-zA-Z._-]+)\.json")


def check_step(step: Any) -> int:
    """Return the step as an int; raise InvalidStep if it is not one, negative, or above `MAX_STEP`."""
    try:
        value = operator.index(step)
    except TypeError:
        raise InvalidStep(f"the step is {shortened(repr(step))}, not an integer") from None
    if isinstance(step, bool) or not 0 <= value <= MAX_STEP:
        raise InvalidStep(f"the step is {shortened(repr(step))}, it must be an integer from 0 to {MAX_STEP}")
    return value


def known_step(step: Any) -> int | None:
    """Return the step as an int, None if it is not valid."""
    try:  # `check_step` raises later, on all ranks
        return check_step(step)
    except InvalidStep:
        return None


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One try at saving a step; its directory name is `str(attempt)`."""

    step: int
    epoch: int
    suffix: str

    def __str__(self) -> str:
        return f"step-{self.step:010d}-e{self.epoch:04d}-{self.suffix}"

    @property
    def lane(self) -> str:
        """The name of the lane in which the ranks of this attempt meet. No other attempt has it."""
        return str(self)

    @property
    def prefix(self) -> str:
        """The key prefix of everything that belongs to the attempt, with its trailing slash."""
        return f"{CHECKPOINT_PREFIX}{self}/"

    def key(self, name: str) -> str:
        """Return the key of a file of the attempt."""
        return f"{self.prefix}{name}"

    @staticmethod
    def parse(directory: str) -> Attempt | None:
        """Return the attempt with a directory name, None if the name is not one of an attempt."""
        match = _ATTEMPT.fullmatch(directory)
        return Attempt(int(match[1]), int(match[2]), match[3]) if match else None

    @staticmethod
    def of(directory: str) -> Attempt:
        """Return the attempt with a directory name that was checked before. Raises ValueError if it is none."""
        attempt = Attempt.parse(directory)
        if attempt is None:
            raise ValueError(f"{directory[:80]!r} is not the name of an attempt")
        return attempt


def store_of(uri: str) -> str | None:
    """Return the URI of the store whose checkpoint lies at a URI, None if that is not the directory of an attempt."""
    directory, _, name = uri.rstrip("/").rpartition(f"/{CHECKPOINT_PREFIX}")
    return directory if Attempt.parse(name) else None


def record_key(number: int) -> str:
    """Return the key of a log record; records are numbered from 1."""
    return f"{LOG_PREFIX}{number:010d}.json"


def parse_record_key(key: str) -> int | None:
    """Return the number of a log record, None if the key is not that of one."""
    match = _RECORD.fullmatch(key)
    return int(match[1]) if match else None


def lease_key(number: int, reader: str) -> str:
    """Return the key of a reader's lease on the checkpoint with that number."""
    return f"{LEASE_PREFIX}{number:010d}-{reader}.json"


def parse_lease_key(key: str) -> int | None:
    """Return the number of the checkpoint that a lease protects, None if the key is not that of one."""
    match = _LEASE.fullmatch(key)
    return int(match[1]) if match else None


def cursor_key(name: str) -> str:
    """Return the key of a follower's cursor that is kept in the store."""
    return f"{CURSOR_PREFIX}{name}.json"


def check_name(name: str) -> str:
    """Return the name if it is safe on every storage, else raise InvalidName with the reason.

    A safe name is relative, with "/" between its parts, no empty part, no "." or "..", no control character, no
    backslash, valid Unicode, at most 1,024 bytes in all and 255 in a part. The same check holds for names from a
    caller, a manifest or a listing.
    """
    if _PLAIN.fullmatch(name):  # most names, at a quarter of the time
        return name
    reason = _fault_of(name)
    if reason:
        shown = name if len(name) <= 80 else name[:77] + "..."
        raise InvalidName(f"The name {shown!r} cannot be stored: {reason}")
    return name


def _fault_of(name: str) -> str | None:
    if not name:
        return "it is empty"
    if name.startswith("/"):
        return "it is absolute"
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if len(encoded) > MAX_NAME_BYTES:
        return f"it has {len(encoded)} bytes, the limit is {MAX_NAME_BYTES}"
    if "\\" in name:
        return "it has a backslash, which some storages take for a slash"
    if not name.isprintable() and any(unicodedata.category(char) == "Cc" for char in name):
        return "it has a control character"
    parts = name.split("/")
    if "" in parts:
        return "it has an empty part"
    if "." in parts or ".." in parts:
        return "it has a part '.' or '..'"
    if len(encoded) > MAX_PART_BYTES and any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return f"a part is longer than {MAX_PART_BYTES} bytes"
    return None


def check_user_name(name: str) -> str:
    """Check the name of a user's file as `check_name` does, and refuse the names of the format itself too."""
    if check_name(name).casefold() in RESERVED_NAMES:
        raise InvalidName(f"The name {name!r} is reserved by ckptstore", hint="Rename the file")
    return name


def ranked_name(name: str, rank: int) -> str:
    """Return the name with the rank before its extension: "a/model.pt" of rank 3 is "a/model-rank=00003.pt"."""
    directory, slash, base = name.rpartition("/")
    stem, dot, extension = base.rpartition(".")
    if not stem:
        stem, dot, extension = base, "", ""
    return f"{directory}{slash}{stem}-rank={rank:05d}{dot}{extension}"


def folded(name: str) -> str:
    """Return the name as a case-insensitive, normalising file system compares it."""
    return name if name.isascii() and name.islower() else unicodedata.normalize("NFC", name).casefold()


def directories_of(names: Iterable[str]) -> set[str]:
    """Return every directory in which one of the names lies, and those above it."""
    found: set[str] = set()
    left = {name.rpartition("/")[0] for name in names}
    while left:
        found |= left
        left = {directory.rpartition("/")[0] for directory in left} - found
    return found - {""}


def check_collisions(names: Iterable[str]) -> None:
    """Raise InvalidName if two names are one file on some file system, or one is a directory of another."""
    given = list(names)
    seen = {folded(name): name for name in given}
    if len(seen) < len(given):
        _raise_same(given)
    if both := directories_of(seen) & seen.keys():
        head = min(both)
        name = next(name for fold, name in seen.items() if fold.startswith(f"{head}/"))
        raise InvalidName(f"The name {seen[head]!r} is a file and also the directory of {name!r}")


def _raise_same(names: Iterable[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.get(fold := folded(name))) is not None:
            same = "is given twice" if other == name else f"and {other!r} differ only by case or Unicode form"
            raise InvalidName(f"The name {name!r} {same}", hint="Rename one of the files")
        seen[fold] = name
