"""`ckptstore watch` as a process: it sees real ranks save, and ends as it should."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import slow_saver
from click.testing import CliRunner
from watch_process import DEADLINE_SECONDS, watching

from ckptstore import open_store
from ckptstore.testing import run_ranks
from ckptstore.testing.s3_server import s3_server
from ckptstore.tools.cli import main

pytestmark = pytest.mark.slow

MIB = 1 << 20
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/cli-schema.json").read_text())
LOOK = jsonschema.Draft202012Validator({**SCHEMA, "$ref": "#/$defs/watch"})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Steps 10 and 20 were saved."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "model.pt").write_bytes(bytes(3000))
    with open_store(tmp_path / "store") as opened:
        for step in (10, 20):
            opened.save_directory(step, tmp_path / "source", metrics={"loss": 1 / step})
    return tmp_path / "store"


@contextmanager
def slow_save(*arguments: Any) -> Iterator[None]:
    """Two ranks at work in `slow_saver`; they have ended well when the context ends."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            run_ranks(2, slow_saver.save_two, *arguments, timeout_seconds=slow_saver.WAIT_SECONDS)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        for number in range(1, 10):
            (arguments[1] / f"gate-{number}").touch()
        thread.join()
    assert not failed, failed


def sizes(look: dict[str, Any]) -> list[tuple[int, int]]:
    return [(attempt["step"], attempt["size_bytes"]) for attempt in look["attempts"]]


def test_two_ranks_are_seen_as_they_save_to_a_disk(tmp_path: Path) -> None:
    root, gates = tmp_path / "store", tmp_path / "gates"
    gates.mkdir()
    with slow_save(str(root), gates, None, 1, 3 * MIB):
        slow_saver.wait_for(root / "log/0000000002.json")
        with watching("--json", "--interval", "0.1", root) as seen:
            first = seen.look(lambda look: sizes(look) == [(2, 0)] and look["attempts"][0]["num_files"] == 2)
            LOOK.validate(first)
            (attempt,) = first["attempts"]
            assert sum(path.stat().st_size for path in (root / "checkpoints" / attempt["attempt"]).iterdir()) == 6 * MIB
            assert (attempt["status"], attempt["expected_bytes"], attempt["expected_as_step"]) == (
                "writing",
                6 * MIB,
                1,
            )
            assert attempt["left_seconds"] is None
            assert first["durable"]["step"] == 1
            for number in (1, 2):
                (gates / f"gate-{number}").touch()
                look = seen.look(lambda look, number=number: sizes(look) == [(2, 2 * number * MIB)])
            (attempt,) = look["attempts"]
            assert attempt["bytes_per_second"] > 0
            assert attempt["left_seconds"] == pytest.approx(2 * MIB / attempt["bytes_per_second"])
            (gates / "gate-3").touch()
            look = seen.look(lambda look: any(change["kind"] == "commit" for change in look["changes"]))
            LOOK.validate(look)
            assert look["attempts"] == []
            assert (look["durable"]["step"], look["durable"]["metrics"]) == (2, {"loss": 0.25})
            assert [commit["step"] for commit in look["commits"]] == [2, 1]
            assert (seen.end(), seen.errors()) == (130, "")


