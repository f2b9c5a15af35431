"""The log over a storage: what it costs to find the newest record, and what becomes of a write that goes wrong."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from bare_storage import BareStorage
from log_entries import entry

from ckptstore.config import RetryConfig
from ckptstore.errors import (
    AccessDenied,
    CheckpointDamaged,
    FileMissing,
    InvalidInput,
    StorageError,
    StorageFull,
    StorageUnavailable,
    StoreForked,
    StoreMissing,
    UnsupportedVersion,
)
from ckptstore.format.changes import Change, Claim, Commit, Noop, Pin, Remove
from ckptstore.format.layout import HINT_KEY, STORE_KEY, record_key
from ckptstore.format.record import Record, sealed
from ckptstore.log import Log
from ckptstore.log.identity import (
    KEPT_BY_RAY,
    read_identity,
    read_or_create_identity,
    read_or_create_store_json,
    read_store_json,
)
from ckptstore.log.reader import Hint, LogReader
from ckptstore.runtime.beat import beating, no_beat
from ckptstore.storage import memory
from ckptstore.storage.base import Storage
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.memory import MemoryStorage
from ckptstore.storage.retry import with_retries
from ckptstore.testing.faults import Call, CountCalls, FailAt, TearAt, combine, wrap

ONCE = RetryConfig(retry_attempts=1)
QUICK = RetryConfig(retry_attempts=5, retry_wait_initial_seconds=1e-6)
CLAIM = Claim("token", 1)


def new_storage() -> MemoryStorage:
    return MemoryStorage(f"memory://{uuid.uuid4().hex}")


def commit(step: int, epoch: int = 1) -> Commit:
    return Commit(entry(step, epoch))


def fill(storage: Storage, count: int) -> Log:
    """A log with `count` records: a claim, then checkpoints."""
    log = Log(storage)
    for number in range(1, count + 1):
        log.append(lambda _, number=number: CLAIM if number == 1 else commit(number))  # type: ignore[misc]
    return log


def filled(count: int) -> MemoryStorage:
    """A storage with such a log."""
    storage = new_storage()
    fill(storage, count)
    return storage


def newest_in(storage: Storage) -> Record:
    newest = Log(storage).newest()
    assert newest
    return newest


def append(log: Log, change: Change) -> Record:
    record = log.append(lambda _: change)
    assert record
    return record


def numbers_in(storage: Storage) -> list[int]:
    return sorted(int(file.key[4:14]) for file in storage.list("log/"))


def counted(storage: Storage) -> tuple[Storage, CountCalls]:
    counts = CountCalls()
    return wrap(storage, counts), counts


# Finding the newest record


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 500])
def test_a_fresh_hint_costs_two_requests(count: int) -> None:
    storage = filled(count)
    reading, counts = counted(storage)
    assert newest_in(reading).number == count
    assert counts.total == 2
    counts.clear()
    latest = Log(reading).latest()
    assert (latest.number if latest else 1) == count
    assert counts.total == 2


def test_latest_costs_two_requests_when_other_records_came_after_it() -> None:
    storage = new_storage()
    log = fill(storage, 5)
    log.append(lambda _: Pin((3,)))
    log.append(lambda _: Remove(trash=(2,)))
    reading, counts = counted(storage)
    latest = Log(reading).latest()
    assert latest
    assert latest.number == 5
    assert counts.total == 2


def test_a_second_look_costs_one_request() -> None:
    storage = filled(9)
    reading, counts = counted(storage)
    log = Log(reading)
    log.append(lambda _: None)
    counts.clear()
    for _ in range(3):
        assert log.newest()
    assert counts.total == 3


@pytest.mark.parametrize("count", [*range(12), 100, 129, 1000])
@pytest.mark.parametrize("behind", [None, 1, 7])
def test_galloping_finds_the_newest_in_few_requests(count: int, behind: int | None) -> None:
    storage = filled(count)
    if behind is None:
        storage.delete([HINT_KEY])
    elif count > behind:
        storage.write(HINT_KEY, [memoryview(hint_of(storage, count - behind).encode())])
    reading, counts = counted(storage)
    newest = Log(reading).newest()
    assert (newest.number if newest else 0) == count
    distance = count if behind is None else min(behind, count)
    assert counts.total <= 2 + 2 * (distance.bit_length() + 1)


def hint_of(storage: Storage, number: int) -> Hint:
    record = Record.decode(storage.read(record_key(number)), number)
    return Hint(record, record if record.state.latest == number else None)


def test_a_hint_that_is_none_is_passed_over() -> None:
    storage = filled(6)
    storage.write(HINT_KEY, [memoryview(b'{"version":1,"number":3,"newest":7}')])
    latest = Log(storage).latest()
    assert latest
    assert latest.number == 6


def test_a_torn_hint_is_passed_over() -> None:
    storage = filled(6)
    data = storage.read(HINT_KEY)
    for cut in range(0, len(data), 50):
        storage.write(HINT_KEY, [memoryview(data[:cut])])
        assert newest_in(storage).number == 6


def test_a_hint_ahead_of_the_log_deceives_no_writer_and_is_mended() -> None:
    storage = filled(9)
    storage.delete([record_key(number) for number in (6, 7, 8, 9)])  # a copy that is not complete
    reader = Log(storage)
    believed = reader.newest()
    assert believed
    assert believed.number == 9
    record = append(Log(storage), Pin((2,)))
    assert record.number == 6
    assert newest_in(storage).write_id == record.write_id
    assert reader.newest() == record


def test_a_hint_of_another_log_deceives_no_writer() -> None:
    storage, other = new_storage(), new_storage()
    fill(storage, 4)
    fill(other, 4)
    storage.write(HINT_KEY, [memoryview(other.read(HINT_KEY))])
    append(Log(storage), Noop())
    assert Log(storage).verify_chain() == []


def test_a_hint_is_tried_twice_at_most() -> None:
    flaky = FailAt(f"write {HINT_KEY}", times=None)
    assert Log(with_retries(wrap(new_storage(), flaky), QUICK)).append(lambda _: CLAIM)
    assert flaky.struck == 2


def test_a_hint_that_cannot_be_written_fails_nothing() -> None:
    storage = new_storage()
    log = Log(wrap(storage, FailAt(f"write {HINT_KEY}", AccessDenied("no"), times=None)))
    assert log.append(lambda _: CLAIM)
    assert log.append(lambda _: commit(1))
    assert newest_in(storage).number == 2


def test_an_empty_log() -> None:
    log = Log(new_storage())
    assert log.newest() is None
    assert log.latest() is None
    assert log.records([]) == []
    assert log.verify_chain() == []


def test_nothing_live_has_no_latest() -> None:
    storage = filled(1)
    assert Log(storage).latest() is None


class Lying(MemoryStorage):
    """Gives a record with other bytes until it is doubted."""

    def __init__(self, inner: MemoryStorage, key: str, before: bytes, after: bytes) -> None:
        self.__dict__.update(vars(inner))
        self.lies, self.doubts = {key: (before, after)}, 0

    def read(self, key: str) -> bytes:
        data = super().read(key)
        return data.replace(*self.lies[key]) if key in self.lies else data

    def doubt(self, key: str, offset: int = 0, size_bytes: int | None = None) -> None:
        self.lies.clear()
        self.doubts += 1


@pytest.mark.parametrize(
    ("number", "before", "after"), [(1, b"claim", b"cl`im"), (1, b'"epoch":1', b'"epoch":3'), (3, b"{", b"z")]
)
def test_a_record_that_is_read_wrongly_once_forks_nothing(
    number: int, before: bytes, after: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    storage = filled(3)
    lying = Lying(storage, f"log/{number:010d}.json", before, after)
    assert before in storage.read(f"log/{number:010d}.json")
    log = Log(lying)
    newest = log.append(lambda _: CLAIM)
    assert newest is not None
    assert lying.doubts == 1
    assert "was whole when it was read again" in caplog.text
    assert Log(storage).checked_newest() is not None


def test_a_record_of_another_log_that_is_read_once_forks_nothing() -> None:
    storage, other = filled(3), filled(3)
    key = record_key(3)
    log = Log(Lying(storage, key, storage.read(key), other.read(key)))
    assert log.append(lambda _: None) is None
    assert log.append(lambda _: Noop())
    assert Log(storage).verify_chain() == []


def test_a_record_that_seems_missing_once_is_read_again() -> None:
    class Missing(Lying):
        def read(self, key: str) -> bytes:
            if key in self.lies:
                raise FileMissing("it is not there", file=key)
            return super().read(key)

    log = Log(Missing(filled(3), record_key(2), b"", b""))
    assert [record.number for record in log.records([2])] == [2]


def test_a_denied_probe_of_a_disk_says_nothing_of_buckets(tmp_path: Path) -> None:
    storage = wrap(LocalStorage(tmp_path), FailAt("read log/*", AccessDenied("denied", hint="Check owner"), times=None))
    with pytest.raises(AccessDenied) as caught:
        Log(storage).newest()
    assert "s3" not in str(caught.value)
    assert "Check owner" in str(caught.value)


def test_a_denied_probe_says_that_the_permission_to_list_may_be_missing() -> None:
    storage = wrap(new_storage(), FailAt("read log/*", AccessDenied("403"), times=None))
    for log in (Log(storage), Log(with_retries(storage, QUICK))):
        with pytest.raises(AccessDenied, match="s3:ListBucket"):
            log.newest()
        with pytest.raises(AccessDenied, match="s3:ListBucket") as caught:
            log.append(lambda _: CLAIM)
        assert caught.value.committed is False


def test_records_are_read_once_and_in_the_order_asked_for() -> None:
    storage = filled(50)
    reading, counts = counted(storage)
    log = Log(reading)
    assert [record.number for record in log.records([9, 3, 3, 40])] == [9, 3, 3, 40]
    assert counts.total == 3
    assert [record.number for record in log.records(range(1, 51))] == list(range(1, 51))
    assert counts.total == 50


def test_records_in_memory_start_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    log, numbers = Log(filled(5)), range(1, 6)
    log.records(numbers)
    before: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", before.append)
    for ask in (log.records, log.readable, log.found):
        assert [record.number for record in ask(numbers)] == list(numbers)  # type: ignore[operator]
    assert before == []


def test_a_record_that_is_missing_or_garbage_is_damaged() -> None:
    storage = filled(5)
    storage.delete([record_key(2)])
    storage.write(record_key(3), [memoryview(b"garbage")])
    log = Log(storage)
    for number in (2, 3):
        with pytest.raises(CheckpointDamaged, match=record_key(number).replace(".", r"\.")):
            log.records([1, number])
    newest = log.newest()
    assert newest
    assert newest.number == 5


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_a_damaged_newest_record_is_never_passed_over(count: int) -> None:
    storage = filled(count)
    data = storage.read(record_key(count))
    storage.write(record_key(count), [memoryview(data[: len(data) // 2])])
    storage.delete([HINT_KEY])
    with pytest.raises(CheckpointDamaged):
        Log(storage).newest()
    with pytest.raises(CheckpointDamaged):
        Log(storage).append(lambda _: Noop())
    assert numbers_in(storage) == list(range(1, count + 1))


class LoginPage(MemoryStorage):
    """Answers every read as a page in front of a storage does that nobody has logged in to."""

    def read(self, key: str) -> bytes:
        return b"<html>log in</html>"


def test_a_storage_that_has_something_under_every_name_is_no_log_without_end() -> None:
    for log in (Log(LoginPage("memory://login")), LogReader(LoginPage("memory://login"))):
        for call in (log.newest, log.latest):
            with pytest.raises(StorageError, match=r"something under every name.*login page"):
                call()


def test_a_newest_record_of_a_newer_version_is_refused() -> None:
    storage = filled(3)
    value = json.loads(storage.read(record_key(3)))
    storage.write(record_key(3), [memoryview(sealed(json.dumps({**value, "version": 2}).encode()))])
    storage.delete([HINT_KEY])
    for use in (lambda log: log.newest(), lambda log: log.append(lambda _: Noop())):
        with pytest.raises(UnsupportedVersion, match="Upgrade"):
            use(Log(storage))


# The storage's clock


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of storages in memory run ahead."""
    monkeypatch.setattr(memory, "time", SimpleNamespace(time=lambda: time.time() + 5000.0))


