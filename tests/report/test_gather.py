"""What a report says of real stores is what the other commands say of them, and it changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from seeing import everything, files, look

from ckptstore import CkptstoreError, KeepLatest, open_store
from ckptstore.catalogue import job_of
from ckptstore.errors import AccessDenied, StorageError, StorageUnavailable
from ckptstore.format.digest import ALGORITHMS, DEFAULT
from ckptstore.format.record import sealed
from ckptstore.testing import CountCalls, FailAt, combine, with_faults
from ckptstore.tools.report.gather import Sighting

Commands = Callable[..., Any]


def by_step(seen: Any) -> dict[int, Any]:
    """Its checkpoints, the newest of each step."""
    return {item["step"]: item for item in seen["checkpoints"]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four jobs. The first saved 1 to 5 and pinned 2; what it dropped is deleted. The second saved 6 and 7, rolled back
    to 5, and brought 7 back. The third failed to save 8. The fourth saved 9."""
    root, source = tmp_path / "store", files(tmp_path / "source")
    with open_store(root, retention=KeepLatest(3)) as store:
        for step in (1, 2, 3):
            store.save_directory(step, source, metrics={"loss": 1 / step, "size": float("nan")})
        store.pin(2)
        for step in (4, 5):
            store.save_directory(step, source, metrics={"loss": step})
    with open_store(root, retention=KeepLatest(4), grace_seconds=0) as store:
        store.prune()
    with open_store(root, retention=KeepLatest(9)) as store:
        for step in (6, 7):
            store.save_directory(step, source, metrics={"loss": step})
        store.roll_back(5)
        store.restore(7)
    torn = FailAt("create checkpoints/*", StorageError("no"), times=None)
    kept = FailAt("delete", StorageError("no"), times=None)
    with with_faults(open_store(root), combine(torn, kept)) as bad, suppress(CkptstoreError):
        bad.save_directory(8, source)
    assert torn.struck
    with open_store(root) as store:
        store.save_directory(9, source, metrics={"loss": 0.001})
    return root


def test_a_report_says_what_ls_and_gc_say(root: Path, run: Commands, report: Commands) -> None:
    before = everything(root)
    (seen,) = report(root)["stores"]
    assert everything(root) == before, "a report changes nothing"
    listed = json.loads(run("ls", root, "--trash", "--json").stdout)
    live = [item for item in seen["checkpoints"] if item["status"] == "live"]
    names = ("number", "step", "created_at", "world_size", "size_bytes", "kind", "is_latest", "is_pinned")
    assert [[item[name] for name in names] for item in live] == [
        [item[name] for name in names] for item in listed["checkpoints"]
    ]
    trash = [item for item in seen["checkpoints"] if item["status"] == "trash"]
    assert [(item["number"], item["removed_at"]) for item in trash] == [
        (item["number"], item["removed_at"]) for item in listed["trash"]["checkpoints"]
    ]
    assert all(item["deletes_at"] == item["removed_at"] + listed["trash"]["grace_seconds"] for item in trash)
    assert seen["sizes"][-1]["live_bytes"] == sum(item["size_bytes"] for item in listed["checkpoints"])
    assert seen["sizes"][-1]["trash_bytes"] == listed["trash"]["size_bytes"]
    assert seen["uri"] == listed["uri"]
    assert seen["usage"]["price_per_month"] is None
    (priced,) = report(root, "--price", "20", "--price", f"{root}=23")["stores"]
    usage = json.loads(run("ls", root, "--long", "--price", "23", "--json").stdout)["usage"]
    assert "--price is for s3://, and not" in run("report", root, "--json", "--price", "s3://=23", code=2).output
    assert priced["usage"] == usage
    assert usage["price_per_month"] > 0
    saved = by_step(seen)
    assert saved[9]["provenance"] == json.loads(run("show", f"{root}@9", "--json").stdout)["provenance"]
    assert saved[9]["provenance"]["versions"]["ckptstore"]
    assert saved[1]["provenance"] is None, "its manifest is deleted"
    garbage = json.loads(run("gc", root, "--dry-run", "--json").stdout)
    assert seen["health"]["garbage_bytes"] == garbage["size_bytes"] > 0
    assert [item["attempt"] for item in seen["torn"]] == [item["directory"] for item in garbage["attempts"]]
    assert run("gc", root).stdout.startswith("removed: ")
    (after,) = report(root)["stores"]
    assert (after["torn"], after["health"]["garbage_bytes"]) == ([], 0)


