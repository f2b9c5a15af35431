"""What ranks post to each other: an answer or the result of an exchange, as one self-checking piece of bytes. Pure.

A line of JSON, then the payload as it is. Errors travel in the line, as `errors.to_wire` has them, never as a pickle.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptstore.encoding import FORMAT_VERSION
from ckptstore.errors import CkptstoreError, UnsupportedVersion
from ckptstore.group.base import spoken


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one rank has to say in one exchange."""

    tag: str
    rank: int
    world_size: int
    by: str
    """Which process posted it: two of one rank differ here."""
    payload: bytes = b""
    error: Mapping[str, Any] | None = None
    rejoins: bool = False
    """On an answer: this rank has no result of an earlier call, and begins a new one here."""
    missed: tuple[int, ...] = ()
    """On a result: the ranks that it was made without."""
    lanes: tuple[str, ...] = ()
    """On an answer: the lanes that this rank has open."""

    def encode(self) -> bytes:
        """The bytes to post."""
        head = {
            "version": FORMAT_VERSION,
            "tag": self.tag,
            "rank": self.rank,
            "world_size": self.world_size,
            "by": self.by,
            "size": len(self.payload),
            "crc": zlib.crc32(self.payload),
        }
        more = {"error": self.error, "rejoins": self.rejoins, "missed": self.missed, "lanes": self.lanes}
        head |= {name: value for name, value in more.items() if value}
        return json.dumps(head, sort_keys=True).encode() + b"\n" + self.payload

    @staticmethod
    def decode(data: bytes) -> Message | None:
        """The message, or None when the bytes are not the whole of one (yet)."""
        line, newline, payload = data.partition(b"\n")
        if not newline:
            return None
        try:
            head = json.loads(line)
            whole = head["size"] == len(payload) and head["crc"] == zlib.crc32(payload)
            if head["version"] > FORMAT_VERSION:
                raise UnsupportedVersion(
                    f"{head['by']} posts messages of version {head['version']}, this ckptstore reads {FORMAT_VERSION}",
                    hint="Use one version of ckptstore on all ranks",
                )
            fields = {name: head[name] for name in ("tag", "rank", "world_size", "by")}
            fields |= {name: tuple(head.get(name, ())) for name in ("missed", "lanes")}
        except (ValueError, KeyError, TypeError):
            return None
        if not whole:
            return None
        return Message(**fields, payload=payload, error=head.get("error"), rejoins=head.get("rejoins", False))


def first_error(messages: Mapping[int, Message], *, lost: CkptstoreError | None = None) -> dict[str, Any] | None:
    """The one error that all ranks raise: the lowest rank's, with the other failed ranks named; None if all went well.

    `lost` is the error about ranks that will not answer; a rank that said why it failed goes before it.
    """
    failed = {rank: message.error for rank, message in messages.items() if message.error is not None}
    if not failed:
        return lost.to_wire() if lost is not None else None
    first = min(failed)
    wire = dict(failed[first] or {})
    others = sorted(failed.keys() - {first})
    wire["ranks"] = sorted({*failed, *wire.get("ranks", ()), *(lost.ranks if lost is not None else ())})
    if others:
        wire["message"] = f"{wire['message']} [{spoken(others)} failed too]"
    if lost is not None:
        wire["message"] = f"{wire['message']} [{lost.message}]"
    return wire
