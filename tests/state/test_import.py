"""Imports hold the same bits as the files that they were made of, and run nothing in them."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from saving import bits, blank, stored
from test_export import trained as large_and_trained
from test_frames import DTYPES, random_tensor

from ckptstore import (
    Checkpoint,
    CheckpointDamaged,
    CkptstoreError,
    FileMissing,
    InvalidInput,
    InvalidSource,
    InvalidState,
    StepExists,
    StorageError,
    open_store,
)
from ckptstore.extensions.exchange.safetensors_file import NAMES
from ckptstore.interchange import export, import_state
from ckptstore.storage.open import open_storage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_DURABLE", "false")


def imported(tmp_path: Path, source: Path, kind: str, **keywords: object) -> Checkpoint:
    with open_store(tmp_path / "store") as store:
        return Checkpoint.from_uri(import_state(source, store, 5, kind=kind, **keywords).uri)


def assert_loads(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    state = blank(tensors)
    checkpoint.load(state)
    for key, tensor in tensors.items():
        assert bits(state[key]) == bits(tensor), key


def test_a_directory_with_an_index(tmp_path: Path) -> None:
    tensors = {str(dtype)[6:]: random_tensor(dtype, (401, 3)) for dtype in DTYPES if str(dtype)[6:] in NAMES}
    tensors |= {"t0": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    names = {key: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, key in enumerate(tensors)}
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


def test_a_part_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    for start in (0, 1):  # some tools count from 0
        source = tmp_path / f"from-{start}"
        source.mkdir()
        tensors = {f"w{number}": torch.full((3,), float(number)) for number in range(start, start + 3)}
        for number in range(start, start + 3):
            save_file({f"w{number}": tensors[f"w{number}"]}, source / f"model-{number:05d}-of-00003.safetensors")
        assert_loads(imported(tmp_path, source, "safetensors", exists="replace"), tensors)
        (source / f"model-0000{start + 1}-of-00003.safetensors").unlink()
        with pytest.raises(FileMissing, match=f"and no model-0000{start + 1}-of-00003.safetensors"):
            imported(tmp_path, source, "safetensors", exists="replace")
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    for kind, file in [
        ("torch", tmp_path / "pytorch_model-00001-of-00002.bin"),
        ("safetensors", source / "model-00001-of-00003.safetensors"),
    ]:
        with pytest.raises(InvalidSource, match=r"one of \d files that make a state.*include"):
            imported(tmp_path, file, kind, exists="replace")
        assert len(imported(tmp_path, file, kind, exists="replace", include="*").tensors) == 1
    assert len(imported(tmp_path, source, "safetensors", exists="replace", include="*").tensors) == 2  # all but one
    torch.save({"w": torch.ones(2)}, tmp_path / "epoch-3-of-10.pt")  # which is no part of anything
    assert len(imported(tmp_path, tmp_path / "epoch-3-of-10.pt", "torch", exists="replace").tensors) == 1


@pytest.mark.parametrize("is_remote", [True, False])
def test_an_unfinished_export_is_not_a_source(tmp_path: Path, is_remote: bool) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    uri = "memory://unfinished/hub" if is_remote else str(tmp_path)
    storage = open_storage(uri)
    storage.write("model.safetensors", [memoryview((tmp_path / "model.safetensors").read_bytes())])
    storage.write(".ckptstore-export/plan.json", [memoryview(b"{}")])
    with pytest.raises(InvalidSource, match=r"an export that is not complete.*Run that export again"):
        imported(tmp_path / "new", uri, "safetensors")


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors"])
def test_what_was_exported_comes_back(tmp_path: Path, kind: str) -> None:
    model, optimizer = large_and_trained(1)
    weight = torch.randn(3, 3)
    state = {"model": model, "tied": {"a": weight, "b": weight}, "list": [1, {"x": torch.ones(2)}]}
    if kind != "safetensors":
        state |= {"optimizer": optimizer, "epoch": 4}
    with open_store(tmp_path / "first") as store:
        exported = export(store.save(1, state), tmp_path / "out", to=kind, shard_size_bytes=500_000)
    source = tmp_path / "out/state.pt" if kind == "torch" else exported.path
    checkpoint = imported(tmp_path, source, kind)
    assert stored(checkpoint).index.aliases == {"tied.b": "tied.a"}
    other, other_optimizer = large_and_trained(2)
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


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_code_in_a_source_is_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    torch.save({"w": torch.ones(2), "evil": Attack(mark)}, tmp_path / "evil.pt")
    with pytest.raises(InvalidSource, match=r"without running code: it holds posix\.system"):
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
        ("safetensors", (200_000).to_bytes(8, "little") + 200_000 * b"[", CheckpointDamaged),
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


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_errors_of_the_system_are_ours(tmp_path: Path, kind: str) -> None:
    with pytest.raises(StorageError, match=r"Reading .*aaa.* failed, File name too long"):
        imported(tmp_path, tmp_path / (300 * "a"), kind)
    if sys.platform == "linux":  # a file that cannot be read from its start, for any user
        with pytest.raises(StorageError, match="Reading /proc/self/mem failed"):
            imported(tmp_path, Path("/proc/self/mem"), kind)


@pytest.mark.parametrize(
    "field",
    [
        {"data_offsets": [0, 8]},
        {"data_offsets": [4, 16]},
        {"dtype": "Q2"},
        {"dtype": "F4", "shape": [24]},
        {"shape": [0, 1 << 70], "data_offsets": [0, 0]},
        {"shape": [0, 1 << 40, 1 << 30], "data_offsets": [0, 0]},
        {"shape": [3] + 300 * [1]},
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, field: dict[str, object]) -> None:
    fields = {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12], **field}}
    text = json.dumps(fields).encode()
    (tmp_path / "f").write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    with pytest.raises(CkptstoreError):
        imported(tmp_path, tmp_path / "f", "safetensors")


@pytest.mark.parametrize("head", ['{"__metadata__": null, %s}', "  {%s}", "{%s}   ", "{%s, %s}"])
def test_a_header_that_safetensors_reads_is_read(tmp_path: Path, head: str) -> None:
    text = head.replace("%s", '"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}').encode()
    (tmp_path / "f").write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    assert load_file(tmp_path / "f").keys() == imported(tmp_path, tmp_path / "f", "safetensors").to_dict().keys()


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


def trained(names: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    weights, others = [model[0].weight, model[2].weight], [model[0].bias, *model[1].parameters(), model[2].bias]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(model.named_parameters() if names else groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    model, optimizer, _ = trained()
    for parameter in model.parameters():
        parameter.data.zero_()
    other = torch.optim.AdamW([{**group, "lr": 1.0} for group in optimizer.param_groups], lr=1.0)
    return model, other, torch.optim.lr_scheduler.StepLR(other, 2)


@pytest.mark.parametrize("kind", ["torch", "torch of old", "dcp"])
def test_the_standard_checkpoint_of_a_training_loop_is_resumed(tmp_path: Path, kind: str) -> None:
    model, optimizer, scheduler = trained()
    key = "list" if kind == "dcp" else 3
    args = {"lr": 0.1, "betas": (0.9, 0.99), "empty": {}, key: [torch.ones(2), None]}
    standard = {
        "args": args,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
    }
    if kind == "dcp":
        dcp.save(standard, checkpoint_id=tmp_path / "last.pt", no_dist=True)
    else:
        torch.save(standard, tmp_path / "last.pt", _use_new_zipfile_serialization=kind == "torch")
    other, other_optimizer, other_scheduler = fresh()
    found = {"lr": 0, "betas": None, "empty": {}, key: [torch.zeros(2), 1]}
    state = {"args": found, "model": other, "optimizer": other_optimizer, "scheduler": other_scheduler, "epoch": 0}
    rename = {"model_state_dict": "model", "optimizer_state_dict": "optimizer"}
    imported(tmp_path, tmp_path / "last.pt", kind.partition(" ")[0], state=state, rename=rename)
    with open_store(tmp_path / "store") as store:
        store.resume(state)
    assert (state["epoch"], repr(state["args"])) == (3, repr(args))
    assert all(torch.equal(other.state_dict()[key], tensor) for key, tensor in model.state_dict().items())
    assert str(other_optimizer.state_dict()) == str(optimizer.state_dict())
    assert other_scheduler.state_dict() == scheduler.state_dict()


class Slow(torch.optim.SGD):
    """Has entries of its own beside torch's two, and a group without parameters."""

    def __init__(self, model: torch.nn.Module, *, lr: float, slow: float) -> None:
        super().__init__([{"params": [*model.parameters()]}, {"params": [], "lr": lr}], momentum=0.9)
        self.more = {"slow": torch.full((2,), slow), "rates": [slow, {"two": torch.full((3,), slow)}]}

    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), **self.more}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        super().load_state_dict({"state": state_dict["state"], "param_groups": state_dict["param_groups"]})
        self.more = {name: state_dict[name] for name in self.more}


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_all_entries_of_an_optimizer_are_imported(tmp_path: Path, kind: str) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = Slow(model, lr=0.125, slow=3.0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    source = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if kind == "torch":
        torch.save(source, tmp_path / "last.pt")
    else:
        dcp.save(source, checkpoint_id=tmp_path / "last.pt", no_dist=True)
    other = torch.nn.Linear(3, 2)
    state = {"model": other, "optimizer": Slow(other, lr=1.0, slow=0.0)}
    imported(tmp_path, tmp_path / "last.pt", kind, state=state)
    with open_store(tmp_path / "store") as store:
        store.resume(state)
    assert str(state["optimizer"].state_dict()) == str(optimizer.state_dict())


def test_numbers_without_names_are_refused_with_advice(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    with pytest.raises(InvalidSource, match=r"optimizer numbers its parameters.*state=\{\.\.\.\}.*include"):
        imported(tmp_path, tmp_path / "last.pt", "torch")
    smaller = torch.optim.AdamW(model[0].parameters())
    with pytest.raises(InvalidInput, match=r"groups of \[2, 4\] parameters, the state's optimizer of \[2\]"):
        imported(tmp_path, tmp_path / "last.pt", "torch", state={"model": model, "optimizer": smaller})
    with pytest.raises(InvalidInput, match="called optimizer, the state has adam"):
        imported(tmp_path, tmp_path / "last.pt", "torch", state={"model": model, "adam": optimizer})
    assert not (tmp_path / "store/store.json").exists()
    checkpoint = imported(tmp_path, tmp_path / "last.pt", "torch", include="model.*")
    checkpoint.load({"model": fresh()[0]})


def test_parameters_that_were_saved_with_names_need_no_state(tmp_path: Path) -> None:
    model, optimizer, _ = trained(names=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    checkpoint = imported(tmp_path, tmp_path / "last.pt", "torch")
    other, _, _ = fresh()
    loaded = torch.optim.AdamW(other.parameters(), lr=0.5)
    checkpoint.load({"model": other, "optimizer": loaded})
    saved = optimizer.state_dict()["state"]
    assert all(
        torch.equal(items["exp_avg"], saved[key]["exp_avg"]) for key, items in loaded.state_dict()["state"].items()
    )
    assert loaded.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_keys_get_new_names(tmp_path: Path) -> None:
    model, _, _ = trained()
    bare = {f"module.{key}": value for key, value in model.state_dict().items()}
    torch.save({**bare, "modulex": torch.ones(1)}, tmp_path / "bare.pt")
    other, _, _ = fresh()
    imported(tmp_path, tmp_path / "bare.pt", "torch", rename={"module": "model"}).load({"model": other})
    assert torch.equal(other[2].weight, model[2].weight)
    renamed = imported(
        tmp_path, tmp_path / "bare.pt", "torch", exists="replace", rename={"": "net", "module.0": "one."}
    )
    loaded = {"one": {"weight": torch.zeros(4, 3)}, "net": {"module.2.weight": torch.zeros(4, 4)}}
    assert renamed.load(loaded, strict=False).missing == ()
    assert torch.equal(loaded["one"]["weight"], model[0].weight)
    exported = export(renamed, tmp_path / "out", to="torch")
    assert "module.2.weight" in torch.load(exported.path / "state.pt")["net"]
    function = imported(tmp_path, tmp_path / "bare.pt", "torch", exists="replace", rename=lambda key: key.upper())
    function.load({"MODULE": {"2.WEIGHT": torch.zeros(4, 4)}}, strict=False)
    for rename, message in [
        ({"modle": "model"}, "'modle', which rename names"),
        ({"module": ""}, None),
        (lambda key: "", "makes '' of the key"),
        (lambda key: "same", "two places"),
    ]:
        if message is None:
            imported(tmp_path, tmp_path / "bare.pt", "torch", exists="replace", rename=rename).load(
                {"0": {"weight": torch.zeros(4, 3)}}, strict=False
            )
            continue
        with pytest.raises(InvalidInput, match=message):
            imported(tmp_path, tmp_path / "bare.pt", "torch", exists="replace", rename=rename)
    for wrong in ([("module", "model")], "model", {"module": None}):
        with pytest.raises(InvalidInput, match="a mapping of text to text or a function"):
            imported(tmp_path, tmp_path / "bare.pt", "torch", exists="replace", rename=wrong)
    with pytest.raises(InvalidInput, match="makes 1 of the key"):
        imported(tmp_path, tmp_path / "bare.pt", "torch", exists="replace", rename=lambda key: 1)


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors"])
def test_each_pattern_fits_something(tmp_path: Path, kind: str) -> None:
    model, optimizer, _ = trained(names=True)
    if kind == "safetensors":
        save_file({f"model.{key}": tensor for key, tensor in model.state_dict().items()}, tmp_path / "source")
        include = ["model.0.*", "model.2.*"]
    else:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
        include = ["model.*", "epoch", "optimizer.state.*", "optimizer.param_groups.*"]
        if kind == "dcp":
            dcp.save(state, checkpoint_id=tmp_path / "source", no_dist=True)
        else:
            torch.save(state, tmp_path / "source")
    assert imported(tmp_path, tmp_path / "source", kind, include=include).tensors
    with pytest.raises(InvalidInput, match=r"include='modle\.\*' fits no key of the source"):
        imported(tmp_path, tmp_path / "source", kind, exists="replace", include=[*include, "modle.*"])


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_refused_pickle_names_its_classes_and_the_option(tmp_path: Path, is_zip: bool) -> None:
    args = argparse.Namespace(lr=0.1)
    torch.save({"w": torch.ones(2), "args": args}, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(InvalidSource, match=r"holds argparse\.Namespace.*allow_pickle=True"):
        imported(tmp_path, tmp_path / "a.pt", "torch")
    checkpoint = imported(tmp_path, tmp_path / "a.pt", "torch", allow_pickle=True)
    state = {"w": torch.zeros(2), "args": None}
    checkpoint.load(state, allow_pickle=True)
    assert state["args"] == args
    with torch.serialization.safe_globals([argparse.Namespace]):
        imported(tmp_path, tmp_path / "a.pt", "torch", exists="replace", include="w")


@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp"])
def test_a_source_in_another_storage(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    tensors = {"a": torch.randn(4, 3), "b": torch.ones(2)}
    uri = f"memory://{request.node.name}/source"
    if kind == "torch":
        torch.save(tensors, tmp_path / "state.pt")
    elif kind == "safetensors":
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    storage = open_storage(uri)
    for path in tmp_path.iterdir():
        storage.write(path.name, [memoryview(path.read_bytes())])
    assert_loads(imported(tmp_path, f"{uri}/state.pt" if kind == "torch" else uri, kind), tensors)
    if kind == "safetensors":
        assert_loads(imported(tmp_path, f"{uri}/model.safetensors", kind, exists="replace"), tensors)
    if kind != "dcp":
        with pytest.raises(FileMissing, match="nothing to import at memory://"):
            imported(tmp_path, f"{uri}/no.safetensors", kind)


def _of_itself(path: Path) -> None:
    value: list[Any] = [1]
    value.append(value)
    torch.save({"w": torch.ones(3), "v": value}, path)


def _expanded(path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 33)}, path)


def _expanded_inside(path: Path) -> None:
    torch.save({"w": [torch.ones(1).expand(1 << 33)]}, path)


def _packed(path: Path) -> None:
    torch.save({"w": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


def _cut_off(path: Path) -> None:
    torch.save({"w": torch.zeros(100_000)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:1000] + data[200_000:])  # its directory of entries is whole


def _ended_early(path: Path) -> None:
    torch.save({"w": torch.zeros(100_000)}, path)
    os.truncate(path, 1000)


@pytest.mark.parametrize("make", [_of_itself, _expanded, _expanded_inside, _packed, _cut_off, _ended_early])
def test_files_that_are_not_what_they_seem_are_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "state.pt")
    with (
        open_store(tmp_path / "store") as store,
        pytest.raises((InvalidInput, CheckpointDamaged), match=r"state\.pt|w"),
    ):
        import_state(tmp_path / "state.pt", store, 1, kind="torch")
    assert not (tmp_path / "store").exists()


def test_a_size_that_is_not_in_the_file_must_be_allowed(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"w": torch.ones(1).expand(100)}, path)
    with pytest.raises(InvalidInput, match=r"w has 400 bytes.*allow_bytes=400 \(--allow-bytes 400\)"):
        imported(tmp_path, path, "torch", allow_bytes=399)
    with pytest.raises(InvalidInput, match="allow_bytes is '1'"):
        imported(tmp_path, path, "torch", allow_bytes="1")
    assert not (tmp_path / "store").exists()
    assert torch.equal(imported(tmp_path, path, "torch", allow_bytes=400).to_dict()["w"], torch.ones(100))


def test_a_dcp_chunk_that_is_larger_than_its_files_is_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "dcp")
    metadata = pickle.loads((tmp_path / "dcp/.metadata").read_bytes())
    entry = metadata.state_dict_metadata["w"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 33])
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InvalidInput, match=r"w has 34,359,738,368 bytes"):
        imported(tmp_path, tmp_path / "dcp", "dcp")
    assert not (tmp_path / "store").exists()
