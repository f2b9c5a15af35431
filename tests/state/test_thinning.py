"""Thinned checkpoints: what stays is as it was, on every way to it, and a crash leaves the whole one or the thinned."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from uuid import uuid4

import independent_reader as reader
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptstore import (
    Checkpoint,
    CheckpointDamaged,
    CheckpointGone,
    CheckpointStore,
    CheckpointThinned,
    InvalidInput,
    KeepAll,
    KeepEvery,
    KeepLatest,
    KeepWeights,
    NoUsableCheckpoint,
    open_store,
)
from ckptstore.dcp import StoreWriter
from ckptstore.events import PruneFailed, listening
from ckptstore.testing import Call
from ckptstore.testing.s3_server import s3_server
from ckptstore.testing.stores import with_faults

APART = KeepAll() | KeepWeights(KeepAll(), drop=("optimizer*", "seen", "tied"))
"""Thins nothing by itself, and keeps what it names in files of their own."""


class Job:
    """A small training: large and small tensors, tied ones, values of every kind."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(640, 640), torch.nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.25)
        self.values: dict[str, Any] = {"epoch": 0, "history": [float(at) for at in range(2000)]}
        self.seen = b"x" * 70_000

    @property
    def state(self) -> dict[str, Any]:
        shared = self.model[0].weight.detach()
        rest = {"tied": shared, "values": self.values, "seen": self.seen}
        return {"model": self.model, "optimizer": self.optimizer, **rest}

    def train(self) -> None:
        for layer in self.model:
            layer(torch.ones(layer.in_features)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.values["epoch"] += 1


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """The leaves of nested dicts and tuples."""
    value = dict(enumerate(value)) if isinstance(value, tuple) else value
    if isinstance(value, Mapping):
        return {name: leaf for part, item in value.items() for name, leaf in flat(item, f"{key}.{part}").items()}
    return {key: value}


def assert_equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    left, right = flat(found), flat(expected)
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key], key


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Steps 1 to 3 of a training."""
    job, store = Job(), open_store(tmp_path / "store", retention=APART, durable=False)
    for step in (1, 2, 3):
        job.train()
        store.save(step, job.state)
    return store


def test_what_stays_is_as_it_was_on_every_way(store: CheckpointStore, tmp_path: Path) -> None:
    whole = store[2]
    before, size_bytes = whole.to_dict(), whole.size_bytes
    report = store.thin(2, "optimizer*")
    thinned = store[2]
    assert report.freed_bytes == size_bytes - thinned.size_bytes > 0.6 * size_bytes
    assert thinned.number != whole.number
    assert thinned.thinned is not None
    assert (thinned.thinned.dropped, thinned.thinned.size_bytes) == (("optimizer*",), size_bytes)
    assert thinned.metadata == whole.metadata
    del before["optimizer"]
    assert_equal(thinned.to_dict(), before)
    thinned.verify().raise_if_damaged()
    assert store.verify_log() == []
    assert [entry.checkpoint.step for entry in store.entries()] == [1, 2, 3]
    assert [(save.step, save.status, save.size_bytes) for save in store.history()][1] == (2, "live", thinned.size_bytes)

    fresh = Job()
    thinned.load({"model": fresh.model, "tied": torch.zeros(640, 640)})
    assert torch.equal(fresh.model[0].weight, before["model"]["0.weight"])
    fresh.train()
    thinned.load(fresh.state, strict=False)
    thinned.load(fresh.state, include="model.*")
    assert torch.equal(fresh.model[0].weight, before["model"]["0.weight"])

    record = reader.read_log(tmp_path / "store/log")[thinned.number - 1]  # type: ignore[operator]
    tensors, values = reader.read_checkpoint(tmp_path / "store", record)
    assert not [key for key in (*tensors, *values) if key.startswith("optimizer")]
    assert tensors["model.0.weight"][2] == before["model"]["0.weight"].numpy().tobytes()
    stock = {"model": {"0.weight": torch.zeros(640, 640), "1.bias": torch.zeros(4)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(stock, checkpoint_id=thinned.uri, no_dist=True)
    assert torch.equal(stock["model"]["0.weight"], before["model"]["0.weight"])
    assert_equal(Checkpoint.from_uri(thinned.uri).to_dict(), before)


def test_a_load_of_what_was_dropped_says_when_and_a_resume_passes_over_it(store: CheckpointStore) -> None:
    store.thin(2, ["optimizer.state.*"])  # an optimizer that has not trained has none either
    for include in (None, "*", "optimizer.*", ["model.*", "optimizer.state.*"]):
        with pytest.raises(CheckpointThinned, match=r"step 2 was thinned at 2.*, and lacks optimizer.state"):
            store[2].load(Job().state, include=include)
    for path in Path(store[3].uri).glob("*.distcp"):
        path.chmod(0o600)
        path.write_bytes(b"")
    fresh = Job()
    resumed = store.resume(fresh.state)
    assert resumed is not None
    assert (resumed.step, fresh.values["epoch"]) == (1, 1)
    assert resumed.load_report is not None
    passed_over = resumed.load_report.passed_over
    assert ["was thinned" in reason for reason in passed_over] == [False, True]
    with open_store(store.uri) as again:
        resumed = again.resume()
        assert resumed is not None
        assert resumed.step == 1
    with open_store(store.uri) as again, pytest.raises(InvalidInput, match="Step 2 was thinned"):
        again.roll_back(2)


def test_without_a_whole_one_a_resume_says_why(store: CheckpointStore) -> None:
    for step in (1, 2):
        store.thin(step, "optimizer.*")
    for path in Path(store[3].uri).glob("*.distcp"):
        path.unlink()
    with pytest.raises(NoUsableCheckpoint, match=r"step 2 was thinned.*step 1 was thinned"):
        store.resume(Job().state)


def test_it_is_undone_within_the_grace_period_and_not_after(store: CheckpointStore) -> None:
    before = store[1].to_dict()
    store.thin(1, "optimizer.*")
    assert [(item.step, item.held_by) for item in store.trash()] == [(1, None)]
    restored = store.restore(1)
    assert restored.thinned is None
    assert_equal(restored.to_dict(), before)
    assert [(entry.checkpoint.step, entry.is_pinned) for entry in store.entries()] == [
        (1, True),
        (2, False),
        (3, False),
    ]
    with pytest.raises(InvalidInput, match="Step 1 is live"):
        store.restore(1)
    with pytest.raises(InvalidInput, match="Step 1 was not thinned: pinned"):
        store.thin(1, "optimizer.*")
    store.thin(1, "optimizer.*", force=True)
    assert store.entries()[0].is_pinned
    with open_store(store.uri, grace_seconds=0) as again:
        assert sorted(item.step for item in again.prune()) == [1, 1]
        assert len(list(Path(again.uri, "checkpoints").iterdir())) == 3
        with pytest.raises(InvalidInput, match="Step 1 is live"):
            again.restore(1)
        again[1].verify().raise_if_damaged()


def test_what_is_thinned_already_says_so(store: CheckpointStore) -> None:
    store.thin(1, "optimizer.*")
    with pytest.raises(InvalidInput, match=r"Step 1 was thinned at .*, and lacks optimizer.*: nothing is left to drop"):
        store.thin(1, "optimizer.*")


def test_it_can_be_thinned_further(store: CheckpointStore) -> None:
    store.thin(1, "optimizer.*")
    store.thin(1, ["seen", "tied"])
    assert store[1].thinned is not None
    assert store[1].thinned.dropped == ("optimizer.*", "seen", "tied")
    found = store[1].to_dict()
    assert found.keys() == {"model", "values"}
    assert found["values"] == {"epoch": 1, "history": [float(at) for at in range(2000)]}
    assert len(store.trash()) == 2
    assert store.restore(1).thinned.dropped == ("optimizer.*",)  # type: ignore[union-attr]


def test_it_refuses_before_anything_is_written(store: CheckpointStore, tmp_path: Path) -> None:
    before = [sorted(Path(store.uri, name).rglob("*")) for name in ("checkpoints", "log")]
    for step, drop, message in [
        (3, "optimizer.*", "Step 3 was not thinned: the latest"),
        (1, "optimiser.*", r"'optimiser.\*' fits no key of the checkpoint; did you mean 'optimizer.\*'"),
        (1, "*", "Every key of the checkpoint would be dropped"),
        (1, [], "must be one or several patterns"),
        (1, ["optimizer.*", ""], "must be one or several patterns"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            store.thin(step, drop)
    with pytest.raises(CheckpointGone):
        store.thin(9, "optimizer.*")
    report = store.thin(1, "optimizer.*", dry_run=True)
    assert 0.6 < report.freed_bytes / report.size_bytes < 0.7
    assert [sorted(Path(store.uri, name).rglob("*")) for name in ("checkpoints", "log")] == before
    with open_store(store.uri) as plain:
        plain.save_directory(4, tmp_path / "store/log")
        for step in (5, 6):
            plain.save(step, Job().state)
        before = [sorted(Path(store.uri, name).rglob("*")) for name in ("checkpoints", "log")]
        for step, drop, message in [
            (4, "optimizer.*", "Step 4 is a checkpoint of files"),
            (
                5,
                "model.*",
                r"Step 5 was not thinned: state-rank=00000-00.distcp holds keys .*KeepWeights",
            ),
            (5, "values*", "Thinning step 5 would free nothing"),
        ]:
            with pytest.raises(InvalidInput, match=message):
                plain.thin(step, drop)
        assert [sorted(Path(store.uri, name).rglob("*")) for name in ("checkpoints", "log")] == before


def test_nothing_comes_of_one_whose_files_are_not_all_whole(store: CheckpointStore) -> None:
    """They are linked, or copied inside the storage, and no byte of them is read."""
    *_, path = sorted(Path(store[1].uri).glob("*.distcp"))
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointDamaged, match=f"{path.name} has"):
        store.thin(1, "optimizer.*")
    assert store[1].thinned is None
    assert len(list(Path(store.uri, "checkpoints").iterdir())) == 3


class Died(BaseException):
    """The process was killed: nothing it does has an effect any more."""


class DieAt:
    """A hook that ends the process at its n-th writing call, before it, in its middle or after it."""

    WRITES = frozenset(
        {"write", "write_many", "write_part", "finish", "create", "copy", "link", "delete", "persist", "make_directory"}
    )

    def __init__(self, number: int, when: str) -> None:
        self.left, self.when, self.is_dead = number, when, False

    def __call__(self, call: Call) -> None:
        if self.is_dead:
            raise Died
        if call.verb not in self.WRITES or call.phase != ("after" if self.when == "after" else "before"):
            return
        self.left -= 1
        if self.left < 0:
            self.is_dead = True
            if self.when == "during":
                call.do_half()
            raise Died


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_kill_at_any_write_leaves_the_whole_one_or_the_thinned(tmp_path: Path, when: str) -> None:
    job = Job()
    with open_store(tmp_path, retention=APART, durable=False) as store:
        for step in (1, 2):
            job.train()
            store.save(step, job.state)
        whole = store[1].to_dict()
    thinned = {name: item for name, item in whole.items() if name != "optimizer"}
    number, was_thinned = 0, False
    while not was_thinned:
        hook = DieAt(number, when)
        store = with_faults(open_store(tmp_path, durable=False), hook)
        try:
            store.thin(1, "optimizer.*", force=True)  # whoever was killed has left its lease
        except Died:
            assert hook.is_dead
        number += 1
        with open_store(tmp_path) as again:
            assert again.verify_log() == []
            found = again[1]
            found.verify().raise_if_damaged()
            was_thinned = found.thinned is not None
            assert_equal(found.to_dict(), thinned if was_thinned else whole)
            assert [item.step for item in again] == [1, 2]
    assert number > 5
    for path in (tmp_path / "leases").iterdir():
        path.unlink()  # those that were killed took them
    with open_store(tmp_path, grace_seconds=0) as again:
        assert again.collect_garbage(claim=True).left == {}
        again.prune()
        assert len(list((tmp_path / "checkpoints").iterdir())) == 2
        assert_equal(again[1].to_dict(), thinned)
        assert again.resume(Job().state).step == 2  # type: ignore[union-attr]


def saved(store: CheckpointStore, steps: range) -> Job:
    """A training that saves."""
    job = Job()
    for step in steps:
        job.train()
        store.save(step, job.state)
        store._job.wait_for_prune()
    return job


@pytest.fixture(params=["disk", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Where a store is to be."""
    if request.param == "s3":
        with s3_server(buckets=["test"]) as server:
            yield {"uri": "s3://test/store", "storage_options": server.storage_options}
    else:
        yield {"uri": str(tmp_path / "store") if request.param == "disk" else f"memory://{uuid4().hex}"}