def test_the_clock_is_the_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = new_storage()
    log = fill(storage, 2)
    written = log.record_time(2)
    assert written == storage.stat(record_key(2)).modified_seconds
    later(monkeypatch)
    assert log.store_now_seconds() - written >= 5000.0
    assert [file.key for file in storage.list("probe/")] == []


def test_the_clock_of_a_reader_is_never_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = filled(2)
    later(monkeypatch)
    reading = Log(wrap(storage, FailAt("write *", AccessDenied("read only"), times=None)))
    assert reading.store_now_seconds() == reading.record_time(2)


# Appending


def test_what_a_decision_raises_passes_through() -> None:
    storage = filled(2)

    def decide(newest: Record | None) -> Change:
        raise KeyError(newest.number if newest else 0)

    with pytest.raises(KeyError, match="2"):
        Log(storage).append(decide)
    assert numbers_in(storage) == [1, 2]


@pytest.mark.parametrize("bare", [False, True])
def test_a_lost_race_is_decided_anew_with_a_sign_of_life(bare: bool) -> None:
    storage = filled(2)
    log = Log(BareStorage(storage) if bare else storage, single_writer=bare)
    rival = Log(storage)
    seen: list[int] = []
    signs: list[int] = []

    def decide(newest: Record | None) -> Change:
        assert newest
        seen.append(newest.number)
        if len(seen) < 3:
            with beating(no_beat):
                rival.append(lambda _: Noop())
        return commit(5)

    with beating(lambda: signs.append(len(seen))):
        record = log.append(decide)
    assert seen == [2, 3, 4]
    assert signs == [0, 1, 2]
    assert record
    assert record.number == 5
    assert log.verify_chain() == []


