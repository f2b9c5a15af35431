"""Rounds of the agent that fail: what is tried again, and what is said."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptstore import open_store
from ckptstore.errors import StorageError
from ckptstore.events import listening
from ckptstore.tools.run.committer import Committer
from ckptstore.tools.run.folders import Folder, JobSeen, Rules
from ckptstore.tools.run.notices import CommitsDelayed
from tests.folders.test_finished_property import zipped

JOB = JobSeen(frozenset(), is_started=True)


def test_a_storage_that_is_away_for_a_day_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine_1.pt").write_bytes(zipped(1, ""))
    folder, said = Folder(tmp_path / "out", Rules(patterns=("mine_*",))), list[Any]()

    def away(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    with open_store(tmp_path / "store", durable=False) as store, listening(said.append, CommitsDelayed):
        committer = Committer(store=store, folder=folder, job=lambda: JOB, interval_seconds=5.0, began_at=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(folder, "hold", away)
            for count in (0, 1, 2000):
                committer.failures.count, committer.failures.not_before = count, 0.0
                committer._round()
                committer._round()
        assert [event.wait_seconds for event in said] == [5.0, 10.0, 60.0]
        committer.failures.not_before = 0.0
        committer._round()
        assert [checkpoint.step for checkpoint in store] == [1]


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Room for 20 more open files, and no hard links, as where the folder is a mount point."""

    def link(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/proc/self/fd")))
    few = [number for number in range(len(taken) + 21) if number not in taken][20]
    monkeypatch.setattr(os, "link", link)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def many_files(folder: Path) -> None:
    (folder / "mine_1").mkdir(parents=True)
    for number in range(60):
        (folder / f"mine_1/{number}.dat").write_bytes(b"x")


def rounds(committer: Committer, count: int) -> None:
    for _ in range(count):
        time.sleep(0.02)  # the quiet time
        committer.failures.not_before = 0.0
        committer._round()


def test_a_checkpoint_of_more_files_than_may_be_open_is_committed(tmp_path: Path, few_files: None) -> None:
    many_files(tmp_path / "out")
    folder = Folder(tmp_path / "out", Rules(patterns=("mine_*",), quiet_seconds=0.01))
    with open_store(tmp_path / "store", durable=False) as store:
        committer = Committer(store=store, folder=folder, job=lambda: JOB, interval_seconds=0.001, began_at=0.0)
        rounds(committer, 3)
        assert [len(list(checkpoint.files)) for checkpoint in store] == [60]


def test_a_shortage_of_open_files_is_no_fault_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_files: None
) -> None:
    many_files(tmp_path / "out")
    folder, said = Folder(tmp_path / "out", Rules(patterns=("mine_*",), quiet_seconds=0.01)), list[Any]()
    with open_store(tmp_path / "store", durable=False) as store, listening(said.append, CommitsDelayed):
        committer = Committer(store=store, folder=folder, job=lambda: JOB, interval_seconds=0.001, began_at=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(resource, "setrlimit", lambda *_: None)
            rounds(committer, 6)
        assert len(said) >= 4
        assert all("ulimit -n" in event.error for event in said)
        rounds(committer, 2)
        assert [checkpoint.step for checkpoint in store] == [1]
        assert committer.outcome().passed == {}


def test_an_error_of_no_kind_ends_no_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a look throws, the next one is tried, and says what it was."""
    with open_store(tmp_path / "store", durable=False, group="solo") as store:
        store.resume()
        folder = Folder(tmp_path / "out", Rules(patterns=("mine_*",), quiet_seconds=0.001))
        committer = Committer(store=store, folder=folder, job=lambda: JOB, interval_seconds=0.001, began_at=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(folder, "look", lambda _: {}["no error of ours"])
            assert not committer._round()
            assert "KeyError" in str(committer.failures.error)
        many_files(tmp_path / "out")
        time.sleep(0.002)
        while not list(store):
            assert not committer._round()


def test_what_cannot_be_looked_at_is_not_taken_for_gone(tmp_path: Path, few_files: None) -> None:
    """With no file left to open, nothing says that a checkpoint is closed, or that a directory is empty."""
    many_files(tmp_path / "out")
    folder = Folder(tmp_path / "out", Rules(patterns=("mine_*",), quiet_seconds=0.01))
    folder.look(JOB)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    try:
        for left in range(4):
            while True:
                try:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
                except OSError:
                    break
            for _ in range(left):
                os.close(taken.pop())
            try:
                assert len(folder.look(JOB).candidates[0].files) == 60
            except StorageError as error:
                assert "ulimit -n" in str(error)  # noqa: PT017
    finally:
        for descriptor in taken:
            os.close(descriptor)
