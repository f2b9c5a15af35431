"""Uploads: what is stored is what the sources hold, and what goes wrong stops everything and is named."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moving import DATA, MIB, block_digests, from_file, from_memory, make_storage, transfer_over, transfers_end  # noqa: F401

from ckptstore.config import RetryConfig
from ckptstore.errors import AccessDenied, SourceChanged, StorageError, StorageFull, StorageUnavailable
from ckptstore.events import BytesMoved, Event, FileStored, RequestRetried, listening
from ckptstore.extensions.tier.drain.paced import PacedSource, Pacer
from ckptstore.format.digest import ALGORITHMS, Digest
from ckptstore.runtime.beat import beating
from ckptstore.storage.base import UploadGone
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.memory import MemoryStorage
from ckptstore.testing.faults import CountCalls, FailAt, TearAt, wrap
from ckptstore.transfer import upload
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.pool import Operation
from ckptstore.transfer.sources import FileSource, MemorySource
from ckptstore.transfer.upload import in_turns


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return make_storage(request.param, tmp_path)


SIZES = [0, 1, 4096, MIB - 1, MIB, MIB + 1, 17 * MIB + 3, len(DATA)]


@given(st.lists(st.integers(1, 4), max_size=7), st.integers(1, 3))
def test_so_many_files_take_turns(num_tasks: list[int], num_files: int) -> None:
    seen: list[tuple[int, int]] = []
    files = [[partial(_note, seen, file, number) for number in range(count)] for file, count in enumerate(num_tasks)]
    for task in in_turns(files, num_files):
        task(Operation([]))
    expected = [(file, number) for file, count in enumerate(num_tasks) for number in range(count)]
    assert seen == sorted(expected, key=lambda place: (place[0] // num_files, place[1], place[0]))


def _note(seen: list[tuple[int, int]], file: int, number: int, run: Operation) -> None:
    seen.append((file, number))


@pytest.mark.parametrize("name", ["local", "memory"])
def test_files_take_turns_on_a_disk_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        upload, "in_turns", lambda files, num_files: asked.append(num_files) or in_turns(files, num_files)
    )
    with closing(transfer_over(make_storage(name, tmp_path))) as transfer:
        transfer.upload([from_memory("f", DATA)])
    assert [count > 1 for count in asked] == [name == "local"]


def test_files_of_all_sizes_from_memory_and_disk(storage: Any, tmp_path: Path) -> None:
    files = [from_memory(f"memory/{size}", DATA[:size]) for size in SIZES]
    files += [from_file(f"disk/{size}", tmp_path / f"source/{size}", DATA[-size:] if size else b"") for size in SIZES]
    stored = transfer_over(storage).upload(files)
    assert [item.key for item in stored] == [file.key for file in files]
    for item, size in zip(stored, SIZES * 2, strict=True):
        data = storage.read(item.key)
        assert data == (DATA[:size] if item.key.startswith("memory") else DATA[-size:] if size else b"")
        assert (item.size_bytes, item.digest) == (size, Digest.of(data))
    assert {file.key for file in storage.list("")} == {file.key for file in files}


def test_thousands_of_small_files(storage: Any, tmp_path: Path) -> None:
    sizes = [(number * 37) % 9000 for number in range(3000)]
    files = [
        from_file(f"d{n % 7}/{n}", tmp_path / f"source/{n}", DATA[n : n + size])
        if n % 3
        else from_memory(f"d{n % 7}/{n}", DATA[n : n + size])
        for n, size in enumerate(sizes)
    ]
    stored = transfer_over(storage).upload(files)
    for n, (item, size) in enumerate(zip(stored, sizes, strict=True)):
        data = DATA[n : n + size]
        assert (item.key, item.size_bytes, item.digest) == (f"d{n % 7}/{n}", size, Digest.of(data))
        assert storage.read(item.key) == data


PAYLOADS = [
    ((0, len(DATA)),),
    ((100, 3 * MIB), (3 * MIB + 100, 5), (4 * MIB, 30 * MIB + 17)),
    ((MIB - 1, 2),),
    ((5, 0), (5, 10)),
    tuple((at + 4096, 50_000) for at in range(0, 20 * MIB, 60_000)),
]


@pytest.mark.parametrize("payloads", PAYLOADS)
def test_blocks_get_digests_wherever_a_payload_begins(storage: Any, payloads: tuple[tuple[int, int], ...]) -> None:
    (stored,) = transfer_over(storage).upload([from_memory("key", DATA, payloads)])
    assert stored.digest == Digest.of(DATA)
    assert stored.block_digests == block_digests(DATA, payloads)


@given(
    sizes=st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=5),
    num_threads=st.integers(1, 5),
    budget_bytes=st.sampled_from([1, MIB, 3 * MIB, 64 * MIB]),
)
def test_any_budget_and_any_number_of_threads_will_do(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], num_threads: int, budget_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("upload")
    storage = make_storage("memory", path)
    files = [from_file(f"key{n}", path / f"{n}", DATA[n : n + size]) for n, size in enumerate(sizes)]
    with closing(transfer_over(storage, num_threads=num_threads, memory_budget_bytes=budget_bytes)) as transfer:
        stored = transfer.upload(files)
    assert [storage.read(item.key) for item in stored] == [DATA[n : n + size] for n, size in enumerate(sizes)]


@pytest.mark.parametrize("size", [1000, 20 * MIB])
def test_a_source_that_changed_or_vanished_is_named(storage: Any, tmp_path: Path, size: int) -> None:
    files = [from_file(f"key{n}", tmp_path / f"source/{n}", DATA[:size]) for n in range(8)]
    (tmp_path / "source/5").write_bytes(b"other")
    transfer = transfer_over(storage)
    with pytest.raises(SourceChanged) as caught:
        transfer.upload(files)
    assert caught.value.file == str(tmp_path / "source/5")
    (tmp_path / "source/5").unlink()
    with pytest.raises(SourceChanged, match=r"source/5 could not be opened"):
        transfer.upload(files)


def test_a_source_that_changes_during_the_upload_is_noticed(tmp_path: Path) -> None:
    file = from_file("key", tmp_path / "source", DATA)
    storage = LocalStorage(tmp_path / "store")

    def change(call: Any) -> None:
        if call.phase == "after" and call.verb == "write_part" and call.key == "key":
            os.utime(tmp_path / "source")

    with pytest.raises(SourceChanged, match="changed while it was read"):
        transfer_over(wrap(storage, change)).upload([file])
    assert list(storage.list("")) == [], "an unfinished file is left"


def test_passing_errors_are_retried_and_told(storage: Any, tmp_path: Path) -> None:
    faults = [FailAt("write_part *", times=3), TearAt("write small", times=2)]

    def hook(call: Any) -> None:
        for fault in faults:
            fault(call)

    files = [from_memory("big", DATA), from_file("small", tmp_path / "small", DATA[:1000])]
    heard: list[Event] = []
    with listening(heard.append):
        transfer_over(wrap(storage, hook)).upload(files)
    assert storage.read("big") == DATA
    assert storage.read("small") == DATA[:1000]
    assert len([event for event in heard if isinstance(event, RequestRetried)]) == 5


@pytest.mark.parametrize("error", [AccessDenied("no"), StorageFull("full"), StorageUnavailable("throttled")])
def test_the_first_error_stops_all_and_nothing_runs_on(storage: Any, error: StorageError) -> None:
    counted = CountCalls()
    fault = FailAt("write_part big3", error, times=None)
    files = [from_memory(f"big{n}", DATA) for n in range(12)]

    def hook(call: Any) -> None:
        counted(call)
        fault(call)

    with pytest.raises(type(error)) as caught:
        transfer_over(wrap(storage, hook), retry=RetryConfig(retry_attempts=1)).upload(files)
    calls = counted.total
    assert caught.value.file == "big3"
    assert counted.counts["write_part"] < 12 * 30, "the rest was written all the same"
    time.sleep(0.1)
    assert counted.total == calls, "something runs on"
    assert "big3" not in {file.key for file in storage.list("")}


def test_a_beat_that_raises_ends_the_upload(storage: Any) -> None:
    """This is how a rank learns that another one has failed."""
    started = threading.Event()

    class Slow:
        size_bytes, payloads, in_memory = 400 * MIB, (), True

        def open(self) -> Any:
            return MemorySource([memoryview(bytes(MIB))] * 400).open()

    def slow(call: Any) -> None:
        started.set()
        time.sleep(0.02)

    def beat() -> None:
        raise StorageError("another rank failed")

    began = time.monotonic()
    with pytest.raises(StorageError, match="another rank failed"), beating(beat):
        transfer_over(wrap(storage, slow)).upload([PlannedFile("key", Slow()), PlannedFile("other", Slow())])
    assert started.is_set()
    assert time.monotonic() - began < 60, "the upload went on to its end"


def test_beats_come_while_bytes_move_and_only_then(storage: Any) -> None:
    beats: list[float] = []
    in_calls: list[int] = []

    def slow(call: Any) -> None:
        before = len(beats)
        time.sleep(0.25)
        in_calls.append(len(beats) - before)

    files = [from_memory(name, DATA[: MIB + MIB // 2]) for name in "ab"]
    with beating(lambda: beats.append(time.monotonic())):
        transfer_over(wrap(storage, slow), num_threads=1).upload(files)
    assert len(beats) >= 2
    assert max(in_calls) <= 1, "a storage that hangs must not look alive"


def test_beats_come_between_the_parts_of_one_file(storage: Any) -> None:
    """One file is one task, which the caller does itself: requests that are retried for long are no death."""
    beats: list[int] = []
    before_parts: list[int] = []

    def note(call: Any) -> None:
        if call.verb == "write_part" and call.phase == "before":
            before_parts.append(len(beats))

    with beating(lambda: beats.append(1)):
        transfer_over(wrap(storage, note), num_threads=1).upload([from_memory("a", DATA[: 7 * MIB])])
    assert before_parts == list(range(len(before_parts)))
    assert len(before_parts) > 1


@pytest.mark.parametrize("digest", sorted(ALGORITHMS))
def test_every_file_and_every_byte_is_told(storage: Any, tmp_path: Path, digest: str) -> None:
    files = [from_memory("big", DATA), *(from_file(f"s{n}", tmp_path / f"{n}", DATA[:n]) for n in range(100))]
    heard: list[Event] = []
    with listening(heard.append):
        transfer_over(storage, digest=digest).upload(files)
    total = sum(file.source.size_bytes for file in files)
    stored = [event for event in heard if isinstance(event, FileStored)]
    assert sorted(event.key for event in stored) == sorted(file.key for file in files)
    moved = [event for event in heard if isinstance(event, BytesMoved)]
    assert sum(event.size_bytes for event in moved) == total
    assert {event.total_bytes for event in moved} == {total}
    assert sum(event.key == "big" for event in moved) > 1


def test_two_uploads_share_one_transfer(storage: Any) -> None:
    transfer = transfer_over(storage, num_threads=2)

    def upload(name: str) -> None:
        for number in range(3):
            transfer.upload([from_memory(f"{name}/{number}/{n}", DATA[: n * MIB]) for n in range(6)])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(upload, "abc"))
    assert len(list(storage.list(""))) == 3 * 3 * 6


class FlakyDisk(LocalStorage):
    """Local storage whose fsync fails the first few times: for one large file, or for all small ones."""

    failures_left = 1

    def persist(self, keys: Any) -> None:
        if type(self).failures_left:
            type(self).failures_left -= 1
            for key in keys:
                self.local_path(key).write_bytes(b"lost")
            raise StorageError("Making files durable failed, Input/output error")
        super().persist(keys)


@pytest.mark.parametrize("num_files", [3, 400])
def test_after_a_failed_persist_the_files_are_written_anew_once(
    tmp_path: Path, num_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptstore.transfer.upload._PERSIST_FILES", 100)  # so that some are persisted on the way
    files = [from_file(f"d/{n}", tmp_path / f"source/{n}", DATA[n : n + 100]) for n in range(num_files)]
    FlakyDisk.failures_left = 1
    storage = FlakyDisk(tmp_path / "store")
    transfer = transfer_over(storage)
    transfer.upload(files)
    assert all(storage.read(f"d/{n}") == DATA[n : n + 100] for n in range(num_files))
    FlakyDisk.failures_left = 2
    with pytest.raises(StorageError, match="Input/output error"):
        transfer.upload(files[:3])


def test_after_a_failed_fsync_a_large_file_is_written_anew_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_fsync = os.fsync
    failures_left = [1]

    def fsync(descriptor: int) -> None:
        if failures_left[0] and os.readlink(f"/proc/self/fd/{descriptor}").endswith("/big"):
            failures_left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    storage = LocalStorage(tmp_path / "store")
    transfer = transfer_over(storage)
    (stored,) = transfer.upload([from_memory("big", DATA)])
    assert storage.read("big") == DATA
    assert stored.digest == Digest.of(DATA)
    failures_left[0] = 2
    with pytest.raises(StorageError, match="Input/output error") as caught:
        transfer.upload([from_memory("other/big", DATA)])
    assert caught.value.file == "other/big"
    assert [file.key for file in storage.list("")] == ["big"]


@pytest.mark.parametrize("times", [1, None])
def test_an_upload_that_somebody_aborted_is_begun_again_once(tmp_path: Path, times: int | None) -> None:
    storage = LocalStorage(tmp_path / "store")
    gone = FailAt("write_part big", UploadGone("it is gone"), times=times)
    with (
        closing(transfer_over(wrap(storage, gone))) as transfer,
        nullcontext() if times else pytest.raises(UploadGone),
    ):
        transfer.upload([from_memory("big", DATA)])
        assert storage.read("big") == DATA


INTERRUPTED = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[2])
from moving import *
from ckptstore.testing.faults import wrap
calls, finished, under_way = [], set(), threading.Lock()
def slow(call):
    calls.append(call.verb)
    if len(calls) >= 20 and under_way.acquire(blocking=False):
        print("under way", flush=True)
    if (call.verb, call.phase) == ("finish", "after"):
        finished.add(call.key)
    time.sleep(0.05)
storage = make_storage("local", Path(sys.argv[1]))
transfer = transfer_over(wrap(storage, slow))
try:
    transfer.upload([from_memory(f"big{n}", DATA) for n in range(50)])
except KeyboardInterrupt:
    before = len(calls)
    time.sleep(0.3)
    left = {file.key for file in storage.list("")} - finished
    print("interrupted", len(calls) - before, len(left), flush=True)
"""


