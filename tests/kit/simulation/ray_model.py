"""Check the promises of checkpoints that Ray keeps: without a log, a manifest makes one visible for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckptstore.format.layout import MANIFEST_NAME
from ckptstore.format.manifest import Manifest
from kit.simulation.ledger import Violation
from kit.simulation.model import Call, Tag, calls_in, calls_of, held_files
from kit.simulation.virtual.storages import File, Space

DIRECTORY_PREFIX = "checkpoint_"
"""The beginning of the names of Ray's directories in a run."""


@dataclass
class RayModel:
    """The expected contents of a run's directory."""

    space: Space
    ranks_of: Callable[[str], int]
    step_of: Callable[[Tag], int | None]
    by_call: dict[Call, str] = field(default_factory=dict)
    """Maps a rank's part in a save to its directory."""
    refused: set[Call] = field(default_factory=set)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """By directory, the files at the time of the manifest."""

    def __post_init__(self) -> None:
        self.space.watchers.append(self.changed)

    def changed(self, key: str, before: File | None, after: File | None) -> None:
        """Handle a write or removal of a file."""
        directory, _, name = key.partition("/")
        if not directory.startswith(DIRECTORY_PREFIX):
            return
        if directory in self.files:
            expected = self.files[directory].get(name)
            if expected is None:
                raise Violation("a checkpoint is complete once it is visible", f"{key} came after the manifest")
            if after is None or after.data != expected:
                how = "removed" if after is None else "overwritten"
                raise Violation("nothing committed loses a byte", f"{key} was {how}")
        elif name == MANIFEST_NAME and after is not None:
            self._committed(directory, after.data)

    def _committed(self, directory: str, data: bytes) -> None:
        manifest = Manifest.decode(data)
        if manifest.attempt != directory:
            raise Violation("what is committed is whole", f"{directory} has the manifest of {manifest.attempt}")
        held = held_files(self.space, f"{directory}/", directory)
        calls = calls_of(held, directory, self.ranks_of, self.step_of)
        if refused := calls & self.refused:
            raise Violation("committed=False never becomes visible", f"{directory}: {refused} was refused before")
        if again := calls & self.by_call.keys():
            raise Violation("a save commits once", f"{directory}: {again} is in another directory too")
        self.by_call |= dict.fromkeys(calls, directory)
        self.files[directory] = held

    def check_delete(self, process: str, rank: int, keys: Sequence[str]) -> None:
        """Check a deletion by a process. A rank may only remove its own file of a failed upload."""
        for key in keys:
            file = self.space.files.get(key) if key.startswith(DIRECTORY_PREFIX) else None
            if rank != 0 and file is not None and {other for _, other in calls_in(file.data)} != {rank}:
                raise Violation("only the leader deletes what others wrote", f"{process} deletes {key}")
