"""Timings of real saves: who was slow is named with its node, every kind of save has them, and none costs a request."""

from __future__ import annotations

import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from thread_ranks import run_threads
from timed_ranks import save_files
from trees import Gate, copied, heard, make_tree

from ckptstore import Checkpoint, CheckpointStore, KeepLatest, open_store
from ckptstore.dcp import StoreWriter
from ckptstore.events import SavePhase
from ckptstore.format.timings import PHASES, Timings
from ckptstore.saving import commit
from ckptstore.saving.phases import SaveClock
from ckptstore.testing import CountCalls, run_ranks, with_faults

SLOW_SECONDS = 3.0
"""Longer than what keeps a rank of a busy machine from its turn."""


def timings_of(checkpoint: Checkpoint | None) -> Timings:
    assert checkpoint.timings is not None
    return checkpoint.timings


def some_state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((1 << 18,), value), "epoch": 3}


def test_the_slow_rank_is_named_with_its_node(tmp_path: Path) -> None:
    found = run_ranks(3, save_files, str(tmp_path / "store"), 2, SLOW_SECONDS, -1)
    assert found[0]["timings"] == found[1]["timings"] == found[2]["timings"]
    timings = Timings.from_json(found[0]["timings"])
    upload, wait = timings.phases["upload"], timings.phases["wait"]
    assert upload.slowest[0] == 2
    assert timings.ranks[upload.slowest[0]].node == "node-2"
    assert upload.maximum >= SLOW_SECONDS
    assert wait.slowest[-1] == 2, "the others wait for it"
    assert wait.minimum == timings.ranks[2].seconds["wait"] == 0
    assert wait.maximum >= SLOW_SECONDS - upload.median
    assert timings.stalled.minimum >= SLOW_SECONDS, "the training of all was held up"
    assert [one.size_bytes for one in timings.ranks] == [10_000, 20_000, 30_000]
    assert (timings.size_bytes, timings.requests, timings.retries) == (60_000, 3, 0)
    assert "stage" not in timings.phases
    assert [rank for rank in range(3) if "commit" in timings.ranks[rank].seconds] == [0]
    assert timings.seconds == pytest.approx(sum(timings.ranks[0].seconds.values()), abs=0.1)
    for rank, one in enumerate(found):
        events: list[SavePhase] = one["phases"]
        assert [event.phase for event in events] == ["agree", "upload", "wait", "commit"]
        assert {(event.rank, event.step, event.attempt) for event in events} == {(rank, 1, one["attempt"])}
        for event in events[:3]:
            assert event.seconds == pytest.approx(timings.ranks[rank].seconds[event.phase], abs=1e-3)
        for before, after in pairwise(events):
            assert after.started_at == pytest.approx(before.started_at + before.seconds, abs=0.5)


@pytest.mark.slow
def test_a_killed_rank_leaves_no_timings_and_no_harm(tmp_path: Path) -> None:
    found = run_ranks(2, save_files, str(tmp_path / "store"), -1, 0.0, 1, expect_killed=[1])
    assert found[0] == {"error": "RankTimeout", "live": []}
    with open_store(tmp_path / "store", group="solo") as store:
        store.save_directory(2, make_tree(tmp_path / "next", {"a": b"1"}))
        assert timings_of(store.latest()).phases.keys() == {"agree", "upload", "wait", "commit"}


def test_an_asynchronous_save_counts_what_the_training_saw(tmp_path: Path) -> None:
    gate = Gate()
    with with_faults(open_store(tmp_path / "store"), gate) as store, heard(SavePhase) as phases:
        pending = store.save_async(1, some_state())
        time.sleep(0.2)  # training, which the save does not hold up
        gate.opened.set()
        timings = timings_of(pending.result())
    (mine,) = timings.ranks
    assert list(mine.seconds) == list(PHASES)
    assert mine.stalled_seconds == pytest.approx(pending.stalled_seconds, abs=1e-5)
    assert mine.stalled_seconds == pytest.approx(mine.seconds["agree"] + mine.seconds["stage"], abs=0.05)
    assert mine.seconds["upload"] >= 0.2
    assert timings.size_bytes > 1 << 20
    assert timings.requests >= 1
    assert [event.phase for event in phases] == list(PHASES)


def test_the_wait_for_the_save_before_counts_in_agree_and_as_a_stall(tmp_path: Path) -> None:
    gate = Gate()
    with with_faults(open_store(tmp_path / "store"), gate) as store:
        store.save_async(1, some_state())
        opener = threading.Timer(1.0, gate.opened.set)
        opener.start()
        timings = timings_of(store.save_async(2, some_state()).result())
        opener.join()
    assert timings.phases["agree"].minimum > 0.5
    assert timings.stalled.minimum > 0.5


def test_a_dcp_save_has_timings(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store, heard(SavePhase) as phases:
        dcp.save(some_state(), storage_writer=StoreWriter(store.dcp_target(), step=4), no_dist=True)
        in_store = timings_of(store[4])
    dcp.save(some_state(), storage_writer=StoreWriter(tmp_path / "alone"), no_dist=True)
    alone = timings_of(Checkpoint.from_directory(tmp_path / "alone"))
    for timings in (in_store, alone):
        assert set(timings.phases) == {"agree", "upload", "wait", "commit"}
        assert timings.size_bytes > 1 << 20
    assert [event.phase for event in phases] == ["agree", "upload", "wait", "commit"]
    assert {event.step for event in phases} == {4}


def test_copies_and_restored_checkpoints_keep_them(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.save(1, some_state())
        store.save(2, some_state(2.0), incremental="reference")
        expected = [timings_of(checkpoint) for checkpoint in store]
        assert len({timings.seconds for timings in expected}) == 2
        copied(store, tmp_path / "copy")
    with open_store(tmp_path / "copy") as copy:
        assert [timings_of(checkpoint) for checkpoint in copy] == expected
    with open_store(tmp_path / "other", retention=KeepLatest(1)) as store:
        first = timings_of(store.save(1, some_state()))
        store.save(2, some_state())
        assert timings_of(store.restore(1)) == first


def without_timings(patch: pytest.MonkeyPatch) -> None:
    """Saves as they would be without timings."""
    made = commit.manifest_of
    no_timings = lambda a, b, it, *rest, **more: made(a, b, it._replace(timings=None), *rest, **more)  # noqa: E731
    patch.setattr(commit, "manifest_of", no_timings)
    patch.setattr(SaveClock, "report", lambda self, traffic, *, node: {"seconds": {"upload": 0.0}, "node": node})


def test_no_message_between_ranks_and_no_request_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How often ranks look for each other, and give signs of life, depends on time; what else they write does not."""
    written = ("create", "write", "write_many", "persist", "open_parts")

    def calls_of_a_save(root: Path) -> Counter[tuple[str, str]]:
        counted = CountCalls()

        def flow(store: CheckpointStore, rank: int) -> bool:
            store = with_faults(store, counted)
            source = make_tree(tmp_path / "source" / str(rank), {f"{rank}.pt": bytes(1000)})
            return store.save_directory(1, source).timings is not None

        found = run_threads(3, root, flow)
        has_timings.append(found == [True, True, True])
        calls = [call for call in counted.calls if "life." not in call.key]
        return Counter((call.verb, call.key.partition("/")[0]) for call in calls if call.verb in written)

    has_timings: list[bool] = []
    with_them = calls_of_a_save(tmp_path / "with")
    without_timings(monkeypatch)
    without = calls_of_a_save(tmp_path / "without")
    assert has_timings == [True, False]
    assert with_them == without
