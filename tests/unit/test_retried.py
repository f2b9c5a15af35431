"""A storage with retries: the powers of the one inside, each request tried again, and once alone per layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.errors import StorageUnavailable
from ckptstore.storage import base
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.memory import MemoryStorage
from ckptstore.storage.retry import retrying, with_retries, without_retries
from ckptstore.transfer import RangeRead, Transfer

QUICK = RetryConfig(retry_attempts=4, retry_wait_initial_seconds=0.001, retry_wait_max_seconds=0.002)
_KINDS = [kind for kind in vars(base).values() if isinstance(kind, type)]
POWERS = [kind for kind in _KINDS if vars(kind).get("_is_runtime_protocol")]


def flaky(storage: Any, verb: str, times: int) -> tuple[Any, list[str]]:
    """A storage whose verb fails so often, and the calls that came in."""
    calls: list[str] = []
    inner = getattr(storage, verb)

    def call(*arguments: Any, **keywords: Any) -> Any:
        calls.append(verb)
        if len(calls) <= times:
            raise StorageUnavailable("not now")
        return inner(*arguments, **keywords)

    setattr(storage, verb, call)
    return storage, calls


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage("memory://retried")
    storage.delete([file.key for file in storage.list("")])
    storage.write("there", [memoryview(b"data")])
    return storage


def test_it_has_the_powers_of_the_one_inside(storage: MemoryStorage) -> None:
    retried = with_retries(storage, QUICK)
    assert len(POWERS) > 6
    assert type(retried) is not MemoryStorage
    assert [isinstance(retried, power) for power in POWERS] == [isinstance(storage, power) for power in POWERS]
    assert retried.uri == storage.uri
    again, arguments = retried.__reduce__()
    assert type(again(*arguments)).__name__ == type(retried).__name__


class OnlyLikeOne:
    """Has the seven verbs, and does not inherit `Storage`."""

    def __init__(self, inner: MemoryStorage) -> None:
        self.uri = inner.uri
        for verb in ("write", "read", "read_into", "stat", "list", "delete", "close"):
            setattr(self, verb, getattr(inner, verb))


def test_a_storage_that_inherits_nothing_loses_nothing(storage: MemoryStorage) -> None:
    retried = with_retries(OnlyLikeOne(storage), QUICK)  # type: ignore[arg-type]
    retried.write("new", [memoryview(b"bytes")])
    assert storage.read("new") == retried.read("new") == b"bytes"
    with pytest.raises(AttributeError, match="persist"):
        retried.persist(["new"])


def test_a_storage_that_lacks_a_verb_is_never_opened() -> None:
    verbs = sorted(base.Storage.__abstractmethods__)
    assert len(verbs) == 8, "with uri"
    for verb in verbs:
        methods = {name: getattr(MemoryStorage, name) for name in verbs if name != verb}
        with pytest.raises(TypeError, match=f"abstract method '?{verb}'?$"):
            type("Lacking", (base.Storage,), methods)()


@pytest.mark.parametrize("power", base.POWERS)
def test_a_power_is_methods_alone(power: type) -> None:
    """So that `isinstance` asks a class once, and neither looks for each method nor asks a storage for its URI."""
    assert {name for name in dir(power) if not name.startswith("_")} == base.methods_of(power)
    assert all(callable(getattr(power, name)) for name in base.methods_of(power))


def test_a_storage_without_retries_is_given_back(storage: MemoryStorage) -> None:
    assert with_retries(storage, RetryConfig(retry_attempts=1)) is storage
    assert without_retries(with_retries(with_retries(storage, QUICK), QUICK)) is storage


REQUESTS = {
    "read": ("there",),
    "stat": ("there",),
    "list": ("",),
    "delete": (["there"],),
    "write": ("new", [memoryview(b"x")]),
    "copy": ("there", "copied"),
    "read_into": ("there", 0, [memoryview(bytearray(4))]),
}


@pytest.mark.parametrize("verb", REQUESTS)
def test_a_request_is_tried_again(storage: MemoryStorage, verb: str) -> None:
    broken, calls = flaky(storage, verb, 3)
    getattr(with_retries(broken, QUICK), verb)(*REQUESTS[verb])
    assert len(calls) == 4
    broken, calls = flaky(MemoryStorage("memory://other"), verb, 99)
    with pytest.raises(StorageUnavailable):
        getattr(with_retries(broken, QUICK), verb)(*REQUESTS[verb])
    assert len(calls) == 4


@pytest.mark.parametrize("landed", [False, True])
def test_a_create_whose_answer_was_lost_is_read_back(storage: MemoryStorage, landed: bool) -> None:
    broken, calls = flaky(storage, "create", 1)
    if landed:
        storage.write("new", [memoryview(b"x")])
    assert with_retries(broken, QUICK).create("new", b"x") is True  # type: ignore[attr-defined]
    assert len(calls) == 2
    broken, _ = flaky(MemoryStorage("memory://third"), "create", 1)
    broken.write("new", [memoryview(b"of another")])
    assert with_retries(broken, QUICK).create("new", b"x") is False  # type: ignore[attr-defined]


def test_what_a_disk_is_asked_to_change_is_told_as_it_is(tmp_path: Path) -> None:
    """A deletion may come late, and a file that is there is perhaps not durable."""
    broken, calls = flaky(LocalStorage(tmp_path), "delete", 1)
    with pytest.raises(StorageUnavailable):
        with_retries(broken, QUICK).delete(["gone"])
    assert len(calls) == 1
    broken, calls = flaky(LocalStorage(tmp_path), "create", 1)
    broken.write("new", [memoryview(b"x")])
    _, synced = flaky(broken, "persist", 0)
    assert with_retries(broken, QUICK).create("new", b"x") is True  # type: ignore[attr-defined]
    assert (len(calls), len(synced)) == (2, 1)


def test_retries_do_not_multiply(storage: MemoryStorage) -> None:
    broken, calls = flaky(storage, "read_into", 99)
    transfer = Transfer(with_retries(broken, QUICK), config=TransferConfig(num_threads=2), retry=QUICK)
    with pytest.raises(StorageUnavailable):
        transfer.read([RangeRead("there", 0, (memoryview(bytearray(4)),))])
    transfer.close()
    assert len(calls) == 4
    calls.clear()
    with pytest.raises(StorageUnavailable):
        retrying(QUICK, "twice", lambda: with_retries(broken, QUICK).read_into("there", 0, [memoryview(bytearray(4))]))
    assert len(calls) == 4
    calls.clear()
    with pytest.raises(StorageUnavailable):
        retrying(QUICK, "again", lambda: broken.read_into("there", 0, [memoryview(bytearray(4))]))
    assert len(calls) == 4, "the next one is tried again as well"
