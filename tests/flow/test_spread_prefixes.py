"""Files of a state that are spread over directories: the same checkpoint, for every reader."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import run_threads

from ckptstore import CheckpointStore, InvalidInput, KeepLatest, open_store
from ckptstore.format.naming import spread_directory

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


def save(store: CheckpointStore, rank: int) -> list[str]:
    """Save twice, the second time incrementally; the names in the last checkpoint."""
    state: dict[str, Any] = {"own": torch.full((300_000,), float(rank)), "same": torch.arange(700_000), "epoch": 3}
    for step in (1, 2):
        checkpoint = store.save(step, state, incremental=True)
    found = {"own": torch.zeros(300_000), "same": torch.zeros(700_000, dtype=torch.int64), "epoch": 0}
    assert store.load(found).step == 2
    assert all(torch.equal(found[name], state[name]) for name in ("own", "same"))
    return sorted(file.name for file in checkpoint.files)


def test_save_load_prune_and_stock_readers(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader, load

    root = tmp_path / "store"
    options: dict[str, Any] = {"retention": KeepLatest(1), "grace_seconds": 0, "durable": False}
    names, _ = run_threads(2, root, save, num_prefixes=NUM_PREFIXES, **options)
    assert {name.partition("/")[0] for name in names if name.endswith(".distcp")} == {"00", "10"}
    with open_store(root, grace_seconds=0) as store:
        checkpoint = store[2]
        assert checkpoint.verify().ok
        found = {"same": torch.zeros(700_000, dtype=torch.int64)}
        load(found, storage_reader=FileSystemReader(checkpoint.uri), no_dist=True)
        assert torch.equal(found["same"], torch.arange(700_000))
        store.prune()
    assert [path.name for path in (root / "checkpoints").iterdir()] == [Path(checkpoint.uri).name]
