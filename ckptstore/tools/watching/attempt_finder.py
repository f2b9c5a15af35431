"""Find the attempts in a store, in few requests however many checkpoints it has."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckptstore.errors import CkptstoreError
from ckptstore.format.layout import CHECKPOINT_PREFIX, MANIFEST_NAME, Attempt
from ckptstore.storage.base import Bucket, Disk, Storage, StoredFile
from ckptstore.storage.disk import posix
from ckptstore.tools.watching.written import WrittenBytes

MOST_LISTED_FILES = 10_000
"""A storage that has more files below its checkpoints is searched for the next steps alone."""
_STEPS_AHEAD = 10
"""The number of checkpoints ahead that those reach."""
_STEP_DIGITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAttempt:
    """A directory of an attempt, and what is in it."""

    attempt: Attempt
    num_files: int
    size_bytes: int
    num_uploads: int | None
    has_manifest: bool
    is_state: bool | None
    """True if its files are those of a state; None as long as there are none."""
    modified_seconds: float | None
    """The time of the last write to a file of it, by the storage's clock; None without a file."""


class AttemptFinder:
    """Looks for attempts that may be in flight. Keeps what it has seen finished, to ask less the next time."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._written = WrittenBytes(storage)
        self._is_large = False
        self._asks_uploads = isinstance(storage, Bucket)
        self._finished: set[str] = set()
        """On a disk: directories that hold a manifest, or belong to an epoch that is over."""
        self.notes: list[str] = []
        """Errors of the last search, in words."""

    def find(self, *, epoch: int, steps: tuple[int, int] | None, tracked: Iterable[str]) -> list[FoundAttempt]:
        """Return the attempts of this epoch or a higher one.

        `steps` are those of the last two commits, the later one first: where there are very many files, an object
        store is asked only for the ten checkpoints that would come next. One that has a manifest when it is seen first
        counts as committed; those that are `tracked` are looked at until they are gone. Raises StorageError.
        """
        self.notes, known = [], set(tracked)
        files = self._on_disk(epoch, known) if isinstance(self._storage, Disk) else self._listed(steps, known)
        uploads = self._uploads()
        for directory in uploads or ():
            files.setdefault(directory, [])
        found = []
        for directory, stored in files.items():
            attempt = Attempt.parse(directory)
            if attempt is not None and attempt.epoch >= epoch:
                num_uploads = None if uploads is None else uploads.get(directory, 0)
                seen = _found(attempt, stored, self._written, num_uploads)
                is_begun = bool(stored or seen.num_uploads)  # a directory alone is none, or what a failed one left
                if is_begun and (directory in known or not seen.has_manifest):
                    found.append(seen)
        return found

    def forget(self, directory: str) -> None:
        """Forget an attempt that is over."""
        self._written.forget(f"{CHECKPOINT_PREFIX}{directory}/")

    def _on_disk(self, epoch: int, tracked: set[str]) -> dict[str, list[StoredFile]]:
        """Look at the names, and list each directory that is not known to be finished."""
        assert isinstance(self._storage, Disk)
        path = os.fspath(self._storage.local_path(CHECKPOINT_PREFIX.rstrip("/")))
        try:  # names alone: to ask what each of ten thousand is takes far longer
            directories = set(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            directories = set()
        except OSError as error:
            raise posix.translate(error, what=f"Listing {path}", file=CHECKPOINT_PREFIX, directory=path) from error
        self._finished &= directories
        files = {}
        for directory in (directories - self._finished) | (directories & tracked):
            if directory in tracked or _may_be_in_flight(path, directory, epoch):
                files[directory] = list(self._storage.list(f"{CHECKPOINT_PREFIX}{directory}/"))
            else:
                self._finished.add(directory)
        return files

    def _listed(self, steps: tuple[int, int] | None, tracked: set[str]) -> dict[str, list[StoredFile]]:
        files: dict[str, list[StoredFile]] = defaultdict(list)
        if not self._is_large:
            for number, file in enumerate(self._storage.list(CHECKPOINT_PREFIX)):
                if number == MOST_LISTED_FILES and steps is not None:
                    self._is_large = True
                    files.clear()
                    break
                files[_directory_of(file.key)].append(file)
        if self._is_large and steps is not None:
            latest, before = steps
            gap = max(1, abs(latest - before))
            prefixes = [f"step-{digits}" for digits in step_prefixes(latest, latest + _STEPS_AHEAD * gap, unit=gap)]
            prefixes += [name for name in tracked if not any(name.startswith(prefix) for prefix in prefixes)]
            for prefix in prefixes:
                for file in self._storage.list(CHECKPOINT_PREFIX + prefix):
                    files[_directory_of(file.key)].append(file)
            self.notes.append(f"more than {MOST_LISTED_FILES:,} files: only attempts at the next steps are looked for")
        return dict(files)

    def _uploads(self) -> dict[str, int] | None:
        """Count the uploads in parts that are begun, by directory."""
        if not self._asks_uploads or not isinstance(self._storage, Bucket):
            return None
        try:
            unfinished = self._storage.unfinished(CHECKPOINT_PREFIX)
        except CkptstoreError as error:
            if not error.retryable:
                self._asks_uploads = False
            self.notes.append(f"uploads that are begun cannot be seen: {error.message}")
            return None
        found: dict[str, int] = defaultdict(int)
        for key, _ in unfinished:
            found[_directory_of(key)] += 1
        return dict(found)


def _may_be_in_flight(path: str, directory: str, epoch: int) -> bool:
    """Return True if a directory on a disk is an attempt of this epoch or a higher one without a manifest."""
    attempt = Attempt.parse(directory)
    if attempt is None or attempt.epoch < epoch:
        return False
    return not os.path.exists(f"{path}/{directory}/{MANIFEST_NAME}")


def _directory_of(key: str) -> str:
    return key.removeprefix(CHECKPOINT_PREFIX).partition("/")[0]


def _found(attempt: Attempt, files: list[StoredFile], written: WrittenBytes, num_uploads: int | None) -> FoundAttempt:
    manifest = attempt.key(MANIFEST_NAME)
    stored = [file for file in files if file.key != manifest]
    return FoundAttempt(
        attempt=attempt,
        num_files=len(stored),
        size_bytes=written.of(stored),
        num_uploads=num_uploads,
        has_manifest=len(stored) < len(files),
        is_state=any(file.key.endswith(".distcp") for file in stored) if stored else None,
        modified_seconds=max((file.modified_seconds for file in files), default=None),
    )


def step_prefixes(low: int, high: int, *, unit: int) -> Iterator[str]:
    """Yield the beginnings of ten digits that cover all steps from `low` to `high`, rounded outwards to the power of
    ten below `unit`: at most some twenty."""
    power = 10 ** (len(str(unit)) - 1)
    low, end = low // power * power, min((high // power + 1) * power, 10**_STEP_DIGITS)
    while low < end:
        size, zeros = power, len(str(power)) - 1
        while low % (size * 10) == 0 and low + size * 10 <= end and zeros < _STEP_DIGITS - 1:
            size, zeros = size * 10, zeros + 1
        yield f"{low // size:0{_STEP_DIGITS - zeros}d}"
        low += size
