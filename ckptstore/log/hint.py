"""The hint `latest.json`: the newest record and that of the latest checkpoint, as somebody last saw them. Pure.

It saves requests and decides nothing: it may be missing, torn, behind or wrong, and whoever writes reads the log.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore.errors import CkptstoreError
from ckptstore.format.encoding import FORMAT_VERSION, dump_json, load_object
from ckptstore.format.layout import HINT_KEY
from ckptstore.format.record import Record


@dataclass(frozen=True)
class Hint:
    """What `latest.json` says."""

    newest: Record
    latest: Record | None
    """The record of the latest live checkpoint; None when there is none, or when the hint lacks it."""

    def encode(self) -> bytes:
        """The hint as bytes. The records are in it as text, so that their exact bytes, and digests, survive."""
        fields = {"version": FORMAT_VERSION, "number": self.newest.number, "newest": self.newest.encode().decode()}
        if self.latest is not None and self.latest.number != self.newest.number:
            fields["latest"] = self.latest.encode().decode()
        return dump_json(fields, what="hint")

    @staticmethod
    def decode(data: bytes) -> Hint | None:
        """The hint, or None for anything that is not one."""
        try:
            value = load_object(data, file=HINT_KEY)
            newest = Record.decode(value["newest"].encode(), value["number"])
            number, text = newest.state.latest, value.get("latest")
            latest = newest if number == newest.number else None
            if latest is None and number is not None and text is not None:
                latest = Record.decode(text.encode(), number)
            return Hint(newest, latest)
        except (CkptstoreError, KeyError, TypeError, ValueError, AttributeError):
            return None
