"""Benchmarks that run: real processes, real storages, nothing left behind, nothing of others touched."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_ranks
import pytest
import torch
from made import bench, valid

from ckptstore.errors import InvalidInput, StorageFull
from ckptstore.storage.base import Bucket, WritesParts
from ckptstore.storage.open import open_storage
from ckptstore.testing import RanksFailed
from ckptstore.tools.bench import workloads
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.destination import Place, check_room, opened_place
from ckptstore.tools.bench.figures.report import WORKLOADS, Options
from ckptstore.tools.bench.figures.text import scaling_lines
from ckptstore.tools.bench.peers.finding import Finder
from ckptstore.tools.bench.peers.registry import TABLES
from ckptstore.tools.bench.run import contests
from ckptstore.tools.bench.shapes import PRESETS, rank_state, shapes_of, state_bytes
from ckptstore.tools.bench.simulated import commit_of, commit_of_sharded
from ckptstore.tools.bench.timeline import straggler
from ckptstore.tools.bench.turns import Contest
from ckptstore.tools.bench.work import Task
from ckptstore.tools.bench.workloads import fill
from ckptstore.tools.cli.commands.bench import options_of

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _torch_is_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each workload is measured by processes of its own, which all need torch."""
    monkeypatch.setattr("ckptstore.tools.bench.run.run_ranks", forked_ranks.run_ranks)


def measured(path: Path) -> dict[str, Any]:
    """A report, held to its schema: contenders that were measured, by workload and name."""
    value = valid(json.loads(path.read_text()))
    return {
        workload["name"]: {one["name"]: one for one in workload["outcomes"] if one["status"] == "measured"}
        for workload in value["workloads"]
    }


def test_a_save_is_measured_beside_a_peer_and_the_limit_and_leaves_nothing(tmp_path: Path) -> None:
    target, told, shown = tmp_path / "new" / "place", tmp_path / "told.json", tmp_path / "shown.html"
    floors = tmp_path / "floors.json"
    floors.write_text(json.dumps({"floors": [{"workload": "save", "role": "peer", "floor": 1e6, "why": "too high"}]}))
    options = ["--size", "1MiB", "--shape", "tensors", "--repeat", 2, "--peers", "safetensors"]
    options += ["--to", target, "--json", told, "--html", shown, "--floors", floors]
    result = bench("save", *options, code=1)
    assert "BELOW: save against the best peer" in result.output
    found = measured(told)["save"]
    assert set(found) == {"ckptstore", "ckptstore, first save", "safetensors", "raw disk"}
    assert all(len(one["samples"]) == 2 for one in found.values())
    assert found["ckptstore"]["calls"]["create"] >= 1
    assert len(found["raw disk"]["sweep"]) > 5
    assert "ckptstore" in shown.read_text()
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_a_fast_tier_is_measured_and_asks_the_bucket_for_nothing_before_a_checkpoint_is_complete(
    tmp_path: Path,
) -> None:
    told, shown = tmp_path / "told.json", tmp_path / "shown.html"
    options = ["--size", "2MiB", "--shape", "tensors", "--repeat", 1, "--peers", "none", "--latency-ms", 1]
    bench("tier", *options, "--to", tmp_path / "place", "--json", told, "--html", shown)
    found, value = measured(told), json.loads(told.read_text())
    names = ("complete", "copies", "stall", "resume", "resume-partner", "resume-bucket", "steps")
    assert list(found) == [f"tier-{name}{line}" for line in ("", "-full-speed") for name in names]
    failed = [one for workload in value["workloads"] for one in workload["outcomes"] if one["status"] != "measured"]
    assert failed == []
    for workload in ("tier-complete", "tier-copies-full-speed"):
        assert [one["requests"] for one in found[workload]["ckptstore"]["samples"]] == [0]
    assert found["tier-complete"]["ckptstore, no tier"]["samples"][0]["requests"] > 0
    resumes = {name: one["samples"][0] for name, one in found["tier-resume"].items()}
    assert resumes["ckptstore"]["received_bytes"] < 1 << 20, "what the disk has is not read from the bucket"
    assert resumes["ckptstore, from the partner"]["received_bytes"] < 1 << 20
    assert resumes["ckptstore, from the bucket"]["received_bytes"] > 2 << 20
    lines = [workload["facts"]["line"] for workload in value["workloads"][:: len(names)]]
    assert lines == ["the line to the bucket has 200 MB/s and 1 ms", "the bucket answers at full speed"]
    assert "requests to the bucket before it was complete" in value["workloads"][0]["facts"]
    assert "two copies" in shown.read_text()
    assert not (tmp_path / "place").exists()


