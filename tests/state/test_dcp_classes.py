"""`StoreWriter` and `StoreReader` under torch's own `dcp.save` and `dcp.load`: what they refuse, and how ranks
share. What they bring back is in tests/dcp."""

import dataclasses
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked_ranks import run_ranks
from saving import blank, save_plain
from test_stock_interop import VALUES, assert_same, many_tensors
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from ckptstore import (
    Checkpoint,
    CheckpointDamaged,
    CkptstoreError,
    InvalidInput,
    InvalidState,
    RankFailed,
    StorageError,
    open_store,
)
from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.dcp import StoreReader, StoreWriter, translated
from ckptstore.integrations.dcp.target import DirectoryTarget
from ckptstore.stock.stock_pickles import load_metadata
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.testing.faults import FailAt, wrap
from ckptstore.transfer import Transfer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage"),
]
MIB = 1 << 20


def load_ours(path, tensors, **more):
    state = {**blank(tensors), "epoch": 0, "nested": {"lr": 0, "betas": None, "list": None}, "name": "", "none": 1}
    dcp.load(state, storage_reader=StoreReader(path, **more), no_dist=True)
    return state


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / "checkpoint"
    dcp.save({**many_tensors(), **VALUES}, storage_writer=StoreWriter(path), no_dist=True)
    return path


class Failing(DirectoryTarget):
    """A directory whose storage fails at one of several files."""

    def open(self):
        if self._opened is None:
            storage = wrap(LocalStorage(self._given, durable=False), FailAt("open_parts *-01-*.distcp", DISK_ERROR))
            transfer = Transfer(storage, config=TransferConfig(durable=False), retry=RetryConfig(retry_attempts=1))
            self._opened = storage, transfer
        return self._opened


DISK_ERROR = StorageError("the disk is gone")


def test_an_error_of_a_thread_is_never_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptstore.state.write.shard_files.LOCAL_SHARED_FILE_BYTES", MIB)
    state = {f"t{number}": torch.ones(512, 1024) for number in range(20)}
    with pytest.raises(StorageError, match="the disk is gone"), translated():
        dcp.save(state, storage_writer=StoreWriter(Failing(tmp_path / "c")), no_dist=True)
    assert not (tmp_path / "c" / ".metadata").exists()
    dcp.save(state, storage_writer=StoreWriter(tmp_path / "c"), no_dist=True)  # what is left is no hindrance
    assert (tmp_path / "c" / ".metadata").exists()


class Unsafe:
    def __eq__(self, other):
        return isinstance(other, Unsafe)

    __hash__ = None


def test_values_that_are_code_are_refused_unless_both_sides_allow_them(tmp_path):
    made = {"w": torch.ones(2), "odd": Unsafe()}
    with pytest.raises(InvalidState, match=r"odd is a .*Unsafe"), translated():
        dcp.save(made, storage_writer=StoreWriter(tmp_path / "refused"), no_dist=True)
    assert not (tmp_path / "refused").exists()
    dcp.save(made, storage_writer=StoreWriter(tmp_path / "c", allow_pickle=True), no_dist=True)
    state = {"w": torch.zeros(2), "odd": None}
    with pytest.raises(InvalidState, match="odd needs code"), translated():
        dcp.load(state, storage_reader=StoreReader(tmp_path / "c"), no_dist=True)
    dcp.load({"w": torch.zeros(2)}, storage_reader=StoreReader(tmp_path / "c"), no_dist=True)
    for reader in (StoreReader(tmp_path / "c", allow_pickle=True), dcp.FileSystemReader(tmp_path / "c")):
        state = {"w": torch.zeros(2), "odd": None}
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert state["odd"] == Unsafe()


def test_a_key_that_would_come_back_as_another_is_refused(tmp_path):
    for name, item in (("tensor", torch.ones(2)), ("value", 3)):
        state = {"\ud83d\ude00": item}
        with pytest.raises(InvalidState, match="two surrogates"), translated():
            dcp.save(state, storage_writer=StoreWriter(tmp_path / name), no_dist=True)
        with open_store(tmp_path / "store") as store, pytest.raises(InvalidState, match="two surrogates"):
            store.save(1, state)


