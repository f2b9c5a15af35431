"""ckptstore with a fast tier, and without one; and peers, which save to the bucket in place of a disk, load from it,
and slow the steps. The disk of each node is a directory of the place."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from ckptstore.extensions.tier.tier import FastTier
from ckptstore.opening import open_store
from ckptstore.retention import KeepEvery
from ckptstore.store import CheckpointStore
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import OURS, Role
from ckptstore.tools.bench.peers.base import Contender, Wait, variant
from ckptstore.tools.bench.peers.dcp import AsyncDcp, AsyncDcpProcess, DcpFsspec, DcpS3
from ckptstore.tools.bench.peers.directories import RayReportAsync
from ckptstore.tools.bench.peers.files import AsyncLightning, S3Checkpoint
from ckptstore.tools.bench.peers.own import AsyncCkptstore, Ckptstore, drop_files

NUM_NODES = 2
_NEVER_DUE = KeepEvery(steps=1 << 40)
"""The first checkpoint is due, which has almost no bytes, and none after it."""
_STEP = 1
_LOOK_SECONDS = 0.01
_TRIED_STEPS = 50
_LEAST_SECONDS, _MOST_SECONDS, _BYTES_PER_SECOND = 0.1, 1.5, 100e6
"""Duration of the steps: as long as the bytes of a rank take at that speed, within bounds."""
_DRAINS_LONGER = 3
"""The drain takes this much longer, so that it goes on when a busy machine makes the steps slower."""


def node_of(case: Case) -> int:
    """Return the number of the simulated node of a rank: each has equally many."""
    return case.rank * NUM_NODES // case.world_size


def bucket_of(case: Case) -> Place:
    """Return the bucket of the run."""
    assert case.bucket is not None  # no workload without one has these contenders
    return case.bucket


def in_bucket(case: Case, place: str) -> str:
    """Return the counterpart in the bucket of a place on the disk."""
    return f"{bucket_of(case).uri}/{place.rpartition('/')[2]}"


def open_tiered(case: Case, place: str, *, copies: Literal[1, 2], **options: Any) -> CheckpointStore:
    """Open a store in the bucket, with a fast tier below a place on the disk."""
    node, bucket = f"node-{node_of(case)}", bucket_of(case)
    Path(place).mkdir(parents=True, exist_ok=True)
    tier = FastTier(Path(place) / node, copies=copies, keep=1, node=node, **options)
    uri = in_bucket(case, place)
    return open_store(uri, durable=case.durable, storage_options=bucket.storage_options, fast=tier)


class _ToBucket(Contender):
    """A contender whose place is in the bucket."""

    is_kept: ClassVar[bool] = True
    """False for saves that are removed after the turn, for they take memory of the server."""

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

    def after(self, place: str) -> None:
        super().after(place)
        if not self.is_kept and self.case.rank == 0:
            self.discard(place)

    def load(self, place: str) -> None:
        super().load(in_bucket(self.case, place))

    def discard(self, place: str) -> None:
        super().discard(in_bucket(self.case, place))


class OneCopy(AsyncCkptstore):
    """`save_async` with a fast tier: seconds until the checkpoint is complete on the disks of the nodes.

    Nothing is brought into the bucket meanwhile. Each save supersedes the one before, as in a job.
    """

    copies: ClassVar[Literal[1, 2]] = 1

    @property
    def _name(self) -> str:
        return f"copies-{self.copies}-{self._token}"

    def prepare(self, place: str) -> None:
        if self._store is None:
            place = self.case.uri(self._name)
            self._store = open_tiered(self.case, place, copies=self.copies, drain=_NEVER_DUE)
            self.store.save(0, {"epoch": 0})
            self.store.drain()
            self.store.warm_up(self.case.state)

    def after(self, place: str) -> None:
        """Wait until the superseded checkpoint is deleted, which goes on after the save."""
        node = Path(self.case.uri(self._name)) / f"node-{node_of(self.case)}"
        while len([*node.glob("*/checkpoints/*")]) > 1:
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        if self._store is not None:
            self._store.save(self._step + 1, {"epoch": 1})  # closing it brings the newest one into the bucket
        super().close()
        self.case.gather(None)
        if self.case.rank == 0:
            shutil.rmtree(self.case.uri(self._name), ignore_errors=True)


TwoCopies = variant(OneCopy, name="ckptstore, two copies", copies=2)
"""Each node has the files of the other one too."""
NoTier = variant(_ToBucket, AsyncCkptstore, name="ckptstore, no tier")
"""`save_async` straight to the bucket."""
ToDisk = variant(Ckptstore, name="ckptstore, save to the disk")
"""A save in the foreground to a store on the same disk."""


class FromDisk(Ckptstore):
    """`resume` from a store on the disk, by a job that starts."""

    name = "ckptstore, no tier, from the disk"

    def load(self, place: str) -> None:
        self._store = self.opened(place)
        found = self.store.resume(self.case.target)
        assert found is not None
        assert found.step == _STEP

    def wrong(self) -> str | None:
        self.close()
        return super().wrong()


FromBucket = variant(_ToBucket, FromDisk, name="ckptstore, no tier, from the bucket")
"""`resume` from the bucket."""


class FromOwnNode(FromDisk):
    """`resume` with a fast tier of two copies, by a job that starts on the same nodes."""

    name = "ckptstore, from the own disk"
    lost: ClassVar[tuple[int, ...]] = ()
    """The nodes that come back with an empty disk."""

    def opened(self, place: str) -> CheckpointStore:
        return open_tiered(self.case, place, copies=2)

    def after(self, place: str) -> None:
        self.close()  # which brings it into the bucket
        self.case.gather(None)
        if self.case.rank == 0:
            for number in self.lost:
                shutil.rmtree(Path(place) / f"node-{number}")
        self.case.gather(None)


FromPartner = variant(FromOwnNode, name="ckptstore, from the partner", lost=(1,))
"""`resume` when the disk of one node is empty."""
FromEmptyNodes = variant(FromOwnNode, name="ckptstore, from the bucket", lost=(0, 1))
"""`resume` when the disks of all nodes are empty."""


class CappedDrain(Contender):
    """Steps of a training while a checkpoint comes into the bucket at a capped speed.

    A step is a forward and a backward pass of a small network, and of its optimizer. All turns take equally many.
    """

    name, family = OURS, OURS
    role: ClassVar[Role] = "ckptstore"
    _known_steps: ClassVar[dict[float, int]] = {}

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        torch.set_num_threads(1)
        torch.manual_seed(case.rank)
        self._model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = torch.randn(64, 256)
        wanted_seconds = min(_MOST_SECONDS, max(_LEAST_SECONDS, case.rank_bytes / _BYTES_PER_SECOND))
        self._num_steps = self._num_steps_of(wanted_seconds)
        rate = case.rank_bytes * case.world_size / NUM_NODES / (_DRAINS_LONGER * wanted_seconds)
        self._rate = case.gather(rate)[0]
        self._store: CheckpointStore | None = None
        self._step = 0

    def _num_steps_of(self, seconds: float) -> int:
        """Return the number of steps in so many seconds: measured once, so that all contenders take equally many."""
        if seconds not in self._known_steps:
            began = time.perf_counter()
            self._train(_TRIED_STEPS)
            each = (time.perf_counter() - began) / _TRIED_STEPS
            self._known_steps[seconds] = max(1, min(self.case.gather(int(seconds / each))))
        return self._known_steps[seconds]

    def _train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._optimizer.zero_grad()
            loss = (self._model(self._batch) - self._batch).square().mean()
            loss.backward()
            self._optimizer.step()

    def prepare(self, place: str) -> None:
        """Start the drain of a checkpoint before the steps begin."""
        if self._store is None:
            place = self.case.uri("drained")
            self._store = open_tiered(self.case, place, copies=1, drain_bytes_per_second=self._rate)
            self._store.resume()
        self._step += 1
        self._store.save(self._step, self.case.state)

    def save(self, place: str) -> Wait | None:
        self._train(self._num_steps)
        return None

    def after(self, place: str) -> None:
        if self._store is not None:
            self._store.drain()
            if self.case.rank == 0:
                drop_files(self._store)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


NoDrain = variant(CappedDrain, name="no drain", family="limit", role="limit", prepare=Contender.prepare)
"""The same steps without a drain."""


def _to_bucket(kind: type[Contender], name: str) -> Any:
    return variant(_ToBucket, kind, name=f"{name}, to the bucket", is_kept=False)


AsyncDcpToBucket = _to_bucket(AsyncDcp, "dcp.async_save, thread")
AsyncDcpProcessToBucket = _to_bucket(AsyncDcpProcess, "dcp.async_save, process")
AsyncLightningToBucket = _to_bucket(AsyncLightning, "Lightning AsyncCheckpointIO")
RayReportToBucket = _to_bucket(RayReportAsync, "Ray Train, torch.save and persist, ASYNC")
DcpS3FromBucket = variant(_ToBucket, DcpS3, name="s3torchconnector DCP, from the bucket")
DcpFsspecFromBucket = variant(_ToBucket, DcpFsspec, name="DCP FsspecWriter, from the bucket")
S3CheckpointFromBucket = variant(_ToBucket, S3Checkpoint, name="s3torchconnector S3Checkpoint, from the bucket")


class _Beside(CappedDrain):
    """The same steps beside a save in the background, straight to the bucket. Nothing caps it."""

    role: ClassVar[Role] = "peer"
    warmed = ("save",)
    saver: ClassVar[type[_ToBucket]]
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
        if self._pending is not None:
            self._pending()
        self._saver.after(place)

    def close(self) -> None:
        self._saver.close()


def _beside(saver: type[Contender], **settings: Any) -> Any:
    fields = {name: getattr(saver, name) for name in ("family", "modules", "packages", "checks")}
    return variant(_Beside, name=f"beside {saver.name}", saver=saver, settings_of_saver=settings, **fields)


BesideDcp = _beside(AsyncDcpProcessToBucket, thread_count=2, cached_plans=True)
BesideLightning = _beside(AsyncLightningToBucket)
BesideRay = _beside(RayReportToBucket)
