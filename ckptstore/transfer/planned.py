"""The plan: what will move where, agreed by all ranks before any byte does. Pure data, printable."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.transfer.sources import Source


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file to be written."""

    key: str
    source: Source

    def __str__(self) -> str:
        return f"{self.key} <- {self.source.size_bytes} bytes"
