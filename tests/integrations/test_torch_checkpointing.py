"""torch_checkpointing through a store: its verbs and its table of renames, damage, rivals, deaths, and its managers."""

from __future__ import annotations

import array
import io
import pickle
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import forked_ranks
import numpy as np
import pytest
import torch
import torch_checkpointing_worker as worker
from torch_checkpointing.storage.base_storage import ReadArgs

import ckptstore
from ckptstore.errors import AccessDenied, CheckpointDamaged, InvalidInput, InvalidMetric, StorageError, StoreFenced
from ckptstore.integrations.torch_checkpointing import StoreStorageConfig
from ckptstore.retention import KeepBest, KeepLatest
from ckptstore.testing import CountCalls, FailAt, RanksFailed
from ckptstore.testing.s3_server import Fault, S3Server, s3_server

pytestmark = pytest.mark.slow

run_ranks = partial(forked_ranks.run_ranks, modules=(*forked_ranks.TORCH, "torch_checkpointing"))
BLOCK_BYTES = 1 << 20


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server(buckets=["bucket"]) as server:
        yield server


@pytest.fixture(params=["disk", "s3"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreStorageConfig:
    """Of an empty store."""
    if request.param == "disk":
        return StoreStorageConfig(str(tmp_path / "store"))
    server: S3Server = request.getfixturevalue("s3")
    return StoreStorageConfig(f"s3://bucket/{tmp_path.name}", storage_options=server.storage_options)


def another_job(config: StoreStorageConfig, **changes: Any) -> StoreStorageConfig:
    """The same place, as a job that started since sees it."""
    from ckptstore.integrations.torch_checkpointing import storage_config

    storage_config._alone.clear()
    return type(config)(**{"uri": config.uri, "storage_options": config.storage_options, **changes})


def commit(storage: Any, step: int, data: bytes = b"weights") -> None:
    storage.mkdir(Path(f"tmp_step_{step}"))
    storage.write(Path(f"tmp_step_{step}/model.pt"), data)
    storage.rename(Path(f"tmp_step_{step}"), Path(f"step_{step}"), is_directory=True)


def test_a_damaged_manifest_hides_no_other_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = StoreStorageConfig(str(tmp_path / "store"))
    for step in (1, 2, 3):
        commit(config.create_storage(), step)
    (manifest,) = (tmp_path / "store/checkpoints").glob("step-*2-e*/ckptstore.json")
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes()[:-9])
    storage = another_job(config).create_storage()
    assert storage.ls(Path()) == ["step_1", "step_3"]
    assert "left out of the listing" in caplog.text
    with pytest.raises(CheckpointDamaged):
        storage.read(Path("step_2/model.pt"))


def test_the_verbs_of_a_temporary_directory_and_of_what_it_becomes(config: StoreStorageConfig) -> None:
    storage, draft = config.create_storage(), Path("tmp_step_1")
    assert storage.exists(Path())
    assert storage.ls(Path()) == []
    assert not storage.exists(draft)
    storage.mkdir(draft / "a" / "b")
    other_rank = pickle.loads(pickle.dumps(config)).create_storage()
    parts = [b"bytes ", bytearray(b"array "), np.arange(5, dtype=np.int32), torch.arange(5).numpy()]
    parts.append(array.array("i", [100, 200]))
    expected = b"".join(bytes(memoryview(part).cast("B")) for part in parts)
    storage.write(draft / "a" / "whole", expected)
    with other_rank.stream_write(draft / "a" / "b" / "streamed") as stream:
        for part in parts:
            stream.write(part)
        assert not storage.exists(draft / "a" / "b" / "streamed")  # nothing is there in part
    for seen_by in (storage, other_rank):
        assert seen_by.exists(draft)
        assert seen_by.isdir(draft / "a" / "b")
        assert not seen_by.isdir(draft / "a" / "whole")
        assert seen_by.ls(draft) == ["a"]
        assert seen_by.ls(draft / "a") == ["b", "whole"]
        assert seen_by.read(draft / "a" / "b" / "streamed") == expected
        assert seen_by.getsize(draft / "a" / "whole") == len(expected)
    assert not another_job(config).create_storage().exists(draft)  # nobody else sees it
    storage.delete(draft / "a" / "whole")
    storage.mkdir(draft / "left empty")
    assert storage.ls(draft / "a") == ["b"]
    assert storage.ls(Path()) == []
    storage.mkdir(Path("tmp_step_2/a"))
    storage.write(Path("tmp_step_2/a/model.pt"), b"x")
    storage.rmdir(Path("tmp_step_2"))
    assert not storage.exists(Path("tmp_step_2"))
    with ckptstore.open_store(config.uri, storage_options=config.storage_options) as store:
        assert not [name for name in store.collect_garbage(dry_run=True).attempts if "0000000002" in name]

    storage.rename(draft, Path("step_1"), is_directory=True)
    for seen_by in (storage, other_rank, another_job(config).create_storage()):
        assert seen_by.ls(Path()) == ["step_1"]
        assert seen_by.glob("step_*") == ["step_1"]
        assert seen_by.ls(Path("step_1")) == ["a", "left empty"]
        assert seen_by.isdir(Path("step_1/left empty"))
        assert seen_by.read(Path("step_1/a/b/streamed")) == expected
        assert not seen_by.exists(draft)
        assert not seen_by.exists(Path("step_1/a/whole"))
        assert seen_by.remap_path(Path("step_1/a/b/streamed")).endswith("/a/b/streamed")
    with pytest.raises(FileNotFoundError):
        storage.read(Path("step_1/a/whole"))
    for call in (storage.delete, storage.rmdir):
        with pytest.raises(PermissionError):  # checkpoints are immutable, and the latest one stays
            call(Path("step_1/a/b/streamed") if call == storage.delete else Path("step_1"))


def test_the_table_of_renames(config: StoreStorageConfig) -> None:
    storage = config.create_storage()
    with pytest.raises(FileNotFoundError):
        storage.rename(Path("tmp_step_1"), Path("step_1"), is_directory=True)  # nobody wrote anything
    commit(storage, 1, b"first")
    storage.rename(Path("tmp_step_1"), Path("step_1"), is_directory=True)  # its answer had been lost
    with pytest.raises(FileExistsError, match="Step 1 is committed"):
        storage.mkdir(Path("tmp_step_1"))
    with pytest.raises(FileExistsError, match="Step 1 is committed"):
        storage.mkdir(Path("tmp_another_1"))  # a store has one checkpoint of a step
    storage.mkdir(Path("tmp_step_2"))
    storage.write(Path("tmp_step_2/model.pt"), b"second")
    rival = another_job(config).create_storage()
    for source, target in (("tmp_step_2/model.pt", "tmp_step_2/other.pt"), ("tmp_step_2", "step_3")):
        with pytest.raises(io.UnsupportedOperation):
            storage.rename(Path(source), Path(target))
    commit(rival, 2, b"rival")
    with pytest.raises(StoreFenced):  # a zombie
        storage.rename(Path("tmp_step_2"), Path("step_2"), is_directory=True)
    with pytest.raises(StoreFenced):
        storage.write(Path("tmp_step_3/model.pt"), b"third")
    assert [rival.read(Path(f"step_{step}/model.pt")) for step in (1, 2)] == [b"first", b"rival"]


def test_a_populated_target_is_refused_when_it_appears_late(tmp_path: Path) -> None:
    config = StoreStorageConfig(str(tmp_path))
    one, two = config.create_storage(), config.create_storage()
    for storage in (one, two):
        storage.mkdir(Path("tmp_a_1" if storage is one else "tmp_b_1"))
    one.rename(Path("tmp_a_1"), Path("a_1"), is_directory=True)
    with pytest.raises(FileExistsError):
        two.rename(Path("tmp_b_1"), Path("b_1"), is_directory=True)
    assert two.ls(Path()) == ["a_1"]
    assert two.ls(Path("a_1")) == []


def test_a_step_that_was_removed_can_be_saved_again(config: StoreStorageConfig) -> None:
    storage = config.create_storage()
    for step in (1, 2):
        commit(storage, step, b"old")
    storage.rmdir(Path("step_1"))
    assert storage.ls(Path()) == ["step_2"]
    assert not storage.exists(Path("step_1"))
    other_rank = pickle.loads(pickle.dumps(config)).create_storage()
    other_rank.mkdir(Path("tmp_step_1"))
    other_rank.write(Path("tmp_step_1/model.pt"), b"of another rank")
    commit_file = Path("tmp_step_1/more.pt")
    storage.mkdir(commit_file.parent)
    storage.write(commit_file, b"new")
    storage.rename(commit_file.parent, Path("step_1"), is_directory=True)
    assert storage.read(Path("step_1/model.pt")) == b"of another rank"
    with ckptstore.open_store(config.uri, storage_options=config.storage_options) as store:
        assert [item.step for item in store] == [2, 1]
        assert all(item.verify().ok for item in store)


def test_a_save_that_failed_at_its_commit_is_made_again_in_the_same_job(tmp_path: Path) -> None:
    fault = FailAt("create log/*", AccessDenied("not now"), skip=1)  # the first record is the claim
    storage = worker.FaultyConfig(str(tmp_path), hook=fault).create_storage()
    with pytest.raises(AccessDenied):
        commit(storage, 1, b"first try")
    assert not storage.exists(Path("step_1"))
    assert not storage.exists(Path("tmp_step_1"))
    storage.mkdir(Path("tmp_step_1/of another file"))
    storage.write(Path("tmp_step_1/metadata.pkl"), b"second try")
    storage.rename(Path("tmp_step_1"), Path("step_1"), is_directory=True)
    assert storage.ls(Path("step_1")) == ["metadata.pkl", "of another file"]


def test_an_unfinished_draft_is_begun_anew_by_the_next_job(tmp_path: Path) -> None:
    config = StoreStorageConfig(str(tmp_path))
    dead = config.create_storage()
    dead.mkdir(Path("tmp_step_1"))
    dead.write(Path("tmp_step_1/model_7.pt"), b"of a rank that is no more")
    storage = another_job(config).create_storage()
    commit(storage, 1)
    assert storage.ls(Path("step_1")) == ["model.pt"]
    store = ckptstore.open_store(str(tmp_path))
    assert len(store.collect_garbage().attempts) == 1
    assert [item.verify().ok for item in store] == [True]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("s3://bucket/tmp_step_1/f", "is a URI"),
        ("/ckpt/tmp_step_1/f", "absolute"),
        ("tmp_../step_1/f", "no step"),
        ("tmp_step_1/../f", "'..'"),
        ("tmp_last/f", "no step"),
        ("tmp_step_99999999999/f", "from 0 to"),
        ("step_1/f", "temporary directory"),
        ("tmp_step_1/ckptstore.json", "reserved"),
        ("tmp_step_1/.ckptstore-blocks.json", "reserved"),
        ("tmp_step_1/a\nb", "control"),
        ("tmp_step_1.5/f", "ends in a number that is no step"),
        ("tmp_step_1e5/f", "ends in a number that is no step"),
        ("tmp_step_100000.0/f", "ends in a number that is no step"),
    ],
)
def test_a_path_that_can_be_no_checkpoint_is_refused_before_anything_is_written(
    path: str, said: str, tmp_path: Path
) -> None:
    storage = StoreStorageConfig(str(tmp_path)).create_storage()
    for call in (storage.mkdir, storage.stream_write, lambda path: storage.write(path, b"x")):
        with pytest.raises(InvalidInput, match=said):
            call(Path(path))
    assert list(tmp_path.iterdir()) == []