def test_a_decision_may_append_something_first() -> None:
    storage = new_storage()
    log = Log(storage)
    claimed: list[Record | None] = []

    def decide(newest: Record | None) -> Change:
        if not claimed:
            claimed.append(log.append(lambda _: CLAIM))
            return Noop()  # decided on what is no longer the newest record: it is asked again
        return commit(1)

    record = log.append(decide)
    assert record
    assert record.number == 2
    assert record.state.live == {2}


def test_threads_of_one_log_and_of_many_write_one_chain() -> None:
    storage = new_storage()
    shared = fill(storage, 1)
    logs = [shared, shared, Log(storage), Log(storage)]

    def work(log: Log, thread: int) -> list[int]:
        return [append(log, commit(step)).number for step in range(100 * thread, 100 * thread + 25)]

    with ThreadPoolExecutor(len(logs)) as pool:
        found = [number for numbers in pool.map(work, logs, range(len(logs))) for number in numbers]
    assert sorted(found) == list(range(2, 102))
    assert shared.verify_chain() == []
    newest = newest_in(storage)
    assert newest.state.live == set(range(2, 102))


# Creates that go wrong


def appended(storage: Storage, hook: Callable[[Call], None], retry: RetryConfig = QUICK) -> Record:
    return append(Log(with_retries(wrap(storage, hook), retry)), commit(7))


