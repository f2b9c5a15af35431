"""Large plain values are packed: exact, the same bytes for equal values, and nothing that hostile bytes can do."""

from __future__ import annotations

import json
import math
import random
import struct
import tracemalloc
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import independent_reader as reader
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from meshes import new_uri
from saving import directory_of, save_plain
from test_values import same, through
from thread_ranks import run_threads

import ckptstore
from ckptstore import CheckpointDamaged, InvalidState
from ckptstore.interchange import export
from ckptstore.state.index.packed_values import MAX_LEVELS, pack, plain_size, unpack
from ckptstore.state.live import values
from ckptstore.state.live.values import Decoder, Encoder
from ckptstore.stock import stock_write

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(["a", "\ud800", "\udc00", "\U0001f600", "", b"", -0.0, 1 << 63, -(1 << 63), (1 << 63) - 1])
)
KEYS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
PLAIN = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=5)
        | st.lists(inner, min_size=1, max_size=2).map(lambda items: items * 3)
    ),
    max_leaves=30,
)
CONTAINERS = PLAIN.map(lambda value: value if type(value) in (list, tuple, dict) else [value])

LARGE: dict[str, Any] = {
    "seen": {n: n * 3 for n in range(2000)},
    "pairs": [(n, str(n)) for n in range(2000)],
    "log": [{"step": n, "loss": n / 7, "name": None if n % 3 else "x"} for n in range(700)],
    "mixed": {"more": {f"k{n}": [n, -0.0, True, b"x", 1 << 80, {}] for n in range(400)}, "tensor": torch.arange(3)},
    "counted": Counter({n: n % 5 for n in range(1500)}),
    "ordered": OrderedDict((str(n), (n,)) for n in range(1500)),
    "default": defaultdict(int, dict.fromkeys(range(1500), 1)),
    "ids": {n * 7 for n in range(1500)},
    "names": frozenset(f"n{n}" for n in range(1500)),
}


def blank() -> dict[str, Any]:
    return {**dict.fromkeys(LARGE), "mixed": {"tensor": torch.zeros(3, dtype=torch.int64)}}


def packed(value: Any) -> tuple[Any, bytes]:
    found = pack(value)
    assert found is not None
    levels, data = found
    return json.loads(json.dumps(levels)), bytes(data)


@given(CONTAINERS)
def test_any_plain_value_comes_back_with_its_types_and_order(value: Any) -> None:
    levels, data = packed(value)
    assert same(unpack(levels, data), value)
    assert same(reader.unpacked(levels, data), value)
    assert plain_size(value) == sum(column[1] for level in levels for column in level) - 1
    assert len(data) >= plain_size(value)  # so memory grows with the bytes alone


def test_bits_of_a_nan_are_kept() -> None:
    odd = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8000000000001, 0xFFF8DEADBEEF0000)]
    back = unpack(*packed([odd, "x"]))
    assert [struct.pack("<d", number) for number in back[0]] == [struct.pack("<d", number) for number in odd]


@given(CONTAINERS, st.randoms(use_true_random=False))
def test_equal_values_have_equal_bytes_whatever_they_share(value: Any, chance: random.Random) -> None:
    assert packed(value) == packed(unpack(*packed(value)))
    shared = [value, value, [value]]
    assert packed(shared) == packed(unpack(*packed(shared)))


def test_what_is_not_plain_is_not_packed() -> None:
    class Number(int):
        pass

    deep: Any = []
    for _ in range(MAX_LEVELS):
        deep = [deep]
    loop: list[Any] = []
    loop.append(loop)
    for value in (deep, loop, [[1j]], {"a": {1}}, [OrderedDict()], [Number()], [torch.ones(1)], {Number(): 1}, {1}, 3):
        assert plain_size(value) is None
        if type(value) in (list, dict):
            assert pack(value) is None
    assert same(through([*range(1500), "x", OrderedDict(a=1)]), [*range(1500), "x", OrderedDict(a=1)])
    with pytest.raises(InvalidState, match="refers to itself"):
        through([*map(str, range(2000)), loop])