@pytest.mark.long
def test_benchmarks_for_developers_have_floors_too(tmp_path: Path) -> None:
    floors, root = tmp_path / "floors.json", Path(__file__).parents[2]
    row, peer = "durable save, Llama, 1 rank", "DCP FileSystemWriter"
    command = [sys.executable, "-m", "pytest", "-q", "benchmarks/test_workloads.py", "--floors", str(floors)]
    command += ["-k", "durable-save-Llama-1-rank", "--basetemp", str(tmp_path / "temp")]
    low = {"workload": row, "contender": peer, "floor": 1e-6, "why": "a test"}
    for code, wanted, said in (
        (0, [low], ["ok: "]),
        (
            1,
            [{**low, "floor": 1e6}, {**low, "contender": "nobody"}, {**low, "workload": "gone"}],
            [f"against {peer}: ", "against nobody: not measured", "gone against ckptstore: not measured"],
        ),
    ):
        floors.write_text(json.dumps({"floors": wanted}))
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        assert all(text in done.stdout for text in said), done.stdout
        assert done.stdout.count("BELOW: ") == len(wanted) * code


def test_the_benchmark_that_no_test_runs_can_be_imported() -> None:
    """`make test-all` runs the others."""
    command = [sys.executable, "benchmarks/gpu/ray_train.py", "--help"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_finding_checkpoints_takes_two_requests_at_any_size(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("stays")
    bench("ls", "--to", tmp_path, "--repeat", 1, "--json", tmp_path / "told.json")
    value = json.loads((tmp_path / "told.json").read_text())
    requests = [workload["outcomes"][0]["samples"][0]["requests"] for workload in value["workloads"]]
    assert requests == [2, 2, 2]
    for workload in value["workloads"]:  # each of them asserts that it finds the newest step
        found = {one["name"]: one["status"] for one in workload["outcomes"] if one["role"] == "peer"}
        assert found == {"Orbax CheckpointManager": "measured", "transformers get_last_checkpoint": "measured"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "told.json"]


def test_a_commit_of_simulated_ranks_asks_the_storage_no_more_for_more_of_them(tmp_path: Path) -> None:
    few, many = (forked_ranks.run_ranks(1, commit_of, str(tmp_path / str(n)), n, 0.0)[0] for n in (8, 300))
    # A leader that waits long on a busy machine shows that it lives: some requests follow the time, none a rank.
    assert few["requests"] < 50
    assert many["requests"] < 50


def test_what_grows_with_ranks_does_not_grow_with_tensors(tmp_path: Path) -> None:
    """Each rank tells the leader as much of many tensors as of few. The outline has a row for each tensor."""
    few, many = (forked_ranks.run_ranks(1, commit_of_sharded, str(tmp_path / "s"), 1024, n)[0] for n in (256, 1024))
    assert many["told_bytes"] < 1.05 * few["told_bytes"]
    assert many["agree_bytes"] < 2 * few["agree_bytes"]
    assert many["outline_bytes"] < 1024 * 60 + 1024 * 40
    assert many["open_own_bytes"] < 1 << 20
    assert not (tmp_path / "s").exists()


def test_a_disk_is_not_filled(tmp_path: Path) -> None:
    free_bytes = shutil.disk_usage(tmp_path).free
    with pytest.raises(StorageFull, match="are free"):
        check_room(Place(uri=str(tmp_path)), disk_bytes=free_bytes, memory_bytes=0)
    with pytest.raises(StorageFull, match="of memory"):
        check_room(Place(uri=str(tmp_path)), disk_bytes=0, memory_bytes=1 << 50)
    bucket = Place(uri="s3://bucket/x")  # whose files have to fit on the disk where they are made
    check_room(bucket, disk_bytes=1 << 60, memory_bytes=0, temporary_bytes=1)
    with pytest.raises(StorageFull, match="are free"):
        check_room(bucket, disk_bytes=0, memory_bytes=0, temporary_bytes=1 << 60)
    assert "are free" in bench("save", "--size", "100000GiB", "--to", tmp_path, code=StorageFull.exit_code).output
    assert [*tmp_path.iterdir()] == []


def test_only_what_is_below_its_own_prefix_is_removed(tmp_path: Path) -> None:
    with opened_place(str(tmp_path), {}) as place, pytest.raises(ValueError, match="not below"):
        place.remove(str(tmp_path))
    with pytest.raises(InvalidInput, match="one process"), opened_place("memory://x", {}):
        pass


@pytest.mark.parametrize(("name", "gib"), [("llama-8b", 105), ("llama-70b", 912), ("llama-405b", 5290)])
def test_presets_have_the_sizes_of_mlperf_storage(name: str, gib: float) -> None:
    assert PRESETS[name].size_bytes / (1 << 30) == pytest.approx(gib, rel=0.04)
    assert state_bytes(name, size_bytes=1, scale=0.5) == PRESETS[name].size_bytes // 2
    with pytest.raises(InvalidInput, match="is none"):
        state_bytes("tensors", size_bytes=1, scale=0.5)


@pytest.mark.parametrize("rank_bytes", [1 << 20, 1 << 30])
def test_a_scaled_preset_keeps_its_tensors_and_about_its_size(rank_bytes: int) -> None:
    found = shapes_of("llama-8b", rank_bytes)
    assert len(found) == 4 * (2 + 32 * 9 + 1)
    size_bytes = sum(dtype.itemsize * math.prod(shape) for shape, dtype in found.values())
    assert 0.8 * rank_bytes < size_bytes < 1.1 * rank_bytes + (64 << 10)


def test_tensors_have_the_size_that_is_asked_for_and_llama_1b_its_146_tensors() -> None:
    assert len(shapes_of("tensors", 1 << 20, 4 << 10)) == 256
    assert len(shapes_of("llama-1b", 1 << 30)) == 146
    assert PRESETS["llama-1b"].size_bytes == 2 * 1_235_814_400
    state = rank_state("tensors", 12 << 10, rank=0, tensor_bytes=4 << 10)
    assert len({tensor.view(torch.uint8).numpy().tobytes() for tensor in state.values()}) == 3


def test_requests_to_the_test_server_wait_when_that_is_asked_for(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    options = ["--to", "s3-sink", "--size", "1MiB", "--shape", "tensors", "--repeat", 1, "--peers", "none"]
    bench("save", *options, "--latency-ms", 50, "--json", told)
    found = measured(told)["save"]
    assert set(found) == {"ckptstore", "ckptstore, first save", "raw requests", "plain sockets"}
    (raw,) = found["plain sockets"]["samples"]
    assert raw["requests"] == 1
    assert raw["total_seconds"] > 0.05
    assert found["ckptstore"]["samples"][0]["total_seconds"] > 0.2, "several requests wait for each other"


def test_unknown_peers_and_sizes_are_refused() -> None:
    assert "does not know tape" in bench("save", "--peers", "tape", code=InvalidInput.exit_code).output
    output = bench("load", "--to", "s3-sink", "--size", "1MiB", code=InvalidInput.exit_code).output
    assert "s3-sink keeps nothing that load could read" in output
    assert "s3-test is no disk" in bench("tier", "--to", "s3-test", code=InvalidInput.exit_code).output
    bench("save", "--size", "many", code=2)
    bench("save", "--size", "2Gb", code=2)
    assert options_of(["save", "--size", "2GB"]).size_bytes == 2 * 10**9
    assert options_of(["save"]).size_bytes == options_of(["save", "--size", "2GiB"]).size_bytes == 2 << 30
    bench("save", "a.json", code=2)


def test_a_secret_is_not_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.tools.cli.output import redacted_command_line

    words = ["ckptstore", "bench", "save", "--to", "s3://me:sesame@bucket/x", "--to=s3://bucket/x?token=sesame"]
    monkeypatch.setattr("sys.argv", words)
    assert redacted_command_line() == "ckptstore bench save --to s3://bucket/x --to=s3://bucket/x"
    monkeypatch.setattr(
        "sys.argv", ["ckptstore", "bench", "--storage-option", "key=sesame", "--storage-option=a=sesame"]
    )
    assert "sesame" not in redacted_command_line()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_workload_runs_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With short curves: each point is a contest in as many processes as there are ranks. The fast tier and the other
    peers have tests of their own."""
    without_tier = tuple(name for name in WORKLOADS if name != "tier")
    monkeypatch.setattr("ckptstore.tools.cli.commands.bench._WORKLOADS", without_tier)
    for name, points in {"REAL_RANKS": (1, 2), "_SIZES": (1,), "_FILE_COUNTS": (10,)}.items():
        monkeypatch.setattr(f"ckptstore.tools.bench.workloads.{name}", points)
    told, shown = tmp_path / "told.json", tmp_path / "shown.html"
    options = ["--size", "8MiB", "--repeat", 1, "--max-ranks", 256, "--latency-ms", 1, "--to", tmp_path / "place"]
    options += ["--peers", "dcp,torch,safetensors,ray,cp"]
    bench("all", *options, "--json", told, "--html", shown)
    found, value = measured(told), json.loads(told.read_text())
    assert {"ckptstore", "DCP FileSystemWriter", "torch.save", "safetensors", "raw disk"} <= set(found["save"])
    assert {"ckptstore", "DCP FileSystemWriter", "torch.save", "safetensors", "raw disk"} <= set(found["load"])
    assert {"ckptstore", "dcp.async_save, thread", "memcpy"} <= set(found["async"])
    assert {"ckptstore", "ckptstore, linked", "Ray Train persist", "cp -r", "raw disk"} <= set(found["directory"])
    assert {"ckptstore", "Ray Train as_directory", "one raw copy"} <= set(found["node-cache"])
    failed = [one for workload in value["workloads"] for one in workload["outcomes"] if one["status"] == "failed"]
    assert failed == []
    assert [point["at"] for point in value["scaling"]["real"]["ranks"]] == [1, 2]
    assert [point["at"] for point in value["scaling"]["real"]["files"]] == [10]
    few, many = [point["requests"] for point in value["scaling"]["simulated"]["points"]]
    # Some requests follow the time, on a busy machine more: none a rank.
    assert 0 < few < 50, "64 ranks cost the storage no request a rank"
    assert many < 50, "256 ranks cost the storage no more than 64"
    assert value["scaling"]["sharded"]["laws"]["told_bytes"]["exponent"] == pytest.approx(1, abs=0.1)
    assert [point["ranks"] for point in value["scaling"]["sharded"]["points"]] == [64, 256]
    assert not (tmp_path / "place").exists()


@pytest.mark.long
def test_two_ranks_on_the_test_server(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    options = ["--size", "24MiB", "--ranks", 2, "--repeat", 1, "--peers", "dcp,s3torchconnector"]
    bench("save", "--to", "s3-test", *options, "--json", told)
    found = measured(told)["save"]
    assert {"ckptstore", "DCP FsspecWriter", "s3torchconnector DCP", "raw requests"} <= set(found)
    for one in found.values():
        (sample,) = one["samples"]
        assert sample["requests"] > 0
        assert sample["sent_bytes"] >= 20 << 20


def test_a_rank_that_writes_slowly_is_seen_in_the_timeline(tmp_path: Path) -> None:
    options = Options(workloads=("save",), peers=("none",), repeat=1, shape="tensors", ranks=2)
    with opened_place(str(tmp_path), {}) as place:
        task = Task(name="save", options=options, place=place, size_bytes=32 << 20, late_rank=1, late_seconds=0.5)
        (workload,) = contests([task], 2, lambda *_: None)
    late: Any = straggler(workload.timeline)
    assert late[0] == 1
    assert late[1] > 0.4
    assert workload.facts["straggler"]["rank"] == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("save", "--tensor-size", "1MiB"), "--tensor-size has no effect on the shape llama-8b"),
        (("save", "--shape", "tensors", "--tensor-size", "1B"), "--tensor-size is below 2 bytes"),
        (("save", "--latency-ms", "5"), "--latency-ms has no effect here"),
        (("save", "--bandwidth-mb", "5"), "--bandwidth-mb has no effect here"),
        (("save", "--drop-caches"), "--drop-caches has no effect here"),
        (("save", "--scale", "0.1"), "--size has no effect beside --scale"),
        (("save", "--peers", "none,dcp"), "--peers none,dcp contradicts itself"),
        (("save", "--storage-option", "key=me"), "--storage-option has no effect here"),
        (("save", "--size", "3B", "--ranks", "2"), "3 bytes are too few"),
    ],
)
def test_what_would_have_no_effect_is_refused(given: tuple[str, ...], message: str, tmp_path: Path) -> None:
    what, *more = given
    assert message in bench(what, "--to", tmp_path / "new", "--size", "1MiB", *more, code=2).output
    assert not (tmp_path / "new").exists()


def test_a_file_that_cannot_be_used_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    floors = tmp_path / "floors.json"
    for text, reason in (
        ("{", "holds no floors"),
        ('{"floors": []}', "it is empty"),
        ('{"floors": [{"workload": "save"}]}', "lacks a field"),
        ('{"floors": [{"workload": "save", "role": "peer", "floor": "high"}]}', "could not convert"),
        ('{"floors": [{"workload": "save", "role": "peers", "floor": 1}]}', "another role"),
        ('{"floors": [{"workload": "save", "role": "peer", "contender": "x", "floor": 1}]}', "a field too many"),
        ('{"floors": [{"workload": "sav", "role": "peer", "floor": 1}]}', "floors of sav, of which no run has ratios"),
        ('{"floors": [{"workload": "ranks", "role": "peer", "floor": 1}]}', "of which no run has ratios"),
    ):
        floors.write_text(text)
        assert reason in bench("save", "--to", tmp_path / "new", "--floors", floors, code=2).output
    for option in ("--json", "--html"):
        output = bench("save", "--to", tmp_path / "new", option, tmp_path / "gone/told", code=2).output
        assert "cannot be written" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["floors.json", "mine"]


def test_a_place_that_cannot_be_used_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file/below"):
        output = bench("save", "--size", "1MiB", "--to", place, code=31).output
        assert "Creating a directory in" in output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_an_upload_that_was_cut_off_left_in_a_bucket_goes_too() -> None:
    with opened_place("s3-test", {}) as place:
        storage = open_storage(f"{place.uri}/turn-1", storage_options=place.storage_options)
        assert isinstance(storage, WritesParts)
        assert isinstance(storage, Bucket)
        size_bytes = storage.part_bytes(1)
        storage.open_parts("a", size_bytes + 1).write_part(0, [memoryview(bytes(size_bytes))])
        assert len(storage.unfinished("")) == 1
        place.remove(place.uri)
        assert storage.unfinished("") == []
        storage.close()


def test_a_peer_that_cannot_find_leaves_the_others_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Finder, directory: Path) -> int:
        raise OSError("no finder")

    (tmp_path / "odd.py").write_text("raise ImportError('another ABI')")
    monkeypatch.syspath_prepend(str(tmp_path))
    ways = {"good": lambda self, directory: len([*directory.iterdir()]) - 1, "broken": broken, "odd": broken}
    kinds: list[Any] = [kind for kind in TABLES["ls"].contenders if kind.role != "peer"]
    for name, newest in ways.items():
        fields = {"family": name, "module": "odd" if name == "odd" else "json", "directory": "{}", "newest": newest}
        kinds.append(type(name, (Finder,), {"name": name, **fields}))
    with opened_place(str(tmp_path / "place"), {}) as place:
        fill(place, 2)
        case = Case(place=place, rank=0, world_size=1, durable=False, num_checkpoints=2)
        found = Contest(case, "save", figure="total_seconds", tell=lambda *_: None).run(kinds, repeat=2)
    by_name = {one.name: one for one in found}
    told = {name: one.status for name, one in by_name.items()}
    measured_ = dict.fromkeys(("ckptstore", "ckptstore, listing", "one listing of the log", "good"), "measured")
    assert told == {**measured_, "broken": "failed", "odd": "skipped"}
    assert by_name["broken"].reason == "rank 0: OSError: no finder"
    assert by_name["odd"].reason == "odd is not installed, or cannot be imported: another ABI"
    assert by_name["ckptstore"].samples[0].requests == 2
    assert by_name["good"].samples[0].retries is None


def test_a_simulation_that_fails_leaves_the_smaller_ones_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(_ranks: int, commit: Any, _directory: str, count: int, *_: Any, **__: Any) -> list[dict[str, Any]]:
        if count > 64:
            raise RanksFailed("no memory", {}, {})
        return [dict.fromkeys((*workloads.SIMULATIONS["simulated"][2], "ranks"), 1.0)]

    monkeypatch.setattr(workloads, "run_ranks", few)
    place = Place(uri=str(tmp_path))
    found = workloads.simulate("simulated", place, 1024, lambda *_: None, latency_seconds=0.0)
    assert [point["ranks"] for point in found["points"]] == [1.0]
    assert found["absent"] == ["failed: commit of 256 simulated ranks: no memory"]
    assert found["absent"][0] in scaling_lines({"simulated": found})