def test_paths_below_a_mount_and_those_without_a_directory(tmp_path: Path) -> None:
    storage = StoreStorageConfig(str(tmp_path), mount="/ckpt/run").create_storage()
    storage.mkdir(Path("/ckpt/run/tmp_step_1"))
    for path in (Path("/ckpt/run/tmp_step_1/none/f"), Path("/ckpt/run/tmp_step_2/f")):
        with pytest.raises(FileNotFoundError, match="make it first"):
            storage.write(path, b"x")
    with pytest.raises(FileNotFoundError):
        storage.mkdir(Path("/ckpt/run/tmp_step_1/none/below"), recursive=False)
    storage.rename(Path("/ckpt/run/tmp_step_1"), Path("/ckpt/run/step_1"), is_directory=True)
    assert storage.glob("/ckpt/run/step_*") == ["/ckpt/run/step_1"]
    with pytest.raises(InvalidInput, match="not below mount"):
        storage.exists(Path("/ckpt/other/step_1"))


def test_a_stream_that_fails_or_is_forgotten_writes_nothing(tmp_path: Path) -> None:
    storage = StoreStorageConfig(str(tmp_path)).create_storage()
    storage.mkdir(Path("tmp_step_1"))
    with pytest.raises(TypeError), storage.stream_write(Path("tmp_step_1/f")) as stream:
        stream.write(b"half") and stream.write("text")
    storage.stream_write(Path("tmp_step_1/f")).write(b"half")
    assert storage.ls(Path("tmp_step_1")) == []


