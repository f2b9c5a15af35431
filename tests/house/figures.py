"""Prints what a reader of the house has to take in: `python tests/house/figures.py [--trip]`.

Lines are whole lines of `*.py`. The core is the package without its wings. `--trip` lists the modules that a steady
save runs through, and the frames above its write.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ckptstore"
WINGS = ("integrations", "tools", "testing")
WINGS_BEFORE = (*WINGS, "ray.py", "bench", "cli", "report", "watching", "agent", "folders", "demo", "planning", "pages")
DIGESTS = re.compile(r"crc32c|xxh3", re.IGNORECASE)
RELATIVE = {"What", "Whether", "Of", "Where", "Who", "Which", "How", "When", "That"}


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def is_core(path: Path) -> bool:
    return path.relative_to(PACKAGE).parts[0] not in WINGS_BEFORE


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def nodes_of(paths: list[Path]) -> Iterator[ast.AST]:
    for path in paths:
        yield from ast.walk(ast.parse(path.read_text()))


def docstrings_of(paths: list[Path]) -> Iterator[str]:
    """All docstrings, and the texts below fields."""
    for node in nodes_of(paths):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                yield item.value.value


def is_check_of_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) and any(
        isinstance(item, ast.Compare) and isinstance(item.ops[0], ast.IsNot) for item in ast.walk(node.test)
    )


def room(name: str) -> str:
    return name.split(".")[1] if name.count(".") else ""


def arrows(paths: list[Path]) -> set[tuple[str, str]]:
    """Which rooms of the core import which others."""
    found = set()
    for path in paths:
        mine = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {(mine, room(name)) for name in names if name.startswith("ckptstore.")}
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
    package, tests = files_of(PACKAGE), files_of(ROOT / "tests")
    core = [path for path in package if is_core(path)]
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in core}
    classes = sum(isinstance(node, ast.ClassDef) for node in nodes_of(core))
    docs = list(docstrings_of(package))
    relative = sum(bool(text.split()) and text.split()[0].rstrip(",") in RELATIVE for text in docs)
    modules, above = trip()
    rows = {
        "lines of the package": num_lines(package),
        "lines of the core": num_lines(core),
        "lines of the tests": num_lines(tests),
        "classes of the core": classes,
        "modules that a steady save runs through": len(modules),
        "frames above its write": len(above),
        "modules loaded by open_store(path)": loaded_by("import sys, ckptstore; ckptstore.open_store(sys.argv[1])"),
        "assert ... is not ... in the core": sum(map(is_check_of_none, nodes_of(core))),
        "rooms of the core": len(rooms),
        "arrows between them": len(arrows(core)),
        "files that name a digest": sum(bool(DIGESTS.search(path.read_text())) for path in package),
        "docstrings": len(docs),
        "of them with a relative start": f"{relative} ({relative / len(docs):.1%})",
    }
    for name, value in rows.items():
        print(f"{name:45}{value}")
    if "--trip" in sys.argv:
        print("\n".join(["", *modules, "", *above]))


if __name__ == "__main__":
    main()
