"""Who may import whom, what an import may load, how long a file may be: the shape of the package, held by a test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from ckptstore.runtime.extras import EXTRAS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ckptstore"

LAYERS: list[set[str]] = [
    {"errors"},
    {"runtime", "tools.pages"},
    {"events", "extended"},
    {"format"},
    {"config", "retention"},
    {"boundary"},
    {"storage"},
    {"transfer", "log", "group", "node_cache", "program"},
    {"job", "state"},
    {"stock"},
    {"upkeep"},
    {"loading"},
    {"checkpoint"},
    {"catalogue"},
    {"saving"},
    {"store"},
    {"opening"},
    {""},
    {"extensions.history", "extensions.peers"},
    {"extensions.exchange", "extensions.tier"},
    {"extensions.publication", "tools.watching"},
    {"extensions", "tools.run"},
    {"integrations"},
    {"ray"},
    {"testing"},
    {"tools.bench", "tools.demo", "tools.doctor"},
    {"tools.report"},
    {"tools.cli"},
    {"tools", "__main__"},
]
"""The rooms, lowest first. A room is a folder of the package, of `extensions` or of `tools`, or a module at its top; ""
is `ckptstore` itself. A module imports only from rooms on lower lines, and from its own."""

WINGS = {"__main__", "extensions", "integrations", "ray", "testing", "tools"}
"""What uses the library from outside. The core, all other rooms, imports nothing of them; `extended.pyi` names what it
takes of extensions and integrations where they are installed."""

USED_BY_EXTENSIONS = {"tier": {"peers"}, "publication": {"exchange"}}
"""The other extensions that one uses: connections between nodes, and the one reader and writer of safetensors."""

INNER_ROOMS = {
    "state": ["tensors", "index", "live", "write", "read"],
    "storage": ["disk", "cloud", "fsspec"],
}
"""The same between the folders of a room."""

BOTTOM = {"storage": "storage.base", "group": "group.meeting"}
"""In these packages one module is the contract: it imports no sibling."""

TOP = {"storage": "storage.open"}
"""In these packages one module chooses among the others: none of them imports it."""

IMPORTERS: dict[str, set[str]] = {
    "accelerate": {"integrations.axolotl"},
    "awscrt": {"format.digest", "testing.s3"},
    "axolotl": {"integrations.axolotl"},
    "azure": {"storage.cloud.azure", "storage.cloud.chains"},
    "botocore": {"storage.cloud.aws", "storage.cloud.aws_settings", "storage.cloud.chains"},
    "certifi": {"storage.cloud.routes"},
    "click": {"tools.cli"},
    "cryptography": {"testing.s3.certificates"},
    "fastsafetensors": {"tools.bench"},
    "filelock": {"runtime.file_locks"},
    "fsspec": {"tools.bench", "storage.fsspec"},
    "google": {"storage.cloud.chains", "storage.cloud.gcs"},
    "jax": {"tools.bench"},
    "matplotlib": {"tools.demo"},
    "ml_dtypes": {"tools.bench"},
    "mlflow": {"integrations.mlflow"},
    "lightning": {"tools.bench", "integrations.lightning"},
    "numpy": {
        "extensions.history.thinned_index",
        "extensions.publication",
        "tools.bench",
        "tools.demo",
        "state",
        "testing.oracle",
    },
    "opentelemetry": {"integrations.otel"},
    "orbax": {"tools.bench"},
    "pandas": {"extensions.history.past_saves"},
    "psutil": {"tools.bench"},
    "pydantic": {"integrations.axolotl"},
    "pyarrow": {"tools.bench", "integrations.ray"},
    "pytorch_lightning": {"integrations.lightning"},
    "ray": {"tools.bench", "tools.demo", "integrations.ray"},
    "requests": {"storage.cloud.azure", "storage.cloud.gcs", "storage.cloud.wire.adapter"},
    "rich": {"tools.cli.terminal"},
    "s3torchconnector": {"tools.bench"},
    "safetensors": {"tools.bench"},
    "sklearn": {"tools.demo"},
    "tenacity": {"storage.retry"},
    "torch": {
        "tools.bench",
        "tools.demo",
        "group",
        "integrations",
        "extensions.exchange",
        "extensions.publication.from_store",
        "extensions.publication.weights",
        "stock",
        "runtime.torch_private",
        "state",
        "testing",
    },
    "torchtitan": {"integrations.torchtitan"},
    "torch_checkpointing": {"tools.bench", "integrations.torch_checkpointing"},
    "transformers": {"tools.bench", "integrations.transformers"},
    "uvloop": {"testing.s3_server"},
    "waitress": {"tools.report.serving"},
    "wandb": {"integrations.wandb"},
    "xxhash": {"format.digest"},
    "zstandard": {"extensions.publication.codec"},
}
"""Which modules, or packages with all that is in them, may import a third party. Nothing else may be imported."""

REQUIRED = {"awscrt", "click", "filelock", "fsspec", "rich", "tenacity"}
"""What every installation has."""
BEHIND_OTHERS = {
    "psutil, each in a peer that says whether it can run": {
        *("fastsafetensors", "jax", "ml_dtypes", "orbax", "s3torchconnector", "safetensors"),
    },
    "a search for it first": {"certifi", "uvloop"},
    "errors that name the package, for no extra brings it": {"cryptography", "pandas"},
    "Axolotl, which loads the plugin": {"accelerate", "axolotl", "pydantic"},
}
"""Optional packages that are reached only where another one of the same extra, or they themselves, were found."""

MAX_FILE_LINES = 800
"""Far above most files: a split that only a limit forces makes two files of one thing."""
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8
WIDE_SIGNATURES = {"open_store", "save", "save_async", "save_directory", "directory_of", "load", "resume"}
WIDE_SIGNATURES |= {"import_state", "export", "merge", "report", "integrations.lightning.callback.__init__"}
"""The public surface, where each keyword has a default and a line in the reference."""

READS_ENVIRONMENT = {"config", "group.find", "tools.run.nodes", "storage", "testing", "tools.demo"}
READS_ENVIRONMENT |= {
    "integrations",
    "tools.run.folders.own_directory",
    "tools.run.trainer",
    "tools.cli.commands.publication",
}

DIGESTS = re.compile("crc32c|xxh3", re.IGNORECASE)
NAMES_OF_DIGESTS = {"format.digest", "extensions.publication.wire", "storage.cloud.bodies", "testing.s3.checksums"}
"""The modules that name an algorithm of digests: the one that knows them all, and the checksums of clouds and of the
server that stands in for one."""

HEAVY = {"torch", "ray", "numpy", "fsspec", "tenacity", "awscrt", "click", "rich", "waitress", "xxhash"}
HEAVY |= {"accelerate", "axolotl", "lightning", "mlflow", "opentelemetry", "pydantic", "torch_checkpointing"}
HEAVY |= {"torchtitan", "transformers", "wandb", "zstandard"}


def module_name(path: Path) -> str:
    """The name below `ckptstore`: "storage.open", "cli", "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree_of(name: str) -> ast.Module:
    """Return the syntax of a module."""
    return ast.parse(MODULES[name].read_text())