def test_what_the_configuration_refuses(tmp_path: Path) -> None:
    with pytest.raises(InvalidMetric, match="loss"):
        StoreStorageConfig(str(tmp_path), retention=KeepBest(1, "loss"))
    with pytest.raises(InvalidInput, match="temp_dir_prefix"):
        StoreStorageConfig(str(tmp_path), temp_dir_prefix="")
    with pytest.raises(InvalidInput, match="memory of this process"):
        pickle.dumps(StoreStorageConfig("memory://run"))
    secret = StoreStorageConfig(str(tmp_path), storage_options={"key": "hunter2"})
    assert "hunter2" not in repr(secret)


def test_retention_and_removal(tmp_path: Path) -> None:
    config = StoreStorageConfig(str(tmp_path), retention=KeepLatest(2))
    storage = config.create_storage()
    for step in range(1, 5):
        commit(storage, step)
    assert storage.ls(Path()) == ["step_3", "step_4"]
    later = another_job(config, retention=KeepLatest(2)).create_storage()
    commit(later, 5)
    commit(later, 6)
    assert later.ls(Path()) == ["step_4", "step_5", "step_6"]  # it may have to go back to what it began after
    with pytest.raises(PermissionError, match="resumed from"):
        later.rmdir(Path("step_4"))
    with pytest.raises(FileNotFoundError):
        later.rmdir(Path("step_1"))


