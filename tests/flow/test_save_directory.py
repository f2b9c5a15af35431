"""Directories saved, found again, copied out and verified: on a disk and in memory, by one rank and by several."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from thread_ranks import run_threads
from trees import make_tree, read_tree

import ckptstore
from ckptstore import Checkpoint, CheckpointStore, errors, open_store
from ckptstore.saving import directory_shard
from ckptstore.testing import FailAt, with_faults

FILES = {
    "model.pt": os.urandom(3 << 20),
    "nested/deep/optim.bin": b"o" * 1000,
    "empty": b"",
    "with space and \u00fcml\u00e4ut \u4e2d.txt": b"x",
}


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "disk" else f"memory://{uuid4().hex}"


def tree(tmp_path: Path, files: dict[str, bytes] | None = None) -> Path:
    return make_tree(tmp_path / uuid4().hex, FILES if files is None else files)


def test_round_trip(root: str, tmp_path: Path) -> None:
    source = tree(tmp_path)
    (source / "nothing" / "here").mkdir(parents=True)
    with open_store(root) as store:
        saved = store.save_directory(7, source, metrics={"loss": 0.5}, metadata={"run": "a"})
        shutil.rmtree(source)
        found = store.latest()
        assert found == saved == store[7]
        assert (found.step, found.metrics, found.metadata) == (7, {"loss": 0.5}, {"run": "a"})
        assert (found.world_size, found.size_bytes) == (1, sum(map(len, FILES.values())))
        assert [item.name for item in found.files] == sorted(FILES)
        with found.as_directory() as path:
            assert read_tree(path) == FILES
            assert not [file for file in path.rglob("*") if file.is_file() and file.stat().st_mode & 0o222]
            assert (path / "nothing" / "here").is_dir()
        copy = found.to_directory(tmp_path / "copy")
        assert read_tree(copy) == FILES
        assert (copy / "nothing" / "here").is_dir()
        part = found.to_directory(tmp_path / "part", include="model*")
        assert sorted(read_tree(part)) == ["model.pt"]
        report = found.verify()
        assert report.ok
        assert (report.num_files, report.num_read) == (4, 4)


def test_an_empty_store_has_nothing(root: str) -> None:
    with open_store(root) as store:
        assert store.latest() is None
        assert store.best("loss") is None
        assert list(store) == []
        assert store.resume() is None
        with pytest.raises(errors.CheckpointGone):
            store[3]


def test_metadata_can_change_and_the_manifest_cannot(root: str, tmp_path: Path) -> None:
    with open_store(root) as store:
        checkpoint = store.save_directory(1, tree(tmp_path), metadata={"a": 1, "b": [1.5, float("inf")]})
        assert checkpoint.get_metadata() == {"a": 1, "b": [1.5, float("inf")]}
        checkpoint.update_metadata({"a": 2, "c": None})
        assert store[1].metadata == {"a": 2, "b": [1.5, float("inf")], "c": None}
        checkpoint.set_metadata({"only": "this"})
        assert store[1].get_metadata() == {"only": "this"}
        assert store[1].verify().ok
        with pytest.raises(errors.InvalidMetadata):
            checkpoint.set_metadata({"bad": object()})


def test_the_best_and_the_order(root: str, tmp_path: Path) -> None:
    with open_store(root) as store:
        for step, loss in [(1, 0.3), (2, float("nan")), (3, 0.1), (4, 0.2)]:
            store.save_directory(step, tree(tmp_path, {"f": b"1"}), metrics={"loss": loss})
        assert [checkpoint.step for checkpoint in store] == [1, 2, 3, 4]
        assert store.best("loss").step == 3
        assert store.best("loss", mode="max").step == 1
        with pytest.raises(ckptstore.InvalidMetric, match=r"'lost'; did you mean 'loss'\? They have loss"):
            store.best("lost")
        assert len(store.entries()) == 4
        assert 3 in store
        assert 9 not in store


def test_saving_a_step_again_replaces_it_or_is_refused(root: str, tmp_path: Path) -> None:
    with open_store(root) as store:
        store.save_directory(1, tree(tmp_path, {"f": b"old"}))
        with pytest.raises(errors.StepExists) as caught:
            store.save_directory(1, tree(tmp_path, {"f": b"new"}), exists="error")
        assert caught.value.committed is False
        again = store.save_directory(1, tree(tmp_path, {"f": b"new"}))
        assert list(store) == [again]
        with again.as_directory() as path:
            assert (path / "f").read_bytes() == b"new"
        assert [item.step for item in store.trash()] == [1]


def test_names_agreed_by_ranks(tmp_path: Path) -> None:
    def flow(store: CheckpointStore, rank: int) -> Checkpoint:
        files = {"model.pt": b"%d" % rank, f"only-{rank}.txt": b"mine", "config.json": b"{}"}
        directory = None if rank == 2 else make_tree(tmp_path / f"rank{rank}", files)
        return store.save_directory(5, directory, shared=["config.json"])

    results = run_threads(3, tmp_path / "store", flow)
    assert results[0] == results[1] == results[2]
    with results[0].as_directory() as path:
        assert read_tree(path) == {
            "model-rank=00000.pt": b"0",
            "model-rank=00001.pt": b"1",
            "only-0.txt": b"mine",
            "only-1.txt": b"mine",
            "config.json": b"{}",
        }
    by_name = {item.name: item for item in results[0].files}
    assert by_name["model-rank=00001.pt"].original_name == "model.pt"
    assert by_name["model-rank=00001.pt"].rank == 1
    assert results[0].world_size == 3


def test_one_ranks_failure_is_everybodys_and_leaves_nothing(tmp_path: Path) -> None:
    def flow(store: CheckpointStore, rank: int) -> object:
        directory = make_tree(tmp_path / f"rank{rank}", {f"f{rank}": b"1" * 5000})
        if rank == 1:
            os.mkfifo(directory / "pipe")
        with pytest.raises(errors.InvalidSource) as caught:
            store.save_directory(5, directory)
        assert not (tmp_path / "store/checkpoints").exists()
        if rank == 1:
            (directory / "pipe").unlink()
        return caught.value, store.save_directory(5, directory).step

    for error, step in run_threads(2, tmp_path / "store", flow):
        assert (error.rank, error.committed, step) == (1, False, 5)
        assert "pipe" in str(error)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = directory_shard.scan

    def scan_then_change(directory: Path) -> object:
        found = scan(directory)
        (directory / "f1").write_bytes(b"2" * 6000)
        return found

    monkeypatch.setattr(directory_shard, "scan", scan_then_change)

    def flow(store: CheckpointStore, rank: int) -> None:
        store.save_directory(5, make_tree(tmp_path / f"rank{rank}", {"f0": b"0", "f1": b"1" * 5000}))

    results = run_threads(2, tmp_path / "store", flow)
    assert all(isinstance(error, errors.SourceChanged) and error.committed is False for error in results)
    assert "f1" in str(results[0])
    assert list((tmp_path / "store/checkpoints").rglob("*.*")) == []


def test_shared_files_must_be_equal(tmp_path: Path) -> None:
    def flow(store: CheckpointStore, rank: int) -> None:
        store.save_directory(5, make_tree(tmp_path / f"rank{rank}", {"c": b"%d" % rank}), shared=["c"])

    results = run_threads(2, tmp_path / "store", flow)
    assert all(isinstance(error, errors.InvalidSource) and error.file == "c" for error in results)


def test_bad_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    root = tmp_path / "store"
    source = tree(tmp_path, {"f": b"1"})
    no_writes = FailAt("write* checkpoints/*", times=None)
    with with_faults(open_store(root, retention=ckptstore.KeepBest(1, "loss")), no_writes) as store:
        with pytest.raises(errors.InvalidMetric, match="loss"):
            store.save_directory(1, source)
        with pytest.raises(errors.InvalidMetric):
            store.save_directory(1, source, metrics={"loss": "low"})
        with pytest.raises(errors.InvalidMetadata):
            store.save_directory(1, source, metrics={"loss": 1}, metadata={"x": {1, 2}})
        for name in ("$t", "\ud800"):
            with pytest.raises(errors.InvalidMetadata, match="metrics has"):
                store.save_directory(1, source, metrics={"loss": 1, name: 1})
        with pytest.raises(errors.InvalidInput, match="exists"):
            store.save_directory(1, source, metrics={"loss": 1}, exists="ok")
        with pytest.raises(errors.InvalidInput, match="suffix"):
            store.save_directory(1, source, metrics={"loss": 1}, suffix="no")
        with pytest.raises(errors.InvalidSource):
            store.save_directory(1, tmp_path / "absent", metrics={"loss": 1})
        make_tree(source, {"ckptstore.json": b"{}"})
        with pytest.raises(errors.InvalidName, match="reserved"):
            store.save_directory(1, source, metrics={"loss": 1})
    assert not (root / "checkpoints").exists()


def test_a_directory_that_holds_the_store_is_refused(tmp_path: Path) -> None:
    """Each save would store all those before."""
    make_tree(tmp_path / "out", {"a": b"1"})
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for path in ("out", "link", "."):
        with open_store(tmp_path / "out/runs") as store, pytest.raises(errors.InvalidSource, match="lies in the"):
            store.save_directory(1, tmp_path / path)


def test_no_store_is_begun_among_the_checkpoints_of_another(tmp_path: Path) -> None:
    """A job would find nothing there, and train anew."""
    with open_store(tmp_path) as store:
        store.save(1, {"a": 1})
    with open_store(tmp_path / "checkpoints") as store, pytest.raises(errors.InvalidInput, match="has the checkpoints"):
        store.resume({"a": 0})
    assert not (tmp_path / "checkpoints/store.json").exists()
    with open_store(tmp_path / "other/checkpoints") as store:
        assert store.resume({"a": 0}) is None


def test_shared_is_no_text(root: str, tmp_path: Path) -> None:
    make_tree(tmp_path / "out", {"c": b"1"})
    with open_store(root) as store, pytest.raises(errors.InvalidInput, match=r"As in \['c'\]"):
        store.save_directory(1, tmp_path / "out", shared="c")


def test_no_permission(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        root = Path("/proc/self/ckptstore-test")
    else:
        root = tmp_path / "closed"
        root.mkdir(mode=0o500)
    with open_store(root) as store, pytest.raises((errors.AccessDenied, errors.StorageError)):
        store.save_directory(1, tree(tmp_path, {"f": b"1"}))


def test_links_share_the_inode_and_have_no_digest(tmp_path: Path) -> None:
    source = tree(tmp_path)
    with open_store(tmp_path / "store") as store:
        checkpoint = store.save_directory(1, source, link=True)
        assert all(item.digest is None for item in checkpoint.files)
        with checkpoint.as_directory() as path:
            assert (path / "model.pt").stat().st_ino == (source / "model.pt").stat().st_ino
            assert read_tree(path) == FILES
        assert os.access(source / "model.pt", os.W_OK)
        report = checkpoint.verify()
        assert (report.ok, report.num_read, report.num_without_digest) == (True, 0, 4)
        assert read_tree(checkpoint.to_directory(tmp_path / "copy")) == FILES


def test_a_link_inside_is_linked_as_the_file_it_leads_to(tmp_path: Path) -> None:
    source = tree(tmp_path, {"real/model.pt": b"weights"})
    (source / "last.pt").symlink_to("real/model.pt")
    (source / "again").symlink_to("real")
    with open_store(tmp_path / "store") as store:
        for step, link in enumerate((True, False)):
            checkpoint = store.save_directory(step, source, link=link)
            with checkpoint.as_directory() as path:
                assert read_tree(path) == dict.fromkeys(["real/model.pt", "last.pt", "again/model.pt"], b"weights")
                assert not any(item.is_symlink() for item in path.rglob("*"))
                inode = (source / "real/model.pt").stat().st_ino
                assert ((path / "last.pt").stat().st_ino == inode) is link


def test_damage_is_named(root: str, tmp_path: Path) -> None:
    files = {"a": b"a" * 4000, "b": b"b" * 4000, "c": b"c" * 4000, "d": b"d" * 10, "e": b"e"}
    with open_store(root) as store:
        checkpoint = store.save_directory(1, tree(tmp_path, files))
        storage, prefix = store._job.storage, checkpoint._files.prefix
        storage.delete([prefix + name for name in files])
        swapped = {"a": b"b" * 4000, "b": b"a" * 4000, "c": b"c" * 3999 + b"\x00", "d": b"d" * 9, "f": b"new"}
        for name, data in swapped.items():
            storage.write(prefix + name, [memoryview(data)])
        report = checkpoint.verify()
        assert {problem.file: problem.fault for problem in report.problems} == {
            "a": "swapped",
            "b": "swapped",
            "c": "flipped",
            "d": "truncated",
            "e": "missing",
            "f": "extra",
        }
        assert "the bytes of b" in report.problems[0].found
        with pytest.raises(errors.CheckpointDamaged, match="swapped"):
            report.raise_if_damaged()
        with pytest.raises(errors.CheckpointDamaged):
            checkpoint.to_directory(tmp_path / "out")
        assert not (tmp_path / "out").exists()
        with pytest.raises(ckptstore.NoUsableCheckpoint, match="step 1"):
            store.resume()


def test_a_sample_reads_a_share(root: str, tmp_path: Path) -> None:
    files = {f"f{index}": b"x" * index for index in range(40)}
    with open_store(root) as store:
        checkpoint = store.save_directory(1, tree(tmp_path, files))
        assert checkpoint.verify(sample="25%").num_read == 10
        assert checkpoint.verify(sample=0.001).num_read == 1
        for bad in ["0%", "x", 2, -0.1]:
            with pytest.raises(errors.InvalidInput):
                checkpoint.verify(sample=bad)


def test_a_checkpoint_on_its_own(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        checkpoint = store.save_directory(3, tree(tmp_path), metrics={"loss": 1.0})
        shutil.copytree(checkpoint.uri, tmp_path / "elsewhere")
    alone = Checkpoint.from_directory(tmp_path / "elsewhere")
    assert (alone.step, alone.number, alone.metrics) == (3, None, {"loss": 1.0})
    assert alone.verify().ok
    with alone.as_directory() as path:
        assert read_tree(path) == FILES
    (tmp_path / "elsewhere" / "model.pt").unlink()
    with pytest.raises(errors.CheckpointDamaged, match=r"model\.pt"):
        Checkpoint.from_uri(str(tmp_path / "elsewhere"))
    with pytest.raises(errors.CheckpointGone):
        Checkpoint.from_uri(tmp_path / "nowhere")


@pytest.mark.long
def test_a_hundred_thousand_files_and_six_gigabytes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for directory in range(100):
        (source / f"d{directory}").mkdir(parents=True)
        for index in range(1000):
            (source / f"d{directory}" / f"f{index}").write_bytes(b"%d" % index)
    with open(source / "large", "wb") as file:
        file.truncate(6 << 30)
        file.seek(5 << 30)
        file.write(b"somewhere in the middle")
    with open_store(tmp_path / "store", memory_budget_bytes=64 << 20) as store:
        checkpoint = store.save_directory(1, source)
        assert len(checkpoint.files) == 100_001
        report = checkpoint.verify()
        assert report.ok
        assert report.read_bytes == checkpoint.size_bytes > 6 << 30


def test_a_copy_without_a_path_lasts_as_long_as_the_process_that_made_it(tmp_path: Path) -> None:
    """A child that was forked from it ends first, and takes nothing along."""
    with open_store(tmp_path / "store") as store:
        store.save_directory(3, make_tree(tmp_path / "source", FILES))
    code = """import os, sys, ckptstore
with ckptstore.open_store("store") as store:
    first, second = store[3].to_directory(), store[3].to_directory(include="empty")
    (first / "own.txt").write_text("one may write to it")
if os.fork() == 0:
    sys.exit()
os.wait()
assert first.parent.is_dir() and first.parent != second.parent
print(first, *sorted(path.name for path in second.iterdir()))"""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    place, *names = done.stdout.split()
    assert Path(place).is_relative_to(temporary)
    assert Path(place).name == "step-3"
    assert names == ["empty"]
    assert not list(temporary.glob("ckptstore-copy-*")), "the copies go when the process ends"
