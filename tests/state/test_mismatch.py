"""What a resume says when the state and the checkpoint differ: short, with the cause where people know one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn, ones, optim

from ckptstore import StateMismatch, open_store

State = Callable[[], dict[str, Any]]


def objects() -> dict[str, Any]:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    optimizer = optim.AdamW(model.parameters())
    model(ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def state_dicts() -> dict[str, Any]:
    return {name: item.state_dict() for name, item in objects().items()}


@pytest.mark.parametrize(
    ("saved", "resumed", "cause"),
    [
        (state_dicts, objects, "The checkpoint has what state_dict() returned for 'model'"),
        (objects, state_dicts, "The state has what state_dict() returned for 'optimizer'"),
    ],
)
def test_state_dicts_in_place_of_objects_are_recognised(
    saved: State, resumed: State, cause: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(tmp_path) as store:
        store.save(1, saved())
        with caplog.at_level(logging.INFO, "ckptstore"), pytest.raises(StateMismatch) as caught:
            store.resume(resumed())
    text = str(caught.value)
    assert cause in text
    assert "strict=False" not in text
    assert len(text) < 1500


def test_ten_keys_are_named_and_all_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(tmp_path) as store:
        store.save(1, {"model": objects()["model"]})
        with caplog.at_level(logging.INFO, "ckptstore"), pytest.raises(StateMismatch) as caught:
            store.resume({"model": nn.Sequential(nn.Linear(2, 2))})
    text = str(caught.value)
    assert "18 without a place in the state: model.1.bias, " in text
    assert "model.5.weight and 8 more, which rank 0 has logged" in text
    assert "model.9.weight" not in text
    assert any("model.9.weight" in record.getMessage() for record in caplog.records)


def test_a_resume_that_leaves_out_parts_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(tmp_path) as store:
        store.save(1, {**objects(), "epoch": 3})
        with caplog.at_level(logging.WARNING, "ckptstore"):
            resumed = store.resume({"model": objects()["model"]})
            assert resumed is not None
            assert resumed.load_report is not None
            assert resumed.load_report.left_out == ("epoch", "optimizer")
            store.load({"model": objects()["model"]})
        said = [record.getMessage() for record in caplog.records if "does not name" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("step 1 has 'epoch', 'optimizer' besides")
