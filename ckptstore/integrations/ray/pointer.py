"""The pointer: the small file in Ray's directory of a checkpoint that stands for a checkpoint in a store.

Ray registers, ranks and deletes pointers. Their checkpoints are the store's, which deletes by its own retention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.config import RetryConfig
from ckptstore.errors import AccessDenied, CheckpointDamaged, FileMissing, InvalidInput, StorageUnavailable
from ckptstore.format.encoding import FORMAT_VERSION, as_number, as_text, dump_json, load_object
from ckptstore.format.layout import check_step
from ckptstore.integrations.ray.context import Worker
from ckptstore.integrations.ray.filesystem import StoragePlace, is_on_s3, place_of
from ckptstore.integrations.ray.ray_snapshot import ROOT_NAME
from ckptstore.storage.retry import retrying

POINTER_NAME = "ckptstore-pointer.json"


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """The contents of the file."""

    root: str
    """The root of the store, without secrets: a URI or a path; relative to the run's directory if inside it."""
    step: int
    number: int | None
    """The number of the record that committed the checkpoint. None when the save failed and there is no checkpoint."""
    attempt: str = ""
    error: str = ""
    """The error of a failed save."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that this version does not know; preserved."""

    @staticmethod
    def to(checkpoint: Checkpoint, *, root: str) -> Pointer:
        """Create the pointer to a committed checkpoint of a store."""
        attempt = checkpoint.uri.rpartition("/")[2]
        return Pointer(root=root, step=checkpoint.step, number=checkpoint.number, attempt=attempt)

    def encode(self) -> bytes:
        """Return the pointer as bytes."""
        known = {"about": self._about(), "root": self.root, "step": self.step, "number": self.number}
        state = {"attempt": self.attempt} if self.number is not None else {"error": self.error}
        return dump_json({**self.extra, "version": FORMAT_VERSION, **known, **state}, what=POINTER_NAME)

    def _about(self) -> str:
        """Return the sentence for whoever finds the file."""
        if self.number is None:
            return f"The save of step {self.step} failed, and there is no checkpoint."
        root = f"{ROOT_NAME} beside this directory" if self.root == ROOT_NAME else self.root
        command = f"ckptstore show {f'../{ROOT_NAME}' if self.root == ROOT_NAME else self.root}@{self.step}"
        return (
            f"The checkpoint of step {self.step} is in the store {root}: in Python "
            f"ckptstore.ray.resolve(result.checkpoint) opens it, in a shell `{command}` shows it."
        )

    @staticmethod
    def decode(data: bytes, *, file: str = POINTER_NAME) -> Pointer:
        """Read a pointer. Raises CheckpointDamaged when it is none, UnsupportedVersion when it is from a newer one."""
        value = load_object(data, file=file)
        value.pop("version")
        value.pop("about", None)
        try:
            root, step, number = as_text(value.pop("root")), check_step(value.pop("step")), value.pop("number")
            number = None if number is None else as_number(number, 1)
            attempt, error = (as_text(value.pop(name, "")) for name in ("attempt", "error"))
            if not root:
                raise ValueError("its root is empty")
        except (KeyError, ValueError) as wrong:
            raise CheckpointDamaged(f"{file} does not say where the checkpoint lies: {wrong}", file=file) from None
        return Pointer(root=root, step=step, number=number, attempt=attempt, error=error, extra=value)


def write_pointer(worker: Worker, directory_name: str, pointer: Pointer, *, retry: RetryConfig) -> None:
    """Write a pointer into a checkpoint directory of Ray's. May be repeated: the same bytes, the same place."""
    directory = worker.path_of(directory_name)
    path, data = f"{directory}/{POINTER_NAME}", pointer.encode()

    def write() -> None:
        with _translated(f"Writing {path}"):
            if not is_on_s3(worker.filesystem):  # on S3 creating a directory only costs requests
                worker.filesystem.create_dir(directory)
            with worker.filesystem.open_output_stream(path) as stream:
                stream.write(data)

    retrying(retry, f"write {path}", write)


def read_pointer(ray_checkpoint: Any, *, retry: RetryConfig) -> Pointer:
    """Return the pointer in a checkpoint of Ray's. Raises InvalidInput without one, FileMissing when it is gone."""
    path = f"{ray_checkpoint.path.rstrip('/')}/{POINTER_NAME}"

    def read() -> bytes:
        with _translated(f"Reading {path}"), ray_checkpoint.filesystem.open_input_stream(path) as stream:
            return bytes(stream.read())

    try:
        return Pointer.decode(retrying(retry, f"read {path}", read), file=path)
    except FileMissing:
        from pyarrow.fs import FileType

        if ray_checkpoint.filesystem.get_file_info(ray_checkpoint.path).type != FileType.NotFound:
            raise InvalidInput(
                f"{ray_checkpoint.path} holds no pointer to a checkpoint of a store",
                hint="What was reported with its files opens with ckptstore.ray.wrap",
            ) from None
        raise


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Translate errors of pyarrow, which are the system's, into those of ckptstore."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileMissing(f"{doing} failed: {error}", file=POINTER_NAME) from error
    except PermissionError as error:
        raise AccessDenied(f"{doing} failed: {error}", file=POINTER_NAME) from error
    except OSError as error:
        cls = AccessDenied if "ACCESS_DENIED" in str(error) else StorageUnavailable  # S3's, in the text alone
        raise cls(f"{doing} failed: {error}", file=POINTER_NAME) from error


def pointed_place(ray_checkpoint: Any, pointer: Pointer, storage_options: Mapping[str, Any] | None) -> StoragePlace:
    """Return the place of the store that a pointer names; in the run's directory as Ray's file system reaches it."""
    if pointer.root != ROOT_NAME:
        return StoragePlace(pointer.root, storage_options)
    run_path = ray_checkpoint.path.rstrip("/").rpartition("/")[0]
    return place_of(ray_checkpoint.filesystem, f"{run_path}/{ROOT_NAME}", storage_options=storage_options)


def has_pointer(ray_checkpoint: Any) -> bool:
    """True if a checkpoint of Ray's is a pointer."""
    from pyarrow.fs import FileType

    path = f"{ray_checkpoint.path.rstrip('/')}/{POINTER_NAME}"
    with _translated(f"Looking at {path}"):
        return bool(ray_checkpoint.filesystem.get_file_info(path).type == FileType.File)
