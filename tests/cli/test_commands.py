"""Every command does to a real store what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ckptstore import Checkpoint, InvalidInput, InvalidMetric, KeepAll, KeepWeights, open_store
from ckptstore.retention import KeepBest, KeepLatest
from ckptstore.runtime.shown import show_duration, show_size
from ckptstore.tools.cli import main
from ckptstore.tools.cli.command import Best, CommandTarget, find_target, parse_target
from ckptstore.tools.cli.options import parse_storage_options


def steps(root: Path) -> list[int]:
    with open_store(root) as store:
        return [checkpoint.step for checkpoint in store]


def flip(root: Path, step: int, name: str = "model.pt") -> None:
    """Change one byte of a stored file."""
    with open_store(root) as store:
        path = Path(store[step].uri.removeprefix("file://")) / name
    os.chmod(path, 0o644)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def test_ls_shows_live_checkpoints_and_the_bytes_in_the_trash_and_writes_nothing(
    run: Any, run_json: Any, store: Path, tmp_path: Path
) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in store.rglob("*"))
    lines = run("ls", store).stdout.splitlines()
    assert sorted((path, path.stat().st_mtime_ns) for path in store.rglob("*")) == before
    assert lines[0].split()[:3] == ["number", "step", "created"]
    assert [line.split()[1] for line in lines[1:3]] == ["20", "30"]
    assert "loss=0.25" in lines[1]
    assert lines[2].endswith("latest")
    assert lines[3].startswith("1 more in the trash, 2.9 KiB")
    (tmp_path / "empty").mkdir()
    shutil.copy(store / "store.json", tmp_path / "empty")
    assert run("ls", tmp_path / "empty").stdout == "no checkpoints\n"
    assert run_json("ls", tmp_path / "empty")["checkpoints"] == []


def test_ls_has_columns_order_and_a_limit(run: Any, run_json: Any, tmp_path: Path) -> None:
    root, source = tmp_path / "many", tmp_path / "source"
    source.mkdir()
    (source / "f").write_bytes(bytes(3000))
    with open_store(root, retention=KeepLatest(3)) as opened:
        for step, loss in ((1, 9.0), (2, 0.5), (3, 0.25), (4, 0.75)):
            others = {f"metric_{number}": number / 3 for number in range(9)}
            opened.save_directory(step, source, metrics={"loss": loss, **others})

    def listed(*options: str) -> list[int]:
        found = [item["step"] for item in run_json("ls", root, *options)["checkpoints"]]
        lines = [line.split() for line in run("ls", root, *options).stdout.splitlines()[1 : len(found) + 1]]
        assert [int(line[1]) for line in lines] == found
        return found

    assert (listed(), listed("-n", "2")) == ([2, 3, 4], [3, 4])
    assert (listed("--sort", "loss"), listed("--sort=-loss", "-n", "1")) == ([3, 2, 4], [4])
    assert (listed("--sort", "step", "-n", "1"), listed("--sort=-number")) == ([2], [4, 3, 2])
    lines = run("ls", root, "--trash").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "loss=0.5 metric_0=0 +8" in lines[1]
    assert lines[1].split()[3:5] == ["s", "ago"]
    assert lines[-1].split() == ["2", "1", "2.9", "KiB", "in", "60", "min"]
    assert [item["step"] for item in run_json("ls", root, "--trash")["trash"]["checkpoints"]] == [1]
    table = run("ls", root, "--metric", "loss", "--metric", "metric_1").stdout.splitlines()
    assert table[0].split()[5:] == ["loss", "metric_1", "marks"]
    assert "0.333333" in table[1]
    assert run("ls", root, "-n", "1").stdout.splitlines()[2] == "2 more are live"
    assert "did you mean 'loss'" in run("ls", root, "--metric", "los", code=2).stderr


def test_ls_in_json_has_what_protects_a_checkpoint(run: Any, run_json: Any, store: Path) -> None:
    run("pin", f"{store}@20")
    found = run_json("ls", store)
    marks = [(item["step"], item["is_pinned"], item["is_latest"]) for item in found["checkpoints"]]
    assert marks == [(20, True, False), (30, False, True)]
    assert found["trash"] == {"count": 1, "size_bytes": 3002, "grace_seconds": 3600.0}
    with open_store(store) as opened:
        opened.save_directory(40, None, metrics={"loss": float("nan")})
    assert run_json("ls", store)["checkpoints"][-1]["metrics"] == {"loss": {"$t": "float", "v": "NaN"}}


def test_ls_of_a_parent_lists_the_stores_below(
    run: Any, run_json: Any, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(store, tmp_path / "deep/er/copy")
    shutil.copytree(store, store / "inside")
    (tmp_path / "broken/store.json").parent.mkdir()
    (tmp_path / "broken/store.json").write_text("no")
    lines = run("ls", tmp_path).stdout.splitlines()
    assert lines[0].split() == ["store", "checkpoints", "latest", "created"]
    assert [line.split()[0] for line in lines[1:]] == [
        f"{tmp_path}/{name}" for name in ("broken", "deep/er/copy", "store")
    ]
    assert "checkpoint-damaged" in lines[1]
    assert lines[3].split()[1:3] == ["2", "30"]
    found = run_json("ls", tmp_path)
    assert [(item["num_checkpoints"], item["latest_step"]) for item in found["stores"]] == [(0, None), (2, 30), (2, 30)]
    assert found["is_all"]
    assert "There is no store" in run("ls", tmp_path, "--trash", code=10).stderr
    assert "There is no store" in run("ls", tmp_path / "nowhere", code=10).stderr
    monkeypatch.setattr("ckptstore.tools.cli.commands.looking.MOST_LISTED", 2)
    cut = run("ls", tmp_path)
    assert len(cut.stdout.splitlines()) < len(lines)
    assert "there may be more" in cut.stderr


def test_show_has_metrics_metadata_and_files(run: Any, run_json: Any, store: Path) -> None:
    text = run("show", f"{store}@20").stdout
    assert "loss=0.25" in text
    assert ["metadata.epoch", "20"] in [line.split() for line in text.splitlines()]
    found = run_json("show", f"{store}@20")
    assert found["metadata"] == {"epoch": 20, "nested": {"seed": 1}}
    assert [(item["name"], item["size_bytes"], item["rank"]) for item in found["files"]] == [
        ("config.json", 2, 0),
        ("model.pt", 3000, 0),
    ]


def test_show_and_diff_say_what_program_saved(
    run: Any, run_json: Any, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--name", "two words\x1b[2J", "--token", "abc"])
    with open_store(tmp_path / "other") as other:
        other.save_directory(20, None)
    with open_store(tmp_path / "silent", provenance=False) as silent:
        silent.save_directory(20, None)
    shown = run("show", tmp_path / "other").stdout
    assert "command line train.py --name 'two words\\x1b[2J' --token '***'" in " ".join(shown.split())
    assert "python version" in shown
    found = run_json("show", tmp_path / "other")["provenance"]
    assert found["argv"][-2:] == ["--token", "***"]
    assert found["num_hosts"] == 1
    assert run_json("show", tmp_path / "silent")["provenance"] is None
    differs = run_json("diff", f"{store}@20", tmp_path / "other")["provenance"]
    assert [(item["name"], item["b"].split()[0]) for item in differs if item["name"] != "commit"] == [
        ("command line", "train.py")
    ]
    lines = run("diff", f"{store}@20", tmp_path / "other").stdout.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("command")] == [["command", "line"]]
    lacking = run_json("diff", tmp_path / "other", tmp_path / "silent")["provenance"]
    assert {"command line", "hosts", "python version"} <= {item["name"] for item in lacking if item["b"] is None}
    assert run_json("diff", tmp_path / "silent", tmp_path / "silent")["provenance"] == []


def test_latest_and_best_print_a_uri_that_works(run: Any, store: Path) -> None:
    for arguments, step in ((("latest", store), 30), (("best", store, "loss"), 20)):
        uri = run(*arguments).stdout.strip()
        assert Checkpoint.from_uri(uri).step == step
    assert run("best", store, "loss", "--mode", "max").stdout != run("best", store, "loss").stdout


def test_a_checkpoint_is_no_place_for_a_store(run: Any, store: Path, tmp_path: Path) -> None:
    uri = run("latest", store).stdout.strip()
    for command in (("ls", uri), ("watch", uri), ("prune", uri), ("doctor", uri)):
        assert f"is a checkpoint, not a store. Its store is {store}" in run(*command, code=2).stderr
    for path in (uri, f"{uri}/", f"file://{uri}"):
        with pytest.raises(InvalidInput, match=f"Its store is {store}$"):
            open_store(path)
    run("cp", f"{store}@20", tmp_path / "alone")
    before = sorted((tmp_path / "alone").rglob("*"))
    with open_store(tmp_path / "alone") as opened, pytest.raises(InvalidInput, match="no store can be made in it"):
        opened.save_directory(1, None)
    with open_store(tmp_path / "alone") as opened, pytest.raises(InvalidInput, match="no store can be made in it"):
        opened.resume()
    assert sorted((tmp_path / "alone").rglob("*")) == before


def test_verify_names_what_is_wrong_and_fails(run: Any, run_json: Any, store: Path) -> None:
    assert run("verify", store).stdout.startswith("step 30: ok, 2 of 2 files read")
    flip(store, 20)
    assert "step 30: ok" in run("verify", store).stdout
    text = run("verify", "--all", store, code=3).stdout
    assert "step 20: DAMAGED" in text
    assert "model.pt: flipped, expected" in text
    found = run_json("verify", f"{store}@20", code=3)
    assert found["ok"] is False
    assert [(item["file"], item["fault"]) for item in found["reports"][0]["problems"]] == [("model.pt", "flipped")]
    (report,) = run_json("verify", store, "--sample", "50%")["reports"]
    assert (report["num_files"], report["num_read"]) == (2, 1)
    (victim,) = (store / "checkpoints").glob("step-0000000020-*/model.pt")
    victim.unlink()
    assert "model.pt: missing" in run("verify", "--all", store, code=3).stdout


def test_verify_all_checks_the_log(run: Any, store: Path) -> None:
    record = sorted((store / "log").iterdir())[1]
    os.chmod(record, 0o644)
    record.write_text(record.read_text().replace('"created_at":1', '"created_at":2', 1))
    assert "log: " in run("verify", "--all", store, code=3).stdout


def test_diff_names_files_metrics_and_metadata(run: Any, run_json: Any, store: Path) -> None:
    found = run_json("diff", f"{store}@20", f"{store}@30")
    assert found["files"] == [{"name": "model.pt", "change": "changed", "a_bytes": 3000, "b_bytes": 3000}]
    assert found["num_equal_files"] == 1
    assert found["metrics"] == [{"name": "loss", "a": 0.25, "b": 0.75}]
    assert found["metadata"] == [{"name": "epoch", "a": 20, "b": 30}]
    text = run("diff", f"{store}@20", f"{store}@30").stdout
    assert "files: 1 differ, 1 equal" in text
    assert "model.pt  changed  2.9 KiB  2.9 KiB" in text
    assert [line.split() for line in text.splitlines() if line.startswith(("loss", "epoch"))] == [
        ["loss", "0.25", "0.75", "0.5"],
        ["epoch", "20", "30", "10"],
    ]
    same = run_json("diff", f"{store}@20", f"{store}@20")
    assert (same["files"], same["metrics"], same["metadata"], same["num_equal_files"]) == ([], [], [], 2)


def test_on_a_terminal_of_80_columns_a_row_is_a_line(
    run: Any, store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metrics = {"an_accuracy_of_a_very_long_benchmark": 1 / 3, "train/loss": 0, "a_throughput_on_a_very_long_set": 2 / 7}
    key = "optimizer." + "inner." * 12 + "exp_avg_sq"
    rules = ("--keep", "latest=2", "best=2:train/loss:min", "every=1", "--dry-run")
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])  # `show` prints a command line whole
    with open_store(store) as opened:
        for step in (1_000_001, 1_000_002):
            opened.save(step, {key: torch.full((3,), float(step))}, metrics={**metrics, "train/loss": 1 / step})
    a, b = (f"{store}@{step}" for step in (1_000_001, 1_000_002))
    commands: list[tuple[object, ...]] = [("ls", store), ("ls", tmp_path), ("ls", "--trash", store), ("show", a)]
    commands += [("ls", store, "--metric", "train/loss", "--metric", max(metrics, key=len)), ("prune", store, *rules)]
    commands += [("diff", a, b), ("diff", "--values", a, b), ("show", a, "--tensors"), ("watch", "--once", store)]
    whole = run("diff", a, b).stdout
    assert key in whole
    assert re.search(r"train/loss +9.99999e-07 +9.99998e-07 +-9.99997e-13\n", whole)
    monkeypatch.setenv("COLUMNS", "80")
    for module in ("output", "terminal"):
        monkeypatch.setattr(f"ckptstore.tools.cli.{module}.is_terminal", lambda stream: True)
    for command in commands:
        lines = [line for line in run(*command).stdout.splitlines() if not line.startswith(("uri", "metrics"))]
        assert [line for line in lines if len(line) > 80] == [], command
    assert run("ls", store).stdout.splitlines()[4].split()[8].startswith("train/loss=")
    assert re.search(r"optimizer.*….*exp_avg_sq +changed +float32 3\n", run("diff", a, b).stdout)


def test_no_name_in_a_store_controls_the_terminal(run: Any, tmp_path: Path) -> None:
    evil = "red\x1b[31m\nline"
    root = tmp_path / f"runs{evil}"
    with open_store(root) as opened:
        for step in (1, 2):
            state = {evil: torch.full((3,), float(step)), "list": [step]}
            opened.save(step, state, metrics={evil: step}, metadata={evil: evil, "nested": {evil: step}})
    commands: list[tuple[object, ...]] = [("ls", tmp_path), ("ls", root, "--metric", evil), ("show", root, "--tensors")]
    commands += [("verify", root), ("diff", "--values", f"{root}@1", f"{root}@2"), ("ls", root), ("show", root)]
    commands += [("show", root, "--timings"), ("prune", root, "--keep", "latest=1", "--dry-run")]
    for command in commands:
        text = run(*command).stdout
        assert "\x1b" not in text, command
        assert "\nline" not in text, command
    assert r"red\x1b[31m" in run("show", f"{root}2", code=10).stderr


def test_cp_of_a_store_keeps_order_pins_and_bytes(run: Any, run_json: Any, store: Path, tmp_path: Path) -> None:
    run("pin", f"{store}@20")
    found = run_json("cp", store, tmp_path / "copy")
    assert (found["copied_steps"], found["num_copied"], found["copied_bytes"]) == ([20, 30], 4, 6004)
    assert steps(tmp_path / "copy") == [20, 30]
    assert "step 20: ok" in run("verify", "--all", tmp_path / "copy").stdout
    assert run_json("ls", tmp_path / "copy")["checkpoints"][0]["is_pinned"] is True


def test_cp_goes_on_where_it_broke_off(run: Any, run_json: Any, store: Path, tmp_path: Path) -> None:
    run("cp", f"{store}@20", tmp_path / "alone")
    (tmp_path / "alone/ckptstore.json").unlink()
    os.chmod(tmp_path / "alone/model.pt", 0o644)
    (tmp_path / "alone/model.pt").write_bytes(b"torn")
    found = run_json("cp", f"{store}@20", tmp_path / "alone")
    assert (found["num_copied"], found["num_found"]) == (1, 1)
    copy = Checkpoint.from_directory(tmp_path / "alone")
    assert (copy.step, copy.metrics, copy.verify().ok) == (20, {"loss": 0.25}, True)
    assert run("verify", tmp_path / "alone").stdout.startswith("step 20: ok")
    run("cp", store, tmp_path / "copy")
    assert run_json("cp", store, tmp_path / "copy")["present_steps"] == [20, 30]


def test_cp_refuses_what_is_damaged(run: Any, store: Path, tmp_path: Path) -> None:
    flip(store, 20)
    run("cp", f"{store}@20", tmp_path / "alone", code=3)
    run("show", tmp_path / "alone", code=10)


def test_every_command_keeps_to_its_schema(run_json: Any, store: Path, tmp_path: Path) -> None:
    """`run_json` checks; here every command that prints JSON is called once."""
    for arguments in (
        ("ls", store),
        ("show", store),
        ("latest", store),
        ("best", store, "loss"),
        ("verify", "--all", store),
        ("diff", f"{store}@20", f"{store}@30"),
        ("cp", store, tmp_path / "copy"),
        ("pin", f"{store}@20"),
        ("unpin", f"{store}@20"),
        ("rollback", f"{store}@20"),
        ("ls", "--trash", store),
        ("restore", f"{store}@30"),
        ("prune", "--keep", "latest=1", "--grace", 0, store),
        ("gc", store),
        ("watch", "--once", store),
    ):
        assert run_json(*arguments)["version"] == 1


def test_restore_folder_says_what_it_did(run: Any, run_json: Any, store: Path, tmp_path: Path) -> None:
    assert "did not come from a folder" in run("restore-folder", store, tmp_path / "new", code=5).stderr
    home = {"name": "mine_40", "shape": "pattern", "is_directory": True, "beside": {}, "fingerprint": ""}
    with open_store(store) as opened:
        opened.save_directory(40, tmp_path / "source", metadata={"folder": home})
        opened.save_directory(50, tmp_path / "source")
    lines = run("restore-folder", store, tmp_path / "new").stdout.splitlines()
    assert lines == [
        "passed over: step 50 did not come from a folder",
        "step 40 is restored as mine_40: 3,002 bytes fetched, 0 were there",
    ]
    (tmp_path / "new" / "mine_40" / "config.json").write_text("[]")
    found = run_json("restore-folder", store, tmp_path / "new", "--step", 40)["restored"]
    assert (found["fetched_bytes"], found["kept_bytes"]) == (2, 3000)
    assert (tmp_path / "new" / "mine_40" / "config.json").read_text() == "{}"
    (tmp_path / "new" / "mine_60").mkdir()
    (tmp_path / "new" / "mine_60" / "weights").write_bytes(b"")
    asked = ("--pattern", "mine_*", "--marker", "DONE")
    moved = run("restore-folder", store, tmp_path / "new", *asked).stdout.splitlines()[1]
    assert moved.startswith(f"moved aside: mine_60 → {tmp_path}/.ckptstore-new/aside/")
    run("restore-folder", store, tmp_path / "new", "--pattern", "/mine_*", code=2)
    run("restore-folder", store, tmp_path / "new", "--step", 99, code=4)
    run("restore-folder", tmp_path / "nothing", tmp_path / "new", code=10)
    run("restore-folder", store, tmp_path / "source" / "model.pt", code=2)


def test_pin_protects_and_unpin_gives_back(run: Any, store: Path) -> None:
    run("pin", f"{store}@20")
    run("prune", store, "--keep", "latest=1")
    assert steps(store) == [20, 30]
    run("unpin", f"{store}@20")
    run("prune", store, "--keep", "latest=1")
    assert steps(store) == [30]


def test_restore_brings_back_from_the_trash_and_pins(run: Any, run_json: Any, store: Path) -> None:
    done = run("restore", f"{store}@10").stdout.splitlines()
    assert done == ["step 10 is live again", f"it is pinned; `ckptstore unpin {store}@10` gives it back to retention"]
    run("prune", store, "--keep", "latest=1", "--grace", 0)
    assert steps(store) == [10, 30]
    run("verify", f"{store}@10")
    run("restore", f"{store}@20", code=4)
    assert run_json("rollback", f"{store}@10")["trashed_steps"] == [30]
    assert "/step-0000000010-" in run("latest", store).stdout
    found = run_json("restore", "--no-pin", f"{store}@30")
    assert (found["checkpoint"]["step"], found["is_pinned"], found["is_latest"]) == (30, False, True)


def test_restore_names_what_can_be_restored(run: Any, store: Path) -> None:
    assert "there is: 10 (number 2)" in run("restore", f"{store}@40", code=4).stderr
    assert "Step 30 is live" in run("restore", f"{store}@30", code=2).stderr
    assert "STORE@STEP" in run("restore", f"{store}@latest", code=2).stderr
    assert "number 99" in run("restore", f"{store}@10", "--number", 99, code=4).stderr


def test_the_trash_says_when_its_space_is_free(run: Any, run_json: Any, store: Path) -> None:
    text = run("ls", "--trash", store).stdout
    assert "`ckptstore restore STORE@STEP` brings one back" in text
    assert "`ckptstore prune` deletes them after 60 min there: 0 now, all in 60 min" in text
    assert text.splitlines()[-1].split() == ["2", "10", "2.9", "KiB", "in", "60", "min"]
    found = run_json("ls", "--trash", store)["trash"]
    assert found["grace_seconds"] == 3600
    assert abs(found["checkpoints"][0]["removed_at"] - time.time()) < 600
    assert "a prune frees 2.9 KiB more in 60 min, or with --grace 0 now" in run("prune", store).stdout


def test_prune_waits_for_the_grace_period(run: Any, run_json: Any, store: Path) -> None:
    assert "10  in the trash  2.9 KiB, may be deleted in 60 min" in run("prune", store).stdout
    plan = run_json("prune", store, "--grace", 0, "--dry-run")
    assert [item["step"] for item in plan["removed"]] == [10]
    assert len(list((store / "checkpoints").iterdir())) == 3
    assert run_json("prune", store, "--grace", 0)["removed_bytes"] == plan["removed_bytes"] == 3002
    assert len(list((store / "checkpoints").iterdir())) == 2
    assert run("prune", store, "--grace", 0).stdout == "nothing to delete\n"


def test_prune_refuses_a_metric_that_no_checkpoint_has(run: Any, store: Path) -> None:
    refused = run("prune", store, "--keep", "best=1:lss:min", "--grace", 0, code=2)
    assert "No live checkpoint has the metric 'lss'; did you mean 'loss'?" in refused.stderr
    with open_store(store) as opened:
        assert [checkpoint.step for checkpoint in opened] == [20, 30]
        with pytest.raises(InvalidMetric, match="lss"):
            opened.retain(KeepLatest(1) | KeepBest(1, "lss", "min"), dry_run=True)
    with open_store(store.with_name("young")) as opened:  # nothing has been evaluated there yet
        for step in (1, 2, 3):
            opened.save(step, {"n": step})
        verdicts = opened.retain(KeepLatest(2) | KeepBest(1, "loss", "min"))
        assert [verdict.keep for verdict in verdicts] == [False, True, True]
        with pytest.raises(InvalidMetric, match="loss"):
            opened.retain(KeepBest(1, "loss", "min"))


def test_prune_applies_a_policy_and_says_why(run: Any, run_json: Any, store: Path) -> None:
    plan = run_json("prune", store, "--keep", "latest=1", "--dry-run")
    assert [(item["step"], item["keep"]) for item in plan["verdicts"]] == [(20, False), (30, True)]
    assert steps(store) == [20, 30]
    assert run_json("prune", store, "--dry-run", "--keep", "latest=1", "best=1:loss:min")["verdicts"][0]["keep"]
    assert run_json("prune", store, "--dry-run", "--keep=latest=1", "best=1:loss:min")["verdicts"][0]["keep"]
    kept = run("prune", store, "--keep", "best=1:loss:min", "--grace", 0).stdout
    assert "20  keep      one of the best 1 by loss (min)" in kept
    assert steps(store) == [20, 30], "never the latest"
    assert "20  to the trash  no rule keeps it" in run("prune", store, "--keep", "latest=1").stdout
    assert steps(store) == [30]


def test_gc_leaves_the_attempts_of_a_job_that_may_live(run: Any, run_json: Any, store: Path) -> None:
    orphan = store / "checkpoints/step-0000000040-e0001-00000000"
    orphan.mkdir()
    (orphan / "model.pt").write_bytes(b"torn")
    assert [item["name"] for item in run_json("gc", store)["left"]] == [f"checkpoints/{orphan.name}"]
    assert run_json("gc", store, "--claim", "--dry-run")["attempts"] == [{"directory": orphan.name, "size_bytes": 4}]
    assert orphan.exists()
    assert f"removed: {orphan.name}, 4 B" in run("gc", store, "--claim").stdout
    assert not orphan.exists()
    assert run("gc", store).stdout == "nothing to remove\n"
    assert steps(store) == [20, 30]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("runs/a", CommandTarget("runs/a", None)),
        ("runs/a@12", CommandTarget("runs/a", 12)),
        ("s3://b/r@latest", CommandTarget("s3://b/r", "latest")),
        (
            "abfs://box@account.dfs.core.windows.net/run",
            CommandTarget("abfs://box@account.dfs.core.windows.net/run", None),
        ),
        ("runs/try@3@latest", CommandTarget("runs/try@3", "latest")),
        ("runs/a@best", CommandTarget("runs/a@best", None)),
        ("runs/a@best:loss", CommandTarget("runs/a", Best("loss"))),
        ("runs/a@best:a:b:max", CommandTarget("runs/a", Best("a:b", "max"))),
        ("runs/a@best:recall@5", CommandTarget("runs/a", Best("recall@5"))),
        ("@3", CommandTarget("@3", None)),
        ("runs/a\nb@3", CommandTarget("runs/a\nb", 3)),
        (f"runs/a@{5000 * '9'}", CommandTarget(f"runs/a@{5000 * '9'}", None)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_target_is_read_in_one_way(text: str, target: CommandTarget) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize("text", ["s3://bucket@3", "az://box@latest", "abfs://box@acc.dfs.core.windows.net@7"])
def test_a_store_may_be_a_whole_bucket(text: str) -> None:
    assert find_target(text, {}) == parse_target(text)
    assert parse_target(text).step is not None


def test_the_best_is_a_target_wherever_one_is_asked_for(run: Any, run_json: Any, store: Path, tmp_path: Path) -> None:
    assert run_json("show", store)["checkpoint"]["step"] == 30
    assert run_json("show", f"{store}@best:loss")["checkpoint"]["step"] == 20
    assert run_json("show", f"{store}@best:loss:max")["checkpoint"]["step"] == 30
    assert run_json("cp", f"{store}@best:loss", tmp_path / "copy")["copied_steps"] == [20]
    run("pin", f"{store}@best:loss")
    assert [item["is_pinned"] for item in run_json("ls", store)["checkpoints"]] == [True, False]
    assert "did you mean 'loss'" in run_json("diff", f"{store}@best:los", store, code=2)["error"]["message"]


def test_show_has_tensors_in_json(run_json: Any, tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as opened:
        opened.save(1, {"w": np.ones(1), "t": torch.ones(2, 3)})
    (found,) = run_json("show", tmp_path / "s", "--tensors")["tensors"]
    assert run_json("show", "--tensors", f"{tmp_path / 's'}@latest")["tensors"] == [found]
    assert (found["key"], found["dtype"], found["shape"], found["size_bytes"]) == ("t", "float32", [2, 3], 24)
    assert "tensors" not in run_json("show", tmp_path / "s")


def test_show_has_timings(run: Any, run_json: Any, store: Path) -> None:
    with open_store(store) as opened:
        timings = opened[20].timings
    assert timings is not None
    found = run_json("show", f"{store}@20", "--timings")
    assert found["timings"] == timings.to_json()
    assert "timings" not in run_json("show", f"{store}@20")
    lines = [line.split() for line in run("show", f"{store}@20", "--timings").stdout.splitlines()]
    node, upload = timings.ranks[0].node, f"{timings.phases['upload'].median:.3f}"
    assert ["upload", *[upload, "s"] * 3, "rank", "0", "on", node] in lines
    assert any(line[:2] == ["0", node] and line[-2:] == [str(timings.requests), "0"] for line in lines)
    assert "model.pt" not in run("show", f"{store}@20", "--timings").stdout, "in place of the files"


def test_show_of_what_has_no_timings(run: Any, run_json: Any, tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as opened:
        path = Path(opened.save(1, {"t": torch.ones(2)}).uri)
    manifest = path / "ckptstore.json"
    for timings in (None, {"seconds": "<script>"}, [1] * 1000):
        fields = {**json.loads(manifest.read_text()), "timings": timings}
        alone = tmp_path / f"alone-{len(str(timings))}"
        shutil.copytree(path, alone)
        os.chmod(alone / "ckptstore.json", 0o644)
        (alone / "ckptstore.json").write_text(json.dumps(fields))
        assert run_json("show", alone)["checkpoint"]["step"] == 1
        run("verify", alone)
        error = run_json("show", alone, "--timings", code=2)["error"]
        assert "has no timings: it was saved by an older version" in error["message"]
    assert "Ask for one" in run_json("show", tmp_path / "s", "--timings", "--tensors", code=2)["error"]["hint"]


def test_storage_options_are_nested_and_typed() -> None:
    texts = ("key=01", "anon:=true", "client_kwargs.endpoint_url=http://h:1/?a=b", "client_kwargs.verify:=false")
    assert parse_storage_options(texts) == {
        "key": "01",
        "anon": True,
        "client_kwargs": {"endpoint_url": "http://h:1/?a=b", "verify": False},
    }


@pytest.mark.parametrize("text", ["hunter2", "=hunter2", "secret:=hunter2", ":=hunter2"])
def test_a_bad_storage_option_is_refused_without_its_value(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_storage_options((text,))
    assert "hunter2" not in str(caught.value)


def test_sizes_and_durations_are_for_people() -> None:
    sizes = [show_size(size) for size in (0, 1023, 1024, 5 << 20, 3 << 60)]
    assert sizes == ["0 B", "1023 B", "1.0 KiB", "5.0 MiB", "3072.0 PiB"]
    durations = [show_duration(seconds) for seconds in (5, 119, 120, 7200, 400000)]
    assert durations == ["5 s", "119 s", "2 min", "2 h", "5 days"]


def test_what_is_called_like_a_target_is_found_and_never_mixed_up(run_json: Any, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_text("x")
    for name, step in (("run@3", 7), ("both", 3), ("both@3", 8)):
        with open_store(tmp_path / name) as opened:
            opened.save_directory(step, tmp_path / "a")
    for text in ("run@3", "run@3@7", "run@3@latest"):
        assert run_json("show", tmp_path / text)["checkpoint"]["step"] == 7
    assert run_json("cp", tmp_path / "run@3", tmp_path / "copy@1")["copied_steps"] == [7]
    assert steps(tmp_path / "copy@1") == [7]
    assert [item["step"] for item in run_json("ls", tmp_path / "copy@1")["checkpoints"]] == [7]
    for command in (("show",), ("verify",), ("cp", tmp_path / "new")):
        error = run_json(command[0], tmp_path / "both@3", *command[1:], code=2)["error"]
        assert "something that is called" in error["message"]
    assert run_json("show", tmp_path / "both@3@latest")["checkpoint"]["step"] == 8


def test_rm_puts_one_in_the_trash_or_asks_for_all(run: Any, run_json: Any, store: Path) -> None:
    with open_store(store) as opened:
        live = [item.step for item in opened]
        pinned = [entry.checkpoint.step for entry in opened.entries() if entry.is_pinned]
    latest = live[-1]
    assert "was not removed: the latest" in run("rm", f"{store}@latest", code=2).output
    assert "names no checkpoint" in run("rm", store, code=2).output
    assert "--all means a store" in run("rm", "--all", f"{store}@{latest}", code=2).output
    found = run_json("rm", "--force", f"{store}@{latest}")
    assert (found["trashed_steps"], found["latest_step"]) == ([latest], live[-2])
    run("restore", "--no-pin", f"{store}@{latest}")
    for step in pinned:
        run("unpin", f"{store}@{step}")
    asked = CliRunner().invoke(main, ["rm", "--all", str(store)], input="n\n")
    assert (asked.exit_code, f"Put all {len(live)} checkpoints of" in asked.stderr) == (1, True)
    assert "Give --yes" in run("rm", "--all", "--json", store, code=2).output
    with open_store(store) as opened:
        assert [item.step for item in opened] == live
    text = run("rm", "--all", "--yes", store).output
    assert "the next start begins at the beginning" in text
    assert f"ckptstore prune --grace 0 {store}" in text


def test_a_listing_has_what_the_store_takes(run: Any, run_json: Any, store: Path) -> None:
    held = {"live_bytes": 6004, "trash_bytes": 3002, "bytes_per_day": None}
    used = run_json("ls", store, "--long", "--price", 1e9)["usage"]
    assert used == {**held, "price_per_month": pytest.approx(9.006)}
    assert "5.9 KiB live, 2.9 KiB in the trash; 9.01 per month" in run("ls", store, "--long", "--price", 1e9).stdout
    assert "usage" not in run_json("ls", store)
    run("ls", store, "--price", 1, code=2)


def test_thin_drops_the_optimizer_and_the_others_show_it(run: Any, run_json: Any, tmp_path: Path) -> None:
    root, model = tmp_path / "store", torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    with open_store(root, retention=KeepAll() | KeepWeights(KeepAll(), ("optimizer*", "model.bias"))) as opened:
        for step in (1, 2, 3):
            model(torch.ones(300)).sum().backward()
            optimizer.step()
            opened.save(step, {"model": model, "optimizer": optimizer})
    dry = run_json("thin", f"{root}@1", "--drop", "optimizer.*", "--dry-run")
    assert (dry["dry_run"], dry["number"], run_json("show", f"{root}@1")["checkpoint"]["thinned"]) == (True, None, None)
    done = run("thin", f"{root}@1", "--drop", "optimizer.*").stdout.splitlines()
    assert done[0].startswith(f"step 1 without optimizer.*: {dry['num_keys']} keys, ")
    assert done[1:] == [
        f"the whole one is in the trash; `ckptstore restore {root}@1` brings it back",
        f"`ckptstore prune --grace 0 {root}` frees {done[2].rpartition(' frees ')[2]}",
    ]
    assert "was not thinned: the latest" in run("thin", f"{root}@latest", "--drop", "optimizer.*", code=2).stderr
    assert "without optimizer.*" in run("ls", root).stdout.splitlines()[1]
    assert re.search(r"^dropped +optimizer\.\*, at 2", run("show", f"{root}@1").stdout, re.MULTILINE)
    rows = run_json("prune", root, "--keep", "latest=2", "weights:every=1", "--dry-run")["verdicts"]
    assert [(row["keep"], row["drops"]) for row in rows] == [(True, ["optimizer*"]), (True, []), (True, [])]
    run("prune", root, "--keep", "latest=1", "weights:every=1")
    thinned = [False, False, True]
    assert [item["thinned"] is None for item in run_json("ls", root)["checkpoints"]] == thinned
    removed = run_json("prune", root, "--grace", "0")
    assert (len(removed["removed"]), removed["left"]) == (2, [])
    assert "thinned: without optimizer*" in run("verify", "--all", root).stdout.splitlines()[1]
    assert "b was thinned at 2" in run("diff", f"{root}@3", f"{root}@2").stdout
    assert "without optimizer" in run("watch", "--once", root).stdout
    assert run("follow", root, "--timeout", "0", "--cursor", "a").stdout.count("\n") == 3
    run("thin", f"{root}@2", "--drop", "model.bias")
    assert run("follow", root, "--timeout", "0", "--cursor", "a").stdout == ""
    run("restore", f"{root}@2", "--no-pin")
    run("rollback", f"{root}@2", code=2)
    run("cp", root, tmp_path / "copy")
    assert [item["thinned"] is None for item in run_json("ls", tmp_path / "copy")["checkpoints"]] == thinned
    assert "there already: 3" in run("cp", root, tmp_path / "copy").stdout


def test_verify_all_goes_on_after_a_checkpoint_that_is_gone(run: Any, run_json: Any, store: Path) -> None:
    next(store.glob("checkpoints/step-0000000020-*/ckptstore.json")).unlink()
    lines = run("verify", "--all", store, code=3).stdout.splitlines()
    assert lines[1] == "  ckptstore.json: missing, expected the committed one, found nothing"
    assert [line.partition(",")[0] for line in (lines[0], *lines[2:])] == ["step 20: DAMAGED", "step 30: ok", "log: ok"]
    found = run_json("verify", "--all", store, code=3)
    assert [report["ok"] for report in found["reports"]] == [False, True]


def test_verify_all_goes_on_after_a_record_that_is_gone(run: Any, store: Path) -> None:
    (store / "log" / "0000000003.json").unlink()
    lines = run("verify", "--all", store, code=3).stdout.splitlines()
    assert lines[0].startswith("step 30: ok")
    assert lines[1:] == ["log: log/0000000003.json is missing, or, in a replica, not here yet"]


def test_verify_all_says_that_there_was_nothing_to_check(run: Any, store: Path) -> None:
    with open_store(store) as opened:
        opened.remove_all()
    assert run("verify", "--all", store).stdout == "no checkpoints\nlog: ok\n"


def test_names_of_files_move_no_terminal_and_may_be_no_unicode(run: Any, run_json: Any, store: Path) -> None:
    with open(os.fsencode(next(store.glob("checkpoints/step-0000000020-*"))) + b"/a\x1b[2J\xff", "wb"):
        """Somebody put a file there."""
    (store / "checkpoints" / "b\x1b[2J").write_text("x")
    assert "  a\\x1b[2J\\udcff: extra, expected nothing" in run("verify", f"{store}@20", code=3).stdout
    assert run_json("verify", f"{store}@20", code=3)["reports"][0]["problems"][0]["file"] == "a\x1b[2J\\udcff"
    assert "left: checkpoints/b\\x1b[2J: " in run("gc", "--dry-run", store).stdout


def test_a_place_whose_name_is_no_unicode_is_printed_as_its_bytes(store: Path) -> None:
    place = os.fsencode(store.parent) + b"/a\xff"
    shutil.copytree(os.fsencode(store), place)
    command, how = [sys.executable, "-m", "ckptstore", "latest", place], {"capture_output": True, "check": True}
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    plain, json_ = (subprocess.run([*command, *more], env=environment, **how).stdout for more in ([], ["--json"]))
    assert os.path.isfile(plain.strip() + b"/ckptstore.json")
    assert b"a\\\\udcff/checkpoints/" in json_
