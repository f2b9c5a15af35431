"""Receive a request's body."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ckptstore.testing.s3.rules import Fault

MAX_LINE_BYTES = 1 << 12
"""Longer than any line between chunks."""


class Unchunker:
    """Decodes a chunked body (Transfer-Encoding) as it arrives, into memory that grows when it must."""

    def __init__(self, memory: bytearray) -> None:
        self._memory = memory
        self._size_bytes = 0
        self._pending = b""
        self._missing_bytes = 0
        self._at_trailers = False

    @property
    def body(self) -> memoryview:
        """The body so far. The memory cannot grow while this view exists."""
        return memoryview(self._memory)[: self._size_bytes]

    def feed(self, data: bytes | memoryview) -> bytes | None:
        """Take more bytes; return those after the end of the body, None before it."""
        view = memoryview(self._pending + bytes(data) if self._pending else data)
        position = 0
        while True:
            if self._missing_bytes:
                chunk = view[position : position + self._missing_bytes]
                self._append(chunk)
                self._missing_bytes -= len(chunk)
                position += len(chunk)
            line_bytes = bytes(view[position : position + MAX_LINE_BYTES]).find(b"\r\n")
            if self._missing_bytes or line_bytes < 0:
                self._pending = bytes(view[position:])
                return None
            line, position = bytes(view[position : position + line_bytes]), position + line_bytes + 2
            if self._at_trailers and not line:
                return bytes(view[position:])
            if line and not self._at_trailers:
                self._missing_bytes = int(line.partition(b";")[0], 16)
                self._at_trailers = self._missing_bytes == 0

    def _append(self, chunk: memoryview) -> None:
        end = self._size_bytes + len(chunk)
        if end > len(self._memory):
            self._memory += bytes(end + end // 2 - len(self._memory))
        with memoryview(self._memory) as memory:
            memory[self._size_bytes : end] = chunk
        self._size_bytes = end


@dataclass(slots=True, kw_only=True)
class IncomingRequest:
    """A request while its body comes in."""

    method: str
    target: str
    headers: dict[str, str]
    fault: Fault | None
    body_bytes: int = 0
    body: memoryview | None = None
    scratch: memoryview | None = None
    """Receives a body that is not kept, or whose size is not known yet."""
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
        """The part after the question mark."""
        return self.target.partition("?")[2]

    @property
    def complete(self) -> bool:
        """True when all of the body has arrived."""
        return self.chunks is None and self.received_bytes >= self.body_bytes

    def hit_by(self, action: str) -> bool:
        """True if a fault with that action hits it."""
        return self.fault is not None and self.fault.action == action
