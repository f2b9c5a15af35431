"""Peers of a fast tier: they save to the bucket in place of a disk, load from it, and slow the steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.figures.report import Role
from ckptstore.tools.bench.peers.base import Contender, Wait
from ckptstore.tools.bench.peers.dcp import DcpFsspec, DcpS3
from ckptstore.tools.bench.peers.dcp_async import AsyncDcp, AsyncDcpProcess
from ckptstore.tools.bench.peers.directories import RayReportAsync
from ckptstore.tools.bench.peers.files import AsyncLightning, S3Checkpoint
from ckptstore.tools.bench.peers.tier import CappedDrain, bucket_of, in_bucket


class _ToBucket(Contender):
    """A peer whose place is in the bucket."""

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return super().unfit(replace(case, place=bucket_of(case)))

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        return super().sweep(replace(case, place=bucket_of(case)), action)

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(replace(case, place=bucket_of(case)), **settings)

    def prepare(self, place: str) -> None:
        super().prepare(in_bucket(self.case, place))

    def save(self, place: str) -> Wait | None:
        return super().save(in_bucket(self.case, place))

    def load(self, place: str) -> None:
        super().load(in_bucket(self.case, place))

    def discard(self, place: str) -> None:
        super().discard(in_bucket(self.case, place))


class _Transient(_ToBucket):
    """A peer whose saves are removed after the turn, for they take memory of the server."""

    def after(self, place: str) -> None:
        super().after(place)
        if self.case.rank == 0:
            self.discard(place)


class AsyncDcpToBucket(_Transient, AsyncDcp):
    """`dcp.async_save` straight to the bucket, from a thread."""

    name = "dcp.async_save, thread, to the bucket"


class AsyncDcpProcessToBucket(_Transient, AsyncDcpProcess):
    """`dcp.async_save` straight to the bucket, from a process."""

    name = "dcp.async_save, process, to the bucket"


class DcpS3FromBucket(_ToBucket, DcpS3):
    """s3torchconnector's reader."""

    name = "s3torchconnector DCP, from the bucket"


class DcpFsspecFromBucket(_ToBucket, DcpFsspec):
    """DCP's FsspecReader."""

    name = "DCP FsspecWriter, from the bucket"


class S3CheckpointFromBucket(_ToBucket, S3Checkpoint):
    """s3torchconnector's S3Checkpoint."""

    name = "s3torchconnector S3Checkpoint, from the bucket"


class AsyncLightningToBucket(_Transient, AsyncLightning):
    """Lightning's AsyncCheckpointIO, through fsspec."""

    name = "Lightning AsyncCheckpointIO, to the bucket"


class RayReportToBucket(_Transient, RayReportAsync):
    """Ray's persisting from a thread."""

    name = "Ray Train, torch.save and persist, ASYNC, to the bucket"


class _Beside(CappedDrain):
    """The same steps beside a save in the background, straight to the bucket. Nothing caps it."""

    role: ClassVar[Role] = "peer"
    warmed = ("save",)
    saver: ClassVar[type[_Transient]]
    settings_of_saver: ClassVar[dict[str, Any]] = {}

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return cls.saver.unfit(case)

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        self._saver = self.saver(case, **self.settings_of_saver)

    def prepare(self, place: str) -> None:
        self._saver.prepare(place)
        self._pending = self._saver.save(place)

    def after(self, place: str) -> None:
        assert self._pending is not None
        self._pending()
        self._saver.after(place)

    def close(self) -> None:
        self._saver.close()


class BesideDcp(_Beside):
    """`dcp.async_save` from a process."""

    saver, settings_of_saver = AsyncDcpProcessToBucket, {"thread_count": 2, "cached_plans": True}
    name, family = f"beside {saver.name}", saver.family
    modules, packages, checks = saver.modules, saver.packages, saver.checks


class BesideLightning(_Beside):
    """Lightning's AsyncCheckpointIO."""

    saver = AsyncLightningToBucket
    name, family = f"beside {saver.name}", saver.family
    modules, packages, checks = saver.modules, saver.packages, saver.checks


class BesideRay(_Beside):
    """Ray's upload from a thread."""

    saver = RayReportToBucket
    name, family = f"beside {saver.name}", saver.family
    modules, packages, checks = saver.modules, saver.packages, saver.checks
