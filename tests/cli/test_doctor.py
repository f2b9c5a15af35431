"""`ckptstore doctor` on disks: what it finds, that it leaves nothing, and its exit code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptstore.format.layout import record_key
from ckptstore.format.record import sealed
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.tools.doctor import examination, of_node, of_store


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_CACHE_DIR", str(tmp_path_factory.mktemp("cache") / "mine"))


def statuses(found: Any) -> dict[str, str]:
    return {finding["name"]: finding["status"] for finding in found["findings"]}


def test_a_good_disk_is_left_as_it_was(run: Any, run_json: Any, store: Path, tmp_path: Path) -> None:
    before = files_below(store)
    found = run_json("doctor", store)
    assert found["ok"]
    assert found["engine"] == "local"
    assert set(statuses(found).values()) <= {"ok", "warning"}, found
    details = {finding["name"]: finding["detail"] for finding in found["findings"]}
    assert "3 live" in details["log"] or "2 live" in details["log"]
    assert files_below(store) == before
    text = run("doctor", store).stdout
    assert "conditional create" in text
    assert statuses(run_json("doctor", tmp_path / "new/deep/er"))["log"] == "warning"
    assert not (tmp_path / "new").exists()


def test_a_store_that_cannot_be_resumed_is_never_good(run: Any, run_json: Any, store: Path) -> None:
    assert "each has all its files" in run("doctor", store).stdout
    (cut,) = store.glob("checkpoints/step-0000000030-*/model.pt")
    cut.chmod(0o600)
    cut.write_bytes(b"short")
    assert statuses(run_json("doctor", store, code=3))["checkpoints"] == "failed"
    text = run("doctor", store, code=3).stdout
    assert "1 of 2 live ones are damaged: step 30: model.pt has 5 bytes" in text
    assert "A job resumes from step 20" in text
    for lost in ("log", "store.json"):
        (store / lost).rename(store / "lost")
        assert f"the store has lost its {lost}" in run("doctor", store, code=3).stdout
        (store / "lost").rename(store / lost)


def test_the_files_of_a_run_that_ray_keeps_are_looked_at(run: Any, store: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    for number, attempt in enumerate(sorted(store.glob("checkpoints/step-*"))):
        shutil.copytree(attempt, place / f"checkpoint_{number:06d}")
    identity = json.loads((store / "store.json").read_text())
    (place / "store.json").write_text(json.dumps({**identity, "kept_by": "ray"}))
    count = len([*place.glob("checkpoint_*")])
    assert f"{count} live, each has all its files" in run("doctor", place).stdout
    lost = place / f"checkpoint_{count - 1:06d}/model.pt"
    lost.unlink()
    text = run("doctor", place, code=3).stdout
    assert f"1 of {count} live ones are damaged: {lost.parent.name}: model.pt is missing" in text
    assert f"The newest that has its files is checkpoint_{count - 2:06d}" in text


def test_a_place_that_cannot_be_written(run_json: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    found = run_json("doctor", tmp_path / "file" / "store", code=31)
    assert not found["ok"]
    assert statuses(found)["put"] == "failed"
    assert statuses(found)["throughput"] == "unknown"
    assert statuses(run_json("doctor", "memory://doctor"))["durability"] == "warning", "no place to stay"
    assert run_json("doctor", "nosuchscheme://x/y", code=2)["error"]["code"] == "invalid-input", "no finding"
    if os.geteuid() != 0:  # root may write everywhere
        (tmp_path / "mine").mkdir(mode=0o500)
        assert statuses(run_json("doctor", tmp_path / "mine", code=32))["put"] == "failed"


def test_a_broken_log_is_found(run: Any, run_json: Any, store: Path) -> None:
    record = store / record_key(2)
    record.chmod(0o600)
    record.write_bytes(sealed(record.read_bytes().replace(b'"epoch"', b'"epoch" ')))
    found = run_json("doctor", store, code=12)
    assert statuses(found)["log"] == "failed"
    assert record_key(3) in run("doctor", store, code=12).stdout


def test_an_interrupt_leaves_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = LocalStorage.write

    def interrupted(*arguments: Any) -> None:
        write(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStorage, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        examination.examine(str(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_an_error_of_the_system_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(storage: Any) -> None:
        raise OSError(5, "Input/output error", "the list")

    (tmp_path / "fast").mkdir(mode=0o700)
    too_long = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="x" * 300))
    monkeypatch.setattr(of_node, "uuid", too_long)  # for which no file can be created
    monkeypatch.setattr(of_store, "read_snapshot", broken)
    found = examination.examine(str(tmp_path / "store"), fast_directory=str(tmp_path / "fast"))
    failed = {finding.name: finding.detail for finding in found.findings if finding.status == "failed"}
    assert failed["list of Ray Train"] == "Input/output error: the list"
    assert failed["fast locks"].startswith("File name too long: ")


def test_it_fits_the_terminal_and_folds_no_command(run: Any, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.tools.cli.commands import checking

    wide = run("doctor", store).stdout
    assert max(map(len, wide.splitlines())) > 80
    monkeypatch.setattr(checking, "is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "80")
    hint = "aws s3api put-bucket-lifecycle-configuration " + "x" * 80
    found = examination.examine(str(store))
    more = examination.Finding("warning", "none", hint, name="rule")
    told = examination.Examination(uri=found.uri, engine=found.engine, findings=(*found.findings, more))
    lines = checking.lines_of(told)
    assert [line for line in lines if len(line) > 80] == [line for line in lines if hint in line] != []
    assert " ".join(" ".join(lines).split()).count("reads the bytes") == 1
