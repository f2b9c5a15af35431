"""Speak HTTP/1.1 on one socket. A body is received straight into the memory of its object and sent straight from it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import struct
import time
from collections.abc import Callable, Sequence
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import TypeVar, cast
from urllib.parse import parse_qsl

from ckptstore.testing.s3 import checksums, control, listing
from ckptstore.testing.s3.incoming import IncomingRequest, Unchunker
from ckptstore.testing.s3.messages import Answer, HttpRequest
from ckptstore.testing.s3.objects import LoggedRequest, S3Error, memory_for, new_id
from ckptstore.testing.s3.rules import Fault
from ckptstore.testing.s3.shared import Shared

_HEAD_BYTES = 1 << 16
_SMALL_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 18
_ABSOLUTE = re.compile("^http://[^/]*")
"""The part that some clients (the AWS SDK for C++) put before the path; RFC 9112, 3.2.2, has every server accept it."""
_NO_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)

_log = logging.getLogger(__name__)

T = TypeVar("T")


class ClientConnection(asyncio.BufferedProtocol):
    """One client's connection."""

    def __init__(self, shared: Shared, loop: asyncio.AbstractEventLoop) -> None:
        self._shared = shared
        self._loop = loop
        self._head = bytearray(_HEAD_BYTES)
        self._chunked = bytearray()
        self._head_view = memoryview(self._head)
        self._head_bytes = 0
        self._current: IncomingRequest | None = None
        self._answering: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._broken = False

    # Called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has another base class
        self._shared.transports.add(self._transport)
        self._transport.set_write_buffer_limits(high=1 << 20)
        with contextlib.suppress(OSError):
            self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._broken = True
        self._shared.transports.discard(self._transport)
        self._writable.set()
        self._finish(status=0, sent_bytes=0)
        if self._answering is not None:
            self._answering.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        request = self._current
        if request is None or request.complete:
            return self._head_view[self._head_bytes :]
        if request.scratch is not None:
            left = len(request.scratch) if request.chunks else request.body_bytes - request.received_bytes
            return request.scratch[:left]
        assert request.body is not None
        return request.body[request.received_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        request = self._current
        if request is None or request.complete:
            self._head_bytes += nbytes
            if request is None:
                self._read_head()
        elif request.chunks is not None:
            assert request.scratch is not None
            self._feed_chunks(request, request.scratch[:nbytes])
        else:
            self._received(request, nbytes)

    # A request comes in

    def _read_head(self) -> None:
        end = self._head.find(b"\r\n\r\n", 0, self._head_bytes)
        if end < 0:
            if self._head_bytes >= _HEAD_BYTES:
                self._reset()
            return
        first, *lines = self._head[:end].decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        target = _ABSOLUTE.sub("", target)
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        is_control = target.startswith(control.PREFIX)
        fault = None if is_control else self._shared.faults.pick(f"{method} {target}")
        request = IncomingRequest(method=method, target=target, headers=headers, fault=fault)
        request.body_bytes = int(headers.get("content-length", 0))
        self._current = request
        self._shared.in_flight += 1
        self._shared.most_in_flight = max(self._shared.most_in_flight, self._shared.in_flight)
        if fault is not None and fault.action == "reset" and not fault.after_bytes:
            self._reset()
            return
        self._begin_body(request, end + 4)

    def _begin_body(self, request: IncomingRequest, start: int) -> None:
        arrived = bytes(self._head_view[start : self._head_bytes])
        if "chunked" in request.headers.get("transfer-encoding", ""):
            request.chunks, request.scratch = Unchunker(self._body_memory()), memoryview(bytearray(_CHUNK_BYTES))
            self._head_bytes = 0
            self._continue(request)
            self._feed_chunks(request, arrived)
            return
        mine, rest = arrived[: request.body_bytes], arrived[request.body_bytes :]
        self._head[: len(rest)] = rest
        self._head_bytes = len(rest)
        if self._keeps_body(request, request.body_bytes):
            request.body = memory_for(request.body_bytes)
            request.body[: len(mine)] = mine
        else:
            request.scratch = memoryview(bytearray(1 << 20))
        if len(mine) < request.body_bytes:
            self._continue(request)
        self._received(request, len(mine))

    def _keeps_body(self, request: IncomingRequest, size_bytes: int) -> bool:
        return self._shared.keep_bodies or request.method != "PUT" or size_bytes <= _SMALL_BYTES

    def _continue(self, request: IncomingRequest) -> None:
        if request.headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _body_memory(self) -> bytearray:
        """Return memory for a body of unknown size; the same for all of them if bodies are not kept."""
        if self._shared.keep_bodies:
            return bytearray()
        return self._chunked

    def _feed_chunks(self, request: IncomingRequest, data: bytes | memoryview) -> None:
        assert request.chunks is not None
        rest = request.chunks.feed(data)
        if rest is None:
            return
        request.body = request.chunks.body
        request.body_bytes = len(request.body)
        request.chunks = request.scratch = None
        self._head[: len(rest)] = rest
        self._head_bytes = len(rest)
        self._received(request, request.body_bytes)

    def _received(self, request: IncomingRequest, count: int) -> None:
        request.received_bytes += count
        fault = request.fault
        if fault is not None and fault.action == "reset" and request.received_bytes >= fault.after_bytes:
            self._reset()
        elif count and (wait_seconds := self._seconds_of(request, count)) > 0:
            self._transport.pause_reading()
            self._loop.call_later(wait_seconds, self._resume, request)
        elif request.complete:
            self._answer(request)

    def _seconds_of(self, request: IncomingRequest, count: int) -> float:
        """Return the travel time of the bytes that have come."""
        if request.hit_by("bandwidth"):
            assert request.fault is not None
            return count / request.fault.bytes_per_second
        return 0.0 if request.target.startswith(control.PREFIX) else self._shared.link.wait_seconds("in", count)

    def _resume(self, request: IncomingRequest) -> None:
        if not self._broken:
            self._transport.resume_reading()
            if request.complete:
                self._answer(request)

    # An answer goes out

    def _answer(self, request: IncomingRequest) -> None:
        self._answering = self._loop.create_task(self._answer_to(request))

    async def _answer_to(self, request: IncomingRequest) -> None:
        fault, latency_seconds = request.fault, self._shared.link.latency_seconds
        if latency_seconds and not request.target.startswith(control.PREFIX):
            await asyncio.sleep(latency_seconds)
        if fault is not None and fault.action == "delay":
            await asyncio.sleep(fault.seconds or 0.0)
        if fault is not None and fault.action == "stall":
            await asyncio.sleep(1e6 if fault.seconds is None else fault.seconds)
        answer = await self._outcome(request)
        sent_bytes = 0 if request.method == "HEAD" else answer.size_bytes
        self._finish(status=answer.status, sent_bytes=sent_bytes)
        if self._broken:
            return
        if request.hit_by("lose_answer"):
            self._reset()
            return
        await self._send(request, answer)
        self._current = self._answering = None
        if self._head_bytes and not self._broken:
            self._read_head()

    async def _outcome(self, request: IncomingRequest) -> Answer:
        try:
            if request.target.startswith(control.PREFIX):
                return control.answer(self._shared, request.path, request.body)
            if request.fault is not None and request.fault.action == "status":
                raise S3Error(request.fault.status, request.fault.code, "Injected")
            whole = await self._checked(request)
            try:
                return self._shared.service.answer(whole)
            finally:
                request.operation = whole.operation
        except S3Error as error:
            body = b"" if error.status in _NO_BODY else listing.error_document(error, request.path)
            return Answer.of(body, status=error.status)
        except Exception as error:
            _log.exception("%s %s", request.method, request.target)
            return Answer.of(listing.error_document(S3Error(500, "InternalError", repr(error)), ""), status=500)

    async def _checked(self, request: IncomingRequest) -> HttpRequest:
        """Return the request with its body decoded and compared with its digests."""
        body, headers = request.body, request.headers
        if body is not None and checksums.is_aws_chunked(headers):
            body, trailers = checksums.decode_aws_chunked(body)
            headers = {**headers, **trailers}
        carried = await self._off_loop(request, lambda: checksums.carried(headers, body, verify=self._shared.verify))
        etag = ""
        if self._shared.md5_etags and body is not None and request.method == "PUT":
            etag = (await self._off_loop(request, partial(checksums.digest, "md5", [body]))).hex()
        body_bytes = request.body_bytes if body is None else len(body)
        if not self._keeps_body(request, body_bytes):
            request.body = body = None
        elif body is not None and not self._shared.keep_bodies:  # the connection's memory is used again
            request.body = body = memoryview(bytes(body))
        return HttpRequest(
            method=request.method,
            path=request.path,
            query=dict(parse_qsl(request.query, keep_blank_values=True)),
            headers=headers,
            body=body,
            body_bytes=body_bytes,
            etag=etag,
            checksums=carried,
        )

    async def _off_loop(self, request: IncomingRequest, work: Callable[[], T]) -> T:
        """Digest large bodies on another thread, so that other connections continue."""
        if request.body_bytes < _CHUNK_BYTES:
            return work()
        return await self._loop.run_in_executor(None, work)

    async def _send(self, request: IncomingRequest, answer: Answer) -> None:
        status = HTTPStatus(answer.status)
        headers = {
            **answer.headers,
            "x-amz-request-id": new_id()[:16].upper(),
            "server": "ckptstore-testing",
            "date": formatdate(self._shared.service.now(), usegmt=True),
        }
        if status not in _NO_BODY:
            headers["content-length"] = str(answer.size_bytes)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {answer.status} {status.phrase}\r\n{lines}\r\n".encode("latin-1")
        pieces = () if request.method == "HEAD" or status in _NO_BODY else answer.pieces
        fault = request.fault
        if fault is not None and fault.action in ("truncate", "corrupt", "bandwidth"):
            self._transport.write(head)
            await self._send_faulty(pieces, fault)
        elif answer.size_bytes <= _SMALL_BYTES:
            self._transport.write(head + b"".join(pieces))
        else:
            self._transport.write(head)
            for piece in pieces:
                await self._send_piece(request, piece)

    async def _send_piece(self, request: IncomingRequest, piece: bytes | memoryview) -> None:
        """Send a part of a large body, no faster than the line."""
        link = self._shared.link
        if link.bytes_per_second is None or request.target.startswith(control.PREFIX):
            await self._write(piece)
            return
        view = memoryview(piece)
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            await asyncio.sleep(link.wait_seconds("out", len(chunk)))
            await self._write(chunk)

    async def _send_faulty(self, pieces: Sequence[bytes | memoryview], fault: Fault) -> None:
        sent_bytes = 0
        for piece in pieces:
            for start in range(0, len(piece), _SMALL_BYTES):
                chunk = bytes(piece[start : start + _SMALL_BYTES])
                if fault.action == "corrupt" and not sent_bytes:
                    chunk = bytes([chunk[0] ^ 1]) + chunk[1:]
                if fault.action == "truncate" and sent_bytes + len(chunk) >= fault.after_bytes:
                    await self._write(chunk[: fault.after_bytes - sent_bytes])
                    await asyncio.sleep(0.02)  # a reset may overtake bytes that are still in the socket's buffer
                    self._reset()
                    return
                await self._write(chunk)
                sent_bytes += len(chunk)
                if fault.action == "bandwidth":
                    await asyncio.sleep(len(chunk) / fault.bytes_per_second)

    async def _write(self, data: bytes | memoryview) -> None:
        await self._writable.wait()
        if not self._broken:
            self._transport.write(data)
            await self._writable.wait()

    def _finish(self, *, status: int, sent_bytes: int) -> None:
        """Log the current request, once, also when it was cut off."""
        request = self._current
        if request is None or request.started < 0:
            return
        self._shared.in_flight -= 1
        if not request.target.startswith(control.PREFIX):
            self._shared.log.append(
                LoggedRequest(
                    operation=request.operation,
                    method=request.method,
                    path=request.path,
                    query=request.query,
                    status=status,
                    received_bytes=request.received_bytes,
                    sent_bytes=sent_bytes,
                    started=request.started,
                    ended=time.time(),
                    fault=request.fault.action if request.fault else "",
                )
            )
        request.started = -1.0

    def _reset(self) -> None:
        """Break the connection so that the client sees a reset, not an end."""
        with contextlib.suppress(OSError):
            linger = struct.pack("ii", 1, 0)
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._broken = True
        self._transport.abort()
