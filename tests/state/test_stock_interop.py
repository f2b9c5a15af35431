"""Stock DCP reads what ckptstore writes, and ckptstore what stock DCP writes; hostile metadata is never run."""

import os
import pickle
import shutil
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saving import bits, blank, directory_of, index_of, save_plain
from test_frames import DTYPES, random_tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptstore import Checkpoint, CheckpointDamaged, InvalidName, InvalidState, KeepAll, KeepWeights, open_store
from ckptstore.checkpoint import files_behind
from ckptstore.dcp import StoreReader, StoreWriter
from ckptstore.integrations.dcp.view import add_stock_tensors
from ckptstore.interchange import export
from ckptstore.loading.load_state import open_any
from ckptstore.state.tensors.boxes import Box
from ckptstore.stock import stock_write
from ckptstore.stock.stock_pickle import MetadataPickle
from ckptstore.stock.stock_pickles import load_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage")


def many_tensors():
    torch.manual_seed(4)
    base = torch.randn(700, 900)
    tied = torch.randn(600, 500)
    return {
        **{f"dtype.{dtype}": random_tensor(dtype, (5, 3)) for dtype in DTYPES},
        **{f"large.{dtype}": random_tensor(dtype, (700, 1601)) for dtype in DTYPES[:6] + DTYPES[-3:]},
        "zero_d": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "view": base[13:600],
        "columns": base[:, 5:800],
        "transposed": base.t(),
        "tied.a": tied,
        "tied.b": tied,
    }


VALUES = {"epoch": 3, "nested": {"lr": 0.1, "betas": (0.9, 0.99), "list": [1, 2]}, "name": "x", "none": None}


def assert_same(loaded, tensors):
    for key, tensor in tensors.items():
        assert bits(loaded[key]) == bits(tensor), key


def stock_load(state, path, way):
    if way == "checkpoint_id":
        dcp.load(state, checkpoint_id=path, no_dist=True)
    elif way == "FileSystemReader":
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    else:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        dcp.load(state, storage_reader=FsspecReader(f"file://{path}"), no_dist=True)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return directory_of(save_plain(tmp_path_factory.mktemp("ours"), many_tensors(), VALUES))


@pytest.mark.parametrize("way", ["checkpoint_id", "FileSystemReader", "FsspecReader"])
def test_stock_reads_ours(ours, way):
    tensors = many_tensors()
    state = {**blank(tensors), "epoch": 0, "nested": {"lr": 0, "betas": None, "list": None}, "name": "", "none": 1}
    stock_load(state, ours, way)
    assert_same(state, tensors)
    assert {key: state[key] for key in VALUES} == VALUES


def test_stock_tools_turn_ours_into_one_file(ours, tmp_path):
    dcp_to_torch_save(ours, tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert_same(loaded, many_tensors())
    assert loaded["nested"] == VALUES["nested"]


def test_a_copy_is_read_by_stock_without_ckptstores_own_files(ours, tmp_path):
    shutil.copytree(ours, tmp_path / "copy", ignore=lambda directory, names: [n for n in names if "index" in n])
    state = blank({"zero_d": torch.zeros(())})
    stock_load(state, tmp_path / "copy", "checkpoint_id")
    assert state["zero_d"] == 2.5


def test_without_stock_readable_there_is_nothing_for_stock(tmp_path):
    checkpoint = save_plain(tmp_path, {"w": torch.ones(2)}, {"epoch": 1}, stock_readable=False)
    assert sorted(file.name for file in checkpoint.files) == ["state-rank=00000-00.distcp", "tensors.index"]


@pytest.mark.parametrize("asked", ["auto", True])
def test_metadata_of_very_many_chunks_is_written_on_request_only(tmp_path, monkeypatch, asked):
    monkeypatch.setattr(stock_write, "MAX_CHUNKS", 1)
    checkpoint = save_plain(tmp_path, {"v": torch.zeros(2), "w": torch.ones(2)}, stock_readable=asked)
    assert (".metadata" in {file.name for file in checkpoint.files}) is (asked is True)


def described(tensors, values, paths):
    """The `Metadata` of these tensors and values, from the classes of torch."""
    items, storage = {}, {}
    for key, (dtype, shape, chunks) in tensors.items():
        listed = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in chunks]
        items[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), listed)
        for number, (box, place) in enumerate(chunks):
            storage[MetadataIndex(key, box.offsets, number)] = _StorageInfo(*place)
    for key, place in values.items():
        items[key], storage[MetadataIndex(key)] = BytesStorageMetadata(), _StorageInfo(*place)
    made = Metadata(items, paths, storage)
    made.version = "1.0.0"  # torch 2.8 takes no such argument
    return made


