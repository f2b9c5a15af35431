"""A load casts where that is asked for, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptstore import InvalidInput, StateMismatch, open_store


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
