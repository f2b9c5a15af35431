"""What is stored can be read by a program that knows the format page and nothing of this package."""

from __future__ import annotations

import ast
import gzip
import json
import sys
from pathlib import Path

import independent_reader as reader
import pytest
import torch
from saving import bits
from test_golden_state import EXPECTED

import ckptstore

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"


def test_it_is_short_and_knows_nothing_of_this_package() -> None:
    text = (TESTS / "independent_reader.py").read_text()
    assert len(text.splitlines()) <= 295
    imported = {
        name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)])
    }
    assert {name.partition(".")[0] for name in imported} <= {
        *sys.stdlib_module_names,
        "google_crc32c",
        "numpy",
        "xxhash",
    }


def test_it_reads_the_golden_log() -> None:
    records = reader.read_log(GOLDEN / "log-v1")
    assert [record["kind"] for record in records[-3:]] == ["unpin", "remove", "claim"]
    assert reader.numbers(records[-1]["state"]["live"]) == [3, 4]
    packed = reader.numbers(json.loads((GOLDEN / "log-v1" / "packed.json").read_text())["state"]["live"])
    assert len(packed) > 100
    assert packed == sorted(set(packed))
    hint = json.loads((GOLDEN / "log-v1" / "latest.json").read_text())
    assert json.loads(hint["newest"]) == records[-1]


def test_it_sees_every_changed_byte_of_a_record(tmp_path: Path) -> None:
    data = (GOLDEN / "log-v1" / "0000000001.json").read_bytes()
    record = tmp_path / "0000000001.json"
    for place in range(len(data)):
        record.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(ValueError, match="is damaged"):
            reader.read_log(tmp_path)


@pytest.mark.parametrize("name", ["directory.json", "with-provenance.json", "with-unknown-fields.json"])
def test_it_reads_the_golden_manifests(name: str) -> None:
    manifest = json.loads((GOLDEN / "manifest-v1" / name).read_text())
    assert (manifest["version"], manifest["kind"]) == (1, "directory")
    assert [file["name"] for file in manifest["files"]] == sorted(file["name"] for file in manifest["files"])


def test_it_reads_the_golden_state() -> None:
    def read(name: str) -> bytes:
        path = GOLDEN / "state-v1" / name
        return path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes())

    tensors, values = reader.read_state(read)
    found = {key: item for key, item in tensors.items() if "#" not in key}
    assert found == {
        key: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bits(tensor))
        for key, tensor in EXPECTED.items()
    }
    assert values["epoch"] == 3
    assert values["inf"] == {"$t": "float", "v": "-Infinity"}
    assert values["nested"] == {"betas": {"$t": "tuple", "v": [0.9, 0.999]}, "name": "golden"}
    assert tensors[values["history"]["v"]][1] == (1001,)


def test_it_reads_the_golden_modules() -> None:
    data = (GOLDEN / "state-v1" / "modules.index").read_bytes()
    linear = {"version": 1, "form": {"$t": "tuple", "v": ["log", 2]}, "scale": {"$t": "tensor", "v": "0"}}
    notes = {"": {"version": 1}, "0": linear, "1": {"version": 1}, "1.0": {"version": 2}}
    assert reader.read_modules(data) == {("model", name): note for name, note in notes.items()}


def test_it_reads_an_incremental_checkpoint_and_sees_damage(tmp_path: Path) -> None:
    state = {"a": torch.arange(400_000.0).reshape(500, 800), "b": torch.ones(3).half(), "epoch": 1}
    with ckptstore.open_store(tmp_path, durable=False) as store:
        store.save(1, state, incremental=True)
        state["b"] += 1
        store.save(2, {**state, "epoch": 2}, incremental="reference")
        store.roll_back(1)
        store.restore(2, pin=False)
    log = reader.read_log(tmp_path / "log")
    assert log[-1]["kind"] == "restore"
    record = log[max(reader.numbers(log[-1]["state"]["live"])) - 1]
    assert reader.numbers(record["change"]["checkpoint"]["bases"]) == [2]
    tensors, values = reader.read_checkpoint(tmp_path, record)
    assert tensors["a"] == ("float32", (500, 800), bits(state["a"]))
    assert tensors["b"] == ("float16", (3,), bits(state["b"]))
    assert values == {"epoch": 2}
    (path, *_) = sorted(tmp_path.glob("checkpoints/*/*.distcp"), key=lambda path: -path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        reader.read_checkpoint(tmp_path, record)
