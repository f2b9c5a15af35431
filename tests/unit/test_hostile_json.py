"""Every reader of JSON, and files that are not what they should be: it refuses them, or reads what is valid.

`hostile_json` changes each valid file in every place, `json_readers` says what each reader may make of that.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/state"))
from hostile_json import faults_of, mutations, scrambled, some_mutations  # noqa: E402
from json_readers import Reader, readers  # noqa: E402
from json_saved import Saved  # noqa: E402

PARSERS = {"load_json", "load_object", "parse_json", "json_in", "raw_decode"}
OTHERS = {
    "format.encoding:": "the parsers themselves",
    "group.meeting:": "in the table, as a value of a meeting",
    "extensions.peers.channel:": "headers between processes: tests/unit/test_node_server.py",
    "saving.request:": "what this process has just encoded",
    "saving.state_shard:": "what a rank of the same start has just sent, in a message that is in the table",
    "state.index.items:": "the same",
    "state.read.shared_reads:": "the same",
    "state.write.agree:": "the same",
    "state.write.replicas:": "the same",
    "state.write.outlining:": "what this process has just encoded",
    "extensions.history.thinned_index:": "plain values that were read before",
    "state.live.values:": "in the table, as plain values and as notes of modules",
    "state.live.optimizer_load:": "for a class of the user, all of whose errors are caught",
    "storage.cloud.": "answers of a server: tests/servers/test_hostile_answers.py",
    "testing.": "what a test has just encoded",
    "tools.bench.": "what a measurement has just encoded",
    "tools.demo.": "the same",
    "tools.cli.": "arguments of a user, and what a command has just encoded",
    "tools.run.folders.": "what trainers write: tests/folders/test_damaged.py; `json_in` is in the table",
}
"""Where JSON is parsed that is not in the table, by the beginnings of functions, and why."""


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    return readers(Saved(tmp_path_factory.mktemp("saved")))


def test_a_reader_refuses_or_reads_what_is_valid(every: dict[str, Reader]) -> None:
    faults = [f"{name}: {fault}" for name, one in every.items() for fault in faults_of(one, some_mutations(one))]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:50])


@pytest.mark.slow
def test_all_places_and_several_at_once(every: dict[str, Reader]) -> None:
    faults = [f"{name}: {fault}" for name, one in every.items() for fault in faults_of(one, mutations(one))]
    seeds = range(200)
    faults += [
        f"{name}: {it}" for name, one in every.items() for it in faults_of(one, (scrambled(one, n) for n in seeds))
    ]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:50])


def test_every_reader_is_in_the_table(every: dict[str, Reader]) -> None:
    found = {
        f"{path.relative_to(ROOT / 'ckptstore').with_suffix('').as_posix().replace('/', '.')}:{name}"
        for path in (ROOT / "ckptstore").rglob("*.py")
        for name in parsing(ast.parse(path.read_text()))
    }
    tried = {name for one in every.values() for name in one.calls.split()}
    assert tried <= found
    assert {name for name in found - tried if not name.startswith(tuple(OTHERS))} == set()
    assert [start for start in OTHERS if not any(name.startswith(start) for name in found)] == []


def parsing(tree: ast.AST, within: tuple[str, ...] = ()) -> Iterator[str]:
    """The functions that parse JSON."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Call(func=ast.Name(id=called)) | ast.Call(func=ast.Attribute(attr="raw_decode" as called)):
                is_parser = called in PARSERS
            case ast.Call(func=ast.Attribute(value=ast.Name(id="json"), attr=called)):
                is_parser = called in ("load", "loads")
            case _:
                is_parser = False
        if is_parser:
            yield ".".join(within)
        named = (*within, node.name) if isinstance(node, ast.FunctionDef | ast.ClassDef) else within
        yield from parsing(node, named)
