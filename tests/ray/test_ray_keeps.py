"""The story of a checkpoint that Ray keeps, over real storages and threads as ranks: no run of Ray is needed for it."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from click.testing import CliRunner
from pyarrow.fs import SubTreeFileSystem
from ray.train import Checkpoint
from storing import arrow_s3, make_run, store, stored, worker_at

import ckptstore
from ckptstore import (
    CheckpointDamaged,
    InvalidInput,
    InvalidMetric,
    InvalidName,
    InvalidSource,
    NoUsableCheckpoint,
    RankTimeout,
    StorageFull,
    StoreNotShared,
)
from ckptstore.events import SaveStarted, listening
from ckptstore.integrations.ray import worker_group
from ckptstore.integrations.ray.kept_by_ray import reporting, upload_fn
from ckptstore.integrations.ray.kept_by_ray.ray_keeps import Run
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.testing.s3_server import s3_server
from ckptstore.tools.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(str(tmp_path / "run"))
    return tmp_path / "run"


def tree(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


def names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def test_all_ranks_fill_one_directory_and_nothing_else_is_left(run: Path, tmp_path: Path) -> None:
    sources = [tree(tmp_path / str(rank), model__pt=f"of {rank}") for rank in range(3)]
    (sources[1] / "only.txt").write_text("one")
    checkpoint = stored(str(run), [*sources, None])
    directory = Path(checkpoint.path).name
    stored_names = ["ckptstore.json", *(f"model-rank=0000{rank}.pt" for rank in range(3)), "only.txt"]
    assert names(run) == [".validate_storage_marker", *(f"{directory}/{name}" for name in stored_names), "store.json"]
    ours = ckptstore.ray.wrap(checkpoint)
    assert (ours.step, ours.world_size, ours.metrics, ours.number) == (7, 4, {"loss": 0.5}, None)
    second = ours.files[1]
    assert (second.name, second.rank, second.original_name) == ("model-rank=00001.pt", 1, "model.pt")
    assert ours.verify().ok
    with ours.as_directory() as path:
        assert path == run / directory, "on a disk it is the real one"
    assert json.loads((run / "store.json").read_text())["kept_by"] == "ray"
    with ckptstore.open_store(run) as mine, pytest.raises(InvalidInput, match="kept by ray"):
        mine.save_directory(1, sources[0])


def test_commands_show_what_ray_keeps(run: Path, tmp_path: Path) -> None:
    source = tree(tmp_path / "source", model__pt="weights")
    for step in (7, 8):
        last = stored(str(run), [source], step=step)
    (run / "_ckptstore").mkdir()  # a store of the same run, which has a list of its own

    def told(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(main, [*words])
        assert done.exit_code == code, done.output
        return done.output

    lines = told("ls", str(run)).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["7", "8"]
    assert (lines[2].split()[-1], lines[3].startswith("Ray keeps them")) == ("latest", True)
    assert [item["step"] for item in json.loads(told("ls", str(run), "--json"))["checkpoints"]] == [7, 8]
    assert json.loads(told("show", str(run), "--json"))["checkpoint"]["uri"] == last.path
    assert "step 7: ok, 1 of 1 files read" in told("verify", f"{run}@7")
    assert "there are: 7, 8" in told("show", f"{run}@9", code=NoUsableCheckpoint.exit_code)
    (Path(last.path) / "model.pt").write_text("WEIGHTS")
    assert "step 8: DAMAGED" in told("verify", str(run), "--all", code=CheckpointDamaged.exit_code)


def test_a_damaged_one_hides_none_of_the_others_from_commands(run: Path, tmp_path: Path) -> None:
    source = tree(tmp_path / "source", model__pt="weights")
    for step in (7, 8):
        last = stored(str(run), [source], step=step)
    (Path(last.path) / "ckptstore.json").write_text("{")
    done = CliRunner().invoke(main, ["ls", str(run)])
    assert done.stdout.splitlines()[1].split()[0] == "7"
    assert done.stderr.startswith(f"left out: {last.path}: ckptstore.json is not valid JSON")
    assert CliRunner().invoke(main, ["show", f"{run}@7"]).exit_code == 0
    done = CliRunner().invoke(main, ["verify", str(run), "--all"])
    assert done.exit_code == CheckpointDamaged.exit_code
    assert [line.partition(",")[0] for line in done.stdout.splitlines()[::2]] == [
        f"{last.path}: DAMAGED",
        "step 7: ok",
    ]


def test_ranks_that_share_a_directory_store_it_once(run: Path, tmp_path: Path) -> None:
    shared, other = tree(tmp_path / "a", model__pt="one"), tree(tmp_path / "b", model__pt="two")
    started: list[SaveStarted] = []
    with listening(started.append, SaveStarted):
        checkpoint = stored(str(run), [shared, shared, other, shared])  # the last one is on another node
    assert sorted(event.rank for event in started) == [0, 2, 3]
    files = {file.name: file.rank for file in ckptstore.ray.wrap(checkpoint).files}
    assert files == {"model-rank=00000.pt": 0, "model-rank=00002.pt": 2, "model-rank=00003.pt": 3}
    ours = ckptstore.ray.wrap(stored(str(run), [shared, other], ranks=[1, 3], world_size=4))  # the others take no part
    assert [(file.name, file.rank) for file in ours.files] == [("model-rank=00001.pt", 1), ("model-rank=00003.pt", 3)]
    assert ours.world_size == 4


def test_what_all_ranks_bring_alike_is_said_and_stored_once_when_it_is_shared(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="ckptstore")
    same = [tree(tmp_path / f"same-{rank}", model__pt="weights") for rank in range(2)]
    other = [tree(tmp_path / f"other-{rank}", model__pt=f"of {rank}") for rank in range(2)]
    stored(str(run), same)
    assert [file.name for file in ckptstore.ray.wrap(stored(str(run), same, shared=["model.pt"])).files] == ["model.pt"]
    stored(str(run), other)
    stored(str(run), [tree(tmp_path / f"empty-{rank}") for rank in range(2)])
    renamed = "model.pt is model-rank=00000.pt, model-rank=00001.pt"
    hint = "the same bytes on 2 ranks: give shared=['model.pt'], and it is stored once, as model.pt"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"step 7: {renamed}; {hint}"),
        ("INFO", f"step 7: ranks bring files of the same name: {renamed}"),
        ("WARNING", "step 7 has no files: the directory is empty on all ranks"),
    ]


def test_a_directory_in_the_run_is_the_same_on_all_nodes(run: Path) -> None:
    shared = tree(run / "written", model__pt="one")
    checkpoint = stored(str(run), [shared] * 4)
    assert {file.name: file.rank for file in ckptstore.ray.wrap(checkpoint).files} == {"model.pt": 0}


def test_what_lies_in_the_run_is_copied_and_may_be_deleted(run: Path) -> None:
    """Ray deletes what was reported after an asynchronous upload, wherever it lies. Attempts share nothing."""
    paths = []
    for text in ("a", "b"):
        reported = tree(run / "latest", model__pt=text)
        checkpoint = stored(str(run), [reported], name="latest")
        paths.append(Path(checkpoint.path))
        shutil.rmtree(reported)
        assert ckptstore.ray.wrap(checkpoint).verify().ok
    assert [(path / "model.pt").read_text() for path in paths] == ["a", "b"]
    assert all(re.fullmatch("latest-[0-9a-f]{16}", path.name) for path in paths)


def test_metadata_of_ray_stay_where_ray_looks_for_them(run: Path, tmp_path: Path) -> None:
    sources = [tree(tmp_path / str(rank), model__pt=f"of {rank}") for rank in range(2)]
    Checkpoint.from_directory(str(sources[1])).set_metadata({"epoch": 3})
    checkpoint = stored(str(run), sources)
    assert checkpoint.get_metadata() == {"epoch": 3}
    checkpoint.update_metadata({"validated": True})
    assert checkpoint.get_metadata() == {"epoch": 3, "validated": True}
    assert ckptstore.ray.wrap(checkpoint).verify().ok


def test_an_error_of_one_rank_is_everybodys_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    good, bad = tree(tmp_path / "good", model__pt="bytes"), tree(tmp_path / "bad", model__pt="bytes")
    (bad / "outside").symlink_to("/etc/hostname")
    errors = store(str(run), [good, bad, good])
    assert [type(error) for error in errors] == [InvalidSource] * 3
    assert all(error.rank == 1 for error in errors if isinstance(error, InvalidSource))
    assert names(run) == [".validate_storage_marker"]


def test_a_rank_that_fails_half_way_leaves_no_directory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [tree(tmp_path / str(rank), model__pt="bytes" * 1000) for rank in range(2)]

    def full(self: LocalStorage, key: str, *_: object, **__: object) -> None:
        if "rank=00001" in key:
            raise StorageFull("no space left", file=key)
        return write(self, key, *_, **__)

    write = LocalStorage.write
    monkeypatch.setattr(LocalStorage, "write", full)
    monkeypatch.setattr(LocalStorage, "write_many", lambda self, files: [self.write(*file) for file in files])
    errors = store(str(run), sources)
    assert [type(error) for error in errors] == [StorageFull] * 2
    assert names(run) == [".validate_storage_marker", "store.json"]
    assert not [*run.glob("checkpoint_1*")]


def test_a_name_may_be_long_and_have_slashes(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sources = [tree(tmp_path / str(rank), model__pt=f"of {rank}") for rank in range(2)]
    checkpoint = stored(str(run), sources, name=f"best/{'x' * 230}")
    assert ckptstore.ray.wrap(checkpoint).verify().ok
    assert not caplog.records


@pytest.mark.parametrize("name", ["../other", "x" * 240])
def test_names_that_lead_out_of_the_run_or_leave_no_room_for_a_mark_are_refused(
    run: Path, tmp_path: Path, name: str
) -> None:
    (error,) = store(str(run), [tree(tmp_path / "a", model__pt="bytes")], name=name)
    assert isinstance(error, InvalidName)


def test_a_run_that_a_log_keeps_is_refused(run: Path, tmp_path: Path) -> None:
    source = tree(tmp_path / "a", model__pt="bytes")
    with ckptstore.open_store(run) as mine:
        mine.save_directory(1, source)
    (error,) = store(str(run), [source])
    assert isinstance(error, InvalidInput)
    assert "kept by ckptstore" in str(error)


def test_a_path_that_is_not_the_drivers_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(StoreNotShared, match="Rank 2 does not see"):
        Run.open(worker_at(str(tmp_path / "run"), rank=2, world_size=4))


def test_a_copy_opens_anywhere(run: Path, tmp_path: Path) -> None:
    checkpoint = stored(str(run), [tree(tmp_path / "a", model__pt="bytes")])
    checkpoint.to_directory(str(tmp_path / "copy"))
    assert ckptstore.Checkpoint.from_directory(tmp_path / "copy").verify().ok
    inside = SubTreeFileSystem(str(tmp_path), checkpoint.filesystem)
    assert ckptstore.ray.wrap(Checkpoint("copy", inside)).verify().ok


class TestIncomplete:
    """What `wrap` refuses, and why."""

    def test_a_pointer(self, run: Path) -> None:
        directory = tree(run / "pointer")
        (directory / "ckptstore-pointer.json").write_text(json.dumps({}))
        with pytest.raises(CheckpointDamaged, match=r"ckptstore-pointer\.json is not an object"):
            ckptstore.ray.wrap(Checkpoint.from_directory(str(directory)))

    def test_without_a_shard(self, run: Path, tmp_path: Path) -> None:
        sources = [tree(tmp_path / str(rank), model__pt=f"of {rank}") for rank in range(2)]
        checkpoint = stored(str(run), sources)
        Path(checkpoint.path, "model-rank=00001.pt").unlink()
        with pytest.raises(CheckpointDamaged, match=r"model-rank=00001.pt: missing") as caught:
            ckptstore.ray.wrap(checkpoint)
        assert caught.value.rank == 1

    def test_merged_with_another_attempt(self, run: Path, tmp_path: Path) -> None:
        checkpoint = stored(str(run), [tree(tmp_path / "a", model__pt="bytes")])
        Path(checkpoint.path, "stale.pt").write_text("of another attempt")
        with pytest.raises(CheckpointDamaged, match=r"stale.pt: extra"):
            ckptstore.ray.wrap(checkpoint)


def test_on_s3_every_byte_is_checked(tmp_path: Path) -> None:
    with s3_server(buckets=["test"]) as server:
        system = arrow_s3(server)
        make_run("test/runs/run", system)
        sources = [tree(tmp_path / str(rank), model__pt=f"of {rank}") for rank in range(2)]
        checkpoint = stored("test/runs/run", sources, filesystem=system)
        ours = ckptstore.ray.wrap(checkpoint)
        assert ours.verify().ok
        with ours.as_directory() as path:
            assert names(path) == ["ckptstore.json", "model-rank=00000.pt", "model-rank=00001.pt"]
        before = len(server.log)
        with ckptstore.ray.wrap(checkpoint).as_directory() as again:
            assert again == path, "one copy on the node for all readers"
        assert not [item.path for item in server.log[before:] if item.method == "GET" and ".pt" in item.path]
        left = {key for key in server.objects.buckets["test"] if "checkpoint_1" not in key and not key.endswith("/")}
        assert left == {"runs/run/.validate_storage_marker", "runs/run/store.json"}
        with system.open_output_stream(f"{checkpoint.path}/model-rank=00001.pt") as file:
            file.write(b"OF 1")
        with pytest.raises(CheckpointDamaged):
            ckptstore.ray.wrap(checkpoint).to_directory(tmp_path / "copy")
        assert [problem.fault for problem in ckptstore.ray.wrap(checkpoint).verify().problems] == ["flipped"]


HINT = worker_group._RayNotice.hint


class OneNotice:
    """The addresses of groups, for one process."""

    host, hint = "127.0.0.1", "Look for it"
    addresses: ClassVar[dict[str, str]] = {}

    def __init__(self, key: str) -> None:
        self.key = key

    def announce(self, address: str) -> None:
        self.addresses[self.key] = address

    def look(self) -> str | None:
        return self.addresses.get(self.key)

    def withdraw(self) -> None:
        del self.addresses[self.key]


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> type[OneNotice]:
    """Workers of one start find each other here, and need no cluster."""
    monkeypatch.setattr(worker_group, "_RayNotice", OneNotice)
    monkeypatch.setattr(worker_group, "start_token", lambda: "start")
    return OneNotice


def test_workers_of_an_upload_meet_beside_the_storage_however_many_they_are(
    run: Path, tmp_path: Path, notices: type[OneNotice]
) -> None:
    opened = Run.open(worker_at(str(run), world_size=1000), rank_timeout_seconds=30)
    group = upload_fn._meet(opened, range(1000), "checkpoint_1")
    assert (group.rank, group.world_size) == (0, 1000)
    assert len(notices.addresses) == 1
    group.close()
    assert notices.addresses == {}
    assert names(run) == [".validate_storage_marker"]


def test_a_worker_that_waits_for_rank_0_is_told_what_each_worker_calls(
    run: Path, tmp_path: Path, notices: type[OneNotice], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, hint = worker_at(str(run), rank=1, world_size=2), HINT
    opened = Run.open(worker, rank_timeout_seconds=1)
    assert "one that reads alone gives group='solo'" in hint
    with pytest.raises(RankTimeout, match="Look for it"):
        worker_group.RayWorkers(worker).open_group(opened.storage, opened.config)
    with pytest.raises(RankTimeout, match=r"Every worker calls ckptstore\.ray\.report"):
        reporting._Reporter(opened, None)._met()
    monkeypatch.setattr(upload_fn, "require_worker", lambda _name: worker)
    upload = ckptstore.ray.upload_fn(rank_timeout_seconds=1)
    with pytest.raises(RankTimeout, match=r"give upload_fn\(ranks=\[\.\.\.\]\)"):
        upload(Checkpoint.from_directory(str(tree(tmp_path / "a", model__pt="one"))), "checkpoint_1")


class TestOutsideOfAWorker:
    """In the driver, under torchrun, in a plain process."""

    def test_a_report_checks_metrics_and_stores_nothing(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        directory = tree(tmp_path / "a", model__pt="bytes")
        assert ckptstore.ray.report({"loss": 1.0}, directory=directory) is None
        assert ckptstore.ray.report({"loss": 1.0}, state={"step": 1}) is None
        assert "nothing is stored: report was called with a state" in caplog.text
        with pytest.raises(InvalidMetric, match="'loss' is a object"):
            ckptstore.ray.report({"loss": object()})
        with pytest.raises(InvalidInput, match="not directory and state"):
            ckptstore.ray.report({}, directory=directory, state={})
        with pytest.raises(InvalidInput, match="shared names files, and a state has none"):
            ckptstore.ray.report({}, state={}, shared=["model.pt"])

    def test_an_upload_says_where_it_belongs(self, tmp_path: Path) -> None:
        upload = pickle.loads(pickle.dumps(ckptstore.ray.upload_fn({"secret": "hidden"}, ranks={1, 0})))
        assert upload.ranks == (0, 1)
        assert "hidden" not in repr(upload)
        with pytest.raises(InvalidInput, match="outside of a worker of Ray Train"):
            upload(Checkpoint.from_directory(str(tmp_path)), "checkpoint_1")
        with pytest.raises(InvalidInput, match="ranks is"):
            ckptstore.ray.upload_fn(ranks=[])

    def test_metrics_are_made_plain(self) -> None:
        assert ckptstore.ray.safe_metrics({"loss": np.float32(0.5)}) == {"loss": 0.5}
