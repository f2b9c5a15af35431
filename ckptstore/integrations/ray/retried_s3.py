"""Wrap the S3 of pyarrow with our retries, for `RunConfig(storage_filesystem=...)`: `ckptstore.ray.s3_filesystem`.

Ray writes a snapshot of its own after each report, and ends the run when that fails. pyarrow tries a request three
times within about three seconds, and forgets a given policy when it travels to another process. So Ray's requests go
through a handler that repeats them, and that travels with its policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from pyarrow import ArrowException, PythonFile
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileSystemHandler, PyFileSystem, S3FileSystem

from ckptstore.config import RetryConfig
from ckptstore.errors import InvalidInput, StorageError, StorageUnavailable
from ckptstore.integrations.ray.filesystem import RETRIED_S3
from ckptstore.storage.retry import retrying

T = TypeVar("T")

HELD_BYTES = 8 << 20
"""A file up to this size is held until it is closed, and stored by one request that can be repeated. Below the 10 MiB
of pyarrow's parts, so that nothing is sent before the end.
"""

_AWS = re.compile(r"AWS Error (\w+)(?: \(HTTP status (\d+)\))? during")
_RETRYABLE_NAMES = frozenset(
    [
        "INTERNAL_FAILURE",
        "NETWORK_CONNECTION",
        "REQUEST_TIMEOUT",
        "REQUEST_TIME_TOO_SKEWED",
        "SERVICE_UNAVAILABLE",
        "SLOW_DOWN",
        "THROTTLING",
    ]
)
_RETRYABLE_STATUSES = frozenset([408, 429, 500, 502, 503, 504])


def s3_filesystem(place: str | S3FileSystem, *, retry: RetryConfig | None = None) -> PyFileSystem:
    """Return an S3 file system for `RunConfig(storage_filesystem=...)` that repeats requests while S3 has trouble.

    It serves all requests of Ray itself: the snapshot after each report, listings, deletions, uploads and downloads.
    ckptstore's own requests have these retries anyway. As with every `storage_filesystem`, Ray then wants
    `storage_path` without scheme and query: "bucket/runs".

    Requests are repeated if doing them twice has the same outcome. A file of more than 8 MiB is sent in parts while it
    is written; its parts have pyarrow's own three tries. Moves and appends are not repeated. No request holds a file's
    content that is not complete: a snapshot exists as a whole, or as it was.

    Args:
        place: "s3://bucket", with the query that pyarrow knows (`?region=...&endpoint_override=...`); a path in it is
            ignored. Or an S3FileSystem of pyarrow, whose settings are taken over, but for `retry_strategy`,
            which pyarrow loses anyway.
        retry: how often and for how long; by default as the environment of this process says: 25 tries within
            200 seconds.

    The file system raises pyarrow's errors, and StorageUnavailable, an OSError with the path in it, when the tries are
    used up. Raises InvalidInput for a place that is not on S3: pyarrow's GCS and Azure have retries of minutes.
    """
    config = RetryConfig.from_env() if retry is None else retry
    system = _opened(place, config) if isinstance(place, str) else place
    if not isinstance(system, S3FileSystem):
        hint = "Leave storage_filesystem out: pyarrow's own retries last for minutes with GCS and Azure"
        raise InvalidInput(f"ckptstore.ray.s3_filesystem is for S3, not for a {type(system).__name__}", hint=hint)
    make, (settings,) = system.__reduce__()
    # Not in the background: a thread of pyarrow's that copies would wait for others, which all wait too.
    return PyFileSystem(Retried(make({**settings, "background_writes": False, "allow_delayed_open": True}), config))


def _opened(uri: str, config: RetryConfig) -> FileSystem:
    shown = re.sub(r"//[^/]*@", "//", uri.partition("?")[0])
    if not uri.startswith("s3://"):
        raise InvalidInput(f"{shown!r} is not on S3", hint="Leave storage_filesystem out, and give it as storage_path")
    try:
        return _retried(config, "find the region of", shown, lambda: FileSystem.from_uri(uri)[0])
    except (ArrowException, ValueError) as error:
        reason = str(error).replace(uri, shown)
        raise InvalidInput(f"pyarrow cannot open {shown!r}: {reason}") from None


def _retried(config: RetryConfig, what: str, path: str, request: Callable[[], T]) -> T:
    """Return the result of a request, with retries. Raises pyarrow's error if no retry can help."""

    def once() -> T:
        try:
            return request()
        except OSError as error:
            if isinstance(error, StorageError) or not _is_retryable(error):
                raise
            # Not in pyarrow's words, after which Ray would repeat a whole upload that had all its tries here.
            reason = str(error).replace("AWS Error ", "S3's error ")
            raise StorageUnavailable(f"cannot {what} {path}: {reason}") from error

    return retrying(config, f"{what} {path}", once)


