"""Exports hold the same bits as the state that was saved, as the tools that they are for see it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from export_worker import save_sharded, sharded_tensors
from forked_ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from saving import bits, blank, change_byte, directory_of
from test_frames import DTYPES, random_tensor

from ckptstore import Checkpoint, CheckpointDamaged, InvalidInput, InvalidSource, InvalidState, StorageError, open_store
from ckptstore.dcp import StoreWriter
from ckptstore.extensions.exchange.safetensors_file import NAMES
from ckptstore.interchange import export
from ckptstore.storage.memory import MemoryStorage
from ckptstore.storage.open import open_storage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage")
MIB = 1 << 20
KINDS = ("safetensors", "torch", "dcp")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_DURABLE", "false")


def save(tmp_path: Path, state: dict[str, object], **keywords: object) -> Checkpoint:
    with open_store(tmp_path / "store", durable=False) as store:
        return Checkpoint.from_uri(store.save(1, state, **keywords).uri)


def trained(seed: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(30, 500), torch.nn.BatchNorm1d(500), torch.nn.Linear(500, 700))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    return model, optimizer


def everything() -> dict[str, object]:
    model, optimizer = trained()
    weight = torch.randn(3, 3)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        "inner": {"module": torch.nn.Linear(1, 1), "config": {"empty": {}, "tensor": torch.ones(2), 3: (1, "x")}},
        "list": [1, {"x": torch.ones(4)}, (torch.zeros(2), None)],
        "tied": {"embed": weight, "head": weight},
        "epoch": 7,
        "a.b": torch.tensor(1.5),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert tuple(found[name].shape) == tuple(tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def in_safetensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def stock_load(directory: Path, state: dict[str, object]) -> dict[str, object]:
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state


def by_dtype(names: set[str]) -> dict[str, torch.Tensor]:
    chosen = [dtype for dtype in DTYPES if str(dtype).removeprefix("torch.") in names]
    tensors = {f"small.{dtype}": random_tensor(dtype, (5, 3)) for dtype in chosen}
    tensors |= {f"large.{dtype}": random_tensor(dtype, (401, 803)) for dtype in chosen}
    return tensors | {"zero_d": torch.tensor(2.5), "empty": torch.empty(0, 4), "transposed": torch.randn(9, 700).t()}


def test_every_dtype_of_safetensors(tmp_path: Path) -> None:
    tensors = by_dtype(set(NAMES)) | {"odd.é": torch.ones(3, dtype=torch.uint8)}
    assert len(tensors) >= 2 * 15
    report = export(save(tmp_path, tensors), tmp_path / "out", to="safetensors")
    assert report.files == ("model.safetensors",)
    assert report.num_tensors == len(tensors)
    assert report.size_bytes == sum(tensor.nbytes for tensor in tensors.values())
    path = tmp_path / "out/model.safetensors"
    assert_same(load_file(path), tensors)
    data = path.read_bytes()
    head_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + head_bytes])
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, entry in header.items():
        assert (8 + head_bytes + entry["data_offsets"][0]) % tensors[name].element_size() == 0, "it is aligned"


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("stock_readable", [True, False])
def test_every_dtype_of_torch(tmp_path: Path, kind: str, stock_readable: bool) -> None:
    tensors = {key.replace(".", "_"): tensor for key, tensor in by_dtype({str(d)[6:] for d in DTYPES}).items()}
    export(save(tmp_path, dict(tensors), stock_readable=stock_readable), tmp_path / "out", to=kind)
    if kind == "torch":
        for is_mapped in (False, True):
            assert_same(torch.load(tmp_path / "out/state.pt", weights_only=True, mmap=is_mapped), tensors)
    else:
        assert_same(stock_load(tmp_path / "out", blank(tensors)), tensors)


def test_files_and_index_are_those_of_hugging_face(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint = save(tmp_path, {"model": model, "optimizer": optimizer, "epoch": 1})
    report = export(
        checkpoint, tmp_path / "out", to="safetensors", include="model.*", strip_prefix="model.", shard_size_bytes=MIB
    )
    expected = model.state_dict()
    assert report.files == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    )
    assert any("plain values" in notice for notice in report.notices)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in expected.values())}
    assert index["weight_map"].keys() == expected.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], expected[name])
    assert_same(in_safetensors(tmp_path / "out"), dict(expected))


def test_a_tensor_above_the_limit_has_a_file_of_its_own(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(10), "b": torch.randn(500_000), "c": torch.randn(10), "d": torch.randn(10)}
    report = export(save(tmp_path, dict(tensors)), tmp_path / "out", to="safetensors", shard_size_bytes=1000)
    assert len(report.files) == 4
    assert_same(in_safetensors(tmp_path / "out"), tensors)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    weight = torch.randn(300, 1000)
    checkpoint = save(tmp_path, {"lm_head.weight": weight, "model.embed_tokens.weight": weight, "other": torch.ones(3)})
    report = export(checkpoint, tmp_path / "safetensors", to="safetensors")
    found = load_file(tmp_path / "safetensors/model.safetensors")
    assert found.keys() == {"model.embed_tokens.weight", "other"}
    assert torch.equal(found["model.embed_tokens.weight"], weight)
    with safe_open(tmp_path / "safetensors/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "lm_head.weight": "model.embed_tokens.weight"}
    assert report.size_bytes == weight.nbytes + 12
    export(checkpoint, tmp_path / "head", to="safetensors", include="lm_head.*")
    assert torch.equal(load_file(tmp_path / "head/model.safetensors")["lm_head.weight"], weight)
    export(checkpoint, tmp_path / "torch", to="torch")
    loaded = torch.load(tmp_path / "torch/state.pt", weights_only=True)
    assert loaded["lm_head.weight"].data_ptr() == loaded["model.embed_tokens.weight"].data_ptr()
    assert (tmp_path / "torch/state.pt").stat().st_size < 1.1 * weight.nbytes


@pytest.mark.parametrize("stock_readable", [True, False])
def test_torch_has_the_nested_state(tmp_path: Path, stock_readable: bool) -> None:
    state = {**everything(), "models": {7: torch.nn.Linear(2, 2)}}
    report = export(save(tmp_path, state, stock_readable=stock_readable), tmp_path / "out", to="torch")
    loaded = torch.load(tmp_path / "out/state.pt", weights_only=True)
    assert report.notices == ()
    assert loaded.keys() == state.keys()
    assert_same(loaded["model"], dict(state["model"].state_dict()))
    assert loaded["schedule"]["gamma"] == 0.9
    assert loaded["inner"]["config"].keys() == {"empty", "tensor", 3}
    assert loaded["inner"]["config"][3] == (1, "x")
    assert torch.equal(loaded["inner"]["module"]["weight"], state["inner"]["module"].weight)
    assert loaded["models"][7].keys() == {"weight", "bias"}
    assert loaded["list"][0] == 1
    assert torch.equal(loaded["list"][1]["x"], torch.ones(4))
    assert torch.equal(loaded["list"][2][0], torch.zeros(2))
    assert loaded["tied"]["head"].data_ptr() == loaded["tied"]["embed"].data_ptr()
    assert (loaded["epoch"], loaded["a.b"]) == (7, 1.5)
    assert zipfile.ZipFile(tmp_path / "out/state.pt").testzip() is None


@pytest.mark.parametrize("is_allowed_here", [False, True])
def test_what_torch_load_refuses_is_left_out_and_said(tmp_path: Path, is_allowed_here: bool) -> None:
    """Also what this process alone allows."""
    classes = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.int64)), OrderedDict]
    checkpoint = save(tmp_path, {"array": np.arange(3), "dict": {"a": OrderedDict(b=1)}, "w": torch.ones(2)})
    with torch.serialization.safe_globals(classes if is_allowed_here else []):
        report = export(checkpoint, tmp_path / "out", to="torch")
    assert torch.load(tmp_path / "out/state.pt", weights_only=True).keys() == {"dict", "w"}
    assert [notice.partition(" is left out")[0] for notice in report.notices] == ["array"]


def test_an_item_has_no_place_inside_another(tmp_path: Path) -> None:
    model = torch.nn.ParameterDict({"scale": torch.ones(2)})
    checkpoint = save(tmp_path, {"model": model, "scale": torch.nn.Linear(3, 2)})
    with pytest.raises(InvalidInput, match=r"scale is an item of its own, so scale\.\w+ has no place below it"):
        export(checkpoint, tmp_path / "out", to="torch", strip_prefix="model.")
    assert not (tmp_path / "out").exists()


def test_dcp_is_stock_whatever_the_checkpoint_is(tmp_path: Path) -> None:
    state = everything()
    whole = export(save(tmp_path, state), tmp_path / "whole", to="dcp")
    assert set(whole.files) >= {".metadata"}
    part = export(
        save(tmp_path, state), tmp_path / "part", to="dcp", include=["model.*", "list"], strip_prefix="model."
    )
    assert set(part.files) == {".metadata", "__0_0.distcp"}
    expected = dict(state["model"].state_dict())
    assert_same(stock_load(tmp_path / "whole", {"model": blank(expected)})["model"], expected)
    found = stock_load(tmp_path / "part", {**blank(expected), "list": [0, {"x": torch.zeros(4)}, None]})
    assert_same({key: found[key] for key in expected}, expected)
    assert found["list"][0] == 1
    assert torch.equal(found["list"][1]["x"], torch.ones(4))
    assert found["list"][2][1] is None
    assert torch.equal(found["list"][2][0], torch.zeros(2))
    bare = export(save(tmp_path, state, stock_readable=False), tmp_path / "bare", to="dcp")
    assert set(bare.files) == {".metadata", "__0_0.distcp"}
    assert_same(stock_load(tmp_path / "bare", {"model": blank(expected)})["model"], expected)


def test_large_tensors_pass_in_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.extensions.exchange.streaming.BATCH_BYTES", MIB)
    monkeypatch.setattr("ckptstore.state.write.assignment.MAX_CHUNK_BYTES", 3 * MIB)
    tensors = {"wide": torch.randn(3, 700_001), "deep": torch.randn(70, 11, 901), "odd": torch.randn(1_000_003)}
    tensors["half"] = torch.randn(1000, 1111).half()
    checkpoint = save(tmp_path, dict(tensors))
    export(checkpoint, tmp_path / "a", to="safetensors")
    assert_same(in_safetensors(tmp_path / "a"), tensors)
    export(checkpoint, tmp_path / "b", to="torch")
    assert_same(torch.load(tmp_path / "b/state.pt", weights_only=True), tensors)
    export(checkpoint, tmp_path / "c", to="dcp", include="*")
    assert_same(stock_load(tmp_path / "c", blank(tensors)), tensors)


def test_a_checkpoint_of_two_ranks_is_made_whole(tmp_path: Path) -> None:
    run_ranks(2, save_sharded, str(tmp_path / "store"))
    whole = {**sharded_tensors(), "same": torch.arange(5), "own": torch.zeros(3, dtype=torch.int64)}
    with open_store(tmp_path / "store") as store:
        checkpoint = Checkpoint.from_uri(store[1].uri)
    report = export(checkpoint, tmp_path / "a", to="safetensors", include="model.*", strip_prefix="model.")
    assert_same(in_safetensors(tmp_path / "a"), whole)
    assert "model.own differs between ranks, the lowest rank's is taken" in report.notices
    report = export(checkpoint, tmp_path / "b", to="torch")
    loaded = torch.load(tmp_path / "b/state.pt", weights_only=True)
    assert_same(loaded["model"], whole)
    assert (loaded["epoch"], loaded["seed"]) == (4, 100)
    assert "seed differs between ranks, the lowest rank's is taken" in report.notices
    for include in (None, "*"):
        export(checkpoint, tmp_path / f"c{include is None}", to="dcp", include=include)
        assert_same(stock_load(tmp_path / f"c{include is None}", {"model": blank(whole)})["model"], whole)


def damage(checkpoint: Checkpoint) -> None:
    """Flip one bit in the middle of the largest file."""
    change_byte(directory_of(checkpoint) / max(checkpoint.files, key=lambda file: file.size_bytes).name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("include", [None, "*"])
def test_a_damaged_checkpoint_leaves_what_was_there(tmp_path: Path, kind: str, include: str | None) -> None:
    checkpoint = save(tmp_path, {"w": torch.randn(2000, 1000), "v": torch.ones(3)})
    export(checkpoint, tmp_path / "before", to="torch")
    damage(checkpoint)
    for name in ("out", "before"):
        with pytest.raises(CheckpointDamaged):
            export(checkpoint, tmp_path / name, to=kind, include=include, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "store"]
    assert [path.name for path in (tmp_path / "before").iterdir()] == ["state.pt"]


@pytest.mark.parametrize(
    ("tensors", "keywords", "error", "words"),
    [
        (
            {"good": torch.ones(2), "bad": torch.ones(2).cdouble()},
            {},
            InvalidState,
            r"bad \(complex128\)",
        ),
        ({"__metadata__": torch.ones(2)}, {}, InvalidState, "__metadata__"),
        ({"\ud800": torch.ones(2)}, {}, InvalidState, r"cannot be called '\\ud800'"),
        ({"w": torch.ones(2)}, {"include": "nothing.*"}, InvalidInput, "'nothing.*' fits no key"),
        ({"w": torch.ones(2)}, {"include": ["w", "v"], "to": "torch"}, InvalidInput, "'v' fits no key"),
        ({"m.w": torch.ones(2), "n": 1}, {"include": ["n", "m.*", "o"], "to": "dcp"}, InvalidInput, "'o' fits no key"),
        ({"m.w": torch.ones(2)}, {"strip_prefix": "n."}, InvalidInput, "'n.' is the beginning of no key"),
        ({"m.w": torch.ones(2)}, {"strip_prefix": "m"}, InvalidInput, r"m\.w would be called '\.w'. Strip 'm\.'"),
        ({"x.a": torch.ones(2), "a": torch.ones(2)}, {"strip_prefix": "x."}, InvalidInput, "would both be called 'a'"),
        ({"w": torch.ones(2)}, {"shard_size_bytes": 0}, InvalidInput, "shard_size_bytes"),
        ({"w": torch.ones(2)}, {"to": "onnx"}, InvalidInput, "onnx"),
        ({"epoch": 1}, {}, InvalidInput, "no tensor"),
    ],
)
def test_bad_input_writes_nothing(tmp_path: Path, tensors, keywords, error, words) -> None:
    checkpoint = save(tmp_path, tensors)
    with pytest.raises(error, match=words):
        export(checkpoint, tmp_path / "out", **{"to": "safetensors", **keywords})
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_what_a_writer_of_dcp_has_named_is_an_export_too(tmp_path: Path) -> None:
    """Such files have a random part in their names."""
    dcp.save({"w": torch.ones(2)}, storage_writer=StoreWriter(tmp_path / "alone"), no_dist=True)
    for _ in range(2):
        export(Checkpoint.from_uri(str(tmp_path / "alone")), tmp_path / "out", to="dcp", overwrite=True)


def test_targets_that_exist(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, {"w": torch.ones(2)})
    (tmp_path / "out").mkdir()
    export(checkpoint, tmp_path / "out", to="safetensors")
    with pytest.raises(InvalidInput, match="not empty"):
        export(checkpoint, tmp_path / "out", to="torch")
    export(checkpoint, tmp_path / "out", to="torch", overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["state.pt"]
    (tmp_path / "out/thesis.txt").write_text("mine")
    with pytest.raises(InvalidInput, match=r"thesis\.txt"):
        export(checkpoint, tmp_path / "out", to="dcp", overwrite=True)
    with pytest.raises(InvalidInput, match="named like a file"):
        export(checkpoint, tmp_path / "model.safetensors", to="safetensors")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidInput, match="not a directory"):
        export(checkpoint, tmp_path / "file", to="torch", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out", "store"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_remote", [True, False])
def test_files_that_no_export_writes_are_not_deleted(tmp_path: Path, kind: str, is_remote: bool) -> None:
    checkpoint = save(tmp_path, {"w": torch.ones(2)})
    for number, name in enumerate(["my-lora.safetensors", "last.pt", "__1_0.distcp", "a.safetensors.index.json"]):
        uri = f"memory://mine-{kind}/{number}" if is_remote else str(tmp_path / f"out{number}")
        open_storage(uri).write(name, [memoryview(b"mine")])
        with pytest.raises(InvalidInput, match=f"{name}, which no export wrote"):
            export(checkpoint, uri, to=kind, overwrite=True)
        assert read_folder(uri) == {name: b"mine"}


@pytest.mark.parametrize("kind", [*KINDS, "files"])
def test_directories_that_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    checkpoint = save(tmp_path, {"w": torch.ones(2)})

    def write(directory: str | Path) -> None:
        checkpoint.to_directory(directory) if kind == "files" else export(checkpoint, directory, to=kind)

    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    monkeypatch.chdir(tmp_path / "here")
    for directory, what in [
        (".", "the current directory"),
        (tmp_path / "here", "the current directory"),
        ("/", "a mount"),
        ("/dev", "a mount"),
        (tmp_path / "link", "a symbolic link"),
    ]:
        with pytest.raises(InvalidInput, match=f"{what}, which cannot be exchanged.*Give a directory inside of it"):
            write(directory)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "link", "store"]
    write("inside")
    assert [path.name for path in Path(".").iterdir()] == ["inside"]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_the_system_are_ours(tmp_path: Path, kind: str) -> None:
    checkpoint, too_long = save(tmp_path, {"w": torch.ones(2)}), tmp_path / (300 * "a")
    for keywords in ({"directory": too_long}, {"directory": tmp_path / "out", "beside": too_long}):
        with pytest.raises(StorageError, match="a failed, File name too long"):
            export(checkpoint, to=kind, **keywords)


def test_a_directory_checkpoint_has_no_state(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a").write_bytes(b"x")
    with open_store(tmp_path / "store") as store:
        checkpoint = Checkpoint.from_uri(store.save_directory(1, tmp_path / "source").uri)
    with pytest.raises(InvalidInput, match="has no state"):
        export(checkpoint, tmp_path / "out", to="torch")


def test_what_stock_dcp_wrote_is_to_be_imported_first(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    checkpoint = Checkpoint.from_uri(str(tmp_path / "stock"))
    with pytest.raises(InvalidInput, match="Import it"):
        export(checkpoint, tmp_path / "out", to="safetensors")
    with pytest.raises(InvalidInput, match=r"no digests to check.*import it"):
        checkpoint.verify()


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_pickles_are_refused_and_can_be_left_out(tmp_path: Path, kind: str) -> None:
    state = {"w": torch.ones(2), "path": Path("x"), "epoch": 3}
    checkpoint = save(tmp_path, state, allow_pickle=True, stock_readable=False)
    with pytest.raises(InvalidState, match=r"path is a pickle.*include"):
        export(checkpoint, tmp_path / "out", to=kind)
    export(checkpoint, tmp_path / "out", to=kind, include=["w", "epoch"])
    export(checkpoint, tmp_path / "tensors", to="safetensors")


@pytest.mark.parametrize("incremental", [True, "reference"])
def test_an_incremental_checkpoint_is_made_whole(tmp_path: Path, incremental: bool | str) -> None:
    state = {"frozen": torch.randn(1000, 900), "trained": torch.randn(900, 400)}
    with open_store(tmp_path / "store") as store:
        for step in (1, 2):
            state["trained"] += 1
            checkpoint = store.save(step, state, incremental=incremental)
        for kind in KINDS:
            export(checkpoint, tmp_path / kind, to=kind)
    shutil.rmtree(tmp_path / "store")
    assert_same(in_safetensors(tmp_path / "safetensors"), state)
    assert_same(torch.load(tmp_path / "torch/state.pt", weights_only=True), state)
    assert_same(stock_load(tmp_path / "dcp", blank(state)), state)


@pytest.mark.parametrize(
    "largest_mib", [pytest.param(24, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.long)]
)
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path, largest_mib: int) -> None:
    state = {f"t{number}": torch.full((largest_mib << 18,), float(number)) for number in range(8)}
    checkpoint = save(tmp_path, {**state, "small": torch.ones(2)})
    worker = Path(__file__).with_name("export_worker.py")
    command = [sys.executable, str(worker), checkpoint.uri, str(tmp_path / "out"), *KINDS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    assert largest_mib * MIB // 2 < int(done.stdout) < (2 * largest_mib + 32) * MIB
    loaded = torch.load(tmp_path / "out/torch/state.pt", weights_only=True, mmap=True)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())
    shutil.rmtree(tmp_path / "out")


def read_folder(uri: str) -> dict[str, bytes]:
    storage = open_storage(uri)
    return {file.key: storage.read(file.key) for file in storage.list("")}


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_to_another_storage_is_the_same(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    uri = f"memory://{request.node.name}/out"
    with open_store(f"memory://{request.node.name}/store") as store:
        checkpoint = store.save(1, {"a": torch.randn(40, 5), "b": torch.randn(70, 5)}, stock_readable=kind == "dcp")
        expected = export(checkpoint, tmp_path / "out", to=kind, shard_size_bytes=1000)
        report = export(checkpoint, uri, to=kind, shard_size_bytes=1000)
        assert (report.uri, report.path, report.files) == (uri, None, expected.files)
        assert read_folder(uri) == {name: (tmp_path / "out" / name).read_bytes() for name in expected.files}
        with pytest.raises(InvalidInput, match=f"{kind}.*is not empty"):
            export(checkpoint, uri, to=kind)
        report = export(checkpoint, uri, to="safetensors", include="a", overwrite=True)
        assert read_folder(uri).keys() == set(report.files) == {"model.safetensors"}
        open_storage(uri).write("notes.txt", [memoryview(b"mine")])
        with pytest.raises(InvalidInput, match=r"notes\.txt, which no export wrote"):
            export(checkpoint, uri, to=kind, overwrite=True)
        with pytest.raises(InvalidInput, match="storage_options mean nothing"):
            export(checkpoint, tmp_path / "other", to=kind, storage_options={"key": "x"})


def test_an_index_comes_after_the_files_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = MemoryStorage.write
    monkeypatch.setattr(
        MemoryStorage, "write", lambda self, key, views: (written.append(key), write(self, key, views))[1]
    )
    with open_store(tmp_path / "store") as store:
        checkpoint = store.save(1, {"a": torch.randn(40, 5), "b": torch.randn(70, 5)})
        report = export(checkpoint, "memory://order/out", to="safetensors", shard_size_bytes=1000)
    records = [name for name in written if name.startswith(".ckptstore-export/")]
    assert [name for name in written if name not in records] == [*report.files]
    assert written[0] == ".ckptstore-export/plan.json"
    assert written[-1] == "model.safetensors.index.json"
    assert read_folder("memory://order/out").keys() == set(report.files)


def test_a_model_with_its_config_is_loaded_by_from_pretrained(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base/tokenizer.json").write_text("{}")
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    with open_store(tmp_path / "store") as store:
        checkpoint = store.save(1, {"model": model})
        asked = {"to": "safetensors", "strip_prefix": "model.", "beside": tmp_path / "base"}
        export(checkpoint, tmp_path / "hub", **asked)
        report = export(checkpoint, tmp_path / "hub", overwrite=True, **asked)
        assert set(report.files) == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
        with pytest.raises(InvalidSource, match="no files to put beside"):
            export(checkpoint, tmp_path / "no", to="safetensors", beside=tmp_path / "nothing")
    found = LlamaForCausalLM.from_pretrained(tmp_path / "hub")
    assert torch.equal(found.lm_head.weight, model.lm_head.weight)
