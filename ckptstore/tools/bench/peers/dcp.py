"""torch's own distributed checkpoints, also in the background: to files, through fsspec and s3torchconnector."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save

from ckptstore.runtime.torch_private import fsspec_classes, save_planner_with_cache
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.peers.base import (
    BY_FSSPEC,
    FSSPEC,
    MOST_FILES,
    ZIPPED,
    Contender,
    Settings,
    Wait,
    shares_of,
    variant,
)
from ckptstore.tools.bench.raw import MIB
from ckptstore.tools.bench.shapes import empty_like

_THREADS = (1, 2, 4)
_CACHED = {"cached_plans": True}


class Dcp(Contender):
    """`dcp.save` and `dcp.load` with files. One rank runs without collectives (`no_dist`)."""

    name, family = "DCP FileSystemWriter", "dcp"
    packages: ClassVar[Sequence[str]] = ("torch",)
    needs = ("disk", "it writes to paths")
    checks = ZIPPED
    warmed = ("save",)

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[Settings]:
        apart: list[Settings] = [] if case.alone else [{"without_collectives": True}]
        if action == "load":
            return [{}, *apart]
        found: list[Settings] = [{"thread_count": 2}, *({"thread_count": count, **_CACHED} for count in _THREADS)]
        if len(case.local) <= MOST_FILES:
            found += [{"thread_count": 4, **_CACHED, "file_per_tensor": True}]
        return found + [{"thread_count": 2, **each} for each in apart]

    @property
    def common(self) -> Settings:
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
        return save_planner_with_cache(f"{self.name} {self.settings}") if self.settings.get("cached_plans") else None

    def start(self, place: str) -> Wait | None:
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
    def sweep(cls, case: Case, action: str) -> list[Settings]:
        return [{"thread_count": count, **(_CACHED if action == "save" else {})} for count in _THREADS]

    def writer(self, place: str) -> Any:
        count = self.settings["thread_count"]
        shares = shares_of(self.case.local, count)
        files = {name: 1 + number for number, names in enumerate(shares) for name in names}
        found = HuggingFaceStorageWriter(place, files, thread_count=count, save_distributed=True)
        found.sync_files = self.case.durable  # no argument of its constructor
        return found

    def reader(self, place: str) -> Any:
        return HuggingFaceStorageReader(place, thread_count=self.settings["thread_count"])


class DcpFsspec(Dcp):
    """`dcp.save` with FsspecWriter."""

    name = "DCP FsspecWriter"
    needs = ("bucket", "on a disk FileSystemWriter is DCP's way")
    modules = ("fsspec",)
    packages = ("torch", *FSSPEC)
    checks = f"{ZIPPED}; {BY_FSSPEC}"

    def writer(self, place: str) -> Any:
        options = self.case.place.storage_options
        return fsspec_classes()[0](place, sync_files=False, **self.common, **options)  # an object is durable at once

    def reader(self, place: str) -> Any:
        return fsspec_classes()[1](place, **self.case.place.storage_options)


class DcpS3(Dcp):
    """`dcp.save` with the writer and reader of s3torchconnector, whose client is AWS's CRT."""

    name, family = "s3torchconnector DCP", "s3torchconnector"
    needs = ("S3", "it knows S3 alone")
    modules = ("s3torchconnector",)
    packages = ("torch", "s3torchconnector")
    tried_in_load = tuple({"reader": name} for name in ("dcp_optimized", "range_based", "sequential"))

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[Settings]:
        if action == "load":
            return [*cls.tried_in_load]
        found = [*super().sweep(case, action), {"thread_count": 4, **_CACHED, "part_bytes": 32 * MIB}]
        return [each for each in found if "without_collectives" not in each]  # its ranks would take the same names

    def writer(self, place: str) -> Any:
        from s3torchconnector.dcp import S3StorageWriter

        region = client_options(self.case, self.settings)["region"]
        return self._at_endpoint(S3StorageWriter(region, place, overwrite=True, **self.common), place, None)

    def reader(self, place: str) -> Any:
        from s3torchconnector import S3ReaderConstructor
        from s3torchconnector.dcp import S3StorageReader

        region = client_options(self.case, self.settings)["region"]
        how = getattr(S3ReaderConstructor, self.settings["reader"])()
        return self._at_endpoint(S3StorageReader(region, place, reader_constructor=how), place, how)

    def _at_endpoint(self, used: Any, place: str, reader_constructor: Any) -> Any:
        """Set the endpoint, which the client accepts and the constructors do not."""
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp.s3_file_system import S3FileSystem

        client = S3Client(**client_options(self.case, self.settings))
        used.fs = S3FileSystem(client.region, s3_client=client, reader_constructor=reader_constructor)
        used.path = used.fs.init_path(place)
        return used