@pytest.mark.parametrize("key", ["", "\ud83d"])
def test_odd_keys_come_back_beside_states_without_tensors(tmp_path, key):
    for number, item in enumerate([3, torch.ones(2), 4]):
        dcp.save({key: item}, storage_writer=StoreWriter(tmp_path / str(number)), no_dist=True)
        state = {key: torch.zeros(2) if number == 1 else 0}
        dcp.load(state, storage_reader=StoreReader(tmp_path / str(number)), no_dist=True)
        assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(item))


def freed(dtype=torch.float32):
    tensor = torch.ones(1000, dtype=dtype)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("make", [freed, lambda: TwoTensor(freed(), freed())], ids=["plain", "wrapped"])
def test_memory_that_was_given_back_is_not_stored(tmp_path, make):
    with pytest.raises(InvalidState, match=r"memory of t.* has been given back"), translated():
        dcp.save({"t": make()}, storage_writer=StoreWriter(tmp_path / "c"), no_dist=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stock", [False, True])
def test_memory_that_was_given_back_is_not_written_to(tmp_path, stock, dtype):
    writer = dcp.FileSystemWriter(tmp_path / "c") if stock else StoreWriter(tmp_path / "c")
    dcp.save({"t": torch.ones(1000)}, storage_writer=writer, no_dist=True)
    with pytest.raises(InvalidState, match="memory of t has been given back"), translated():
        dcp.load({"t": freed(dtype)}, storage_reader=StoreReader(tmp_path / "c"), no_dist=True)
    with pytest.raises(InvalidState, match="memory of t has been given back"):
        Checkpoint.from_uri(tmp_path / "c").load({"t": freed(dtype)}, dtype="state")


def test_two_saves_into_one_directory_leave_one_checkpoint(tmp_path):
    class Overtaking(StoreWriter):
        def finish(self, metadata, results):
            with pytest.raises(StorageError, match=r"distcp is not there"):
                save_first.finish(*first)
            super().finish(metadata, results)

    class Waiting(StoreWriter):
        def finish(self, metadata, results):
            first[:] = metadata, results

    def save(kind, value):
        writer = kind(tmp_path / "c")
        with translated():
            dcp.save({"w": torch.full((9,), value), "n": value}, storage_writer=writer, no_dist=True)
        return writer

    first = []
    save_first = super(Waiting, save(Waiting, 1.0))
    save(Overtaking, 2.0)
    state = {"w": torch.zeros(9), "n": 0}
    dcp.load(state, storage_reader=StoreReader(tmp_path / "c"), no_dist=True)
    assert (state["w"].tolist(), state["n"]) == ([2.0] * 9, 2.0)
    with pytest.raises(InvalidInput, match="holds a checkpoint already"):
        save(StoreWriter, 3.0)


def test_files_are_never_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptstore.integrations.dcp.store_writer.secrets.token_hex", lambda _: "0a1b2c3d")
    writer = StoreWriter(tmp_path / "c")
    writer.set_up_storage_writer(True, rank=0)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "state-rank=00000-00-0a1b2c3d.distcp").write_bytes(b"somebody's")
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(2)}, None, True)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    with pytest.raises(StorageError, match="is there already, and is not overwritten"):
        writer.write_data(planner.finish_plan(plan), planner)
    assert (tmp_path / "c" / "state-rank=00000-00-0a1b2c3d.distcp").read_bytes() == b"somebody's"


def test_cached_plans_of_another_writer_are_refused(tmp_path):
    class Caching(dcp.DefaultSavePlanner):
        def __init__(self):
            super().__init__(enable_plan_caching=True)

    def save(writer):
        with translated():
            dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=Caching(), no_dist=True)

    save(dcp.FileSystemWriter(tmp_path / "stock"))
    with pytest.raises(InvalidState, match="kept the plan of another writer"):
        save(StoreWriter(tmp_path / "a"))

    class Caching(Caching):  # torch keeps plans by the name of the class
        def __init__(self):
            super().__init__()
            self._cached_plans_key = "another"

    save(StoreWriter(tmp_path / "b"))
    save(StoreWriter(tmp_path / "c"))
    with pytest.raises(InvalidInput, match="split_plain_bytes"):
        save(StoreWriter(tmp_path / "d", split_plain_bytes=None))
    with pytest.raises(RankFailed):  # torch's writer names its files by the plan
        save(dcp.FileSystemWriter(tmp_path / "e"))


