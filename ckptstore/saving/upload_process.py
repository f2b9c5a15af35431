"""An upload in a process of its own, so that hashing and sending never hold the trainer's interpreter lock.

The trainer starts it as `python -m ckptstore.saving.upload_process` with one socket, hands it staged memory by
descriptors, and gets receipts back. It moves bytes and nothing else: it agrees on nothing and commits nothing.

It ends with the trainer, however that dies: at the end of the socket, or when it has another parent (a fork of the
trainer may hold the socket open). Until then no signal to the group of the trainer ends it: the save that a SIGTERM
announces needs it. It says every second that it is there; one that is silent was stopped, and is killed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.errors import CkptstoreError, InvalidInput, RankFailed, from_wire, to_wire
from ckptstore.runtime.fork import in_forked_child
from ckptstore.saving.staging import Buffer
from ckptstore.storage.base import Storage
from ckptstore.storage.cloud.foreign import seam
from ckptstore.storage.traffic import Traffic, counting, traffic_here
from ckptstore.transfer import Stored, Transfer
from ckptstore.transfer.planned import PlannedFile
from ckptstore.transfer.sources import MemorySource

logger = logging.getLogger("ckptstore")

_DESCRIPTORS_AT_ONCE = 32
_RECEIVED_BYTES = 1 << 20
_SIGN_SECONDS = 1.0
"""How often the process says that it is there, and looks whether the trainer is."""
_SILENT_SECONDS = 60.0
"""How long it may say nothing."""
_START_SECONDS = 300.0
"""How long it may say nothing at first: an interpreter that starts from a network file system takes its time."""
_END_SECONDS = 5.0
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Uploader:
    """The trainer's side. One upload at a time."""

    def __init__(self, storage: Storage, *, config: TransferConfig, retry: RetryConfig, rank: int) -> None:
        """Start the process, and wait until it has the storage.

        Raises InvalidInput for a storage that cannot be handed to another process.
        """
        with seam(lambda error: _not_movable(storage, type(error).__name__)):
            job = base64.b64encode(pickle.dumps((storage, config, retry, rank))).decode()
        self._received = bytearray()
        self._heard_from = False
        self._known: set[int] = set()
        self._socket, theirs = socket.socketpair()
        # Signals that come before the process ignores them stay blocked: a mask is inherited, a handler is not.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "ckptstore.saving.upload_process", str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            self._socket.close()
            raise RankFailed(f"no upload process could be started: {error.strerror}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        in_forked_child(self, Uploader._after_fork)
        try:
            self._send({"job": job, "sys_path": sys.path})
            answer = self._receive()
            if "error" in answer:
                raise from_wire(answer["error"])
            if "refused" in answer:
                raise _not_movable(storage, answer["refused"])
        except BaseException:
            self.close()
            raise

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
                traffic_here().add(Traffic(*answer["traffic"]))
                return [_stored_from_json(fields) for fields in answer["stored"]]
            if "error" in answer:
                raise from_wire(answer["error"])
            beat()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._socket.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()

    def _kill(self) -> None:
        self._process.kill()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # in a call that the system does not break off
            logger.warning("the upload process %d was killed and has not ended", self._process.pid)

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
            self._wait(select.POLLOUT)
            try:
                socket.send_fds(self._socket, [b"F"], descriptors)
            except OSError:
                raise self._gone() from None
            self._receive()
        self._known = there

    def _send(self, message: dict[str, Any]) -> None:
        left = memoryview(json.dumps(message).encode() + b"\n")
        while left:
            self._wait(select.POLLOUT)
            try:
                left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                continue
            except OSError:
                raise self._gone() from None

    def _receive(self) -> dict[str, Any]:
        """The next message that is more than a sign of life."""
        while True:
            line, end, rest = self._received.partition(b"\n")
            if not end:
                self._receive_more()
                continue
            self._received = rest
            message: dict[str, Any] = json.loads(line)
            if message:
                return message

    def _receive_more(self) -> None:
        self._wait(select.POLLIN)
        try:
            data = self._socket.recv(_RECEIVED_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise self._gone()
        self._heard_from = True
        self._received += data

    def _wait(self, event: int) -> None:
        """Until the socket is ready; kill a process that is silent for too long.

        Silence is counted in looks, not by the clock: a trainer that was stopped itself has seen nothing meanwhile.
        """
        if self._socket.fileno() < 0:
            raise self._gone()
        poll = select.poll()
        poll.register(self._socket, event)
        limit_seconds = _SILENT_SECONDS if self._heard_from else _START_SECONDS
        for _ in range(max(1, round(limit_seconds / _SIGN_SECONDS))):
            if poll.poll(_SIGN_SECONDS * 1000):
                return
        self._kill()
        raise RankFailed(
            f"the upload process {self._process.pid} gave no sign of life for {limit_seconds:g} s, and was killed",
            hint="Look for who stopped it; uploader='thread' needs no process",
        )

    def _gone(self) -> CkptstoreError:
        status = self._process.poll()
        return RankFailed(
            f"the upload process {self._process.pid} ended" + (f" with status {status}" if status is not None else ""),
            hint="Look for a kill by the system for want of memory; uploader='thread' needs no process",
        )

    def _after_fork(self) -> None:
        """In a forked child: what is held open here would keep the process alive when the trainer is gone."""
        self._socket.close()
        self._process.returncode = 0  # it is no child of this process


def _not_movable(storage: Storage, why: str) -> InvalidInput:
    return InvalidInput(
        f"The storage at {storage.uri} cannot be handed to an upload process: {why}",
        hint="It must pickle, and its class must be importable there (not from __main__); uploader='thread' needs none",
    )


def main(descriptor: int, trainer: int) -> None:
    """The upload process: take orders from the socket until the trainer is gone."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    connection = socket.socket(fileno=descriptor)
    sending = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        try:
            with sending:
                connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            os._exit(0)  # the trainer is gone: so is every reason to finish

    def show_life() -> None:
        while os.getppid() == trainer:
            if sending.acquire(blocking=False):  # else a message is on its way, and says the same
                try:
                    connection.send(b"{}\n", socket.MSG_DONTWAIT)
                except BlockingIOError:  # the trainer does not listen between two saves
                    pass
                except OSError:
                    break
                finally:
                    sending.release()
            time.sleep(_SIGN_SECONDS)
        os._exit(0)

    # No PR_SET_PDEATHSIG: that is sent when the thread ends that started this process, the thread of one save.
    threading.Thread(target=show_life, daemon=True).start()
    with contextlib.suppress(OSError):  # as the end of the socket is: the trainer is gone
        lines = connection.makefile("rb")
        if first := lines.readline():
            transfer, rank = _open(json.loads(first), send)
            _serve(connection, lines, transfer, rank, send)
    os._exit(0)


def _open(job: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> tuple[Transfer, int]:
    sys.path[:] = job["sys_path"]
    try:
        storage, config, retry, rank = pickle.loads(base64.b64decode(job["job"]))
        transfer = Transfer(storage, config=config, retry=retry, rank=rank)
    except CkptstoreError as error:
        send({"error": error.to_wire()})
    except Exception as error:
        send({"refused": f"it cannot be opened there ({type(error).__name__})"})
    else:
        send({"opened": True})
        return transfer, rank
    os._exit(0)


def _serve(
    connection: socket.socket, lines: Any, transfer: Transfer, rank: int, send: Callable[[dict[str, Any]], None]
) -> None:
    """Do what is asked until the socket ends."""
    buffers: dict[int, memoryview] = {}

    def upload(orders: list[list[Any]]) -> None:
        files = [
            PlannedFile(key, MemorySource((buffers[number][:size_bytes],), payloads=[tuple(item) for item in payloads]))
            for key, number, size_bytes, payloads in orders
        ]
        try:
            with counting() as traffic:
                stored = transfer.upload(files, beat=lambda: send({"beat": True}))
            counted = [traffic.requests, traffic.retries, traffic.written_bytes]
            send({"stored": [_stored_to_json(item) for item in stored], "traffic": counted})
        except Exception as error:
            send({"error": to_wire(error, rank=rank)})

    for line in lines:
        message = json.loads(line)
        if "buffers" in message:
            send({"ready": True})
            sent, descriptors, _, _ = socket.recv_fds(connection, 1, len(message["buffers"]))
            if not sent:
                return
            for (number, size_bytes), shared in zip(message["buffers"], descriptors, strict=True):
                buffers[number] = memoryview(mmap.mmap(shared, size_bytes, prot=mmap.PROT_READ))
                os.close(shared)
            send({"mapped": True})
        elif "forget" in message:
            for number in message["forget"]:
                del buffers[number]
        else:
            threading.Thread(target=upload, args=(message["upload"],), daemon=True).start()


def _stored_to_json(stored: Stored) -> list[Any]:
    blocks = [base64.b64encode(block).decode() for block in stored.block_crcs]
    return [stored.key, stored.size_bytes, stored.crc32c, blocks]


def _stored_from_json(fields: list[Any]) -> Stored:
    key, size_bytes, digest, blocks = fields
    return Stored(key, size_bytes, digest, tuple(base64.b64decode(block) for block in blocks))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
