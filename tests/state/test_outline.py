"""Indexes whose parts each rank keeps: what is read of them, and what comes of damage."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import independent_reader
import pytest
import torch
from meshes import distributed, mesh_for
from saving import bits
from thread_ranks import run_threads
from torch.distributed.tensor import Replicate, Shard

import ckptstore
from ckptstore import CheckpointDamaged, UnsupportedVersion
from ckptstore.checkpoint import files_behind
from ckptstore.format.digest import Digest
from ckptstore.format.manifest import Receipt
from ckptstore.loading.index_read import IndexReader, read_whole
from ckptstore.saving import state_shard
from ckptstore.state.index.outline import INDEX_NAME, Outline, encode_table, part_name
from ckptstore.state.index.part import Tensor
from ckptstore.state.write import outlining
from ckptstore.testing import Call, with_faults
from ckptstore.tools.report.trees import read_tree

WIDE = torch.arange(24.0).reshape(6, 4)
LARGE = torch.arange(6 << 18, dtype=torch.float32).reshape(-1, 64)
"""6 MiB, so that it is dealt to several ranks."""


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlining, "MANY_CHUNKS", -1)


def state_of(rank: int, world_size: int, *, zeros: bool = False) -> dict[str, Any]:
    """Sharded, on replicas, dealt, and each rank's own."""
    line = mesh_for(rank, list(range(world_size)))
    grid = mesh_for(rank, torch.arange(world_size).reshape(2, -1).tolist())
    return {
        "rows": distributed(WIDE, line, [Shard(0)], zeros=zeros),
        "columns": distributed(WIDE.T, line, [Shard(1)], zeros=zeros),
        "hybrid": distributed(LARGE, grid, [Replicate(), Shard(0)], zeros=zeros),
        "large": ckptstore.state.replicated(torch.zeros_like(LARGE) if zeros else LARGE.clone()),
        "generator": torch.full((3,), 0.0 if zeros else float(rank)),
        "position": None if zeros else {"at": rank},
        "step": 0 if zeros else 7,
    }


def save(store: ckptstore.CheckpointStore, rank: int, **options: Any) -> None:
    store.save(1, state_of(rank, 4), **options)