def test_retention_thins_behind_the_saves_and_deletes_whole_files(place: dict[str, Any]) -> None:
    policy = KeepLatest(2) | KeepWeights(KeepEvery(steps=2))
    with open_store(**place, retention=policy, grace_seconds=0, durable=False) as store:
        saved(store, range(6))
        assert [(item.step, item.thinned is not None) for item in store] == [
            (0, True),
            (2, True),
            (4, False),
            (5, False),
        ]
        apart = {receipt.name: receipt for receipt in store[4].files if receipt.name.endswith(".distcp")}
        (left,) = (receipt for receipt in store[2].files if receipt.name.endswith(".distcp"))
        assert len(apart) == 2
        assert left.size_bytes < 0.4 * sum(receipt.size_bytes for receipt in apart.values())
        assert left._replace(digest=None) == apart[left.name]._replace(digest=None)  # it was linked, or copied
        assert not any(key.startswith("optimizer") for key in store[2].keys())  # noqa: SIM118
        for item in store:
            item.verify().raise_if_damaged()
        verdicts = store.retain(policy, dry_run=True)
        assert [(item.step, item.drops) for item in verdicts if item.drops] == [
            (0, ("optimizer*",)),
            (2, ("optimizer*",)),
        ]
        store.prune()
        assert store.trash() == []
        assert store.verify_log() == []
        fresh = Job()
        resumed = store.resume(fresh.state)
        assert resumed is not None
        assert (resumed.step, fresh.values["epoch"]) == (5, 6)


