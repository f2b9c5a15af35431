"""The protocol of meetings: each rank contributes a value, and receives the leader's result.

with group.meeting("save", step=step) as meeting:
    offers = meeting.gather(offer)               # on the leader, those of all ranks
    plan = meeting.tell(lambda: agree(offers))   # made by the leader, returned on all ranks
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from ckptstore.format.encoding import as_number, parse_json

_BYTES = "\0bytes"


class Meeting(Protocol):
    """A meeting of all ranks of a group, from the view of one of them. See `Group.meeting` for the guarantees."""

    def gather(self, value: Any = None) -> list[Any]:
        """Contribute a value. Return the values of all ranks, in their order, on the leader; else an empty list.

        A value is None, or a JSON value that may contain bytes; a tuple comes back as a list.
        """

    def tell(self, work: Callable[[], Any]) -> Any:
        """Call `work` on the leader, once the values of all ranks have arrived, and return its result on all ranks.

        The result is a value as in `gather`.
        """


def pack(value: Any) -> bytes:
    """Encode a value as one line of JSON, followed by the bytes that it contains."""
    if value is None:
        return b""
    blobs: list[bytes] = []

    def place(item: Any) -> dict[str, int]:
        if not isinstance(item, bytes | bytearray | memoryview):
            raise TypeError(f"{type(item).__name__} cannot be brought to a meeting")
        blobs.append(bytes(item))
        return {_BYTES: len(blobs[-1])}

    head = json.dumps(value, default=place).encode()
    return b"".join([head, b"\n", *blobs])


def unpack(data: bytes) -> Any:
    """Decode the output of `pack`. Raises ValueError for anything else."""
    if not data:
        return None
    line, _, rest = data.partition(b"\n")
    begin = 0

    def taken(item: dict[str, Any]) -> Any:
        nonlocal begin
        if item.keys() != {_BYTES}:
            return item
        size = as_number(item[_BYTES], 0, len(rest) - begin + 1)
        blob, begin = rest[begin : begin + size], begin + size
        return blob

    value = parse_json(line, object_hook=taken)
    if begin != len(rest):
        raise ValueError(f"{begin} bytes of {len(rest)} belong to a value")
    return value


class Alone:
    """A `Meeting` of one process."""

    def gather(self, value: Any = None) -> list[Any]:
        return [unpack(pack(value))]

    def tell(self, work: Callable[[], Any]) -> Any:
        return unpack(pack(work()))
