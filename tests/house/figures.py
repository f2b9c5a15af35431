"""Prints what a reader of the house has to take in: `PYTHONPATH=tests python tests/house/figures.py [--trip]`.

Lines are whole lines of `*.py`. The core is the package without its wings. `--trip` lists the modules that a steady
save runs through, and the frames above its write.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from test_architecture import (
    DIGESTS,
    MODULES,
    RELATIVE_STARTS,
    ROOT,
    docstrings_of,
    is_core,
    own_imports,
    tree_of,
)


def num_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def nodes_of(names: Iterable[str]) -> Iterator[ast.AST]:
    for name in names:
        yield from ast.walk(tree_of(name))


def is_check_of_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) and any(
        isinstance(item, ast.Compare) and isinstance(item.ops[0], ast.IsNot) for item in ast.walk(node.test)
    )


def room(name: str) -> str:
    return name.split(".")[0]


def arrows(names: Iterable[str]) -> set[tuple[str, str]]:
    """Which rooms of the core import which others."""
    found = {(room(name), room(other)) for name in names for other in own_imports(name)}
    return {(one, other) for one, other in found if one != other}


def loaded_by(code: str) -> int:
    """How many modules of ours a new process has loaded after `code`."""
    code += "\nimport sys; print(sum(name.split('.')[0] == 'ckptstore' for name in sys.modules))"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code, folder], cwd=ROOT, capture_output=True, text=True, check=True
        )
    return int(done.stdout)


def trip() -> tuple[list[str], list[str]]:
    """The modules that a steady save of ten small values runs through, and the frames of ours above its first write."""
    import ckptstore
    from ckptstore.storage.disk.local import LocalStorage

    modules: set[str] = set()
    stacks: list[list[str]] = []

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event != "call" or not name.startswith("ckptstore."):
            return
        modules.add(name)
        if frame.f_code is LocalStorage.write.__code__ and not stacks:
            above, at = [], frame.f_back
            while at is not None:
                if at.f_globals.get("__name__", "").startswith("ckptstore."):
                    above.append(f"{at.f_globals['__name__']}:{at.f_code.co_qualname}")
                at = at.f_back
            stacks.append(above)

    state = {f"value-{number}": number for number in range(10)}
    with tempfile.TemporaryDirectory() as folder, ckptstore.open_store(folder) as store:
        store.save(1, state)
        sys.setprofile(note)
        try:
            store.save(2, state)
        finally:
            sys.setprofile(None)
    return sorted(modules), stacks[0]


def main() -> None:
    core = [*filter(is_core, MODULES)]
    docs = [text for name in MODULES for text in docstrings_of(name)]
    relative = sum(text.split()[0].rstrip(",") in RELATIVE_STARTS for text in docs)
    modules, above = trip()
    rows = {
        "lines of the package": num_lines(MODULES.values()),
        "lines of the core": num_lines(map(MODULES.__getitem__, core)),
        "lines of the tests": num_lines((ROOT / "tests").rglob("*.py")),
        "classes of the core": sum(isinstance(node, ast.ClassDef) for node in nodes_of(core)),
        "modules that a steady save runs through": len(modules),
        "frames above its write": len(above),
        "modules loaded by open_store(path)": loaded_by("import sys, ckptstore; ckptstore.open_store(sys.argv[1])"),
        "assert ... is not ... in the core": sum(map(is_check_of_none, nodes_of(core))),
        "rooms of the core": len(set(map(room, core))),
        "arrows between them": len(arrows(core)),
        "files that name a digest": sum(bool(DIGESTS.search(path.read_text())) for path in MODULES.values()),
        "docstrings": len(docs),
        "of them with a relative start": f"{relative} ({relative / len(docs):.1%})",
    }
    for name, value in rows.items():
        print(f"{name:45}{value}")
    if "--trip" in sys.argv:
        print("\n".join(["", *modules, "", *above]))


if __name__ == "__main__":
    main()
