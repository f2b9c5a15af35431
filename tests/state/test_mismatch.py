"""What a resume says when the state and the checkpoint differ: short, with the cause where people know one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_ranks import run_threads
from torch import nn, ones, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptstore import InvalidInput, StateMismatch, open_store

State = Callable[[], dict[str, Any]]


def objects() -> dict[str, Any]:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    optimizer = optim.AdamW(model.parameters())
    model(ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def state_dicts() -> dict[str, Any]:
    return {name: item.state_dict() for name, item in objects().items()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(item, other[name]) for name, item in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_state_dicts_in_place_of_objects_are_recognised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(tmp_path) as store:
        store.save(1, objects())
        with caplog.at_level(logging.INFO, "ckptstore"), pytest.raises(StateMismatch) as caught:
            store.resume(state_dicts())
    text = str(caught.value)
    assert "The state has what state_dict() returned for 'optimizer'" in text
    assert "strict=False" not in text
    assert len(text) < 1500


def test_objects_take_the_state_dicts_that_were_saved_under_their_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = state_dicts()
    with open_store(tmp_path) as store, caplog.at_level(logging.INFO, "ckptstore"):
        store.save(1, saved)
        for load in (store.resume, store.load):
            found = objects()
            caplog.clear()
            load(found)
            assert same({name: item.state_dict() for name, item in found.items()}, saved)
            assert caplog.text.count("'model' was saved as what state_dict() returned") == 1


def test_a_sharded_optimizer_takes_no_state_dict_before_it_has_state(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'init'}", rank=0, world_size=1)
    try:
        weight = nn.Parameter(distribute_tensor(ones(4), init_device_mesh("cpu", (1,)), [Shard(0)]))
        trained = optim.AdamW([weight])
        weight.sum().backward()
        trained.step()
        with open_store(tmp_path / "store") as store:
            store.save(1, {"optimizer": trained.state_dict()})
            with pytest.raises(StateMismatch, match=r"optimizer cannot be loaded: .*: save the optimizer itself"):
                store.load({"optimizer": optim.AdamW([weight])})
            store.load({"optimizer": trained})  # it has tensors to be filled
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("saved", "cause"),
    [
        (lambda: {"model": {"module": nn.Linear(2, 3).state_dict()}}, "for 'model'"),
        (
            lambda: {"model": {**nn.Linear(2, 3).state_dict(), "more": torch.ones(2)}},
            "place in the state: model, model.more",
        ),
        (lambda: {"model": {**nn.Linear(2, 3).state_dict(), "epoch": 3}}, "place in the state: model. "),
        (lambda: {"model": {"weight": torch.ones(3, 2)}}, "1 missing in the checkpoint: model.bias"),
    ],
)
def test_a_module_takes_no_dict_that_does_not_fit_exactly(saved: State, cause: str, tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save(1, saved())
        with pytest.raises(StateMismatch) as caught:
            store.resume({"model": nn.Linear(2, 3)})
    assert cause in str(caught.value)
    assert "The checkpoint has what state_dict() returned for 'model'" in str(caught.value)


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


def test_what_another_rank_names_is_not_left_out(tmp_path: Path) -> None:
    def work(store: Any, rank: int) -> Any:
        own = {f"loader.rank_{rank}": rank}
        store.save(1, {**own, "epoch": 3})
        return store.resume(own).load_report.left_out

    assert run_threads(2, str(tmp_path), work) == [("epoch",)] * 2


@pytest.mark.parametrize("turn", [1, -1], ids=["in order", "turned"])
def test_what_ranks_find_is_joined(tmp_path: Path, turn: int) -> None:
    """Missing is what any rank misses; unexpected is what no rank that names its part can place."""
    one = ones(1)
    saved = {part: {key: one.clone() for key in "xyz"} for part in ("model", "head")}
    states: list[dict[str, Any]] = [
        {"model": {"x": one, "lost": one}, "head": {"y": one}},
        {"model": {"y": one}, "hea": 1},
    ]

    def work(store: Any, rank: int) -> Any:
        store.save(1, saved)
        report = store.load(states[::turn][rank], strict=False).load_report
        of_same_names = store.load({"model": {"xy"[rank]: one}}, strict=False).load_report
        return report.missing, report.unexpected, of_same_names.unexpected

    told = run_threads(2, str(tmp_path), work)
    assert told == [(("hea", "model.lost"), ("head.x", "head.z", "model.z"), ("model.z",))] * 2


def test_what_is_nothing_for_one_rank_may_be_something_for_another(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = [
        {"a": torch.zeros(1), "more": nn.Linear(1, 1), "none": nn.Linear(1, 1)},
        {"b": torch.zeros(1), "more": nn.Identity(), "none": nn.Linear(1, 1)},
    ]

    def work(store: Any, rank: int) -> Any:
        store.save(1, {"a": ones(1), "b": ones(1)})
        own, only = states[rank], "ab"[rank]
        store.load({only: own[only]}, include=["a", "b"])
        store.load({"a": own["a"]} if rank == 0 else {"none": own["none"]}, strict=False)
        with pytest.raises(InvalidInput, match="'c' fits no key"):
            store.load({only: own[only]}, include=["a", "b", "c"])
        with pytest.raises(StateMismatch, match="'none', but a, b") as caught:
            store.load(own)
        return own[only].item(), "'more', but" in str(caught.value)

    assert run_threads(2, str(tmp_path), work) == [(1.0, False)] * 2
