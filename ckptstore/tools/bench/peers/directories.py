"""Directories of files: Ray Train's persisting, with tensors in them too, `cp -r`, pyarrow and fsspec."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch

from ckptstore.storage.uri import parse_uri
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.peers.base import BY_ARROW, BY_FSSPEC, ZIPPED, Contender, Wait, make_durable
from ckptstore.tools.bench.peers.files import OneFile

_RAY_NAME = "checkpoint_000000"
_LARGE_CHUNK_BYTES = 64 << 20
"""The chunk size of pyarrow's copies in Ray."""


def arrow_filesystem(place: Place) -> Any:
    """Return pyarrow's file system for a place, with the same credentials."""
    from pyarrow import fs

    if place.is_local:
        return fs.LocalFileSystem()
    options = place.storage_options
    endpoint = str(options.get("endpoint_url", ""))
    chosen = {
        "access_key": options.get("key"),
        "secret_key": options.get("secret"),
        "endpoint_override": endpoint.partition("://")[2] or None,
        "scheme": endpoint.partition("://")[0] or None,
        "region": options.get("client_kwargs", {}).get("region_name"),
        "tls_ca_file_path": place.authority,
    }
    return fs.S3FileSystem(**{name: value for name, value in chosen.items() if value})


def arrow_path(place: str) -> str:
    """Convert a URI for pyarrow's file systems."""
    location = parse_uri(place)
    return f"{location.container}/{location.prefix}" if location.scheme else location.prefix


def unfit_for_arrow(case: Case) -> str | None:
    """Return why pyarrow cannot write there."""
    return None if case.place.is_local or case.place.is_s3 else "pyarrow gets its credentials for S3 alone here"


def ray_context(case: Case, place: str) -> Any:
    """Return Ray's storage context for a run in this directory."""
    from ray.train.v2._internal.execution.storage import StorageContext

    above, _, name = arrow_path(place).rpartition("/")
    Path(above).mkdir(parents=True, exist_ok=True) if case.place.is_local else None
    return StorageContext(above, name, storage_filesystem=arrow_filesystem(case.place))


class RayPersist(Contender):
    """`StorageContext.persist_current_checkpoint`, by which `ray.train.report` uploads a checkpoint directory."""

    name, family = "Ray Train persist", "ray"
    modules = ("ray", "pyarrow")
    packages = ("ray", "pyarrow")
    checks = BY_ARROW

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return unfit_for_arrow(case)

    def prepare(self, place: str) -> None:
        self._context = ray_context(self.case, place)

    def save(self, place: str) -> Wait | None:
        from ray.train import Checkpoint

        self._context.persist_current_checkpoint(Checkpoint.from_directory(self.case.files), _RAY_NAME)
        if self.case.durable and self.case.place.is_local:
            make_durable(Path(place))
        return None


class RayReport(OneFile):
    """`torch.save` to a directory that Ray persists, and `Checkpoint.as_directory` with `torch.load`."""

    name, family, suffix = "Ray Train, torch.save and persist", "ray", ".pt"
    modules = ("ray", "pyarrow")
    packages = ("ray", "pyarrow", "torch")
    checks = f"{ZIPPED}; {BY_ARROW}"

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return unfit_for_arrow(case)

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        return [{}] if action == "save" else [{"mmap": False}, {"mmap": True}]

    def path(self, place: str) -> str:
        return super().path(f"{place}/{_RAY_NAME}")

    def prepare(self, place: str) -> None:
        self._context = ray_context(self.case, place)
        self._staged = tempfile.TemporaryDirectory(dir=self.case.place.path if self.case.place.is_local else None)

    def save(self, place: str) -> Wait | None:
        self.write_staged()
        self.persist_staged(place)
        return None

    def write_staged(self) -> None:
        """Write the file in a directory of this rank."""
        torch.save(self.case.local, OneFile.path(self, self._staged.name))

    def persist_staged(self, place: str) -> None:
        """Copy the directory to the storage."""
        from ray.train import Checkpoint

        self._context.persist_current_checkpoint(Checkpoint.from_directory(self._staged.name), _RAY_NAME)
        self.persist(place)

    def after(self, place: str) -> None:
        self._staged.cleanup()

    def load(self, place: str) -> None:
        from ray.train import Checkpoint

        found = Checkpoint(f"{arrow_path(place)}/{_RAY_NAME}", arrow_filesystem(self.case.place))
        found._uuid = self.case.gather(found._uuid)[0]  # one object for all ranks, as from Ray's controller
        with found.as_directory() as directory:
            tensors: Mapping[str, torch.Tensor] = torch.load(
                OneFile.path(self, directory), mmap=self.settings.get("mmap", False), weights_only=True
            )
            for name, tensor in self.case.local_target.items():
                tensor.copy_(tensors[name])


class RayReportAsync(RayReport):
    """The same with `CheckpointUploadMode.ASYNC`: `report` returns when the file exists, and a thread persists it."""

    name = "Ray Train, torch.save and persist, ASYNC"

    def save(self, place: str) -> Wait | None:
        self.write_staged()
        pool = ThreadPoolExecutor(1)
        done = pool.submit(self.persist_staged, place)
        pool.shutdown(wait=False)
        return done.result


class CopyRecursively(Contender):
    """`cp -r`, made durable if the run is."""

    name, family = "cp -r", "cp"

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return None if case.place.is_local else "it writes to paths"

    def prepare(self, place: str) -> None:
        Path(place).mkdir(parents=True, exist_ok=True)

    def save(self, place: str) -> Wait | None:
        self.copy(f"{place}/rank-{self.case.rank}")
        if self.case.durable and self.case.place.is_local:
            make_durable(Path(f"{place}/rank-{self.case.rank}"))
        return None

    def copy(self, target: str) -> None:
        """Copy the case's directory to an empty URI."""
        subprocess.run(["cp", "-r", str(self.case.files), target], check=True)


class PyarrowCopy(CopyRecursively):
    """`pyarrow.fs.copy_files`."""

    name, family = "pyarrow copy_files", "pyarrow"
    modules = ("pyarrow",)
    packages: ClassVar[Sequence[str]] = ("pyarrow",)
    checks = BY_ARROW

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return unfit_for_arrow(case)

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        return [{"chunk_bytes": size} for size in (1 << 20, _LARGE_CHUNK_BYTES)]

    def prepare(self, place: str) -> None:
        self.filesystem = arrow_filesystem(self.case.place)

    @property
    def chunk_size(self) -> int:
        """The bytes read and written at a time."""
        return int(self.settings.get("chunk_bytes", _LARGE_CHUNK_BYTES))

    def copy(self, target: str) -> None:
        from pyarrow import fs

        where = arrow_path(target)
        self.filesystem.create_dir(where, recursive=True)
        fs.copy_files(str(self.case.files), where, destination_filesystem=self.filesystem, chunk_size=self.chunk_size)


class FsspecCopy(CopyRecursively):
    """fsspec's `put`, of a whole directory."""

    name, family = "fsspec put", "fsspec"
    modules = ("fsspec",)
    packages: ClassVar[Sequence[str]] = ("fsspec", "s3fs", "gcsfs", "adlfs")
    checks = BY_FSSPEC

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return None

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        return [{}] if case.place.is_local else [{"batch_size": size} for size in (32, 256)]

    def prepare(self, place: str) -> None:
        from fsspec.core import url_to_fs

        self.filesystem = url_to_fs(place, **self.case.place.storage_options)[0]

    def copy(self, target: str) -> None:
        self.filesystem.put(f"{self.case.files}/", target, recursive=True, **self.settings)
