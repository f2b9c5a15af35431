"""`ckptstore publish` and `ckptstore pull`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from weights_made import bytes_of, read_model

import ckptstore
from ckptstore.runtime.file_locks import Exclusive
from ckptstore.tools.cli import main

pytestmark = pytest.mark.slow

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/cli-schema.json").read_text())


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.stdout


def run_json(*words: object) -> Any:
    found = json.loads(run(*words, "--json"))
    jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{words[0]}"}).validate(found)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two checkpoints of a tied model."""
    module = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
    module[1].weight = module[0].weight
    with ckptstore.open_store(tmp_path / "store") as opened:
        for step in (10, 20):
            opened.save(step, {"model": module, "epoch": step})
            with torch.no_grad():
                module[0].weight += 1
    return tmp_path / "store"


def test_a_checkpoint_is_published_and_pulled(store: Path, tmp_path: Path) -> None:
    place, model, log = tmp_path / "published", tmp_path / "model", tmp_path / "log"
    options = ("--include", "model.*", "--strip-prefix", "model.")
    assert run_json("publish", f"{store}@10", place, *options)["published_version"] == 10
    program = f'echo "$CKPTSTORE_VERSION $CKPTSTORE_DIRECTORY" >> {log}'
    assert run_json("pull", place, model, "--exec", program)["is_full"]
    assert "2 deltas" not in run("publish", store, place, *options)
    assert "version 20 now" in run("pull", place, model, "--exec", program)
    assert not run_json("pull", place, model, "--exec", program)["is_changed"]
    assert log.read_text().splitlines() == [f"10 {model}", f"20 {model}"]
    with ckptstore.open_store(store) as opened:
        weights = opened.latest().to_dict()["model"]  # type: ignore[union-attr]
    assert read_model(model) == bytes_of({"0.weight": weights["0.weight"]})
    assert "not above version 20" in CliRunner().invoke(main, ["publish", f"{store}@10", str(place)]).output


def test_a_program_that_fails_is_run_again(store: Path, tmp_path: Path) -> None:
    place, model = tmp_path / "published", tmp_path / "model"
    run("publish", store, place, "--include", "model.*")
    run("pull", place, model, "--exec", "exit 3", code=2)
    assert (model / "model.safetensors.index.json").exists()
    run("pull", place, model, "--exec", f"touch {tmp_path / 'done'}")
    assert (tmp_path / "done").exists()


def test_nothing_but_json_comes_to_stdout(store: Path, tmp_path: Path) -> None:
    place, model = tmp_path / "published", tmp_path / "model"
    run("publish", store, place, "--include", "model.*")
    command = [sys.executable, "-m", "ckptstore.tools.cli", "pull", str(place), str(model), "--json"]
    done = subprocess.run([*command, "--exec", "echo loaded"], capture_output=True, text=True)
    assert json.loads(done.stdout)["published_version"] == 20
    assert "loaded" in done.stderr
    with Exclusive(tmp_path / ".model.ckptstore/lock").held(wait_seconds=0):
        found = json.loads(run("pull", place, model, "--json", "--timeout", "0.1s", code=34))
    assert "Another process" in found["error"]["message"]


def test_bad_words_are_refused(store: Path, tmp_path: Path) -> None:
    run("pull", tmp_path / "none", tmp_path / "model", "--timeout", "0.01s", code=34)
    run("pull", tmp_path / "none", tmp_path / "model", "--follow", "--version", 3, code=2)
    run("publish", f"{store}@10", tmp_path / "published", "--follow", code=2)
    run("publish", f"{store}@10", tmp_path / "published", "--include", "nothing*", code=2)
    run("publish", f"{store}@11", tmp_path / "published", code=4)


def test_a_serving_node_follows_a_training_through_two_commands(tmp_path: Path) -> None:
    """Each checkpoint becomes a version, the later ones as deltas, and each version is announced once."""
    store, published, model, log = (tmp_path / name for name in ("store", "published", "model", "log"))
    torch.manual_seed(0)
    weights = {"model": torch.nn.Linear(300, 300)}
    with ckptstore.open_store(store) as opened:
        opened.save(1, weights)
        program = [sys.executable, "-m", "ckptstore"]
        announce = f'echo "$CKPTSTORE_VERSION $CKPTSTORE_DIRECTORY" >> {log}'
        commands = [
            [*program, "publish", str(store), str(published), "--follow", "--strip-prefix", "model.", "--json"],
            [*program, "pull", str(published), str(model), "--follow", "--timeout", "100s", "--exec", announce],
        ]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        try:
            for step in (2, 3, None):
                wanted = 3 if step is None else step - 1
                await_line(log, f"{wanted} {model}")
                loaded = load_file(next(model.glob("*.safetensors")))
                assert torch.equal(loaded["weight"], weights["model"].weight)
                if step is not None:
                    with torch.no_grad():
                        weights["model"].weight[0] += 1
                    opened.save(step, weights)
        finally:
            for process in processes:
                process.send_signal(signal.SIGINT)
            shown = [process.communicate(timeout=60)[0] for process in processes]
    assert log.read_text().splitlines() == [f"{version} {model}" for version in (1, 2, 3)]
    assert [line for line in shown[1].splitlines() if "1 deltas" in line] == shown[1].splitlines()[1:]


def await_line(path: Path, line: str) -> None:
    """Wait until a file has a line."""
    deadline = time.monotonic() + 100
    while not (path.exists() and line in path.read_text().splitlines()):
        assert time.monotonic() < deadline, f"{line} did not come"
        time.sleep(0.05)
