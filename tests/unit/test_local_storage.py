"""What local storage promises beyond the contract that all storages share: races, links, errors."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_disks import mounted

from ckptstore import open_store
from ckptstore.errors import (
    AccessDenied,
    FileMissing,
    InvalidInput,
    InvalidName,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from ckptstore.storage.base import Shortage, Unsupported
from ckptstore.storage.disk import posix
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.probe import has_exclusive_create
from ckptstore.storage.second_look import created

MIB = 1 << 20


def views(*items: bytes) -> list[memoryview]:
    return [memoryview(item) for item in items]


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "8m") as place:
        yield place


def test_a_link_whose_reply_was_lost_is_ones_own(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    real_link = os.link

    def lost(source: str, target: str) -> None:
        real_link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", lost)
    assert storage.create("log/1.json", b"mine")
    assert not storage.create("log/1.json", b"other")
    assert storage.read("log/1.json") == b"mine"


def test_without_hard_links_a_rename_decides(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: str, target: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    assert storage.create("log/1.json", b"first")
    assert not storage.create("log/1.json", b"second")
    assert storage.read("log/1.json") == b"first"
    assert os.listdir(storage.local_path("log")) == ["1.json"]


def test_without_links_and_renames_create_says_so(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(posix, "_call", refused)
    with pytest.raises(Unsupported, match="neither hard links nor renames"):
        storage.create("log/1.json", b"first")
    assert os.listdir(storage.local_path("log")) == []
    assert not has_exclusive_create(storage)
    assert created(storage, "cursors/a.json", b"whole")
    with pytest.raises(InvalidInput, match="single_writer=True"), open_store(storage.uri, group="solo") as store:
        store.save(1, {"a": 1})
    with open_store(storage.uri, group="solo", single_writer=True) as store:
        store.save(1, {"a": 1})
        store.annotate(1, {"loss": 0.5})
    with open_store(storage.uri, group="solo", single_writer=True) as store:
        assert store.resume({"a": 0}).step == 1
        store.save(2, {"a": 2})
        assert [found.step for found in store] == [1, 2]


def test_an_existing_file_is_replaced_atomically(storage: LocalStorage) -> None:
    """Readers that hold the old file keep all of it; there is no moment with a part of the new one."""
    storage.write("latest.json", views(b"old"))
    with storage.local_path("latest.json").open("rb") as before:
        storage.write("latest.json", views(b"n", b"", b"ew and longer"))
        assert before.read() == b"old"
    assert storage.read("latest.json") == b"new and longer"
    storage.write_many([("latest.json", views(b"third")), ("new", views(b"")), ("deep/er", views(b"1", b"2"))])
    assert [storage.read(key) for key in ("latest.json", "new", "deep/er")] == [b"third", b"", b"12"]
    assert len(list(storage.list(""))) == 3


def test_more_buffers_than_one_call_takes(storage: LocalStorage) -> None:
    data = os.urandom(5000)
    pieces = [memoryview(data)[at : at + 2] for at in range(0, 5000, 2)]
    storage.write("one", pieces)
    storage.write_many([("two", pieces)])
    assert storage.read("one") == storage.read("two") == data
    target = bytearray(5000)
    storage.read_into("one", 0, [memoryview(target)[at : at + 1] for at in range(5000)])
    assert target == data


def test_a_call_that_moves_less_than_it_was_asked_to_goes_on(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, real_read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, items, at: real_write(fd, [items[0][:3]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, items, at: real_read(fd, [items[0][:2]], at))
    storage.write("key", views(b"0123456", b"", b"789"))
    target = [memoryview(bytearray(4)), memoryview(bytearray(0)), memoryview(bytearray(6))]
    storage.read_into("key", 0, target)
    assert b"".join(target) == b"0123456789"


def test_a_listing_shows_neither_links_nor_what_is_being_written(storage: LocalStorage) -> None:
    storage.write("a/file", views(b"x"))
    a = storage.local_path("a")
    (a / ".ckptstore-tmp-1-abc").write_bytes(b"torn")
    (a / "link").symlink_to(a / "file")
    (a / "circle").symlink_to(a)
    os.mkfifo(a / "pipe")
    assert [file.key for file in storage.list("")] == ["a/file"]
    assert [file.key for file in storage.list("a/f")] == ["a/file"]
    with pytest.raises(FileMissing):
        storage.stat("a/link")
    with pytest.raises(FileMissing):
        storage.read("a/pipe")
    with pytest.raises(StorageError):
        storage.read("a/link")
    with pytest.raises(InvalidName):
        storage.write("a/.ckptstore-tmp-1-abc", views(b""))


def test_a_listing_survives_what_vanishes_meanwhile(storage: LocalStorage) -> None:
    keys = [f"{letter}/{number}" for letter in "abcdef" for number in range(50)]
    storage.write_many([(key, views(b"x")) for key in keys])
    listing = storage.list("")
    first = next(listing)
    shutil.rmtree(storage.local_path(""))
    assert {first.key, *(file.key for file in listing)} <= set(keys)


def test_directories_of_an_attempt_go_with_torn_files(storage: LocalStorage) -> None:
    storage.write("checkpoints/one/a/b/file", views(b"x"))
    storage.write("checkpoints/two/file", views(b"x"))
    (storage.local_path("checkpoints/one/a") / ".ckptstore-tmp-1-abc").write_bytes(b"torn")
    storage.remove_directories("checkpoints/one")
    assert storage.read("checkpoints/one/a/b/file") == b"x", "a file keeps its directories"
    storage.delete(["checkpoints/one/a/b/file"])
    storage.remove_directories("checkpoints/one")
    storage.remove_directories("checkpoints/never/was")
    assert os.listdir(storage.local_path("checkpoints")) == ["two"]


def test_a_directory_that_others_remove_meanwhile_is_made_again(storage: LocalStorage) -> None:
    stop = threading.Event()

    def remove() -> None:
        while not stop.is_set():
            storage.remove_directories("leases")

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for number in range(100):
            with contextlib.suppress(FileMissing):  # lost the race many times in a row: told, not torn
                storage.create(f"leases/{number}.json", b"x")
                storage.delete([f"leases/{number}.json"])
    finally:
        stop.set()
        thread.join()
    assert list(storage.list("leases/")) == []


def test_a_link_shares_the_inode_and_leaves_it_writable(storage: LocalStorage, tmp_path: Path) -> None:
    source = tmp_path / "users own file"
    source.write_bytes(b"data")
    assert storage.link([(source, "a/linked")]) == [True]
    assert storage.read("a/linked") == b"data"
    assert source.stat().st_mode & 0o200, "the user may go on writing to it"
    assert storage.link([(source, "a/linked")]) == [True], "an existing key is replaced"
    with pytest.raises(FileMissing):
        storage.link([(tmp_path / "missing", "a/other")])


def test_a_directory_of_many_links_is_looked_at_once(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [(tmp_path / "source" / f"{number}", f"a/b/{number}") for number in range(100)]
    (tmp_path / "source").mkdir()
    for path, _ in files:
        path.write_bytes(b"data")
    looked_at: list[object] = []
    real_lstat = os.lstat

    def lstat(path: str) -> os.stat_result:
        looked_at.append(path)
        return real_lstat(path)

    monkeypatch.setattr(os, "lstat", lstat)
    assert storage.link(files) == [True] * 100
    assert len(looked_at) < 10
    assert {file.key for file in storage.list("")} == {key for _, key in files}


def test_a_link_to_another_file_system_is_told(storage: LocalStorage, small_disk: Path) -> None:
    (small_disk / "file").write_bytes(b"data")
    assert storage.link([(small_disk / "file", "a/linked")]) == [False]
    assert list(storage.list("")) == []


@pytest.mark.parametrize("refusal", [None, errno.EXDEV, errno.EOPNOTSUPP, 0])
def test_a_copy_inside_has_every_byte(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, refusal: int | None
) -> None:
    """Also where the kernel does not copy, and where it says that it copied nothing."""
    data = os.urandom(3 * MIB + 5)
    storage.write("a/file", views(data))

    def refused(*_: object) -> int:
        if refusal:
            raise OSError(refusal, os.strerror(refusal))
        return 0

    if refusal is not None:
        monkeypatch.setattr(os, "copy_file_range", refused)
    storage.copy("a/file", "b/copy")
    storage.copy("a/file", "b/copy")
    assert storage.read("b/copy") == data
    with pytest.raises(FileMissing) as caught:
        storage.copy("a/missing", "b/copy")
    assert caught.value.file == "a/missing"
    assert storage.read("b/copy") == data


def test_a_copy_of_a_file_that_shrinks_is_an_error(storage: LocalStorage, tmp_path: Path) -> None:
    storage.write("file", views(b"data"))
    with (
        storage.local_path("file").open("rb") as source,
        (tmp_path / "copy").open("wb") as target,
        pytest.raises(OSError, match="shorter"),
    ):
        posix.copy_contents(source.fileno(), target.fileno(), 5)


def test_a_stored_file_cannot_be_written_and_can_be_deleted(storage: LocalStorage) -> None:
    storage.write("a/file", views(b"x"))
    assert storage.local_path("a/file").stat().st_mode & 0o222 == 0
    storage.delete(["a/file"])
    assert list(storage.list("")) == []


def test_it_travels_as_its_path(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    relative = LocalStorage("somewhere", durable=False)
    copy = pickle.loads(pickle.dumps(relative))
    assert copy.uri == relative.uri == str(tmp_path / "somewhere")
    copy.write("key", views(b"x"))
    monkeypatch.chdir("/")
    assert relative.read("key") == b"x"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EACCES, AccessDenied),
        (errno.EROFS, AccessDenied),
        (errno.ENOENT, FileMissing),
        (errno.ESTALE, StorageUnavailable),
        (errno.ETIMEDOUT, StorageUnavailable),
        (errno.EIO, StorageError),
        (errno.EMFILE, Shortage),
        (errno.ENOMEM, Shortage),
    ],
)
def test_errors_of_the_system_get_their_class_and_the_key(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, code: int, error: type[StorageError]
) -> None:
    def failing(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    storage.write("a/there", views(b"x"))
    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(error) as caught:
        storage.write("a/new", views(b"data"))
    assert type(caught.value) is error
    assert caught.value.retryable == (error is StorageUnavailable)  # a shortage would not pass by waiting
    assert caught.value.file == "a/new"
    assert "a/new" in str(caught.value)
    monkeypatch.undo()
    assert [file.key for file in storage.list("")] == ["a/there"], "a torn file is left"


def test_a_full_disk_is_told_with_what_is_needed_and_free(small_disk: Path) -> None:
    storage = LocalStorage(small_disk)
    with pytest.raises(StorageFull, match=r"10,485,760 bytes are needed, [\d,]+ bytes are free"):
        storage.write("big", [memoryview(bytes(10 * MIB))])
    with pytest.raises(StorageFull, match="16,777,216 bytes are needed"):
        storage.open_parts("big", 16 * MIB)
    with pytest.raises(StorageFull) as caught:
        storage.write_many([("a/big", [memoryview(bytes(10 * MIB))])])
    assert caught.value.file == "a/big"
    assert list(storage.list("")) == [], "a torn file is left"
    assert storage.free_bytes() > 7 * MIB


def test_free_bytes_of_a_root_that_does_not_exist_yet(tmp_path: Path) -> None:
    free = LocalStorage(tmp_path / "not" / "yet").free_bytes()
    assert 0 < free <= shutil.disk_usage(tmp_path).total
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("levels", ["a", "a/b"])
@pytest.mark.parametrize(
    "act",
    [
        lambda storage: storage.write("a/b/f", [memoryview(b"x")]),
        lambda storage: storage.write("a/b/there", [memoryview(b"x")]),
        lambda storage: storage.write_many([("a/b/f", [memoryview(b"x")])]),
        lambda storage: storage.create("a/b/f", b"x"),
        lambda storage: storage.open_parts("a/b/f", 1),
        lambda storage: storage.link([(storage.local_path("plain"), "a/b/f")]),
        lambda storage: storage.copy("plain", "a/b/f"),
        lambda storage: storage.make_directory("a/b/c"),
        lambda storage: storage.delete(["plain", "a/b/there"]),
        lambda storage: storage.remove_directories("a/b"),
    ],
)
def test_nothing_behind_a_link_is_written_or_deleted(
    storage: LocalStorage, tmp_path: Path, levels: str, act: Callable[[LocalStorage], object]
) -> None:
    storage.write("a/b/there", [memoryview(b"kept")])
    storage.make_directory("a/b/empty")
    storage.write("plain", [memoryview(b"plain")])
    linked = storage.local_path(levels)
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    with pytest.raises(StorageError, match="is a symbolic link"):
        act(storage)
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before
    assert storage.read("a/b/there") == b"kept"


def test_a_link_at_the_place_of_a_file_goes_and_what_it_leads_to_stays(storage: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"kept")
    for action in (lambda: storage.write("f", [memoryview(b"new")]), lambda: storage.delete(["f"])):
        storage.make_directory("")
        storage.local_path("f").unlink(missing_ok=True)
        storage.local_path("f").symlink_to(tmp_path / "elsewhere")
        action()
        assert not storage.local_path("f").is_symlink()
        assert (tmp_path / "elsewhere").read_bytes() == b"kept"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(sizes=st.lists(st.integers(0, 30), max_size=8), offset=st.integers(0, 5))
def test_no_call_writes_more_to_the_page_cache_than_makes_it_fast(
    tmp_path: Path, sizes: list[int], offset: int
) -> None:
    """Ten bytes here. Nothing is lost or moved by it, and no call is made in vain."""
    views = [memoryview(os.urandom(size)) for size in sizes]
    counts: list[int] = []

    def pwritev(descriptor: int, some: list[memoryview], at: int) -> int:
        counts.append(sum(map(len, some)))
        return real(descriptor, some, at)

    real = os.pwritev
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwritev", pwritev)
            patch.setattr(posix, "_WRITE_BYTES", 10)
            posix.write_at(descriptor, views, offset)
    finally:
        os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == (bytes(offset) + b"".join(views) if any(sizes) else b"")
    assert sum(counts) == sum(sizes)
    assert all(count <= 10 for count in counts)
    assert len(counts) <= max(-(-sum(sizes) // 10), 1)


def test_attempts_lie_apart_on_a_disk_that_can_do_that(tmp_path: Path) -> None:
    """As lsattr(1) shows it, and only in the directory that holds them."""
    storage = LocalStorage(tmp_path / "store")
    storage.write("checkpoints/step-1/file", [memoryview(b"x")])
    storage.write("checkpoints/step-2/deep/file", [memoryview(b"x")])
    posix.spread_directories(str(tmp_path / "missing"))
    if posix.writes_directly(str(tmp_path)):  # ext4 or XFS, which refuses it
        shown = subprocess.run(
            ["lsattr", "-Rd", tmp_path, tmp_path / "store/checkpoints"], capture_output=True, text=True
        )
        attributes = {line.split()[1]: line.split()[0] for line in shown.stdout.splitlines() if line}
        is_ext = any("e" in shown for shown in attributes.values())
        assert ("T" in attributes[str(tmp_path / "store/checkpoints")]) == is_ext
        assert "T" not in attributes[str(tmp_path)]
