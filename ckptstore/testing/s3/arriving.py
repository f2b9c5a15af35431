"""A request while its body comes in."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ckptstore.testing.s3.faults import Fault


class Unchunker:
    """A chunked body (Transfer-Encoding), piece by piece as it arrives."""

    def __init__(self) -> None:
        self.body = bytearray()
        self._pending = b""
        self._missing_bytes = 0
        self._at_trailers = False

    def feed(self, data: bytes) -> bytes | None:
        """Take more bytes; returns what follows the end, None before it."""
        data = self._pending + data
        position = 0
        while True:
            if self._missing_bytes:
                chunk = data[position : position + self._missing_bytes]
                self.body += chunk
                self._missing_bytes -= len(chunk)
                position += len(chunk)
            end = data.find(b"\r\n", position)
            if self._missing_bytes or end < 0:
                self._pending = data[position:]
                return None
            line, position = data[position:end], end + 2
            if self._at_trailers and not line:
                return data[position:]
            if line and not self._at_trailers:
                self._missing_bytes = int(line.partition(b";")[0], 16)
                self._at_trailers = self._missing_bytes == 0


@dataclass(slots=True, kw_only=True)
class Arriving:
    """A request while its body comes in."""

    method: str
    target: str
    headers: dict[str, str]
    fault: Fault | None
    body_bytes: int = 0
    body: memoryview | None = None
    scratch: memoryview | None = None
    """Where a body goes that is not kept, or whose size is not known yet."""
    received_bytes: int = 0
    chunks: Unchunker | None = None
    started: float = field(default_factory=time.time)
    operation: str = ""

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        """What follows the question mark."""
        return self.target.partition("?")[2]

    @property
    def complete(self) -> bool:
        """Whether all of the body is here."""
        return self.chunks is None and self.received_bytes >= self.body_bytes

    def hit_by(self, action: str) -> bool:
        """Whether a fault with that action hits it."""
        return self.fault is not None and self.fault.action == action