@cache
def nodes_of(name: str) -> tuple[ast.AST, ...]:
    """Return all nodes of the syntax of a module."""
    return tuple(ast.walk(tree_of(name)))


def of_each(names: Iterable[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Make of a test of one module a test of all of them, which shows each fault: thousands of tests take long."""

    names = list(names)  # a generator would leave the second run of a test nothing to look at

    def decorate(test: Callable[[str], None]) -> Callable[[], None]:
        def test_all() -> None:
            faults = []
            for name in names:
                try:
                    test(name)
                except AssertionError as error:
                    faults.append(str(error))
            assert not faults, "\n".join(faults)

        test_all.__name__, test_all.__doc__ = test.__name__, test.__doc__
        return test_all

    return decorate


def test_each_run_of_a_test_sees_all_modules() -> None:
    seen: list[str] = []
    test = of_each(name for name in ("one", "two"))(seen.append)
    test()
    test()
    assert seen == ["one", "two"] * 2


def imports_of(name: str) -> Iterator[str]:
    """Every module that a module imports, also inside functions and for type checkers, as an absolute name."""
    for node in nodes_of(name):
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
    """The room of a module; `dcp` and `interchange` are names of the surface, as those of `ckptstore` itself."""
    first, *rest = name.removeprefix("dcp").removeprefix("interchange").split(".")
    return f"{first}.{rest[0]}" if rest and first in ("extensions", "tools") else first


def level(name: str) -> int:
    for index, members in enumerate(LAYERS):
        if top(name) in members:
            return index
    raise AssertionError(f"ckptstore.{name} has no place in LAYERS: decide which room it belongs to")


def inner_level(name: str) -> int | None:
    """The line of a module in INNER_ROOMS, None when it is in none of them."""
    room, rest = top(name), name.removeprefix(top(name)).removeprefix(".")
    order = INNER_ROOMS.get(room, [])
    return order.index(top(rest)) if top(rest) in order else None


def is_core(name: str) -> bool:
    return name.split(".")[0] not in WINGS


def is_inside(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


@of_each(MODULES)
def test_a_module_imports_only_from_lower_rooms(name: str) -> None:
    for other in own_imports(name):
        if name == "":
            continue
        if top(other) != top(name):
            assert level(other) < level(name), f"ckptstore.{name} imports ckptstore.{other}, which is not below it"
        elif name != other:
            assert name != BOTTOM.get(top(name)), f"ckptstore.{name} is a contract, and imports ckptstore.{other}"
            assert other != TOP.get(top(name)), f"ckptstore.{name} imports ckptstore.{other}, which chooses it"
            mine, others = inner_level(name), inner_level(other)
            assert None in (mine, others) or others <= mine, f"ckptstore.{name} imports {other}, which is not below it"


@of_each(name for name in MODULES if name and is_core(name))
def test_the_core_imports_no_wing(name: str) -> None:
    """Not even inside a function or by name: it is whole without them. `ckptstore.ray` is a name of the surface, ""."""
    assert {other for other in own_imports(name) if other.split(".")[0] in WINGS} == set()
    for node in nodes_of(name):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            wings = {f"ckptstore.{wing}" for wing in WINGS}
            assert not any(node.value == wing or node.value.startswith(f"{wing}.") for wing in wings), node.lineno


@of_each(name for name in MODULES if name.startswith("extensions."))
def test_an_extension_uses_no_other(name: str) -> None:
    own = name.split(".")[1]
    others = {other.split(".")[1] for other in own_imports(name) if other.startswith("extensions.")} - {own}
    assert others <= USED_BY_EXTENSIONS.get(own, set()), f"ckptstore.{name} imports {others}"


def test_every_module_has_a_room_and_every_room_is_there() -> None:
    assert {level(name) for name in MODULES} == set(range(len(LAYERS)))
    assert set().union(*LAYERS) == {top(name) for name in MODULES}
    for room, inner in INNER_ROOMS.items():
        assert set(inner) == {path.parent.name for path in (PACKAGE / room).glob("*/__init__.py")}


def test_there_is_no_cycle_even_through_imports_inside_functions() -> None:
    graph = {name: {other for other in own_imports(name) if other in MODULES} - {name} for name in MODULES}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"import cycle: {' -> '.join(error.args[1])}") from None


@of_each(MODULES)
def test_a_third_party_has_one_importer(name: str) -> None:
    third_parties = {item.split(".")[0] for item in imports_of(name)} - sys.stdlib_module_names - {"ckptstore"}
    for third_party in third_parties:
        if name.startswith("testing.") and third_party in {"pytest", "hypothesis"}:
            continue
        assert is_inside(name, IMPORTERS.get(third_party, set())), f"ckptstore.{name} imports {third_party}"


def test_exclusive_locks_are_those_of_filelock() -> None:
    assert [name for name, path in MODULES.items() if re.search(r"LOCK_EX|\blockf\(", path.read_text())] == []
    assert [name for name, path in MODULES.items() if "LOCK_SH" in path.read_text()] == ["runtime.file_locks"]


def test_few_modules_name_an_algorithm_of_digests() -> None:
    assert {name for name, path in MODULES.items() if DIGESTS.search(path.read_text())} == NAMES_OF_DIGESTS


def test_an_optional_package_has_an_extra_that_errors_name() -> None:
    """The boundary of the public surface finds it there, and says what to install."""
    named = {package.partition(".")[0] for packages in EXTRAS.values() for package in packages}
    named -= set(EXTRAS["fsspec-clouds"])  # fsspec imports them
    named |= {"pytorch_lightning"}  # as good as lightning
    assert set(IMPORTERS) == REQUIRED | named | set().union(*BEHIND_OTHERS.values())


def test_the_test_sees_imports_inside_functions() -> None:
    assert "awscrt" in set(imports_of("format.digest"))
    assert "errors" in own_imports("format.layout")


@of_each(MODULES)
def test_files_and_functions_fit(name: str) -> None:
    file_lines = len(MODULES[name].read_text().splitlines())
    assert file_lines <= MAX_FILE_LINES, f"{MODULES[name]} is too long"
    for node in nodes_of(name):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert num_lines <= MAX_FUNCTION_LINES, f"{name}.{node.name} has {num_lines} lines"
            given = [item.arg for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            num_parameters = len([item for item in given if item not in ("self", "cls")])
            is_public = bool({node.name, f"{name}.{node.name}"} & WIDE_SIGNATURES)
            wide = is_public or any(_is_command(item) for item in node.decorator_list)
            assert wide or num_parameters <= MAX_PARAMETERS, f"{name}.{node.name} has {num_parameters} parameters"


def _is_command(decorator: ast.expr) -> bool:
    """Whether a decorator makes a function a command, whose parameters are its options."""
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("command")


@of_each(MODULES)
def test_every_module_says_what_it_is_for(name: str) -> None:
    if MODULES[name].read_text().strip():
        assert ast.get_docstring(tree_of(name)), f"{MODULES[name]} has no docstring"


@of_each(MODULES)
def test_the_environment_is_read_in_one_place(name: str) -> None:
    """Our own variables in `config`; those of launchers and of cloud SDKs where they are meant for."""
    if is_inside(name, READS_ENVIRONMENT):
        return
    for node in nodes_of(name):
        is_read = isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
        assert not is_read, f"ckptstore.{name} reads the environment"


RELATIVE_STARTS = {"What", "Whether", "Of", "Where", "Who", "Which", "How", "When", "That"}
MOST_RELATIVE_STARTS = 0
"""Docstrings that begin with one of them, in the whole package. It only goes down: a docstring begins with a verb, or
with a noun where it describes a field."""

INVENTED_WORDS = {"told", "heard", "hear", "asked", "given", "here", "there", "beside", "kept", "anew"}
MOST_INVENTED_NAMES = 328
"""Functions, classes, arguments, variables and attributes with one of them in their names. It only goes down: a reply,
what was received, options, what exists and what is next to something have names of their own."""


def docstrings_of(name: str) -> Iterator[str]:
    """Yield the docstrings of a module, those below fields and constants included."""
    for node in nodes_of(name):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def defined_names_of(name: str) -> Iterator[str]:
    """Yield each name that a module defines or assigns, each time that it does."""
    for node in nodes_of(name):
        match node:
            case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found) | ast.ClassDef(name=found):
                yield found
            case ast.arg(arg=found) | ast.Name(id=found, ctx=ast.Store()) | ast.Attribute(attr=found, ctx=ast.Store()):
                yield found


def test_docstrings_begin_with_a_verb() -> None:
    found = [(name, text) for name in MODULES for text in docstrings_of(name) if text.split()[0] in RELATIVE_STARTS]
    shown = "\n".join(f"{name}: {text.splitlines()[0]}" for name, text in found[:20])
    assert len(found) <= MOST_RELATIVE_STARTS, f"{len(found)} docstrings begin with a relative clause, such as\n{shown}"


def test_names_are_plain_words() -> None:
    found = [
        f"ckptstore.{module}: {name}"
        for module in MODULES
        for name in defined_names_of(module)
        if INVENTED_WORDS & set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))
    ]
    shown = "\n".join(found[:20])
    assert len(found) <= MOST_INVENTED_NAMES, f"{len(found)} names have an invented word, such as\n{shown}"


@cache
def private_names_of(name: str) -> set[str]:
    """What the classes of a module keep to themselves: methods, class attributes, and what is set on `self`."""
    found = set()
    for node in nodes_of(name):
        if isinstance(node, ast.ClassDef):
            found |= {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            found |= {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
    return {item for item in found if item.startswith("_") and not item.startswith("__")}


def _is_own(value: ast.expr) -> bool:
    return ast.unparse(value) in ("self", "cls", "super()")


FOREIGN_NAMES = {"_finished", "_load_from_state_dict", "_replace", "_reset", "_threads", "_value"}
"""Those of classes that are not ours: of torch's modules and loaders, a named tuple, a thread pool and a semaphore."""


@of_each(MODULES)
def test_nobody_reaches_into_a_class_of_another_module(name: str) -> None:
    """A class that is needed elsewhere has a public method for that, or its module has a function."""
    others = set().union(*map(private_names_of, MODULES)) - private_names_of(name) - FOREIGN_NAMES
    for node in nodes_of(name):
        if isinstance(node, ast.Attribute) and node.attr in others:
            assert _is_own(node.value), f"line {node.lineno} of ckptstore.{name} reaches for {ast.unparse(node)}"


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
        "import ckptstore.dcp, ckptstore.state",
    ],
)
def test_an_import_loads_no_third_party(code: str) -> None:
    assert loaded_by(code) & HEAVY == set()


