"""What every tracker has to do: its tests inherit from `TrackerContract` and say how it is made and read."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptstore import Checkpoint, CheckpointGone, InvalidInput, InvalidMetric, KeepLatest, StoreMissing, open_store
from ckptstore.integrations import trackers
from ckptstore.integrations.trackers import Following, Reference, Tracker
from ckptstore.store import CheckpointStore

HOSTILE_METRICS = {
    "val loss %": 1.0,
    "val loss #": 2.0,
    "/abs": 3.0,
    "../up": 4.0,
    "a//b": 5.0,
    "...": 6.0,
    "é<script>'\"": 7.0,
    "x" * 400: 8.0,
    "fine/name": 9.0,
}


@dataclass(frozen=True)
class Tracked:
    """A tracker with a run of its own, and the two ways back from that run."""

    tracker: Tracker
    references: Callable[[], list[Reference]]
    """All references that the run has, read anew."""
    checkpoint_of: Callable[..., Checkpoint]
    """From the run to a checkpoint: `step`, `best`, `mode`, `store`, as the integration has them."""


def follow(store: CheckpointStore, tracker: Tracker) -> Following:
    """With a deadline that a busy machine keeps."""
    return trackers.follow(store, tracker, close_seconds=240)


def save(store: CheckpointStore, step: int, **metrics: float) -> None:
    store.save(step, {"weight": step}, metrics=metrics)


class TrackerContract:
    """Inherit, and give the fixture `tracked`."""

    @pytest.fixture
    def tracked(self, tmp_path: Path) -> Tracked:
        raise NotImplementedError

    def test_every_kind_of_save_leaves_a_reference(self, tracked: Tracked, store_root: Path, tmp_path: Path) -> None:
        (tmp_path / "files").mkdir()
        (tmp_path / "files" / "a").write_text("a")
        with open_store(store_root) as store, follow(store, tracked.tracker):
            save(store, 1, loss=0.5)
            store.save_async(2, {"weight": 2}, metrics={"loss": 0.25})
            store.save_directory(3, tmp_path / "files")
            store.save_async(4, {"weight": 4}, metrics={"loss": 1.5})
            expected = [Reference.to(store[step]) for step in (1, 2, 3)]
        with open_store(store_root) as store:
            assert tracked.references() == [*expected, Reference.to(store[4])]

    def test_a_run_leads_back_to_its_checkpoints(self, tracked: Tracked, store_root: Path) -> None:
        with open_store(store_root) as store, follow(store, tracked.tracker):
            for step, loss in ((1, 0.5), (2, 0.25), (3, 1.5)):
                save(store, step, loss=loss)
        assert tracked.checkpoint_of().step == 3
        assert tracked.checkpoint_of(best="loss", mode="min").step == 2
        found = tracked.checkpoint_of(step=1)
        state = {"weight": 0}
        found.load(state)
        assert (state, found.metrics, found.verify().ok) == ({"weight": 1}, {"loss": 0.5}, True)

    def test_metrics_that_are_not_finite_come_back_as_they_were(self, tracked: Tracked, store_root: Path) -> None:
        metrics = {"nan": math.nan, "up": math.inf, "down": -math.inf, "loss": 0.5}
        with open_store(store_root) as store, follow(store, tracked.tracker):
            save(store, 1, **metrics)
            save(store, 2, loss=math.nan)
        first, second = (item.metrics for item in tracked.references())
        assert repr(first) == repr(dict(sorted(metrics.items())))
        assert math.isnan(second["loss"])
        assert tracked.checkpoint_of(best="loss", mode="min").step == 1

    def test_any_name_of_a_metric_comes_back(self, tracked: Tracked, store_root: Path) -> None:
        with open_store(store_root) as store, follow(store, tracked.tracker) as following:
            save(store, 1, **HOSTILE_METRICS)
        assert following.unsent == ()
        (reference,) = tracked.references()
        assert reference.metrics == HOSTILE_METRICS
        assert tracked.checkpoint_of(best="/abs", mode="max").step == 1

    def test_a_thousand_metrics_come_back(self, tracked: Tracked, store_root: Path) -> None:
        metrics = {f"layer/{index}/gradient norm": float(index) for index in range(1001)}
        with open_store(store_root) as store, follow(store, tracked.tracker):
            save(store, 1, **metrics)
        assert tracked.references()[0].metrics == metrics

    def test_a_reference_that_is_told_again_is_there_once(self, tracked: Tracked, store_root: Path) -> None:
        with open_store(store_root) as store:
            save(store, 1, loss=0.5)
            for _ in range(2):
                tracked.tracker.log(Reference.to(store[1]))
        assert [item.step for item in tracked.references()] == [1]

    def test_a_resumed_job_that_saves_a_step_again(self, tracked: Tracked, store_root: Path) -> None:
        for loss in (0.5, 0.25):
            with open_store(store_root) as store, follow(store, tracked.tracker):
                store.resume()
                save(store, 1, loss=loss)
        assert [(item.step, item.metrics["loss"]) for item in tracked.references()] == [(1, 0.5), (1, 0.25)]
        assert tracked.checkpoint_of(step=1).metrics == {"loss": 0.25}
        with pytest.raises(CheckpointGone, match="in the trash"):
            tracked.checkpoint_of(best="loss", mode="max")

    def test_names_of_places_are_taken_as_they_are(self, tracked: Tracked, tmp_path: Path) -> None:
        root = tmp_path / 'it\'s a "<b>run</b>" é %41 @3'
        with open_store(root) as store, follow(store, tracked.tracker):
            save(store, 1)
        assert tracked.checkpoint_of().uri.startswith(str(root))

    def test_a_checkpoint_that_is_gone_is_named(self, tracked: Tracked, store_root: Path) -> None:
        with open_store(store_root, retention=KeepLatest(1), grace_seconds=0) as store, follow(store, tracked.tracker):
            for step in (1, 2, 3):
                save(store, step)
            store.prune()
        with pytest.raises(CheckpointGone, match=r"Step 1 .* live ones: 3"):
            tracked.checkpoint_of(step=1)
        with pytest.raises(CheckpointGone, match="no reference to step 9; it has 1, 2, 3"):
            tracked.checkpoint_of(step=9)
        with pytest.raises(InvalidMetric, match="acc"):
            tracked.checkpoint_of(best="acc", mode="max")

    def test_another_store_in_its_place_is_not_mistaken_for_it(self, tracked: Tracked, store_root: Path) -> None:
        with open_store(store_root) as store, follow(store, tracked.tracker):
            save(store, 1)
        shutil.move(store_root, store_root.with_name("moved"))
        with pytest.raises(StoreMissing, match="at="):
            tracked.checkpoint_of()
        with open_store(store_root) as store:
            save(store, 1)
        with pytest.raises(InvalidInput, match="commits another checkpoint"):
            tracked.checkpoint_of()
        assert tracked.references()[0].open(at=store_root.with_name("moved")).verify().ok

    def test_a_run_with_two_stores_asks_which(self, tracked: Tracked, tmp_path: Path) -> None:
        for name in ("a", "b"):
            with open_store(tmp_path / name) as store, follow(store, tracked.tracker):
                save(store, 1)
        with pytest.raises(InvalidInput, match="store="):
            tracked.checkpoint_of()
        assert tracked.checkpoint_of(store=str(tmp_path / "b")).uri.startswith(str(tmp_path / "b"))

    def test_a_run_without_checkpoints_says_so(self, tracked: Tracked) -> None:
        assert tracked.references() == []
        with pytest.raises(CheckpointGone, match="no reference to a checkpoint"):
            tracked.checkpoint_of()
