"""Directories of files: Ray Train's persisting, with tensors in them too, `cp -r`, pyarrow and fsspec.

The processes of a node open one directory, by one download, or by one for each.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from ckptstore.checkpoint import Checkpoint
from ckptstore.config import CacheConfig, StoreConfig
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.storage.base import Storage
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.open import open_storage
from ckptstore.storage.uri import parse_uri
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import Role
from ckptstore.tools.bench.peers.base import BY_ARROW, BY_FSSPEC, FSSPEC, ZIPPED, Contender, Settings, Wait, variant
from ckptstore.tools.bench.peers.files import OneFile
from ckptstore.tools.bench.peers.own import STEP, DirectoryCkptstore
from ckptstore.tools.bench.raw import read_into
from ckptstore.transfer import Transfer

RAY_NAME = "checkpoint_000000"
_ARROW = ("disk or S3", "pyarrow gets its credentials for S3 alone here")
_LARGE_CHUNK_BYTES = 64 << 20
"""The chunk size of pyarrow's copies in Ray."""


def arrow_filesystem(place: Place) -> Any:
    """Return pyarrow's file system for a place, with the same credentials."""
    from pyarrow import fs

    if place.is_local:
        return fs.LocalFileSystem()
    options = place.storage_options
    scheme, _, host = str(options.get("endpoint_url", "")).rpartition("://")
    chosen = {
        "access_key": options.get("key"),
        "secret_key": options.get("secret"),
        "endpoint_override": host,
        "scheme": scheme,
        "region": options.get("client_kwargs", {}).get("region_name"),
        "tls_ca_file_path": place.authority,
    }
    return fs.S3FileSystem(**{name: value for name, value in chosen.items() if value})


def arrow_path(place: str) -> str:
    """Convert a URI for pyarrow's file systems."""
    location = parse_uri(place)
    return f"{location.container}/{location.prefix}" if location.scheme else location.prefix


class RayPersist(Contender):
    """`StorageContext.persist_current_checkpoint`, by which `ray.train.report` uploads a checkpoint directory."""

    name, family = "Ray Train persist", "ray"
    modules = ("ray", "pyarrow")
    packages: ClassVar[Sequence[str]] = modules
    needs = _ARROW
    checks = BY_ARROW

    def prepare(self, place: str) -> None:
        """Create Ray's storage context for a run in this directory."""
        from ray.train.v2._internal.execution.storage import StorageContext

        above, _, name = arrow_path(place).rpartition("/")
        if self.case.place.is_local:
            Path(above).mkdir(parents=True, exist_ok=True)
        self._context = StorageContext(above, name, storage_filesystem=arrow_filesystem(self.case.place))

    def start(self, place: str) -> Wait | None:
        self.upload(str(self.case.files), place)
        return None

    def upload(self, directory: str, place: str) -> None:
        """Copy a directory to the storage."""
        from ray.train import Checkpoint

        self._context.persist_current_checkpoint(Checkpoint.from_directory(directory), RAY_NAME)
        self.persist(place)


class RayReport(RayPersist, OneFile):
    """`torch.save` to a directory that Ray persists, and `Checkpoint.as_directory` with `torch.load`."""

    name, suffix = "Ray Train, torch.save and persist", ".pt"
    packages = ("ray", "pyarrow", "torch")
    checks = f"{ZIPPED}; {BY_ARROW}"
    tried_in_load = ({"mmap": False}, {"mmap": True})

    def prepare(self, place: str) -> None:
        super().prepare(place)
        self._staged = tempfile.TemporaryDirectory(dir=self.case.place.path if self.case.place.is_local else None)

    def start(self, place: str) -> Wait | None:
        """Write the file, and have a thread persist it: with ASYNC, `report` returns when the file exists."""
        torch.save(self.case.local, self.path(self._staged.name))
        pool = ThreadPoolExecutor(1)
        done = pool.submit(self.upload, self._staged.name, place)
        pool.shutdown(wait=False)
        return done.result

    def persist(self, path: str) -> None:
        super().persist(self.path(f"{path}/{RAY_NAME}"))

    def after(self, place: str) -> None:
        self._staged.cleanup()

    def load(self, place: str) -> None:
        from ray.train import Checkpoint

        found = Checkpoint(f"{arrow_path(place)}/{RAY_NAME}", arrow_filesystem(self.case.place))
        found._uuid = self.case.gather(found._uuid)[0]  # one object for all ranks, as from Ray's controller
        with found.as_directory() as directory:
            mmap = self.settings.get("mmap", False)
            self.fill(torch.load(self.path(directory), mmap=mmap, weights_only=True))


RayReportAsync = variant(RayReport, name="Ray Train, torch.save and persist, ASYNC", in_background=True)
"""The same with `CheckpointUploadMode.ASYNC`."""


class CopyRecursively(Contender):
    """`cp -r`, made durable if the run is."""

    name, family = "cp -r", "cp"
    needs = ("disk", "it writes to paths")

    def prepare(self, place: str) -> None:
        Path(place).mkdir(parents=True, exist_ok=True)

    def save(self, place: str) -> Wait | None:
        target = f"{place}/rank-{self.case.rank}"
        self.copy(target)
        self.persist(target)
        return None

    def copy(self, target: str) -> None:
        """Copy the case's directory to an empty URI."""
        subprocess.run(["cp", "-r", str(self.case.files), target], check=True)


class PyarrowCopy(CopyRecursively):
    """`pyarrow.fs.copy_files`."""

    name, family = "pyarrow copy_files", "pyarrow"
    modules = packages = ("pyarrow",)
    needs = _ARROW
    checks = BY_ARROW
    tried = ({"chunk_bytes": 1 << 20}, {"chunk_bytes": _LARGE_CHUNK_BYTES})

    def prepare(self, place: str) -> None:
        self.filesystem = arrow_filesystem(self.case.place)

    def copy(self, target: str) -> None:
        where = arrow_path(target)
        self.filesystem.create_dir(where, recursive=True)
        self.copy_files(str(self.case.files), where, destination_filesystem=self.filesystem)

    def copy_files(self, source: str, target: str, **filesystem: Any) -> None:
        """Copy all files of a directory to an existing one."""
        from pyarrow import fs

        fs.copy_files(source, target, chunk_size=self.settings["chunk_bytes"], **filesystem)


class FsspecCopy(CopyRecursively):
    """fsspec's `put`, of a whole directory."""

    name, family = "fsspec put", "fsspec"
    needs = ("any", "")
    modules, packages = ("fsspec",), FSSPEC
    checks = BY_FSSPEC

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[Settings]:
        return [{}] if case.place.is_local else [{"batch_size": size} for size in (32, 256)]

    def prepare(self, place: str) -> None:
        from fsspec.core import url_to_fs

        self.filesystem = url_to_fs(place, **self.case.place.storage_options)[0]

    def copy(self, target: str) -> None:
        self.filesystem.put(f"{self.case.files}/", target, recursive=True, **self.settings)


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

    def save(self, place: str) -> None:
        if self.case.rank == 0:
            for path in self._files():
                self._storage.write(path.name, [memoryview(path.read_bytes())])

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
