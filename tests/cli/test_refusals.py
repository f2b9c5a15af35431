"""A command or call that is refused changes nothing: the store holds the same bytes as before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from ckptstore import CheckpointStore, CkptstoreError, KeepAll, KeepBest, KeepLatest, KeepWeights, open_store
from ckptstore.tools.cli import COMMANDS, main

_CHANGE_NOTHING = {"ls", "show", "watch", "latest", "best", "diff", "report", "serve", "verify", "check-load", "doctor"}
_CHANGE_NOTHING |= {"follow", "demo", "s3-test", "bench", "fast", "run", "watch-folder", "restore-folder", "gc"}
"""Commands that change no store, or none that exists before them, or that refuse nothing but a store that is away."""


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((400,), float(step))}, "optimizer": {"m": torch.full((9000,), float(step))}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of which steps 1 to 6 are live: 1 and 5 thinned and pinned, 2 referred to by 3, 4 pinned, 6 the latest
    and pinned; 7 is in the trash. Beside it are files to import, an export and a publication."""
    root = tmp_path_factory.mktemp("refusals")
    with open_store(root / "store", retention=KeepAll() | KeepWeights(KeepAll())) as store:
        for step in (1, 2, 3, 4, 5, 6, 7):
            store.save(step, state_of(min(step, 2) if step == 3 else step), incremental="reference")
        store.remove(7, force=True)
        store.thin(1, "optimizer.*")
        store.thin(5, "optimizer.*")
        for step in (1, 4, 5, 6):
            store.pin(step)
    save_file({"w": torch.ones(4)}, root / "good.safetensors")
    (root / "bad.safetensors").write_bytes(b"nothing")
    torch.save({"w": torch.ones(3), "f": CheckpointStore}, root / "pickle.pt")
    for words in (["export", f"{root}/store@6", f"{root}/out"], ["publish", f"{root}/store@6", f"{root}/pub"]):
        done = CliRunner().invoke(main, [*words, "--include", "model.*"])
        assert done.exit_code == 0, done.output
    return root


def held(root: Path) -> dict[str, bytes | None]:
    """Every file and directory, with the bytes of the files; but for the folder of the lock of those who pull."""
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*")}
    return {
        name: path.read_bytes() if path.is_file() else None
        for name, path in found.items()
        if not name.startswith(".pulled.ckptstore")
    }


REFUSED = {
    "annotate": ["{store}@9 loss=1", "{store}@6 loss=much"],
    "pin": ["{store}@9", "{store}@7"],
    "unpin": ["{store}@9", "{store}@7"],
    "rollback": ["{store}@9", "{store}@1", "{store}@4"],
    "restore": ["{store}@9", "{store}@6"],
    "rm": ["{store}@9", "{store}@6", "{store}@6 --force", "{store}@4", "{store}@2", "{store} --all --yes", "{store}"],
    "thin": ["{store}@6 --drop optimizer.*", "{store}@4 --drop optimizer.*", "{store}@4 --force --drop none.*"],
    "prune": ["{store} --keep best=1:loss:min", "{store} --keep latest=none"],
    "cp": ["{store}@9 {root}/copy", "{store}@6 {store}", "{root}/none {store}", "{root}/none {root}/copy"],
    "import": [
        "{root}/none {store} --step 9",
        "{root}/bad.safetensors {store} --step 9",
        "{root}/pickle.pt {store} --step 9",
        "{root}/good.safetensors {store} --step 6",
        "{root}/good.safetensors {store} --step 9 --rename x=y",
        "{root}/good.safetensors {root}/new --step 9 --rename x=y",
    ],
    "export": [
        "{store}@9 {root}/out2",
        "{store}@6 {root}/out --include model.*",
        "{store}@6 {root}/out --overwrite --include none.*",
        "{store}@6 {store}/log",
        "{store}@6 {store}/log --overwrite",
        "{store}@6 {store} --overwrite",
    ],
    "merge": [
        "{store}@6 {store}@9 {root}/soup",
        "{store}@6 {store}@4 {root}/soup --dtype float5",
        "{store}@6 {store}@4 {root}/out --overwrite --include none.*",
    ],
    "publish": ["{store}@9 {root}/pub", "{store}@4 {root}/pub --include none.*", "{store}@6 {store}"],
    "pull": ["{root}/pub {root}/pulled --version 99 --timeout 0", "{root}/none {root}/pulled --timeout 0"],
}


@pytest.mark.parametrize(("command", "words"), [(name, words) for name in REFUSED for words in REFUSED[name]])
def test_a_command_that_is_refused_changes_nothing(made: Path, command: str, words: str) -> None:
    before = held(made)
    done = CliRunner().invoke(main, [command, *words.format(root=made, store=made / "store").split()])
    assert done.exit_code != 0, done.output
    assert isinstance(done.exception, SystemExit), done.exception
    assert held(made) == before, done.output


def test_the_commands_above_are_all_that_change_something() -> None:
    assert set(COMMANDS) == {*REFUSED, *_CHANGE_NOTHING}
    assert REFUSED.keys().isdisjoint(_CHANGE_NOTHING)


CALLS: dict[str, Callable[[CheckpointStore], object]] = {
    "remove all": lambda store: store.remove_all(),
    "remove the latest above a thinned one": lambda store: store.remove(6, force=True),
    "roll back below a pinned one": lambda store: store.roll_back(3),
    "retain by a metric that is missing": lambda store: store.retain(KeepBest(1, "loss", "min")),
    "retain, with a thinning that is refused": lambda store: store.retain(KeepWeights(KeepLatest(4), "none.*")),
    "annotate with nothing": lambda store: store.annotate(6, {}),
    "annotate with a word": lambda store: store.annotate(6, {"loss": "low"}),
    "restore another number": lambda store: store.restore(7, number=3),
    "thin by no pattern": lambda store: store.thin(4, []),
    "save a step that exists": lambda store: store.save(6, state_of(6), exists="error"),
    "save at no step": lambda store: store.save(-1, state_of(6)),
    "save what has no form": lambda store: store.save(9, {"w": object()}),
    "save with a metric that is none": lambda store: store.save(9, state_of(9), metrics={"loss": "low"}),
    "save with metadata that is none": lambda store: store.save(9, state_of(9), metadata={"a": object()}),
    "save a directory that is missing": lambda store: store.save_directory(9, "/nonexistent/directory"),
    "load another state": lambda store: store.load({"model": {"v": torch.ones(3)}}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_that_is_refused_changes_nothing(made: Path, call: Callable[[CheckpointStore], object]) -> None:
    before = held(made)
    with open_store(made / "store", retention=KeepAll()) as store, pytest.raises(CkptstoreError):
        call(store)
    assert held(made) == before
