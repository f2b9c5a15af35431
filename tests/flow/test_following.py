"""Followers: each commit once and in order, over restarts, removals and outages."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from trees import make_tree, steps

from ckptstore import (
    Checkpoint,
    CheckpointDamaged,
    CheckpointGone,
    CheckpointStore,
    InvalidInput,
    InvalidStep,
    KeepBest,
    KeepLatest,
    StorageUnavailable,
    StoreMissing,
    open_store,
)
from ckptstore.catalogue import job_of
from ckptstore.testing.faults import Call, wrap
from ckptstore.testing.ranks import run_ranks
from ckptstore.tools.cli import main

pytestmark = pytest.mark.slow

AT_ONCE = {"timeout_seconds": 0.0}


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., None]:
    source = make_tree(tmp_path / "source", {"f": b"x"})

    def save(store: CheckpointStore, *wanted: int) -> None:
        for step in wanted:
            store.save_directory(step, source)

    return save


def followed(store: CheckpointStore, **options: Any) -> list[int]:
    return [checkpoint.step for checkpoint in store.follow(**{**AT_ONCE, **options})]


def train_or_evaluate(root: Path, source: Path) -> list[int]:
    with open_store(root, retention=KeepBest(1, "loss") | KeepLatest(9), missing="worst", group="solo") as store:
        if os.environ["RANK"] == "0":
            for step in range(5):
                store.save_directory(step, source)
            return steps(store)
        found = []
        for checkpoint in store.follow(cursor="evaluation", timeout_seconds=60):
            store.annotate(checkpoint, {"loss": checkpoint.step})
            found.append(checkpoint.step)
            if len(found) == 5:
                return found
        return found


def test_an_evaluation_in_another_process_gets_each_checkpoint_once(tmp_path: Path) -> None:
    """It begins before there is a store."""
    source = make_tree(tmp_path / "source", {"f": b"x"})
    trained, evaluated = run_ranks(2, train_or_evaluate, tmp_path / "store", source)
    assert trained == evaluated == [0, 1, 2, 3, 4]
    with open_store(tmp_path / "store") as store:
        assert [checkpoint.metrics for checkpoint in store] == [{"loss": float(step)} for step in range(5)]
        assert followed(store, cursor="evaluation") == [4], "the loop ended in the body of the last one"


def test_where_a_follower_begins(tmp_path: Path, save: Callable[..., None]) -> None:
    with open_store(tmp_path / "store") as store:
        save(store, 3, 1, 2, 1)
        assert followed(store) == [3, 2, 1], "in the order of the commits; one was saved again"
        assert followed(store, after=3) == [2, 1]
        assert followed(store, after=store[2]) == [1]
        assert followed(store, after=Checkpoint.from_uri(store[3].uri)) == [2, 1]
        assert followed(store, after="latest") == []
        assert followed(store, latest_only=True) == [1]
        coming = store.follow(after="latest", timeout_seconds=9)
        threading.Timer(0.2, lambda: save(store, 7)).start()
        assert next(coming).step == 7
        save(store, 8, 9)
        assert [checkpoint.step for checkpoint in (next(coming), next(coming))] == [8, 9]
        coming.close()
        latest = store.follow(latest_only=True, **AT_ONCE)
        assert next(latest).step == 9
        save(store, 10, 11)
        assert [checkpoint.step for checkpoint in latest] == [11]


@pytest.mark.parametrize("kind", ["name", "file"])
def test_the_cursor_moves_with_what_is_done(tmp_path: Path, save: Callable[..., None], kind: str) -> None:
    cursor = "eval.1" if kind == "name" else tmp_path / "cursor"
    with open_store(tmp_path / "store", retention=KeepLatest(4)) as store:
        save(store, 1, 2, 3, 4, 5)
        seen = []
        for checkpoint in store.follow(cursor=cursor, **AT_ONCE):
            seen.append(checkpoint.step)
            if checkpoint.step == 3:
                break
        assert seen == [2, 3]
        with pytest.raises(ZeroDivisionError):
            seen.extend(1 // (checkpoint.step - 4) for checkpoint in store.follow(cursor=cursor, **AT_ONCE))
        assert seen == [2, 3, -1]
    with open_store(tmp_path / "store", retention=KeepLatest(9)) as store:
        assert followed(store, cursor=cursor, after="latest") == [4, 5], "the cursor counts"
        save(store, 6, 5)
        assert followed(store, cursor=cursor) == [6, 5]
        assert followed(store, cursor=cursor) == []


def test_what_had_no_turn_is_named(tmp_path: Path, save: Callable[..., None], skipped: list[str]) -> None:
    with open_store(tmp_path / "store", retention=KeepLatest(3)) as store:
        save(store, 0, 1, 2, 3)  # step 0 was gone before the follower began
    with open_store(tmp_path / "store", retention=KeepLatest(3), grace_seconds=0) as store:
        follower = store.follow(cursor="it", **AT_ONCE)
        assert next(follower).step == 1
        store.remove(2)
        assert next(follower).step == 3
        assert skipped == ["it was moved to the trash before its turn: removed by hand"]
        follower.close()
        save(store, 4, 5, 6, 7)
        store.prune()
        assert followed(store, cursor="it") == [3, 5, 6, 7], "step 3 was not done, and is what the job began from"
        assert skipped[1:] == ["it was deleted before its turn"]
        assert followed(store, cursor="it") == []
        assert len(skipped) == 2


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_what_is_worked_on_is_not_deleted(tmp_path: Path, save: Callable[..., None], place: str) -> None:
    root = str(tmp_path / "store") if place == "disk" else f"memory://{tmp_path.name}"
    with open_store(root, retention=KeepLatest(1), grace_seconds=0) as store:
        save(store, 1)
        follower = store.follow(after=None, timeout_seconds=5)
        checkpoint = next(follower)
        save(store, 2)
        assert store.prune() == []
        assert [item.held_by for item in store.trash()] == ["1 readers hold a lease"]
        assert checkpoint.verify().ok
        store.annotate(checkpoint, {"late": 1})
        assert next(follower).step == 2
        store.prune()  # unless the one behind the last save was faster
        assert store.trash() == []
        follower.close()
        assert not any(job_of(store).storage.list("leases/"))


def test_a_storage_that_is_away_is_waited_for(
    tmp_path: Path, save: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    left = {"log": 0, "cursors": 0}

    def away(call: Call) -> None:
        kind = str(call.key).partition("/")[0]
        if left.get(kind):
            left[kind] -= 1
            raise StorageUnavailable("the network is away")

    with open_store(tmp_path / "store") as store:
        save(store, 1, 2, 3)
        job_of(store).storage = wrap(job_of(store).storage, away)
        left.update(log=2, cursors=1)
        follower = store.follow(cursor="it", timeout_seconds=30)
        with caplog.at_level(logging.INFO, logger="ckptstore"):
            assert next(follower).step == 1
        assert [record.levelname for record in caplog.records if "following" in record.message][:2] == [
            "WARNING",
            "INFO",
        ]
        left.update(log=1, cursors=2)
        assert next(follower).step == 2
        follower.close()
        left.update(log=10**9)
        with pytest.raises(StorageUnavailable, match="the network is away"):
            followed(store, cursor="it", timeout_seconds=0.2)
        left.update(log=0)
        assert followed(store, cursor="it") == [2, 3]


def test_a_store_that_is_begun_anew_in_the_place_of_another_is_refused(
    tmp_path: Path, save: Callable[..., None]
) -> None:
    with open_store(tmp_path / "store") as job, open_store(tmp_path / "store", group="solo") as store:
        save(job, 1, 2)
        follower = store.follow(**AT_ONCE)
        assert [next(follower).step, next(follower).step] == [1, 2]
        shutil.rmtree(tmp_path / "store")
        with open_store(tmp_path / "store") as other:
            save(other, 1, 2, 3, 4)
        with pytest.raises(InvalidInput, match="Another store is at"):
            next(follower)


def test_bad_arguments_are_refused_at_once(tmp_path: Path, save: Callable[..., None]) -> None:
    with open_store(tmp_path / "store") as store, open_store(tmp_path / "other") as other:
        with pytest.raises(StoreMissing):
            followed(store, timeout_seconds=0.1)
        assert not (tmp_path / "store").exists(), "a follower creates no store"
        save(store, 1)
        save(other, 1, 2)
        os.chdir(tmp_path)
        Path("here").write_bytes(b"")
        wrong: list[tuple[type[Exception], dict[str, Any]]] = [
            (InvalidInput, {"after": "newest"}),
            (InvalidStep, {"after": 1.5}),
            (InvalidStep, {"after": True}),
            (InvalidInput, {"timeout_seconds": -1}),
            (InvalidInput, {"timeout_seconds": float("nan")}),
            (InvalidInput, {"cursor": ""}),
            (InvalidInput, {"cursor": "a b"}),
            (InvalidInput, {"cursor": ".hidden"}),
            (InvalidInput, {"cursor": "here"}),
            (InvalidInput, {"cursor": tmp_path}),
            (InvalidInput, {"cursor": tmp_path / "no/file"}),
        ]
        for error, options in wrong:
            with pytest.raises(error):
                store.follow(**options)
        with pytest.raises(CheckpointGone):
            followed(store, after=5)
        with pytest.raises(InvalidInput, match="of another store"):
            followed(store, after=other[1])
        assert followed(other, cursor="./here2") == [1, 2]
        for at in (store, other):
            (tmp_path / "here2").write_bytes((tmp_path / "here2").read_bytes().replace(b'"number":', b'"number":9'))
            with pytest.raises(InvalidInput, match="a place in another log"):
                followed(at, cursor="./here2")
        with pytest.raises(CheckpointDamaged):
            followed(store, cursor="./here")


# The command


def follow_command(*words: object) -> list[str]:
    return [sys.executable, "-m", "ckptstore", "follow", *map(str, words)]


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(follow_command(*words), capture_output=True, text=True, check=False)


def run_here(*words: object) -> Result:
    return CliRunner().invoke(main, ["follow", *map(str, words)])


WRITE = 'printf "%s\\n" "$CKPTSTORE_FOLLOW_STEP $0 $CKPTSTORE_FOLLOW_STORE" >> {file}; {then}'


def test_a_command_is_run_for_each_checkpoint(tmp_path: Path, save: Callable[..., None]) -> None:
    root, file = tmp_path / "store", tmp_path / "file"
    with open_store(root) as store:
        save(store, 1, 2, 3)
        uri = store[3].uri
    shell = [
        "--",
        "sh",
        "-c",
        WRITE.format(file=file, then='test "$CKPTSTORE_FOLLOW_STEP" != 2 || exit 7'),
        "{step}${x}",
    ]
    options = [root, "--timeout", "0", "--cursor", "it"]
    done = run(*options, *shell)
    assert (done.returncode, file.read_text()) == (7, f"1 1${{x}} {root}\n2 2${{x}} {root}\n")
    assert "step 1: exit code 0" in done.stderr
    assert "step 2: exit code 7" in done.stderr
    assert run(*options, "--keep-going", *shell).returncode == 0
    assert [line.split()[0] for line in file.read_text().splitlines()] == ["1", "2", "2", "3"]
    assert run_here(root, "--timeout", "0", "--latest-only").stdout.split() == [uri]
    for words, text in (
        ([root, "--keep-going"], "means nothing without a command"),
        ([root, "--after", "x"], "it is a step or latest"),
        ([root, "--", "true", "{stepp}"], "Did you mean {step}"),
        ([root, "--", "no-such-command"], "is not found"),
    ):
        refused = run_here(*words)
        assert (refused.exit_code, text in refused.stderr) == (2, True), refused.stderr


def test_a_follower_that_is_killed_begins_with_what_it_was_at(tmp_path: Path, save: Callable[..., None]) -> None:
    root, file = tmp_path / "store", tmp_path / "file"
    with open_store(root) as store:
        save(store, 1, 2)
    hang = WRITE.format(file=file, then='test "$CKPTSTORE_FOLLOW_STEP" != 2 || exec sleep 60')
    words = follow_command(root, "--cursor", tmp_path / "cursor", "--", "sh", "-c", hang)
    for number in (signal.SIGKILL, signal.SIGTERM):
        before = file.read_text().count("2 ") if file.exists() else 0
        with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
            while not file.exists() or file.read_text().count("\n2 ") + file.read_text().startswith("2 ") == before:
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(number)
            assert process.wait() == (-number if number == signal.SIGKILL else 128 + number)
    assert [line.split()[0] for line in file.read_text().splitlines()] == ["1", "2", "2"]
    with open_store(root) as store:
        assert followed(store, cursor=tmp_path / "cursor") == [2]
