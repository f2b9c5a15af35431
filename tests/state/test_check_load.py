"""What `check_load` says is what a load does, for models that were changed since; and it reads no tensor."""

from __future__ import annotations

import json
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from ckptstore import Checkpoint, InvalidInput, StateMismatch, open_store
from ckptstore.tools.cli import main


def net(**changed: nn.Module | None) -> nn.Module:
    layers: dict[str, nn.Module | None] = {
        "first": nn.Linear(4, 8),
        "norm": nn.BatchNorm1d(8),
        "last": nn.Linear(8, 8, bias=False),
        **changed,
    }
    return nn.Sequential(OrderedDict((name, layer) for name, layer in layers.items() if layer is not None))


def tied() -> nn.Module:
    model = net()
    model.first = nn.Linear(8, 8)
    model.last.weight = model.first.weight
    return model


def with_optimizer(model: nn.Module, kind: Callable[..., Any] = torch.optim.AdamW) -> dict[str, Any]:
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.1), "step": 0, "x": torch.zeros(3)}


CHANGED: dict[str, Callable[[], dict[str, Any]]] = {
    "same": lambda: with_optimizer(net()),
    "module alone": lambda: {"model": net()},
    "another name": lambda: {"net": net()},
    "layer renamed": lambda: {"model": net(first=None, firstly=nn.Linear(4, 8))},
    "layer added": lambda: with_optimizer(net(more=nn.Linear(2, 2))),
    "layer removed": lambda: with_optimizer(net(norm=None)),
    "other shape": lambda: with_optimizer(net(last=nn.Linear(8, 9, bias=False))),
    "other dtype": lambda: {"model": net().bfloat16()},
    "other dtype and shape": lambda: {"model": net(last=nn.Linear(8, 9, bias=False)).double()},
    "integers": lambda: {"x": torch.zeros(3, dtype=torch.int64)},
    "tied": lambda: {"model": tied()},
    "other optimizer": lambda: with_optimizer(net(), torch.optim.SGD),
    "state dict": lambda: {"model": dict(net().state_dict())},
    "a value for a tensor": lambda: {"x": 1},
    "a tensor for a value": lambda: {"step": torch.zeros(2)},
    "more values": lambda: {"step": 0, "epoch": 1},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """A checkpoint, and a copy of it without its tensors."""
    state = with_optimizer(net())
    state["model"](torch.ones(3, 4)).sum().backward()
    state["optimizer"].step()
    for name in ("whole", "hollow"):
        with open_store(tmp_path_factory.mktemp("stores") / name) as store:
            checkpoint = store.save(1, state)
        if name == "whole":
            whole = checkpoint
    for file in Path(checkpoint.uri).glob("*.distcp"):
        file.unlink()
    with open_store(Path(whole.uri).parents[1]) as first, open_store(Path(checkpoint.uri).parents[1]) as second:
        yield first[1], second[1]


@pytest.mark.parametrize("changed", CHANGED)
def test_the_answer_is_that_of_a_load(saved: tuple[Checkpoint, Checkpoint], changed: str) -> None:
    whole, hollow = saved
    for strict in (True, False):
        for dtype in ("same", "state"):
            options: dict[str, Any] = {"strict": strict, "dtype": dtype}
            with torch.device("meta"):
                state = CHANGED[changed]()
            check = hollow.check_load(state, **options)
            problem, report = load(whole, CHANGED[changed](), **options)
            assert (check.fits, check.problem) == (not problem, problem)
            assert bool(check.renamed) == (changed == "layer renamed")
            if report is not None:
                found = (check.missing, check.unexpected, check.left_out)
                assert found == (report.missing, report.unexpected, report.left_out)
                is_cast = changed == "other dtype"
                assert set(check.cast.values()) == ({"float32 to bfloat16"} if is_cast else set())


def load(checkpoint: Checkpoint, state: dict[str, Any], **options: Any) -> tuple[str, Any]:
    """Load, and return the error and the report."""
    try:
        return "", checkpoint.load(state, **options)
    except StateMismatch as error:
        return str(error), None


def test_a_live_state_stays_as_it_is(saved: tuple[Checkpoint, Checkpoint]) -> None:
    state = with_optimizer(net())
    before = {key: value.clone() for key, value in state["model"].state_dict().items()}
    assert saved[1].check_load(state).fits
    assert not state["optimizer"].state
    assert all(torch.equal(value, before[key]) for key, value in state["model"].state_dict().items())


def test_what_was_renamed_is_guessed(saved: tuple[Checkpoint, Checkpoint]) -> None:
    check = saved[1].check_load({"model": net(first=None, firstly=nn.Linear(4, 8))})
    assert check.renamed == {f"model.firstly.{name}": f"model.first.{name}" for name in ("bias", "weight")}
    assert not saved[1].check_load({"model": net(first=None, firstly=nn.Linear(4, 9))}).renamed
    both = saved[1].check_load({"model": net(first=None, firstly=nn.Linear(4, 8), firsts=nn.Linear(4, 8))}).renamed
    assert sorted(both.values()) == ["model.first.bias", "model.first.weight"]
    with pytest.raises(InvalidInput, match="fits no key"):
        saved[1].check_load({"model": net()}, include="modle.*")


def test_the_command(saved: tuple[Checkpoint, Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["import torch, test_check_load", "same = test_check_load.net", "number = 3"]
    lines += [
        "model = torch.nn.Linear(1, 1)",
        "def other(): return same(first=None)",
        "def leaving(): raise SystemExit(0)",
    ]
    lines += ["def on_meta(): model = same(); assert model.first.weight.is_meta; return model"]
    lines += ["def three(): return 3", "def sized(size): return size", "def item(): return torch.zeros(1).item()"]
    lines += ["def noisy(): print('building'); return same()", "def failing(): raise OSError('no file')"]
    folder = tmp_path / "torch"  # which does not make its functions torch's
    folder.mkdir()
    (folder / "my_models.py").write_text("\n".join(lines))
    (folder / "broken_models.py").write_text("import no_such_module")
    (folder / "leaving_models.py").write_text("print('leaving'); raise SystemExit(0)")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    target = f"{Path(saved[1].uri).parents[1]}@1"

    def run(function: str, *words: str) -> Result:
        return CliRunner().invoke(main, ["check-load", function, target, *words])

    fits = run("my_models:same")
    assert (fits.exit_code, fits.output.splitlines()[0]) == (0, "step 1 fits")
    assert run("my_models:on_meta").exit_code == 0
    differs = run("my_models:other")
    assert (differs.exit_code, "model.first.weight" in differs.output) == (1, True)
    assert run("my_models:other", "--no-strict").exit_code == 0
    assert run("my_models:same", "--name", "net").exit_code == 1
    for function, words in {
        "my_models": "",
        "my_models:failing": f"failed at {folder}/my_models.py:{len(lines)}: OSError: no file",
        "my_models:item": 'my_models.py:10: RuntimeError: .*item.*device="cpu"',
        "my_models:sized": "failed: TypeError: .*missing 1 required positional argument: 'size'",
        "my_models:three": "returned a int",
        "my_models:model": "A Linear was given",
        "my_models:sane": "",
        "my_models:number": "",
        "broken_models:same": "",
        "no_such_models:same": "",
        "leaving_models:same": "",
        "my_models:leaving": "",
    }.items():
        refused = run(function)
        assert refused.exit_code == 2, function
        assert re.search(words, " ".join(refused.output.split())), (function, refused.output)
    noisy = run("my_models:noisy", "--json")
    assert json.loads(noisy.stdout)["fits"]
    assert noisy.stderr == "building\n"