@pytest.mark.parametrize("retry", [ONCE, QUICK], ids=["once", "quick"])
@pytest.mark.parametrize("error", [StorageUnavailable("reset"), StorageError("odd"), StorageFull("full")], ids=str)
def test_a_lost_reply_is_settled_by_reading_back(retry: RetryConfig, error: StorageError) -> None:
    storage = filled(2)
    assert appended(storage, FailAt("create log/*", error, effect="after"), retry).number == 3
    assert numbers_in(storage) == [1, 2, 3]
    assert Log(storage).verify_chain() == []


def test_a_create_that_had_no_effect_is_made_again() -> None:
    storage = filled(2)
    assert appended(storage, FailAt("create log/*")).number == 3
    assert numbers_in(storage) == [1, 2, 3]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_create_that_fails_in_each_try_is_replaced_by_a_noop(is_lost: bool) -> None:
    storage, hooks = filled(2), [FailAt("create log/*", times=QUICK.retry_attempts)]
    if is_lost:
        hooks.append(FailAt("create log/*", effect="after", times=1))
    with pytest.raises(StorageUnavailable) as caught:
        appended(storage, combine(*hooks))
    assert caught.value.committed is False
    assert numbers_in(storage) == [1, 2, 3]
    assert isinstance(Log(storage).records([3])[0].change, Noop)
    assert Log(storage).verify_chain() == []


@pytest.mark.parametrize("error", [AccessDenied("read only"), StorageFull("no space")], ids=str)
def test_a_storage_that_refuses_has_answered(error: StorageError) -> None:
    storage = filled(2)
    with pytest.raises(type(error), match=str(error)) as caught:
        appended(storage, FailAt("create log/*", error, times=None))
    assert caught.value.committed is False
    assert numbers_in(storage) == [1, 2]