def client_options(case: Case, settings: Settings) -> dict[str, Any]:
    """Return the arguments of s3torchconnector's client."""
    from s3torchconnector import S3ClientConfig

    options = case.place.storage_options
    sizes = {"part_size": settings["part_bytes"]} if "part_bytes" in settings else {}
    return {
        "region": str(options.get("client_kwargs", {}).get("region_name", "us-east-1")),
        "endpoint": options.get("endpoint_url"),
        "s3client_config": S3ClientConfig(force_path_style="endpoint_url" in options, **sizes),
    }


class AsyncDcp(Dcp):
    """`dcp.async_save` from a thread. Its staging memory and its plans are reused from save to save.

    Without an accelerator nothing is pinned. It stages before the call returns: DefaultStager can go on afterwards, and
    then the next change of the state waits for it.
    """

    name = "dcp.async_save, thread"
    needs = ("any", "")
    in_background = True
    kind: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD
    staging: Future[None] | None = None
    """The end of the copy of the last save."""

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        self.stager = self.new_stager()

    def new_stager(self) -> AsyncStager:
        """Return a stager without any memory yet. Pinned memory, and copies that do not block, require CUDA."""
        name, is_pinned = self.settings.get("stager", ""), self.settings.get("pinned", False) and self.case.is_cuda
        if name == "BlockingAsyncStager":
            found = BlockingAsyncStager(cache_staged_state_dict=True)
            found.state_dict_cache = dict(empty_like(self.case.local))  # it would pin it, which takes an accelerator
            return found
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=is_pinned,
                use_shared_memory="shared" in name if name else self.kind is AsyncCheckpointerType.PROCESS,
                use_async_staging=self.settings.get("behind", False),
                use_non_blocking_copy=is_pinned,
            )
        )

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[Settings]:
        stagers = ["DefaultStager", "DefaultStager, shared memory"]
        if case.alone:  # it knows no other memory for parts of DTensors than pinned one
            stagers.append("BlockingAsyncStager")
        found: list[Settings] = [{"stager": name, "thread_count": 2, **_CACHED} for name in stagers]
        return [*found, {"stager": "DefaultStager", "thread_count": 4, **_CACHED}]

    def writer(self, place: str) -> Any:
        if self.case.place.is_local:
            return super().writer(place)
        other = DcpS3 if self.case.place.is_s3 and DcpS3.objection(self.case) is None else DcpFsspec
        return other(self.case, **self.settings).writer(place)

    @property
    def group(self) -> Settings:
        """Its way to the other ranks."""
        return {"no_dist": self.case.alone}

    def start(self, place: str) -> Wait | None:
        found = async_save(
            dict(self.case.state),
            storage_writer=self.writer(place),
            planner=self.planner,
            async_stager=self.stager,
            async_checkpointer_type=self.kind,
            **self.group,
        )
        if isinstance(found, AsyncSaveResponse):
            self.staging = found.staging_completion
            return found.upload_completion.result
        return found.result

    def staged(self) -> None:
        if self.staging is not None:
            self.staging.result()

    def close(self) -> None:
        self.stager.close()


AsyncDcpProcess = variant(AsyncDcp, name="dcp.async_save, process", kind=AsyncCheckpointerType.PROCESS)
"""`dcp.async_save` from a process of its own, which lives as long as the rank."""
