"""Errors of the command line: a message on stderr, an exit code per class, one JSON object with --json, no secrets."""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from ckptstore import open_store
from ckptstore.errors import CkptstoreError, all_errors
from ckptstore.tools.cli import COMMANDS, GROUPS, main
from ckptstore.tools.cli import command as shared

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "ckptstore"]


def test_a_place_without_a_store_is_told_and_left_alone(run: Any, tmp_path: Path) -> None:
    for command in ("ls", "latest", "show", "verify", "prune", "gc"):
        result = run(command, tmp_path / "nothing", code=10)
        assert result.stderr.startswith("error: There is no store at ")
        assert result.stdout == ""
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("show", "{store}@99"), 4),
        (("pin", "{store}@99"), 4),
        (("pin", "{store}"), 2),
        (("ls", "{store}@20"), 2),
        (("best", "{store}", "accuracy"), 2),
        (("show", "{store}@best:los"), 2),
        (("verify", "{store}", "--sample", "0%"), 2),
        (("prune", "{store}", "--grace", "-1"), 2),
        (("prune", "{store}", "--keep", "best=loss"), 2),
        (("ls", "nosuchscheme://x/y"), 2),
        (("ls", "{store}", "--storage-option", "novalue"), 2),
        (("cp", "{store}@20", "{store}"), 2),
        (("diff", "{store}@20", "{store}@99"), 4),
    ],
)
def test_bad_input_has_the_exit_code_of_its_class(run: Any, store: Path, arguments: tuple[str, ...], code: int) -> None:
    result = run(*(argument.format(store=store) for argument in arguments), code=code)
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", [("nosuchcommand",), ("ls",), ("ls", "a", "--nosuchoption"), ("best", "a"), ()])
def test_wrong_usage_is_exit_code_2_and_in_json_one_object(run: Any, arguments: tuple[str, ...]) -> None:
    assert "Usage:" in run(*arguments, code=2).stderr
    result = run(*arguments, "--json", code=2)
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "usage"
    assert error["message"] in result.stderr


def test_errors_name_the_flags_of_the_command_line(run_json: Any, run: Any, store: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "args": argparse.Namespace()}, tmp_path / "a.pt")
    command = ["import", tmp_path / "a.pt", tmp_path / "new", "--from", "torch", "--step", 3]
    hint = run_json(*command, code=2)["error"]["hint"]
    assert "pass --allow-pickle, or" in hint
    run(*command, "--allow-pickle")
    assert run_json(*command, "--allow-pickle", code=6)["error"]["hint"] == "Use --replace to replace it"
    run("export", tmp_path / "new", tmp_path / "out", "--include", "w")
    hint = run_json("export", tmp_path / "new", tmp_path / "out", "--include", "w", code=2)["error"]["hint"]
    assert hint == "Give another directory, or give --overwrite"


@pytest.mark.parametrize("cls", all_errors().values())
def test_every_error_class_ends_with_its_exit_code(
    cls: type[CkptstoreError], run_json: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object) -> None:
        raise cls("it broke", step=7, hint="Mend it")

    monkeypatch.setattr("ckptstore.store.CheckpointStore.latest", fail)
    error = run_json("latest", store, code=cls.exit_code)["error"]
    assert (error["code"], error["message"], error["step"], error["hint"]) == (cls.code, "it broke", 7, "Mend it")


