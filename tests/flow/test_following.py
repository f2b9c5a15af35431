"""What others do beside a job: they follow it, each commit once and in order, and annotate what it saved."""

from __future__ import annotations

import logging
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from trees import copied, salvaged, steps

from ckptstore import Checkpoint, CheckpointStore, KeepBest, KeepLatest, errors, open_store
from ckptstore.testing.faults import Call, wrap
from ckptstore.testing.ranks import run_ranks
from ckptstore.tools.cli import main

pytestmark = pytest.mark.slow

AT_ONCE = {"timeout_seconds": 0.0}


def save(store: CheckpointStore, *wanted: int) -> None:
    for step in wanted:
        store.save_directory(step, None)


def followed(store: CheckpointStore, **options: Any) -> list[int]:
    return [checkpoint.step for checkpoint in store.follow(**{**AT_ONCE, **options})]


def train_or_evaluate(root: Path) -> list[int]:
    with open_store(root, retention=KeepBest(1, "loss") | KeepLatest(9), missing="worst", group="solo") as store:
        if os.environ["RANK"] == "0":
            save(store, *range(5))
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
    trained, evaluated = run_ranks(2, train_or_evaluate, tmp_path / "store")
    assert trained == evaluated == [0, 1, 2, 3, 4]
    with open_store(tmp_path / "store") as store:
        assert [checkpoint.metrics for checkpoint in store] == [{"loss": float(step)} for step in range(5)]
        assert followed(store, cursor="evaluation") == [4], "the loop ended in the body of the last one"


def test_where_a_follower_begins(tmp_path: Path) -> None:
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
def test_the_cursor_moves_with_what_is_done(tmp_path: Path, kind: str) -> None:
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


def test_what_had_no_turn_is_named(tmp_path: Path, skipped: list[str]) -> None:
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
def test_what_is_worked_on_is_not_deleted(tmp_path: Path, place: str) -> None:
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
        assert not any(store._job.storage.list("leases/"))


def test_a_storage_that_is_away_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = {"log": 0, "cursors": 0}

    def away(call: Call) -> None:
        kind = str(call.key).partition("/")[0]
        if left.get(kind):
            left[kind] -= 1
            raise errors.StorageUnavailable("the network is away")

    with open_store(tmp_path / "store") as store:
        save(store, 1, 2, 3)
        store._job.storage = wrap(store._job.storage, away)
        left.update(log=2, cursors=1)
        follower = store.follow(cursor="it", timeout_seconds=30)
        with caplog.at_level(logging.INFO, logger="ckptstore"):
            assert next(follower).step == 1
        levels = [record.levelname for record in caplog.records if "following" in record.message]
        assert levels[:2] == ["WARNING", "INFO"]
        left.update(log=1, cursors=2)
        assert next(follower).step == 2
        follower.close()
        left.update(log=10**9)
        with pytest.raises(errors.StorageUnavailable, match="the network is away"):
            followed(store, cursor="it", timeout_seconds=0.2)
        left.update(log=0)
        assert followed(store, cursor="it") == [2, 3]


def test_a_store_that_is_begun_anew_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as job, open_store(tmp_path / "store", group="solo") as store:
        save(job, 1, 2)
        follower = store.follow(**AT_ONCE)
        assert [next(follower).step, next(follower).step] == [1, 2]
        shutil.rmtree(tmp_path / "store")
        with open_store(tmp_path / "store") as other:
            save(other, 1, 2, 3, 4)
        with pytest.raises(errors.InvalidInput, match="Another store is at"):
            next(follower)


