"""One life of a run on every cloud: two ranks save, one is killed, the job resumes, prunes, reads, verifies, copies."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import KeepLatest, StorageGroup
from ckptstore.config import StoreConfig
from ckptstore.extensions.exchange.copying import copy_store
from ckptstore.storage.open import open_storage
from ckptstore.testing import RanksFailed, run_ranks
from ckptstore.testing.s3_server import S3Server
from ckptstore.tools.cli.commands.looking import stores_below
from ckptstore.transfer.opened import open_place

pytestmark = pytest.mark.slow

numbers = itertools.count()
# Not moto: of several creates of one key more than one may win there, and a store that finds that out refuses to write.
STORES = [
    pytest.param(("s3", "native"), id="s3-native"),
    pytest.param(("s3", "fsspec"), id="s3-fsspec", marks=pytest.mark.long),
    pytest.param(("gs", "native"), id="gs-native", marks=pytest.mark.slow),
    pytest.param(("az", "native"), id="az-native", marks=pytest.mark.slow),
    pytest.param(("careless", "native"), id="careless-native", marks=pytest.mark.long),
    pytest.param(("ceph", "native"), id="ceph-native", marks=pytest.mark.ceph),
]
FIXTURES = {
    "s3": "fast_s3",
    "gs": "fake_gcs",
    "az": "azurite",
    "careless": "careless_gcs",
    "ceph": "ceph",
}
SCHEMES = {"s3": "s3", "gs": "gs", "az": "az", "careless": "gs", "ceph": "s3"}


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A URI, and the keywords to open it with."""
    name, engine = request.param
    server: S3Server | Any = request.getfixturevalue(FIXTURES[name])
    uri = f"{SCHEMES[name]}://test/flow/{engine}-{next(numbers)}"
    keywords = {"storage_options": server.storage_options, "engine": engine}
    return uri, {**keywords, "single_writer": True} if name == "careless" else keywords


def weights(rank: int, step: int) -> bytes:
    return bytes([rank + 1, step % 251]) * 300_000


def train(uri: str, keywords: dict[str, Any], token: str, directory: str, die_at: int | None) -> list[int]:
    """Save steps 0 to 5 from wherever the store is; at `die_at` one rank dies before its save, the other one within."""
    rank = int(os.environ["RANK"])
    group = StorageGroup(rank=rank, world_size=2, start_token=token)
    saved = []
    with ckptstore.open_store(uri, **keywords, group=group, grace_seconds=0, retention=KeepLatest(3)) as store:
        checkpoint = store.resume()
        if checkpoint:
            with checkpoint.as_directory() as path:
                assert (path / f"model-rank={rank:05d}.bin").read_bytes() == weights(rank, checkpoint.step)
        for step in range(checkpoint.step + 1 if checkpoint else 0, 6):
            mine = Path(directory) / f"{rank}-{step}"
            mine.mkdir(parents=True)
            (mine / "model.bin").write_bytes(weights(rank, step))
            if step == die_at:
                threading.Timer(1.0 if rank == 0 else 0.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
                time.sleep(60 if rank == 1 else 0)
            store.save_directory(step, mine, metrics={"loss": 1.0 / (step + 1)})
            saved.append(step)
    return saved


def read(uri: str, keywords: dict[str, Any]) -> tuple[int, str]:
    with ckptstore.open_store(uri, **keywords) as store:
        checkpoint = store.latest()
        assert checkpoint is not None
        with checkpoint.as_directory() as path:
            for rank in range(2):
                assert (path / f"model-rank={rank:05d}.bin").read_bytes() == weights(rank, checkpoint.step)
            return checkpoint.step, str(path)


@pytest.mark.timeout(300)
def test_a_life(place: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    uri, keywords = place
    with pytest.raises(RanksFailed):
        run_ranks(2, train, uri, keywords, "first", str(tmp_path / "a"), 2, timeout_seconds=120)
    saved = run_ranks(2, train, uri, keywords, "second", str(tmp_path / "b"), None, timeout_seconds=120)
    assert saved == [[2, 3, 4, 5]] * 2

    found = run_ranks(2, read, uri, keywords, timeout_seconds=120)
    assert {step for step, _ in found} == {5}
    assert len({path for _, path in found}) == 1, "one copy for the node"

    with ckptstore.open_store(uri, **keywords, grace_seconds=0, retention=KeepLatest(1)) as store:
        store.resume()
        (tmp_path / "last").mkdir()
        (tmp_path / "last" / "model.bin").write_bytes(weights(0, 6))
        store.save_directory(6, tmp_path / "last")
        time.sleep(1.1)  # the grace period is measured by the storage's clock, in whole seconds on some
        store.prune()
        store.collect_garbage()
        kept = {checkpoint.step: checkpoint for checkpoint in store}
        assert kept.keys() <= {5, 6}, "the newest, and what it was resumed from"
        kept[6].verify().raise_if_damaged()
        storage = open_storage(uri, storage_options=keywords["storage_options"], engine=keywords["engine"])
        attempts = {file.key.split("/")[1] for file in storage.list("checkpoints/")}
        assert attempts == {checkpoint.uri.rpartition("/")[2] for checkpoint in kept.values()}, "no orphan is left"
        storage.close()
        assert (kept[6].to_directory(tmp_path / "mine") / "model.bin").read_bytes() == weights(0, 6)

    with ckptstore.open_store(uri, **keywords) as store:
        store.save_directory(7, tmp_path / "last")
        store.roll_back(6)
        store.restore(7, pin=False).verify().raise_if_damaged()
        assert [checkpoint.step for checkpoint in store][-1] == 7
        store.roll_back(6)

    below, is_all = stores_below(uri.rpartition("/")[0], keywords["storage_options"])
    assert {item["uri"]: item["latest_step"] for item in below}[uri] == 6, below
    assert is_all

    given = dict(keywords)
    config = StoreConfig(single_writer=given.pop("single_writer", False))
    with (
        ckptstore.open_store(uri, **keywords) as store,
        closing(open_place(f"{uri}-copy", **given, config=config)) as target,
    ):
        report = copy_store(store, target)
        assert set(report.steps) == kept.keys()
    with ckptstore.open_store(f"{uri}-copy", **keywords) as copy:
        assert [checkpoint.step for checkpoint in copy] == sorted(kept)
        copy[6].verify().raise_if_damaged()
