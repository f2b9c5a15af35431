"""How tensors differ between two checkpoints: what digests say, what has to be read, and by how much."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import ckptstore
from ckptstore import Checkpoint, InvalidInput
from ckptstore.extensions.exchange import comparing
from ckptstore.extensions.exchange.comparing import tensor_differences
from ckptstore.testing import Call, with_faults
from ckptstore.tools.cli import main

LARGE = 400_000  # floats: more than 1 MiB, so a region of its own


def base() -> dict[str, Any]:
    return {
        "large": torch.arange(float(LARGE)),
        "same": torch.ones(LARGE),
        "small": torch.arange(8.0),
        "small_same": torch.ones(3, dtype=torch.bfloat16),
        "gone": torch.zeros(2),
        "reshaped": torch.zeros(4, 2),
        "recast": torch.zeros(4),
        "number": torch.tensor(3),
        "epoch": 1,
    }


def changed() -> dict[str, Any]:
    state = base()
    state["large"][LARGE - 1] += 64.0
    state["small"][3] = -1.0
    state["reshaped"] = torch.zeros(2, 4)
    state["recast"] = torch.zeros(4, dtype=torch.float64)
    state["number"] += 2
    state["new"] = state.pop("gone")
    return {**state, "epoch": 2}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    with ckptstore.open_store(tmp_path / "store", durable=False) as store:
        yield store.save(1, base()), store.save(2, changed())


def told(a: Checkpoint, b: Checkpoint, **options: Any) -> tuple[dict[str, str], int]:
    found, num_equal = tensor_differences(a, b, **options)
    return {item.key: item.change for item in found}, num_equal


EXPECTED = {
    "gone": "removed",
    "large": "changed",
    "new": "added",
    "number": "changed",
    "recast": "dtype",
    "reshaped": "shape",
    "small": "changed",
}


def test_every_kind_of_difference_is_told(pair: tuple[Checkpoint, Checkpoint]) -> None:
    assert told(*pair) == (EXPECTED, 2)
    assert told(pair[0], pair[0]) == ({}, 8)
    found, num_equal = tensor_differences(*pair, values=True)
    assert ({item.key: item.change for item in found}, num_equal) == (EXPECTED, 2)
    assert {item.key: item.largest for item in found if item.change == "changed"} == {
        "large": 64.0,
        "number": 2.0,
        "small": 4.0,
    }
    shapes = {item.key: (item.a and item.a.shape, item.b and item.b.shape) for item in found}
    assert (shapes["reshaped"], shapes["new"]) == (((4, 2), (2, 4)), (None, (2,)))


def test_large_tensors_are_compared_without_being_read(pair: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    read: list[int] = []

    def hook(call: Call) -> None:
        if call.key.endswith(".distcp") and call.phase == "before":
            read.append(call.size_bytes)

    with with_faults(ckptstore.open_store(tmp_path / "store"), hook) as store:
        assert told(store[1], store[2]) == (EXPECTED, 2)
        assert read, "small ones that share a digest with others"
        assert sum(read) < 1 << 20
        read.clear()
        tensor_differences(store[1], store[2], values=True)
        assert sum(read) > 4 * LARGE


def test_values_are_read_in_pieces(pair: tuple[Checkpoint, Checkpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_READ_BYTES", 1 << 16)
    found, _ = tensor_differences(*pair, values=True)
    assert next(item.largest for item in found if item.key == "large") == 64.0


def test_nan_is_equal_to_itself_alone(tmp_path: Path) -> None:
    with ckptstore.open_store(tmp_path / "store", durable=False) as store:
        one = store.save(1, {"a": torch.tensor([math.nan, 1.0]), "b": torch.tensor([math.nan, 1.0])})
        two = store.save(2, {"a": torch.tensor([math.nan, 3.0]), "b": torch.tensor([0.0, 1.0])})
        found, _ = tensor_differences(one, two, values=True)
        a, b = (item.largest for item in found)
    assert a == 2.0
    assert b is not None
    assert math.isnan(b)


def test_what_dcp_wrote_has_no_digests(tmp_path: Path) -> None:
    tensors = {key: value for key, value in base().items() if key != "epoch"}
    dcp.save(tensors, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    tensors["large"] = tensors["large"] + 1
    dcp.save(tensors, checkpoint_id=str(tmp_path / "b"), no_dist=True)
    a, b = (Checkpoint.from_uri(str(tmp_path / name)) for name in "ab")
    assert told(a, b) == ({"large": "unknown", "same": "unknown"}, 6)
    assert told(a, b, values=True) == ({"large": "changed"}, 7)
    with ckptstore.open_store(tmp_path / "store", durable=False) as store:
        assert told(store.save(1, tensors), b, values=True) == ({}, 8)


def test_a_directory_of_files_has_no_tensors(pair: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    with ckptstore.open_store(tmp_path / "other") as store:
        plain = store.save_directory(1, tmp_path / "files")
        with pytest.raises(InvalidInput):
            tensor_differences(pair[0], plain)
        text = CliRunner().invoke(main, ["diff", f"{tmp_path / 'store'}@1", str(tmp_path / "other")]).stdout
        assert "tensors are not compared: b is a directory of files" in text


def test_the_command_tells_the_same(pair: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    targets = [f"{tmp_path / 'store'}@{step}" for step in (1, 2)]
    text = CliRunner().invoke(main, ["diff", *targets, "--values"]).stdout
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert lines["large"] == ["changed", "float32", "400000", "64"]
    assert lines["gone"][:2] == ["removed", "float32"]
    assert "tensors: 1 removed, 3 changed, 1 added, 1 dtype, 1 shape, 2 equal" in text
    found = json.loads(CliRunner().invoke(main, ["diff", *targets, "--json"]).stdout)
    assert {item["key"]: item["change"] for item in found["tensors"]} == EXPECTED
    assert found["num_equal_tensors"] == 2