def test_a_report_tells_the_story_of_every_checkpoint(root: Path, report: Commands) -> None:
    (seen,) = report(root)["stores"]
    found = by_step(seen)
    assert {step: item["status"] for step, item in found.items()} == {
        **dict.fromkeys((2, 3, 4, 5, 7, 9), "live"),
        1: "deleted",
        6: "trash",
    }
    assert found[1]["removed_because"] == "no rule keeps it"
    assert found[2]["kept_because"] == ["pinned"]
    assert found[6]["removed_because"] == "roll back to step 5"
    assert found[7]["kept_because"] == ["pinned", "the running job resumed from it"]
    assert found[9]["kept_because"] == ["the latest", "the best by loss"]
    assert found[4]["kept_because"] == ["no retention has dropped it"]
    assert found[5]["resumed_by"] == [2]
    assert found[7]["resumed_by"] == [3, 4]
    assert found[1]["metrics"] == {"loss": 1.0, "size": "NaN"}
    assert seen["metrics"] == ["loss", "size"]
    assert seen["metric_modes"] == {"loss": "min"}
    kinds = [change["kind"] for change in seen["changes"]]
    expected = {"claim": 4, "commit": 8, "pin": 1, "prune": 1, "rollback": 1, "restore": 1}
    assert {kind: kinds.count(kind) for kind in kinds} == expected
    assert [change["number"] for change in seen["changes"]] == [*range(1, len(kinds) + 1)]
    (torn,) = seen["torn"]
    assert (torn["step"], torn["epoch"], torn["in_flight"]) == (8, 3, False)
    assert seen["sizes"][-1]["freed_bytes"] == found[1]["size_bytes"]
    health = seen["health"]
    assert (health["last_durable_step"], health["gaps"], health["trouble"]) == (9, [], [])


def test_the_lines_do_what_they_say(root: Path, run: Commands, report: Commands, tmp_path: Path) -> None:
    """A real shell takes them apart, and then they are run."""
    strange = root.with_name('it\'s $(touch pwned) `touch pwned`; <b>& "x"')
    root.rename(strange)
    script = tmp_path / "bin/ckptstore"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    script.chmod(0o755)
    environment = {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}"}

    def shell(line: str) -> None:
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, check=True)
        words = done.stdout.decode().split("\0")[:-1]
        run(*[str(tmp_path / word) if word == "step-9" else word for word in words])

    (seen,) = report(strange)["stores"]
    found = by_step(seen)
    assert "--number" not in found[6]["commands"]["restore"], "there is one of that step"
    for step, name in ((4, "pin"), (2, "unpin"), (6, "restore"), (9, "cp"), (9, "verify"), (6, "prune")):
        shell(found[step]["commands"][name])
    for name in ("ls", "gc", "verify", "prune"):
        shell(seen["commands"][name])
    (after,) = report(strange)["stores"]
    now = by_step(after)
    assert (now[4]["is_pinned"], now[2]["is_pinned"], now[6]["status"]) == (True, False, "live")
    assert (tmp_path / "step-9/model.pt").exists()
    assert not list(tmp_path.rglob("pwned"))
    assert now[6]["commands"].keys() == {"unpin", "cp", "verify"}, "a later one is pinned"
    assert "rollback" in now[7]["commands"]


def test_who_looks_again_pays_for_what_is_new(root: Path, tmp_path: Path) -> None:
    counted = CountCalls()
    with open_store(root) as writer, with_faults(open_store(root), counted) as store:
        sighting = Sighting(store, rest_seconds=3600)
        first = sighting.look()
        counted.clear()
        assert sighting.look() == first
        assert counted.total <= 3, "whose store it is, the hint, and the record that is not there yet"
        writer.save_directory(10, files(tmp_path / "source"))
        counted.clear()
        again = sighting.look()
        assert again.checkpoints[-1].step == 10
        assert counted.total <= 6, "two records, what comes after them, a manifest"
        assert counted.counts["write"] == counted.counts["delete"] == 0


def test_a_save_that_is_under_way_is_in_flight(tmp_path: Path) -> None:
    root, source = tmp_path / "store", files(tmp_path / "source")
    with open_store(root) as store:
        store.save_directory(1, source)
        epoch = job_of(store).epoch
        directory = root / f"checkpoints/step-0000000002-e{epoch:04d}-0123abcd"
        directory.mkdir()
        (directory / "half").write_bytes(bytes(77))
        (root / "checkpoints/what is this").mkdir()
        seen = look(store)
    torn = {item["attempt"]: item for item in seen["torn"]}
    half = torn[directory.name]
    assert (half["in_flight"], half["step"], half["size_bytes"]) == (True, 2, 77)
    strange = torn["what is this"]
    assert (strange["in_flight"], strange["step"], strange["modified_at"]) == (False, None, None)
    assert "does not know this name" in strange["why"]
    assert seen["health"]["garbage_files"] == 0


