"""Drawing, shrinking, the command, and that nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit.states import StateCase, StateOutcome, draw, run, script, shrink
from kit.states.__main__ import main
from kit.states.case_runner import group_of
from kit.states.module_makers import MODULES, ROWS, WIDTH
from kit.states.optimizer_makers import OPTIMIZERS
from kit.states.program import Program
from kit.states.state_case import EXTRAS
from kit.states.tensor_makers import TENSORS
from kit.states.value_makers import VALUES

from ckptstore.storage import memory
from ckptstore.store import CheckpointStore


def test_a_seed_is_one_case_and_survives_json() -> None:
    for seed in range(500):
        case = draw(seed)
        assert case == draw(seed)
        assert StateCase.from_json(case.to_json()) == case


def test_every_maker_is_drawn() -> None:
    cases = [draw(seed) for seed in range(3000)]
    for table, drawn in (
        (MODULES, {name for case in cases for name in case.modules}),
        (TENSORS, {name for case in cases for name in case.tensors}),
        (VALUES, {name for case in cases for name in case.values}),
        (OPTIMIZERS, {case.optimizer for case in cases} - {""}),
        (EXTRAS, {name for case in cases for name in case.extras}),
    ):
        assert drawn == set(table)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_takes_and_gives_rows(name: str) -> None:
    assert MODULES[name]()(torch.randn(ROWS, WIDTH)).shape == (ROWS, WIDTH)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps(name: str) -> None:
    case = StateCase(0, modules=("linear",), optimizer=name)
    with group_of(case):
        program = Program(case, frozenset(), salt=0)
        before = program.modules["a"].left.weight.detach().clone()  # type: ignore[union-attr, operator]
        program.do("step")
        assert not torch.equal(program.modules["a"].left.weight, before)  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("name", EXTRAS)
def test_every_object_is_in_a_state(name: str) -> None:
    program = Program(StateCase(0, modules=("linear",), optimizer="adam", extras=(name,)), frozenset(), salt=0)
    program.do("step")
    assert program.state.keys() > {"a", "optimizer"}


def test_a_field_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no field 'colour'"):
        StateCase.from_json('{"seed": 1, "colour": "red"}')


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    random, threads = torch.get_rng_state(), set(threading.enumerate())
    made: list[str] = []
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *given, **named: made.append(make(*given, **named)) or made[-1])
    for storage in ("disk", "memory"):
        assert run(replace(StateCase(3, modules=("linear",), wrapper="ddp"), storage=storage)).ok
    assert torch.equal(torch.get_rng_state(), random)
    assert made
    assert not any(map(os.path.exists, made))
    assert not any(space.files for name, space in memory._spaces.items() if name.startswith("states-"))
    assert not torch.distributed.is_initialized()
    assert not [thread for thread in set(threading.enumerate()) - threads if not thread.daemon]


def _plant(patch: pytest.MonkeyPatch) -> None:
    """A load after which layer norms are zero."""
    load = CheckpointStore.load

    def zeroed(self: CheckpointStore, state: dict[str, torch.nn.Module], **arguments: object) -> object:
        loaded = load(self, state, **arguments)  # type: ignore[arg-type]
        for module in state["a"].modules() if "a" in state else ():
            if isinstance(module, torch.nn.LayerNorm):
                torch.nn.init.zeros_(module.weight)
        return loaded

    patch.setattr(CheckpointStore, "load", zeroed)


BIG = StateCase(
    7, modules=("layer norm", "linear"), optimizer="adam", grouping="two", extras=("scaler", "rng"), tensors=("0-dim",),
    values=("int", "none"), life=("step", "lower lr"), save="save_async", stock_readable=False, into="running",
    later=("step",),
)  # fmt: skip


def test_a_failing_case_becomes_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch)
    outcome = run(BIG)
    assert outcome.kind == "load: module layer norm other bits"
    assert shrink(outcome).case == StateCase(7, modules=("layer norm",))


def test_shrinking_keeps_the_kind() -> None:
    def runs(case: StateCase) -> StateOutcome:
        is_it = {"step", "lower lr"} <= set(case.life)
        return StateOutcome(case, "this" if is_it else "that")

    assert shrink(StateOutcome(BIG, "this"), runs=runs).case == StateCase(7, life=("step", "lower lr"))


@pytest.mark.slow
def test_a_script_runs_alone(tmp_path: Path) -> None:
    path = tmp_path / "case.py"
    path.write_text(script(StateOutcome(replace(BIG, modules=("linear",)), 'load: "quoted"')))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "same"), done.stderr


def test_the_command_writes_a_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _plant(patch)
        failing = [seed for seed in range(500) if "layer norm" in draw(seed).modules and "layer norm" in run(seed).kind]
    seed = next(seed for seed in failing if run(seed).ok)
    assert main(["--seed", str(seed)]) == 0
    assert "1 seeds" in capsys.readouterr().out
    _plant(monkeypatch)
    assert main(["--seed", str(seed), "--script", str(tmp_path / "found.py")]) == 1
    told = capsys.readouterr().out
    assert "1 failed" in told
    assert "module layer norm other bits" in told
    assert (tmp_path / "found.py").read_text() in told
    assert main(["--seed", str(seed), "--count", "2", "--seconds", "100", "--keep-going"]) == 1
    assert f"(seed {seed}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--ranks", "0"], ["--count", "0"], ["--device", "cuda:99"], ["--script", "/nowhere/x.py"]]
)
def test_what_runs_nothing_is_an_error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert f"error: {arguments[0]} is " in capsys.readouterr().err