class Finishing(dcp.DefaultSavePlanner):
    """Changes the items of its plan last."""

    def __init__(self, change):
        super().__init__()
        self._change = change

    def finish_plan(self, plan):
        self.plan = dataclasses.replace(plan, items=self._change(plan.items))
        return self.plan


def test_a_planner_may_reorder_its_items_in_the_end_and_add_none(tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(20.0).reshape(5, 4)}
    planner = Finishing(lambda items: items[::-1])
    dcp.save({**tensors, "n": 3}, storage_writer=StoreWriter(tmp_path / "c"), planner=planner, no_dist=True)
    state = {**blank(tensors), "n": 0}
    dcp.load(state, storage_reader=StoreReader(tmp_path / "c"), no_dist=True)
    assert_same(state, tensors)
    assert state["n"] == 3
    adding = Finishing(lambda items: [*items, dataclasses.replace(items[0], index=MetadataIndex("a"))])
    with pytest.raises(InvalidState, match="the planner has added a at"), translated():
        dcp.save(tensors, storage_writer=StoreWriter(tmp_path / "d"), planner=adding, no_dist=True)


def test_a_checkpoint_id_comes_back_as_it_was_given(tmp_path):
    for given in (tmp_path / "c", str(tmp_path / "c"), f"file://{tmp_path}/c"):
        assert StoreWriter(given).checkpoint_id == given
        assert StoreReader(given).checkpoint_id == given
    assert StoreReader("s3://user:secret@bucket/c").checkpoint_id == "s3://bucket/c"


def test_properties_of_older_torch_are_read(written):
    old = pickle.loads((written / ".metadata").read_bytes())
    for entry in old.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties = OldProperties(dtype=entry.properties.dtype)
    assert b"sharded_tensor.metadata" in pickle.dumps(old)
    assert load_metadata(pickle.dumps(old)).state_dict_metadata.keys() == old.state_dict_metadata.keys()


def test_damaged_metadata_is_noticed(written, tmp_path):
    shutil.copytree(written, tmp_path / "copy")
    path = tmp_path / "copy" / ".metadata"
    data = path.read_bytes().replace(b"nested", b"nestet")
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="metadata is damaged"):
        StoreReader(tmp_path / "copy").read_metadata()
    shutil.copy(path, tmp_path / "copy" / "__0.metadata")  # where torch looks next
    told_ranks = torch.__version__ >= (2, 10)  # before, DCP looks for no metadata of a rank
    wanted = RankFailed if told_ranks else CheckpointDamaged
    with pytest.raises(wanted, match="metadata is damaged"), translated():
        load_ours(tmp_path / "copy", many_tensors())


def test_without_paths_nothing_is_left_out_silently(tmp_path):
    path = save_plain(tmp_path, {"w": torch.ones(3)}, VALUES, stock_readable=False).uri
    paths = StoreReader(path).read_metadata().planner_data
    for ask in (paths.__getitem__, paths.get):
        with pytest.raises(InvalidState, match="the path of w is not known"):
            ask("w")


def test_writer_and_reader_survive_pickling_while_in_use(written):
    reader = StoreReader(written)
    reader.read_metadata()
    assert pickle.loads(pickle.dumps(reader)).checkpoint_id == reader.checkpoint_id
    writer = StoreWriter(written)
    assert writer.checkpoint_id == written
    assert pickle.loads(pickle.dumps(writer)).checkpoint_id == writer.checkpoint_id


def test_a_store_writer_is_no_stager(written):
    from torch.distributed.checkpoint.staging import AsyncStager

    assert not isinstance(StoreWriter(written), AsyncStager)


