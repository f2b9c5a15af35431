"""An export, or a pull, in the place of another one: the old one or the new one is there, whole, at every moment."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_disks import overlaid

import ckptstore
from ckptstore import Checkpoint, InvalidInput, StorageError, open_store
from ckptstore.extensions.exchange.replacing import finish_replacement, replace_directory
from ckptstore.interchange import export
from ckptstore.storage.disk import posix

KINDS = ("safetensors", "torch", "dcp")
CHANGES = frozenset({"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod"})


def refused(*_: object) -> None:
    raise OSError(errno.EINVAL, "no exchange on this file system")


def held(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def tree(directory: Path, word: str) -> Path:
    (directory / "deep").mkdir(parents=True)
    (directory / "f").write_text(word)
    (directory / "deep" / "g").write_text(word)
    (directory / f"only-{word}").write_text(word)
    return directory


def killed_at(at: int, work: Callable[[], object], *, below: Path) -> bool:
    """Do some work in a child that is killed at a change of the disk; True if it was done before that one."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal count
            if event in CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT):
                count += str(args[0]).startswith(str(below))
            if count > at:
                os._exit(99)

        sys.addaudithook(hook)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 99)
    return code == 0


@pytest.fixture(params=["exchange", "two renames", "item by item"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways to replace a directory, as file systems allow them."""
    if request.param != "exchange":
        monkeypatch.setattr(posix, "exchange", refused)
    if request.param == "item by item":
        rename = os.rename

        def layered(source: Any, target: Any) -> None:
            if Path(source).name in ("out", "deep"):
                raise OSError(errno.EXDEV, "of another layer")
            rename(source, target)

        monkeypatch.setattr(os, "rename", layered)
    return str(request.param)


def test_a_directory_is_replaced_or_it_is_not(tmp_path: Path, way: str) -> None:
    made, target, aside = tree(tmp_path / "made", "new"), tree(tmp_path / "out", "old"), tmp_path / "aside"
    old, new = held(target), held(made)
    at, done = -1, False
    while not done:
        at += 1
        work = tmp_path / "work"
        shutil.copytree(tmp_path, work, ignore=shutil.ignore_patterns("work"))
        names = [work / path.name for path in (made, target, aside)]
        done = killed_at(at, partial(replace_directory, *names[:2], aside=names[2]), below=work)
        if way == "exchange":
            assert held(work / "out") in (old, new)
        finish_replacement(*names[:2], aside=names[2])
        assert held(work / "out") == new if done else held(work / "out") in (old, new)
        shutil.rmtree(work)
    assert at >= {"exchange": 0, "two renames": 2, "item by item": 6}[way]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[list[Checkpoint]]:
    """Two, of one model."""
    with open_store(tmp_path / "store") as store:
        for step in (1, 2):
            store.save(step, {"m": {"w": torch.full((1000,), float(step))}})
        yield list(store)


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
@pytest.mark.parametrize("has_exchange", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_export_that_is_killed_leaves_one_and_the_next_finds_the_rest(
    tmp_path: Path, checkpoints: list[Checkpoint], kind: str, has_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_exchange:
        monkeypatch.setattr(posix, "exchange", refused)
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "config.json").write_text("{}")
    options: dict[str, Any] = {"to": kind, "overwrite": True, "beside": tmp_path / "beside"}
    place = tmp_path / "place"
    users = tree(place / f".out.replaced-{'ab' * 4}", "mine")
    before, whole = held(users), []
    for checkpoint in checkpoints:
        export(checkpoint, place / "out", **options)
        whole.append(held(place / "out"))
    done, at = False, 0
    while not done:
        again = partial(export, checkpoints[at % 2], place / "out", **options)
        done = killed_at(at, again, below=place)
        if has_exchange:
            assert held(place / "out") in whole, f"killed at change {at}"
        else:
            assert not (place / "out").exists() or held(place / "out") in whole
        again()
        assert held(place / "out") == whole[at % 2]
        assert {path.name for path in place.iterdir()} == {"out", users.name}, f"killed at change {at}"
        at += 1
    assert at > 3
    assert held(users) == before


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_named_like_a_part_of_an_export_stays(tmp_path: Path, checkpoints: list[Checkpoint], kind: str) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_text("mine")
    (tmp_path / ".out.export-0123abcd").write_text("mine")
    if kind == "safetensors":
        with pytest.raises(InvalidInput, match=r"model\.safetensors, and no export has begun there"):
            export(checkpoints[0], tmp_path / "out", to=kind)
    else:
        export(checkpoints[0], tmp_path / "out", to=kind)
    assert (tmp_path / ".out.partial" / "model.safetensors").read_text() == "mine"
    assert (tmp_path / ".out.export-0123abcd").read_text() == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_a_user_adds_meanwhile_stays(
    tmp_path: Path, checkpoints: list[Checkpoint], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(checkpoints[0], tmp_path / "out", to=kind)
    exchange = posix.exchange

    def late(made: Path, target: Path) -> None:
        (target / "notes.txt").write_text("mine")
        exchange(made, target)

    monkeypatch.setattr(posix, "exchange", late)
    export(checkpoints[1], tmp_path / "out", to=kind, overwrite=True)
    assert [path.read_text() for path in tmp_path.rglob("notes.txt")] == ["mine"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_of_an_image_is_replaced(tmp_path: Path, checkpoints: list[Checkpoint], kind: str) -> None:
    export(checkpoints[0], tmp_path / "image" / "out", to=kind)
    export(checkpoints[1], tmp_path / "new", to=kind)
    with overlaid(tmp_path / "image", tmp_path / "layers") as merged:
        export(checkpoints[1], merged / "out", to=kind, overwrite=True)
        assert held(merged / "out") == held(tmp_path / "new")
        assert [path.name for path in merged.iterdir()] == ["out"]


def test_a_model_of_an_image_is_pulled_anew(tmp_path: Path) -> None:
    with ckptstore.open_publication(tmp_path / "published") as publication:
        publication.publish(1, {"w": torch.ones(500)})
        with ckptstore.Subscription(tmp_path / "published", tmp_path / "image" / "out") as subscription:
            subscription.apply()
        (tmp_path / "image" / "out" / "notes.txt").write_text("mine")
        publication.publish(2, {"w": torch.zeros(500)})
    with overlaid(tmp_path / "image", tmp_path / "layers") as merged:
        with ckptstore.Subscription(tmp_path / "published", merged / "out") as subscription:
            assert subscription.apply().version == 2
        assert (merged / "out" / "notes.txt").read_text() == "mine"
        assert sorted(path.name for path in (merged / ".out.ckptstore").iterdir()) == ["lock"]


def test_a_disk_that_fails_leaves_the_export_before(
    tmp_path: Path, checkpoints: list[Checkpoint], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(checkpoints[0], tmp_path / "out", to="torch")
    before, rename = held(tmp_path / "out"), os.rename

    def fails(source: Any, to: Any) -> None:
        if Path(to).name == "out" and ".partial" in Path(source).name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(to))
        rename(source, to)

    monkeypatch.setattr(posix, "exchange", refused)
    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(StorageError, match="Input/output error"):
        export(checkpoints[1], tmp_path / "out", to="torch", overwrite=True)
    assert held(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]