def test_our_pickle_of_metadata_is_that_of_torchs_classes():
    halves = [(Box((3 * number, 0), (3, 4)), (f"half-{number}", 5 * number, 450)) for number in range(2)]
    tensors = {
        "w": (torch.bfloat16, (6, 4), halves),
        "same.shape": (torch.bfloat16, (6, 4), halves[::-1]),
        "far": (torch.float32, (3,), [(Box((0,), (3,)), ("a", (1 << 40) + 3, (3 << 30)))]),
        "edge": (torch.float32, (3,), [(Box((0,), (3,)), ("a", (1 << 31) - 1, 1 << 31))]),
        "scalar": (torch.float8_e4m3fn, (), [(Box((), ()), ("a", 0, 450))]),
        "empty": (torch.bool, (0, 4), []),
        "\u00fc\ud800\n.\0": (torch.complex64, (3,), [(Box((0,), (3,)), ("b/\u00fc", 7, 450))]),
    }
    values = {"list.0.lr": ("a", 9, 11), "list.1.lr": ("a", 9, 11), "epoch": ("a", 1 << 33, 4), "1": ("b", 2, 3)}
    paths = {key: (key,) for key in (*tensors, *values)} | {
        "same.shape": ("same", "shape"), "list.0.lr": ("list", 0, "lr"), "list.1.lr": ("list", 1, "lr"), "1": (1,)
    }  # fmt: skip
    made = MetadataPickle()
    for key, tensor in tensors.items():
        made.add_tensor(key, paths[key], *tensor)
    for key, place in values.items():
        made.add_value(key, paths[key], place)
    expected = described(tensors, values, paths)
    for found in (pickle.loads(made.encode()), load_metadata(made.encode())):
        assert repr(found) == repr(expected)  # types of sizes and numbers of chunks too, which == does not compare
    assert pickle.loads(made.encode()) == expected
    assert repr(pickle.loads(MetadataPickle().encode())) == repr(described({}, {}, {}))


def test_metadata_of_a_save_is_what_a_planner_is_shown(ours):
    index = index_of((ours / "tensors.index").read_bytes())
    metadata = pickle.loads((ours / ".metadata").read_bytes())
    items, storage = {}, {}
    add_stock_tensors(index, items, storage)
    assert {key: repr(metadata.state_dict_metadata[key]) for key in items} == {key: repr(items[key]) for key in items}
    assert {key: metadata.storage_data[key] for key in storage} == storage
    assert metadata.planner_data["nested.lr"] == ("nested", "lr")


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    path = tmp_path_factory.mktemp("stock")
    writer = dcp.FileSystemWriter(path, thread_count=2)
    dcp.save({**many_tensors(), **VALUES}, storage_writer=writer, no_dist=True)
    return path


@pytest.mark.parametrize("whose", ["theirs", "ours"])
def test_we_read_stock(stock, ours, tmp_path, whose):
    path = stock
    if whose == "ours":
        path = tmp_path / "copy"
        shutil.copytree(ours, path, ignore=shutil.ignore_patterns("*index*", "*.json"))
    tensors = many_tensors()
    wide = torch.zeros(700, 1601, 2, dtype=torch.float64)[..., 0]
    state = {
        **blank(tensors),
        "large.torch.float64": wide,
        **dict.fromkeys(VALUES),
        "nested": dict.fromkeys(VALUES["nested"]),
    }
    Checkpoint.from_directory(path).load(state)
    assert_same(state, tensors)
    assert {key: state[key] for key in VALUES} == VALUES
    assert Checkpoint.from_directory(path).to_dict(include="epoch") == {"epoch": 3}


def test_large_contiguous_payloads_are_read_in_place(stock):
    state = open_any(files_behind(Checkpoint.from_directory(stock)))
    opaque, index = set(state._opaque), state.index
    framed = {
        key
        for key in index.tensors
        for chunk in index.chunks(key, 0)
        if (index.files[chunk.file], chunk.offset) in opaque
    }
    assert not any(key.startswith("large") for key in framed)
    assert "transposed" in framed or "columns" in framed
    assert "zero_d" in framed


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def loaded_with(directory, metadata, state):
    """Load from a directory with this metadata."""
    directory.mkdir(exist_ok=True)
    (directory / ".metadata").write_bytes(metadata if type(metadata) is bytes else pickle.dumps(metadata))
    Checkpoint.from_directory(directory).load(state)


