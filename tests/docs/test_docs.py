"""The pages are true: every Python block runs, every command line parses, every link leads somewhere, nothing is
missing from the reference."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
from forked_ranks import TORCH, run_ranks
from kit import states
from page_runner import run_blocks

import ckptstore
from ckptstore.integrations.lightning.from_environment import EVERY, KEEP, STORE
from ckptstore.integrations.tier_settings import FAST_SETTINGS
from ckptstore.storage.open import choose_engine
from ckptstore.tools.cli import main
from ckptstore.tools.cli.commands.agent import FIELDS

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FIRST_PAGES = ("README.md", "docs/quickstart.md")
SCHEMA = json.loads((ROOT / "docs/reference/cli-schema.json").read_text())

_FENCE = re.compile(r"^```(.*)$")
COMMAND = re.compile(r"(?<![\w/.-])ckptstore ((?:[a-z-][^|;)&>`#\n]*))")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    rest: str
    line: int
    """Of its first line of code, counted from 1."""
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    head, lines = None, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        match = _FENCE.match(line)
        if match is None:
            lines.append(line)
        elif head is None:
            head, lines, start = match[1], [], number + 1
        else:
            language, _, rest = head.partition(" ")
            yield Block(language, rest, start, "\n".join(lines))
            head = None
    assert head is None, f"{page} has a fence that is not closed"


SHELLS = ("console", "bash", "sh", "shell")
NOT_RUN = {
    r"\w://": "it needs a bucket or a server: test_bucket_commands has one",
    r"(^| )/\w": "it names a directory of another machine",
    r"^(bench|demo)\b": "it measures or trains for minutes",
    r"^(follow|watch|serve|s3-test)\b|--follow\b": "it goes on until it is stopped",
    r"^(run|watch-folder|restore-folder)\b": "it stands around a trainer with a folder of its own",
}
"""Which commands of the pages are only parsed, by their words behind `ckptstore`, and why. Where a whole block cannot
run, its fence says `no-run:` and why."""


def script_of(page: Path) -> Iterator[tuple[int, str | list[str]]]:
    """Yield what a reader of a page runs, in its order: Python blocks, and the words of commands."""
    for block in blocks(page):
        if block.language not in ("python", *SHELLS):
            continue
        if block.rest.startswith("no-run:"):
            assert len(block.rest) > len("no-run: ") + 5, f"{page}:{block.line} does not say why it is not run"
            continue
        assert block.rest == "", f"{page}:{block.line} has {block.rest!r} after its language"
        if block.language == "python":
            yield block.line, block.text
            continue
        for number, line in enumerate(block.text.splitlines(), block.line):
            if (match := COMMAND.search(line)) is None:
                continue
            command = line[match.start(1) :]
            if not any(re.search(pattern, command) for pattern in NOT_RUN):
                assert line == f"$ ckptstore {command}", (
                    f"{page}:{number} is neither a command that can be run nor says why not"
                )
                yield number, [word for part in shlex.split(command, comments=True) for word in braced(part)]


def braced(word: str) -> list[str]:
    """Return the words that bash makes of one with {first..last..step}."""
    match = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\.\.(\d+)\}(.*)", word)
    if match is None:
        return [word]
    return [f"{match[1]}{number}{match[5]}" for number in range(int(match[2]), int(match[3]) + 1, int(match[4]))]


def test_what_is_not_run_has_a_reason_that_still_counts() -> None:
    commands = [" ".join(words) for page in PAGES for _, words in command_lines(page)]
    assert [why for pattern, why in NOT_RUN.items() if not any(re.search(pattern, line) for line in commands)] == []
    assert sum(isinstance(part, list) for page in PAGES for _, part in script_of(page)) > 30


@pytest.mark.parametrize(
    "page",
    [pytest.param(ROOT / name, marks=[] if name in FIRST_PAGES else pytest.mark.slow, id=name) for name in NAMES],
)
def test_a_page_runs_in_its_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page share a namespace, and run in an empty directory, its commands between them. MLflow has a
    directory for a server."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    code = list(script_of(page))
    if code:
        modules = TORCH if any("import torch" in part for _, part in code if isinstance(part, str)) else ()
        run_ranks(1, run_blocks, str(page), code, tmp_path, modules=modules, timeout_seconds=240)


def command_lines(page: Path) -> Iterator[tuple[int, list[str]]]:
    """The words behind `ckptstore` of every command in a shell block."""
    for block in blocks(page):
        if block.language in SHELLS:
            for number, line in enumerate(block.text.splitlines(), block.line):
                for match in COMMAND.finditer(line):
                    yield number, shlex.split(match[1], posix=True)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_line_parses(page: Path) -> None:
    for line, written in command_lines(page):
        words = written
        if words[0].startswith("-"):
            continue
        context: click.Context = main.make_context("ckptstore", [], resilient_parsing=True)
        command, name = main, "ckptstore"
        try:
            while isinstance(command, click.Group) and words and not words[0].startswith("-"):
                name, found, words = command.resolve_command(context, words)
                assert found is not None, f"{page}:{line}: there is no command {' '.join(written)}"
                command = found
            made = command.make_context(name, words, parent=context)
            if options := made.params.get("storage_options"):
                places = [word for word in written if "://" in word and "=" not in word]
                assert places, f"{page}:{line}: options for no place"
                for place in places:
                    choose_engine(place.partition("@")[0], storage_options=options)
        except click.exceptions.Exit:
            continue  # --help
        except click.UsageError as error:
            raise AssertionError(f"{page}:{line}: ckptstore {name}: {error.format_message()}") from None


def test_command_lines_are_found() -> None:
    found = [words for _, words in command_lines(ROOT / "README.md")]
    assert ["ls", "runs/first"] in found
    assert len(found) >= 4


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z][a-z-]+)`", page.read_text())) <= targets


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: {link} leads nowhere"
        if (
            anchor and target.suffix == ".md" and "Made of the code" not in target.read_text()
        ):  # the site's test looks there
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page}: {link} names no heading"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_environment_variable_exists(page: Path) -> None:
    known = {f"CKPTSTORE_{item.name.upper()}" for cls in generator().CONFIGS for item in fields(cls)}
    known |= {"CKPTSTORE_COMPLETE", "CKPTSTORE_TEST_FAULTS", "CKPTSTORE_TEST_RANK", "CKPTSTORE_TRACEBACKS"}
    known |= {
        STORE,
        KEEP,
        EVERY,
        *(f"CKPTSTORE_LIGHTNING_{name.upper()}" for name in FAST_SETTINGS),
    }  # of the callback that Lightning finds by itself
    known |= {f"CKPTSTORE_FOLLOW_{name.upper()}" for name in FIELDS}
    known |= {"CKPTSTORE_BENCH", "CKPTSTORE_BENCH_ROUNDS"}  # of the benchmarks, see benchmarks/sizes.py
    known |= {"CKPTSTORE_DIRECTORY", "CKPTSTORE_VERSION"}  # of the program that `pull --exec` runs
    assert set(re.findall(r"CKPTSTORE_[A-Z_]+", page.read_text())) <= known


def generator() -> Any:
    """docs/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("runs_states", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_generated_reference_is_up_to_date(runs_states: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page says what comes of every kind of state, which has to be tried."""
    monkeypatch.setattr(states, "run_on_ranks", partial(states.run_on_ranks, start=run_ranks))  # torch is imported once
    module = generator()
    pages = [page for page in module.pages() if ("<!-- generated: state kinds -->" in page.read_text()) == runs_states]
    assert pages
    for page in pages:
        assert module.regenerated(page.read_text()) == page.read_text(), f"{page} is out of date: run `make docs`"


def test_generated_files_are_up_to_date() -> None:
    module = generator()
    for name, generate in module.WRITTEN.items():
        assert (module.DOCS / name).read_text() == generate(), f"{name} is out of date: run `make docs`"


def test_every_option_and_event_is_in_the_reference() -> None:
    module = generator()
    shown = {page.stem: module.on_page_markdown(page.read_text()) for page in (ROOT / "docs/reference").glob("*.md")}
    for cls in module.CONFIGS:
        for item in fields(cls):
            documented = item.name in ("transfer", "retry", "cache", "peer") or f"`{item.name}`" in shown["config"]
            assert documented, f"{cls.__name__}.{item.name} is not documented"
    for event in module.event_classes():
        assert f"`{event.__name__}`" in shown["events"]


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT / "docs"))
        assert name == "index.md" or f"({name})" in index, f"{name} is not in docs/index.md"


def test_the_readme_begins_with_what_matters() -> None:
    text = (ROOT / "README.md").read_text()
    head, (_, _, *sections) = "\n".join(text.splitlines()[:24]), text.split("\n## ")
    guarantees = re.findall(r"^\d\. \*\*", sections[0], re.MULTILINE)
    examples = {block.language: block.text.splitlines() for block in blocks(ROOT / "README.md")}
    assert len(guarantees) == 5
    assert "pip install" in head
    assert "`make demo`" in head
    assert "`make test`" in head
    assert len(examples["python"]) <= 15
    assert len(examples["console"]) == 4


def test_the_loop_of_the_readme_trains(tmp_path: Path) -> None:
    (loop,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; torch.manual_seed(0)\n{loop}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with ckptstore.open_store(tmp_path / "runs/first") as store:
        losses = {checkpoint.step: checkpoint.metrics["loss"] for checkpoint in store}
    assert list(losses) == [2, 3]
    assert losses[3] < losses[2]


@pytest.mark.parametrize("name", ["bench", "cli", "report"])
def test_a_schema_is_one(name: str) -> None:
    """Which takes half a second: the tests that hold documents to it do not ask again."""
    schema = json.loads((ROOT / f"docs/reference/{name}-schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", [name for name in SCHEMA["$defs"] if generator().spoken_command(name)])
def test_a_schema_refuses_what_it_does_not_name(name: str) -> None:
    validator = jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{name}"})
    assert not validator.is_valid({})
    assert not validator.is_valid({"version": 1, "surprise": 1})