def test_who_reads_on_a_disk_is_told(root: Path) -> None:
    with open_store(root) as store, store[5].as_directory(), open_store(root) as other:
        (lease,) = look(other)["health"]["leases"]
        assert lease["number"] == store[5].number
        assert str(os.getpid()) in lease["holder"]
        assert 0 <= lease["age_seconds"] < 600


def state(step: int, *, wide: int = 700) -> dict[str, Any]:
    torch.manual_seed(1)
    tensors = {"big": torch.zeros(wide, wide), "small": torch.ones(3), "moving": torch.full((5,), float(step))}
    tensors["big"][0, 0] = step // 2
    return {"model": tensors, "half": torch.zeros(4, dtype=torch.bfloat16), "epoch": step}


def test_trees_tell_what_diff_tells(
    tmp_path: Path, run: Commands, report: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        for step in (0, 1, 2):
            store.save(step, state(step), metrics={"loss": step})
        store.save(3, state(3, wide=640), incremental=True)
        store.save_directory(4, files(tmp_path / "source"))
    monkeypatch.setenv("CKPTSTORE_DIGEST", next(name for name in ALGORITHMS if name != DEFAULT))
    with open_store(root) as store:
        store.save(5, state(2))
    (seen,) = report(root)["stores"]
    assert seen["health"]["trouble"] == []
    assert len(seen["layouts"]) == 2
    trees = {item["step"]: seen["trees"][str(item["number"])] for item in seen["checkpoints"] if item["step"] != 4}
    assert [trees[step]["layout"] == trees[0]["layout"] for step in (1, 2, 3)] == [True, True, False]
    for a, b in ((0, 1), (0, 2), (1, 2), (2, 3), (2, 5)):
        told = json.loads(run("diff", f"{root}@{a}", f"{root}@{b}", "--json").stdout)["tensors"]
        assert changes(seen, trees[a], trees[b]) == {item["key"]: item["change"] for item in told}
    shown = json.loads(run("show", f"{root}@3", "--tensors", "--json").stdout)["tensors"]
    layout = seen["layouts"][trees[3]["layout"]]
    assert layout["keys"] == [item["key"] for item in shown]
    assert [seen["dtype_names"][at] for at in layout["dtypes"]] == [item["dtype"] for item in shown]
    assert layout["shapes"] == [item["shape"] for item in shown]
    assert layout["size_bytes"] == [item["size_bytes"] for item in shown]
    (fewer,) = report(root, "--trees", 1)["stores"]
    assert list(fewer["trees"]) == [str(item["number"]) for item in seen["checkpoints"] if item["step"] == 5]


def changes(seen: Any, a: Any, b: Any) -> dict[str, str]:
    """The differences of two trees, as the schema says that digests compare."""
    found: dict[str, str] = {}
    rows = []
    for tree in (a, b):
        layout = seen["layouts"][tree["layout"]]
        columns = zip(layout["dtypes"], layout["shapes"], tree["digests"], strict=True)
        rows.append(dict(zip(layout["keys"], columns, strict=True)))
    for key, (dtype, shape, digest) in rows[0].items():
        other_dtype, other_shape, other = rows[1][key]
        if shape != other_shape or dtype != other_dtype:
            found[key] = "shape" if shape != other_shape else "dtype"
        elif digest != other:
            same_place = None not in (digest, other) and digest.partition("/")[0] == other.partition("/")[0]
            found[key] = "changed" if same_place else "unknown"
    return found


@pytest.mark.parametrize("victim", ["ckptstore.json", "tensors.index"])
def test_what_is_damaged_is_named(tmp_path: Path, report: Commands, run: Commands, victim: str) -> None:
    root = tmp_path / "store"
    with open_store(root) as store:
        for step in (1, 2):
            store.save(step, state(step))
        path = Path(store[1].uri) / victim
    if victim == "tensors.index":
        path.unlink()
    else:
        path.chmod(0o644)
        path.write_bytes(b"{}")
    (seen,) = report(root)["stores"]
    (trouble,) = seen["health"]["trouble"]
    assert trouble.startswith("step 1, number 2: ")
    assert list(seen["trees"]) == ["3"]
    assert "trouble: " in run("report", root, "--html", tmp_path / "a.html").stderr


def test_a_log_with_damaged_records_is_still_told(root: Path, report: Commands) -> None:
    (whole,) = report(root)["stores"]
    number = by_step(whole)[3]["number"]
    for broken, text in ((number, b"{torn"), (number + 1, None)):
        path = root / f"log/{broken:010d}.json"
        path.chmod(0o644)
        path.unlink() if text is None else path.write_bytes(text)
    (seen,) = report(root)["stores"]
    assert [change["kind"] for change in seen["changes"]].count("unreadable") == 2
    assert len(seen["health"]["gaps"]) == 2
    assert 3 not in by_step(seen)
    known = {step: item["status"] for step, item in by_step(whole).items() if step != 3}
    assert {step: item["status"] for step, item in by_step(seen).items()} == known
    assert any("garbage could not be told" in text for text in seen["health"]["trouble"])


def test_the_newest_record_may_be_the_damaged_one(root: Path, report: Commands) -> None:
    path = max((root / "log").iterdir())
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:99])
    (root / "latest.json").unlink()
    (seen,) = report(root)["stores"]
    assert seen["changes"][-1]["kind"] == "unreadable"
    assert "its bytes are not those that were written" in seen["health"]["gaps"][0]
    assert by_step(seen)[7]["is_latest"]