def test_bad_arguments_are_refused_at_once(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store, open_store(tmp_path / "other") as other:
        with pytest.raises(errors.StoreMissing):
            followed(store, timeout_seconds=0.1)
        assert not (tmp_path / "store").exists(), "a follower creates no store"
        save(store, 1)
        save(other, 1, 2)
        os.chdir(tmp_path)
        Path("here").write_bytes(b"")
        wrong: list[tuple[type[Exception], dict[str, Any]]] = [
            (errors.InvalidInput, {"after": "newest"}),
            (errors.InvalidStep, {"after": 1.5}),
            (errors.InvalidStep, {"after": True}),
            (errors.InvalidInput, {"timeout_seconds": -1}),
            (errors.InvalidInput, {"timeout_seconds": float("nan")}),
            (errors.InvalidInput, {"cursor": ""}),
            (errors.InvalidInput, {"cursor": "a b"}),
            (errors.InvalidInput, {"cursor": ".hidden"}),
            (errors.InvalidInput, {"cursor": "here"}),
            (errors.InvalidInput, {"cursor": tmp_path}),
            (errors.InvalidInput, {"cursor": tmp_path / "no/file"}),
        ]
        for error, options in wrong:
            with pytest.raises(error):
                store.follow(**options)
        with pytest.raises(errors.CheckpointGone):
            followed(store, after=5)
        with pytest.raises(errors.InvalidInput, match="of another store"):
            followed(store, after=other[1])
        assert followed(other, cursor="./here2") == [1, 2]
        for at in (store, other):
            (tmp_path / "here2").write_bytes((tmp_path / "here2").read_bytes().replace(b'"number":', b'"number":9'))
            with pytest.raises(errors.InvalidInput, match="a place in another log"):
                followed(at, cursor="./here2")
        with pytest.raises(errors.CheckpointDamaged):
            followed(store, cursor="./here")


# The command


def follow_command(*words: object) -> list[str]:
    return [sys.executable, "-m", "ckptstore", "follow", *map(str, words)]


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["follow", *map(str, words)])


WRITE = 'printf "%s\\n" "$CKPTSTORE_FOLLOW_STEP $0 $CKPTSTORE_FOLLOW_STORE" >> {file}; {then}'


def test_a_command_is_run_for_each_checkpoint(tmp_path: Path) -> None:
    root, file = tmp_path / "store", tmp_path / "file"
    with open_store(root) as store:
        save(store, 1, 2, 3)
        uri = store[3].uri
    then = 'test "$CKPTSTORE_FOLLOW_STEP" != 2 || exit 7'
    shell = ["--", "sh", "-c", WRITE.format(file=file, then=then), "{step}${x}"]
    options = [root, "--timeout", "0", "--cursor", "it"]
    done = run(*options, *shell)
    assert (done.exit_code, file.read_text()) == (7, f"1 1${{x}} {root}\n2 2${{x}} {root}\n")
    assert "step 1: exit code 0" in done.stderr
    assert "step 2: exit code 7" in done.stderr
    assert run(*options, "--keep-going", *shell).exit_code == 0
    assert [line.split()[0] for line in file.read_text().splitlines()] == ["1", "2", "2", "3"]
    assert run(root, "--timeout", "0", "--latest-only").stdout.split() == [uri]
    for words, text in (
        ([root, "--keep-going"], "means nothing without a command"),
        ([root, "--after", "x"], "it is a step or latest"),
        ([root, "--", "true", "{stepp}"], "Did you mean {step}"),
        ([root, "--", "no-such-command"], "is not found"),
    ):
        refused = run(*words)
        assert (refused.exit_code, text in refused.stderr) == (2, True), refused.stderr


def test_a_follower_that_is_killed_begins_with_what_it_was_at(tmp_path: Path) -> None:
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


SAVES, VALUES = 4, 3


def save_or_annotate(root: Path) -> None:
    """Rank 0 is a job that saves; each other one an evaluation that annotates all that it meets."""
    rank = int(os.environ["RANK"])
    with open_store(root, group="solo") as store:
        if rank == 0:
            for step in range(SAVES):
                store.save_directory(step, None, metrics={"loss": 1.0})
            return
        while len(store) < SAVES:
            time.sleep(0.02)
        for value in range(VALUES):
            for checkpoint in store:
                store.annotate(checkpoint, {f"by {rank}": value, f"step {checkpoint.step} by {rank}": value})


def test_several_processes_annotate_beside_a_job(tmp_path: Path) -> None:
    run_ranks(3, save_or_annotate, tmp_path / "store")
    with open_store(tmp_path / "store") as store:
        last = float(VALUES - 1)
        for checkpoint in store:
            own = {f"step {checkpoint.step} by {rank}": last for rank in (1, 2)}
            assert checkpoint.metrics == {"loss": 1.0, "by 1": last, "by 2": last, **own}
        assert [save.metrics for save in store.history()] == [checkpoint.metrics for checkpoint in store]
        assert store.verify_log() == []


