"""Thinned checkpoints: what stays is as it was, on every way to it and beside all else that works on a store, and a
crash leaves the whole one or the thinned."""

from __future__ import annotations

import shutil
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
from saving import copied
from thread_ranks import run_threads

from ckptstore import (
    Checkpoint,
    CheckpointDamaged,
    CheckpointGone,
    CheckpointStore,
    CheckpointThinned,
    InvalidInput,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepWeights,
    KeepWithin,
    NoUsableCheckpoint,
    StorageUnavailable,
    merge,
    open_store,
)
from ckptstore.checkpoint import files_behind
from ckptstore.dcp import StoreWriter
from ckptstore.events import CheckpointSkipped, PruneFailed, listening
from ckptstore.loading.index_read import read_whole
from ckptstore.retention import Policy
from ckptstore.state.tensors.boxes import whole
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.testing import Call, with_faults
from ckptstore.testing.s3_server import s3_server
from ckptstore.tools.report.gather import Sighting
from ckptstore.tools.watching.store_watcher import StoreWatcher

OPTIMIZER = "optimizer*"
APART = KeepAll() | KeepWeights(KeepAll(), drop=(OPTIMIZER, "model.bias", "seen", "tied"))
"""Thins nothing by itself, and keeps what it names in files of their own."""
AT_ONCE: dict[str, Any] = {"timeout_seconds": 0.0}