def test_an_interrupt_stops_everything(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "under way\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    word, calls_after, files_left = out.split()
    assert word == "interrupted"
    assert int(calls_after) == 0, "something ran on"
    assert int(files_left) == 0, "unfinished files are left"


def test_a_file_source_of_an_odd_kind_goes_through_open(storage: Any, tmp_path: Path) -> None:
    """A payload in a small file on disk: rare, but the block digests must be there."""
    path = tmp_path / "file"
    path.write_bytes(DATA[:5000])
    source = FileSource.of(path)
    planned = PlannedFile("key", FileSource(path, source.size_bytes, source.identity, payloads=((100, 4000),)))
    (stored,) = transfer_over(storage).upload([planned])
    assert stored.block_digests == block_digests(DATA, [(100, 4000)])


class FarAway(MemoryStorage):
    """A storage that is taken for a server."""

    @property
    def uri(self) -> str:
        return "far://away"


class Reading(MemorySource):
    """Counts how many threads read at once."""

    now = most = 0
    lock = threading.Lock()

    @contextmanager
    def open(self) -> Iterator[Any]:
        with super().open() as read:

            def counted(offset: int, size_bytes: int, scratch: memoryview) -> Any:
                with self.lock:
                    Reading.now += 1
                    Reading.most = max(Reading.most, Reading.now)
                time.sleep(0.002)
                try:
                    return read(offset, size_bytes, scratch)
                finally:
                    with self.lock:
                        Reading.now -= 1

            yield counted


def test_on_the_way_to_a_server_no_more_are_read_than_processors_can_hash() -> None:
    """16 requests may be in flight, and 2 threads read."""
    with closing(transfer_over(FarAway("memory://far-away"), num_threads=2, num_requests=16)) as transfer:
        assert transfer.num_tasks == 16
        transfer.upload([PlannedFile(f"file{number}", Reading([memoryview(DATA)])) for number in range(2)])
    assert Reading.most == 2


class GivenUp(Exception):
    pass


def test_a_check_ends_an_upload_to_a_storage_that_never_answers(tmp_path: Path) -> None:
    """Nothing moves, so no beat comes; and the retries would last for an hour."""
    tried = threading.Event()

    def fail(call: Any) -> None:
        if call.phase == "before":
            tried.set()
            raise StorageUnavailable("away")

    def check() -> None:
        if tried.is_set():
            raise GivenUp

    retry = RetryConfig(retry_attempts=10**6, retry_deadline_seconds=3600, retry_wait_max_seconds=0.01)
    storage = wrap(MemoryStorage(f"memory://{tmp_path.name}"), fail)
    for files in ([from_memory("a", b"a")], [from_memory(f"{name}", DATA) for name in range(3)]):
        tried.clear()
        with closing(transfer_over(storage, retry=retry)) as transfer, pytest.raises(GivenUp):
            transfer.upload(files, check=check)


def test_paced_sources_give_the_same_bytes_and_no_more_of_them_than_allowed(tmp_path: Path) -> None:
    rate, storage, told = 20 * MIB, LocalStorage(tmp_path / "store"), []
    pacer, large, small = Pacer(rate), DATA[: 5 * MIB + 77], b"small"
    plain = [from_file("large", tmp_path / "l", large), from_file("small", tmp_path / "s", small)]

    def wait(size_bytes: int) -> None:
        pacer.wait(size_bytes, lambda: told.append(1))

    began = time.monotonic()
    with closing(transfer_over(storage)) as transfer:
        stored = transfer.upload([PlannedFile(file.key, PacedSource(file.source, wait)) for file in plain])
    assert time.monotonic() - began >= (len(large) + len(small)) / rate
    assert [(item.digest, storage.read(item.key)) for item in stored] == [(Digest.of(d), d) for d in (large, small)]
    assert told  # who waits gives signs of life


def test_who_waits_for_a_pacer_can_be_stopped() -> None:
    def stop() -> None:
        raise GivenUp

    with pytest.raises(GivenUp):
        Pacer(1.0).wait(1 << 40, stop)
