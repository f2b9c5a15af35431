"""An ordinary error shows the line of the caller, and not what happened inside. A switch is True or False."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore import CheckpointGone, InvalidInput, open_store


def frames_of(error: BaseException) -> list[str]:
    return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]


def test_a_traceback_ends_in_the_line_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTSTORE_TRACEBACKS", raising=False)
    here, boundary = Path(__file__).name, "boundary.py"
    with pytest.raises(InvalidInput) as refused:
        open_store(tmp_path, missing="never")
    assert frames_of(refused.value) == [here, boundary]
    with open_store(tmp_path / "store") as store:
        with pytest.raises(InvalidInput) as refused:
            store.save_directory(-1, tmp_path)
        assert frames_of(refused.value) == [here, boundary]
        with pytest.raises(CheckpointGone) as gone:
            store[3]
        assert frames_of(gone.value) == [here, boundary]
    with pytest.raises(CheckpointGone) as gone:
        ckptstore.Checkpoint.from_directory(tmp_path)
    assert frames_of(gone.value) == [here, boundary]


def test_a_variable_asks_for_all_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_TRACEBACKS", "full")
    with pytest.raises(InvalidInput) as refused:
        open_store(tmp_path, missing="never")
    assert "opening.py" in frames_of(refused.value)


def test_what_a_user_object_raised_keeps_its_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTSTORE_TRACEBACKS", raising=False)

    class Mine:
        def load_state_dict(self, state: dict[str, object]) -> None:
            """Never called."""

        def state_dict(self) -> dict[str, object]:
            raise KeyError("mine")

    with open_store(tmp_path / "store") as store, pytest.raises(Exception, match="mine") as failed:
        store.save(1, {"mine": Mine()})
    assert "in state_dict" in "".join(traceback.format_exception(failed.value))


def test_signatures_and_docstrings_are_those_of_the_functions() -> None:
    assert ckptstore.CheckpointStore.save.__doc__
    assert ckptstore.Checkpoint.step.__doc__ == "The step that was saved."


@pytest.mark.parametrize("switch", ["false", "no", "", 0, 1, None, [True]])
def test_a_switch_that_is_no_bool_is_refused(tmp_path: Path, switch: Any) -> None:
    with open_store(tmp_path) as store:
        store.save(1, {"a": 1})
        for call in (
            lambda: store.save(2, {"a": 1}, allow_pickle=switch),
            lambda: store.load({"a": 1}, strict=switch),
            lambda: store.prune(dry_run=switch),
            lambda: store.remove(1, force=switch),
            lambda: store.latest(fast=switch),
        ):
            with pytest.raises(InvalidInput, match="it is True or False"):
                call()
        assert [one.step for one in store] == [1]
    if switch is not None:
        with pytest.raises(InvalidInput, match=r"durable is .* True or False"):
            open_store(tmp_path, durable=switch)
