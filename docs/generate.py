"""Writes the parts of pages that follow from the code, between `<!-- generated: NAME -->` and `<!-- end -->`.

Those of `KEPT` stand in the pages: `make docs` writes them, and a test fails when a page is not what it would write.
The others are made when the site is built, which calls `on_page_markdown`; the pages say where else they can be read.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click
import yaml

import ckptstore
from ckptstore import config, events
from ckptstore.errors import CkptstoreError, all_errors
from ckptstore.integrations import mlflow, trackers, wandb
from ckptstore.runtime import extras
from ckptstore.tools.cli import COMMANDS, main
from ckptstore.tools.report import document
from ckptstore.tools.run import notices
from ckptstore.tools.run.folders.shape import Shape, known_shapes

DOCS = Path(__file__).parent
SCHEMA = json.loads((DOCS / "reference/cli-schema.json").read_text())
CONFIGS = (config.StoreConfig, config.TransferConfig, config.RetryConfig, config.CacheConfig, config.PeerConfig)
SHOWN_DEFAULTS = {"num_threads": "2 per core, at most 16", "cache_dir": "`ckptstore-<uid>` in the temporary directory"}


def field_docs(cls: type) -> dict[str, str]:
    """The text below each field of a dataclass."""
    (tree,) = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
            found[node.target.id] = " ".join(str(following.value.value).split())
    return found


def table(headers: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines)


def config_tables() -> str:
    """Every field of every configuration class."""
    parts = []
    for cls in CONFIGS:
        docs = field_docs(cls)
        rows = []
        for item in dataclasses.fields(cls):
            if item.name in docs:
                default = SHOWN_DEFAULTS.get(item.name) or f"`{item.default}`"
                rows.append([f"`{item.name}`", f"`CKPTSTORE_{item.name.upper()}`", default, docs[item.name]])
        fields = table(["field", "environment", "default", "meaning"], rows)
        parts.append(f"## {cls.__name__}\n\n{cls.__doc__}\n\n{fields}")
    return "\n\n".join(parts)


def error_table() -> str:
    """Every class with its codes."""
    rows = [
        [f"`{cls.code}`", str(cls.exit_code), f"`{cls.__name__}`", (cls.__doc__ or "").strip().split("\n\n")[0]]
        for cls in sorted(all_errors().values(), key=lambda cls: (cls.exit_code, cls.code))
    ]
    return table(["code", "exit code", "class", "meaning"], rows)


def shape_table() -> str:
    """What a user of each project writes."""
    rows = [[it.project, it.write, it.resume, it.tested or "not run"] for it in known_shapes()]
    return table(["project", "`--folder`", "how it goes on", "run with"], rows)


def shape_rules() -> str:
    """How each shape is known, where its step is, and what shows its end."""
    rows = []
    for it in known_shapes():
        known = f"{'directory' if it.directory else 'file'} `{it.directory or it.file}`"
        in_name = "(?P<step" in (it.directory or it.file or "")
        step = ", ".join(f"`{text}`" for text in it.step) or ("`step` in the name" if in_name else "the store counts")
        shown_by = (it.marker, it.tracker, it.each_rank) if it.directory else (it.marker,)
        wanted = (text.partition(" => ")[2] for text in it.needs)
        ends = [f"`{name}`" for name in (*shown_by, *wanted) if name]
        quiet = "its own format, else the quiet time" if it.file else "the quiet time"
        more = [f"`{name}`" for name in (it.tracker, *it.same, *it.beside) if name]
        rows.append([f"`{it.name}`", it.project, known, step, " and ".join(ends) or quiet, ", ".join(more)])
    return table(["shape", "project", "known by", "step", "its end is shown by", "stored besides"], rows)


def shape_fields() -> str:
    """The fields of an entry."""
    return table(["field", "meaning"], [[f"`{name}`", text] for name, text in field_docs(Shape).items()])


def error_tree() -> str:
    """The tree as the module draws it."""
    drawing = inspect.getdoc(sys.modules[CkptstoreError.__module__]) or ""
    lines = [line for line in drawing.splitlines() if line.lstrip().startswith(("+--", "|", "CkptstoreError"))]
    return "```text\n" + "\n".join(line.removeprefix("    ") for line in lines) + "\n```"


def event_classes() -> list[type[events.Event]]:
    """All events, in the order of their definition; those of the agent last."""
    names = ("extensions.tier.events", "events.loads", "events.requests", "events.saves")
    modules = [import_module(f"ckptstore.{name}") for name in names]
    return [
        value
        for module in (*modules, notices)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, events.Event) and value.__module__ == module.__name__
        if module is notices or value.__name__ in events.__all__
    ]


def event_table() -> str:
    """Every event with its level and fields."""
    levels = {0: "not logged", 10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR"}
    rows = []
    for cls in event_classes():
        fields = ", ".join(f"`{item.name}`" for item in dataclasses.fields(cls))
        rows.append([f"`{cls.__name__}`", levels[cls.level], fields, " ".join((cls.__doc__ or "").split())])
    return table(["event", "log level", "fields", "meaning"], rows)


def api(module: Any, level: int = 2) -> str:
    """Signature and docstring of every public name of a module, errors apart, below headings of this level."""
    mark, parts = "#" * level, []
    for name in module.__all__:
        value = getattr(module, name)
        if name == "__version__" or (isinstance(value, type) and issubclass(value, CkptstoreError)):
            continue
        parts.append(f"{mark} {name}\n\n{_described(name, value)}")
        if isinstance(value, type):
            parts += [f"{mark}# {name}.{member}\n\n{_described(member, item)}" for member, item in _members(value)]
    return "\n\n".join(parts)


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Its own, and those of its half in another module that has no section of its own."""
    halves = (base for base in cls.__mro__[1:] if base.__module__ not in ("builtins", cls.__module__))
    for half in (cls, *takewhile(lambda base: base.__name__ not in ckptstore.__all__, halves)):
        for name, value in vars(half).items():
            is_member = callable(value) or isinstance(value, property | classmethod | staticmethod)
            if not name.startswith("_") and is_member:
                yield name, value