@pytest.mark.parametrize("key", LARGE)
def test_large_values_are_packed_and_come_back(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    monkeypatch.setattr(values, "pack", lambda value: counted.append(pack(value)) or counted[-1])
    assert same(through(LARGE[key]), LARGE[key])
    assert key == "ids" or any(found is not None for found in counted)


def test_large_sets_have_one_encoding_whatever_the_order_of_insertion() -> None:
    for kind in (int, str, lambda n: (n, str(n)), lambda n: (n % 2, n, "x"), lambda n: (n, None)):
        members = [kind(n) for n in range(2000)]
        random.Random(1).shuffle(members)
        kept: list[bytes] = []
        left, right = [
            json.dumps(Encoder(lambda array, kept=kept: kept.append(array.tobytes()) or "k").encode(value, path="x"))
            for value in ({kind(n) for n in range(2000)}, set(members))
        ]
        assert left == right
        assert len(set(kept)) <= 1


def decode(levels: Any, data: bytes) -> Any:
    return Decoder(lambda key: np.frombuffer(data, np.uint8)).decode(
        {"$t": "packed", "v": [levels, {"$t": "tensor", "v": "k"}]}, path="x"
    )


@given(CONTAINERS, st.data())
def test_changed_bytes_and_layouts_are_another_value_or_damage(value: Any, drawn: st.DataObject) -> None:
    levels, data = packed(value)
    if drawn.draw(st.booleans()):
        at = drawn.draw(st.integers(0, len(data)))
        data = data[:at] + drawn.draw(st.binary(max_size=3)) + data[at + drawn.draw(st.integers(0, 3)) :]
    else:
        level = drawn.draw(st.sampled_from(levels))
        column = drawn.draw(st.sampled_from(level))
        at = drawn.draw(st.integers(0, len(column) - 1))
        column[at] = drawn.draw(
            st.integers(-2, 9) | st.sampled_from(["int", "dict", "none", "list", None, True, 1 << 62, 1 << 200, [], {}])
        )
    try:
        found = decode(levels, data)
    except CheckpointDamaged:
        return
    assert plain_size([found]) is not None


@pytest.mark.parametrize(
    ("levels", "data"),
    [
        ([], b""),
        ([[]], b""),
        ([[["list", 1, 1]]], b"\x01"),
        ([[["list", 1, 1]], [["none", 1]]], b"\x02\x00"),
        ([[["list", 1, 8]], [["none", (1 << 63) - 1]]], b"\xff" * 7 + b"\x7f"),
        ([[["list", 1, 8]], [["int", 1 << 60, 8]]], (1 << 60).to_bytes(8, "little")),
        ([[["list", 1, 8]], [["str", 1 << 60, 1 << 60, 0, 1, 1 << 60]]], (1 << 60).to_bytes(8, "little")),
        ([[["list", 1, 1]], [["str", 1, 1, 0, 1, 1 << 60]]], b"\x01\x01a"),
        ([[["list", 1, 1]], [["str", 2, 1, 1, 1, 1]]], b"\x02\x00\x01\x01a"),
        ([[["list", 1, 1]], [["str", 1, 1, 0, 1, 1]]], b"\x01\x01\xff"),
        ([[["list", 1, 1]], [["int", 1, 0, 1, 0, 1, 4]]], b"\x01\x04eval"),
        ([[["list", 1, 1]], [["bool", 1]]], b"\x01\x02"),
        ([[["dict", 1, 1]], [["int", 4, 1]]], b"\x02\x01\x01\x01\x01"),
        ([[["dict", 1, 1]], [["int", 1, 1], ["list", 1, 1]]], b"\x01\x01\x00\x05\x00"),
        ([[["int", 1, 1], ["list", 0, 1]]], b"\x00\x01"),
        ([[["list", 1, 1]], [["list", 1, 1]]], b"\x01\x00\x07"),
        ([[["list", 1, 1]], [["list", 1, 1], ["list", 1, 1]]], b"\x02\x00\x01\x00\x00"),
        ([[["list", 1, 1]], [["str", 1, 1, 0, 1, 1], ["int", 1, 1]]], b"\x02\x00\x01\x01a\x01"),
        ([[["list", 1, 1]], [["int", 1, 1], ["str", 1, 1, 0, 1, 1]]], b"\x02\x00\x00\x01\x01a"),
        ([[["list", 1, 1]]] * (MAX_LEVELS + 1), b"\x01" * MAX_LEVELS + b"\x00"),
        ([[["object", 1]]], b""),
        ([[["int", True, 1]]], b"\x01"),
        ({"list": 1}, b""),
        (None, b""),
    ],
)
def test_hostile_bytes_are_damage_and_take_no_memory(levels: Any, data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointDamaged):
            decode(levels, data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("incremental", [False, True, "reference"])
def test_a_store_gives_them_back(tmp_path: Path, incremental: Any) -> None:
    with ckptstore.open_store(tmp_path / "store", durable=False) as store:
        for step in range(2):
            store.save(step, {**LARGE, "step": step}, incremental=incremental)
        state = {**blank(), "step": -1}
        store.load(state)
        tensor = state["mixed"].pop("tensor")
        assert torch.equal(tensor, torch.arange(3))
        expected = {**LARGE, "mixed": {"more": LARGE["mixed"]["more"]}, "step": 1}
        assert same(state, expected)
        assert same(store.latest().per_rank("log"), [LARGE["log"]])
        assert store.latest().verify().ok


@pytest.mark.parametrize("stock_readable", ["auto", False])
def test_exports_have_them(tmp_path: Path, stock_readable: Any) -> None:
    expected = {"seen": LARGE["seen"], "pairs": LARGE["pairs"], "log": LARGE["log"]}
    with ckptstore.open_store(tmp_path / "store", durable=False) as store:
        saved = store.save(1, {**expected, "w": torch.ones(2)}, stock_readable=stock_readable)
        export(saved, tmp_path / "torch", to="torch")
        export(saved, tmp_path / "dcp", to="dcp")
    found = torch.load(tmp_path / "torch" / "state.pt", weights_only=True)
    assert same({key: found[key] for key in expected}, expected)
    state = {"seen": dict.fromkeys(map(str, LARGE["seen"])), "pairs": None, "w": torch.zeros(2)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(state["seen"], {str(key): item for key, item in LARGE["seen"].items()})
    assert same(state["pairs"], LARGE["pairs"])


@pytest.mark.parametrize("asked", ["auto", True])
def test_very_many_values_are_for_stock_readers_on_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: Any
) -> None:
    monkeypatch.setattr(stock_write, "MAX_NESTED_VALUES", 10)
    few = {"epoch": 1, "few": {str(n): n for n in range(5)}, "pairs": [(n, n) for n in range(2000)]}
    for number, plain in enumerate((few, {f"lr.{n}": n for n in range(100)})):
        checkpoint = save_plain(tmp_path / str(number), {}, plain, stock_readable=asked)
        assert (directory_of(checkpoint) / ".metadata").exists()
    assert not caplog.records
    with ckptstore.open_store(tmp_path / "many", durable=False) as store:
        for step in range(2):
            many = Path(store.save(step, {"many": [{"a": n} for n in range(11)]}, stock_readable=asked).uri)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == (
        [] if asked is True else ["torch's own DCP cannot read these checkpoints"]
    )
    assert (many / ".metadata").exists() is (asked is True)
    assert any(b"PK\5\6" in path.read_bytes() for path in many.iterdir()) is (asked is True)


def test_stock_reads_values_of_every_length(tmp_path: Path) -> None:
    plain = {
        "pairs": [(n, str(n)) for n in range(3000)],
        "text": "\u00fc" * 9000,
        "odd": (math.inf, 1 << 80, b"\xff", None, True, -0.0, {"a": [1j]}),
        "nested": {"a": [1, 2], "b": {}},
        "of torch": (torch.ones(2), torch.float32, {1, 2}),
        "text of torch": "ctorch\n",
    }
    state: dict[str, Any] = {**dict.fromkeys(plain), "nested": {"a": None}}
    dcp.load(state, checkpoint_id=directory_of(save_plain(tmp_path, {}, plain)), no_dist=True)
    assert same(state, {**plain, "nested": {"a": [1, 2]}})


def test_ranks_store_equal_values_once_and_their_own_each() -> None:
    def flow(store: ckptstore.CheckpointStore, rank: int) -> list[bool]:
        members = range(1500) if rank == 0 else reversed(range(1500))
        state: dict[str, Any] = {
            "equal": {n: (n, str(n)) for n in range(3000)},
            "set": {f"n{n}" for n in members},
            "own": {n: n + rank for n in range(3000)},
            **({"more": {n: n for n in range(20_000)}} if rank else {}),
        }
        saved, found = store.save(1, state), dict.fromkeys(state)
        store.load(found)
        own = saved.per_rank("own")
        return [
            same(found, state),
            len(saved.per_rank("equal")) == len(saved.per_rank("set")) == 1,
            same(own, [{n: n + each for n in range(3000)} for each in range(2)]),
            ".metadata" not in {file.name for file in saved.files},  # which would have only a part of the values
        ]

    assert run_threads(2, new_uri(), flow) == [[True] * 4] * 2
