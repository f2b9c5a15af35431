"""Asynchronous saves: what is stored is the state at the call, no failure is lost, nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from trees import Gate

from ckptstore import (
    AccessDenied,
    CheckpointStore,
    RankFailed,
    SaveBusy,
    StorageUnavailable,
    open_store,
)
from ckptstore.testing import FailAt, with_faults


def some_state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((1 << 19,), value), "small": torch.arange(5), "nested": {"epoch": 3, "names": ["a"]}}


def gated(tmp_path: Path) -> tuple[CheckpointStore, Gate]:
    gate = Gate()
    return with_faults(open_store(tmp_path / "store"), gate), gate


def test_the_state_may_change_at_once(tmp_path: Path) -> None:
    state = some_state()
    with open_store(tmp_path / "store") as store:
        store.warm_up(state)
        for step in (1, 2, 3):
            state["w"].fill_(float(step))
            state["nested"]["epoch"] = step
            pending = store.save_async(step, state)
            state["w"].fill_(-1.0)
            state["nested"]["epoch"] = -1
            assert pending.stalled_seconds > 0
        checkpoint = pending.result()
        assert checkpoint is not None
        for step in (1, 2, 3):
            loaded = some_state(0.0)
            store[step].load(loaded)
            assert loaded["w"].eq(step).all()
            assert loaded["nested"] == {"epoch": step, "names": ["a"]}
            assert store[step].verify().ok


def test_the_metadata_may_change_at_once(tmp_path: Path) -> None:
    store, gate = gated(tmp_path)
    with store:
        metadata: dict[str, Any] = {"losses": [0.5], "config": {"lr": 0.1}}
        pending = store.save_async(1, some_state(), metadata=metadata)
        metadata["losses"].append(0.25)
        metadata["config"]["device"] = torch.device("cpu")
        gate.opened.set()
        assert pending.result().metadata == {"losses": [0.5], "config": {"lr": 0.1}}


@pytest.mark.parametrize("mine", [KeyboardInterrupt(), ValueError("mine")])
def test_a_failed_save_does_not_take_the_place_of_what_ends_the_training(
    tmp_path: Path, mine: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        faults = FailAt("write* checkpoints/*", AccessDenied("away"), times=None)
        with with_faults(open_store(tmp_path), faults) as store:
            store.save_async(1, some_state())
            raise mine

    with pytest.raises(type(mine)) as ended:
        train()
    assert "away" in "".join(ended.value.__notes__)
    assert "besides a " in caplog.text


def test_the_next_save_waits_is_skipped_or_refused(tmp_path: Path) -> None:
    store, gate = gated(tmp_path)
    first = store.save_async(1, some_state())
    assert gate.reached.wait(60)
    assert not first.done()
    skipped = store.save_async(2, some_state(), on_busy="skip")
    assert (skipped.skipped, skipped.done(), skipped.result()) == (True, True, None)
    with pytest.raises(SaveBusy, match="step 3"):
        store.save_async(3, some_state(), on_busy="error")
    with pytest.raises(TimeoutError):
        first.result(timeout_seconds=0.01)
    assert not store.finish_by(0.01)
    threading.Timer(0.3, gate.opened.set).start()
    assert store.save_async(4, some_state()).stalled_seconds > 0.1
    assert first.done()
    assert store.finish_by(60)
    assert [checkpoint.step for checkpoint in store] == [1, 4]
    store.close()


@pytest.fixture
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "1")


@pytest.mark.usefixtures("no_retries")
def test_a_failure_is_raised_by_the_result_and_by_the_next_call(tmp_path: Path) -> None:
    away = FailAt("write* checkpoints/*", StorageUnavailable("the disk is away"), times=None)
    store = with_faults(open_store(tmp_path / "store"), away)
    pending = store.save_async(1, some_state())
    with pytest.raises(StorageUnavailable, match="away"):
        pending.result()
    assert isinstance(pending.error(), StorageUnavailable)
    with pytest.raises(StorageUnavailable):
        store.save_async(2, some_state())
    again = store.save_async(3, some_state())
    with pytest.raises(StorageUnavailable):
        store.close()
    assert again.done()


@pytest.mark.usefixtures("no_retries")
def test_a_save_between_failures_ends_their_row(tmp_path: Path) -> None:
    away = FailAt("write* checkpoints/step-000000000[124]*", StorageUnavailable("the disk is away"), times=None)
    with with_faults(open_store(tmp_path / "store"), away) as store:
        for step in range(1, 6):
            store.save_async(step, some_state(), max_failures=2)
            assert store.finish_by(60)
        assert [item.step for item in store] == [3, 5]


def test_a_save_that_is_interrupted_in_its_thread_has_failed(tmp_path: Path) -> None:
    store = with_faults(open_store(tmp_path / "store"), FailAt("write* checkpoints/*", KeyboardInterrupt()))
    pending = store.save_async(1, some_state())
    with pytest.raises(RankFailed, match="KeyboardInterrupt") as caught:
        pending.result()
    assert caught.value.committed is None
    with pytest.raises(RankFailed):
        store.close()


def test_sigterm_only_sets_a_deadline(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray, once it has run in this process, would end it
    store, gate = gated(tmp_path)
    try:
        store.install_sigterm(30.0)
        pending = store.save_async(1, some_state())
        assert gate.reached.wait(60)
        assert not store.stop_requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert store.stop_requested
        threading.Timer(0.2, gate.opened.set).start()
        assert store.finish_by()
        assert pending.done()
        assert store.latest() is not None
    finally:
        signal.signal(signal.SIGTERM, before)
        gate.opened.set()
        store.close()


def is_preparing() -> bool:
    return any(thread.name == "ckptstore-prepare" for thread in threading.enumerate())


def test_memory_for_the_next_save_is_made_while_training_goes_on(tmp_path: Path) -> None:
    """From a resume on; a load is no sign of a save. A save of another kind gives it back, and so does `close`."""
    state = {"w": torch.arange(10 << 20, dtype=torch.float32)}
    with open_store(tmp_path / "store", durable=False) as store:
        store.save(1, state)
    with open_store(tmp_path / "store", durable=False) as store:
        store.load(state)
        assert not is_preparing()
        store.resume(state)
        assert is_preparing()
        store.save(2, state)
        assert not is_preparing()
        store.resume(state)
        store.save_async(3, state)
        assert not is_preparing()
    with open_store(tmp_path / "store", durable=False) as store:
        store.resume(state)
        assert is_preparing()
    assert not is_preparing()
    zeros = {"w": torch.zeros(10 << 20)}
    with open_store(tmp_path / "store") as store:
        assert store.load(zeros) is not None
    assert torch.equal(zeros["w"], state["w"])