def _described(name: str, value: Any) -> str:
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    text = inspect.getdoc(function) or ""
    if isinstance(value, property):
        return f"Property. {text}"
    code = f"{name}{_signature(function)}"
    return f"```text\n{code}\n```\n\n{text}"


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    if isinstance(function, type) and issubclass(function, tuple):  # it would have all fields here again
        signature = signature.replace(return_annotation=None)
    kept = [item for item in signature.parameters.values() if item.name not in ("self", "cls")]
    text = _plain(signature.replace(parameters=kept))
    if len(text) < 90:
        return text
    result = text.rpartition(" -> ")[2]
    lines, is_marked = [], False
    for item in kept:
        if item.kind is item.KEYWORD_ONLY and not is_marked:
            lines.append("    *,")
            is_marked = True
        lines.append(f"    {_plain(item)},")
    return "(\n" + "\n".join(lines) + f"\n) -> {result}"


def _plain(annotated: inspect.Signature | inspect.Parameter) -> str:
    """As it is written in the code."""
    return re.sub(r"ForwardRef\('([^']*)'\)", r"\1", str(annotated)).replace("'", "")


def commands() -> str:
    """Usage, help and options of every command."""
    parts = []
    context = main.make_context("ckptstore", [], resilient_parsing=True, terminal_width=100)
    for name, command, inner in _with_inner(context, main, COMMANDS):
        parts.append(f"### ckptstore {name}\n\n```text\n{command.get_help(inner)}\n```")
    return "\n\n".join(parts)


def _with_inner(
    context: click.Context, group: click.Group, names: Iterable[str]
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """The commands of a group, each followed by those inside of it: "fast", then "fast ls"."""
    for name in names:
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context, max_content_width=100, terminal_width=100)
        yield name, command, inner
        if isinstance(command, click.Group):
            for more, *found in _with_inner(inner, command, command.commands):
                yield f"{name} {more}", *found


