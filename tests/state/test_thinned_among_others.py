"""Thinned checkpoints beside what else works on a store: followers, annotations, budgets, merges, copies."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from saving import copied

from ckptstore import (
    CheckpointDamaged,
    CheckpointStore,
    CheckpointThinned,
    InvalidInput,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepWeights,
    KeepWithin,
    StorageUnavailable,
    merge,
    open_store,
)
from ckptstore.events import CheckpointSkipped, listening
from ckptstore.retention import Policy
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.testing import Call, with_faults
from ckptstore.testing.s3_server import s3_server
from ckptstore.tools.report.gather import Sighting
from ckptstore.tools.watching.store_watcher import StoreWatcher

OPTIMIZER = "optimizer*"
APART = KeepAll() | KeepWeights(KeepAll(), drop=(OPTIMIZER, "model.bias"))
"""Thins nothing by itself."""
AT_ONCE: dict[str, Any] = {"timeout_seconds": 0.0}


class Training:
    """A model of 160 KB, and an optimizer with twice of that."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Linear(200, 200)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def save(self, store: CheckpointStore, *steps: int, **options: Any) -> None:
        """Train and save, and wait for what goes on behind each save."""
        for step in steps:
            self.model(torch.ones(200)).sum().backward()
            self.optimizer.step()
            store.save(step, self.state, metrics={"loss": 1.0 / (1 + step)}, **options)
            store._job.wait_for_prune()


def filled(root: Path, *steps: int, retention: Policy = APART, **options: Any) -> CheckpointStore:
    store = open_store(root, durable=False, retention=retention, **options)
    Training().save(store, *steps)
    return store


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
        assert [(one.step, one.thinned is not None) for one in store] == [
            (1, True),
            (2, False),
            (4, False),
        ]  # it resumed from 2
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


def test_a_watcher_sees_no_new_commit_and_what_is_left(tmp_path: Path) -> None:
    with filled(tmp_path / "store", 1, 2) as store:
        watcher = StoreWatcher(LocalStorage(tmp_path / "store"))
        watcher.look()
        store.thin(1, OPTIMIZER)
        looks = [watcher.look(), StoreWatcher(LocalStorage(tmp_path / "store")).look()]
        for look in looks:
            assert [(commit.step, commit.dropped) for commit in look.commits] == [(2, ()), (1, (OPTIMIZER,))]
            assert look.commits[1].size_bytes == store[1].size_bytes
            assert look.num_live == 2
        assert [change.kind for change in looks[0].changes] == ["log"]
        store.restore(1)
        for look in (watcher.look(), StoreWatcher(LocalStorage(tmp_path / "store")).look()):
            assert [(commit.step, commit.dropped) for commit in look.commits] == [(2, ()), (1, ())]
            assert look.commits[1].size_bytes == store[1].size_bytes


def test_a_report_of_a_thinned_and_restored_checkpoint_agrees_with_the_log(tmp_path: Path) -> None:
    with filled(tmp_path / "store", 1, 2) as store:
        store.pin(1)
        store.thin(1, OPTIMIZER, force=True)
        store.restore(1, pin=False)
        seen = Sighting(store).look()
        assert seen.health.gaps == ()
        assert [(one.step, one.status, one.is_pinned) for one in seen.checkpoints] == [
            (1, "live", True),
            (1, "trash", False),
            (2, "live", False),
        ]


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
