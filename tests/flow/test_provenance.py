"""Where a state comes from: programs in real repositories, secrets that stay out, and saves that never wait for git."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timed_ranks import save_files
from trees import copied

from ckptstore import Checkpoint, FastTier, open_store, program
from ckptstore.errors import InvalidInput
from ckptstore.testing import run_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TRAIN = """import sys, time
from ckptstore import open_store

is_awaited = "--wait" in sys.argv
if is_awaited:
    import numpy
with open_store(sys.argv[1]) as store:
    store.resume()
    for step in range(1, 200):
        found = store.save_directory(step, None).provenance
        if not is_awaited or found is None or found.commit:
            break
        time.sleep(0.05)
"""


def git(folder: Path, *words: str) -> str:
    options = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *options, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with one commit."""
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src/train.py").write_text(TRAIN)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def train(script: Path, store: Path, *words: str, **environment: str) -> Checkpoint:
    """Run the program elsewhere than in its folder, and return its newest checkpoint."""
    command = [sys.executable, str(script), str(store), *words]
    where = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    subprocess.run(command, cwd=store.parent, env=where, check=True, timeout=60)
    with open_store(store) as opened:
        found = opened.latest()
    assert found is not None
    return found


def provenance_of(checkpoint: Checkpoint | None) -> Any:
    assert checkpoint.provenance is not None
    return checkpoint.provenance


def test_a_checkpoint_says_which_code_saved_it(project: Path, tmp_path: Path) -> None:
    script, commit = project / "src/train.py", git(project, "rev-parse", "HEAD")
    (project / "notes.txt").write_text("git does not track it")
    found = provenance_of(train(script, tmp_path / "a", "--wait", "--lr", "0.1"))
    assert (found.commit, found.is_dirty, found.num_hosts) == (commit, False, 1)
    assert found.argv == (str(script), str(tmp_path / "a"), "--wait", "--lr", "0.1")
    assert found.versions["numpy"] == np.__version__
    assert found.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "torch" not in found.versions, "the program has not imported it"
    script.write_text(TRAIN + "# changed\n")
    changed = provenance_of(train(script, tmp_path / "b", "--wait"))
    assert (changed.commit, changed.is_dirty) == (commit, True)


def test_no_secret_and_no_environment_gets_into_a_store(project: Path, tmp_path: Path) -> None:
    words = [
        *("--api-key", "CANARY-1", "--wandb_token=CANARY-2", "aws.secret=CANARY-3", '{"password": "CANARY-4"}'),
        *("--data=https://user:CANARY-5@host/set?sig=CANARY-6", "--passwords", "CANARY-7", "CANARY-8", "--lr", "1"),
        *("hf_CANARYCANARY9", "-token", "CANARY-10"),
    ]
    checkpoint = train(project / "src/train.py", tmp_path / "store", *words, OTHER="CANARY-11")
    assert provenance_of(checkpoint).argv[-5:] == ("--lr", "1", "***", "-token", "***")
    stored = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert any(b"--api-key" in data for data in stored), "the command line is there"
    assert [data for data in stored if b"CANARY" in data] == []


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        (("--token", "a", "b", "--n", "1"), ("--token", "***", "***", "--n", "1")),
        (("--token=a=b c",), ("--token=***",)),
        (("+model.api_key='x'",), ("+model.api_key=***",)),
        (("--header", "Authorization: Bearer x"), ("--header", "Authorization: ***")),
        (("s3://bucket/a?X-Amz-Signature=1",), ("s3://bucket/a",)),
        (("['az://u:p@h/x','b']",), ("['az://h/x','b']",)),
        (("--resume", "/runs/a", "--lr=0.1"), ("--resume", "/runs/a", "--lr=0.1")),
        (("-H", "Bearer abc~123+/=", "--x"), ("-H", "Bearer ***", "--x")),
        (("--auth", "u:p", "--http-auth=u:p", "--author", "u"), ("--auth", "***", "--http-auth=***", "--author", "u")),
        (("--token",), ("--token",)),
        (("x\udcff",), ("x\\udcff",)),
        (("a" * 8000, "b" * 300, "c"), ("a" * 8000, "... and 2 more")),
        ((), ()),
    ],
)
def test_what_a_command_line_becomes(argv: tuple[str, ...], kept: tuple[str, ...]) -> None:
    assert program.masked(argv) == kept


def test_it_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path / "a", provenance=False) as store:
        assert store.save(1, {"w": 1}).provenance is None
    monkeypatch.setenv("CKPTSTORE_PROVENANCE", "0")
    with open_store(tmp_path / "b") as store:
        assert store.save(1, {"w": 1}).provenance is None
    with pytest.raises(InvalidInput, match="provenance is 'no'"):
        open_store(tmp_path / "c", provenance="no")
    manifests = [path.read_text() for path in tmp_path.rglob("ckptstore.json")]
    assert len(manifests) == 2
    assert not any("provenance" in text for text in manifests)


def test_a_save_does_not_wait_for_git(project: Path, tmp_path: Path) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 8\n")
    (tmp_path / "git").chmod(0o755)
    began = time.monotonic()
    found = provenance_of(train(project / "src/train.py", tmp_path / "store", PATH=str(tmp_path)))
    assert time.monotonic() - began < 7
    assert (found.commit, found.is_dirty) == ("", None)
    assert found.versions, "the rest is there"


def test_where_git_does_not_say_it_the_commit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = program._asked_of_git
    assert ask(str(tmp_path)) == {}, "it is no repository"
    assert ask(str(tmp_path / "missing")) == {}
    git(tmp_path, "init", "-q")
    assert ask(str(tmp_path)) == {}, "it has no commit"
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    assert ask(str(tmp_path)) == {"commit": git(tmp_path, "rev-parse", "HEAD"), "is_dirty": False}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask(str(tmp_path)) == {}, "there is no git"


def test_a_long_command_line_takes_no_time() -> None:
    began = time.process_time()
    for text in ("a", "key", "key=", "-key ", "s3://", "token   "):
        program.masked((text * 100_000, "--x", text * 100_000))
    assert time.process_time() - began < 1


def test_hosts_are_counted_and_not_named(tmp_path: Path) -> None:
    run_ranks(2, save_files, str(tmp_path / "store"), -1, 0.0, -1)
    with open_store(tmp_path / "store") as store:
        found = provenance_of(store.latest())
    assert found.num_hosts == 2
    assert "node-" not in json.dumps(found.to_json())


def test_fast_checkpoints_and_copies_have_it(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", fast=FastTier(str(tmp_path / "fast"))) as store:
        store.save(1, {"w": torch.ones(3)})
        near = provenance_of(store.latest(fast=True))
        assert provenance_of(store.drain()) == near
        assert near.argv
        copied(store, tmp_path / "copy")
    with open_store(tmp_path / "copy") as copy:
        assert provenance_of(copy.latest()) == near
