"""torch's own distributed checkpoints: to files, through fsspec, through s3torchconnector, and in the background."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from ckptstore.bench.case import Case
from ckptstore.bench.peers.base import Contender, Wait
from ckptstore.bench.shapes import empty_like

_THREADS = (1, 2, 4)


class Dcp(Contender):
    """`dcp.save` with FileSystemWriter and `dcp.load` with FileSystemReader."""

    name = "DCP FileSystemWriter"
    family = "dcp"
    packages: ClassVar[Sequence[str]] = ("torch",)

    @classmethod
    def objection(cls, case: Case) -> str | None:
        return super().objection(case) or (None if case.place.is_local else "it writes to paths")

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        return [{"thread_count": count} for count in _THREADS] if action == "save" else [{}]

    def writer(self, place: str) -> Any:
        """Its storage writer; the setting of fsync is that of the run."""
        return FileSystemWriter(place, thread_count=self.settings.get("thread_count", 2), sync_files=self.case.durable)

    def reader(self, place: str) -> Any:
        """Its storage reader."""
        return FileSystemReader(place)

    def save(self, place: str) -> Wait | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(dict(self.case.state), storage_writer=self.writer(place), no_dist=self.case.alone)
        return None

    def load(self, place: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(dict(self.case.target), storage_reader=self.reader(place), no_dist=self.case.alone)


class DcpFsspec(Dcp):
    """`dcp.save` with FsspecWriter."""

    name = "DCP FsspecWriter"
    modules = ("fsspec",)
    packages = ("torch", "fsspec", "s3fs", "gcsfs", "adlfs")

    @classmethod
    def objection(cls, case: Case) -> str | None:
        missing = Contender.objection.__func__(cls, case)  # type: ignore[attr-defined]
        return missing or ("on a disk FileSystemWriter is DCP's way" if case.place.is_local else None)

    def writer(self, place: str) -> Any:
        from ckptstore.runtime.torch_private import fsspec_classes

        return fsspec_classes()[0](
            place,
            thread_count=self.settings.get("thread_count", 2),
            sync_files=False,  # an object is durable when it is there
            **self.case.place.storage_options,
        )

    def reader(self, place: str) -> Any:
        from ckptstore.runtime.torch_private import fsspec_classes

        return fsspec_classes()[1](place, **self.case.place.storage_options)


class DcpS3(Dcp):
    """`dcp.save` with the writer and reader of s3torchconnector, whose client is AWS's CRT."""

    name = "s3torchconnector DCP"
    family = "s3torchconnector"
    modules = ("s3torchconnector",)
    packages = ("torch", "s3torchconnector")

    @classmethod
    def objection(cls, case: Case) -> str | None:
        missing = Contender.objection.__func__(cls, case)  # type: ignore[attr-defined]
        return missing or (None if case.place.is_s3 else "it knows S3 alone")

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        return super().sweep(case, action) if action == "save" else [{"by_ranges": False}, {"by_ranges": True}]

    def writer(self, place: str) -> Any:
        from s3torchconnector.dcp import S3StorageWriter

        count = self.settings.get("thread_count", 2)
        writer = S3StorageWriter(region=self._region, path=place, thread_count=count, overwrite=True)
        return self._at_endpoint(writer, place)

    def reader(self, place: str) -> Any:
        from s3torchconnector import S3ReaderConstructor
        from s3torchconnector.dcp import S3StorageReader

        by_ranges = self.settings.get("by_ranges", False)
        how = S3ReaderConstructor.range_based() if by_ranges else S3ReaderConstructor.sequential()
        return self._at_endpoint(S3StorageReader(region=self._region, path=place, reader_constructor=how), place)

    @property
    def _region(self) -> str:
        options = self.case.place.storage_options.get("client_kwargs", {})
        return str(options.get("region_name", "us-east-1"))

    def _at_endpoint(self, used: Any, place: str) -> Any:
        """Its constructors take no endpoint, its client does."""
        endpoint = self.case.place.storage_options.get("endpoint_url")
        if endpoint:
            from s3torchconnector import S3ClientConfig
            from s3torchconnector._s3client import S3Client
            from s3torchconnector.dcp.s3_file_system import S3FileSystem

            config = S3ClientConfig(force_path_style=True)
            client = S3Client(self._region, endpoint=endpoint, s3client_config=config)
            constructor = getattr(used, "_reader_constructor", None)
            used.fs = S3FileSystem(self._region, s3_client=client, reader_constructor=constructor)
            used.path = used.fs.init_path(place)
        return used


class AsyncDcp(Dcp):
    """`dcp.async_save` from a thread, with staging memory that is kept from save to save."""

    name = "dcp.async_save, thread"
    kind: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD

    @classmethod
    def objection(cls, case: Case) -> str | None:
        return None

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
        if case.alone:  # it would pin its memory, which takes an accelerator: it gets memory that is there
            self._stager.state_dict_cache = dict(empty_like(case.local))

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        return [{"thread_count": 2}]

    def writer(self, place: str) -> Any:
        if self.case.place.is_local:
            return super().writer(place)
        other = DcpS3 if self.case.place.is_s3 and DcpS3.objection(self.case) is None else DcpFsspec
        return other(self.case, **self.settings).writer(place)

    def save(self, place: str) -> Wait | None:
        stager = self._stager if self.case.alone else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = async_save(
                dict(self.case.state),
                storage_writer=self.writer(place),
                async_stager=stager,
                async_checkpointer_type=self.kind,
            )
        return future.result  # type: ignore[union-attr]


class AsyncDcpProcess(AsyncDcp):
    """`dcp.async_save` from a process of its own."""

    name = "dcp.async_save, process"
    kind = AsyncCheckpointerType.PROCESS
