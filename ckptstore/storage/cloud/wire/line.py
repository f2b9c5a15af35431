"""Move bytes between memory and a server, with TLS or without, in as few system calls as possible.

Without TLS the kernel takes the views of a body in one call, and fills memory in one call.

With TLS, `ssl.SSLSocket` would make one call to the kernel for each record of 16 KiB that it sends, and two for each
that it receives. So OpenSSL works on memory instead (`ssl.MemoryBIO`), and the socket moves many records at once.
Its timeouts, its end and what the server sent before it stay those of a plain socket.
"""

from __future__ import annotations

import math
import os
import socket
import ssl
import struct
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from ckptstore.errors import InvalidInput

_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_MAX_VIEWS = 512
"""The most views in one call; Linux takes 1,024."""
_STEP_BYTES = 128 << 10
"""The bytes that go through OpenSSL between two calls on the socket: eight records, which stay in the cache of a core
while they are copied, encrypted and copied to the kernel."""


def trusting(bundle: str | Literal[False]) -> ssl.SSLContext:
    """Return a context that trusts the certificates in a file or a directory of them, with False all certificates.
    Raises InvalidInput for a file that cannot be used."""
    # Not `create_default_context`: from Python 3.13 on it refuses authorities that break a rule of RFC 5280, as many
    # private ones do, and it writes the keys of sessions into a file that a variable names.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["http/1.1"])
    if not bundle:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    try:
        context.load_verify_locations(**{"capath" if os.path.isdir(bundle) else "cafile": bundle})
    except OSError as error:
        what = f"The file of trusted certificates cannot be used: {bundle}"
        raise InvalidInput(what, hint="`ckptstore doctor` says which setting names it") from error
    return context


class Line:
    """A connection whose socket blocks, with timeouts that the kernel keeps."""

    def __init__(self, connected: socket.socket, read_seconds: float | None) -> None:
        """Take a connected socket. `read_seconds` is the longest time that it may stand still, None for no limit."""
        self._socket = connected
        # Who drops an answer unread need not close it. A finalizer comes before those of the socket in a cycle.
        self._end = weakref.finalize(self, connected.close)
        self._end.atexit = False
        connected.settimeout(None)
        fraction, seconds = math.modf(read_seconds or 0.0)  # 0 waits for ever
        wait = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)

    def send_all(self, views: Sequence[memoryview]) -> None:
        """Send all bytes of the views. Raises TimeoutError if the server takes none any more."""
        pending = [view for view in views if len(view)]
        first = 0
        while first < len(pending):
            try:
                count = self._socket.sendmsg(pending[first : first + _MAX_VIEWS])
            except BlockingIOError:
                raise TimeoutError("the server takes nothing any more") from None
            while count:
                size_bytes = len(pending[first])
                if count < size_bytes:
                    pending[first] = pending[first][count:]
                    break
                count, first = count - size_bytes, first + 1

    def recv_into(self, view: memoryview, *, whole: bool) -> int:
        """Receive bytes into a view, and return their number: 0 at the end of the connection. With `whole` fewer bytes
        than the view has come only at that end. Raises TimeoutError if the server sends none any more."""
        try:
            return self._socket.recv_into(view, 0, socket.MSG_WAITALL if whole else 0)
        except BlockingIOError:
            raise TimeoutError("the server sends nothing any more") from None

    def is_alive(self) -> bool:
        """Return True if nothing has come unrequested, such as the end of the connection."""
        try:
            self._socket.recv(1, _PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """End the connection, also for a response that is still being read."""
        self._end()


class TlsLine(Line):
    """A connection with TLS. A stream that ends without TLS' own end is an error: somebody may have cut it."""

    def __init__(
        self, connected: socket.socket, read_seconds: float | None, *, context: ssl.SSLContext, host: str
    ) -> None:
        """Take a connected socket, and agree on keys with `host`, with the timeout that the socket has. Raises
        ssl.SSLError, and SSLCertVerificationError for a certificate that the context does not trust."""
        self._socket = connected
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._arrived = memoryview(bytearray(_STEP_BYTES))
        self._agree()
        super().__init__(connected, read_seconds)

    def send_all(self, views: Sequence[memoryview]) -> None:
        for view in views:
            for start in range(0, len(view), _STEP_BYTES):
                step = view[start : start + _STEP_BYTES]
                while step:
                    try:
                        step = step[self._tls.write(step) :]
                    except ssl.SSLWantReadError:  # TLS 1.2 may want new keys
                        self._receive()
                if self._outgoing.pending >= _STEP_BYTES:
                    self._flush()
        self._flush()

    def recv_into(self, view: memoryview, *, whole: bool) -> int:
        filled_bytes = 0
        while filled_bytes < len(view):
            try:
                count: int = self._tls.read(len(view) - filled_bytes, view[filled_bytes:])  # type: ignore[assignment]
            except ssl.SSLWantReadError:
                self._flush()  # the server may wait for new keys
                self._receive()
                continue
            filled_bytes += count
            if not (count and whole):
                break
        return filled_bytes

    def is_alive(self) -> bool:
        # Bytes that have come may be keys for later connections, which say nothing.
        try:
            while count := self._socket.recv_into(self._arrived, 0, socket.MSG_DONTWAIT):
                self._incoming.write(self._arrived[:count])
        except BlockingIOError:
            try:
                self._tls.read(1)
            except ssl.SSLWantReadError:
                return True
            except OSError:
                pass
        except OSError:
            pass
        return False

    def _agree(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._receive()
            except ssl.SSLError:
                with suppress(OSError):
                    self._flush()  # the server learns the reason
                raise
        self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending:
            super().send_all([memoryview(self._outgoing.read())])

    def _receive(self) -> None:
        count = super().recv_into(self._arrived, whole=False)
        if not count:
            raise ConnectionResetError("the connection ended, and TLS did not")
        self._incoming.write(self._arrived[:count])
