"""The place that a follower of a store has reached (format-v1, "Cursors"). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptstore.errors import CheckpointDamaged
from ckptstore.format.encoding import FORMAT_VERSION, dump_json, is_sha256, load_object
from ckptstore.format.layout import MAX_NUMBER


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the log of a store: all checkpoints up to it are done."""

    store_id: str
    number: int
    """The number of a record; 0 for the place before the first."""
    sha256: str
    """The SHA-256 of the exact bytes of that record, hexadecimal; "" for 0. Another log has another one there."""
    begun: int
    """The number of the newest record when the follower began, 0 for an empty log: what had been removed by then is
    none of its business."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that this version does not know; they are kept."""

    def encode(self) -> bytes:
        """Return the cursor as bytes."""
        own = {"store_id": self.store_id, "number": self.number, "sha256": self.sha256, "begun": self.begun}
        return dump_json({**self.extra, "version": FORMAT_VERSION, **own}, what="cursor")

    @staticmethod
    def decode(data: bytes, *, file: str) -> Cursor:
        """Decode a cursor. Raises CheckpointDamaged if it is none, UnsupportedVersion if it is from a newer version."""
        value = load_object(data, file=file)
        value.pop("version")
        store_id, number, sha256, begun = (value.pop(name, None) for name in ("store_id", "number", "sha256", "begun"))
        are_numbers = all(type(one) is int and 0 <= one <= MAX_NUMBER for one in (number, begun))
        if not isinstance(store_id, str) or not are_numbers:
            raise CheckpointDamaged(f"{file} is not a cursor", file=file)
        if not (is_sha256(sha256) if number else sha256 == ""):
            raise CheckpointDamaged(f"{file} is not a cursor: it does not say which record {number} is", file=file)
        return Cursor(store_id, number, sha256, begun, value)
