"""A replica, into which another tool copies the objects of a store in any order: readers use what has arrived whole."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckptstore import CheckpointStore, KeepLatest, NoUsableCheckpoint, StoreForked, StoreMissing, open_store
from ckptstore.errors import CheckpointDamaged, CkptstoreError, RecordMissing
from ckptstore.format.layout import HINT_KEY, record_key
from ckptstore.tools.cli import main


def make_store(root: Path) -> list[str]:
    """A store with five live checkpoints, one of which was annotated, and one in the trash. Returns its keys."""
    with open_store(root, retention=KeepLatest(5)) as store:
        for step in range(6):
            store.save(step, {"epoch": step}, metrics={"loss": 1.0})
        store.annotate(3, {"score": 0.5})
        store.pin(2)
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def bring(source: Path, replica: Path, keys: list[str]) -> None:
    for key in keys:
        (replica / key).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / key, replica / key)


def loaded(store: CheckpointStore) -> int | None:
    state = {"epoch": -1}
    found = store.load(state)
    assert found is None or found.step == state["epoch"]
    return None if found is None else found.step


READERS: dict[str, Callable[[CheckpointStore], Any]] = {
    "load": loaded,
    "list": lambda store: [checkpoint.step for checkpoint in store],
    "latest": lambda store: found.step if (found := store.latest()) else None,
    "best": lambda store: store.best("loss", "min"),
    "history": lambda store: [save.step for save in store.history()],
    "trash": lambda store: [item.step for item in store.trash()],
    "follow": lambda store: [checkpoint.step for checkpoint in store.follow(timeout_seconds=0)],
}


@pytest.mark.parametrize("seed", range(2))
def test_readers_of_a_replica_get_what_is_whole_or_hear_that_it_is_not_all_here(tmp_path: Path, seed: int) -> None:
    keys = make_store(tmp_path / "source")
    random.Random(seed).shuffle(keys)
    replica = tmp_path / "replica"
    found: dict[str, Any] = {}
    for end in range(1, len(keys) + 1):
        bring(tmp_path / "source", replica, keys[end - 1 : end])
        for name, read in READERS.items():
            try:
                with open_store(replica, group="solo") as store:
                    found[name] = read(store)
            except (NoUsableCheckpoint, StoreMissing):
                found[name] = None
            except CkptstoreError as error:
                if type(error) is CheckpointDamaged or "not here yet" not in str(error):
                    raise
    live = [1, 2, 3, 4, 5]
    whole = {"load": 5, "list": live, "latest": 5, "history": [0, *live], "trash": [0], "follow": live}
    assert found == {**whole, "best": found["best"]}


def lacking(tmp_path: Path, *numbers: int, hint: bool = True) -> Path:
    """A replica without these records."""
    make_store(tmp_path / "source")
    shutil.copytree(tmp_path / "source", tmp_path / "replica")
    for key in [*map(record_key, numbers), *([] if hint else [HINT_KEY])]:
        os.unlink(tmp_path / "replica" / key)
    return tmp_path / "replica"


def test_the_newest_whole_one_is_the_latest_where_its_record_is_not_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(lacking(tmp_path, 7), group="solo") as store, caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [checkpoint.step for checkpoint in store] == [1, 2, 3, 4]
            assert loaded(store) == 4
        assert caplog.text.count("log/0000000007.json is missing: it is lost, or, in a replica, not here yet") == 1


@pytest.mark.parametrize("hint", [True, False])
def test_a_job_that_takes_a_replica_over_hears_what_is_missing(tmp_path: Path, hint: bool) -> None:
    replica = lacking(tmp_path, 3, 4, hint=hint)
    before = sorted(path for path in replica.rglob("*") if path.is_file() and "probe" not in path.parts)
    with open_store(replica, group="solo") as store, pytest.raises(StoreForked, match=r"0000000003.json") as caught:
        store.resume({"epoch": -1})
    assert "wait until all of it is here" in str(caught.value)
    if hint:
        assert "0000000004.json" in str(caught.value)
    assert sorted(path for path in replica.rglob("*") if path.is_file() and "probe" not in path.parts) == before
    bring(tmp_path / "source", replica, [record_key(3), record_key(4)])
    with open_store(replica, group="solo") as store:
        assert store.resume({"epoch": -1}).step == 5


def test_a_job_that_writes_leaves_no_missing_record_out(tmp_path: Path) -> None:
    with open_store(tmp_path / "run", group="solo") as store:
        store.save(1, {"epoch": 1})
        for _ in range(70):  # as many as the chain is checked for, and more
            store.annotate(1, {"score": 0.5})
    (tmp_path / "run" / record_key(2)).unlink()
    with open_store(tmp_path / "run", group="solo") as store:
        with pytest.raises(RecordMissing, match=r"0000000002.json is missing"):
            store.resume({"epoch": -1})
        with pytest.raises(RecordMissing):
            store.save(2, {"epoch": 2})


def test_a_follower_waits_for_the_record_that_is_next(tmp_path: Path) -> None:
    replica = lacking(tmp_path, 4)
    seen: list[int] = []
    with open_store(replica, group="solo") as store:
        for checkpoint in store.follow(timeout_seconds=30):
            seen.append(checkpoint.step)
            if len(seen) == 1:
                bring(tmp_path / "source", replica, [record_key(4)])
            if len(seen) == 5:
                break
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("command", ["ls", "ls --trash", "report --json", "verify --all"])
def test_commands_say_what_is_not_here(tmp_path: Path, command: str, caplog: pytest.LogCaptureFixture) -> None:
    replica = lacking(tmp_path, 5)
    result = CliRunner().invoke(main, [*command.split(), str(replica)])
    said = result.output + caplog.text
    assert "damaged" not in said.replace('"damaged"', "")  # the name of a field
    assert "0000000005.json is missing" in said
    assert "not here yet" in said