def test_a_state_that_the_changes_do_not_lead_to_is_told(root: Path, report: Commands, run: Commands) -> None:
    path = max((root / "log").iterdir())
    record = json.loads(path.read_bytes())
    number = int(path.stem)
    record["state"]["live"] = str(number)
    record["state"].pop("pinned")
    path.chmod(0o644)
    del record["body_sha256"]
    path.write_bytes(sealed(json.dumps(record).encode()))
    (root / "latest.json").unlink()
    (seen,) = report(root)["stores"]
    assert "has a state that the changes before it do not lead to" in seen["health"]["gaps"][0]
    assert [item["number"] for item in seen["checkpoints"] if item["status"] == "live"] == [number]
    listed = json.loads(run("ls", root, "--json").stdout)["checkpoints"]
    assert [item["number"] for item in listed] == [number], "what the newest record says counts for everybody"


def test_no_right_to_list_is_told(root: Path) -> None:
    denied = FailAt("list checkpoints/*", AccessDenied("not for you"), times=None)
    with with_faults(open_store(root), denied) as store:
        seen = look(store)
    (trouble,) = seen["health"]["trouble"]
    assert "could not be listed" in trouble
    assert "not for you" in trouble
    assert len(seen["checkpoints"]) == 8
    assert seen["health"]["stored_bytes"] is None


def test_a_storage_that_fails_for_a_while_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "1")
    root = tmp_path / "store"
    with open_store(root) as store:
        store.save(1, state(1))
    flaky = FailAt("read checkpoints/*", StorageUnavailable("not now"), times=1)
    with with_faults(open_store(root), flaky) as store:
        sighting = Sighting(store)
        assert len(sighting.look().health.trouble) == 1
        again = sighting.look()
        assert again.health.trouble == ()
        assert list(again.trees) == ["2"]


def test_a_log_that_is_lost_beside_its_checkpoints_is_told(root: Path, report: Commands) -> None:
    shutil.rmtree(root / "log")
    (root / "latest.json").unlink()
    (seen,) = report(root)["stores"]
    assert seen["health"]["gaps"] == ["log/0000000001.json is missing, and so is every other record"]


@pytest.mark.parametrize("what", ["empty", "claimed", "no-store", "ray", "file"])
def test_where_there_is_little_or_nothing(tmp_path: Path, run: Commands, report: Commands, what: str) -> None:
    root = tmp_path / "store"
    if what in ("empty", "claimed"):
        with open_store(root) as store:
            if what == "empty":
                job_of(store).store_id()
            else:
                store.resume({})
        (seen,) = report(root)["stores"]
        assert (seen["checkpoints"], seen["health"]["last_durable_at"], seen["sizes"]) == ([], None, [])
        assert len(seen["changes"]) == (what == "claimed")
        return
    if what == "ray":
        root.mkdir()
        (root / "store.json").write_text('{"version":1,"store_id":"ab","kept_by":"ray","created_at":1}')
    if what == "file":
        root.write_text("no directory")
    error = run("report", root, "--html", tmp_path / "a.html", code={"ray": 2, "file": 10, "no-store": 10}[what])
    assert error.stderr.startswith("error: ")
    assert not (tmp_path / "a.html").exists()


def test_several_stores_in_one_report(root: Path, tmp_path: Path, run: Commands, report: Commands) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    one, other = report(root, copy)["stores"]
    assert (one["uri"], other["uri"]) == (str(root), str(copy))
    assert one["store_id"] == other["store_id"]
    one, missing = report(root, tmp_path / "nothing", code=10)["stores"]
    assert len(one["checkpoints"]) == 8
    assert missing["health"]["trouble"][0].startswith("store-missing: ")
    assert "named twice" in run("report", root, root, "--json", code=2).stderr


def test_a_store_in_memory(tmp_path: Path) -> None:
    with ExitStack() as stack:
        store = stack.enter_context(open_store("memory://seen"))
        store.save(1, state(1))
        seen = look(store)
    assert seen["checkpoints"][0]["commands"] == {}
    assert seen["commands"] == {}
    assert len(seen["trees"]) == 1
    assert "no lines to copy" in seen["health"]["trouble"][0]
