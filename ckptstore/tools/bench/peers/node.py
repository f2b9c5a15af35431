"""Several processes of one node open the same checkpoint directory: one download, or one for each."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from ckptstore.checkpoint import Checkpoint
from ckptstore.config import CacheConfig, StoreConfig
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.storage.base import Storage
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.open import open_storage
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.figures.report import Role
from ckptstore.tools.bench.peers.base import Contender, Wait
from ckptstore.tools.bench.peers.directories import FsspecCopy, PyarrowCopy, RayPersist, arrow_filesystem, arrow_path
from ckptstore.tools.bench.peers.own import Ckptstore
from ckptstore.tools.bench.raw import read_into
from ckptstore.transfer import Transfer

_STEP = 1


def _without_paths(root: str) -> Any:
    """Return a disk without paths, as an object store: its files must be downloaded."""
    verbs = ("write", "read", "read_into", "stat", "list", "delete", "close")
    disk = LocalStorage(root)
    return SimpleNamespace(uri=f"nopaths:{root}", **{verb: getattr(disk, verb) for verb in verbs})


class OneDownload(Ckptstore):
    """`as_directory` with a node cache that is empty at first."""

    def prepare(self, place: str) -> None:
        self._store = self.opened(place)
        self.store.resume()

    def save(self, place: str) -> Wait | None:
        self._uri = self.store.save_directory(_STEP, self.case.files if self.case.rank == 0 else None).uri
        return None

    def load(self, place: str) -> None:
        self._cache = Path(f"{self.case.files}-cache")
        config = StoreConfig(cache=CacheConfig(cache_dir=self._cache))
        storage: Any = (
            _without_paths(self._uri)
            if self.case.place.is_local
            else open_storage(self._uri, storage_options=self.case.place.storage_options)
        )
        transfer = Transfer(storage, config=config.transfer, retry=config.retry)
        checkpoint = Checkpoint(CheckpointFiles(storage=storage, transfer=transfer, config=config))
        with checkpoint.as_directory() as path:
            self._found = _sizes_in(Path(path))
        transfer.close()
        storage.close()

    def wrong(self) -> str | None:
        return _missing(self._found, self.case, self._cache)


class RayAsDirectory(RayPersist):
    """`ray.train.Checkpoint.as_directory`, one object passed to all processes as Ray's controller does."""

    name = "Ray Train as_directory"
    _checkpoint: Any = None

    def save(self, place: str) -> Wait | None:
        if self.case.rank == 0:
            super().save(place)
        return None

    def prepare(self, place: str) -> None:
        if self.case.rank == 0:
            super().prepare(place)

    def load(self, place: str) -> None:
        from pyarrow import fs
        from ray.train import Checkpoint as RayCheckpoint

        if self._checkpoint is None:
            filesystem = arrow_filesystem(self.case.place)
            if self.case.place.is_local:
                filesystem = fs.SubTreeFileSystem("/", filesystem)
            self._checkpoint = RayCheckpoint(f"{arrow_path(place)}/checkpoint_000000", filesystem)
            self._checkpoint._uuid = self.case.gather(self._checkpoint._uuid)[0]  # as if it had been pickled
        with self._checkpoint.as_directory() as path:
            self._found = _sizes_in(Path(path))

    def wrong(self) -> str | None:
        return _missing(self._found, self.case)


class PyarrowDownload(PyarrowCopy):
    """`pyarrow.fs.copy_files` to the local disk by one process; the others wait for it."""

    name = "pyarrow copy_files, one process"

    def save(self, place: str) -> Wait | None:
        if self.case.rank == 0:
            self.copy(place)
        return None

    def load(self, place: str) -> None:
        self._target = Path(f"{self.case.files}-copied")
        if self.case.rank == 0:
            self._target.mkdir()
            self.fetch(place, str(self._target))
        self.case.gather(None)
        self._found = _sizes_in(self._target)

    def fetch(self, place: str, target: str) -> None:
        """Copy everything there to an existing directory."""
        from pyarrow import fs

        fs.copy_files(arrow_path(place), target, source_filesystem=self.filesystem, chunk_size=self.chunk_size)

    def wrong(self) -> str | None:
        return _missing(self._found, self.case, self._target)


class FsspecDownload(FsspecCopy, PyarrowDownload):
    """fsspec's `get` of a whole directory by one process; the others wait for it."""

    name = "fsspec get, one process"

    def fetch(self, place: str, target: str) -> None:
        self.filesystem.get(f"{place}/", target, recursive=True, **self.settings)


class RawDownload(Contender):
    """One process copies the files to the local disk, with four threads; the others wait for it."""

    name, family = "one raw copy", "limit"
    role: ClassVar[Role] = "limit"

    def prepare(self, place: str) -> None:
        self._storage: Storage = open_storage(place, storage_options=self.case.place.storage_options)

    def save(self, place: str) -> Wait | None:
        if self.case.rank == 0:
            for path in _files(self.case):
                self._storage.write(path.name, [memoryview(path.read_bytes())])
        return None

    def load(self, place: str) -> None:
        self._target = Path(f"{self.case.files}-copied")

        def copy(path: Path) -> None:
            view = memoryview(bytearray(path.stat().st_size))
            if self.case.place.is_local:
                read_into(view, [Path(self._storage.local_path(path.name))], num_threads=1)  # type: ignore[attr-defined]
            else:
                self._storage.read_into(path.name, 0, [view])
            Path(self._target, path.name).write_bytes(view)

        if self.case.rank == 0:
            self._target.mkdir()
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(copy, _files(self.case)))
        self.case.gather(None)
        self._found = _sizes_in(self._target)

    def wrong(self) -> str | None:
        return _missing(self._found, self.case, self._target)

    def close(self) -> None:
        self._storage.close()


def _files(case: Case) -> list[Path]:
    return sorted(path for path in case.files.rglob("*") if path.is_file())


def _sizes_in(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.rglob("*") if path.is_file()}


def _missing(found: dict[str, int], case: Case, made: Path | None = None) -> str | None:
    """Return the name of a file that was not made whole. Collective with `made`, a directory that is then removed."""
    error = next((name for name, size in _sizes_in(case.files).items() if found.get(name) != size), None)
    if made is not None:
        case.gather(None)
        if case.rank == 0:
            shutil.rmtree(made, ignore_errors=True)
    return error