class Training:
    """A large and a small tensor, and an optimizer with twice of that."""

    def __init__(self, *, more: bool = False) -> None:
        """With `more`, there are also tied tensors and values of every kind."""
        torch.manual_seed(7)
        self.model = torch.nn.Linear(640, 640)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.25)
        self.values: dict[str, Any] = {"epoch": 0, "history": [float(at) for at in range(2000)]}
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if more:
            self.state |= {"tied": self.model.weight.detach(), "values": self.values, "seen": b"x" * 70_000}

    def train(self) -> None:
        self.model(torch.ones(640)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.values["epoch"] += 1

    def save(self, store: CheckpointStore, *steps: int, **options: Any) -> None:
        """Train and save, and wait for what goes on behind each save."""
        for step in steps:
            self.train()
            store.save(step, self.state, metrics={"loss": 1.0 / (1 + step)}, **options)
            store._job.wait_for_prune()


def filled(root: Path, *steps: int, more: bool = False, retention: Policy = APART, **options: Any) -> CheckpointStore:
    store = open_store(root, durable=False, retention=retention, **options)
    Training(more=more).save(store, *steps)
    return store


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
    return filled(tmp_path / "store", 1, 2, 3, more=True)


def test_what_stays_is_as_it_was_on_every_way(store: CheckpointStore, tmp_path: Path) -> None:
    whole = store[2]
    whole.set_metadata({"note": 1})
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

    fresh = Training(more=True)
    thinned.load({"model": fresh.model, "tied": torch.zeros(640, 640)})
    assert torch.equal(fresh.model.weight, before["model"]["weight"])
    fresh.train()
    thinned.load(fresh.state, strict=False)
    thinned.load(fresh.state, include="model.*")
    assert torch.equal(fresh.model.weight, before["model"]["weight"])

    record = reader.read_log(tmp_path / "store/log")[thinned.number - 1]  # type: ignore[operator]
    tensors, values = reader.read_checkpoint(tmp_path / "store", record)
    assert not [key for key in (*tensors, *values) if key.startswith("optimizer")]
    assert tensors["model.weight"][2] == before["model"]["weight"].numpy().tobytes()
    stock = {"model": {"weight": torch.zeros(640, 640), "bias": torch.zeros(640)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(stock, checkpoint_id=thinned.uri, no_dist=True)
    assert torch.equal(stock["model"]["weight"], before["model"]["weight"])
    assert_equal(Checkpoint.from_uri(thinned.uri).to_dict(), before)


def test_a_load_of_what_was_dropped_says_when_and_a_resume_passes_over_it(store: CheckpointStore) -> None:
    store.thin(2, ["optimizer.state.*"])  # an optimizer that has not trained has none either
    for include in (None, "*", "optimizer.*", ["model.*", "optimizer.state.*"]):
        with pytest.raises(CheckpointThinned, match=r"step 2 was thinned at 2.*, and lacks optimizer.state"):
            store[2].load(Training(more=True).state, include=include)
    for path in Path(store[3].uri).glob("*.distcp"):
        path.chmod(0o600)
        path.write_bytes(b"")
    fresh = Training(more=True)
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
        store.resume(Training(more=True).state)


def test_it_is_undone_within_the_grace_period_and_not_after(store: CheckpointStore) -> None:
    before = store[1].to_dict()
    store.thin(1, "optimizer.*")
    assert [(item.step, item.held_by) for item in store.trash()] == [(1, None)]
    restored = store.restore(1)
    assert restored.thinned is None
    assert_equal(restored.to_dict(), before)
    assert [entry.is_pinned for entry in store.entries()] == [True, False, False]
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


def test_it_can_be_thinned_further(store: CheckpointStore) -> None:
    store.thin(1, "optimizer.*")
    with pytest.raises(InvalidInput, match=r"Step 1 was thinned at .*, and lacks optimizer.*: nothing is left to drop"):
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
    def there() -> list[list[Path]]:
        return [sorted(Path(store.uri, name).rglob("*")) for name in ("checkpoints", "log")]

    before = there()
    for step, drop, message in [
        (3, "optimizer.*", "Step 3 was not thinned: the latest"),
        (1, "optimiser.*", r"'optimiser.\*' fits no key of the checkpoint; did you mean 'optimizer.\*'"),
        (1, "*", "Every key of the checkpoint would be dropped"),
        (1, ["optimizer.*", ""], "must be one or several patterns"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            store.thin(step, drop)
    with pytest.raises(CheckpointGone):
        store.thin(9, "optimizer.*")
    report = store.thin(1, "optimizer.*", dry_run=True)
    assert 0.6 < report.freed_bytes / report.size_bytes < 0.7
    assert there() == before
    with open_store(store.uri) as plain:
        plain.save_directory(4, tmp_path / "store/log")
        Training(more=True).save(plain, 5, 6)
        before = there()
        for step, drop, message in [
            (4, "optimizer.*", "Step 4 is a checkpoint of files"),
            (5, "model.*", r"Step 5 was not thinned: state-rank=00000-00.distcp holds keys .*KeepWeights"),
            (5, "values*", "Thinning step 5 would free nothing"),
        ]:
            with pytest.raises(InvalidInput, match=message):
                plain.thin(step, drop)
        assert there() == before


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
    with filled(tmp_path, 1, 2, more=True) as store:
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
        assert again.resume(Training(more=True).state).step == 2  # type: ignore[union-attr]


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
        Training(more=True).save(store, *range(6))
        assert ([item.step for item in store], thinned(store)) == ([0, 2, 4, 5], [0, 2])
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
        fresh = Training(more=True)
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
        for step in (3, 4):  # values lie in a file without tensors
            store.save(step, {"seen": torch.ones(9), "epoch": 3})
        store.thin(3, "seen")
        dcp.load(found := {"epoch": 0}, checkpoint_id=store[3].uri, no_dist=True)
        assert found == store[3].to_dict() == {"epoch": 3}


def test_ranks_are_known_to_hold_what_was_tied_to_what_is_dropped(tmp_path: Path) -> None:
    """A reader of the index reads the parts of these ranks alone."""

    def save(store: CheckpointStore, rank: int) -> None:
        weight, other = torch.arange(1_000_000.0), torch.zeros(500_000)
        for step in (1, 2):
            store.save(step, {"a": weight, "apart": other, "b": weight, "c": other + 1})

    policy = KeepAll() | KeepWeights(KeepAll(), "a*")
    assert run_threads(3, tmp_path, save, retention=policy, durable=False) == [None] * 3
    with open_store(tmp_path) as store:
        store.thin(1, "a*")
        files = files_behind(store[1])
        index = read_whole(files, files.read_manifest()[0])
        assert index is not None
        assert index.outline is not None
        held = [(name, part.rank) for part in index.parts for name in part.names]
        assert {name for name, _ in held} == {"b", "c"}
        for name, rank in held:
            assert rank in index.outline.holders(name, 0, whole(index.tensors[name].shape))
        assert torch.equal(store[1].to_dict()["b"], torch.arange(1_000_000.0))


@pytest.mark.parametrize(
    ("drop", "why", "failed"), [("optim.*", "fits no key", [0, 1, 2]), ("optimizer*", "holds keys that stay", [0])]
)
def test_what_a_rule_cannot_thin_stays_and_is_told_once(tmp_path: Path, drop: str, why: str, failed: list[int]) -> None:
    failures: list[str] = []
    policy = KeepLatest(1) | KeepWeights(KeepEvery(steps=1), drop=drop)
    if "stay" in why:
        with open_store(tmp_path, durable=False) as store:  # without such a rule; the next job resumes from step 1
            Training().save(store, *range(2))
    with (
        listening(lambda event: failures.append(event.error), PruneFailed),
        open_store(tmp_path, retention=policy, durable=False) as store,
    ):
        Training().save(store, *range(len(store), 3))
        assert [item.step for item in store] == [0, 1, 2]
        Training().save(store, *range(3, 4))
        with pytest.raises(InvalidInput, match=why):
            open_store(tmp_path).retain(policy)
        assert [item.step for item in store if item.thinned] == [step for step in (2,) if "stay" in why]
    assert [failure.partition(":")[0] for failure in failures] == [f"step {step} was not thinned" for step in failed]
    assert all(why in failure for failure in failures)


def thinned(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store if checkpoint.thinned is not None]


# Followers


def test_a_follower_gets_what_is_thinned_once_and_in_order(tmp_path: Path) -> None:
    with filled(tmp_path / "store", 1, 2, 3) as store:
        following = store.follow(cursor="place", **AT_ONCE)
        assert [next(following).step, next(following).step] == [1, 2]
        following.close()
        whole = {step: store[step] for step in (1, 2)}
        store.thin(1, OPTIMIZER)
        store.thin(2, OPTIMIZER)
        Training().save(store, 4)
        store.thin(3, OPTIMIZER)
        found = list(store.follow(cursor="place", **AT_ONCE))
        assert [(one.step, one.thinned is not None) for one in found] == [(2, True), (3, True), (4, False)]
        assert list(store.follow(cursor="place", **AT_ONCE)) == []
        assert [one.step for one in store.follow(**AT_ONCE)] == [1, 2, 3, 4]
        assert [one.step for one in store.follow(latest_only=True, **AT_ONCE)] == [4]
        for after in (1, whole[1], store[1]):
            assert [one.step for one in store.follow(after=after, **AT_ONCE)] == [2, 3, 4]
        store.thin(2, "model.bias")
        store.restore(1)
        assert list(store.follow(cursor="place", **AT_ONCE)) == []
        assert list(store.follow(after="latest", **AT_ONCE)) == []


def test_what_was_thinned_and_removed_before_its_turn_is_named_with_the_reason(tmp_path: Path) -> None:
    reasons: list[str] = []
    with (
        filled(tmp_path / "store", 1) as store,
        listening(lambda event: reasons.append(event.reason), CheckpointSkipped),
    ):
        assert [one.step for one in store.follow(cursor="place", **AT_ONCE)] == [1]
        Training().save(store, 2, 3)
        store.thin(2, OPTIMIZER)
        store.remove(2)
        assert [one.step for one in store.follow(cursor="place", **AT_ONCE)] == [3]
    assert reasons == ["it was moved to the trash before its turn: removed by hand"]


@pytest.mark.parametrize("where", ["disk", "s3"])
def test_a_checkpoint_with_a_follower_is_not_thinned_until_it_is_done(tmp_path: Path, where: str) -> None:
    with s3_server(buckets=["test"]) as server:
        place = {"uri": str(tmp_path / "store")}
        if where == "s3":
            place = {"uri": "s3://test/store", "storage_options": server.storage_options}
        policy = KeepLatest(1) | KeepWeights(KeepEvery(steps=1))
        with open_store(**place, retention=policy, durable=False) as store:
            training = Training()
            training.save(store, 1, 2)
            assert thinned(store) == [1]
            following = store.follow(after=1, **AT_ONCE)
            assert next(following).step == 2
            training.save(store, 3)
            assert thinned(store) == [1], "the follower is at 2"
            with pytest.raises(InvalidInput, match="Step 2 was not thinned: 1 readers hold a lease"):
                store.thin(2, OPTIMIZER)
            assert next(following).step == 3
            training.save(store, 4)
            assert thinned(store) == [1, 2]
            store.thin(3, OPTIMIZER, force=True)
            following.close()
            assert store.verify_log() == []


def test_a_follower_whose_checkpoint_is_thinned_and_pruned_meanwhile_gets_what_is_left(tmp_path: Path) -> None:
    """Between its look and its lease."""
    with filled(tmp_path / "store", 1, 2, grace_seconds=0) as store, open_store(tmp_path / "store") as other:
        following = other.follow(cursor="place", **AT_ONCE)
        from ckptstore.upkeep import leases

        hold, calls = leases.hold, []

        def hold_late(*args: Any, **options: Any) -> Any:
            calls.append(args)
            if len(calls) == 1:
                store.thin(1, OPTIMIZER)
                store.prune()
            return hold(*args, **options)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(leases, "hold", hold_late)
            found = [(one.step, one.thinned is not None) for one in following]
        assert found == [(1, True), (2, False)]


# Annotations


def test_annotations_survive_a_thin_a_restore_and_a_prune(tmp_path: Path) -> None:
    with filled(tmp_path / "store", 1, 2, 3, grace_seconds=0) as store:
        whole = store[1]
        store.annotate(1, {"eval": 0.5})
        store.thin(1, OPTIMIZER)
        store.annotate(1, {"bleu": 3})
        store.annotate(whole, {"late": 7})  # an evaluation that began before it was thinned
        expected = {"loss": 0.5, "eval": 0.5, "bleu": 3.0, "late": 7.0}
        assert store[1].metrics == expected
        assert store.best("bleu").number == store[1].number
        assert next(entry.checkpoint.metrics for entry in store.entries()) == expected
        assert store.history()[0].metrics == expected
        with open_store(store.uri) as other:
            assert next(other.follow(**AT_ONCE)).metrics == expected
        shown = {one.number: one.metrics for one in Sighting(store).look().checkpoints}
        assert shown[store[1].number] == shown[whole.number] == expected  # type: ignore[index]
        store.restore(1, pin=False)
        assert (store[1].number, store[1].metrics) == (whole.number, expected)
        store.thin(1, OPTIMIZER)
        store.prune()
        assert store.trash() == []
        assert store[1].metrics == expected
        store.annotate(whole, {"late": 8})
        store.annotate(store[1], {"bleu": 4})
        assert store[1].metrics == {**expected, "late": 8.0, "bleu": 4.0}
        record = store._job.log.newest()
        assert record is not None
        assert len(record.state.annotated) == 1
        store.remove(1)
        store.prune()
        record = store._job.log.newest()
        assert record is not None
        assert not record.state.annotated
        assert store.history()[0].metrics == {**expected, "late": 8.0, "bleu": 4.0}
        assert (store.history()[0].status, store.history()[0].removed_because) == ("deleted", "removed by hand")
        assert store.verify_log() == []


def test_retention_by_best_uses_the_annotations_of_what_is_thinned(tmp_path: Path) -> None:
    policy = KeepLatest(1) | KeepWeights(KeepBest(1, "eval", "min"))
    with filled(tmp_path / "store", 1, 2) as store:
        store.annotate(1, {"eval": 0.1})
        store.annotate(2, {"eval": 0.9})
    with open_store(tmp_path / "store", retention=policy, durable=False, missing="worst") as store:
        training = Training()
        training.save(store, 3)
        assert thinned(store) == [1]
        training.save(store, 4)
        assert ([one.step for one in store], thinned(store)) == ([1, 2, 4], [1]), "it resumed from 2"
        store.annotate(4, {"eval": 0.05})
        training.save(store, 5)
        assert [(one.step, one.thinned is not None) for one in store] == [(2, False), (4, True), (5, False)]


# Budgets


def test_a_budget_counts_what_is_left_and_thinning_makes_room(tmp_path: Path) -> None:
    with filled(tmp_path / "one", 0) as store:
        whole_bytes = store[0].size_bytes
    rules = KeepLatest(2) | KeepWeights(KeepEvery(steps=1))
    budget = int(3.1 * whole_bytes)
    with filled(tmp_path / "store", *range(9), retention=rules & KeepWithin(budget), grace_seconds=0) as store:
        assert [one.step for one in store if one.thinned is None] == [7, 8]
        held = sum(one.size_bytes for one in store)
        assert 2.6 * whole_bytes < held <= budget, "as many as fit stay"
        assert min(thinned(store)) == 7 - len(thinned(store)), "the newest"
    with open_store(tmp_path / "store", durable=False) as store:
        verdicts = store.retain((KeepLatest(1) | KeepWeights(KeepEvery(steps=1))) & KeepWithin(int(1.5 * whole_bytes)))
        assert [one.step for one in store] == [7, 8]
        assert thinned(store) == [7], "what is thinned by hand is counted at once"
        assert {verdict.step for verdict in verdicts if verdict.keep} == {7, 8}


# Merges, publications, copies


def test_weights_of_thinned_checkpoints_are_merged_and_what_is_missing_is_said(tmp_path: Path) -> None:
    with filled(tmp_path / "store", 1, 2, 3) as store:
        before = [store[step].to_dict()["model"]["weight"] for step in (1, 2)]
        for step in (1, 2):
            store.thin(step, OPTIMIZER)
        found = merge([store[1], store[2]], tmp_path / "both")
        assert (found.num_tensors, found.left_out) == (2, {})
        from safetensors.torch import load_file

        merged = load_file(tmp_path / "both" / "model.safetensors")
        assert torch.equal(merged["weight" if "weight" in merged else "model.weight"], (before[0] + before[1]) / 2)
        found = merge([store[3], store[2]], tmp_path / "mixed")
        assert found.num_tensors == 2
        assert all(key.startswith("optimizer.") and "it is not in" in why for key, why in found.left_out.items())
        assert len(found.left_out) == 6
        with pytest.raises(InvalidInput, match="it is not in"):
            merge([store[3], store[2]], tmp_path / "none", include=OPTIMIZER)


@pytest.mark.parametrize("is_log_lost", [False, True])
def test_copies_and_what_is_salvaged_stay_thinned_with_their_metrics(tmp_path: Path, is_log_lost: bool) -> None:
    with filled(tmp_path / "store", 1, 2, 3) as store:
        store.annotate(1, {"early": 1})
        store.thin(1, OPTIMIZER)
        store.annotate(1, {"late": 2})
        left = store[1].to_dict()
        copied(tmp_path / "store", tmp_path / "copy")
        store.annotate(1, {"later": 3})
        assert copied(tmp_path / "store", tmp_path / "copy")["present_steps"] == [1, 2, 3]
    if is_log_lost:
        shutil.rmtree(tmp_path / "store/log")
    copied(tmp_path / "store", tmp_path / "salvaged", "--salvage")
    for name in ("copy", "salvaged"):
        with open_store(tmp_path / name) as copy:
            assert [one.step for one in copy] == [1, 2, 3]
            if is_log_lost and name == "salvaged":
                assert thinned(copy) == [], "both were there, and the whole one has all that the other has"
                continue
            assert thinned(copy) == [1]
            assert copy[1].metrics == {"loss": 0.5, "early": 1.0, "late": 2.0, "later": 3.0}
            assert copy[1].thinned.dropped == (OPTIMIZER,)  # type: ignore[union-attr]
            assert torch.equal(copy[1].to_dict()["model"]["weight"], left["model"]["weight"])
            with pytest.raises(CheckpointThinned):
                copy[1].load(Training().state)
            copy.annotate(1, {"new": 1})
            assert copy[1].metrics["new"] == 1.0
            resumed = copy.resume(Training().state)
            assert resumed is not None
            assert resumed.step == 3


# References


def test_what_later_saves_refer_to_stays_whole_until_they_are_gone(tmp_path: Path) -> None:
    policy = KeepLatest(2) | KeepWeights(KeepEvery(steps=1))
    with open_store(tmp_path / "store", retention=policy, durable=False, grace_seconds=0) as store:
        model, optimizer = torch.nn.Linear(600, 600), torch.nn.Linear(600, 600)
        state = {"model": model, "optimizer": optimizer}
        for step in range(6):
            torch.nn.init.normal_(model.weight)
            store.save(step, state, incremental="reference" if step < 4 else False)
            store._job.wait_for_prune()
            if step == 3:
                assert thinned(store) == [1], "1 refers to 0, and nobody to 1"
                with pytest.raises(InvalidInput, match=r"Step 0 was not thinned: step .* refers? to its files"):
                    store.thin(0, OPTIMIZER)
        for checkpoint in store:
            checkpoint.verify().raise_if_damaged()
        assert thinned(store) == [1, 2, 3], "what these were refers to 0 from the trash, until a prune"
        store.prune()
        verdicts = store.retain(policy)
        assert thinned(store) == [0, 1, 2, 3]
        assert all(verdict.keep for verdict in verdicts)
        store.prune()
        for checkpoint in store:
            checkpoint.verify().raise_if_damaged()
        assert store.verify_log() == []


# Those who look


def test_a_watcher_and_a_report_see_no_new_commit_and_what_is_left(tmp_path: Path) -> None:
    with filled(tmp_path / "store", 1, 2) as store:
        watcher = StoreWatcher(LocalStorage(tmp_path / "store"))
        store.pin(1)
        watcher.look()
        store.thin(1, OPTIMIZER, force=True)
        looks = [watcher.look(), StoreWatcher(LocalStorage(tmp_path / "store")).look()]
        for look in looks:
            assert [(commit.step, commit.dropped) for commit in look.commits] == [(2, ()), (1, (OPTIMIZER,))]
            assert look.commits[1].size_bytes == store[1].size_bytes
            assert look.num_live == 2
        assert [change.kind for change in looks[0].changes] == ["log"]
        store.restore(1, pin=False)
        for look in (watcher.look(), StoreWatcher(LocalStorage(tmp_path / "store")).look()):
            assert [(commit.step, commit.dropped) for commit in look.commits] == [(2, ()), (1, ())]
            assert look.commits[1].size_bytes == store[1].size_bytes
        seen = Sighting(store).look()
        assert seen.health.gaps == ()
        held = [(one.step, one.status, one.is_pinned) for one in seen.checkpoints]
        assert held == [(1, "live", True), (1, "trash", False), (2, "live", False)]


# What goes wrong meanwhile


def test_what_is_pinned_meanwhile_stays_whole(tmp_path: Path) -> None:
    with filled(tmp_path, 1, 2) as other:
        wait: list[int] = []

        def pin(call: Call) -> None:
            if call.verb == "create" and call.key.endswith("ckptstore.json") and not wait:
                wait.append(1)
                other.pin(1)

        with with_faults(open_store(tmp_path, durable=False), pin) as store:
            with pytest.raises(InvalidInput, match="With force"):
                store.thin(1, OPTIMIZER)
            assert thinned(store) == []
            assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_what_may_have_been_thinned_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "1")
    with filled(tmp_path, 1, 2) as other:
        key = f"log/{other.latest().number + 1:010d}.json"  # type: ignore[union-attr,operator]
    created: list[str] = []

    def cut_off(call: Call) -> None:
        if call.key == key and call.verb == "create" and call.phase == "after":
            created.append(key)
        if created and call.key.startswith(("log/", "latest")):
            raise StorageUnavailable("it does not answer")

    with with_faults(open_store(tmp_path, durable=False), cut_off) as store:
        with pytest.raises(StorageUnavailable) as caught:
            store.thin(1, OPTIMIZER)
        assert caught.value.committed is None
    with open_store(tmp_path) as store:
        assert thinned(store) == [1]
        assert store[1].verify().ok


def test_what_is_not_there_as_it_was_written_is_not_thinned(tmp_path: Path) -> None:
    with filled(tmp_path, 1, 2):
        before = {*(tmp_path / "checkpoints").iterdir()}

    def lose(call: Call) -> None:
        if (call.verb, call.phase) == ("list", "before") and call.key.startswith("checkpoints/step-0000000001"):
            for new in {*(tmp_path / "checkpoints").iterdir()} - before:
                for file in new.glob("*.distcp"):
                    file.unlink()

    with with_faults(open_store(tmp_path, durable=False), lose) as store:
        with pytest.raises(CheckpointDamaged, match="is missing"):
            store.thin(1, OPTIMIZER)
        assert thinned(store) == []
    assert {*(tmp_path / "checkpoints").iterdir()} == before
