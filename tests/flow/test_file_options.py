"""Options that change the files of a store: each algorithm of digests, through all that checks them, and prefixes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import independent_reader
import pytest
import torch
from click.testing import CliRunner
from thread_ranks import run_threads
from torch.distributed.checkpoint import FileSystemReader, load
from trees import copied, flip, make_tree

import ckptstore
from ckptstore import CheckpointDamaged, CheckpointStore, FastTier, InvalidInput, KeepLatest, open_store
from ckptstore.format.digest import ALGORITHMS, DEFAULT
from ckptstore.format.naming import spread_directory
from ckptstore.interchange import export
from ckptstore.tools.cli import main

pytestmark = pytest.mark.slow

OTHER = next(name for name in ALGORITHMS if name != DEFAULT)
SIZE = 3 << 20

Use = Callable[[str], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    return lambda name: monkeypatch.setenv("CKPTSTORE_DIGEST", name)


@pytest.fixture(params=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest, use: Use) -> str:
    use(request.param)
    return str(request.param)


def state_of(number: float) -> dict[str, Any]:
    return {"large": torch.full((SIZE,), number), "small": torch.full((10,), number), "number": number}


def opened(root: Path, **options: Any) -> CheckpointStore:
    return open_store(root / "store", durable=False, **options)


def algorithms_of(checkpoint: ckptstore.Checkpoint) -> set[str]:
    return {receipt.digest.algorithm for receipt in checkpoint.files if receipt.digest}


def loads(checkpoint: ckptstore.Checkpoint, number: float) -> None:
    state = state_of(-1.0)
    checkpoint.load(state)
    assert (state["number"], state["small"].unique().tolist()) == (number, [number])
    assert torch.equal(state["large"], torch.full((SIZE,), number))
    assert checkpoint.verify().ok
    with checkpoint.as_directory() as path:
        assert {file.name for file in path.rglob("*") if file.is_file()} >= {file.name for file in checkpoint.files}


def test_equal_contents_with_digests_by_two_algorithms_are_not_said_to_differ(tmp_path: Path, use: Use) -> None:
    make_tree(tmp_path / "source", {"same.bin": b"same"})
    for name in (DEFAULT, OTHER):
        use(name)
        with open_store(tmp_path / name, durable=False) as store:
            store.save(1, state_of(1.0))
            store.save_directory(2, tmp_path / "source")

    def diff(step: int, *words: str) -> Any:
        places = [f"{tmp_path / name}@{step}" for name in (DEFAULT, OTHER)]
        return json.loads(CliRunner().invoke(main, ["diff", *places, *words, "--json"]).stdout)

    assert [(item["key"], item["change"]) for item in diff(1)["tensors"]] == [("large", "unknown")]
    assert diff(1, "--values")["tensors"] == []
    found = diff(2)
    assert [(item["name"], item["change"]) for item in found["files"]] == [("same.bin", "unknown")]
    assert found["num_equal_files"] == 0


def test_a_state_is_saved_and_every_damaged_file_is_found(tmp_path: Path, algorithm: str) -> None:
    with opened(tmp_path) as store:
        checkpoint = store.save(1, state_of(1.0))
        assert algorithms_of(checkpoint) == {algorithm}
        loads(checkpoint, 1.0)
        log = independent_reader.read_log(tmp_path / "store/log")
        tensors, _ = independent_reader.read_checkpoint(tmp_path / "store", log[-1])
        assert tensors["small"][2] == torch.full((10,), 1.0).numpy().tobytes()
        (directory,) = (tmp_path / "store/checkpoints").iterdir()
        for receipt in checkpoint.files:
            for place in (0, receipt.size_bytes // 2, receipt.size_bytes - 1):
                flip(directory / receipt.name, place)
                (problem,) = checkpoint.verify().problems
                assert (problem.file, problem.fault) == (receipt.name, "flipped")
                assert ALGORITHMS[algorithm].title in problem.expected
                with pytest.raises(ValueError, match="damaged"):
                    independent_reader.read_checkpoint(tmp_path / "store", log[-1])
                flip(directory / receipt.name, place)
        export(checkpoint, tmp_path / "exported", to="torch")
        exported = torch.load(tmp_path / "exported/state.pt", weights_only=True)
        assert torch.equal(exported["large"], torch.full((SIZE,), 1.0))
        (file,) = (receipt for receipt in checkpoint.files if receipt.name.endswith(".distcp"))
        flip(directory / file.name)
        with pytest.raises(CheckpointDamaged):
            export(checkpoint, tmp_path / "again", to="torch")
        with pytest.raises(CheckpointDamaged, match=ALGORITHMS[algorithm].title):
            checkpoint.load(state_of(-1.0))


def test_files_of_any_size_are_saved_and_copied(tmp_path: Path, algorithm: str) -> None:
    sizes = (0, 1, 1 << 20, (1 << 20) + 1, 40 << 20)
    files = {str(size): bytes(range(251)) * (size // 251) + bytes(size % 251) for size in sizes}
    with opened(tmp_path) as store:
        store.save_directory(1, make_tree(tmp_path / "source", files))
        checkpoint = store.latest()
        assert algorithms_of(checkpoint) == {algorithm}
        assert checkpoint.verify().ok
        copied(store, tmp_path / "copy")
        with open_store(tmp_path / "copy") as copy:
            assert [(it.name, it.digest) for it in copy[1].files] == [(it.name, it.digest) for it in checkpoint.files]
            assert copy[1].verify().ok


@pytest.mark.parametrize("incremental", [True, "reference"])
def test_a_store_has_both_and_incremental_saves_take_over_their_own_alone(
    tmp_path: Path, use: Use, incremental: Any
) -> None:
    names = [DEFAULT, DEFAULT, OTHER, OTHER, DEFAULT]
    written = []
    for step, name in enumerate(names, 1):
        use(name)
        with opened(tmp_path, retention=ckptstore.KeepAll()) as store:
            state = state_of(1.0) | {"number": float(step)}
            checkpoint = store.save(step, state, incremental=incremental)
            assert algorithms_of(checkpoint) == {name}
            written.append({file.stat().st_ino for file in tmp_path.rglob("*.distcp") if file.stat().st_size > SIZE})
    new = [len(now - before) for before, now in zip([set(), *written], written, strict=False)]
    assert new == [1, 0, 1, 0, 1]  # a change of the algorithm writes all of it, once
    with opened(tmp_path) as store:
        for step, (name, entry) in enumerate(zip(names, store.entries(), strict=True), 1):
            checkpoint = entry.checkpoint
            assert algorithms_of(checkpoint) == {name}
            state = state_of(-1.0)
            checkpoint.load(state)
            assert (state["number"], state["large"].unique().tolist()) == (float(step), [1.0])
            assert checkpoint.verify().ok
        assert store.verify_log() == []


def test_the_fast_tier_and_what_it_brings_into_the_store(tmp_path: Path, algorithm: str) -> None:
    with opened(tmp_path, fast=FastTier(tmp_path / "disk", node="a")) as store:
        saved = store.save_async(1, state_of(1.0))
        assert algorithms_of(saved.result()) == {algorithm}
        durable = saved.durable()
        assert algorithms_of(durable) == {algorithm}
        loads(durable, 1.0)


def test_the_name_of_no_algorithm_is_refused(use: Use, tmp_path: Path) -> None:
    use("md5")
    with pytest.raises(ckptstore.InvalidInput, match="it is one of: crc32c, xxh3-128"):
        opened(tmp_path)


def test_a_reader_without_the_package_says_which_extra_it_lacks(tmp_path: Path, use: Use) -> None:
    use(OTHER)
    with opened(tmp_path) as store:
        store.save_directory(1, make_tree(tmp_path / "source", {"file": b"data"}))
    code = """if True:
        import json, sys
        sys.modules["xxhash"] = None
        from ckptstore import open_store
        with open_store(sys.argv[1]) as store:
            try:
                store.latest().verify()
            except Exception as error:
                print(json.dumps([type(error).__name__, str(error)]))
    """
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    name, text = json.loads(found.stdout)
    assert (name, "[torch]" in text) == ("InvalidInput", True)


NUM_PREFIXES = 20


@pytest.mark.parametrize("num_prefixes", [2, 16, 17, 1000])
def test_ranks_fill_the_directories_evenly_and_neighbours_differ_at_once(num_prefixes: int) -> None:
    found = [spread_directory(rank, num_prefixes) for rank in range(4 * num_prefixes)]
    assert {found.count(name) for name in found} == {4}
    assert len(set(found)) == num_prefixes
    assert len({len(name) for name in found}) == 1
    assert all(one[0] != other[0] for one, other in pairwise(found[:num_prefixes]))


def test_one_prefix_is_no_directory() -> None:
    assert spread_directory(7, 1) == ""
    with pytest.raises(InvalidInput, match="num_prefixes"):
        open_store("memory://spread", num_prefixes=0)


def save_spread(store: CheckpointStore, rank: int) -> list[str]:
    """Save twice, the second time incrementally; the names in the last checkpoint."""
    state: dict[str, Any] = {"own": torch.full((300_000,), float(rank)), "same": torch.arange(700_000), "epoch": 3}
    for step in (1, 2):
        checkpoint = store.save(step, state, incremental=True)
    found = {"own": torch.zeros(300_000), "same": torch.zeros(700_000, dtype=torch.int64), "epoch": 0}
    assert store.load(found).step == 2
    assert all(torch.equal(found[name], state[name]) for name in ("own", "same"))
    return sorted(file.name for file in checkpoint.files)


def test_save_load_prune_and_stock_readers(tmp_path: Path) -> None:
    root = tmp_path / "store"
    options: dict[str, Any] = {"retention": KeepLatest(1), "grace_seconds": 0, "durable": False}
    names, _ = run_threads(2, root, save_spread, num_prefixes=NUM_PREFIXES, **options)
    assert {name.partition("/")[0] for name in names if name.endswith(".distcp")} == {"00", "10"}
    with open_store(root, grace_seconds=0) as store:
        checkpoint = store[2]
        assert checkpoint.verify().ok
        found = {"same": torch.zeros(700_000, dtype=torch.int64)}
        load(found, storage_reader=FileSystemReader(checkpoint.uri), no_dist=True)
        assert torch.equal(found["same"], torch.arange(700_000))
        store.prune()
    assert [path.name for path in (root / "checkpoints").iterdir()] == [Path(checkpoint.uri).name]
