"""A file that is missing or damaged: ranks go on with the checkpoint before, or read what their node's copy lacks."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from thread_ranks import in_threads, run_threads
from trees import Once, flip, heard, make_tree

from ckptstore import CheckpointDamaged, CheckpointGone, CheckpointStore, NoUsableCheckpoint, StorageGroup, open_store
from ckptstore.errors import StorageError, StorageUnavailable
from ckptstore.events import CheckpointSkipped
from ckptstore.loading.story import NodeCopies
from ckptstore.storage.disk import posix
from ckptstore.testing import Call, FailAt, with_faults
from ckptstore.testing.s3_server import s3_server

FILES = ["tensors.index", "*.distcp", "ckptstore.json"]


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((300, 300), float(step)), "epoch": step}


def save_two(store: CheckpointStore) -> None:
    for step in (1, 2):
        store.save(step, state(step))


def lose(store: CheckpointStore, step: int, pattern: str) -> str:
    """Delete one file of a step behind the store's back, and give its name."""
    storage, prefix = store._job.storage, store[step]._files.prefix
    key = min(file.key for file in storage.list(prefix) if Path(file.key).match(pattern))
    storage.delete([key])
    return key.removeprefix(prefix)


@pytest.mark.parametrize("uri", ["disk", "memory"])
@pytest.mark.parametrize("pattern", FILES)
def test_the_one_before_is_taken_and_the_reason_told(tmp_path: Path, uri: str, pattern: str) -> None:
    with open_store(tmp_path / "store" if uri == "disk" else f"memory://{uuid.uuid4().hex}") as store:
        save_two(store)
        newest = store[2]
        name = lose(store, 2, pattern)
        with heard(CheckpointSkipped) as skipped:
            for take, read_once in ((store.load, "rank"), (store.load, "node"), (store.resume, "rank")):
                found = state(0)
                assert take(found, read_once=read_once).step == found["epoch"] == 1
                assert found["w"].eq(1).all()
        assert [name in event.reason for event in skipped] == [True] * 3
        with pytest.raises(CheckpointGone if pattern == "ckptstore.json" else CheckpointDamaged, match=name):
            newest.load(state(0))
        lose(store, 1, pattern)
        with pytest.raises(NoUsableCheckpoint, match=name):
            store.resume(state(0))


def test_all_ranks_go_on_together(tmp_path: Path) -> None:
    def flow(store: CheckpointStore, rank: int) -> object:
        save_two(store)
        if rank == 0:
            lose(store, 2, "*.distcp")
        found = state(0)
        return store.load(found).step, found["epoch"]

    assert run_threads(2, tmp_path / "store", flow) == [(1, 1)] * 2


