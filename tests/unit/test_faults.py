"""Wrapped storages have the same powers, and hooks do what they say."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckptstore.errors import AccessDenied, FileMissing, InvalidInput, StorageUnavailable
from ckptstore.storage import base
from ckptstore.storage.memory import MemoryStorage
from ckptstore.testing import hooked
from ckptstore.testing.faults import (
    Call,
    CountCalls,
    Delay,
    FailAt,
    KillAt,
    TearAt,
    combine,
    hook_from_environment,
    wrap,
)
from ckptstore.testing.ranks import run_ranks


@pytest.fixture
def memory() -> MemoryStorage:
    return MemoryStorage(f"memory://{uuid.uuid4().hex}")


def put(storage: base.Storage, key: str, data: bytes) -> None:
    storage.write(key, [memoryview(data)])


class OnlyTheVerbs:
    """A storage without any optional power."""

    def __init__(self, inner: MemoryStorage) -> None:
        self.inner = inner
        self.uri = "test://verbs"
        for verb in ("write", "read", "read_into", "stat", "list", "delete", "close"):
            setattr(self, verb, getattr(inner, verb))


class Disk(OnlyTheVerbs):
    """The powers of a disk, on files in memory."""

    def persist(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.inner.stat(key)

    def free_bytes(self) -> int:
        return 12

    def local_path(self, key: str) -> Path:
        return Path("/nowhere") / key

    def make_directory(self, key: str) -> None:
        self.made = key

    def remove_directories(self, key: str) -> None:
        self.removed = key

    def remove_unfinished(self, key: str, *, before_seconds: float, dry_run: bool = False) -> Sequence[str]:
        return [key]

    def link(self, files: Any) -> list[bool]:
        return [False for _ in files]

    def read_steps(self, key: str, offset: int, steps: Any, accept: Any, *, version: str | None = None) -> None:
        for number, views in enumerate(steps):
            self.inner.read_into(key, offset, views, version=version)
            assert accept(number)
            offset += sum(map(len, views))

    def write_many(self, files: Sequence[tuple[str, Sequence[memoryview]]]) -> None:
        for key, views in files:
            self.inner.write(key, views)

    def overwrite(self, key: str, data: bytes) -> None:
        self.inner.write(key, [memoryview(data)])

    def useful_threads(self) -> int:
        return 3


class Bucket(OnlyTheVerbs):
    def rules(self) -> dict[str, str]:
        return {"versioning": ""}

    def unfinished(self, prefix: str) -> list[tuple[str, str]]:
        return [(f"{prefix}a", "1")]

    def abort_unfinished(self, key: str, upload_id: str) -> None:
        self.aborted = (key, upload_id)


@pytest.mark.parametrize(
    ("kind", "powers"),
    [
        (MemoryStorage, {base.CreatesExclusively, base.WritesParts, base.CopiesInside}),
        (OnlyTheVerbs, set()),
        (Disk, {base.Disk}),
        (Bucket, {base.Bucket}),
    ],
)
def test_powers_are_those_of_the_storage_inside(memory: MemoryStorage, kind: type, powers: set[type]) -> None:
    inner = memory if kind is MemoryStorage else kind(memory)
    wrapped = wrap(inner, CountCalls())
    assert isinstance(wrapped, base.Storage)
    assert {power for power in base.POWERS if isinstance(inner, power)} == powers
    assert {power for power in base.POWERS if isinstance(wrapped, power)} == powers
    twice = wrap(wrapped, CountCalls())
    assert {power for power in base.POWERS if isinstance(twice, power)} == powers
    assert twice.uri == inner.uri


def test_every_power_of_the_contract_is_known_to_the_kit() -> None:
    protocols = {value for value in vars(base).values() if getattr(value, "_is_runtime_protocol", False)}
    protocols -= {base.ProcessBound}  # a class that back-ends inherit
    assert protocols - {base.Storage} == set(base.POWERS) == set(hooked._WRAPPERS)


def test_powers_of_a_disk_are_counted(memory: MemoryStorage, tmp_path: Path) -> None:
    disk, count = Disk(memory), CountCalls()
    wrapped = wrap(disk, count)
    put(memory, "a", b"1")
    put(memory, "b", b"2")
    wrapped.persist(["a", "b"])
    wrapped.make_directory("d")
    wrapped.remove_directories("e")
    assert wrapped.remove_unfinished("f", before_seconds=1.0) == ["f"]
    assert wrapped.free_bytes() == 12
    assert wrapped.link([(tmp_path, "a")]) == [False]
    assert wrapped.local_path("x") == Path("/nowhere/x")
    assert (disk.made, disk.removed) == ("d", "e")
    verbs = ["persist", "make_directory", "remove_directories", "remove_unfinished", "free_bytes", "link"]
    assert list(count.counts) == verbs
    assert count.calls[0].num_keys == 2
    bucket = Bucket(memory)
    wrapped = wrap(bucket, count)
    assert wrapped.rules() == {"versioning": ""}
    assert wrapped.unfinished("p/") == [("p/a", "1")]
    wrapped.abort_unfinished("p/a", "1")
    assert bucket.aborted == ("p/a", "1")


def test_counts_calls_and_bytes(memory: MemoryStorage) -> None:
    count = CountCalls()
    storage = wrap(memory, count)
    put(storage, "a", b"12345")
    assert storage.read("a") == b"12345"
    storage.read_into("a", 1, [memoryview(bytearray(2)), memoryview(bytearray(1))])
    assert storage.create("b", b"123") is True
    assert storage.create("b", b"1234") is False
    assert {file.key for file in storage.list("")} == {"a", "b"}
    storage.copy("a", "c")
    size_bytes = (1 << 20) + 1
    parts = storage.open_parts("big", size_bytes)
    parts.write_part(0, [memoryview(bytes(1 << 20))])
    parts.write_part(1 << 20, [memoryview(b"x")])
    parts.finish()
    storage.open_parts("dropped", size_bytes).abort()
    storage.delete(["a", "b"])
    with pytest.raises(FileMissing):
        storage.stat("a")
    storage.close()
    assert count.counts == {
        "write": 1, "read": 1, "read_into": 1, "create": 2, "list": 1, "copy": 1, "open_parts": 2, "write_part": 2,
        "finish": 1, "abort": 1, "delete": 1, "stat": 1, "close": 1,
    }  # fmt: skip
    assert count.total == 16
    assert [call.index for call in count.calls] == list(range(16))
    assert count.size_bytes["write"] == 5 == count.size_bytes["read"]
    assert count.size_bytes["read_into"] == 3
    assert count.size_bytes["create"] == 7
    assert count.size_bytes["write_part"] == size_bytes
    assert [(call.verb, call.key) for call in count.calls][-3:] == [("delete", "a"), ("stat", "a"), ("close", "")]
    count.clear()
    assert count.total == 0 == len(count.calls)


def test_indices_and_counts_hold_with_threads(memory: MemoryStorage) -> None:
    count = CountCalls()
    storage = wrap(memory, count)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: put(storage, f"k{i}", b"xy"), range(200)))
    assert count.counts["write"] == 200
    assert count.size_bytes["write"] == 400
    assert sorted(call.index for call in count.calls) == list(range(200))


def test_a_failure_before_has_no_effect_and_one_after_has_it(memory: MemoryStorage) -> None:
    storage = wrap(memory, FailAt("create", effect="before"))
    with pytest.raises(StorageUnavailable, match="injected"):
        storage.create("a", b"1")
    assert not list(memory.list(""))
    assert storage.create("a", b"1"), "it fails once"

    lost = FailAt("create b", AccessDenied("no"), effect="after")
    storage = wrap(memory, lost)
    assert storage.create("c", b"1")
    with pytest.raises(AccessDenied, match="no"):
        storage.create("b", b"2")
    assert memory.read("b") == b"2"
    assert lost.struck == 1


def test_which_calls_match(memory: MemoryStorage) -> None:
    def failing(storage: base.Storage, keys: str) -> str:
        failed = ""
        for key in keys:
            try:
                put(storage, key, b"")
            except StorageUnavailable:
                failed += key
        return failed

    assert failing(wrap(memory, FailAt(2)), "abcd") == "c"
    with pytest.raises(ZeroDivisionError):
        put(wrap(memory, FailAt("write", ZeroDivisionError)), "a", b"")  # type: ignore[arg-type]
    assert failing(wrap(memory, FailAt("write", times=2, skip=1)), "abcd") == "bc"
    assert failing(wrap(memory, FailAt("*", times=None)), "abcd") == "abcd"
    assert failing(wrap(memory, FailAt("write [bd]", times=None)), "abcd") == "bd"
    assert failing(wrap(memory, FailAt("read*")), "abcd") == ""
    assert failing(wrap(memory, FailAt(lambda call: call.key > "b", times=None)), "abcd") == "cd"
    failed = FailAt("write", times=3)
    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(lambda key: failing(wrap(memory, failed), key), "abcdefghijklmnop"))
    assert sum(map(len, ends)) == 3 == failed.struck


def test_every_raise_is_an_error_of_its_own(memory: MemoryStorage) -> None:
    storage = wrap(memory, FailAt("stat", FileMissing("gone", file="x"), times=None))
    caught = []
    for _ in range(2):
        with pytest.raises(FileMissing, match=r"gone \(file x\)") as info:
            storage.stat("a")
        caught.append(info.value)
    assert caught[0] is not caught[1]


def test_tears(memory: MemoryStorage) -> None:
    storage = wrap(memory, TearAt("*", times=None))
    with pytest.raises(StorageUnavailable, match="torn"):
        storage.write("a", [memoryview(b"123"), memoryview(b"4567"), memoryview(b"89")])
    assert memory.read("a") == b"1234"
    with pytest.raises(StorageUnavailable):
        storage.create("b", b"12")
    with pytest.raises(FileMissing):
        memory.read("b")
    into = bytearray(b"....")
    with pytest.raises(StorageUnavailable):
        storage.read_into("a", 0, [memoryview(into)[:1], memoryview(into)[1:]])
    assert into == b"12.."
    put(memory, "b", b"")
    with pytest.raises(StorageUnavailable):
        storage.delete(["a", "b"])
    assert [file.key for file in memory.list("")] == ["b"]


def test_many_files_are_counted_and_torn(memory: MemoryStorage) -> None:
    count = CountCalls()
    storage = wrap(Disk(memory), combine(count, TearAt("write_many b")))
    storage.write_many([("a", [memoryview(b"12")])])
    assert (count.counts["write_many"], count.size_bytes["write_many"]) == (1, 2)
    with pytest.raises(StorageUnavailable):
        storage.write_many([(key, [memoryview(b"1234")]) for key in "bcdef"])
    assert count.calls[-1].num_keys == 5
    assert storage.useful_threads() == 3
    assert {file.key: memory.read(file.key) for file in memory.list("")} == {
        "a": b"12", "b": b"1234", "c": b"1234", "d": b"12",
    }  # fmt: skip


def test_a_torn_part_of_a_storage_that_refuses_it(memory: MemoryStorage) -> None:
    parts = wrap(memory, TearAt("write_part")).open_parts("a", (1 << 20) + 1)
    with pytest.raises(StorageUnavailable):
        parts.write_part(1 << 20, [memoryview(b"x")])
    parts.write_part(1 << 20, [memoryview(b"y")])
    parts.write_part(0, [memoryview(bytes(1 << 20))])
    parts.finish()
    assert memory.read("a")[-1:] == b"y"


def test_delays_are_slept(memory: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for delay in (Delay(3), Delay({"write": 4})):
        storage = wrap(memory, delay)
        put(storage, "a", b"")
        storage.read("a")
    assert slept == [3, 3, 4, 0]


def test_hooks_combine_in_order(memory: MemoryStorage) -> None:
    seen: list[str] = []
    first, last = CountCalls(), CountCalls()
    storage = wrap(memory, combine(first, FailAt("write b"), lambda call: seen.append(call.phase), last))
    put(storage, "a", b"")
    with pytest.raises(StorageUnavailable):
        put(storage, "b", b"")
    assert (first.total, last.total, seen) == (2, 1, ["before", "after"])


def test_hooks_travel_to_other_processes() -> None:
    hook = pickle.loads(pickle.dumps(combine(CountCalls(), Delay(0), FailAt(3), KillAt("write", when="during"))))
    hook(Call("read", "a", 0, "before"))
    with pytest.raises(StorageUnavailable):
        hook(Call("read", "a", 3, "before"))


def write_three(root: str, hook: KillAt | None) -> None:
    from ckptstore.storage.open import open_storage

    storage = wrap(open_storage(root), hook or hook_from_environment() or CountCalls())
    for key in "abc":
        put(storage, key, b"1234")


@pytest.mark.parametrize(
    ("when", "left"),
    [
        ("before", {"a": b"1234"}),
        ("during", {"a": b"1234", "b": b"12"}),
        ("after", {"a": b"1234", "b": b"1234"}),
    ],
)
def test_kills(tmp_path: Path, when: str, left: dict[str, bytes]) -> None:
    run_ranks(1, write_three, str(tmp_path / "given"), KillAt(1, when=when), expect_killed=[0])  # type: ignore[arg-type]
    assert {path.name: path.read_bytes() for path in (tmp_path / "given").iterdir()} == left
    env = {"CKPTSTORE_TEST_FAULTS": f"kill {when} write b", "CKPTSTORE_TEST_RANK": "1"}
    run_ranks(1, write_three, str(tmp_path / "other-rank"), None, env=env)
    assert len(list((tmp_path / "other-rank").iterdir())) == 3
    env["CKPTSTORE_TEST_RANK"] = "0"
    run_ranks(1, write_three, str(tmp_path / "env"), None, env=env, expect_killed=[0])
    assert {path.name: path.read_bytes() for path in (tmp_path / "env").iterdir()} == left


def test_faults_from_the_environment(memory: MemoryStorage) -> None:
    assert hook_from_environment({}) is None
    assert hook_from_environment({"CKPTSTORE_TEST_FAULTS": "tear 0", "CKPTSTORE_TEST_RANK": "1", "RANK": "0"}) is None
    text = "fail after create log/*; tear write a; delay 0; delay 0.001 stat; kill before copy_from;"
    hook = hook_from_environment({"CKPTSTORE_TEST_FAULTS": text, "CKPTSTORE_TEST_RANK": "1", "RANK": "1"})
    assert hook is not None
    storage = wrap(memory, hook)
    with pytest.raises(StorageUnavailable):
        storage.create("log/1", b"1")
    with pytest.raises(StorageUnavailable):
        put(storage, "a", b"12")
    assert memory.read("log/1") == b"1" == memory.read("a")


@pytest.mark.parametrize(
    "text", ["burn 1", "kill 3", "kill sometimes 3", "fail during 3", "kill before", "tear", "delay", "delay x"]
)
def test_faults_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="CKPTSTORE_TEST_FAULTS"):
        hook_from_environment({"CKPTSTORE_TEST_FAULTS": text})


@pytest.mark.parametrize(
    "make",
    [
        lambda: FailAt("wirte checkpoints/*"),
        lambda: FailAt(""),
        lambda: FailAt(-1),
        lambda: FailAt(3.5),  # type: ignore[arg-type]
        lambda: FailAt("write", effect="befor"),  # type: ignore[arg-type]
        lambda: FailAt("write", "boom"),  # type: ignore[arg-type]
        lambda: FailAt("write", skip=-1),
        lambda: TearAt("write", times=0),
        lambda: KillAt("write", when="durring"),  # type: ignore[arg-type]
        lambda: Delay({"raed": 1.0}),
        lambda: Delay(-1),
        lambda: hook_from_environment({"CKPTSTORE_TEST_FAULTS": "delay 1 raed"}),
        lambda: run_ranks(0, write_three),
        lambda: run_ranks(2, write_three, expect_killed=[7]),
    ],
)
def test_what_would_never_strike_is_refused(make: Callable[[], object]) -> None:
    """A test with such a fault would pass, whatever it tests."""
    with pytest.raises(ValueError, match=r"."):
        make()
