"""Who may import whom, what an import may load, how long a file may be: the shape of the package, held by a test."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ckptstore"

LAYERS: list[tuple[str, set[str]]] = [
    ("vocabulary", {"errors", "fork"}),
    ("values", {"config", "events", "layout", "sources", "encoding", "digest", "retention", "executor", "lazy"}),
    ("joined values", {"manifest", "plan", "naming", "directories"}),
    ("records and requests", {"records", "request"}),
    ("ports", {"retry", "storage", "torch_private", "staging"}),
    ("engines", {"transfer", "log", "node_cache", "group", "identity", "leases", "retried"}),
    ("what a rank brings", {"shard"}),
    ("another process", {"uploader"}),
    ("state", {"state"}),
    ("the job", {"job"}),
    ("deletion", {"prune", "retain"}),
    ("files", {"load"}),
    ("steps of a story", {"commit", "doctor", "garbage", "verify", "copying", "resume", "directory_shard"}),
    ("the index of a state", {"index_read"}),
    ("stories", {"save", "load_state", "dcp_store"}),
    ("one checkpoint", {"checkpoint"}),
    ("saves in the background", {"background"}),
    ("saves of a state", {"save_state"}),
    ("the store", {"store"}),
    ("opening it", {"opening"}),
    ("formats of other tools", {"exporting", "importing"}),
    ("surface", {""}),
    ("edges", {"integrations", "terminal"}),
    ("for tests", {"testing"}),
    ("benchmarks", {"bench"}),
    ("programs", {"demo"}),
    ("command line", {"cli"}),
]
"""Lowest first. A name stands for a module or a whole package; "" is `ckptstore` itself. A module imports only from
lower lines, and a package also from itself."""

BOTTOM = {"storage": "storage.base", "group": "group.base"}
"""In these packages one module is the contract: it imports no sibling."""

TOP = {"storage": "storage.open"}
"""In these packages one module chooses among the others: none of them imports it."""

IMPORTERS: dict[str, set[str]] = {
    "awscrt": {"digest", "testing.s3"},
    "azure": {"storage.azure", "storage.chains"},
    "botocore": {"storage.aws", "storage.chains"},
    "click": {"cli"},
    "fsspec": {"storage.remote"},
    "google": {"storage.chains", "storage.gcs"},
    "jax": {"bench"},
    "matplotlib": {"demo"},
    "ml_dtypes": {"bench"},
    "lightning": {"bench", "integrations.lightning"},
    "numpy": {"bench", "demo", "integrations", "staging", "state", "testing"},
    "obstore": {"storage.fast"},
    "orbax": {"bench"},
    "psutil": {"bench"},
    "pyarrow": {"bench", "integrations.ray"},
    "pytorch_lightning": {"integrations.lightning"},
    "ray": {"bench", "demo", "integrations.ray"},
    "requests": {"storage.azure", "storage.gcs"},
    "rich": {"terminal"},
    "s3torchconnector": {"bench"},
    "safetensors": {"bench"},
    "sklearn": {"demo"},
    "tenacity": {"retry"},
    "torch": {"bench", "demo", "group", "integrations", "state", "testing", "torch_private"},
    "torch_checkpointing": {"bench"},
    "transformers": {"integrations.transformers"},
    "uvloop": {"testing.s3_server"},
    "xxhash": {"state"},
}
"""Which modules, or packages with all that is in them, may import a third party. Nothing else may be imported."""

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8
WIDE_SIGNATURES = {"open_store", "save", "save_async", "save_directory", "load", "resume"}
"""The public surface, where each keyword has a default and a line in the reference."""

READS_ENVIRONMENT = {"config", "group.find", "storage", "testing", "demo", "integrations"}

HEAVY = {"torch", "ray", "numpy", "fsspec", "obstore", "tenacity", "awscrt", "click", "rich", "xxhash"}
HEAVY |= {"lightning", "transformers"}


def module_name(path: Path) -> str:
    """The name below `ckptstore`: "storage.local", "cli", "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports_of(name: str) -> Iterator[str]:
    """Every module that a module imports, also inside functions and for type checkers, as an absolute name."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import on line {node.lineno}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner.removeprefix("ckptstore.") in MODULES else str(node.module)


def own_imports(name: str) -> set[str]:
    """The imports from this package, below `ckptstore`."""
    names = {item for item in imports_of(name) if item.split(".")[0] == "ckptstore"}
    return {item.removeprefix("ckptstore").removeprefix(".") for item in names}


def top(name: str) -> str:
    return name.split(".")[0]


def level(name: str) -> int:
    for index, (_, members) in enumerate(LAYERS):
        if top(name) in members:
            return index
    raise AssertionError(f"ckptstore.{name} has no place in LAYERS: decide which layer it belongs to")


def is_inside(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_lower_layers(name: str) -> None:
    for other in own_imports(name):
        if name == "":
            continue
        if top(other) != top(name):
            assert level(other) < level(name), f"ckptstore.{name} imports ckptstore.{other}, which is not below it"
        elif name != other:
            assert name != BOTTOM.get(top(name)), f"ckptstore.{name} is a contract, and imports ckptstore.{other}"
            assert other != TOP.get(top(name)), f"ckptstore.{name} imports ckptstore.{other}, which chooses it"


def test_every_module_has_a_layer() -> None:
    for name in MODULES:
        level(name)


def test_there_is_no_cycle_even_through_imports_inside_functions() -> None:
    graph = {name: {other for other in own_imports(name) if other in MODULES} - {name} for name in MODULES}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"import cycle: {' -> '.join(error.args[1])}") from None


@pytest.mark.parametrize("name", MODULES)
def test_a_third_party_has_one_importer(name: str) -> None:
    third_parties = {item.split(".")[0] for item in imports_of(name)} - sys.stdlib_module_names - {"ckptstore"}
    for third_party in third_parties:
        if name.startswith("testing.") and third_party in {"pytest", "hypothesis"}:
            continue
        assert is_inside(name, IMPORTERS.get(third_party, set())), f"ckptstore.{name} imports {third_party}"


def test_the_test_sees_imports_inside_functions() -> None:
    assert "awscrt" in set(imports_of("digest"))
    assert "errors" in own_imports("layout")


@pytest.mark.parametrize("name", MODULES)
def test_files_and_functions_fit(name: str) -> None:
    assert len(MODULES[name].read_text().splitlines()) <= MAX_FILE_LINES, f"{MODULES[name]} is too long"
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert num_lines <= MAX_FUNCTION_LINES, f"{name}.{node.name} has {num_lines} lines"
            given = [item.arg for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            num_parameters = len([item for item in given if item not in ("self", "cls")])
            wide = node.name in WIDE_SIGNATURES or any(_is_command(item) for item in node.decorator_list)
            assert wide or num_parameters <= MAX_PARAMETERS, f"{name}.{node.name} has {num_parameters} parameters"


def _is_command(decorator: ast.expr) -> bool:
    """Whether a decorator makes a function a command, whose parameters are its options."""
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("command")


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for(name: str) -> None:
    if MODULES[name].read_text().strip():
        assert ast.get_docstring(TREES[name]), f"{MODULES[name]} has no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_the_environment_is_read_in_one_place(name: str) -> None:
    """Our own variables in `config`; those of launchers and of cloud SDKs where they are meant for."""
    if is_inside(name, READS_ENVIRONMENT):
        return
    for node in ast.walk(TREES[name]):
        assert ast.unparse(node) not in ("os.environ", "os.getenv"), f"ckptstore.{name} reads the environment"


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `code`."""
    code = f"{code}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import ckptstore",
        "from ckptstore import *",
        "import ckptstore.testing",
    ],
)
def test_an_import_loads_no_third_party(code: str) -> None:
    assert loaded_by(code) & HEAVY == set()


def test_the_command_line_starts_without_torch() -> None:
    assert loaded_by("import ckptstore.cli") & (HEAVY - {"click"}) == set()


def test_the_import_takes_under_50_ms() -> None:
    """Of the processor's time, whatever else the machine does; the best of five."""
    code = "import time; before = time.process_time(); import ckptstore; print(time.process_time() - before)"

    def seconds() -> float:
        command = [sys.executable, "-c", code]
        return float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)

    assert min(seconds() for _ in range(5)) < 0.050
