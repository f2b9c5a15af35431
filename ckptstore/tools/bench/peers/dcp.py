"""torch's own distributed checkpoints, also in the background: to files, through fsspec and s3torchconnector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from ckptstore.runtime.torch_private import fsspec_classes, save_planner_with_cache
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.peers.base import BY_FSSPEC, MOST_FILES, ZIPPED, Contender, Wait, shares_of, variant
from ckptstore.tools.bench.raw import MIB
from ckptstore.tools.bench.shapes import empty_like

_THREADS = (1, 2, 4)


class Dcp(Contender):
    """`dcp.save` and `dcp.load` with files. One rank runs without collectives (`no_dist`)."""

    name = "DCP FileSystemWriter"
    family = "dcp"
    packages: ClassVar[Sequence[str]] = ("torch",)
    checks: ClassVar[str] = ZIPPED
    warmed = ("save",)

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return None if case.place.is_local else "it writes to paths"

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        apart: list[dict[str, Any]] = [] if case.alone else [{"without_collectives": True}]
        if action == "load":
            return [{}, *apart]
        found: list[dict[str, Any]] = [{"thread_count": 2}]
        found += [{"thread_count": count, "cached_plans": True} for count in _THREADS]
        if len(case.local) <= MOST_FILES:
            found += [{"thread_count": 4, "cached_plans": True, "file_per_tensor": True}]
        return found + [{"thread_count": 2, **each} for each in apart]

    @property
    def common(self) -> dict[str, Any]:
        """The options of every file writer of DCP."""
        return {
            "thread_count": self.settings.get("thread_count", 2),
            "single_file_per_rank": not self.settings.get("file_per_tensor", False),
        }

    def writer(self, place: str) -> Any:
        """Return its storage writer, with the run's setting of fsync."""
        return FileSystemWriter(place, sync_files=self.case.durable, **self.common)

    def reader(self, place: str) -> Any:
        """Return its storage reader."""
        return FileSystemReader(place)

    @property
    def planner(self) -> Any:
        """DCP's own planner (None), or one with cached plans."""
        if not self.settings.get("cached_plans"):
            return None
        return save_planner_with_cache(f"{self.name} {self.settings}")

    def save(self, place: str) -> Wait | None:
        save(
            dict(self.case.state),
            storage_writer=self.writer(place),
            planner=self.planner,
            no_dist=self.case.alone,
            use_collectives=not self.settings.get("without_collectives", False),
        )
        return None

    def load(self, place: str) -> None:
        load(dict(self.case.target), storage_reader=self.reader(place), no_dist=self.case.alone)


class DcpHuggingFace(Dcp):
    """`dcp.save` to safetensors files of the ranks' own, with HuggingFaceStorageWriter, and a file for each thread.

    They are not consolidated into files of whole tensors: that writes all bytes again, and no resume needs it.
    """

    name = "DCP HuggingFaceStorageWriter"
    modules = ("safetensors",)
    packages = ("torch", "safetensors")
    checks = "nothing"

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        cached = {"cached_plans": True} if action == "save" else {}
        return [{"thread_count": count, **cached} for count in _THREADS]

    def writer(self, place: str) -> Any:
        count = self.settings.get("thread_count", 2)
        shares = shares_of(self.case.local, count)
        files = {name: 1 + number for number, names in enumerate(shares) for name in names}
        found = HuggingFaceStorageWriter(place, files, thread_count=count, save_distributed=True)
        found.sync_files = self.case.durable  # no argument of its constructor
        return found

    def reader(self, place: str) -> Any:
        return HuggingFaceStorageReader(place, thread_count=self.settings.get("thread_count", 2))


class DcpFsspec(Dcp):
    """`dcp.save` with FsspecWriter."""

    name = "DCP FsspecWriter"
    modules = ("fsspec",)
    packages = ("torch", "fsspec", "s3fs", "gcsfs", "adlfs")
    checks = f"{ZIPPED}; {BY_FSSPEC}"

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return "on a disk FileSystemWriter is DCP's way" if case.place.is_local else None

    def writer(self, place: str) -> Any:
        options = self.case.place.storage_options
        return fsspec_classes()[0](place, sync_files=False, **self.common, **options)  # an object is durable at once

    def reader(self, place: str) -> Any:
        return fsspec_classes()[1](place, **self.case.place.storage_options)