def spoken_command(definition: str) -> str | None:
    """The command that prints what a definition of the schema says: "fast ls" for "fast-ls". None for none."""
    first, _, second = definition.partition("-")
    command = main.get_command(click.Context(main), first)
    if isinstance(command, click.Group) and second in command.commands:
        return f"{first} {second}"
    return definition if definition in COMMANDS else None


def json_tables() -> str:
    """The fields of what every command prints with --json."""
    parts = []
    for name, definition in SCHEMA["$defs"].items():
        command = spoken_command(name)
        if command or "properties" in definition:
            title = f"`ckptstore {command} --json`" if command else f"`{name}`"
            rows = [[f"`{field}`", _type(item), item.get("description", "")] for field, item in _fields(definition)]
            parts.append(f"### {title}\n\n{definition['description']}\n\n{table(['field', 'type', 'meaning'], rows)}")
        else:
            parts.append(f"### `{name}`\n\n{definition['description']}")
    return "\n\n".join(parts)


def _fields(definition: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, item in definition["properties"].items():
        yield prefix + name, item
        inner = item.get("items", item)
        if "properties" in inner:
            yield from _fields(inner, f"{prefix}{name}{'[]' if 'items' in item else ''}.")


def _type(item: dict[str, Any]) -> str:
    if "$ref" in item:
        return f"`{item['$ref'].rpartition('/')[2]}`"
    if "const" in item:
        return f"`{json.dumps(item['const'])}`"
    if "enum" in item:
        return " or ".join(f"`{value}`" for value in item["enum"])
    kind = item.get("type", "any")
    if kind == "array":
        return f"array of {_type(item['items'])}"
    return " or ".join(kind) if isinstance(kind, list) else kind


def report_schema() -> str:
    """The JSON schema of a report's document, from its classes and the texts below their fields."""
    classes = [
        value
        for value in vars(document).values()
        if dataclasses.is_dataclass(value) and isinstance(value, type) and value.__module__ == document.__name__
    ]
    definitions = {cls.__name__: _schema_of(cls) for cls in classes}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What ckptstore report gathers",
        "$ref": f"#/$defs/{document.Document.__name__}",
        "$defs": definitions,
    }
    return json.dumps(schema, indent=1) + "\n"