def wrong(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The keys of distributed tensors that are not equal."""
    pairs = [(key, found[key], expected[key]) for key in ("rows", "columns", "hybrid")]
    return [key for key, left, right in pairs if bits(left.to_local()) != bits(right.to_local())]


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A store with a checkpoint of four ranks."""
    uri = str(tmp_path / "store")
    assert run_threads(4, uri, save) == [None] * 4
    return uri


def directory_of(uri: str) -> Path:
    (found,) = (Path(uri) / "checkpoints").iterdir()
    return found


def read_of(uri: str, world_size: int, load: Callable[[ckptstore.CheckpointStore, int], Any]) -> list[Any]:
    """What `load` gives on each rank, with the files of the index that the rank read."""

    def flow(store: ckptstore.CheckpointStore, rank: int) -> Any:
        names: set[str] = set()

        def note(call: Call) -> None:
            name = call.key.rpartition("/")[2]
            if call.phase == "before" and call.verb.startswith("read") and name.startswith("tensors"):
                names.add(name)

        return load(with_faults(store, note), rank), sorted(names)

    return run_threads(world_size, uri, flow)


def test_who_has_what_it_saved_reads_its_own_part_and_the_one_with_the_values(saved: str) -> None:
    def load(store: ckptstore.CheckpointStore, rank: int) -> Any:
        found = state_of(rank, 4, zeros=True)
        store.load(found)
        return wrong(found, state_of(rank, 4)), found["position"], found["step"], found["generator"][0].item()

    for rank, (found, names) in enumerate(read_of(saved, 4, load)):
        assert found == ([], {"at": rank}, 7, float(rank))
        assert set(names) >= {part_name(rank, 1), INDEX_NAME}
    one = [part_name(0, 1), INDEX_NAME]

    def load_one(store: ckptstore.CheckpointStore, rank: int) -> Any:
        mine = {"rows": state_of(rank, 4, zeros=True)["rows"]}
        store.load(mine, include="rows", strict=False)

    for rank, (_, names) in enumerate(read_of(saved, 4, load_one)):
        assert names == sorted({*one, part_name(rank, 1)})


def test_another_layout_reads_the_parts_that_it_needs(saved: str) -> None:
    def load(store: ckptstore.CheckpointStore, rank: int) -> Any:
        found = {"rows": state_of(rank, 2, zeros=True)["rows"]}
        store.load(found, strict=False)
        return bits(found["rows"].to_local()) == bits(state_of(rank, 2)["rows"].to_local())

    # six rows: 2, 2, 2 and none on four ranks, 3 and 3 on two
    needed = [{part_name(0, 1), part_name(1, 1)}, {part_name(0, 1), part_name(1, 1), part_name(2, 1)}]
    told = read_of(saved, 2, load)
    assert [found for found, _ in told] == [True, True]
    assert [set(names) for _, names in told] == [{*names, INDEX_NAME} for names in needed]

    def load_all(store: ckptstore.CheckpointStore, rank: int) -> Any:
        found = state_of(rank, 2, zeros=True)
        store.load(found, per_rank={"generator": "first", "position": "skip"})
        return wrong(found, state_of(rank, 2)), found["position"], found["generator"][0].item()

    assert [found for found, _ in read_of(saved, 2, load_all)] == [([], None, 0.0)] * 2
    (error, _) = run_threads(2, saved, lambda store, rank: store.load(state_of(rank, 2, zeros=True)))
    assert isinstance(error, ckptstore.StateMismatch)
    assert "its own generator, position" in str(error)


def test_whatever_looks_at_tensors_finds_all_of_them(saved: str, tmp_path: Path) -> None:
    with ckptstore.open_store(saved) as store:
        checkpoint = store[1]
        assert checkpoint.verify().ok
        assert {key: item.ranks for key, item in checkpoint.tensors.items()} == {
            "rows": (0, 1, 2),
            "columns": (0, 1, 2),
            "hybrid": (0, 1, 2, 3),
            "large": (0, 1, 2, 3),
            "generator": (0, 1, 2, 3),
        }
        assert checkpoint.per_rank("position") == [{"at": rank} for rank in range(4)]
        assert [one.tolist() for one in checkpoint.per_rank("generator")] == [[float(rank)] * 3 for rank in range(4)]
        tree = read_tree(checkpoint)
        assert dict(zip(tree.keys, tree.shapes, strict=True))["hybrid"] == tuple(LARGE.shape)
    record = independent_reader.read_log(Path(saved) / "log")[-1]
    tensors, values = independent_reader.read_checkpoint(saved, record)
    assert tensors["rows"] == ("float32", (6, 4), bits(WIDE))
    assert tensors["generator", 3][2] == bits(torch.full((3,), 3.0))
    assert values["step"] == 7


def replace_part(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


@pytest.fixture(params=["flipped", "swapped", "missing", "outline"])
def damage(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    def harm(directory: Path) -> None:
        parts = [directory / part_name(rank, 1) for rank in range(4)]
        data = bytearray(parts[2].read_bytes())
        if request.param == "flipped":
            data[len(data) // 2] ^= 1
            replace_part(parts[2], bytes(data))
        elif request.param == "swapped":
            replace_part(parts[2], parts[1].read_bytes())
        elif request.param == "missing":
            parts[2].unlink()
        else:
            outline = directory / INDEX_NAME
            replace_part(outline, outline.read_bytes()[:-1])

    return harm


def test_damage_of_the_index_is_passed_over_by_all_ranks(saved: str, damage: Callable[[Path], None]) -> None:
    first = directory_of(saved)
    assert run_threads(4, saved, lambda store, rank: store.resume() and None) == [None] * 4

    def save_again(store: ckptstore.CheckpointStore, rank: int) -> None:
        store.resume()
        store.save(2, state_of(rank, 4))

    assert run_threads(4, saved, save_again) == [None] * 4
    (second,) = {*(Path(saved) / "checkpoints").iterdir()} - {first}
    damage(second)

    def resume(store: ckptstore.CheckpointStore, rank: int) -> Any:
        found = state_of(rank, 4, zeros=True)
        checkpoint = store.resume(found)
        assert checkpoint is not None
        return checkpoint.step, wrong(found, state_of(rank, 4))

    assert run_threads(4, saved, resume) == [(1, [])] * 4


def texts_of(outline: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    head_bytes, table_bytes = struct.unpack_from("<QQ", outline, 16)
    head, table = outline[32:][:head_bytes], outline[32 + head_bytes :][:table_bytes]
    return json.loads(zlib.decompress(head[8:])), json.loads(zlib.decompress(table[8:]))


def forged(*texts: dict[str, Any]) -> bytes:
    plain = [json.dumps(text).encode() for text in texts]
    deflated = [len(text).to_bytes(8, "little") + zlib.compress(text) for text in plain]
    data = struct.pack("<IQQ", 1, *map(len, deflated)) + b"".join(deflated)
    return b"CKPTTIXO" + Digest.of(data).value.to_bytes(4, "little") + data


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": [["a", "float32", [1 << 40, 1 << 40], 0]]},
        {"tied": {"rows": "columns"}},
        {"layouts": [{"mesh": {"shape": [8], "first": 0, "steps": [1]}, "cuts": [[0, 1]]}]},
    ],
    ids=str,
)
def test_an_outline_that_cannot_be_is_refused(saved: str, change: dict[str, Any]) -> None:
    data = (directory_of(saved) / INDEX_NAME).read_bytes()
    head, table = texts_of(data)
    assert Outline.decode(forged(head, table)).tensors == Outline.decode(data).tensors
    forgery = forged(*({key: change.get(key, value) for key, value in text.items()} for text in (head, table)))
    with pytest.raises(CheckpointDamaged, match="no outline that can be"):
        _ = Outline.decode(forgery).tensors


@pytest.mark.parametrize("change", ["part", "part that is missing", "ranks"])
def test_an_outline_that_does_not_fit_its_manifest_is_damage(saved: str, change: str) -> None:
    path = directory_of(saved) / INDEX_NAME
    head, table = texts_of(path.read_bytes())
    if change.startswith("part"):
        head["parts"][2][0] = 1 << 50
    data = forged(head, table)
    replace_part(path, data)
    with ckptstore.open_store(saved) as store:
        files = files_behind(store[1])
        manifest = files.read_manifest()[0]
        receipts = {**manifest.by_name, INDEX_NAME: Receipt(INDEX_NAME, len(data), Digest.of(data), 0)}
        if change == "part that is missing":
            del receipts[part_name(2, 1)]
        told = replace(
            manifest, files=tuple(receipts.values()), world_size=3 if change == "ranks" else manifest.world_size
        )
        match = "4 ranks, and the manifest of 3" if change == "ranks" else part_name(2, 1)
        for read in (read_whole, lambda files, told: IndexReader.of(told, files.read, files.prefix).opened(rank=2)):
            with pytest.raises(CheckpointDamaged, match=match):
                read(files, told)


@pytest.mark.parametrize(("version", "error"), [(2, UnsupportedVersion), (0, CheckpointDamaged)])
def test_another_version_is_refused(saved: str, version: int, error: type[Exception]) -> None:
    data = bytearray((directory_of(saved) / INDEX_NAME).read_bytes())
    data[12] = version
    with pytest.raises(error, match=f"version {version}"):
        Outline.decode(data)


def test_few_chunks_and_what_stock_reads_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlining, "MANY_CHUNKS", 7)  # three rows, three columns, and the halves of the hybrid

    def names_after(**options: Any) -> set[str]:
        uri = str(tmp_path / str(len(list(tmp_path.iterdir()))))
        assert run_threads(4, uri, lambda store, rank: save(store, rank, **options)) == [None] * 4
        return {path.name for path in directory_of(uri).iterdir()}

    parts = {part_name(rank, 1) for rank in range(4)}
    assert parts <= names_after()
    assert parts.isdisjoint(names_after(stock_readable=True))
    monkeypatch.setattr(outlining, "MANY_CHUNKS", 8)
    assert parts.isdisjoint(names_after())


def test_a_save_refuses_an_outline_that_its_parts_contradict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another(tensors: list[Tensor], *rest: Any) -> bytes:
        return encode_table([tensors[0]._replace(dtype="int32"), *tensors[1:]], *rest)

    monkeypatch.setattr(outlining, "encode_table", another)
    monkeypatch.setattr(outlining, "MANY_CHUNKS", 1 << 20)
    told = run_threads(2, str(tmp_path / "store"), lambda store, rank: store.save(1, {"a": WIDE, "b": WIDE.T}))
    assert ["the outline and rank 0 disagree on the tensor a" in str(error) for error in told] == [True, True]


def test_a_part_that_changes_on_its_way_to_the_leader_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def harmed(data: bytes) -> tuple[dict[str, Any], bytes]:
        head, part = unpacked(data)
        return head, part[:-1] + bytes([part[-1] ^ 1])

    unpacked = state_shard._unpacked
    monkeypatch.setattr(state_shard, "_unpacked", harmed)
    monkeypatch.setattr(outlining, "MANY_CHUNKS", 1 << 20)
    told = run_threads(2, str(tmp_path / "store"), lambda store, rank: store.save(1, {"a": WIDE, "b": rank}))
    assert all(isinstance(error, CheckpointDamaged) and error.rank == 0 for error in told)
    assert "is not the one that its rank has sent" in str(told[0])


def test_only_one_rank_of_each_kind_tells_its_structure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the leader would hear as many as there are ranks. It asks again when something is new, and not before."""
    heard: list[int] = []
    longest: list[int] = []
    decide = state_shard.StateShard.decide

    def noted(shard: Any, descriptions: Any) -> Any:
        shortest = min(map(len, descriptions))
        heard.append(sum(len(description) > shortest for description in descriptions))
        longest.append(max(map(len, descriptions)))
        return decide(shard, descriptions)

    monkeypatch.setattr(state_shard.StateShard, "decide", noted)

    def flow(store: ckptstore.CheckpointStore, rank: int) -> None:
        for step, more in enumerate([{}, {}, {"new": 1}]):
            store.save(step, {**state_of(rank, 4), **more})

    assert run_threads(4, str(tmp_path / "store"), flow) == [None] * 4
    assert heard == [0, 1, 0, 0, 1]
    assert longest[2] < 100 < longest[1]