@pytest.mark.parametrize("way", ["save", "dcp"])
def test_the_keys_of_each_pattern_go_without_the_others(tmp_path: Path, way: str) -> None:
    """Tied tensors stay with those that stay, and what belongs to a value goes with it."""
    weight = torch.rand(300, 300)
    state: dict[str, Any] = {"aw": weight, "ab": torch.rand(3), "mw": weight, "n": torch.rand(5), "epoch": 3}
    more = {"pair": (torch.rand(4), torch.rand(2)), "seen": b"x" * 70_000} if way == "save" else {}
    state |= more
    policy = KeepAll() | KeepWeights(KeepAll(), ("a*", "ab", "pair", "seen"))
    with open_store(tmp_path, retention=policy, durable=False) as store:
        for step in (1, 2):
            if way == "save":
                store.save(step, state)
            else:
                dcp.save(state, storage_writer=StoreWriter(store.dcp_target(), step=step), no_dist=True)
        for patterns in (["ab"], ["a*", *more]):
            state = {key: value for key, value in state.items() if not any(fnmatch(key, one) for one in patterns)}
            store.thin(1, patterns)
            assert_equal(store[1].to_dict(), state)
            store[1].verify().raise_if_damaged()
        found = {"mw": torch.zeros(300, 300), "n": torch.zeros(5), "epoch": 0}
        dcp.load(found, checkpoint_id=store[1].uri, no_dist=True)
        assert_equal(found, state)


@pytest.mark.parametrize(
    ("drop", "why", "failed"), [("optim.*", "fits no key", [0, 1, 2]), ("optimizer*", "holds keys that stay", [0])]
)
def test_what_a_rule_cannot_thin_stays_and_is_told_once(tmp_path: Path, drop: str, why: str, failed: list[int]) -> None:
    failures: list[str] = []
    policy = KeepLatest(1) | KeepWeights(KeepEvery(steps=1), drop=drop)
    if "stay" in why:
        with open_store(tmp_path, durable=False) as store:  # without such a rule; the next job resumes from step 1
            saved(store, range(2))
    with (
        listening(lambda event: failures.append(event.error), PruneFailed),
        open_store(tmp_path, retention=policy, durable=False) as store,
    ):
        saved(store, range(len(store), 3))
        assert [item.step for item in store] == [0, 1, 2]
        saved(store, range(3, 4))
        with pytest.raises(InvalidInput, match=why):
            open_store(tmp_path).retain(policy)
        assert [item.step for item in store if item.thinned] == [step for step in (2,) if "stay" in why]
    assert [failure.partition(":")[0] for failure in failures] == [f"step {step} was not thinned" for step in failed]
    assert all(why in failure for failure in failures)
