"""When local storage says durable, the system was told to make it so: files, directories, and never twice."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.errors import StorageError
from ckptstore.storage.disk import posix
from ckptstore.storage.disk.local import LocalStorage

MIB = 1 << 20


def views(*items: bytes) -> list[memoryview]:
    return [memoryview(item) for item in items]


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


class Spy:
    """Records the paths of fsyncs, in order, and still does them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flushed: list[str] = []
        self.filesystems = 0
        real_fsync, real_filesystem = os.fsync, posix.flush_filesystem

        def fsync(descriptor: int) -> None:
            self.flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            real_fsync(descriptor)

        def flush_filesystem(path: str) -> bool:
            self.filesystems += 1
            return real_filesystem(path)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(posix, "flush_filesystem", flush_filesystem)


def test_create_is_durable_with_all_directories_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    root = tmp_path / "new" / "root"
    LocalStorage(root).create("log/1.json", b"x")
    assert spy.flushed[0].startswith(f"{root}/log/.ckptstore-tmp-"), "the file itself comes first"
    assert set(spy.flushed[1:]) == {f"{root}/log", str(root), str(tmp_path / "new"), str(tmp_path)}


def test_persist_flushes_files_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path / "root")
    storage.write("a/b/one", views(b"1"))
    storage.write("a/two", views(b"2"))
    spy = Spy(monkeypatch)
    storage.persist(["a/b/one", "a/two"])
    root = str(tmp_path / "root")
    below = {f"{root}/{name}" for name in ("a", "a/b", "a/b/one", "a/two")}
    assert set(spy.flushed) == {*below, root, str(tmp_path)}
    assert spy.filesystems == 0


def test_many_files_are_flushed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    keys = [f"a/{number}" for number in range(100)]
    storage.write_many([(key, views(b"x")) for key in keys])
    spy = Spy(monkeypatch)
    storage.persist(keys)
    if not posix.flush_filesystem(str(tmp_path)):
        assert {f"{tmp_path}/{key}" for key in keys} <= set(spy.flushed)
    assert {f"{tmp_path}/a", str(tmp_path)} <= set(spy.flushed)


def test_many_files_are_flushed_one_by_one_where_all_at_once_promises_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    keys = [f"a/{number}" for number in range(40)]
    storage.write_many([(key, views(b"x")) for key in keys])
    spy = Spy(monkeypatch)
    monkeypatch.setattr(posix, "flush_filesystem", lambda path: False)
    storage.persist(keys)
    assert {f"{tmp_path}/{key}" for key in keys} <= set(spy.flushed)


def test_parts_are_flushed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    spy = Spy(monkeypatch)
    writer = storage.open_parts("a/big", 2 * MIB)
    writer.write_part(MIB, views(bytes(MIB)))
    writer.write_part(0, views(bytes(MIB)))
    writer.finish()
    assert spy.flushed == [f"{tmp_path}/a/big"]
    storage.persist(["a/big"])
    assert spy.flushed.count(f"{tmp_path}/a/big") == 1
    assert f"{tmp_path}/a" in spy.flushed


def test_nothing_is_flushed_when_that_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path, durable=False)
    spy = Spy(monkeypatch)
    storage.create("log/1.json", b"x")
    storage.write("log/1.json", views(b"y"))
    writer = storage.open_parts("a/big", MIB)
    writer.write_part(0, views(bytes(MIB)))
    writer.finish()
    storage.persist(["log/1.json", "a/big"])
    assert spy.flushed == []
    assert spy.filesystems == 0


def test_a_failed_flush_of_parts_is_never_retried(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(descriptor: int) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    writer = storage.open_parts("a/big", 4)
    writer.write_part(0, views(b"data"))
    monkeypatch.setattr(os, "fsync", stale)
    with pytest.raises(StorageError) as caught:
        writer.finish()
    assert not caught.value.retryable
    writer.abort()
    assert list(storage.list("")) == []


def test_a_file_system_that_cannot_flush_directories_is_usable(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many in user space: their fsync of a directory is EINVAL. An error of a file is never passed over."""
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    storage.write("a/file", views(b"x"))
    storage.persist(["a/file"])
    assert storage.create("log/1.json", b"x")

    def invalid(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", invalid)
    with pytest.raises(StorageError):
        storage.persist(["a/file"])


def test_a_record_has_its_name_once_all_that_it_stands_for_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    with ckptstore.open_store(root, group="solo") as store:
        store.save(1, {"w": torch.ones(3), "large": torch.ones(MIB)})
        flushed: list[str] = []
        before: dict[str, list[str]] = {}
        real_fsync, real_link, real_rename = os.fsync, os.link, os.rename

        def fsync(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            real_fsync(descriptor)
            flushed.append(path)

        def link(source: str, target: str, **more: Any) -> None:
            before[str(target)] = [str(source), *flushed]
            real_link(source, target, **more)

        def rename(source: str, target: str) -> None:
            before[str(target)] = [*flushed]
            real_rename(source, target)

        for name, function in (("fsync", fsync), ("link", link), ("rename", rename)):
            monkeypatch.setattr(os, name, function)
        saved = store.save(2, {"w": torch.ones(3), "large": torch.ones(MIB)})
    manifest, record = before  # nothing else is given a name or waits for one, not the hint either
    source, *done = before[record]
    directory = Path(saved.uri)
    assert (Path(manifest).parent, Path(record).parent) == (directory, root / "log")
    written = {str(path) for path in directory.iterdir()} - {manifest}
    assert written | {before[manifest][0], source, str(directory), str(directory.parent)} <= set(done)
    assert done.index(before[manifest][0]) < len(done) - 1 - done[::-1].index(str(directory)), "its name is durable too"
    assert flushed[-1] == str(root / "log")
    assert json.loads((root / "latest.json").read_bytes())["number"] == int(Path(record).stem)


def test_a_hint_that_shrinks_leaves_nothing_of_the_old_one(storage: LocalStorage, tmp_path: Path) -> None:
    storage.write("latest.json", views(b"a long one"))  # by a version that made it read-only
    storage.overwrite("latest.json", b"short")
    assert (tmp_path / "root" / "latest.json").read_bytes() == b"short"
