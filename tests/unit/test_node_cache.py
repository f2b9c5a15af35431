"""The node cache inside one process: the directory, hits, failures, eviction, room, threads."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckptstore import open_store
from ckptstore.config import CacheConfig
from ckptstore.errors import CacheError, InvalidInput, StorageError, StorageFull
from ckptstore.events import DownloadFinished, DownloadStarted, DownloadWaited, Event, listening
from ckptstore.loading.story import download_files
from ckptstore.node_cache import NodeCache, copy_key, eviction, place
from ckptstore.node_cache import cache as cache_module
from ckptstore.node_cache.place import filesystem_of, is_network, open_place
from ckptstore.node_cache.readers import excluding_readers


def key_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


A, B, C, D = key_of("a"), key_of("b"), key_of("c"), key_of("d")


class Downloads:
    """Counts downloads of two files, and may fail or take its time."""

    def __init__(self, size_bytes: int = 1000, *, fail: Exception | None = None) -> None:
        self.size_bytes = size_bytes
        self.fail = fail
        self.paths: list[Path] = []
        self.meanwhile: Callable[[Path], None] = lambda path: None

    def __call__(self, path: Path) -> None:
        assert list(path.iterdir()) == []
        self.paths.append(path)
        (path / "deep").mkdir()
        (path / "deep/model.pt").write_bytes(b"x" * (self.size_bytes - 4))
        self.meanwhile(path)
        if self.fail:
            raise self.fail
        (path / "last").write_bytes(b"last")


def fetch(cache: NodeCache, key: str, download: Downloads, **more: Any) -> Any:
    return cache.fetch_once(key, step=7, size_bytes=download.size_bytes, download=download, **more)


def assert_whole(path: Path, size_bytes: int = 1000) -> None:
    assert (path / "deep/model.pt").stat().st_size == size_bytes - 4
    assert (path / "last").read_bytes() == b"last"


def copies(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if len(path.name) == 64}


def assert_tidy(root: Path) -> None:
    assert not list(root.glob(".tmp-*"))
    assert not list((root / "leases").glob("tmp-*"))


def config_at(root: Path, **more: Any) -> CacheConfig:
    return CacheConfig(cache_dir=root, **more)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def events() -> Iterator[list[Event]]:
    seen: list[Event] = []
    with listening(seen.append):
        yield seen


def test_the_second_reader_hits(root: Path, events: list[Event]) -> None:
    cache, download = NodeCache(config_at(root)), Downloads()
    assert not root.exists(), "nothing is touched before the first fetch"
    for _ in range(3):
        with fetch(cache, A, download) as path:
            assert path == root / A
            assert_whole(path)
    with fetch(NodeCache(config_at(root)), A, download) as path:
        assert_whole(path)
    with fetch(cache, B, download) as path:
        assert path == root / B
    assert len(download.paths) == 2
    assert copies(root) == {A, B}
    assert_tidy(root)
    assert [type(event) for event in events] == [DownloadStarted, DownloadFinished] * 2
    assert [event.size_bytes for event in events if isinstance(event, DownloadFinished)] == [1000, 1000]


def test_a_copy_is_private_and_read_only(root: Path) -> None:
    with fetch(NodeCache(config_at(root)), A, Downloads()) as path:
        assert (path / "deep/model.pt").stat().st_mode & 0o222 == 0
    for directory in (root, root / "locks", root / "leases", root / A):
        assert directory.stat().st_mode & 0o077 == 0


def test_nothing_is_seen_before_it_is_whole(root: Path) -> None:
    download = Downloads()
    download.meanwhile = lambda path: seen.append((copies(root), path.name[:5]))
    seen: list[tuple[set[str], str]] = []
    with fetch(NodeCache(config_at(root)), A, download):
        assert seen == [(set(), ".tmp-")]


def test_nested_fetches_and_two_objects(root: Path) -> None:
    download, one, two = Downloads(), NodeCache(config_at(root)), NodeCache(config_at(root))
    with fetch(one, A, download) as outer, fetch(two, A, download) as inner, fetch(one, B, download):
        assert outer == inner
    assert len(download.paths) == 2


def test_a_download_may_fetch_another_key(root: Path) -> None:
    cache, inner, outer = NodeCache(config_at(root)), Downloads(), Downloads()

    def fetch_inner(path: Path) -> None:
        with fetch(cache, B, inner) as other:
            assert_whole(other)

    outer.meanwhile = fetch_inner
    with fetch(cache, A, outer) as path:
        assert_whole(path)
    assert copies(root) == {A, B}


def test_a_failed_download_leaves_nothing_and_the_next_one_works(root: Path) -> None:
    cache = NodeCache(config_at(root))
    for error in (RuntimeError("broken"), OSError(5, "input/output")):
        with pytest.raises(type(error)) as caught, fetch(cache, A, Downloads(fail=error)):
            pytest.fail("there is nothing to read")
        assert caught.value is error
        assert copies(root) == set()
        assert_tidy(root)
    with fetch(cache, A, Downloads()) as path:
        assert_whole(path)


def test_an_error_of_the_reader_is_his_own(root: Path) -> None:
    cache = NodeCache(config_at(root))
    with pytest.raises(ZeroDivisionError), fetch(cache, A, Downloads()):
        raise ZeroDivisionError
    assert copies(root) == {A}


def test_threads_share_one_download(root: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    download, start = Downloads(), threading.Barrier(8)
    waiting: set[int] = set()
    read_holder = cache_module._read_holder

    def noting(path: Path) -> str:
        waiting.add(threading.get_ident())
        return read_holder(path)

    def until_all_wait(path: Path) -> None:
        deadline = time.monotonic() + 60
        while len(waiting) < 7 and time.monotonic() < deadline:
            time.sleep(0.01)

    monkeypatch.setattr(cache_module, "_read_holder", noting)
    download.meanwhile = until_all_wait

    def read(worker: int) -> None:
        cache = NodeCache(config_at(root))
        start.wait()
        with fetch(cache, A, download) as path:
            assert_whole(path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
    assert len(download.paths) == 1
    waited = [event for event in events if isinstance(event, DownloadWaited)]
    assert len(waited) == 7
    assert {event.holder.split(" on ")[0] for event in waited} <= {f"process {os.getpid()}", "an unknown process"}


def test_threads_take_over_from_one_that_fails(root: Path) -> None:
    start, calls = threading.Barrier(4), []

    def download(path: Path) -> None:
        calls.append(path)
        time.sleep(0.05)
        if len(calls) < 3:
            raise RuntimeError("broken")
        (path / "f").write_bytes(b"1")

    def read(worker: int) -> bool:
        start.wait()
        try:
            with NodeCache(config_at(root)).fetch_once(A, step=1, size_bytes=1, download=download) as path:
                return (path / "f").read_bytes() == b"1"
        except RuntimeError:
            return False

    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(read, range(4)))
    assert (ends.count(True), ends.count(False), len(calls)) == (2, 2, 3)


def test_past_its_deadline_a_waiter_downloads_for_itself(root: Path, events: list[Event]) -> None:
    slow, fast = Downloads(), Downloads()
    begun, go_on = threading.Event(), threading.Event()
    slow.meanwhile = lambda path: (begun.set(), go_on.wait(60))
    inodes: list[int] = []

    def read_slowly() -> None:
        with fetch(NodeCache(config_at(root)), A, slow) as path:
            inodes.append((path / "last").stat().st_ino)

    thread = threading.Thread(target=read_slowly)
    thread.start()
    begun.wait(60)
    with fetch(NodeCache(config_at(root, cache_wait_seconds=0.1)), A, fast) as path:
        inodes.append((path / "last").stat().st_ino)
        go_on.set()
        thread.join(60)
        assert_whole(path)
    assert (len(slow.paths), len(fast.paths)) == (1, 1)
    assert inodes[0] == inodes[1], "the loser uses the copy of the winner"
    assert_tidy(root)
    assert [event for event in events if isinstance(event, DownloadWaited)]


@pytest.mark.parametrize("loss", ["file", "cut", "directory", "everything"])
def test_a_copy_that_lost_files_gets_them_back(root: Path, loss: str, caplog: pytest.LogCaptureFixture) -> None:
    """A reader who holds the copy loses nothing by it."""
    cache, downloads = NodeCache(config_at(root)), []
    expected: dict[str, int | None] = {"first": 3, "deep/last": 4, "empty": None}

    def download(path: Path) -> None:
        downloads.append(path)
        (path / "deep").mkdir()
        (path / "empty").mkdir()
        (path / "first").write_bytes(b"abc")
        (path / "deep/last").write_bytes(b"last")

    def take() -> Any:
        return cache.fetch_once(A, step=1, size_bytes=7, download=download, expected=expected)

    with take() as path, take():
        assert len(downloads) == 1
        first = (path / "first").stat().st_ino
        if loss == "file":
            (path / "deep/last").unlink()
        elif loss == "cut":
            (path / "deep/last").chmod(0o600)
            (path / "deep/last").write_bytes(b"l")
        elif loss == "directory":
            (path / "empty").rmdir()
        else:
            shutil.rmtree(path)
        with take() as again:
            assert again == path
            assert (path / "deep/last").read_bytes() == b"last"
            assert (path / "first").read_bytes() == b"abc"
            assert (path / "empty").is_dir()
            assert loss == "everything" or (path / "first").stat().st_ino == first
            assert loss == "everything" or "had lost 1 files" in caplog.text
        with take():
            assert len(downloads) == 2
    assert_tidy(root)


def test_an_idle_copy_goes(root: Path) -> None:
    cache = NodeCache(config_at(root, cache_idle_seconds=3600))
    for key in (A, B):
        with fetch(cache, key, Downloads()):
            pass
    for key, age_seconds in ((A, 4000), (B, 3000)):
        os.utime(root / "leases" / f"{key}.lease", (0, time.time() - age_seconds))
    with fetch(cache, C, Downloads()):
        assert copies(root) == {B, C}
    assert_tidy(root)


def test_the_budget_holds_for_what_nobody_reads(root: Path) -> None:
    cache = NodeCache(config_at(root, cache_budget_bytes=2500))
    with fetch(cache, A, Downloads()), fetch(cache, B, Downloads()), fetch(cache, C, Downloads()):
        assert copies(root) == {A, B, C}, "what is read does not count"
    assert copies(root) == {A, B}, "C was released first"
    with fetch(cache, B, Downloads()):
        pass
    with fetch(cache, C, Downloads()):
        pass
    assert copies(root) == {B, C}, "the least recently used one goes"
    with fetch(NodeCache(config_at(root, cache_budget_bytes=999)), A, Downloads()):
        pass
    assert copies(root) == set()
    assert_tidy(root)


def test_a_size_that_is_unknown_is_measured(root: Path) -> None:
    cache = NodeCache(config_at(root, cache_budget_bytes=2500))
    with fetch(cache, A, Downloads(1000)):
        pass
    (root / "leases" / f"{A}.lease").write_text("")
    with fetch(cache, B, Downloads(2000)):
        pass
    assert copies(root) == {B}


def test_a_copy_that_is_read_stays_whatever_happens(root: Path) -> None:
    cache = NodeCache(config_at(root, cache_budget_bytes=1, cache_idle_seconds=1e-9))
    with fetch(cache, A, Downloads()) as outer:
        with fetch(cache, A, Downloads()):
            pass
        with fetch(cache, B, Downloads()):
            pass
        assert not eviction.remove(open_place(root), A)  # somebody else may have come since it looked for them
        assert copies(root) == {A}
        assert_whole(outer)
    assert copies(root) == set()


def test_what_a_dead_process_left_is_swept(root: Path) -> None:
    cache = NodeCache(config_at(root))
    with fetch(cache, A, Downloads()):
        pass
    for name in ("1-dead", "2-no-lease"):
        (root / f".tmp-{name}/deep").mkdir(parents=True)
        (root / f".tmp-{name}/deep/file").write_bytes(b"x")
    (root / "leases/tmp-1-dead").touch()
    (root / "leases/tmp-3-no-directory").touch()
    (root / ".tmp-4-alive").mkdir()
    with open(root / "leases/tmp-4-alive", "w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with fetch(cache, A, Downloads()):
            pass
        assert [path.name for path in root.glob(".tmp-*")] == [".tmp-4-alive"]
        assert [path.name for path in (root / "leases").glob("tmp-*")] == ["tmp-4-alive"]
    with fetch(cache, A, Downloads()):
        pass
    assert_tidy(root)


def test_a_full_disk_is_found_before_the_download(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = Downloads(10**18)
    with (
        pytest.raises(StorageFull, match=r"needs 1,020,000,000,067,108,864 bytes .* bytes are free .*step 7"),
        fetch(NodeCache(config_at(root)), A, download),
    ):
        pytest.fail("there is no room")
    assert download.paths == []
    assert_tidy(root)


def test_idle_copies_make_room_for_a_download(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = NodeCache(config_at(root, cache_budget_bytes=1 << 40))
    for key in (A, B):
        with fetch(cache, key, Downloads()):
            pass
    free_bytes = {2: 64 << 20, 1: (64 << 20) + 1100, 0: 1 << 30}
    monkeypatch.setattr(place.posix, "free_bytes", lambda directory: free_bytes[len(copies(root))])
    with fetch(cache, C, Downloads()) as path:
        assert_whole(path)
        assert copies(root) == {B, C}, "the least recently used one goes, and no more than is needed"


def test_a_key_is_a_digest(root: Path) -> None:
    for key in ("", "../x", A.upper(), A + "/"):
        with pytest.raises(InvalidInput, match="SHA-256"), fetch(NodeCache(config_at(root)), key, Downloads()):
            pass
    assert not root.exists()


@pytest.mark.parametrize(("mode", "other"), [(0o770, ""), (0o757, ""), (0o755, "thesis.tex"), (0o701, "thesis.tex")])
def test_a_directory_that_lets_others_in_is_refused(root: Path, mode: int, other: str) -> None:
    (root / other).mkdir(parents=True)
    root.chmod(mode)
    with pytest.raises(CacheError, match=f"mode {mode:o}"), fetch(NodeCache(config_at(root)), A, Downloads()):
        pass


def test_a_cache_that_is_removed_while_a_download_fills_it_can_be_used_again(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in "abc":
        (source / name).write_bytes(name.encode())
    with open_store(f"memory://{tmp_path.name}") as store:
        checkpoint = store.save_directory(1, source)
        files = checkpoint._files
        manifest, _ = files.read_manifest()

        def download(path: Path) -> None:
            shutil.rmtree(root)
            download_files(files, manifest, manifest.files, path, cached=True)

        before = os.umask(0o022)
        try:
            with NodeCache(config_at(root)).fetch_once(A, step=1, size_bytes=3, download=download):
                pass
            assert root.stat().st_mode & 0o077
        finally:
            os.umask(before)
    with fetch(NodeCache(config_at(root)), B, Downloads()) as path:
        assert_whole(path)
    assert root.stat().st_mode & 0o077 == 0


def test_a_link_or_a_file_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="symbolic link"), fetch(NodeCache(config_at(root)), A, Downloads()):
        pass
    root.unlink()
    root.write_bytes(b"")
    with pytest.raises(CacheError, match="no directory"), fetch(NodeCache(config_at(root)), A, Downloads()):
        pass
    with pytest.raises(CacheError), fetch(NodeCache(config_at(root / "below")), A, Downloads()):
        pass


def test_a_directory_of_another_user_is_refused(root: Path) -> None:
    root.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(root, 12345, 12345)
        with (
            pytest.raises(CacheError, match="belongs to user 12345"),
            fetch(NodeCache(config_at(root)), A, Downloads()),
        ):
            pass
    else:
        with pytest.raises(CacheError), fetch(NodeCache(config_at(Path("/proc/1"))), A, Downloads()):
            pass


def test_where_flock_does_not_work_everybody_downloads_for_himself(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(place, "locks_work", lambda probe: False)
    cache, download = NodeCache(config_at(root, cache_budget_bytes=1)), Downloads()
    start = threading.Barrier(3)
    download.meanwhile = lambda path: start.wait(60)

    def read(worker: int) -> int:
        with fetch(cache, A, download) as path:
            assert_whole(path)
            return (path / "last").stat().st_ino

    with ThreadPoolExecutor(3) as pool:
        inodes = set(pool.map(read, range(3)))
    assert len(download.paths) == 3
    assert len(inodes) == 1, "one rename wins"
    assert not list(root.glob(".tmp-*"))
    with fetch(cache, A, download):
        assert len(download.paths) == 3, "late readers hit"
    assert copies(root) == {A}, "nothing is removed where readers cannot be seen"
    assert sum("flock does not work" in record.message for record in caplog.records) == 1


def test_a_shared_file_system_is_warned_about_and_keeps_nodes_apart(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(place, "filesystem_of", lambda path: "nfs4")
    for _ in range(2):
        with fetch(NodeCache(config_at(root)), A, Downloads()) as path:
            assert path.parent == root / f"node-{place.socket.gethostname()}"
    assert sum("lies on nfs4" in record.message for record in caplog.records) == 1


def test_the_file_system_is_found(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "30 22 0:30 / /scratch rw shared:1 - lustre mgs:/scratch rw\n"
        "31 30 0:31 / /scratch/my\\040disk rw shared:1 master:2 - xfs /dev/vdb rw\n"
        "32 22 0:32 / /home rw - nfs4 server:/home rw\n"
        "33 22 0:33 / /home rw - tmpfs tmpfs rw\n"
        "broken\n"
    )
    found = {
        path: filesystem_of(Path(path), mounts)
        for path in ("/tmp/x", "/scratch", "/scratch/a", "/scratch2", "/scratch/my disk/cache", "/home/me")
    }
    assert list(found.values()) == ["ext4", "lustre", "lustre", "ext4", "xfs", "tmpfs"]
    assert filesystem_of(tmp_path, tmp_path / "missing") == ""
    assert filesystem_of(tmp_path) != ""
    kinds = ("nfs", "lustre", "fuse.s3fs", "fuse", "cifs", "ext4", "tmpfs", "", "fuse.fuse-overlayfs", "overlay")
    assert [is_network(kind) for kind in kinds] == [True] * 5 + [False] * 5


def test_a_cache_that_cannot_be_written_says_so(root: Path) -> None:
    with fetch(NodeCache(config_at(root)), A, Downloads()):
        pass
    shutil.rmtree(root / "leases")
    (root / "leases").write_bytes(b"")
    with pytest.raises(CacheError, match="leases"), fetch(NodeCache(config_at(root)), A, Downloads()):
        pass
    assert isinstance(open_place(root.parent / "other").root, Path)


def test_a_probe_of_locks_that_cannot_be_made_is_no_missing_flock(root: Path) -> None:
    for path in (root, root / "locks", root / "locks/probe"):
        path.mkdir(mode=0o700)
    with pytest.raises(CacheError, match="probe"), fetch(NodeCache(config_at(root)), A, Downloads()):
        pytest.fail("it was opened")


def test_nothing_is_kept_beside_a_copy_that_is_gone(root: Path) -> None:
    cache = NodeCache(config_at(root, cache_budget_bytes=1))

    def fail(_path: Path) -> None:
        raise StorageError("no")

    for key in (A, B):
        with fetch(cache, key, Downloads()):
            assert (root / "locks" / f"{key}.lock").exists()
    with pytest.raises(StorageError), cache.fetch_once(C, step=1, size_bytes=1, download=fail):
        pass
    with fetch(NodeCache(config_at(root)), D, Downloads()):
        pass
    kept = {path.name.partition(".")[0] for name in ("locks", "leases") for path in (root / name).iterdir()}
    assert kept - {"evict", "probe"} == {D}


def test_of_threads_with_one_turn_each_only_one_downloads_though_the_lock_file_goes(root: Path) -> None:
    """Copies are evicted as soon as they are released, and their lock files with them."""
    cache, at_work, most = NodeCache(config_at(root, cache_budget_bytes=1)), [], []

    def download(path: Path) -> None:
        at_work.append(path)
        most.append(len(at_work))
        (path / "f").write_bytes(b"x" * 100)
        at_work.remove(path)

    def read(_number: int) -> None:
        for _ in range(10):
            with cache.fetch_once(A, step=1, size_bytes=100, download=download) as path:
                assert (path / "f").stat().st_size == 100

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    assert set(most) == {1}
    assert copies(root) == set()


def test_a_reader_locks_the_lease_that_the_next_process_finds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS renames a file that is removed while it is open, so that its count of names does not tell."""
    flock, lease = fcntl.flock, root / "leases" / f"{A}.lease"

    def removed_first(descriptor: int, kind: int) -> None:
        if kind & fcntl.LOCK_SH and not (root / "leases/.nfs1").exists() and lease.exists():
            lease.rename(root / "leases/.nfs1")
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    here = open_place(root)
    with fetch(NodeCache(config_at(root)), A, Downloads()):
        assert (root / "leases/.nfs1").exists()
        with excluding_readers(here, A) as unread:
            assert not unread


def test_no_copy_is_found_that_was_made_before_the_machine_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.boot_id()
    now = copy_key("content")
    assert now == copy_key("content") != copy_key("other")
    monkeypatch.setattr(place, "boot_id", lambda: "the next start")
    assert copy_key("content") != now


@pytest.mark.parametrize("boot_id", ["", "known"])
def test_copies_are_forced_to_the_disk_only_where_starts_are_not_told_apart(
    root: Path, monkeypatch: pytest.MonkeyPatch, boot_id: str
) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(cache_module, "boot_id", lambda: boot_id)
    monkeypatch.setattr(cache_module, "flush_files", flushed.extend)
    with fetch(NodeCache(config_at(root)), A, Downloads()) as path:
        assert_whole(path)
    assert sorted(Path(name).name for name in flushed) == ([] if boot_id else ["last", "model.pt"])


def test_copies_lie_apart_in_every_new_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in one that comes again after somebody has removed it."""
    spread: list[str] = []
    monkeypatch.setattr(place.posix, "spread_directories", spread.append)
    for _ in range(2):
        for key in (A, B):
            with fetch(NodeCache(config_at(root)), key, Downloads()):
                pass
        shutil.rmtree(root)
    assert spread == [str(root)] * 2