def test_the_command_line_starts_without_torch() -> None:
    assert loaded_by("import ckptstore.tools.cli") & (HEAVY - {"click"}) == set()


def test_a_store_with_a_fast_tier_is_opened_and_resumed_without_torch(tmp_path: Path) -> None:
    code = f"""import ckptstore
with ckptstore.open_store({str(tmp_path / "store")!r}) as store:
    store.save_directory(1, None)
with ckptstore.open_store({str(tmp_path / "store")!r}, fast=ckptstore.FastTier({str(tmp_path / "fast")!r})) as store:
    assert store.latest(fast=True).step == store.resume().step == 1"""
    assert "torch" not in loaded_by(code)


def test_a_directory_is_saved_without_torch(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    code = f"""import ckptstore
with ckptstore.open_store({str(tmp_path / "store")!r}) as store:
    store.save_directory(1, {str(tmp_path / "source")!r})"""
    assert "torch" not in loaded_by(code)


def test_a_save_and_a_load_of_plain_tensors_import_nothing_that_only_others_use(tmp_path: Path) -> None:
    """Distributed tensors, and the locks of the node cache."""
    code = f"""import sys, torch, ckptstore
state = {{"tensor": torch.ones(3), "step": 1, "model": torch.nn.Linear(2, 3)}}
before = set(sys.modules)
with ckptstore.open_store({str(tmp_path)!r}) as store:
    store.resume()
    store.save(1, state)
    store.load(state)
print(*sorted(name for name in set(sys.modules) - before if name.startswith(("torch.distributed", "filelock"))))"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    assert list(tmp_path.rglob(".metadata")), "and torch's DCP can read it"


def test_the_import_takes_under_15_ms() -> None:
    """Of the processor's time, whatever else the machine does; the best of five."""
    code = "import time; before = time.process_time(); import ckptstore; print(time.process_time() - before)"

    def seconds() -> float:
        command = [sys.executable, "-c", code]
        return float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)

    assert min(seconds() for _ in range(5)) < 0.015