@pytest.mark.parametrize("effect", ["before", "after"])
def test_what_cannot_be_settled_is_unknown(effect: str) -> None:
    storage = filled(2)
    down = combine(FailAt("create *", effect=effect, times=None), FailAt("read log/*03.json", skip=1, times=None))  # type: ignore[arg-type]
    with pytest.raises(StorageUnavailable, match=r"not known whether log/0000000003.json was written") as caught:
        appended(storage, down)
    assert caught.value.committed is None
    assert numbers_in(storage) == ([1, 2, 3] if effect == "after" else [1, 2])


class Late(MemoryStorage):
    """The first create times out and arrives later: just before the next create, or just after it."""

    def __init__(self, uri: str, *, arrives: str) -> None:
        super().__init__(uri)
        self.arrives = arrives
        self.delayed: tuple[str, bytes] | None = None
        self.creates = 0

    def create(self, key: str, data: bytes) -> bool:
        self.creates += 1
        if self.creates == 1:
            self.delayed = (key, data)
            raise StorageUnavailable("timed out")
        if self.creates == 2 and self.delayed and self.arrives == "before":
            super().create(*self.delayed)
        created = super().create(key, data)
        if self.creates == 2 and self.delayed and self.arrives == "after":
            assert not super().create(*self.delayed)
        return created


@pytest.mark.parametrize("retry", [ONCE, QUICK], ids=["once", "quick"])
@pytest.mark.parametrize("arrives", ["before", "after"])
def test_a_create_that_arrives_late_is_in_the_log_once_or_never(arrives: str, retry: RetryConfig) -> None:
    storage = filled(2)
    log, is_in = Log(with_retries(Late(storage.uri, arrives=arrives), retry)), (retry, arrives) != (ONCE, "after")
    with nullcontext() if is_in else pytest.raises(StorageUnavailable, match="timed out") as caught:
        assert append(log, commit(7)).number == 3
    assert caught is None or caught.value.committed is False
    assert Log(storage).verify_chain() == []
    changes = [type(found.change) for found in Log(storage).records(numbers_in(storage))]
    assert changes == [Claim, Commit, Commit if is_in else Noop]


def test_a_refusal_after_a_try_without_an_answer_proves_nothing() -> None:
    """The first create may still arrive."""
    lost = combine(FailAt("create log/*"), FailAt("create log/*", AccessDenied("read only"), times=None))
    with pytest.raises(AccessDenied, match="not known whether") as caught:
        appended(filled(2), lost)
    assert caught.value.committed is None


class RepeatsCreates(MemoryStorage):
    """A client that repeats a create whose reply was lost, and reports the conflict with itself."""

    def create(self, key: str, data: bytes) -> bool:
        super().create(key, data)
        return super().create(key, data)


def test_a_conflict_with_oneself_is_no_conflict() -> None:
    storage = RepeatsCreates(new_storage().uri)
    log = Log(storage)
    assert log.append(lambda _: CLAIM)
    assert append(log, commit(1)).number == 2
    assert numbers_in(storage) == [1, 2]


def test_a_conflict_with_oneself_that_cannot_be_read_is_unknown() -> None:
    log = Log(wrap(RepeatsCreates(filled(1).uri), FailAt("read log/*02.json", skip=1, times=None)))
    with pytest.raises(StorageUnavailable, match="not known whether") as caught:
        log.append(lambda _: commit(1))
    assert caught.value.committed is None


def test_a_conflict_with_oneself_that_is_seen_late_is_none() -> None:
    late = FailAt("read log/*02.json", FileMissing("not yet"), skip=1, times=2)
    log = Log(wrap(RepeatsCreates(filled(1).uri), late))
    assert append(log, commit(1)).number == 2


def test_an_interrupt_leaves_the_log_usable() -> None:
    storage = filled(2)
    for effect in ("before", "after"):
        interrupt = FailAt("create log/*", KeyboardInterrupt(), effect=effect)  # type: ignore[arg-type]
        log = Log(wrap(storage, interrupt))
        with pytest.raises(KeyboardInterrupt):
            log.append(lambda _: commit(7))
        assert log.append(lambda _: commit(8))
    assert Log(storage).verify_chain() == []


