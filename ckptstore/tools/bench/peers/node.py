"""Several processes of one node open the same checkpoint directory: one download, or one for each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from ckptstore.checkpoint import Checkpoint
from ckptstore.config import CacheConfig, StoreConfig
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.storage.base import Storage
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.open import open_storage
from ckptstore.tools.bench.figures.report import Role
from ckptstore.tools.bench.peers.base import Contender, Wait
from ckptstore.tools.bench.peers.directories import (
    RAY_NAME,
    FsspecCopy,
    PyarrowCopy,
    RayPersist,
    arrow_filesystem,
    arrow_path,
)
from ckptstore.tools.bench.peers.own import STEP, DirectoryCkptstore
from ckptstore.tools.bench.raw import read_into
from ckptstore.transfer import Transfer


class OnNode(Contender):
    """Opens a directory of files in every process; by default the first process copies it, and the others wait."""

    copied: Path | None = None
    """The directory with the copy, which goes after each turn."""

    def save(self, place: str) -> Wait | None:
        return super().save(place) if self.case.rank == 0 else None

    def fetch(self, place: str, target: str) -> None:
        """Copy everything from the place to an existing directory."""
        raise NotImplementedError

    @contextmanager
    def opening(self, place: str) -> Iterator[str]:
        """Yield a directory with the files."""
        self.copied = Path(f"{self.case.files}-copied")
        if self.case.rank == 0:
            self.copied.mkdir()
            self.fetch(place, str(self.copied))
        self.case.gather(None)
        yield str(self.copied)

    def load(self, place: str) -> None:
        with self.opening(place) as path:
            self._found = _sizes_in(Path(path))

    def wrong(self) -> str | None:
        """Return the name of a file that was not made whole."""
        error = next((name for name, size in _sizes_in(self.case.files).items() if self._found.get(name) != size), None)
        if self.copied is not None:
            self.case.gather(None)
            if self.case.rank == 0:
                shutil.rmtree(self.copied, ignore_errors=True)
        return error


def _sizes_in(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.rglob("*") if path.is_file()}


class OneDownload(OnNode, DirectoryCkptstore):
    """`as_directory` with a node cache that is empty at first."""

    def save(self, place: str) -> Wait | None:
        self._uri = self.store.save_directory(STEP, self.case.files if self.case.rank == 0 else None).uri
        return None

    @contextmanager
    def opening(self, place: str) -> Iterator[str]:
        self.copied = Path(f"{self.case.files}-cache")
        config = StoreConfig(cache=CacheConfig(cache_dir=self.copied))
        storage: Any = (
            _without_paths(self._uri)
            if self.case.place.is_local
            else open_storage(self._uri, storage_options=self.case.place.storage_options)
        )
        with closing(storage), closing(Transfer(storage, config=config.transfer, retry=config.retry)) as transfer:
            checkpoint = Checkpoint(CheckpointFiles(storage=storage, transfer=transfer, config=config))
            with checkpoint.as_directory() as path:
                yield str(path)


def _without_paths(root: str) -> Any:
    """Return a disk without paths, as an object store: its files must be downloaded."""
    verbs = ("write", "read", "read_into", "stat", "list", "delete", "close")
    disk = LocalStorage(root)
    return SimpleNamespace(uri=f"nopaths:{root}", **{verb: getattr(disk, verb) for verb in verbs})


class RayAsDirectory(OnNode, RayPersist):
    """`ray.train.Checkpoint.as_directory`, one object passed to all processes as Ray's controller does."""

    name = "Ray Train as_directory"
    _checkpoint: Any = None

    @contextmanager
    def opening(self, place: str) -> Iterator[str]:
        from pyarrow import fs
        from ray.train import Checkpoint as RayCheckpoint

        if self._checkpoint is None:
            filesystem = arrow_filesystem(self.case.place)
            if self.case.place.is_local:
                filesystem = fs.SubTreeFileSystem("/", filesystem)
            self._checkpoint = RayCheckpoint(f"{arrow_path(place)}/{RAY_NAME}", filesystem)
            self._checkpoint._uuid = self.case.gather(self._checkpoint._uuid)[0]  # as if it had been pickled
        with self._checkpoint.as_directory() as path:
            yield path


class PyarrowDownload(OnNode, PyarrowCopy):
    """`pyarrow.fs.copy_files` to the local disk by one process; the others wait for it."""

    name = "pyarrow copy_files, one process"

    def fetch(self, place: str, target: str) -> None:
        self.copy_files(arrow_path(f"{place}/rank-0"), target, source_filesystem=self.filesystem)


class FsspecDownload(OnNode, FsspecCopy):
    """fsspec's `get` of a whole directory by one process; the others wait for it."""

    name = "fsspec get, one process"

    def fetch(self, place: str, target: str) -> None:
        self.filesystem.get(f"{place}/rank-0/", target, recursive=True, **self.settings)


class RawDownload(OnNode):
    """One process copies the files to the local disk, with four threads; the others wait for it."""

    name, family = "one raw copy", "limit"
    role: ClassVar[Role] = "limit"

    def prepare(self, place: str) -> None:
        self._storage: Storage = open_storage(place, storage_options=self.case.place.storage_options)

    def save(self, place: str) -> Wait | None:
        if self.case.rank == 0:
            for path in self._files():
                self._storage.write(path.name, [memoryview(path.read_bytes())])
        return None

    def _files(self) -> list[Path]:
        return sorted(path for path in self.case.files.rglob("*") if path.is_file())

    def fetch(self, place: str, target: str) -> None:
        def copy(path: Path) -> None:
            view = memoryview(bytearray(path.stat().st_size))
            if self.case.place.is_local:
                read_into(view, [Path(place, path.name)], num_threads=1)
            else:
                self._storage.read_into(path.name, 0, [view])
            Path(target, path.name).write_bytes(view)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(copy, self._files()))

    def close(self) -> None:
        self._storage.close()