HOSTILE = {
    "planner": lambda mark: Metadata({}, Attack(mark), {}),
    "whole": Attack,
    "builtin": lambda mark: b"cbuiltins\nexec\n(V__import__('os').mkdir('" + str(mark).encode() + b"')\ntR.",
    "torch": lambda mark: b"ctorch\nload\n(V" + str(mark).encode() + b"\ntR.",
    "dotted": lambda mark: b"ctorch.distributed.checkpoint.metadata\nos.mkdir\n(V" + str(mark).encode() + b"\ntR.",
    "nothing": lambda mark: b"",
    "junk": lambda mark: b"junk",
    "number": lambda mark: 3,
    "torn": lambda mark: pickle.dumps(Metadata({}))[:-5],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_code_in_metadata_is_refused_and_not_run(tmp_path, kind):
    mark = tmp_path / "run"
    with pytest.raises(CheckpointDamaged, match="Nothing in it was run"):
        loaded_with(tmp_path / "c", HOSTILE[kind](mark), {"w": torch.ones(1)})
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    ["metadata\nMetadata", "metadata\n_MEM_FORMAT_ENCODING", "filesystem\n_StorageInfo"],
    ids=["class", "enum", "place"],
)
def test_metadata_cannot_change_torchs_classes(tmp_path, name):
    module, _, attribute = name.partition("\n")
    code = f"ctorch.distributed.checkpoint.{name}\n".encode() + b"(N(V__reduce__\nVpolluted\ndtb."
    with pytest.raises(CheckpointDamaged):
        loaded_with(tmp_path, code, {"w": torch.ones(1)})
    real = getattr(sys.modules[f"torch.distributed.checkpoint.{module}"], attribute)
    assert real.__reduce__ != "polluted"


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"relative_path": "../../etc/passwd"}, InvalidName),
        ({"relative_path": "/etc/passwd"}, InvalidName),
        ({"relative_path": "absent"}, CheckpointDamaged),
        ({"offset": -1}, CheckpointDamaged),
        ({"length": 1 << 50}, CheckpointDamaged),
        ({"transform_descriptors": ["stream.zstd"]}, InvalidState),
    ],
    ids=lambda value: str(value)[:30],
)
def test_metadata_that_lies_about_places_is_refused(tmp_path, changed, error):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    ((index, info),) = metadata.storage_data.items()
    metadata.storage_data[index] = _StorageInfo(**{**vars(info), **changed})
    with pytest.raises(error):
        loaded_with(tmp_path, metadata, {"w": torch.zeros(2)})


def test_a_frame_that_is_no_tensor_is_damage(tmp_path):
    (tmp_path / "f").write_bytes(bytes(300))
    metadata = Metadata({"v": BytesStorageMetadata()}, None, {MetadataIndex("v"): _StorageInfo("f", 0, 300)})
    with pytest.raises(InvalidState, match="v cannot be read"):
        loaded_with(tmp_path, metadata, {"v": None})


def like_torchtitans(value):
    """A state dict whose weights are all below one child, and an optimizer's that torch has flattened."""
    optimizer = {"state.model.w.exp_avg": torch.full((3,), value), "param_groups.model.w.lr": value}
    return {"model.w": torch.full((3,), value), "optimizer": optimizer, "more": torch.full((300_000,), value)}


@pytest.mark.parametrize("way", ["writer", "store", "without", "export", "thin"])
def test_a_flattened_optimizer_keeps_its_keys(tmp_path, way):
    path = tmp_path / "c"
    if way == "writer":
        dcp.save(like_torchtitans(5.0), storage_writer=StoreWriter(path), no_dist=True)
    else:
        policy = KeepAll() | KeepWeights(KeepAll(), drop="more")
        with open_store(tmp_path / "store", retention=policy, durable=False) as store:
            for step in (1, 2):
                checkpoint = store.save(step, like_torchtitans(5.0), stock_readable=way != "without")
            if way == "thin":
                store.thin(1, "more")
            path = path if way == "export" else store[1].uri
        if way == "export":
            export(checkpoint, path, to="dcp", include=["model.w", "optimizer*"])
    readers = [StoreReader(path)] if way != "export" else []
    for reader in readers + [dcp.FileSystemReader(path)] * (way != "without"):
        for planner in (dcp.DefaultLoadPlanner(), dcp.DefaultLoadPlanner(allow_partial_load=True)):
            state = like_torchtitans(0.0)
            del state["more"]
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
            assert state["model.w"].tolist() == [5.0] * 3
            assert state["optimizer"]["state.model.w.exp_avg"].tolist() == [5.0] * 3
            assert state["optimizer"]["param_groups.model.w.lr"] == 5.0


@pytest.mark.long
def test_one_tensor_above_4_gib_goes_both_ways(tmp_path):
    size_bytes = (4 << 30) + 12_345
    tensor = torch.zeros(size_bytes, dtype=torch.uint8)  # memory that is never touched costs nothing
    tensor[-1], tensor[1 << 30], tensor[(3 << 30) + 5] = 9, 8, 7
    directory = directory_of(save_plain(tmp_path, {"huge": tensor}))
    marks = {number: int(tensor[number]) for number in (0, 1 << 30, (3 << 30) + 5, size_bytes - 1)}
    del tensor
    state = {"huge": torch.ones(size_bytes, dtype=torch.uint8)}
    stock_load(state, directory, "checkpoint_id")
    assert {number: int(state["huge"][number]) for number in marks} == marks
    assert int(state["huge"].count_nonzero()) == 3
    shutil.rmtree(directory)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock", sync_files=False), no_dist=True)
    state["huge"].fill_(1)
    Checkpoint.from_directory(tmp_path / "stock").load(state)
    assert {number: int(state["huge"][number]) for number in marks} == marks
    assert int(state["huge"].count_nonzero()) == 3
    shutil.rmtree(tmp_path / "stock")
