"""The plan: what will move where, agreed by all ranks before any byte does. Pure data, printable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ckptstore.runtime.beat import Beat
from ckptstore.transfer.moves import Stored
from ckptstore.transfer.sources import Source


class PlannedFile(NamedTuple):
    """One file to be written."""

    key: str
    source: Source

    def __str__(self) -> str:
        return f"{self.key} <- {self.source.size_bytes} bytes"


class Upload(Protocol):
    """`Transfer.upload`, or what does the same in another way."""

    def __call__(self, files: Sequence[PlannedFile], *, beat: Beat) -> list[Stored]:
        """Write the files; the result has their order."""
