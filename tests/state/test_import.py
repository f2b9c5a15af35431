"""Imports hold the same bits as the files that they were made of, and run nothing in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from saving import bits
from test_frames import DTYPES, random_tensor

from ckptstore import Checkpoint, CheckpointDamaged, CkptstoreError, InvalidInput, StepExists, open_store
from ckptstore.errors import FileMissing, InvalidSource, InvalidState
from ckptstore.interchange.exporting import export
from ckptstore.interchange.importing import import_state
from ckptstore.interchange.safetensors_file import NAMES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_DURABLE", "false")


def imported(tmp_path: Path, source: Path, kind: str, **keywords: object) -> Checkpoint:
    with open_store(tmp_path / "store") as store:
        return Checkpoint.from_uri(import_state(source, store, 5, kind=kind, **keywords).uri)


def model_and_optimizer(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(30, 500), torch.nn.BatchNorm1d(500), torch.nn.Linear(500, 700))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    return model, optimizer


def assert_loads(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    state = {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in tensors.items()}
    checkpoint.load(state)
    for key, tensor in tensors.items():
        assert bits(state[key]) == bits(tensor), key


def test_every_dtype_of_safetensors(tmp_path: Path) -> None:
    dtypes = [dtype for dtype in DTYPES if str(dtype)[6:] in NAMES]
    tensors = {f"small.{dtype}": random_tensor(dtype, (5, 3)) for dtype in dtypes}
    tensors |= {f"large.{dtype}": random_tensor(dtype, (401, 803)) for dtype in dtypes}
    tensors |= {"zero_d": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_loads(imported(tmp_path, tmp_path / "model.safetensors", "safetensors"), tensors)


def test_a_directory_with_an_index(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.randn(100, 10) for number in range(4)}
    names = {key: f"model-0000{1 + number // 2}-of-00002.safetensors" for number, key in enumerate(tensors)}
    for file in set(names.values()):
        save_file({key: tensor for key, tensor in tensors.items() if names[key] == file}, tmp_path / file)
    save_file({"not.listed": torch.ones(3)}, tmp_path / "adapter.safetensors")
    index = {"metadata": {}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = imported(tmp_path, tmp_path, "safetensors", metrics={"loss": 0.5}, metadata={"from": "hub"})
    assert_loads(checkpoint, tensors)
    assert (checkpoint.step, checkpoint.metrics, checkpoint.metadata) == (5, {"loss": 0.5}, {"from": "hub"})
    with pytest.raises(CkptstoreError, match=r"not\.listed"):
        checkpoint.load({"not.listed": torch.ones(3)})
    index["weight_map"]["t9"] = names["t0"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointDamaged, match="t9"):
        imported(tmp_path, tmp_path, "safetensors")
    index["weight_map"] = {"t0": "../other.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match="other"):
        imported(tmp_path, tmp_path, "safetensors")


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_torch_file_loads_into_live_objects(tmp_path: Path, is_zip: bool) -> None:
    model, _ = model_and_optimizer(1)
    weight = torch.randn(4)
    state = {
        "model": model.state_dict(),
        "tied": {"a": weight, "b": weight},
        "args": {"lr": 0.1, "betas": (0.9, 0.99), "empty": {}, 3: [torch.ones(2), None]},
        "epoch": 3,
    }
    torch.save(state, tmp_path / "all.pt", _use_new_zipfile_serialization=is_zip)
    checkpoint = imported(tmp_path, tmp_path / "all.pt", "torch")
    other, _ = model_and_optimizer(2)
    loaded = {
        "model": other,
        "tied": {"a": torch.zeros(4), "b": torch.zeros(4)},
        "args": {"lr": 0, "betas": None, "empty": {}, 3: [torch.zeros(2), 1]},
        "epoch": 0,
    }
    checkpoint.load(loaded)
    assert all(torch.equal(other.state_dict()[key], tensor) for key, tensor in model.state_dict().items())
    assert torch.equal(loaded["tied"]["b"], weight)
    assert torch.equal(loaded["args"][3][0], torch.ones(2))
    assert (loaded["epoch"], loaded["args"]["lr"], loaded["args"]["betas"]) == (3, 0.1, (0.9, 0.99))


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors"])
def test_what_was_exported_comes_back(tmp_path: Path, kind: str) -> None:
    model, optimizer = model_and_optimizer(1)
    weight = torch.randn(3, 3)
    state = {"model": model, "tied": {"a": weight, "b": weight}, "list": [1, {"x": torch.ones(2)}]}
    if kind != "safetensors":
        state |= {"optimizer": optimizer, "epoch": 4}
    with open_store(tmp_path / "first") as store:
        exported = export(store.save(1, state), tmp_path / "out", to=kind, max_file_bytes=500_000)
    source = tmp_path / "out/state.pt" if kind == "torch" else exported.path
    checkpoint = imported(tmp_path, source, kind)
    other, other_optimizer = model_and_optimizer(2)
    loaded = {"model": other, "tied": {"a": torch.zeros(3, 3), "b": torch.zeros(3, 3)}}
    if kind != "safetensors":
        loaded |= {"optimizer": other_optimizer, "epoch": 0, "list": [0, {"x": torch.zeros(2)}]}
    assert checkpoint.load(loaded).unexpected == ()
    assert all(torch.equal(other.state_dict()[key], tensor) for key, tensor in model.state_dict().items())
    assert torch.equal(loaded["tied"]["b"], weight)
    if kind != "safetensors":
        ours, theirs = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
        assert all(torch.equal(theirs[number]["exp_avg"], ours[number]["exp_avg"]) for number in ours)
        assert (loaded["epoch"], loaded["list"][0]) == (4, 1)


def test_a_stock_directory(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(700, 601), "b": {"c": torch.ones(3).bfloat16()}}
    dcp.save({**tensors, "epoch": 2, "nested": {"lr": 0.1}}, checkpoint_id=tmp_path / "stock", no_dist=True)
    checkpoint = imported(tmp_path, tmp_path / "stock", "dcp")
    state = {"a": torch.zeros(700, 601), "b": {"c": torch.zeros(3).bfloat16()}, "epoch": 0, "nested": {"lr": 0}}
    checkpoint.load(state)
    assert torch.equal(state["a"], tensors["a"])
    assert torch.equal(state["b"]["c"], tensors["b"]["c"])
    assert (state["epoch"], state["nested"]) == (2, {"lr": 0.1})


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_code_in_a_source_is_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    torch.save({"w": torch.ones(2), "evil": Attack(mark)}, tmp_path / "evil.pt")
    with pytest.raises(InvalidSource, match="cannot be read"):
        imported(tmp_path, tmp_path / "evil.pt", "torch")
    dcp.save({"w": torch.ones(2), "evil": Attack(mark)}, checkpoint_id=tmp_path / "evil", no_dist=True)
    with pytest.raises(InvalidState, match="evil"):
        imported(tmp_path, tmp_path / "evil", "dcp")
    assert not mark.exists()
    assert not (tmp_path / "store/store.json").exists()


@pytest.mark.parametrize(
    ("kind", "content", "error"),
    [
        ("torch", None, FileMissing),
        ("torch", b"no zip and no pickle", InvalidSource),
        ("safetensors", None, FileMissing),
        ("safetensors", b"short", CheckpointDamaged),
        ("safetensors", (1 << 60).to_bytes(8, "little") + b"{}", CheckpointDamaged),
        ("safetensors", (2).to_bytes(8, "little") + b"[]", CheckpointDamaged),
        ("safetensors", (2).to_bytes(8, "little") + b"{}", InvalidSource),
        ("safetensors", (2).to_bytes(8, "little") + b"{}more", CheckpointDamaged),
        ("dcp", None, InvalidSource),
    ],
)
def test_a_bad_source_commits_nothing(tmp_path: Path, kind: str, content: bytes | None, error: type) -> None:
    source = tmp_path / "source"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(error):
        imported(tmp_path, source, kind)
    assert not (tmp_path / "store/store.json").exists()


@pytest.mark.parametrize(
    "field", [{"data_offsets": [0, 8]}, {"data_offsets": [4, 16]}, {"shape": [-1, 3]}, {"dtype": 4}, {"dtype": "Q2"}]
)
def test_a_lying_header_is_refused(tmp_path: Path, field: dict[str, object]) -> None:
    fields = {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12], **field}}
    text = json.dumps(fields).encode()
    (tmp_path / "f").write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    with pytest.raises(CkptstoreError):
        imported(tmp_path, tmp_path / "f", "safetensors")


def test_what_holds_no_state_is_refused(tmp_path: Path) -> None:
    for number, value in enumerate([torch.ones(2), [1], {}, {1: torch.ones(2)}]):
        torch.save(value, tmp_path / f"{number}.pt")
        with pytest.raises(InvalidSource, match="not a dict"):
            imported(tmp_path, tmp_path / f"{number}.pt", "torch")


def test_a_step_that_exists_is_refused_unless_replaced(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    imported(tmp_path, tmp_path / "a.pt", "torch")
    with pytest.raises(StepExists):
        imported(tmp_path, tmp_path / "a.pt", "torch")
    imported(tmp_path, tmp_path / "a.pt", "torch", exists="replace")
    with open_store(tmp_path / "store") as store:
        assert [checkpoint.step for checkpoint in store] == [5]
