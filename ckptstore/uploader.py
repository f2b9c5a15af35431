"""An upload in a process of its own, so that hashing and sending never hold the trainer's interpreter lock.

The trainer starts it as `python -m ckptstore.uploader` with one socket, hands it staged memory by descriptors, and gets
receipts back. It moves bytes and nothing else: it agrees on nothing and commits nothing. When the trainer is gone, so
is the socket, and the process ends at once.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.errors import CkptstoreError, RankFailed, from_wire, to_wire
from ckptstore.plan import PlannedFile
from ckptstore.sources import MemorySource
from ckptstore.staging import Buffer
from ckptstore.storage.base import Storage
from ckptstore.transfer import Stored, Transfer

_DESCRIPTORS_AT_ONCE = 32


class Uploader:
    """The trainer's side. One upload at a time."""

    def __init__(self, storage: Storage, *, config: TransferConfig, retry: RetryConfig, rank: int) -> None:
        """Start the process. `storage` must pickle."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ckptstore.uploader", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._socket = ours
        self._lines = ours.makefile("rb")
        self._known: set[int] = set()
        job = base64.b64encode(pickle.dumps((storage, config, retry, rank))).decode()
        self._send({"job": job, "sys_path": sys.path})

    def upload(
        self, files: Sequence[PlannedFile], buffers: Sequence[Buffer], *, beat: Callable[[], None]
    ) -> list[Stored]:
        """Upload staged files; the n-th lies at the beginning of the n-th buffer. Raises what the upload raised."""
        self._share(buffers)
        orders = [
            [file.key, buffer.number, file.source.size_bytes, list(file.source.payloads)]
            for file, buffer in zip(files, buffers, strict=False)
        ]
        self._send({"upload": orders})
        while True:
            answer = self._receive()
            if "stored" in answer:
                return [_stored_from_json(fields) for fields in answer["stored"]]
            if "error" in answer:
                raise from_wire(answer["error"])
            beat()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._lines.close()
        self._socket.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def _share(self, buffers: Sequence[Buffer]) -> None:
        """Hand over the descriptors of buffers that the process does not have, and have it forget those of the past."""
        there = {buffer.number for buffer in buffers}
        if self._known - there:
            self._send({"forget": sorted(self._known - there)})
        fresh = [buffer for buffer in buffers if buffer.number not in self._known]
        for start in range(0, len(fresh), _DESCRIPTORS_AT_ONCE):
            batch = fresh[start : start + _DESCRIPTORS_AT_ONCE]
            self._send({"buffers": [[buffer.number, buffer.size_bytes] for buffer in batch]})
            self._receive()  # it waits for descriptors now, and reads no further
            descriptors = [buffer.descriptor for buffer in batch if buffer.descriptor is not None]
            socket.send_fds(self._socket, [b"F"], descriptors)
            self._receive()
        self._known = there

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._gone() from error

    def _receive(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            raise self._gone()
        message: dict[str, Any] = json.loads(line)
        return message

    def _gone(self) -> CkptstoreError:
        return RankFailed(
            f"the upload process {self._process.pid} ended with status {self._process.poll()}",
            hint="Look for a kill by the system for want of memory; uploader='thread' needs no process",
        )


def main(descriptor: int) -> None:
    """The upload process: take orders from the socket until the trainer closes it."""
    connection = socket.socket(fileno=descriptor)
    lines = connection.makefile("rb")
    job = json.loads(lines.readline())
    sys.path[:] = job["sys_path"]
    storage, config, retry, rank = pickle.loads(base64.b64decode(job["job"]))
    transfer = Transfer(storage, config=config, retry=retry, rank=rank)
    buffers: dict[int, memoryview] = {}

    def send(message: dict[str, Any]) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    def upload(orders: list[list[Any]]) -> None:
        files = [
            PlannedFile(key, MemorySource((buffers[number][:size_bytes],), payloads=[tuple(item) for item in payloads]))
            for key, number, size_bytes, payloads in orders
        ]
        try:
            stored = transfer.upload(files, beat=lambda: send({"beat": True}))
            send({"stored": [_stored_to_json(item) for item in stored]})
        except Exception as error:
            send({"error": to_wire(error, rank=rank)})

    for line in lines:
        message = json.loads(line)
        if "buffers" in message:
            send({"ready": True})
            _, descriptors, _, _ = socket.recv_fds(connection, 1, len(message["buffers"]))
            for (number, size_bytes), shared in zip(message["buffers"], descriptors, strict=True):
                buffers[number] = memoryview(mmap.mmap(shared, size_bytes, prot=mmap.PROT_READ))
                os.close(shared)
            send({"mapped": True})
        elif "forget" in message:
            for number in message["forget"]:
                del buffers[number]
        else:
            threading.Thread(target=upload, args=(message["upload"],), daemon=True).start()
    os._exit(0)  # the trainer is gone: so is every reason to finish


def _stored_to_json(stored: Stored) -> list[Any]:
    blocks = [base64.b64encode(block).decode() for block in stored.block_crcs]
    return [stored.key, stored.size_bytes, stored.crc32c, blocks, stored.version]


def _stored_from_json(fields: list[Any]) -> Stored:
    key, size_bytes, digest, blocks, version = fields
    return Stored(key, size_bytes, digest, tuple(base64.b64decode(block) for block in blocks), version)


if __name__ == "__main__":
    main(int(sys.argv[1]))