def test_retention_and_best_go_by_what_was_annotated(tmp_path: Path) -> None:
    policy = KeepBest(1, "eval_loss") | KeepLatest(2)
    with (
        open_store(tmp_path / "store", retention=policy, missing="worst") as job,
        open_store(tmp_path / "store", group="solo") as evaluation,
    ):
        for step, loss in enumerate((3.0, 1.0, 2.0, 2.5)):
            job.save_directory(step, None)
            evaluation.annotate(step, {"eval_loss": loss})
        job.save_directory(4, None)  # the job was not fenced
        assert steps(job) == [1, 3, 4]
        best = evaluation.best("eval_loss")
        assert (best.step, pickle.loads(pickle.dumps(best)).metrics) == (1, {"eval_loss": 1.0})
        evaluation.annotate(1, {"eval_loss": 9.0})
        assert job.best("eval_loss") == job[3], "the later value counts"
        assert best.metrics == {"eval_loss": 1.0}, "as of when it was looked up"
        evaluation.annotate(job[4], {"x": math.nan})
        for found in (job.resume(), evaluation.latest()):
            assert str(found.metrics) == "{'x': nan}"


def test_what_was_moved_away_meanwhile_is_annotated_all_the_same(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store, open_store(tmp_path / "store", grace_seconds=0) as cleaner:
        first, second = (store.save_directory(1, None) for _ in range(2))
        store.annotate(first, {"a": 1})
        assert (first.number != second.number, store[1].metrics) == (True, {}), "its step was saved again"
        store.annotate(1, {"b": 2})
        store.annotate(Checkpoint.from_uri(second.uri), {"c": 3})
        store.save_directory(2, None)
        store.remove(1)
        store.annotate(1, {"d": 4})
        assert store.restore(1, number=second.number, pin=False).metrics == {"b": 2.0, "c": 3.0, "d": 4.0}
        store.remove(1)
        cleaner.prune()
        for gone in (1, first, second):
            with pytest.raises(errors.CheckpointGone):
                store.annotate(gone, {"a": 1})
        assert [save.metrics for save in store.history()] == [{"a": 1}, {"b": 2, "c": 3, "d": 4}, {}]


def test_copies_have_what_was_annotated(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        for step in (1, 2):
            store.save_directory(step, None, metrics={"loss": 1.0})
        store.annotate(1, {"eval_loss": 0.5})
        for metrics in ({}, {"late": 1.0, "loss": 2.0}):
            if metrics:
                store.annotate(2, metrics)
            copied(store, tmp_path / "copy")
            with open_store(tmp_path / "copy") as copy:
                assert [item.metrics for item in copy] == [item.metrics for item in store]
                assert copy.verify_log() == []
        wanted = [item.metrics for item in store]
    (tmp_path / "store/log/0000000002.json").write_bytes(b"torn")
    salvaged(tmp_path / "store", tmp_path / "salvaged")
    with open_store(tmp_path / "salvaged") as store:
        assert [item.metrics for item in store] == [{"loss": 1.0}, wanted[1]], "what can be read of it"


def test_what_cannot_be_annotated_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with open_store(tmp_path / "other") as store:
        foreign = store.save_directory(1, None)
    with open_store(tmp_path / "store") as store:
        with pytest.raises(errors.CkptstoreError, match="There is no store"):
            store.annotate(1, {"a": 1})
        store.save_directory(1, None)
        before = len(list((tmp_path / "store/log").iterdir()))
        with pytest.raises(errors.InvalidInput, match="of another store"):
            store.annotate(foreign, {"a": 1})
        with pytest.raises(errors.CheckpointGone, match="live ones: 1"):
            store.annotate(2, {"a": 1})
        for metrics in ({}, {"a": "x"}, {"": 1.0}, {"a": 2**70 + 1}, [1]):
            with pytest.raises(errors.InvalidMetric):
                store.annotate(1, metrics)
        assert len(list((tmp_path / "store/log").iterdir())) == before
        with open_store(tmp_path / "store") as later:
            later.resume()
            with pytest.raises(errors.StoreFenced):
                store.annotate(1, {"a": 1})
