"""Measure what a reader of the house has to take in: `PYTHONPATH=tests python tests/house/figures.py`.

`limits.json` beside this file has what each figure may be at most, and of reasons what it is at least; `test_limits.py`
holds the house to it. `--write` notes figures that became better, and never one that became worse. `--trips` lists the
modules that a warm save and a warm load run through, and the deepest stack of each. `--json` prints the figures alone.

Lines are whole lines of `*.py`. The core is the package without its wings, a room is one of `test_architecture.LAYERS`.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from test_architecture import MODULES, ROOT, is_core, nodes_of, own_imports, top, tree_of

LIMITS = Path(__file__).with_name("limits.json")
KIT = ROOT / "tests" / "kit"
AT_LEAST = {"lines of comments of the core"}
"""Reasons that stand at the line they are for."""

_DOOR = {"", "dcp", "errors", "events", "interchange", "integrations", "ray", "retention", "config"}
"""Modules that users import, besides those of `testing` and the command line."""


class Trip(NamedTuple):
    """What one call runs through on its own thread."""

    modules: list[str]
    num_functions: int
    deepest: list[str]
    """Our functions on the deepest stack, outermost first."""


def figures() -> dict[str, int]:
    """Return each figure of this tree by its name."""
    core, tests = [*filter(is_core, MODULES)], [*(ROOT / "tests").rglob("*.py")]
    rooms = {name: top(name) for name in MODULES if len(tree_of(name).body) > 1}  # a docstring alone is none
    arrows = {(rooms[name], rooms[other]) for name in rooms for other in own_imports(name) if other in rooms}
    save, load = trips()
    return {
        "lines of the core": num_lines(core),
        "lines of the package": num_lines(MODULES),
        "lines of the tests": sum(lines_of(path) for path in tests if KIT not in path.parents),
        "lines of the kit": sum(lines_of(path) for path in tests if KIT in path.parents),
        "classes of the core": sum(isinstance(node, ast.ClassDef) for name in core for node in nodes_of(name)),
        "modules of the core": len(core),
        "functions of at most 3 lines of the core": sum(map(is_short, functions_of(core))),
        "lines of comments of the core": sum(map(num_comments, core)),
        "lines of storage": num_lines(name for name in core if top(name) == "storage"),
        "lines of group and log": num_lines(name for name in core if top(name) in ("group", "log")),
        "rooms": len(set(rooms.values())),
        "arrows between rooms": len({(one, other) for one, other in arrows if one != other}),
        "internal modules that tests import": len(private_doors()),
        "modules of a warm save": len(save.modules),
        "functions of a warm save": save.num_functions,
        "frames of a warm save": len(save.deepest),
        "frames of a warm load": len(load.deepest),
        "modules that open a store": loaded_by("import ckptstore, sys; ckptstore.open_store(sys.argv[1])"),
    }


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def num_lines(names: Iterable[str]) -> int:
    return sum(lines_of(MODULES[name]) for name in names)


def functions_of(names: Iterable[str]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for name in names:
        for node in nodes_of(name):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def is_short(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return (node.end_lineno or node.lineno) - node.lineno < 3


def num_comments(name: str) -> int:
    return sum(line.lstrip().startswith("# ") for line in MODULES[name].read_text().splitlines())


def private_doors() -> set[str]:
    """Return the modules that tests import and no user does."""
    found = set()
    for path in {*(ROOT / "tests").rglob("*.py")} - {*KIT.rglob("*.py")}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name.removeprefix("ckptstore.") in MODULES else node.module for name in inner}
    ours = {name.removeprefix("ckptstore").removeprefix(".") for name in found if name.split(".")[0] == "ckptstore"}
    return {name for name in ours - _DOOR if not name.startswith(("testing", "tools.cli"))}


def loaded_by(code: str) -> int:
    """Return how many modules of ours a new process has loaded after `code`, which gets an empty directory."""
    code += "\nimport sys; print(sum(name.split('.')[0] == 'ckptstore' for name in sys.modules))"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, folder]
        return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def trips() -> tuple[Trip, Trip]:
    """Return those of the second save of a small training state, and of its second load."""
    import torch

    import ckptstore

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "epoch": 1}
    with tempfile.TemporaryDirectory() as folder, ckptstore.open_store(folder) as store:
        store.resume(state)
        store.save(1, state)
        save = least(lambda step: store.save(step, state))
        store.load(state)
        return save, least(lambda _: store.load(state))


def least(call: Callable[[int], object]) -> Trip:
    """Return the shortest trip of three: now and then a sign of life is due."""
    return min((trip(partial(call, number)) for number in (2, 3, 4)), key=lambda one: one.num_functions)


def trip(call: Callable[[], object]) -> Trip:
    """Make a call, and return what it ran through."""
    functions = dict[CodeType, str]()
    deepest: list[FrameType] = []

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal deepest
        if event == "call" and module_of(frame):
            functions[frame.f_code] = module_of(frame)
            stack = [at for at in stack_of(frame) if module_of(at)]
            deepest = max(deepest, stack, key=len)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    shown = [f"{module_of(frame)}:{frame.f_code.co_qualname}" for frame in reversed(deepest)]
    return Trip(sorted(set(functions.values())), len(functions), shown)


def stack_of(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> str:
    """Return the name of the module of a frame of ours, "" for others."""
    name = str(frame.f_globals.get("__name__", ""))
    return name if name.startswith("ckptstore.") else ""


def worse(found: dict[str, int], limits: dict[str, int]) -> list[str]:
    """Return a line for each figure that is worse than it may be."""
    return [
        f"{name}: {value}, and the limit is {limits[name]}"
        for name, value in found.items()
        if (value < limits[name] if name in AT_LEAST else value > limits[name])
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--trips", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found, limits = figures(), json.loads(LIMITS.read_text())
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:42}{value:8}{limits.get(name, value):8}")
    if given.trips:
        for one in trips():
            print("\n".join(["", *one.modules, "", *one.deepest]))
    if given.write:
        best = {
            name: (max if name in AT_LEAST else min)(value, limits.get(name, value)) for name, value in found.items()
        }
        LIMITS.write_text(json.dumps(best, indent=2) + "\n")


if __name__ == "__main__":
    main()