class DcpS3(Dcp):
    """`dcp.save` with the writer and reader of s3torchconnector, whose client is AWS's CRT."""

    name = "s3torchconnector DCP"
    family = "s3torchconnector"
    modules = ("s3torchconnector",)
    packages = ("torch", "s3torchconnector")

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return None if case.place.is_s3 else "it knows S3 alone"

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        if action == "load":
            return [{"reader": name} for name in ("dcp_optimized", "range_based", "sequential")]
        found = [*super().sweep(case, action), {"thread_count": 4, "cached_plans": True, "part_bytes": 32 * MIB}]
        return [each for each in found if "without_collectives" not in each]  # its ranks would take the same names

    def writer(self, place: str) -> Any:
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter(region_of(self.case), place, overwrite=True, **self.common)
        return self._at_endpoint(writer, place, None)

    def reader(self, place: str) -> Any:
        from s3torchconnector import S3ReaderConstructor
        from s3torchconnector.dcp import S3StorageReader

        how = getattr(S3ReaderConstructor, self.settings.get("reader", "dcp_optimized"))()
        return self._at_endpoint(S3StorageReader(region_of(self.case), place, reader_constructor=how), place, how)

    def _at_endpoint(self, used: Any, place: str, reader_constructor: Any) -> Any:
        """Set the endpoint, which the client accepts and the constructors do not."""
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp.s3_file_system import S3FileSystem

        client = S3Client(
            region_of(self.case),
            endpoint=self.case.place.storage_options.get("endpoint_url"),
            s3client_config=client_config(self.case, self.settings),
        )
        used.fs = S3FileSystem(client.region, s3_client=client, reader_constructor=reader_constructor)
        used.path = used.fs.init_path(place)
        return used


def region_of(case: Case) -> str:
    """Return the region of the bucket, which s3torchconnector requires."""
    return str(case.place.storage_options.get("client_kwargs", {}).get("region_name", "us-east-1"))


def client_config(case: Case, settings: dict[str, Any]) -> Any:
    """Return the configuration of s3torchconnector's client, besides the region."""
    from s3torchconnector import S3ClientConfig

    sizes = {"part_size": settings["part_bytes"]} if "part_bytes" in settings else {}
    return S3ClientConfig(force_path_style="endpoint_url" in case.place.storage_options, **sizes)


class AsyncDcp(Dcp):
    """`dcp.async_save` from a thread. Its staging memory and its plans are reused from save to save.

    Without an accelerator nothing is pinned. It stages before the call returns: DefaultStager can go on afterwards, and
    then the next change of the state waits for it.
    """

    name = "dcp.async_save, thread"
    kind: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return None

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        self._stager = self._stager_of(settings.get("stager", "DefaultStager"))

    def _stager_of(self, name: str) -> AsyncStager:
        if name == "BlockingAsyncStager":
            found = BlockingAsyncStager(cache_staged_state_dict=True)
            found.state_dict_cache = dict(empty_like(self.case.local))  # it would pin it, which takes an accelerator
            return found
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory="shared" in name,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        stagers = ["DefaultStager", "DefaultStager, shared memory"]
        if case.alone:  # it knows no other memory for parts of DTensors than pinned one
            stagers.append("BlockingAsyncStager")
        found: list[dict[str, Any]] = [{"stager": name, "thread_count": 2, "cached_plans": True} for name in stagers]
        return [*found, {"stager": "DefaultStager", "thread_count": 4, "cached_plans": True}]

    def writer(self, place: str) -> Any:
        if self.case.place.is_local:
            return super().writer(place)
        other = DcpS3 if self.case.place.is_s3 and DcpS3.objection(self.case) is None else DcpFsspec
        return other(self.case, **self.settings).writer(place)

    def save(self, place: str) -> Wait | None:
        future = async_save(
            dict(self.case.state),
            storage_writer=self.writer(place),
            planner=self.planner,
            async_stager=self._stager,
            async_checkpointer_type=self.kind,
            no_dist=self.case.alone,
        )
        return future.result  # type: ignore[union-attr]

    def close(self) -> None:
        self._stager.close()


AsyncDcpProcess = variant(AsyncDcp, name="dcp.async_save, process", kind=AsyncCheckpointerType.PROCESS)
"""`dcp.async_save` from a process of its own, which lives as long as the rank."""