def seeded(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ranks_save(root):
    """What two ranks do; each returns what it saw."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    full = {name: seeded(shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}
    state = {
        "plain": full["plain"].clone(),
        "small": full["small"].clone(),
        "sharded": distribute_tensor(full["sharded"], mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(full["columns"], mesh, [Shard(1)], src_data_rank=None),
        "replicated": distribute_tensor(full["replicated"], mesh, [Replicate()], src_data_rank=None),
        "epoch": 3,
    }
    dcp.save(state, storage_writer=StoreWriter(f"{root}/sync"))
    seen = {"written": bytes_of_rank(f"{root}/sync", rank)}
    own, alike = (torch.full((16 * MIB,), value, dtype=torch.uint8) for value in (rank, 7))
    dcp.save({"mine": own}, storage_writer=StoreWriter(f"{root}/split-None", split_plain_bytes=None))
    dcp.save({"mine": alike}, storage_writer=StoreWriter(f"{root}/split-{8 * MIB}"))
    dcp.save({f"n{n}": torch.arange(5 + n + rank) for n in range(3)}, storage_writer=StoreWriter(f"{root}/sizes"))
    with pytest.raises(RankFailed if rank < 0 else InvalidState, match=r"cover.*no_dist=True"), translated():
        dcp.save({"part": state["sharded"]}, storage_writer=StoreWriter(f"{root}/part-{rank}"), no_dist=True)
    whole = {"first": own, "second": own, "two": TwoTensor(own, own)}  # dealt to one rank each, in one piece
    with pytest.raises(RankFailed if rank < 0 else InvalidState) as differs, translated():
        dcp.save(whole, storage_writer=StoreWriter(f"{root}/differs"))
    seen["differs"] = str(differs.value), os.path.exists(f"{root}/differs/.metadata")
    with pytest.raises(RankFailed if rank < 0 else CkptstoreError) as failed, translated():
        dcp.save({**state, "bad": Exploding(rank)}, storage_writer=StoreWriter(f"{root}/failed"), planner=Planner())
    seen["failed"] = str(failed.value), os.path.exists(f"{root}/failed/.metadata")
    dist.destroy_process_group()
    return seen


SHAPES = {
    "plain": (2048, 2048),
    "small": (500, 3),
    "sharded": (1001, 700),
    "columns": (700, 1001),
    "replicated": (1024, 1024),
}


class Exploding:
    """Cannot be turned into bytes on rank 1."""

    def __init__(self, rank):
        self.rank = rank

    def __reduce__(self):
        if self.rank == 1:
            raise ValueError("boom on rank 1")
        return int, ()


class Planner(dcp.DefaultSavePlanner):
    """Gives every plain value to the rank that has it last, so that rank 1 writes some."""

    def __init__(self):
        super().__init__(dedup_save_to_lowest_rank=False)

    def create_local_plan(self):
        plan = super().create_local_plan()
        if self.is_coordinator:
            keep = [item for item in plan.items if item.index.fqn != "bad"]
            plan = type(plan)(keep, plan.storage_data, plan.planner_data)
        return plan


def bytes_of_rank(path, rank):
    names = [name for name in os.listdir(path) if name.startswith(f"state-rank={rank:05d}")]
    return sum(os.path.getsize(os.path.join(path, name)) for name in names)


def test_two_ranks_share_what_both_have(tmp_path):
    seen = run_ranks(2, ranks_save, str(tmp_path), env={"CKPTSTORE_DURABLE": "false"})
    total = sum(one["written"] for one in seen)
    assert all(abs(one["written"] / total - 0.5) < 0.05 for one in seen)
    assert total < 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values()) * 1.01
    assert all("boom on rank 1" in one["failed"][0] and not one["failed"][1] for one in seen)
    full = {name: seeded(shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}
    state = {**blank(full), "epoch": 0}
    dcp.load(state, checkpoint_id=tmp_path / "sync", no_dist=True)
    assert_same(state, full)
    assert state["epoch"] == 3
    for split_plain_bytes, values in ((None, {0, 1}), (8 * MIB, {7})):
        state = {"mine": torch.full((16 * MIB,), 9, dtype=torch.uint8)}
        dcp.load(state, storage_reader=StoreReader(tmp_path / f"split-{split_plain_bytes}"), no_dist=True)
        (value,) = state["mine"].unique().tolist()
        assert value in values
    entries = load_metadata((tmp_path / "sizes" / ".metadata").read_bytes()).state_dict_metadata
    seen_by_one = {key: torch.arange(*entry.size) for key, entry in entries.items()}
    state = blank(seen_by_one)
    dcp.load(state, storage_reader=StoreReader(tmp_path / "sizes"), no_dist=True)
    assert_same(state, seen_by_one)
    for message, is_there in (one["differs"] for one in seen):
        assert all(f"{key} (rank 0 vs rank 1)" in message for key in ("first", "second", "two"))
        assert not is_there


def test_a_load_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises((CkptstoreError, InvalidState)), translated():
        dcp.load({"w": torch.ones(1)}, storage_reader=StoreReader(tmp_path), no_dist=True)
