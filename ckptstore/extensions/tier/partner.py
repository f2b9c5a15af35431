"""Second copies: the files that a rank stores on its own disk are sent to the partner node at the same time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ckptstore.errors import CheckpointDamaged, CkptstoreError, RankFailed, StorageUnavailable
from ckptstore.extensions.tier.nodes.fast_place import FastPlace
from ckptstore.extensions.tier.nodes.node_server import NodeClient
from ckptstore.format.digest import Digest
from ckptstore.format.layout import CHECKPOINT_PREFIX, Attempt
from ckptstore.runtime.beat import beat
from ckptstore.transfer import Stored
from ckptstore.transfer.moves import PlannedFile, Upload
from ckptstore.transfer.sources import FileSource

_BLOCK_BYTES = 4 << 20
_NUM_STREAMS = 2
"""The number of files that a rank sends at once. Each takes a part of memory on the other node."""
_BEAT_SECONDS = 0.5


def doubled_upload(place: FastPlace, own: Upload, files: Sequence[PlannedFile]) -> list[Stored]:
    """Do an upload to the disk of this node, and return when the partner has equal, durable copies of the files.

    The tier has `copies=2`, so there is a partner. It takes two blocks of memory in addition to those of the upload.
    Raises the errors of the upload, StorageError and its subclasses for the errors of the partner, CheckpointDamaged
    when a copy differs.
    """
    partner = place.partner()
    sending = _Sending(partner, files, algorithm=place.transfer.algorithm)
    try:
        stored = own(files)
        copies = sending.result()
    except BaseException:
        sending.give_up()
        raise
    for file, copied in zip(stored, copies, strict=True):
        if copied != file.digest:
            text = f"The copy of {file.key} on {partner.node} has {copied.shown}, the file has {file.digest.hex}"
            raise CheckpointDamaged(text, file=file.key)
    return stored


def copy_to_partner(place: FastPlace, attempt: Attempt, digests: dict[str, Digest]) -> None:
    """Send files that already lie on the disk of this node to the partner. `digests` has their digests by name."""
    storage = place.disk.storage
    keys = [attempt.key(name) for name in digests]
    files = [
        PlannedFile(key, FileSource.of(storage.local_path(key)), digest.algorithm)
        for key, digest in zip(keys, digests.values(), strict=True)
    ]

    def stored(files: Sequence[PlannedFile]) -> list[Stored]:
        found = zip(files, digests.values(), strict=True)
        return [Stored(file.key, file.source.size_bytes, digest) for file, digest in found]

    doubled_upload(place, stored, files)


class _Sending:
    """Files on their way to another node, on threads of their own.

    While one file waits for the disk of the other node, another is on the line.
    """

    def __init__(self, client: NodeClient, files: Sequence[PlannedFile], *, algorithm: str) -> None:
        """`algorithm` is the digest algorithm of files that name none."""
        self._client, self._files, self._algorithm = client, files, algorithm
        self._digests: dict[int, Digest] = {}
        self._left = iter(enumerate(files))
        self._error: BaseException | None = None
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name="ckptstore-partner", daemon=True)
            for _ in range(min(_NUM_STREAMS, len(files)))
        ]
        for thread in self._threads:
            thread.start()

    def result(self) -> list[Digest]:
        """Wait for all files, and return the digest of each copy as the partner computed it."""
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_BEAT_SECONDS)
                beat()
        if isinstance(self._error, CkptstoreError):
            raise self._error
        if self._error is not None:
            raise RankFailed(f"{type(self._error).__name__}: {self._error}") from self._error
        if len(self._digests) < len(self._files):
            raise StorageUnavailable(f"Nobody wants these files on {self._client.node} any more")
        return [self._digests[number] for number in range(len(self._files))]

    def give_up(self) -> None:
        """Give the files up. Returns when no source is read any more."""
        self._end()
        for thread in self._threads:
            thread.join()

    def _end(self) -> None:
        self._given_up.set()
        self._client.interrupt()

    def _run(self) -> None:
        scratch = memoryview(bytearray(_BLOCK_BYTES))
        try:
            while (found := self._next()) is not None:
                number, file = found
                attempt, name = _named(file.key)
                self._digests[number] = self._client.write(
                    attempt,
                    name,
                    file.source,
                    scratch,
                    algorithm=file.algorithm or self._algorithm,
                    given_up=self._given_up,
                )
        except BaseException as error:
            with self._lock:
                self._error = self._error or error  # errors of the other threads follow from it
            self._end()

    def _next(self) -> tuple[int, PlannedFile] | None:
        with self._lock:
            return None if self._given_up.is_set() else next(self._left, None)


def _named(key: str) -> tuple[Attempt, str]:
    """Return the attempt of a key, and the name of the file in it."""
    attempt_name, _, name = key.removeprefix(CHECKPOINT_PREFIX).partition("/")
    return Attempt.of(attempt_name), name