class CountingDisk(LocalStorage):
    """A disk that says what it was asked to make durable, and fails at that as often as it is set to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.persisted: list[str] = []
        self.failures = 0
        self.error: type[StorageError] = StorageError

    def persist(self, keys: Sequence[str]) -> None:
        if self.failures:
            self.failures -= 1
            raise self.error("fsync failed")
        super().persist(keys)
        self.persisted += keys


@pytest.mark.parametrize("failures", [0, 2])
def test_on_a_disk_a_record_that_landed_with_an_error_is_made_durable(failures: int, tmp_path: Path) -> None:
    disk = CountingDisk(tmp_path)
    fill(disk, 2)
    disk.failures = failures
    log = Log(with_retries(wrap(disk, FailAt("create log/*", effect="after")), QUICK))
    if failures:
        with pytest.raises(StorageError, match="fsync failed") as caught:
            log.append(lambda _: commit(7))
        assert caught.value.committed is True
    else:
        assert log.append(lambda _: commit(7))
        assert disk.persisted == [record_key(3)]
    assert numbers_in(disk) == [1, 2, 3]


# Forks


def change_record(storage: Storage, number: int) -> None:
    """Give a record other bytes, still a valid record."""
    value = json.loads(storage.read(record_key(number)))
    storage.write(record_key(number), [memoryview(sealed(json.dumps({**value, "created_at": 7.0}).encode()))])


@pytest.mark.parametrize("number", [1, 4, 8])
def test_a_broken_chain_can_be_read_and_not_written(number: int) -> None:
    storage = filled(9)
    change_record(storage, number)
    log = Log(storage)
    newest = log.newest()
    assert newest
    assert newest.number == 9
    assert log.records([number])
    for _ in range(2):
        with pytest.raises(StoreForked, match="ckptstore cp") as caught:
            log.append(lambda _: Noop())
        assert caught.value.committed is False
    assert numbers_in(storage) == list(range(1, 10))
    (problem,) = log.verify_chain()
    assert record_key(number + 1) in problem


@pytest.mark.parametrize("number", [1, 2, 3, 7, 9, 15])
@pytest.mark.parametrize("has_hint", [True, False])
def test_a_missing_record_is_a_fault_wherever_the_search_for_the_newest_looks(number: int, has_hint: bool) -> None:
    storage = filled(15)
    storage.delete([record_key(number)] if has_hint or number == 15 else [record_key(number), "latest.json"])
    assert Log(storage).verify_chain() == [f"{record_key(number)} is missing, or, in a replica, not here yet"]


def test_an_empty_log_beside_checkpoints_is_a_fault() -> None:
    storage = new_storage()
    assert Log(storage).verify_chain() == []
    storage.write("checkpoints/step-0000000001-e0001-0123abcd/model.pt", [memoryview(b"x")])
    (problem,) = Log(storage).verify_chain()
    assert record_key(1) in problem


def test_the_newest_64_links_are_checked_before_the_first_write() -> None:
    storage = filled(100)
    change_record(storage, 36)
    with pytest.raises(StoreForked):
        Log(storage).append(lambda _: Noop())
    change_record(storage, 20)
    other = new_storage()
    fill(other, 100)
    change_record(other, 30)
    assert Log(other).append(lambda _: Noop())
    assert len(Log(other).verify_chain()) == 1


@pytest.mark.parametrize("broken", ["removed", "garbage"])
def test_a_hole_in_the_chain_is_a_fork_to_a_writer(broken: str) -> None:
    storage = filled(9)
    if broken == "removed":
        storage.delete([record_key(5)])
    else:
        storage.write(record_key(5), [memoryview(b"garbage")])
    log = Log(storage)
    assert log.newest()
    with pytest.raises(StoreForked, match="log/0000000005"):
        log.append(lambda _: Noop())
    (problem,) = log.verify_chain()
    assert record_key(5) in problem


def test_a_first_record_that_follows_on_another_is_a_fork() -> None:
    storage, other = new_storage(), new_storage()
    fill(other, 2)
    value = json.loads(other.read(record_key(2)))
    storage.write(record_key(1), [memoryview(sealed(json.dumps({**value, "number": 1}).encode()))])
    with pytest.raises(StoreForked):
        Log(storage).append(lambda _: Noop())


@pytest.mark.parametrize("is_checked", [False, True])
def test_records_of_another_history_behind_what_was_seen_are_a_fork(is_checked: bool) -> None:
    storage = new_storage()
    log = fill(storage, 3)
    if is_checked:
        log.checked_newest()
    change_record(storage, 3)
    Log(storage).append(lambda _: Noop())
    with pytest.raises(StoreForked):
        log.append(lambda _: Noop())
    assert numbers_in(storage) == [1, 2, 3, 4]


def test_a_newest_record_of_another_size_is_one_of_another_store() -> None:
    """On a bucket a look at the size is all that it costs."""
    storage = new_storage()
    log = fill(storage, 2)
    storage.write(record_key(2), [memoryview(storage.read(record_key(2)) + b" ")])
    with pytest.raises(StoreMissing, match="is another one") as caught:
        append(log, Noop())
    assert caught.value.committed is False
    assert numbers_in(storage) == [1, 2]


def test_a_record_that_changes_while_it_is_read_is_a_fork() -> None:
    storage, changed = filled(3), list[int]()

    def change(call: Call) -> None:
        if (call.verb, call.key, call.phase) == ("read", record_key(3), "after") and not changed:
            changed.append(3)
            change_record(storage, 3)
            log.records([3])

    log = Log(wrap(storage, change))
    with pytest.raises(StoreForked, match="has changed since"):
        log.append(lambda _: Noop())


def with_state(storage: Storage, **wrong: object) -> Log:
    """A log of three records, and of one more with a state that is wrong."""
    log = fill(storage, 3)
    newest = log.newest()
    assert newest
    value = json.loads(Record.following(newest, Noop(), write_id="x", created_at=0.0).encode())
    value["state"].update(wrong)
    assert storage.create(record_key(4), sealed(json.dumps(value).encode()))
    return log


@pytest.mark.parametrize("wrong", [{"live": "2"}, {"pinned": "2"}, {"resume_from": 2}], ids=str)
def test_a_state_that_its_change_does_not_lead_to_is_a_fault(wrong: dict[str, object]) -> None:
    storage = new_storage()
    with_state(storage, **wrong)
    assert Log(storage).verify_chain() == ["log/0000000004.json has a state that its change does not lead to"]


def test_the_chain_check_also_follows_the_rules() -> None:
    storage = new_storage()
    with_state(storage, live="2").append(lambda _: Noop())
    bad = json.loads(storage.read(record_key(5)))
    bad |= {"kind": "pin", "change": {"numbers": "3", "epoch": None}}
    storage.write(record_key(5), [memoryview(sealed(json.dumps(bad).encode()))])
    assert "breaks a rule" in Log(storage).verify_chain()[1]


# Without create-if-absent


def test_without_create_if_absent_a_promise_is_needed() -> None:
    storage = new_storage()
    with pytest.raises(InvalidInput, match="single_writer=True"):
        Log(BareStorage(storage)).append(lambda _: CLAIM)
    assert list(storage.list("")) == []
    assert Log(BareStorage(storage)).newest() is None


def test_a_single_writer_writes_and_reads_back() -> None:
    storage = new_storage()
    log = Log(BareStorage(storage), single_writer=True)
    for number in range(1, 8):
        assert log.append(lambda _, number=number: CLAIM if number == 1 else commit(number))  # type: ignore[misc]
    assert log.verify_chain() == []
    assert numbers_in(storage) == list(range(1, 8))


@pytest.mark.parametrize("effect", ["before", "after"])
def test_a_single_writer_repeats_the_same_bytes(effect: str) -> None:
    storage = filled(2)
    counts = CountCalls()
    flaky = combine(counts, FailAt("write log/*", effect=effect, times=2))  # type: ignore[arg-type]
    log = Log(with_retries(wrap(BareStorage(storage), flaky), QUICK), single_writer=True)
    assert append(log, commit(7)).number == 3
    assert Log(storage).verify_chain() == []
    written = [call for call in counts.calls if call.verb == "write" and call.key.startswith("log/")]
    assert len(written) == 3


def test_a_torn_write_of_a_single_writer_counts_as_not_there() -> None:
    storage = filled(4)
    crash = TearAt("write log/*", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Log(wrap(BareStorage(storage), crash), single_writer=True).append(lambda _: commit(7))
    assert numbers_in(storage) == [1, 2, 3, 4, 5]
    for hint in (True, False):
        if not hint:
            storage.delete([HINT_KEY])
        newest = Log(BareStorage(storage)).newest()
        assert newest
        assert newest.number == 4
    assert append(Log(BareStorage(storage), single_writer=True), commit(8)).number == 5
    assert Log(storage).verify_chain() == []


@pytest.mark.parametrize("error", [AccessDenied("read only"), StorageFull("no space")], ids=str)
def test_a_single_writer_that_is_refused_has_written_nothing(error: StorageError) -> None:
    storage = filled(2)
    refused = wrap(BareStorage(storage), FailAt("write log/*", error, times=None))
    with pytest.raises(type(error)) as caught:
        Log(with_retries(refused, QUICK), single_writer=True).append(lambda _: commit(7))
    assert caught.value.committed is False


def test_a_single_writer_that_is_refused_later_does_not_know() -> None:
    """The first write may still arrive."""
    failures = combine(FailAt("write log/*"), FailAt("write log/*", StorageFull("no space"), times=None))
    with pytest.raises(StorageFull) as caught:
        Log(with_retries(wrap(BareStorage(filled(2)), failures), QUICK), single_writer=True).append(lambda _: commit(7))
    assert caught.value.committed is None


def test_a_single_writer_that_cannot_read_back_does_not_know() -> None:
    storage = filled(2)
    down = combine(FailAt("write log/*", effect="after", times=None), FailAt("read log/*03.json", skip=2, times=None))
    with pytest.raises(StorageUnavailable) as caught:
        Log(with_retries(wrap(BareStorage(storage), down), QUICK), single_writer=True).append(lambda _: commit(7))
    assert caught.value.committed is None


def test_an_undurable_write_of_a_single_writer_is_written_anew(tmp_path: Path) -> None:
    fill(LocalStorage(tmp_path), 2)

    class BareDisk(CountingDisk):
        create = None  # type: ignore[assignment]

    disk = BareDisk(tmp_path)
    disk.failures = 1
    with pytest.raises(StorageError, match="fsync failed") as caught:
        Log(disk, single_writer=True).append(lambda _: commit(7))
    assert caught.value.committed is None
    counts = CountCalls()
    assert Log(wrap(disk, counts), single_writer=True).append(lambda _: commit(8))
    assert counts.counts["persist"] == 1
    disk.failures, disk.error = 2, StorageUnavailable
    assert Log(disk, single_writer=True).append(lambda _: commit(9))
    assert disk.failures == 0


# Who a store is


def test_an_identity_is_created_once() -> None:
    storage = new_storage()
    assert read_identity(storage) is None
    store_id = read_or_create_identity(storage)
    assert len(store_id) == 32
    assert read_or_create_identity(storage) == read_identity(storage) == store_id
    assert read_or_create_store_json(storage, store_id="ff" * 16).store_id == store_id
    assert read_or_create_store_json(new_storage(), store_id="ff" * 16).store_id == "ff" * 16


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("effect", ["before", "after"])
def test_an_identity_survives_lost_replies(bare: bool, effect: str) -> None:
    storage = new_storage()
    inner: Storage = BareStorage(storage) if bare else storage
    flaky = FailAt(lambda call: call.verb in ("create", "write"), effect=effect, times=2)  # type: ignore[arg-type]
    found = read_or_create_store_json(with_retries(wrap(inner, flaky), QUICK))
    stored = read_store_json(storage)
    assert stored
    assert stored.store_id == found.store_id


def test_starters_at_the_same_time_agree_on_the_identity() -> None:
    storage = new_storage()
    start = threading.Barrier(8)

    def work(_: int) -> str:
        start.wait()
        return read_or_create_identity(storage)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(work, range(8)))) == 1


def test_a_root_that_ray_keeps_gets_no_log() -> None:
    storage = new_storage()
    read_or_create_store_json(storage, kept_by=KEPT_BY_RAY)
    with pytest.raises(InvalidInput, match="kept by ray"):
        read_or_create_identity(storage)


def test_unknown_fields_of_an_identity_are_kept() -> None:
    storage = new_storage()
    store_id = read_or_create_identity(storage)
    value = json.loads(storage.read(STORE_KEY))
    storage.write(STORE_KEY, [memoryview(json.dumps({**value, "later": 1}).encode())])
    found = read_store_json(storage)
    assert found
    assert found.store_id == store_id
    assert json.loads(found.encode())["later"] == 1


def test_an_identity_that_is_none_is_damaged() -> None:
    storage = new_storage()
    storage.write(STORE_KEY, [memoryview(b'{"version":1,"store_id":"","kept_by":"x","created_at":1}')])
    with pytest.raises(CheckpointDamaged, match=r"store\.json"):
        read_or_create_identity(storage)