def load_after_a_loss(root: str) -> list[int]:
    """Load with one rank reading for all: a file is lost that all want, then one that a single rank wants."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    with open_store(root) as store:
        for step in (1, 2, 3):
            store.save(step, {"w": torch.full((600, 300), float(step)), f"own{rank}": torch.tensor(step)})
        for step, pattern in ((3, "*.distcp"), (2, f"*rank={dist.get_world_size() - 1:05d}*.distcp")):
            for file in Path(store[step].uri).glob(pattern) if rank == 0 else ():
                file.unlink()
            dist.barrier()
            target = {"w": torch.zeros(600, 300)} if step == 3 else {f"own{rank}": torch.tensor(0)}
            found.append(store.load(target, read_once="job").step)
    dist.destroy_process_group()
    return found


def test_all_ranks_go_on_together_where_one_reads_for_all(tmp_path: Path) -> None:
    assert run_ranks(2, load_after_a_loss, str(tmp_path)) == [[2, 1]] * 2


def test_a_reference_that_leads_nowhere_is_damage(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        whole = {"w": torch.arange(90_000.0), "epoch": 1}
        store.save(1, whole, incremental="reference")
        checkpoint = store.save(2, {**whole, "epoch": 2}, incremental="reference")
        (elsewhere,) = [file for file in checkpoint.files if file.attempt]
        (Path(store[1].uri) / elsewhere.name).unlink()
        with pytest.raises(NoUsableCheckpoint, match=elsewhere.name):
            store.resume({"w": torch.zeros(90_000), "epoch": 0})


def test_a_storage_that_cannot_be_reached_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "2")
    with open_store(tmp_path) as store:
        save_two(store)
    error = StorageUnavailable("no answer")
    with (
        with_faults(open_store(tmp_path), FailAt("read* checkpoints/*", error, times=None)) as store,
        pytest.raises(StorageUnavailable),
    ):
        store.load(state(0))


def memory_store() -> CheckpointStore:
    return open_store(f"memory://{uuid.uuid4().hex}")


@pytest.mark.parametrize(("name", "fault"), [("ckptstore.json", "manifest"), ("*.distcp", "longer")])
def test_a_byte_more_is_damage_and_passed_over(tmp_path: Path, name: str, fault: str) -> None:
    with open_store(tmp_path) as store:
        save_two(store)
        path = next(Path(store[2].uri).glob(name))
        path.chmod(0o600)
        path.write_bytes(path.read_bytes() + b"\n")
        assert [problem.fault for problem in store[2].verify().problems] == [fault]
    with open_store(tmp_path) as store:
        assert store.resume().step == 1


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: path.unlink(), "is not there, its rank stored"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "its rank stored"),
        (lambda path: (path.parent / "more").write_bytes(b"x"), "in no receipt, for instance"),
    ],
    ids=["gone", "short", "one more"],
)
def test_what_is_not_there_as_its_rank_stored_it_is_not_committed(
    tmp_path: Path, harm: Callable[[Path], object], words: str
) -> None:
    def spoil() -> None:
        path = next((tmp_path / "checkpoints").glob("step-*/*.distcp"))
        path.chmod(0o600)
        harm(path)

    with with_faults(open_store(tmp_path), Once("list", "checkpoints/step-", spoil)) as store:
        with pytest.raises(StorageError, match=words) as caught:
            store.save(1, state(1))
        assert caught.value.committed is False
        assert list(store) == []


@pytest.mark.parametrize("shown", [b"", b"x" * 99], ids=["not at all", "too short"])
@pytest.mark.parametrize("comes", [True, False])
def test_the_leader_waits_for_a_file_of_another_node_that_is_shown_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: bytes, comes: bool
) -> None:
    looks: list[Path] = []
    beats: list[int] = []
    monkeypatch.setattr("ckptstore.saving.commit.beat", lambda: beats.append(1))

    def hook(call: Call) -> None:
        path = tmp_path / "store" / call.key
        if (call.verb, call.phase) == ("list", "before") and call.key.startswith("checkpoints/step-") and not looks:
            (late,) = path.glob("late*")
            late.unlink()
            if shown:
                late.write_bytes(shown)
        if (call.verb, call.phase) == ("stat", "before") and path.name.startswith("late"):
            looks.append(path)
            if comes and len(looks) == 2:
                path.write_bytes(b"x" * 100)

    def flow(store: CheckpointStore, rank: int) -> int:
        faulty = store if rank else with_faults(store, hook)
        return faulty.save_directory(1, make_tree(tmp_path / str(rank), {"late" if rank else "own": b"x" * 100})).step

    ends = run_threads(2, tmp_path / "store", flow, rank_timeout_seconds=600 if comes else 2)
    assert len(beats) >= len(looks) >= 2, "it gives signs of life"
    if comes:
        assert ends == [1, 1]
        return
    for error in ends:
        assert (type(error), error.committed) == (StorageError, False)
        assert re.search("late.*, its rank stored 100 bytes" if shown else "late is not there", str(error))


@pytest.mark.parametrize(
    ("phase", "harm", "words"),
    [
        ("before", lambda storage, key: storage.write(key, [memoryview(b"{}")]), "exists already with other contents"),
        ("after", lambda storage, key: storage.delete([key]), "is not there, though .* has said"),
        ("after", lambda storage, key: storage.write(key, [memoryview(b"{}")]), "has 2 bytes, though .* has said"),
    ],
)
def test_a_manifest_that_is_not_there_as_it_was_written_is_not_committed(
    phase: str, harm: Callable[[Any, str], object], words: str
) -> None:
    uri = f"memory://{uuid.uuid4().hex}"
    storage = open_store(uri)._job.storage

    def hook(call: Call) -> None:
        if (call.verb, call.phase) == ("create", phase) and call.key.endswith("ckptstore.json"):
            harm(storage, call.key)

    with with_faults(open_store(uri), hook) as store:
        with pytest.raises(StorageError, match=words) as caught:
            store.save(1, state(1))
        assert caught.value.committed is False
        assert list(store) == []


def test_the_cache_may_lie_below_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "scratch").symlink_to("disk")
    monkeypatch.setenv("CKPTSTORE_CACHE_DIR", str(tmp_path / "scratch/cache"))
    with memory_store() as store:
        store.save(1, state(1))
        found = state(0)
        store.load(found, read_once="node")
        assert found["epoch"] == 1
        assert list((tmp_path / "disk/cache").rglob("*.distcp"))


def loads_newest(store: CheckpointStore) -> bool:
    found = state(0)
    store.resume(found, read_once="node")
    return bool(found["epoch"] == 2 and found["w"].eq(2).all())


@pytest.mark.parametrize("harm", [flip, Path.unlink])
@pytest.mark.parametrize("pattern", ["tensors.index", "*.distcp"])
def test_a_copy_that_is_fliped_or_lost_is_no_damage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None], pattern: str
) -> None:
    path_of = NodeCopies.path

    def harmed(copies: NodeCopies, name: str) -> Path:
        path = path_of(copies, name)
        if path.match(pattern):
            harm(path)
        return path

    with memory_store() as store:
        for step in (1, 2):
            store.save(step, state(step))
        with monkeypatch.context() as patched:
            patched.setattr(NodeCopies, "path", harmed)
            assert loads_newest(store)
        (warning,) = [record.getMessage() for record in caplog.records]
        assert "A copy of step 2 in the node cache" in warning
        caplog.clear()
        assert loads_newest(store)  # from a new copy
        assert not caplog.records


@pytest.mark.parametrize("fault", ["too full", "not writable"])
def test_ranks_need_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv("CKPTSTORE_CACHE_DIR", str(tmp_path / "cache"))
    if fault == "too full":
        monkeypatch.setattr(posix, "free_bytes", lambda directory: 60 << 20)
    else:
        (tmp_path / "cache").write_bytes(b"a file, so root cannot make it either")
    with s3_server(buckets=["b"]) as server:

        def flow(rank: int) -> Any:
            group = StorageGroup(rank, 2, "start")
            with open_store("s3://b/run", group=group, storage_options=server.storage_options) as store:
                store.save(1, state(1))
                found = state(0)
                store.load(found)
                return found["epoch"]

        assert in_threads(2, flow) == [1, 1]
