"""Record the progress of an export at its target until it is complete, so that the same export can go on there and no
other one mixes its files with it.

A record names the plan: the checkpoint with its digests, and the layout of all files. Each complete file has a mark
with the plan, its size and its version at the storage. A mark is written after its file, and all marks of another plan
are deleted before the record of a new one is written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import AccessDenied, FileMissing, InvalidInput, StorageError
from ckptstore.interchange.export_place import PART_NAME, PROGRESS_FOLDER
from ckptstore.storage.base import Bucket
from ckptstore.transfer.opened import OpenedPlace

_RECORD = f"{PROGRESS_FOLDER}plan.json"


@dataclass(frozen=True, slots=True)
class ExportProgress:
    """The record and the marks of one plan. It can be pickled."""

    place: OpenedPlace
    plan: str
    """The digest of the layout and of the checkpoint."""

    def is_begun(self) -> bool:
        """True if the record of this plan is at the target."""
        return self._read(_RECORD).get("plan") == self.plan

    def begin(self, present: Sequence[str], *, checkpoint: str, overwrite: bool) -> bool:
        """Continue this plan, or begin it; True if it had been begun before. `present` lists the files at the target.

        Raises InvalidInput if another export was begun there and may not be replaced.
        """
        if self.is_begun():
            return True
        begun = [name for name in present if name.startswith(PROGRESS_FOLDER)]
        if begun and not overwrite:
            other = self._read(_RECORD).get("checkpoint", "another checkpoint")
            raise InvalidInput(
                f"{self.place.storage.uri} has a part of an export of {other} that is another one than this",
                hint="Run that one again to complete it, give another directory, or overwrite it",
            )
        self.place.storage.delete([name for name in begun if name != _RECORD])
        self._write(_RECORD, {"plan": self.plan, "checkpoint": checkpoint})
        return False

    def is_done(self, name: str) -> bool:
        """True if a file exists as this plan wrote it."""
        mark = self._read(_mark_of(name))
        if mark.get("plan") != self.plan:
            return False
        try:
            found = self.place.storage.stat(name)
        except FileMissing:
            return False
        return (mark.get("size_bytes"), mark.get("version")) == (found.size_bytes, found.version)

    def done(self, name: str, size_bytes: int) -> None:
        """Mark a file as written. Raises StorageError if the storage has another size."""
        found = self.place.storage.stat(name)
        if found.size_bytes != size_bytes:
            raise StorageError(f"{name} has {found.size_bytes} bytes, {size_bytes} were written", file=name)
        self._write(_mark_of(name), {"plan": self.plan, "size_bytes": size_bytes, "version": found.version})

    def check_complete(self, sizes: dict[str, int]) -> None:
        """Raise StorageError unless each of these files exists with its size and a mark. One listing."""
        found = self.place.sizes_bytes()
        for name, size_bytes in sizes.items():
            if found.get(name) != size_bytes or _mark_of(name) not in found:
                raise StorageError(
                    f"{name} is not at {self.place.storage.uri} as it was written", file=name, hint="Export again"
                )

    def abort_unfinished(self, names: Sequence[str]) -> None:
        """Abort uploads of these files that killed processes never finished, and delete their parts."""
        storage = self.place.storage
        storage.delete([file.key for file in storage.list(".part-") if PART_NAME.match(file.key)])
        if isinstance(storage, Bucket):
            # They cost money, but the account may lack the right.
            with suppress(AccessDenied):
                for key, upload_id in storage.unfinished(""):
                    if key in names:
                        storage.abort_unfinished(key, upload_id)

    def forget(self) -> None:
        """Delete the marks, and the record last."""
        storage = self.place.storage
        found = [file.key for file in storage.list(PROGRESS_FOLDER)]
        storage.delete([name for name in found if name != _RECORD])
        storage.delete([_RECORD])
        storage.remove_directories(PROGRESS_FOLDER.rstrip("/"))

    def _read(self, key: str) -> dict[str, Any]:
        """Return the contents of a progress file; empty if it is missing or torn."""
        try:
            found = json.loads(self.place.storage.read(key))
        except (FileMissing, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, key: str, fields: dict[str, Any]) -> None:
        self.place.storage.write(key, [memoryview(json.dumps(fields).encode())])


def _mark_of(name: str) -> str:
    return f"{PROGRESS_FOLDER}{name}.json"
