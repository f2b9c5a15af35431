"""What a look sees, and what it costs: requests are counted, and none of them writes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptstore import KeepLatest, StorageGroup, open_store
from ckptstore.config import RetryConfig
from ckptstore.errors import AccessDenied, InvalidInput, StorageUnavailable, StoreMissing
from ckptstore.format.changes import Claim
from ckptstore.format.layout import Attempt
from ckptstore.group.storage_board import StorageBoard
from ckptstore.log import Log
from ckptstore.log.identity import read_or_create_store_json
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.memory import MemoryStorage
from ckptstore.storage.open import open_storage
from ckptstore.testing.faults import Call, CountCalls, FailAt, combine, wrap
from ckptstore.testing.s3_server import s3_server
from ckptstore.tools.watching import attempt_finder
from ckptstore.tools.watching.attempt_finder import step_prefixes
from ckptstore.tools.watching.in_flight import SILENT_SECONDS
from ckptstore.tools.watching.store_watcher import MOST_RECORDS, StoreWatcher
from ckptstore.tools.watching.written import data_bytes

MIB = 1 << 20
READS = {"read", "read_into", "read_steps", "stat", "list", "unfinished", "close"}
ONCE = RetryConfig(retry_attempts=1)


def only_reads(call: Call) -> None:
    assert call.verb in READS, f"a look calls {call.verb}"


class Clock:
    """A clock that the test moves."""

    def __init__(self, seconds: float = 1000.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


class Scene:
    """A store, a watcher whose every call is counted and may only read, and clocks."""

    def __init__(self, storage: Any, *hooks: Any) -> None:
        self.storage, self.calls, self.clock = storage, CountCalls(), Clock()
        newest = max((file.modified_seconds for file in storage.list("")), default=0.0)
        self.wall = Clock(newest)
        watched = wrap(storage, combine(only_reads, self.calls, *hooks))
        self.watcher = StoreWatcher(watched, clock=self.clock, wall_clock=self.wall)

    def told(self) -> list[str]:
        return [change.text for change in self.look().changes]

    def look(self, after_seconds: float = 1.0) -> Any:
        self.clock.seconds += after_seconds
        self.wall.seconds += after_seconds
        self.calls.clear()
        return self.watcher.look()

    def put(self, name: str, size_bytes: int, *, step: int = 9, epoch: int = 1) -> None:
        key = Attempt(step, epoch, "0123abcd").key(name)
        self.storage.write(key, [memoryview(bytes(size_bytes))])

    def remove(self, *, step: int = 9, epoch: int = 1) -> None:
        self.storage.delete([file.key for file in self.storage.list(Attempt(step, epoch, "0123abcd").prefix)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1, 2 and 3 of a thousand bytes were saved; step 1 is in the trash."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "model.pt").write_bytes(bytes(1000))
    with open_store(tmp_path / "store", retention=KeepLatest(2)) as opened:
        for step in (1, 2, 3):
            opened.save_directory(step, tmp_path / "source", metrics={"loss": 1 / step})
    return tmp_path / "store"


@pytest.fixture(params=["disk", "memory"])
def scene(request: pytest.FixtureRequest, root: Path) -> Scene:
    """The same store on a disk, and where nothing but files can be listed."""
    disk = LocalStorage(root)
    if request.param == "disk":
        return Scene(disk)
    return Scene(copied(disk, f"memory://{root.name}-{os.getpid()}-{id(request)}"))


def copied(disk: LocalStorage, uri: str) -> MemoryStorage:
    memory = MemoryStorage(uri)
    for file in disk.list(""):
        memory.write(file.key, [memoryview(disk.read(file.key))])
    return memory


def test_a_store_at_rest(scene: Scene) -> None:
    for key in ("checkpoints/step-x/a", "checkpoints/.hidden/a", "checkpoints/a"):  # not ours
        scene.storage.write(key, [memoryview(b"a")])
    look = scene.look()
    assert (look.durable.step, look.durable.number, look.num_live) == (3, 4, 2)
    assert [commit.step for commit in look.commits] == [3, 2, 1]  # step 1 is in the trash
    assert (look.attempts, look.changes, look.notes, look.signs) == ((), (), (), None)


def test_an_attempt_grows_and_has_a_rate_a_guess_and_a_share(scene: Scene) -> None:
    scene.look()
    scene.put("a", 100)
    (begun,) = scene.look().changes
    assert (begun.kind, begun.step) == ("begin", 9)
    scene.put("b", 300)
    (attempt,) = scene.look(2.0).attempts
    assert (attempt.status, attempt.num_files, attempt.size_bytes) == ("writing", 2, 400)
    assert (attempt.expected_bytes, attempt.expected_as_step) == (1000, 3)
    assert attempt.bytes_per_second == pytest.approx(150.0)
    assert attempt.left_seconds == pytest.approx(600 / 150.0)
    scene.put("c", 1000)
    (attempt,) = scene.look().attempts
    assert attempt.left_seconds is None  # there is more than the guess
    scene.put("ckptstore.json", 10)
    (attempt,) = scene.look().attempts
    assert (attempt.status, attempt.size_bytes, attempt.num_files) == ("committing", 1400, 3)


def test_a_file_that_is_written_anew_makes_no_negative_rate(scene: Scene) -> None:
    scene.put("a", 50)
    scene.look()
    scene.put("a", 500)
    scene.look()
    scene.put("a", 100)
    (attempt,) = scene.look().attempts
    assert (attempt.size_bytes, attempt.bytes_per_second, attempt.left_seconds) == (100, None, None)


def test_the_rate_forgets_what_is_long_ago(scene: Scene) -> None:
    scene.put("a", 900)
    scene.look()
    scene.put("b", 50_000)
    for number in range(10):
        scene.put(f"b{number}", 10)
        (attempt,) = scene.look(10.0).attempts
    assert attempt.bytes_per_second == pytest.approx(1.0)


def test_an_attempt_without_growth_falls_silent_and_ends(scene: Scene) -> None:
    scene.put("a", 100)
    assert scene.look().attempts[0].status == "writing"
    (attempt,) = scene.look(SILENT_SECONDS).attempts
    assert (attempt.status, attempt.silent_seconds >= SILENT_SECONDS) == ("silent", True)
    scene.put("b", 100)
    assert scene.look().attempts[0].status == "writing"
    scene.remove()
    assert scene.told() == ["step 9 ended without a commit"]
    scene.put("state-rank=00000-00.distcp", 100)
    scene.wall.seconds += 3600  # it was silent before the first look at it
    (attempt,) = scene.look().attempts
    assert (attempt.status, attempt.expected_bytes) == ("silent", None), "those before are directories"


def test_a_newer_job_ends_the_attempts_of_the_one_before(scene: Scene) -> None:
    scene.put("a", 100)
    scene.look()
    Log(scene.storage).append(lambda _: Claim(start_token="next", world_size=4))
    look = scene.look()
    assert [change.kind for change in look.changes] == ["claim", "end"]
    assert "a job of 4 ranks has claimed the store, writer epoch 2" in look.changes[0].text
    assert "a newer job has claimed the store" in look.changes[1].text
    assert (look.attempts, look.epoch) == ((), 2)
    scene.put("a", 100, epoch=2)
    (attempt,) = scene.look().attempts
    assert attempt.expected_bytes is None  # no checkpoint before was of four ranks


def test_changes_of_the_log_are_told(root: Path) -> None:
    scene = Scene(LocalStorage(root))
    scene.look()
    with open_store(root) as opened:
        opened.pin(2)
        opened.unpin(2)
        opened.roll_back(2)
        assert scene.told() == ["step 2 pinned", "step 2 unpinned", "step 3 moved to the trash"]
        assert scene.look().durable.step == 2, "what a resume would find"
        opened.restore(3)
        opened.retain(KeepLatest(1))
    assert scene.told() == ["step 3 restored from the trash", "step 2 moved to the trash"]
    assert scene.told() == []


def test_what_is_written_of_a_file_that_has_its_room_already(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    part_bytes = storage.part_bytes(64 * MIB)
    writer = storage.open_parts("a/b", 64 * MIB)
    path = str(tmp_path / "a/b")
    try:
        assert os.stat(path).st_size == 64 * MIB
        assert data_bytes(path, 64 * MIB) == 0
        part = memoryview(bytes(part_bytes))
        for index in (0, 2, 3):
            writer.write_part(index * part_bytes, [part])
        assert data_bytes(path, 64 * MIB) == 3 * part_bytes
    finally:
        writer.abort()
    assert data_bytes(path, 7) == 7  # it is gone: the listing was right when it was made


def test_signs_of_life_keep_an_attempt_in_flight(scene: Scene) -> None:
    Log(scene.storage).append(lambda _: Claim(start_token="signs", world_size=2))
    scene.put("a", 100, epoch=2)
    board = StorageBoard(scene.storage, start_token="signs", world_size=2)
    for rank in (0, 1):
        board.give_sign(f"life.{rank:05d}")
    assert scene.look().attempts[0].status == "writing"
    scene.look(SILENT_SECONDS / 2)
    again = StorageBoard(scene.storage, start_token="signs", world_size=2, number=lambda: 2)
    again.give_sign("lane.life.00001")
    StorageBoard(scene.storage, start_token="signs-2", world_size=3).give_sign("life.00002")
    look = scene.look(SILENT_SECONDS / 2)
    assert (look.signs.num_ranks, look.signs.oldest_rank) == (2, 0)
    assert look.signs.last_seconds == 0.0
    assert look.signs.oldest_seconds > SILENT_SECONDS / 2
    assert look.attempts[0].status == "writing"
    assert scene.look(SILENT_SECONDS).attempts[0].status == "silent"


def test_a_start_token_that_is_no_name_is_not_asked_for(root: Path) -> None:
    storage = LocalStorage(root)
    Log(storage).append(lambda _: Claim(start_token="../../etc", world_size=1))
    scene = Scene(storage)
    assert scene.look().signs is None
    assert all("etc" not in call.key for call in scene.calls.calls)


def test_a_look_at_a_store_at_rest_costs_few_requests(scene: Scene) -> None:
    scene.look()
    assert scene.calls.total <= 14
    scene.look()
    assert scene.calls.total <= 4, scene.calls.counts
    scene.put("a", 100)
    scene.look()
    assert scene.calls.total <= 5, scene.calls.counts


def test_what_breaks_off_is_told_by_the_next_look(root: Path) -> None:
    fault = FailAt("list group/*", StorageUnavailable("away"), skip=1)
    scene = Scene(LocalStorage(root), fault)
    scene.look()
    with open_store(root) as opened:
        opened.pin(3)
    with pytest.raises(StorageUnavailable):
        scene.look()
    assert scene.told() == ["step 3 pinned"]
    denied = FailAt("list group/*", AccessDenied("forbidden"), times=None)
    assert Scene(LocalStorage(root), denied).look().notes == ("signs of life cannot be seen: forbidden",)


def test_a_record_is_told_once_where_a_later_one_fails(root: Path) -> None:
    fault = FailAt("read log/0000000002.json", StorageUnavailable("away"))
    with open_store(root) as opened:
        for step in range(4, 9):
            opened.save_directory(step, root.parent / "source")
        for _ in range(8):  # so that the first look need not read the record of step 1
            opened.pin(3)
            opened.unpin(3)
        scene = Scene(LocalStorage(root), fault)
        scene.look()
        opened.pin(8)
        opened.restore(1)
    with pytest.raises(StorageUnavailable):
        scene.look()
    assert scene.told() == ["step 8 pinned", "number 2 restored from the trash"]


def test_a_store_that_is_begun_anew_in_the_place_of_another(root: Path) -> None:
    scene = Scene(LocalStorage(root))
    scene.look()
    shutil.rmtree(root)
    with pytest.raises(StoreMissing, match="not there any more"):
        scene.look()
    with open_store(root) as opened:
        opened.save_directory(1, root.parent / "source")
    look = scene.look()
    assert (look.durable.step, look.num_live, [commit.step for commit in look.commits]) == (1, 1, [1])
    assert [change.text for change in look.changes] == ["another store is in the place of the one before"]
    assert scene.look().changes == ()


def test_of_very_many_records_the_last_are_told(root: Path) -> None:
    scene = Scene(LocalStorage(root))
    scene.look()
    with open_store(root) as opened:
        for _ in range(MOST_RECORDS // 2 + 5):
            opened.pin(3)
            opened.unpin(3)
    changes = scene.look().changes
    assert changes[0].text == "10 records more than can be told"
    assert len(changes) == 1 + MOST_RECORDS


def test_there_is_no_store_or_it_has_no_log(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing, match="There is no store"):
        StoreWatcher(LocalStorage(tmp_path / "nothing")).look()
    read_or_create_store_json(LocalStorage(tmp_path / "rays"), kept_by="ray")
    with pytest.raises(InvalidInput, match="kept by ray"):
        StoreWatcher(LocalStorage(tmp_path / "rays")).look()


def test_a_directory_that_may_not_be_listed_ends_no_attempt(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    scene = Scene(LocalStorage(root))
    scene.put("a", 100)
    scene.look()
    with monkeypatch.context() as patch:
        patch.setattr(attempt_finder.os, "listdir", refuse)  # whoever tests as root may list everything
        with pytest.raises(AccessDenied, match="Permission denied"):
            scene.look()
    look = scene.look()
    assert (len(look.attempts), look.changes) == (1, ())


def test_many_files_are_asked_for_by_the_next_steps(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_finder, "MOST_LISTED_FILES", 50)
    memory = copied(LocalStorage(root), f"memory://many-{os.getpid()}")
    for step in range(10_000, 10_100):
        memory.write(Attempt(step, 1, "00000000").key("ckptstore.json"), [memoryview(b"{}")])
    scene = Scene(memory)
    scene.put("a", 100, step=4)
    scene.put("a", 100, step=15_000)
    look = scene.look()
    assert [attempt.step for attempt in look.attempts] == [4]
    assert "more than 50 files" in look.notes[0]
    assert scene.look().attempts[0].step == 4
    assert scene.calls.total <= 25


def test_of_many_files_the_steps_after_a_roll_back_are_asked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_finder, "MOST_LISTED_FILES", 5)
    uri = f"memory://rolled-back-{os.getpid()}"
    with open_store(uri) as store:
        for step in (1000, 2000, 90_000, 91_000):
            store.save(step, {"step": step})
        store.roll_back(2000)
    scene = Scene(MemoryStorage(uri))
    scene.put("a", 100, step=3000)
    assert [attempt.step for attempt in scene.look().attempts] == [3000]


@pytest.mark.parametrize(
    ("low", "high", "unit"),
    [(0, 0, 1), (3, 13, 1), (12_345, 13_345, 100), (99_999, 199_989, 9_999), (9_999_999_990, 10_000_000_100, 10)],
)
def test_prefixes_cover_the_steps_and_are_few(low: int, high: int, unit: int) -> None:
    prefixes = list(step_prefixes(low, high, unit=unit))
    assert len(prefixes) <= 25
    for step in {low, high, (low + high) // 2, min(high, low + unit)}:
        if step < 10**10:
            assert sum(f"{step:010d}".startswith(prefix) for prefix in prefixes) == 1, (step, prefixes)


@pytest.mark.slow
def test_ten_thousand_checkpoints_are_looked_at_quickly(tmp_path: Path) -> None:
    """By the number of calls: names that are known to be finished are not asked for again."""
    storage = LocalStorage(tmp_path, durable=False)
    with open_store(tmp_path, durable=False) as opened:
        source = tmp_path.parent / "source"
        source.mkdir(exist_ok=True)
        opened.save_directory(1, source)
    for step in range(2, 10_002):
        storage.write(Attempt(step, 1, "00000000").key("ckptstore.json"), [memoryview(b"{}")])
    scene = Scene(storage)
    assert scene.look().attempts == ()
    assert scene.calls.total <= 14
    scene.put("a", 100, step=20_000)
    assert [attempt.step for attempt in scene.look().attempts] == [20_000]
    assert scene.calls.total <= 5


def test_an_upload_that_is_begun_is_seen_before_anything_can_be_listed(tmp_path: Path) -> None:
    with s3_server(buckets=["test"]) as server:
        group = StorageGroup(rank=0, world_size=1, start_token="one")
        (tmp_path / "f").write_bytes(b"f")
        with open_store("s3://test/run", storage_options=server.storage_options, group=group) as opened:
            opened.save_directory(1, tmp_path)
        storage: Any = open_storage("s3://test/run", storage_options=server.storage_options)
        writer = storage.open_parts(Attempt(2, 1, "0123abcd").key("big"), 20 * MIB)
        writer.write_part(0, [memoryview(bytes(storage.part_bytes(20 * MIB)))])
        scene = Scene(storage)
        (attempt,) = scene.look().attempts
        assert (attempt.step, attempt.num_uploads, attempt.num_files, attempt.size_bytes) == (2, 1, 0, 0)
        scene.look()
        assert scene.calls.counts == {"list": 2, "unfinished": 1, "read": 2}
        refused = Scene(storage, FailAt("unfinished *", AccessDenied("forbidden"), times=None))
        assert refused.look().notes == ("uploads that are begun cannot be seen: forbidden",)
        refused.look()
        assert "unfinished" not in refused.calls.counts  # nobody asks twice
        writer.abort()
        assert [change.kind for change in scene.look().changes] == ["end"]
        storage.close()