def test_an_interrupt_ends_with_130(run: Any, run_json: Any, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptstore.store.CheckpointStore.latest", interrupt)
    assert run("latest", store, code=130).stderr == "interrupted\n"
    assert run_json("latest", store, code=130)["error"]["code"] == "interrupted"


def test_a_storage_option_is_never_shown(run: Any, store: Path, tmp_path: Path) -> None:
    for arguments in (("ls", store), ("ls", tmp_path / "nothing"), ("ls", "nosuchscheme://x")):
        options = ("--storage-option", "secret=hunter2", "--json")
        result = CliRunner().invoke(main, [*map(str, arguments), *options])
        assert "hunter2" not in result.output


def each() -> dict[str, click.Command]:
    """Every command, those inside of `fast` too."""
    found: dict[str, Any] = {name: main.get_command(click.Context(main), name) for name in COMMANDS}
    return {**found, **{f"fast {name}": inner for name, inner in found["fast"].commands.items()}}


def test_every_command_has_help_and_json_in_whole_sentences(run: Any) -> None:
    for name, command in each().items():
        text = run(*name.split(), "--help").stdout
        assert text.startswith("Usage: main " + name)
        assert name in ("demo", "fast", "s3-test", "serve") or "--json" in text
        for option in command.params:
            if isinstance(option, click.Option):
                assert re.fullmatch(r"[A-Z].*\.", option.help or "", re.DOTALL), f"{name} {option.name}: {option.help}"


def test_the_help_has_a_line_of_80_columns_for_each_command(run: Any) -> None:
    lines = run("--help").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.endswith(":")] == ["Options:", *(f"{group}:" for group in GROUPS)]
    listed = [line for line in lines[lines.index("Look:") :] if line.startswith("  ")]
    assert [line.split()[0] for line in listed] == [*COMMANDS]
    assert [line for line in listed if not line.endswith(".")] == []


def test_a_command_reads_its_options_and_no_other_name() -> None:
    """As a signature for each would hold it."""
    of_all = set(re.findall(r"self\.(\w+)", inspect.getsource(shared)))
    for module in {module for module, *_ in COMMANDS.values()}:
        text = inspect.getsource(import_module(f"ckptstore.tools.cli.commands.{module}"))
        read = {*re.findall(r"\b(?:call|settings)\.(\w+)", text)}
        for names in re.findall(r"picked\((?:call|settings), ([^)]*)\)", text):
            read |= {*re.findall(r'"(\w+)"', names)}
        commands = [command for name, command in each().items() if COMMANDS[name.split()[0]][0] == module]
        options = {item.name for command in commands for item in command.params}
        assert options - read <= of_all
        assert read - options <= {*dir(shared.Call)}


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        *[("remove", "did you mean 'rm'?"), ("list", "did you mean 'ls'?"), ("delete", "did you mean 'rm'?")],
        *[("verfy", "did you mean 'verify'?"), ("frobnicate", "no command 'frobnicate'.")],
    ],
)
def test_a_command_that_does_not_exist_names_the_one_that_was_meant(run: Any, typed: str, hint: str) -> None:
    assert hint in run(typed, "runs", code=2).stderr


def test_hints_are_in_the_words_of_the_command_line(run: Any, tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.save_directory(1, None, metrics={"score": 1.0})
    assert "Give --mode min or --mode max" in run("best", tmp_path / "store", "score", code=2).stderr
    shown = run("show", f"{tmp_path}/store@best:score", code=2).stderr
    assert "Write STORE@best:METRIC:min or STORE@best:METRIC:max" in shown
    pruned = run("prune", tmp_path / "store", "--keep", "best=1:score", code=2).stderr
    assert "Write best=1:score:min or best=1:score:max" in pruned


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands(shell: str) -> None:
    words = {"COMP_WORDS": "ckptstore ver", "COMP_CWORD": "1" if shell != "fish" else "ver"}
    environment = {**os.environ, **words, "_CKPTSTORE_COMPLETE": f"{shell}_complete"}
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=True)
    assert "verify" in done.stdout


def completed(words: str) -> list[str]:
    count = len(words.split(" ")) - 1
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(count), "_CKPTSTORE_COMPLETE": "bash_complete"}
    done = subprocess.run(COMMAND, env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line]


def test_the_shell_completes_stores_steps_and_metrics(tmp_path: Path) -> None:
    with open_store(tmp_path / "run", durable=False) as made:
        for step in (5, 30, 31):
            made.save_directory(step, None, metrics={"loss": 0.5, "accuracy": 0.9})
    assert completed(f"ckptstore ls {tmp_path}/r") == [f"dir,{tmp_path}/r"]
    assert completed(f"ckptstore show {tmp_path}/run@3") == [f"plain,{tmp_path}/run@{step}" for step in (30, 31)]
    assert completed(f"ckptstore pin {tmp_path}/run@l") == [f"plain,{tmp_path}/run@latest"]
    assert completed(f"ckptstore best {tmp_path}/run ") == ["plain,accuracy", "plain,loss"]
    assert completed(f"ckptstore show {tmp_path}/no@3") == []


