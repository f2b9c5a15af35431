"""A load casts where that is asked for, and nowhere else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptstore import InvalidInput, StateMismatch, open_store
from ckptstore.dcp import StoreReader, translated


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    with open_store(tmp_path / "store", durable=False) as store:
        store.save(1, {"model": model, "optimizer": optimizer, "count": torch.tensor([1, 2])})
    return tmp_path / "store"


def test_a_model_in_another_dtype(saved: Path) -> None:
    with open_store(saved) as store:
        expected = torch.nn.Linear(5, 3)
        store.load({"model": expected})
        other = torch.nn.Linear(5, 3).bfloat16()
        before = other.weight.detach().clone()
        with pytest.raises(StateMismatch, match=r"float32 \[3, 5\] in the checkpoint and bfloat16 .*casts it"):
            store.load({"model": other})
        assert torch.equal(other.weight, before)
        weight = other.weight
        store.load({"model": other}, dtype="state")
        assert other.weight is weight
        assert other.weight.dtype is torch.bfloat16
        assert other.weight.requires_grad
        assert torch.equal(other.weight, expected.weight.bfloat16())
        assert torch.equal(other.bias, expected.bias.bfloat16())


def test_an_optimizer_of_a_model_in_another_dtype(saved: Path) -> None:
    with open_store(saved) as store:
        model, other = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3).double()
        optimizers = [torch.optim.AdamW(item.parameters()) for item in (model, other)]
        store.load({"model": model, "optimizer": optimizers[0]})
        store.load({"model": other, "optimizer": optimizers[1]}, dtype="state")
    kept, cast = (optimizer.state_dict()["state"][0]["exp_avg"] for optimizer in optimizers)
    assert cast.dtype is torch.float64
    assert torch.equal(cast, kept.double())


def test_a_model_on_the_meta_device(saved: Path) -> None:
    with open_store(saved) as store:
        expected = torch.nn.Linear(5, 3)
        store.load({"model": expected})
        with torch.device("meta"):
            other = torch.nn.Linear(5, 3, dtype=torch.float16)
        store.load({"model": other}, dtype="state", device="cpu")
    assert torch.equal(other.weight, expected.weight.half())


def test_only_floats_of_one_shape_are_cast(saved: Path) -> None:
    with open_store(saved) as store:
        with pytest.raises(StateMismatch, match="count is int64"):
            store.load({"count": torch.zeros(2)}, dtype="state")
        with pytest.raises(StateMismatch, match=r"float32 \[3, 5\] in the checkpoint and float64 \[3, 6\]"):
            store.load({"model": torch.nn.Linear(6, 3).double()}, dtype="state")
        with pytest.raises(InvalidInput, match=r"dtype is torch\.float16"):
            store.load({"model": torch.nn.Linear(5, 3)}, dtype=torch.float16)


BEYOND = {
    "infinite in float16": ([1.0, 7e4], torch.float16),
    "infinite in bfloat16": ([3.4e38], torch.bfloat16),
    "no infinity in float8": ([1.0, float("inf")], torch.float8_e4m3fn),
    "largest number of float8": ([500.0], torch.float8_e4m3fn),
    "infinite in float8": ([6e4], torch.float8_e5m2),
    "no number in float8": ([300.0], torch.float8_e4m3fnuz),
    "no sign": ([1.0, -2.0], torch.float8_e8m0fnu),
}


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("read_once", ["rank", "job"])
def test_a_number_that_the_dtype_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, read_once: str
) -> None:
    numbers, dtype = BEYOND[name]
    state = {"a": torch.zeros(2), "w": torch.zeros(len(numbers)).to(dtype), "z": torch.zeros(2)}
    before = {key: tensor.view(torch.uint8).clone() for key, tensor in state.items()}
    with open_store(tmp_path / "store", durable=False) as store:
        store.save(1, {"a": torch.ones(2), "w": torch.tensor(numbers), "z": torch.ones(2)})
        with pytest.raises(StateMismatch, match=r"w is float32 in the checkpoint and .* cannot hold"):
            store.load(state, dtype="state", read_once=read_once)  # type: ignore[arg-type]
    assert all(torch.equal(tensor.view(torch.uint8), before[key]) for key, tensor in state.items())


def test_infinities_and_nan_stay_what_they_are(tmp_path: Path) -> None:
    saved = torch.tensor([1.0, float("inf"), -float("inf"), float("nan"), 1e-30])
    state = {"w": torch.zeros(5, dtype=torch.bfloat16)}
    with open_store(tmp_path / "store", durable=False) as store:
        store.save(1, {"w": saved})
        report = store.load(state, dtype="state").load_report
    assert torch.equal(state["w"].view(torch.uint8), saved.bfloat16().view(torch.uint8))
    assert report.cast == {"w": "float32 to bfloat16"}


THROUGH_DCP = {
    **BEYOND,
    "a fraction": ([1.5], torch.int32),
    "beyond int8": ([200.0], torch.int8),
    "no boolean": ([3.0], torch.bool),
    "no negative": ([-1.0], torch.uint8),
    "no integer": ([float("nan")], torch.int64),
    "an imaginary part": ([1 + 2j], torch.float32),
    "beyond int32": ([2**40], torch.int32),
}


@pytest.mark.parametrize("name", THROUGH_DCP)
@pytest.mark.parametrize("stock", [False, True])
def test_a_load_by_dcp_refuses_it_too(tmp_path: Path, stock: bool, name: str) -> None:
    numbers, dtype = THROUGH_DCP[name]
    saved = {"a": torch.ones(2), "n": 1, "w": torch.tensor(numbers), "z": torch.ones(2)}
    with open_store(tmp_path / "store", durable=False) as store:
        if stock:
            dcp.save(saved, checkpoint_id=tmp_path / "stock", no_dist=True)
        place = tmp_path / "stock" if stock else store.save(1, saved).uri
    state = {"a": torch.zeros(2), "n": 0, "w": torch.zeros(len(numbers)).to(dtype), "z": torch.zeros(2)}
    with pytest.raises(StateMismatch, match=r"w is .* in the checkpoint and .* in the state"), translated():
        dcp.load(state, storage_reader=StoreReader(place), no_dist=True)
    assert state["n"] == 0
    assert not state["a"].any()
    assert not state["z"].any()


EXACT = {
    "wider": (torch.tensor([1.5], dtype=torch.bfloat16), torch.float32),
    "rounded": (torch.tensor([1.0000001]), torch.bfloat16),
    "whole": (torch.tensor([3.0, -0.0]), torch.int64),
    "integer": (torch.tensor([7]), torch.float32),
    "no number": (torch.tensor([float("nan")]), torch.complex64),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_cast_by_dcp_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    saved, dtype = EXACT[name]
    state = {"v": torch.zeros(1), "w": torch.zeros(saved.shape, dtype=dtype)}
    with open_store(tmp_path / "store", durable=False) as store:
        place = store.save(1, {"v": torch.ones(1), "w": saved}).uri
    dcp.load(state, storage_reader=StoreReader(place), no_dist=True)
    assert torch.equal(state["w"].view(torch.uint8), saved.to(dtype).view(torch.uint8))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    names = [str(each).removeprefix("torch.") for each in (saved.dtype, dtype)]
    assert said == [f"tensors were cast to the dtype of the state: w from {names[0]} to {names[1]}"]