def test_two_ranks_are_seen_as_they_save_to_s3(tmp_path: Path) -> None:
    gates = tmp_path / "gates"
    gates.mkdir()
    with s3_server(buckets=["test"]) as server, slow_save("s3://test/run", gates, server.storage_options, 3, MIB):
        env = {"AWS_ENDPOINT_URL": server.endpoint_url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        env["AWS_REGION"] = "us-east-1"
        with open_store("s3://test/run", group="solo", storage_options=server.storage_options) as opened:
            deadline = time.monotonic() + DEADLINE_SECONDS
            while opened.latest() is None:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        with watching("--interval", "0.2", "s3://test/run", env=env) as seen:
            assert seen.look(lambda look: look["durable"])["durable"]["step"] == 1  # a pipe gets JSON unasked
            (gates / "gate-1").touch()
            (attempt,) = seen.look(lambda look: sizes(look) == [(2, 2 * MIB)])["attempts"]
            assert (attempt["expected_bytes"], attempt["expected_as_step"], attempt["num_files"]) == (6 * MIB, 1, 2)
            (gates / "gate-2").touch()
            (attempt,) = seen.look(lambda look: sizes(look) == [(2, 4 * MIB)])["attempts"]
            assert attempt["left_seconds"] is not None
            (gates / "gate-3").touch()
            look = seen.look(lambda look: any(change["kind"] == "commit" for change in look["changes"]))
            assert (look["durable"]["step"], look["durable"]["size_bytes"]) == (2, 6 * MIB)
            assert (seen.end(signal.SIGTERM), seen.errors()) == (143, "")


def test_a_store_that_goes_away_is_shown_and_looked_for_again(store: Path) -> None:
    away = store.with_name("away")
    with watching("--json", "--interval", "0.1", store) as looks:
        looks.look(lambda look: look["durable"]["step"] == 20)
        store.rename(away)
        look = looks.look(lambda look: look["trouble"])
        LOOK.validate(look)
        assert "is not there any more" in look["trouble"]
        assert look["durable"]["step"] == 20
        away.rename(store)
        looks.look(lambda look: look["trouble"] is None)
        assert (looks.end(), looks.errors()) == (130, "")


def test_a_server_that_goes_away_is_shown(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(s3_server(buckets=["test"]))
        with open_store("s3://test/run", storage_options=server.storage_options) as opened:
            opened.save_directory(1, tmp_path / "source")
        env = {"AWS_ENDPOINT_URL": server.endpoint_url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "hidden"}
        env["AWS_REGION"] = "us-east-1"
        with watching("--interval", "0.1", "s3://test/run", env=env) as seen:
            seen.look(lambda look: look["durable"]["step"] == 1)
            stack.close()
            look = seen.look(lambda look: look["trouble"])
            assert "hidden" not in json.dumps(look)
            assert (seen.end(), seen.errors()) == (130, "")


def test_a_closed_pipe_ends_it_although_nothing_changes(store: Path) -> None:
    command = f"{sys.executable} -m ckptstore.tools.cli watch --interval 60 {store} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True)
    line, status = done.stdout.splitlines()
    assert json.loads(line)["durable"]["step"] == 20
    assert (status, done.stderr) == ("1", "")


def test_one_look(store: Path) -> None:
    run = CliRunner().invoke
    done = run(main, ["watch", "--once", str(store)])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "".join(line.removeprefix("store").strip() for line in lines[:-4]) == str(store)
    lines = lines[-5:]
    assert [line.split()[:3] for line in lines[1:]] == [
        ["durable", "step", "20,"],
        ["in", "flight", "nothing"],
        ["commits", "step", "20"],
        ["step", "10", *lines[4].split()[2:3]],
    ]
    (line,) = run(main, ["watch", "--once", "--json", str(store)]).stdout.splitlines()
    LOOK.validate(json.loads(line))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--once", "{store}-not"], 10, "There is no store"),
        (["--once", "--interval", "5", "{store}"], 2, "means nothing with --once"),
        (["--interval", "0", "{store}"], 2, "must be at least 0.1 s"),
        (["--interval", "nan", "{store}"], 2, "is no duration"),
    ],
)
def test_what_cannot_be_watched_is_refused(store: Path, arguments: list[str], code: int, words: str) -> None:
    done = CliRunner().invoke(main, ["watch", *(item.format(store=store) for item in arguments)])
    assert (done.exit_code, words in done.stderr) == (code, True), done.output


def test_a_store_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    with watching("--interval", "0.1", tmp_path / "store") as seen:
        assert seen.process.stderr is not None
        said = seen.process.stderr.readline()
        assert said.startswith(f"There is no store at {tmp_path / 'store'} yet")
        with open_store(tmp_path / "store") as opened:
            opened.save_directory(7, None)
        assert seen.look(lambda look: look["durable"])["durable"]["step"] == 7
        assert (seen.end(), seen.errors()) == (130, "")
    done = CliRunner().invoke(main, ["watch", f"{tmp_path / 'store'}@7"])
    assert (done.exit_code, "There is no store" in done.stderr) == (10, True)


def test_a_store_without_checkpoints_and_one_that_is_made_read_only(store: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(store / "store.json", empty)
    for path in (empty, empty / "store.json"):
        os.chmod(path, 0o555)
    done = CliRunner().invoke(main, ["watch", "--once", str(empty)])
    assert "no checkpoint yet" in done.stdout
    os.chmod(empty, 0o755)
