"""Interpret the paths of torch_checkpointing in a store. Pure.

The root is the store. Below it lie the checkpoints by their names ("step_100"), and temporary directories that become
checkpoints ("tmp_step_100"). A name ends in the step.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath

from ckptstore.errors import InvalidInput
from ckptstore.format.layout import check_step, check_user_name

BLOCKS_NAME = ".ckptstore-blocks.json"
"""The file of a checkpoint with the digest of each block of each other file."""

METADATA_KEY = "torch_checkpointing"
"""The field of this integration in a manifest's metadata: {"name": "step_100"}"""

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_STEP = re.compile(r"(?<![0-9])([0-9]+)$")
_FRACTION = re.compile(r"[0-9][.,eE][0-9]+$")
"""The end of a number such as 1.5 or 1e5, of which the last digits are no step."""


@dataclass(frozen=True, slots=True)
class StoredPath:
    """The checkpoint and file of a path."""

    path: str
    """The path, as it was passed."""
    name: str = ""
    """The name of the checkpoint; "" for the root."""
    file: str = ""
    """Path below the checkpoint's directory; "" for that directory itself."""
    is_draft: bool = False
    """True for a path in the temporary directory of the checkpoint."""

    @property
    def step(self) -> int:
        """The step at the end of the name. Raises InvalidInput if there is none."""
        match = _STEP.search(self.name)
        if match is None:
            raise InvalidInput(
                f"The checkpoint {self.name!r} of {self.path} has no step at the end of its name",
                hint='Save to paths like "step_100": a store knows its checkpoints by their steps',
            )
        return check_step(int(match[1]))

    def check_writable(self) -> None:
        """Raise InvalidInput, InvalidStep or InvalidName for a path that cannot be stored in any checkpoint."""
        check_step(self.step)
        if _FRACTION.search(self.name):
            raise InvalidInput(
                f"The checkpoint {self.name!r} of {self.path} ends in a number that is no step",
                hint='Save to paths like "step_100": a store knows its checkpoints by their steps',
            )
        if self.file == BLOCKS_NAME:
            raise InvalidInput(f"The name {self.file} is reserved by ckptstore", hint="Rename the file")
        if self.file:
            check_user_name(self.file)


@dataclass(frozen=True, slots=True)
class PathReader:
    """Interprets the paths of one configuration."""

    mount: str | None
    temp_dir_prefix: str

    def place(self, path: str | os.PathLike[str]) -> StoredPath:
        """Interpret a path. Raises InvalidInput for a URI and for a path that is not below the root."""
        text = os.fspath(path)
        if _URI.match(text):
            raise InvalidInput(
                f"{text} is a URI, of which a path loses a slash",
                hint='Give the URI to StoreStorageConfig, and save to paths below it such as "step_100"',
            )
        parts = self._below_root(PurePosixPath(text)).parts
        if ".." in parts:
            raise InvalidInput(f"The path {text} has a part '..'")
        if not parts:
            return StoredPath(text)
        first, file = parts[0], "/".join(parts[1:])
        name = first.removeprefix(self.temp_dir_prefix)
        return StoredPath(text, name or first, file, is_draft=bool(name) and name != first)

    def _below_root(self, path: PurePath) -> PurePath:
        if self.mount is None:
            if path.is_absolute():
                hint = (
                    f'Save to a path below the store, such as "{path.name}", or say where the store begins: mount=...'
                )
                raise InvalidInput(f"The path {path} is absolute", hint=hint)
            return path
        try:
            return path.relative_to(self.mount)
        except ValueError:
            raise InvalidInput(f"The path {path} is not below mount={self.mount!r}") from None
