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
from ckptstore.tools.bench.peers.base import Contender, Settings, variant
from ckptstore.tools.bench.peers.dcp import AsyncDcp, AsyncDcpProcess, DcpFsspec, DcpS3
from ckptstore.tools.bench.peers.directories import RayReportAsync
from ckptstore.tools.bench.peers.files import AsyncLightning, S3Checkpoint
from ckptstore.tools.bench.peers.own import STEP, AsyncCkptstore, Ckptstore, drop_files

NUM_NODES = 2
_NEVER_DUE = KeepEvery(steps=1 << 40)
"""The first checkpoint is due, which has almost no bytes, and none after it."""
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


def open_tiered(case: Case, place: Path, *, copies: Literal[1, 2], **options: Any) -> CheckpointStore:
    """Open a store in the bucket, with a fast tier below a place on the disk."""
    node, options_of_bucket = f"node-{node_of(case)}", bucket_of(case).storage_options
    place.mkdir(parents=True, exist_ok=True)
    tier = FastTier(place / node, copies=copies, keep=1, node=node, **options)
    uri = in_bucket(case, str(place))
    return open_store(uri, durable=case.durable, storage_options=options_of_bucket, fast=tier)


class _ToBucket(Contender):
    """A contender whose place is in the bucket."""

    is_kept: ClassVar[bool] = True
    """False for saves that are removed after the turn, for they take memory of the server."""

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return super().unfit(replace(case, place=bucket_of(case)))

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[Settings]:
        return super().sweep(replace(case, place=bucket_of(case)), action)

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(replace(case, place=bucket_of(case)), **settings)

    def at(self, place: str) -> str:
        return in_bucket(self.case, place)

    def after(self, place: str) -> None:
        super().after(place)
        if not self.is_kept and self.case.rank == 0:
            self.discard(place)


class OneCopy(AsyncCkptstore):
    """`save_async` with a fast tier: seconds until the checkpoint is complete on the disks of the nodes.

    Nothing is brought into the bucket meanwhile. Each save supersedes the one before, as in a job.
    """

    copies: ClassVar[Literal[1, 2]] = 1

    @property
    def _place(self) -> Path:
        return Path(self.case.uri(f"copies-{self.copies}-{self.token}"))

    def begin(self) -> None:
        self._store = open_tiered(self.case, self._place, copies=self.copies, drain=_NEVER_DUE)
        self.store.save(0, {"epoch": 0})
        self.store.drain()
        self.store.warm_up(self.case.state)

    def after(self, place: str) -> None:
        """Wait until the superseded checkpoint is deleted, which goes on after the save."""
        node = self._place / f"node-{node_of(self.case)}"
        while len([*node.glob("*/checkpoints/*")]) > 1:
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        if self._store is not None:
            self._store.save(self.step + 1, {"epoch": 1})  # closing it brings the newest one into the bucket
        super().close()
        self.case.gather(None)
        if self.case.rank == 0:
            shutil.rmtree(self._place, ignore_errors=True)


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
        assert found.step == STEP

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
        return open_tiered(self.case, Path(place), copies=2)

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
    _store: CheckpointStore | None = None
    _step = 0

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        torch.set_num_threads(1)
        torch.manual_seed(case.rank)
        self._model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = torch.randn(64, 256)
        wanted_seconds = min(_MOST_SECONDS, max(_LEAST_SECONDS, case.rank_bytes / _BYTES_PER_SECOND))
        if wanted_seconds not in self._known_steps:  # measured once, so that all contenders take equally many
            began = time.perf_counter()
            self._train(_TRIED_STEPS)
            each = (time.perf_counter() - began) / _TRIED_STEPS
            self._known_steps[wanted_seconds] = max(1, min(case.gather(int(wanted_seconds / each))))
        self._num_steps = self._known_steps[wanted_seconds]
        rate = case.rank_bytes * case.world_size / NUM_NODES / (_DRAINS_LONGER * wanted_seconds)
        self._rate = case.gather(rate)[0]

    def _train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._optimizer.zero_grad()
            loss = (self._model(self._batch) - self._batch).square().mean()
            loss.backward()
            self._optimizer.step()

    def prepare(self, place: str) -> None:
        """Start the drain of a checkpoint before the steps begin."""
        if self._store is None:
            place_of_tier = Path(self.case.uri("drained"))
            self._store = open_tiered(self.case, place_of_tier, copies=1, drain_bytes_per_second=self._rate)
            self._store.resume()
        self._step += 1
        self._store.save(self._step, self.case.state)

    def save(self, place: str) -> None:
        self._train(self._num_steps)

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


class _Beside(CappedDrain):
    """The same steps beside a save in the background, straight to the bucket. Nothing caps it."""

    role: ClassVar[Role] = "peer"
    warmed = ("save",)
    saver: ClassVar[type[_ToBucket]]
    settings_of_saver: ClassVar[Settings] = {}

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return cls.saver.unfit(case)

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        self._saver = self.saver(case, **self.settings_of_saver)

    def at(self, place: str) -> str:
        return self._saver.at(place)

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


TO_BUCKET = tuple(
    variant(_ToBucket, kind, name=f"{kind.name}, to the bucket", is_kept=False)
    for kind in (AsyncDcp, AsyncDcpProcess, AsyncLightning, RayReportAsync)
)
"""Saves of peers in the background, to the bucket in place of a disk."""
OF_BUCKET = tuple(
    variant(_ToBucket, kind, name=f"{kind.name}, from the bucket") for kind in (DcpFsspec, DcpS3, S3Checkpoint)
)
"""Loads of peers from the bucket."""
BESIDE = (
    _beside(TO_BUCKET[1], stager="DefaultStager", thread_count=2, cached_plans=True),
    _beside(TO_BUCKET[2]),
    _beside(TO_BUCKET[3]),
)
"""Steps beside saves of peers to the bucket."""
