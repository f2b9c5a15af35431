"""What must hold of checkpoints that Ray keeps: there is no log, and a manifest makes one visible for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckptstore.format.layout import MANIFEST_NAME
from ckptstore.format.manifest import Manifest
from ckptstore.testing.simulation.model import Call, Tag, Violation, held_files, told_in, told_of
from ckptstore.testing.simulation.virtual.storages import File, Space

DIRECTORY_PREFIX = "checkpoint_"
"""How the directories of Ray's checkpoints begin in a run."""


@dataclass
class RayModel:
    """What the directory of a run holds."""

    space: Space
    ranks_of: Callable[[str], int]
    step_of: Callable[[Tag], int | None]
    by_call: dict[Call, str] = field(default_factory=dict)
    """By a rank's part in a save the directory that it is in."""
    refused: set[Call] = field(default_factory=set)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """By directory what was in it when its manifest came."""

    def __post_init__(self) -> None:
        self.space.watchers.append(self.changed)

    def changed(self, key: str, before: File | None, after: File | None) -> None:
        """A file was written or removed."""
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
        told = told_of(held, directory, self.ranks_of, self.step_of)
        if refused := told & self.refused:
            raise Violation("committed=False never becomes visible", f"{directory}: {refused} was refused before")
        if again := told & self.by_call.keys():
            raise Violation("a save commits once", f"{directory}: {again} is in another directory too")
        self.by_call |= dict.fromkeys(told, directory)
        self.files[directory] = held

    def check_delete(self, process: str, rank: int, keys: Sequence[str]) -> None:
        """A process asks for the deletion of these keys. Of an upload that failed a rank may remove its own file."""
        for key in keys:
            file = self.space.files.get(key) if key.startswith(DIRECTORY_PREFIX) else None
            if rank != 0 and file is not None and {other for _, other in told_in(file.data)} != {rank}:
                raise Violation("only the leader deletes what others wrote", f"{process} deletes {key}")