def test_times_have_units(run: Any, store: Path) -> None:
    for time in ("3600", "60m", "1h", "0.5d", "2 w"):
        run("prune", store, "--grace", time, "--dry-run")
    assert "no duration" in run("prune", store, "--grace", "soon", code=2).stderr


def test_the_real_command_keeps_stdout_and_stderr_apart(store: Path, tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "ls", "--json", str(store)], capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)["checkpoints"]) == 2
    assert done.stderr == ""
    failed = subprocess.run([*COMMAND, "ls", str(tmp_path / "nothing")], capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (10, "")
    assert "There is no store at" in failed.stderr
    done = subprocess.run([*COMMAND, "verify", str(store)], capture_output=True, text=True, check=True)
    assert "\x1b[" not in done.stdout
    assert done.stderr == "", "no bar in a pipe"


@pytest.mark.parametrize("words", [["ls", "{store}"], ["watch", "{store}", "--once"], ["show", "{store}@30", "--json"]])
def test_a_full_stdout_is_one_clear_error_and_a_closed_pipe_is_quiet(store: Path, words: list[str]) -> None:
    command = [*COMMAND, *(word.format(store=store) for word in words)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: The output could not be written: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.stderr == ""
    with subprocess.Popen(command, preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE, text=True) as process:
        assert "Traceback" not in process.communicate()[1]


def on_a_terminal(*arguments: str) -> str:
    """What a command prints when stdout and stderr are a terminal."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160"}
    process = subprocess.Popen([*COMMAND, *arguments], stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    text = b""
    with suppress(OSError):  # how Linux tells that the other end is closed
        while chunk := os.read(leader, 4096):
            text += chunk
    os.close(leader)
    assert process.wait() == 0
    return text.decode()


def test_a_terminal_gets_a_bold_header_and_a_bar(store: Path) -> None:
    assert "\x1b[1mnumber" in on_a_terminal("ls", str(store))
    assert "step 30" in on_a_terminal("verify", str(store))
    assert "\x1b[" in on_a_terminal("verify", str(store))
    assert json.loads(on_a_terminal("verify", "--json", str(store)))["ok"] is True


def test_what_follows_an_at_is_explained(run: Any, store: Path) -> None:
    for command in ("show", "verify", "ls"):
        message = run(command, f"{store}@lates", code=10).stderr
        assert f"{store} is a store; after its @ comes a step, latest or best:METRIC" in message
        assert "'lates' is none of these" in message
    assert f"Write {store}@best:METRIC" in run("show", f"{store}@best", code=10).stderr


def test_a_step_is_written_behind_the_store_and_a_copy_onto_itself_refused(
    run: Any, store: Path, tmp_path: Path
) -> None:
    assert "STORE@1" in run("verify", store, "--step", "1", code=2).stderr
    (tmp_path / "link").symlink_to(store)
    for other in (str(store), f"{store}/", f"file://{store}", str(tmp_path / "link")):
        assert "itself: nothing is to be copied" in run("cp", store, other, code=2).stderr
    message = run("verify", "--all", f"{store}@1", code=2).stderr
    assert f"Write `ckptstore verify {store}@1`" in message


def test_the_standalone_s3_server_says_how_to_reach_it(tmp_path: Path) -> None:
    command = [*COMMAND, "s3-test", "--port", "0", "--bucket", "mine"]
    server: Any
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            lines = [server.stdout.readline().strip() for _ in range(3)]
            words = [word for line in lines[:2] for word in line.removeprefix("export ").split()]
            environment = {**os.environ, **dict(word.split("=", 1) for word in words)}
            for arguments in (("ls", "s3://mine/run"), ("doctor", "s3://mine/run")):
                done = subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True)
                assert done.returncode == (10 if arguments[0] == "ls" else 0), done.stderr
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 130
        finally:
            server.kill()


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_without_a_cluster_of_ray_it_says_so(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray looks for a cluster among all processes of the machine, and would find those of other people."""
    from ray._private import services

    monkeypatch.setattr(services, "find_gcs_addresses", functools.cache(set))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with open_store(tmp_path / "store") as store:
        store.save(1, {"epoch": 1})
    told = run("verify", tmp_path / "store", "--engine", "ray", code=2).stderr
    assert "There is no Ray cluster to work on" in told
    assert "ray start --head" in told
