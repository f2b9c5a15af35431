"""The messages that ranks post, and their keys: answers and results of meetings, in a self-checking encoding. Pure.

A message is a line of JSON, followed by the payload. Errors travel in the line, as `errors.to_wire` encodes them, never
as a pickle.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import CkptstoreError, UnsupportedVersion, from_wire
from ckptstore.format.encoding import FORMAT_VERSION, as_list, as_number, as_text, parse_json
from ckptstore.runtime.shown import show_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message of one rank in one meeting."""

    tag: str
    rank: int
    world_size: int
    by: str
    """The unique description of the process that posted it, which differs between two that take part as one rank."""
    payload: bytes = b""
    error: Mapping[str, Any] | None = None
    after_failure: bool = False
    """On an answer: True if the last call of this rank failed, or has no result."""
    step: int | None = None
    """The step of the call, if it is for one."""
    missed: tuple[int, ...] = ()
    """On a result: the ranks whose answers it does not include."""
    behind: tuple[int, ...] = ()
    """On a result: the ranks whose calls fail, because their steps are lower. All others answer again."""
    lanes: tuple[str, ...] = ()
    """On an answer: the lanes that this rank has open."""

    def encode(self) -> bytes:
        """Return the message as bytes."""
        head = {
            "version": FORMAT_VERSION,
            "tag": self.tag,
            "rank": self.rank,
            "world_size": self.world_size,
            "by": self.by,
            "size": len(self.payload),
            "crc": zlib.crc32(self.payload),
        }
        more: dict[str, Any] = {"error": self.error, "missed": self.missed, "behind": self.behind, "lanes": self.lanes}
        more["after_failure"] = self.after_failure
        head |= {name: value for name, value in more.items() if value}
        if self.step is not None:
            head["step"] = self.step
        return json.dumps(head, sort_keys=True).encode() + b"\n" + self.payload

    @staticmethod
    def decode(data: bytes) -> Message | None:
        """Return the message; None if the bytes are not a whole one (yet). Raises UnsupportedVersion."""
        line, newline, payload = data.partition(b"\n")
        if not newline:
            return None
        try:
            head = parse_json(line)
            whole = (as_number(head["size"]), as_number(head["crc"])) == (len(payload), zlib.crc32(payload))
            if as_number(head["version"], 1, 1 << 31) > FORMAT_VERSION:
                raise UnsupportedVersion(
                    f"{head['by']} posts messages of version {head['version']}, this ckptstore reads {FORMAT_VERSION}",
                    hint="Use one version of ckptstore on all ranks",
                )
            error, step = head.get("error"), head.get("step")
            message = Message(
                tag=as_text(head["tag"]),
                rank=as_number(head["rank"]),
                world_size=as_number(head["world_size"], 1),
                by=as_text(head["by"]),
                payload=payload,
                error=None if error is None else from_wire(error).to_wire(),
                after_failure=head.get("after_failure", False),
                step=None if step is None else as_number(step),
                missed=tuple(map(as_number, as_list(head.get("missed", [])))),
                behind=tuple(map(as_number, as_list(head.get("behind", [])))),
                lanes=tuple(map(as_text, as_list(head.get("lanes", [])))),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        return message if whole and type(message.after_failure) is bool else None


def first_error(messages: Mapping[int, Message], *, lost: CkptstoreError | None = None) -> dict[str, Any] | None:
    """Return the error that all ranks raise: the lowest rank's, with the names of the other failed ranks; None if all
    succeeded.

    `lost` is the error about ranks that will not answer; the error of a rank that answered takes precedence.
    """
    failed = {rank: message.error for rank, message in messages.items() if message.error is not None}
    if not failed:
        return lost.to_wire() if lost is not None else None
    first = min(failed)
    wire = dict(failed[first] or {})
    others = sorted(failed.keys() - {first})
    wire["ranks"] = sorted({*failed, *wire.get("ranks", ()), *(lost.ranks if lost is not None else ())})
    if others:
        wire["message"] = f"{wire['message']} [{show_ranks(others)} failed too]"
    if lost is not None:
        wire["message"] = f"{wire['message']} [{lost.message}]"
    return wire


DRAIN_LANE = "drain"
"""The lane in which ranks bring fast checkpoints into the store, beside the saves that go on."""

_LANES_LIFE = "lane."
"""The prefix of the keys of signs of life in all lanes but the main one and `DRAIN_LANE`. A rank is in one of these at
a time."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one lane. The name of the main one is empty."""

    lane: str
    world_size: int

    @staticmethod
    def member(rank: int) -> str:
        """Return the key by which a rank is claimed."""
        return f"member.{rank:05d}"

    def answer(self, call: int, rank: int) -> str:
        """Return the key of a rank's answer."""
        return f"{self._meeting(call)}.{rank:05d}"

    def result(self, call: int) -> str:
        """Return the key of the leader's result."""
        return f"{self._meeting(call)}.result"

    def gone(self, call: int) -> str:
        """Return the key of the mark of a rank that has given up waiting for the result."""
        return f"{self._meeting(call)}.gone"

    def of_call(self, call: int) -> list[str]:
        """Return all keys of a meeting."""
        keys = [self.result(call)] if self.lane else [self.result(call), self.gone(call)]
        return [*keys, *(self.answer(call, rank) for rank in range(1, self.world_size))]

    def life(self, rank: int) -> str:
        """Return the key of the signs of life of a rank."""
        # Drains have keys of their own: a rank that drains, and hangs in a save, must not seem alive in that save.
        before = f"{DRAIN_LANE}." if self.lane == DRAIN_LANE else _LANES_LIFE if self.lane else ""
        return f"{before}life.{rank:05d}"

    def _meeting(self, call: int) -> str:
        return f"{self.lane}.{call:08d}" if self.lane else f"{call:08d}"
