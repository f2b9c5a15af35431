"""`ckptstore watch` as a process: it sees real ranks save, and ends as it should."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from watch_process import DEADLINE_SECONDS, watching

from ckptstore import StorageGroup, open_store
from ckptstore.testing import Call, with_faults
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


WAIT_SECONDS = 240.0


@contextmanager
def slow_save(root: Path, size_bytes: int) -> Iterator[list[threading.Event]]:
    """Two ranks save step 1, and step 2: of that the nth write of each to its file waits for the nth of these. They
    have ended well when the context ends."""
    gates = [threading.Event() for _ in range(9)]

    def save(rank: int) -> None:
        source, numbers = root.with_name(f"source-{rank}"), itertools.count()
        source.mkdir()
        (source / f"data-{rank}").write_bytes(bytes([1 + rank]) * size_bytes)

        def wait(call: Call) -> None:
            is_data = "/step-0000000002-" in call.key and "/data-" in call.key
            if is_data and call.phase == "before" and call.verb in ("write", "write_part", "write_many"):
                assert gates[next(numbers)].wait(WAIT_SECONDS)

        with with_faults(open_store(root, group=StorageGroup(rank, 2, "watched")), wait) as store:
            store.save_directory(1, source, metrics={"loss": 0.5})
            store.save_directory(2, source, metrics={"loss": 0.25})

    with ThreadPoolExecutor(2) as pool:
        ranks = pool.map(save, range(2))
        try:
            yield gates
        finally:
            for gate in gates:
                gate.set()
            assert list(ranks) == [None, None]


def sizes(look: dict[str, Any]) -> list[tuple[int, int]]:
    return [(attempt["step"], attempt["size_bytes"]) for attempt in look["attempts"]]


def test_two_ranks_are_seen_as_they_save(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with slow_save(root, 3 * MIB) as gates:
        deadline = time.monotonic() + WAIT_SECONDS
        while not (root / "log/0000000002.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with watching("--json", "--interval", "0.1", root) as seen:
            first = seen.look(lambda look: sizes(look) == [(2, 0)] and look["attempts"][0]["num_files"] == 2)
            LOOK.validate(first)
            (attempt,) = first["attempts"]
            assert sum(path.stat().st_size for path in (root / "checkpoints" / attempt["attempt"]).iterdir()) == 6 * MIB
            assert (attempt["status"], attempt["expected_bytes"], attempt["left_seconds"]) == ("writing", 6 * MIB, None)
            assert (attempt["expected_as_step"], first["durable"]["step"]) == (1, 1)
            for number in (1, 2):
                gates[number - 1].set()
                look = seen.look(lambda look, number=number: sizes(look) == [(2, 2 * number * MIB)])
            (attempt,) = look["attempts"]
            assert attempt["bytes_per_second"] > 0
            assert attempt["left_seconds"] == pytest.approx(2 * MIB / attempt["bytes_per_second"])
            gates[2].set()
            look = seen.look(lambda look: any(change["kind"] == "commit" for change in look["changes"]))
            LOOK.validate(look)
            assert look["attempts"] == []
            assert (look["durable"]["step"], look["durable"]["metrics"]) == (2, {"loss": 0.25})
            assert [commit["step"] for commit in look["commits"]] == [2, 1]
            assert (seen.end(), seen.errors()) == (130, "")


def test_a_store_that_goes_away_is_shown_and_looked_for_again(store: Path) -> None:
    away = store.with_name("away")
    with watching("--interval", "0.1", store) as looks:  # a pipe gets JSON unasked
        looks.look(lambda look: look["durable"]["step"] == 20)
        store.rename(away)
        look = looks.look(lambda look: look["trouble"])
        LOOK.validate(look)
        assert "is not there any more" in look["trouble"]
        assert look["durable"]["step"] == 20
        away.rename(store)
        looks.look(lambda look: look["trouble"] is None)
        assert (looks.end(signal.SIGTERM), looks.errors()) == (143, "")


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
    (store.parent / "empty").mkdir()
    shutil.copy(store / "store.json", store.parent / "empty")
    assert "no checkpoint yet" in run(main, ["watch", "--once", str(store.parent / "empty")]).stdout


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
        assert seen.process.stderr.readline().startswith(f"There is no store at {tmp_path / 'store'} yet")
        with open_store(tmp_path / "store") as opened:
            opened.save_directory(7, None)
        assert seen.look(lambda look: look["durable"])["durable"]["step"] == 7
        assert (seen.end(), seen.errors()) == (130, "")
    done = CliRunner().invoke(main, ["watch", f"{tmp_path / 'store'}@7"])
    assert (done.exit_code, "There is no store" in done.stderr) == (10, True)
