"""What a transfer may take: memory within its budget, threads that end, work that goes on when one thing waits."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from ckptstore.errors import InvalidInput
from ckptstore.runtime.beat import beating
from ckptstore.transfer.engine import Scratch
from ckptstore.transfer.pool import Operation, Pool, Stopped

MIB = 1 << 20

PEAK = """
import os, resource, sys
sys.path.insert(0, sys.argv[3])
from moving import *
del DATA
what, path = sys.argv[1], Path(sys.argv[2])
size, budget = 512 * MIB, 32 * MIB
with open(path / "sparse", "wb") as file:
    file.truncate(size)
class OneCall:
    "A storage without parts and paths, as the simplest object store: it keeps nothing."
    uri = "null://"
    def __init__(self, inner): self.inner = inner
    def write(self, key, views): self.inner.write(key, views)
    def read_into(self, key, offset, views, *, version=None): self.inner.read_into(key, offset, views)
    def stat(self, key): return self.inner.stat(key)
inner = make_storage("local", path)
storage = OneCall(inner) if what.endswith("remote") else inner
digest = Digest.of(*[bytes(MIB)] * 512)
transfer = transfer_over(storage, num_threads=8, memory_budget_bytes=budget, durable=False)
warm = [from_file(f"warm{n}", path / f"warm{n}", bytes(100)) for n in range(20)]
transfer.upload(warm)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
if what == "upload":
    (stored,) = transfer.upload([PlannedFile("big", FileSource.of(path / "sparse"))])
    assert stored.digest == digest
else:
    inner.link([(path / "sparse", "big")])
    wanted = Wanted("big", size, digest)
    if what.startswith("check"):
        assert [found.damage for found in transfer.check([wanted])] == [None]
    else:
        transfer.download([(wanted, path / "copy")])
print(peak() - before)
"""


@pytest.mark.parametrize("what", ["upload", "check", "check remote", "download", "download remote"])
def test_memory_stays_within_the_budget_whatever_the_size(tmp_path: Path, what: str) -> None:
    """A file of 512 MiB, a budget of 32 MiB, 8 threads; 8 MiB for the interpreter itself."""
    command = [sys.executable, "-c", PEAK, what, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 40 * MIB


def test_buffers_are_used_again() -> None:
    scratch, run = Scratch(8 * MIB), Operation([])
    with scratch.take(MIB, run) as first:
        first[:4] = b"warm"
    with scratch.take(MIB // 2, run) as second:
        assert bytes(second[:4]) == b"warm"
        with scratch.take(MIB, run) as third:
            assert bytes(third[:4]) == bytes(4)
    with scratch.take(0, run) as nothing:
        assert len(nothing) == 0


def test_what_exceeds_the_budget_runs_alone_and_nothing_starves() -> None:
    scratch, run = Scratch(4 * MIB), Operation([])
    lock = threading.Lock()
    lent: list[int] = []
    most: list[tuple[int, ...]] = []

    def borrow(size: int) -> None:
        for _ in range(20):
            with scratch.take(size, run):
                with lock:
                    lent.append(size)
                    most.append(tuple(lent))
                time.sleep(0.001)
                with lock:
                    lent.remove(size)

    threads = [threading.Thread(target=borrow, args=(size * MIB,)) for size in (9, 1, 2, 2, 4, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
        assert not thread.is_alive(), "a request starves"
    assert all(sum(sizes) <= 4 * MIB or len(sizes) == 1 for sizes in most)
    assert (9 * MIB,) in most


def test_who_waits_for_memory_hears_that_all_is_over() -> None:
    scratch, run = Scratch(MIB), Operation([])

    def wait_for_memory() -> None:
        with scratch.take(MIB, run):
            raise AssertionError("there was no memory to give")

    with scratch.take(MIB, Operation([])):
        threading.Timer(0.2, run.stopped.set).start()
        with pytest.raises(Stopped):
            wait_for_memory()


def test_memory_is_given_back_when_it_is_idle() -> None:
    scratch, run = Scratch(1 << 40), Operation([])
    for _ in range(2):
        with scratch.take(100 * MIB, run), scratch.take(MIB, run):
            pass
    scratch.trim()
    assert sum(map(len, scratch._kept)) <= 64 * MIB
    scratch.trim(0)
    assert scratch._kept == []


def test_tasks_run_in_parallel_and_all_of_them() -> None:
    pool = Pool(3)
    barrier = threading.Barrier(3, timeout=60)
    done: list[int] = []

    def meet(run: Operation) -> None:
        barrier.wait()
        done.append(1)

    pool.run([meet] * 9)
    assert len(done) == 9
    pool.close()


def test_the_first_error_is_raised_and_the_rest_is_dropped() -> None:
    pool = Pool(2)
    done: list[int] = []

    def fail(run: Operation) -> None:
        raise ValueError("first")

    def wait(run: Operation) -> None:
        run.stopped.wait(60)
        run.check()
        done.append(1)

    with pytest.raises(ValueError, match="first"):
        pool.run([wait, fail, *[wait] * 50])
    assert done == []
    pool.close()


def test_operations_take_turns() -> None:
    """A short one does not wait for the end of a long one."""
    pool = Pool(1)
    order: list[str] = []
    begun = threading.Event()

    def long(run: Operation) -> None:
        begun.set()
        deadline = time.monotonic() + 60
        while not order and len(pool._runs) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        order.append("long")

    def short(run: Operation) -> None:
        order.append("short")

    thread = threading.Thread(target=pool.run, args=([long] * 40,))
    thread.start()
    assert begun.wait(60)
    pool.run([short] * 2)
    thread.join()
    pool.close()
    assert order[:5].count("short") == 2
    assert order.count("long") == 40


def test_a_closed_pool_has_no_threads_and_takes_no_work() -> None:
    pool = Pool(4)
    names: set[str] = set()

    def name(run: Operation) -> None:
        names.add(threading.current_thread().name)

    pool.run([name] * 8)
    pool.close()
    assert names
    assert not names & {thread.name for thread in threading.enumerate()}
    with pytest.raises(InvalidInput, match="closed"):
        pool.run([name] * 8)


def test_idle_threads_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.transfer.pool._IDLE_SECONDS", 0.05)
    pool = Pool(4)
    for _ in range(3):
        pool.run([lambda run: None] * 8)
        deadline = time.monotonic() + 60
        while pool._threads and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not pool._threads
    pool.close()


class _Inherits(threading.Thread):
    """As threads of a free-threaded Python: it has the context of the one that starts it."""

    def start(self) -> None:
        self.run = partial(contextvars.copy_context().run, self.run)  # type: ignore[method-assign]
        super().start()


def test_threads_give_no_signs_of_life_for_the_run_that_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", _Inherits)
    pool, signs = Pool(2), []
    with beating(lambda: signs.append("of the first run")):
        pool.run([lambda run: None] * 4)
    signs.clear()
    pool.run([lambda run: run.moved(1)] * 4)
    pool.close()
    assert signs == []


def test_the_caller_gives_signs_of_life_while_bytes_move() -> None:
    pool, sign = Pool(2), threading.Event()

    def work(run: Operation) -> None:
        run.moved(1)
        assert sign.wait(60)

    with beating(sign.set):
        pool.run([work] * 2)
    pool.close()


def test_where_no_thread_can_start_the_caller_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    done: list[int] = []
    Pool(2).run([lambda run: done.append(1)] * 3)
    assert len(done) == 3
