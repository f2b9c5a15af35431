"""A process that forks: the child begins anew or is told so clearly. It never waits for threads of its parent."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptstore import open_store
from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.errors import InvalidInput, RankFailed, StorageError
from ckptstore.runtime.beat import beating
from ckptstore.runtime.fork import in_forked_child, new_lock_in_child
from ckptstore.storage.base import ProcessBound
from ckptstore.storage.open import open_storage
from ckptstore.testing import Call
from ckptstore.testing.stores import with_faults
from ckptstore.transfer import Transfer
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.sources import MemorySource

CHILD_SECONDS = 120.0

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]


def in_child(work: Callable[[], object]) -> None:
    """Do the work in a forked child; fails with what it raises, or when it does not end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(int(CHILD_SECONDS) + 30)
            work()
            os.write(write, b"ok")
        except BaseException:
            os.write(write, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(0)
    os.close(write)
    deadline = time.monotonic() + CHILD_SECONDS
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(read)
            pytest.fail("the child waits for ever")
        time.sleep(0.02)
    with os.fdopen(read, "rb") as told:
        assert told.read().decode() == "ok"


def files(prefix: str) -> list[PlannedFile]:
    data = memoryview(bytes(3 << 20))
    large = PlannedFile(f"{prefix}/large", MemorySource((memoryview(bytes(40 << 20)),)))
    return [large, *(PlannedFile(f"{prefix}/{index}", MemorySource((data,))) for index in range(8))]


def transfer_of(storage: Any) -> Transfer:
    return Transfer(storage, config=TransferConfig(num_threads=4, durable=False), retry=RetryConfig())


@pytest.fixture(params=["disk", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """Opens a place."""
    if request.param == "disk":
        return lambda: open_storage(tmp_path / "files")
    if request.param == "memory":
        return lambda: open_storage(f"memory://forks-{os.getpid()}")
    server = request.getfixturevalue("fast_s3")
    return lambda: open_storage("s3://test/forks", storage_options=server.storage_options)


@pytest.fixture
def during(place: Any) -> Iterator[Transfer]:
    """A transfer that another thread keeps busy."""
    storage = place()
    transfer, over = transfer_of(storage), threading.Event()
    begun = threading.Event()

    def work() -> None:
        while not over.is_set():
            with beating(begun.set):
                transfer.upload(files("busy"))

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    yield transfer
    over.set()
    thread.join()
    transfer.close()
    storage.close()


def moves(transfer: Transfer) -> None:
    """The transfer of the parent works in its child, or says why it does not."""
    storage = transfer._engine.storage
    if isinstance(storage, ProcessBound):
        with pytest.raises(StorageError, match="is used in its fork"):
            transfer.upload(files("child"))
    else:
        transfer.upload(files("child"))
    transfer.close()
    storage.close()


def test_right_after_a_transfer(place: Any) -> None:
    storage = place()
    transfer = transfer_of(storage)
    transfer.upload(files("parent"))
    in_child(lambda: moves(transfer))
    transfer.upload(files("parent"))
    transfer.close()
    storage.close()


def test_during_a_transfer_in_another_thread(during: Transfer) -> None:
    for _ in range(3):
        in_child(lambda: moves(during))


def test_a_child_opens_the_place_anew(place: Any, during: Transfer) -> None:
    def work() -> None:
        storage = place()
        transfer = transfer_of(storage)
        transfer.upload(files("anew"))
        assert {file.key for file in storage.list("anew/")} == {file.key for file in files("anew")}
        transfer.close()
        storage.close()

    in_child(work)


def test_a_store_in_a_fork_reads_and_is_no_rank(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.save(1, {"epoch": 7})

        def work() -> None:
            state = {"epoch": 0}
            assert [checkpoint.step for checkpoint in store] == [1]
            with pytest.raises(InvalidInput, match="fork of rank 0"):
                store.save(2, state)
            store.close()
            with open_store(tmp_path / "store") as again:
                again[1].load(state)
            assert state == {"epoch": 7}

        in_child(work)
        assert store.save(2, {"epoch": 8}).step == 2


def test_the_save_of_a_parent_has_no_end_in_its_child(tmp_path: Path) -> None:
    reached, opened = threading.Event(), threading.Event()

    def hold(call: Call) -> None:
        if call.verb == "write" and call.key.startswith("checkpoints/"):
            reached.set()
            assert opened.wait(60)

    with with_faults(open_store(tmp_path / "store"), hold) as store:
        pending = store.save_async(1, {"epoch": 1})
        assert reached.wait(60)

        def work() -> None:
            with pytest.raises(RankFailed, match="in the parent"):
                pending.result(30)
            store.close()

        try:
            in_child(work)
        finally:
            opened.set()
        assert pending.result() is not None


class Owner:
    """Has a lock that its parent held when it forked."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.renewed = 0
        new_lock_in_child(self, "lock")


def test_a_lock_that_was_held_is_a_new_one() -> None:
    owner = Owner()
    with owner.lock:
        in_child(lambda: owner.lock.acquire(timeout=1) or pytest.fail("still held"))
    other = Owner()
    in_forked_child(other, lambda found: setattr(found, "renewed", 1))

    def work() -> None:
        assert other.renewed == 1

    in_child(work)
    assert other.renewed == 0