def test_any_range_is_read_and_checked(config: StoreStorageConfig) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 * BLOCK_BYTES + 12345, dtype=np.uint8).tobytes()
    storage = config.create_storage()
    commit(storage, 1, data)
    path, lazy = Path("step_1/model.pt"), ReadArgs(pre_read_full_file=False)
    random = np.random.default_rng(2)
    with storage.stream_read(path, lazy) as stream:
        for _ in range(30):
            start, count = int(random.integers(0, len(data))), int(random.integers(1, 2 * BLOCK_BYTES))
            assert stream.seek(start) == start
            buffer = bytearray(count)
            done = stream.readinto(buffer)
            assert bytes(buffer[:done]) == data[start : start + count]
        assert stream.seek(0, io.SEEK_END) == len(data)
        assert stream.read(1) == b""
        stream.seek(0)
        assert stream.read() == data
    with pytest.raises(StorageError, match="expected"):
        storage.stream_read(path, ReadArgs(known_size_bytes=5))
    commit(storage, 2, b"")
    assert storage.read(Path("step_2/model.pt"), lazy) == b"" == storage.read(Path("step_2/model.pt"))


def test_a_flipped_bit_is_an_error(tmp_path: Path) -> None:
    config = StoreStorageConfig(str(tmp_path / "store"))
    worker.save_alone(config.uri, 1, seed=3)
    manager = worker.manager_of(config)
    manager.load("step_1", into={"model": worker.state_of(4)})
    (path,) = (tmp_path / "store").glob("checkpoints/*/model_0.pt")
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 + BLOCK_BYTES // 4] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=r"model_0\.pt is damaged"):
        manager.load("step_1", into={"model": worker.state_of(4)})
    with manager._reader._storage.stream_read(Path("step_1/model_0.pt"), ReadArgs(pre_read_full_file=False)) as stream:
        stream.read(100)  # of a block that is whole
        with pytest.raises(CheckpointDamaged):
            stream.read()
    (checkpoint,) = ckptstore.open_store(config.uri)
    assert not checkpoint.verify().ok


def test_tensors_in_memory_are_written_without_a_copy(tmp_path: Path) -> None:
    storage = StoreStorageConfig(str(tmp_path)).create_storage()
    storage.mkdir(Path("tmp_step_1"))
    state = {"large": torch.randn(1 << 20), "view": [torch.randn(1 << 20)[7:]]}
    with storage.get_write_stream(Path("tmp_step_1/f"), state) as stream:
        torch.save(state, stream)
        of_tensors = [view for view in stream._views if len(view) >= 4 * len(state["view"][0])]
        addresses = {torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in of_tensors}
    assert addresses == {tensor.untyped_storage().data_ptr() for tensor in (state["large"], state["view"][0])}
    loaded = torch.load(io.BytesIO(storage.read(Path("tmp_step_1/f"))))
    assert torch.equal(loaded["large"], state["large"])
    assert torch.equal(loaded["view"][0], state["view"][0])


@pytest.mark.parametrize("call", ["create log/*", "create checkpoints/*"])
def test_an_answer_that_is_lost_is_found_out(call: str, tmp_path: Path) -> None:
    fault = FailAt(call, effect="after", skip=1 if "log" in call else 0)  # the first record is the claim
    storage = worker.FaultyConfig(str(tmp_path), hook=fault).create_storage()
    commit(storage, 1)
    assert fault.struck == 1
    assert storage.ls(Path()) == ["step_1"]