def _is_retryable(error: OSError) -> bool:
    found = _AWS.search(str(error))
    if found is None:
        return False
    name, status = found.groups()
    return name in _RETRYABLE_NAMES or (status is not None and int(status) in _RETRYABLE_STATUSES)


class Retried(FileSystemHandler):  # type: ignore[misc]
    """Passes requests to `inner`, repeatedly where that is safe. Equal if settings and policy are equal."""

    def __init__(self, inner: S3FileSystem, config: RetryConfig) -> None:
        self.inner = inner
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Retried) and self.inner == other.inner and self.config == other.config

    def __hash__(self) -> int:
        return hash(self.config)

    def get_type_name(self) -> str:
        return RETRIED_S3

    def normalize_path(self, path: str) -> str:
        return str(self.inner.normalize_path(path))

    def get_file_info(self, paths: Sequence[str]) -> list[FileInfo]:
        return self._request("look at", ", ".join(paths), lambda: self.inner.get_file_info(paths))

    def get_file_info_selector(self, selector: FileSelector) -> list[FileInfo]:
        return self._request("list", selector.base_dir, lambda: self.inner.get_file_info(selector))

    def create_dir(self, path: str, recursive: bool) -> None:
        self._request("create", path, lambda: self.inner.create_dir(path, recursive=recursive))

    def delete_dir(self, path: str) -> None:
        self._gone("delete", path, lambda: self.inner.delete_dir(path))

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        delete = partial(self.inner.delete_dir_contents, path, missing_dir_ok=missing_dir_ok)
        self._gone("empty", path, delete)

    def delete_root_dir_contents(self) -> None:
        self.inner.delete_dir_contents("/", accept_root_dir=True)

    def delete_file(self, path: str) -> None:
        self._gone("delete", path, lambda: self.inner.delete_file(path))

    def move(self, src: str, dest: str) -> None:
        self.inner.move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        self._request("copy to", dest, lambda: self.inner.copy_file(src, dest))

    def open_input_stream(self, path: str) -> PythonFile:
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> PythonFile:
        return PythonFile(_Reading(self, path), mode="r")

    def open_output_stream(self, path: str, metadata: Mapping[str, str] | None) -> PythonFile:
        return PythonFile(_Writing(self, path, metadata), mode="w")

    def open_append_stream(self, path: str, metadata: Mapping[str, str] | None) -> Any:
        return self.inner.open_append_stream(path, metadata=metadata)

    def _request(self, what: str, path: str, request: Callable[[], T]) -> T:
        return _retried(self.config, what, path, request)

    def _gone(self, what: str, path: str, delete: Callable[[], None]) -> None:
        """Delete. A file missing at a second try was deleted by the first one, whose reply was lost."""
        tries: list[None] = []

        def once() -> None:
            tries.append(None)
            with suppress(*([FileNotFoundError] if len(tries) > 1 else [])):
                delete()

        self._request(what, path, once)


class _Reading:
    """A file that is read; each range is requested until it arrives."""

    def __init__(self, system: Retried, path: str) -> None:
        self._request = partial(system._request, "read", path)
        self._file = self._request(lambda: system.inner.open_input_file(path))
        self._size = int(self._file.size())
        self._offset = 0

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def read(self, count: int | None = None) -> bytes:
        left = max(0, self._size - self._offset)
        count = left if count is None or count < 0 else min(count, left)
        found = bytes(self._request(lambda: self._file.read_at(count, self._offset)))
        self._offset += len(found)
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        self._offset = offset + (0, self._offset, self._size)[whence]
        return self._offset

    def tell(self) -> int:
        return self._offset

    def close(self) -> None:
        self._file.close()


class _Writing:
    """A file that is written: held until its end if it is small, else sent in parts."""

    def __init__(self, system: Retried, path: str, metadata: Mapping[str, str] | None) -> None:
        self._request = partial(system._request, "write", path)
        self._open = partial(system.inner.open_output_stream, path, metadata=metadata)
        self._held = bytearray()
        self._parts: Any = None
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self._parts is None and len(self._held) + view.nbytes > HELD_BYTES:
            self._parts = self._request(self._open)
            self._parts.write(self._held)
            self._held.clear()
        if self._parts is None:
            self._held += view
        else:
            self._parts.write(view)
        return view.nbytes

    def flush(self) -> None:
        """Do nothing: a file on S3 does not exist before its end."""

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._parts is None:
            self._request(self._store)
        else:
            self._parts.close()

    def _store(self) -> None:
        with self._open() as file:
            file.write(self._held)