def _schema_of(cls: type) -> dict[str, Any]:
    docs, hints = field_docs(cls), get_type_hints(cls)
    names = [item.name for item in dataclasses.fields(cls)]
    missing = sorted(set(names) - docs.keys())
    assert not missing, f"{cls.__name__} does not say what {missing} is"
    return {
        "type": "object",
        "description": " ".join((cls.__doc__ or "").split()),
        "properties": {name: {**_schema_of_type(hints[name]), "description": docs[name]} for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _schema_of_type(hint: Any) -> dict[str, Any]:
    """The schema of a field's type, as `document` uses types."""
    simple = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
    origin, inner = get_origin(hint), get_args(hint)
    if hint in simple:
        return {"type": simple[hint]}
    if dataclasses.is_dataclass(hint):
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is tuple:
        return {"type": "array", "items": _schema_of_type(inner[0])}
    if origin is Mapping:
        values = {} if inner[1] is Any else {"additionalProperties": _schema_of_type(inner[1])}
        return {"type": "object", **values}
    if origin in (Union, UnionType):
        return {"anyOf": [_schema_of_type(item) for item in inner]}
    raise TypeError(f"a schema has no word for {hint}")


def index() -> str:
    """Links to all pages, as the site groups them, by their titles."""
    lines = []
    for group in yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())["nav"]:
        ((name, inside),) = group.items()
        lines.append(f"\n## {name}\n")
        for path in inside:
            if path != "index.md":
                title = (DOCS / path).read_text().partition("\n")[0].removeprefix("# ")
                lines.append(f"- [{title}]({path})")
    return "\n".join(lines).strip()


def performance_table() -> str:
    """The recorded figures, and the machines."""
    recorded = json.loads((DOCS / "performance/rows.json").read_text())
    names = ("workload", "ours", "peer", "limit")
    lines = [
        [*(row[name] for name in names), _verdicts(row), f"{row['date']}, {row['commit']}, {row['machine']}"]
        for row in recorded["rows"]
    ]
    heads = ["workload", "ckptstore", "best peer", "limit of the machine", "verdict", "date, commit, machine"]
    machines = "\n".join(f"- Machine {name}: {text}." for name, text in recorded["machines"].items())
    return f"{table(heads, lines)}\n\n{machines}"


def _verdicts(row: dict[str, Any]) -> str:
    """The verdict of the last day, and those of the days before, each with the time it is about."""
    before = [f"On {it['date']} ({it['commit']}): {it['ours']}; {it['verdict']}" for it in row.get("earlier", [])]
    return ". ".join([row["verdict"], *before])


def performance_commands() -> str:
    """The command of every row, and those of figures beside them."""
    rows = json.loads((DOCS / "performance/rows.json").read_text())
    lines = [f"# {row['workload']}\n$ {row['command']}" for row in [*rows["rows"], *rows["beside"]]]
    return "```console\n" + "\n".join(lines) + "\n```"


def peer_matrix() -> str:
    """Which peer is in which table, and the reasons of the holes."""
    from ckptstore.tools.bench import matrix  # which takes torch

    headers, rows, reasons = matrix.matrix()
    absent = [f"- {name}: {reason}." for name, reason in matrix.ABSENT.items()]
    parts = (
        table(headers, rows),
        "\n".join(f"- {reason}" for reason in reasons),
        "In no table are:",
        "\n".join(absent),
    )
    return "\n\n".join(parts)


def peer_settings() -> str:
    """What is tried of each peer, and what it checks."""
    from ckptstore.tools.bench import matrix

    return table(["peer", "`--peers`", "settings that are tried", "what it checks"], [*matrix.settings_rows()])


_OBJECTS_SINCE = (
    "second optimizer", "cyclic", "step rate", "multi step", "constant", "linear rate", "polynomial", "cosine",
    "warm restarts", "lambda", "multiplicative", "swa", "sequence", "chain", "own scheduler", "averages",
    "averages swapped",
)  # fmt: skip
TESTED_SINCE = {"": "2026-11-25", **dict.fromkeys(("observed", "shared state", *_OBJECTS_SINCE), "2026-11-28")}
"""Since when the bench of states runs what it has; of a kind that came later by its name."""


def state_kinds() -> str:
    """What comes of every kind of thing that the bench of states puts into a state, saved, loaded and trained on."""
    sys.path.append(str(DOCS.parent / "tests"))
    from kit import states  # which takes torch
    from kit.states import module_makers, optimizer_makers, state_case, tensor_makers, value_makers

    case = states.StateCase(0, modules=("linear",), optimizer="adamw", life=("step",))
    several = [dataclasses.replace(case, wrapper=name, num_ranks=2) for name in sorted(module_makers.NEEDS_RANKS)]
    drawn: dict[str, dict[str, Any]] = {
        "modules": {name: dataclasses.replace(case, modules=(name,)) for name in module_makers.MODULES},
        "wrappers": {name: dataclasses.replace(case, wrapper=name) for name in module_makers.WRAPPERS if name},
        "optimizers": {
            name: dataclasses.replace(
                case, optimizer=name, modules=("embedding",) if "sparse" in name else case.modules
            )
            for name in optimizer_makers.OPTIMIZERS
        },
        "objects with a state": {name: dataclasses.replace(case, extras=(name,)) for name in state_case.EXTRAS},
        "tensors": {name: states.StateCase(0, tensors=(name,)) for name in tensor_makers.TENSORS},
        "values": {name: states.StateCase(0, values=(name,)) for name in value_makers.VALUES},
    }
    outcomes = {each.case.wrapper: each for each in states.run_on_ranks(several)}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for section, cases in drawn.items():
        for name, each in cases.items():
            outcome = outcomes[name] if name in outcomes and section == "wrappers" else states.run(each)
            assert outcome.kind in ("same", "refused"), f"{name}: {outcome.kind}: {outcome.detail}"
            comes = "comes back bit by bit" if outcome.kind == "same" else f"refused. {outcome.detail}"
            rows.setdefault((section, comes, TESTED_SINCE.get(name, TESTED_SINCE[""])), []).append(name)
    lines = [[f"{section}: {', '.join(names)}", comes, since] for (section, comes, since), names in rows.items()]
    return table(["kind", "what happens", "tested since"], lines)


GENERATORS: dict[str, Callable[[], str]] = {
    "config": config_tables,
    "error tree": error_tree,
    "error codes": error_table,
    "shapes": shape_table,
    "shape rules": shape_rules,
    "shape fields": shape_fields,
    "events": event_table,
    "api": lambda: api(ckptstore),
    "ray": lambda: api(ckptstore.ray, 3),
    "trackers": lambda: api(trackers, 3),
    "mlflow": lambda: api(mlflow, 3),
    "wandb": lambda: api(wandb, 3),
    "commands": commands,
    "json": json_tables,
    "performance table": performance_table,
    "performance commands": performance_commands,
    "peer matrix": peer_matrix,
    "peer settings": peer_settings,
    "state kinds": state_kinds,
    "pages": index,
}

KEPT = ("performance table", "performance commands", "peer matrix", "peer settings", "state kinds", "shapes", "pages")
"""What stands in the pages themselves: it is no reference, or takes minutes to find out."""
ELSEWHERE = (
    "Made of the code: `make site` shows it here; `help(...)` in Python and `--help` on the command line say the same."
)

_SECTION = re.compile(r"(<!-- generated: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


_WORD = r"(['\"])(?:ckptstore|\.)\[([a-z0-9,-]+)\]"
_INLINE_INSTALL = re.compile(rf"`pip install {_WORD}\1`(?: in your clone)?")
_INSTALL_LINE = re.compile(rf"^((?:\$ )?)pip install {_WORD}\2((?: [a-z][\w-]*)*)(?:  # in your clone)?$", re.MULTILINE)
_IS_CLONE = extras.SOURCE == "."


def regenerated(text: str) -> str:
    """A page with what stands in it made anew, and with what installs ckptstore today."""
    text = _filled(text, lambda name: GENERATORS[name]() if name in KEPT else ELSEWHERE)
    where = " in your clone" if _IS_CLONE else ""
    text = _INLINE_INSTALL.sub(lambda match: f"`{extras.install_command(match[2])}`{where}", text)
    where = "  # in your clone" if _IS_CLONE else ""
    return _INSTALL_LINE.sub(lambda match: f"{match[1]}{extras.install_command(match[3])}{match[4]}{where}", text)


def on_page_markdown(markdown: str, **_: object) -> str:
    """A page as the site shows it. Called by mkdocs for each."""
    readable = re.sub(r"^```(\w+) no-run:.*$", r"```\1", markdown, flags=re.MULTILINE)
    return _filled(readable, lambda name: None if name in KEPT else GENERATORS[name]())


def _filled(text: str, made: Callable[[str], str | None]) -> str:
    def fill(match: re.Match[str]) -> str:
        content = made(match[2])
        return match[0] if content is None else f"{match[1]}\n{content}\n\n{match[3]}"

    return _SECTION.sub(fill, text)


def pages() -> list[Path]:
    """All pages."""
    return [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]


WRITTEN: dict[str, Callable[[], str]] = {"reference/report-schema.json": report_schema}
"""Files that are generated as a whole."""


if __name__ == "__main__":
    for name, generate in WRITTEN.items():
        (DOCS / name).write_text(generate())
    for page in pages():
        before = page.read_text()
        after = regenerated(before)
        if after != before:
            page.write_text(after)
            print(f"wrote {page.relative_to(DOCS.parent)}")