def test_a_save_that_fails_at_any_call_leaves_all_or_nothing(tmp_path: Path) -> None:
    counted = CountCalls()
    commit(worker.FaultyConfig(str(tmp_path / "counted"), hook=counted).create_storage(), 1)
    for index in range(counted.total):
        root = tmp_path / str(index)
        fault = FailAt(lambda call, index=index: call.index == index and call.verb != "close", RuntimeError("no more"))
        config = worker.FaultyConfig(str(root), hook=fault, durable=False)
        with suppress(RuntimeError):  # what follows holds with or without
            commit(config.create_storage(), 1)
        after = another_job(config).create_storage()
        if after.exists(Path("step_1")):
            assert after.read(Path("step_1/model.pt")) == b"weights"
        else:
            commit(after, 1)
        (checkpoint,) = ckptstore.open_store(str(root))
        assert checkpoint.verify().ok


def check_killed(root: Path, fault: str) -> bool:
    """Kill a job at one call of its storage, and return whether its checkpoint is there: whole, or not at all."""
    worker.save_alone(str(root), 1, seed=1)
    from ckptstore.integrations.torch_checkpointing import storage_config

    storage_config._alone.clear()
    run_ranks(1, worker.save_alone, str(root), 2, 2, env={"CKPTSTORE_TEST_FAULTS": fault}, expect_killed=[0])
    storage = StoreStorageConfig(str(root)).create_storage()
    committed = storage.exists(Path("step_2"))
    assert storage.ls(Path()) == (["step_1", "step_2"] if committed else ["step_1"])
    assert not storage.exists(Path("tmp_step_2"))
    if not committed:
        worker.save_alone(str(root), 2, seed=2)
    manager = worker.manager_of(StoreStorageConfig(str(root)))
    into = {"model": worker.state_of(9), "trainer": {"seed": 0}}
    loaded = manager.load("step_2", into=into)
    assert torch.equal(loaded["model"]["weight"], worker.state_of(2)["weight"])
    assert loaded["trainer"] == {"seed": 2}
    assert all(item.verify().ok for item in ckptstore.open_store(str(root)))
    return committed


@pytest.mark.parametrize("stride", [pytest.param(5, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)])
def test_a_job_that_is_killed_at_any_call_leaves_all_or_nothing(tmp_path: Path, stride: int) -> None:
    seen = []
    for index in range(0, 200, stride):
        try:
            seen.append(check_killed(tmp_path / str(index), f"kill during {index}"))
        except RanksFailed as error:
            if "and returned" not in str(error):  # it has no such call
                raise
            break
    assert seen.index(True) > 20 // stride
    assert seen == sorted(seen)  # one call makes the difference


def test_what_a_resharder_writes_and_reads(tmp_path: Path) -> None:
    manager = worker.manager_of(StoreStorageConfig(str(tmp_path)), resharded="model")
    saved, loaded = worker.state_of(1), worker.state_of(2)
    manager.save("step_1", {"model": saved})
    manager.load("step_1", into={"model": loaded}, strict=True)
    assert torch.equal(loaded["weight"], saved["weight"])
    assert manager._reader._storage.ls(Path("step_1")) == ["metadata.pkl", "model_0.pt"]
    manager.close()


def check_ranks(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert len(result["same"]) > 4
        assert all(result["same"])
        assert result["ls"] == ["step_10", "step_20"]
        assert not result["tmp"]
        assert {"model_0.pt", "model_1.pt", "optim_0.pt", "rng_1.pt"} <= set(result["files"])


def test_ranks_save_and_load_on_a_disk(tmp_path: Path) -> None:
    check_ranks(run_ranks(2, worker.ranks_save_and_load, str(tmp_path), None, False))
    (first, second) = ckptstore.open_store(str(tmp_path))
    assert (first.world_size, second.step) == (2, 20)
    assert {item.rank for item in first.files} == {0, 1}
    assert first.verify().ok


@pytest.mark.parametrize(
    "asynchronous", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.long)]
)
def test_ranks_save_and_load_on_s3_that_throttles(asynchronous: bool, s3: S3Server) -> None:
    s3.empty()
    for match in ("^PUT", "^GET", "^POST"):
        s3.faults.add(Fault(action="status", status=503, code="SlowDown", match=match, times=5))
    options = dict(s3.storage_options)
    check_ranks(run_ranks(2, worker.ranks_save_and_load, "s3://bucket/ranks", options, asynchronous))
    assert any(request.status == 503 for request in s3.log)


def test_ranks_save_asynchronously_on_a_disk(tmp_path: Path) -> None:
    check_ranks(run_ranks(2, worker.ranks_save_and_load, str(tmp_path), None, True))
