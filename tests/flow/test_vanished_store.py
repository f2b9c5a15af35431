"""A store that is lost, replaced or taken to pieces under a job, and a replica of which not all is here yet."""

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
from forked_ranks import run_ranks
from trees import Once

import ckptstore
from ckptstore import CheckpointStore, KeepLatest, NoUsableCheckpoint, StoreForked, StoreMissing, open_store
from ckptstore.errors import CheckpointDamaged, CkptstoreError, RecordMissing
from ckptstore.testing import Call, with_faults
from ckptstore.tools.cli import main

pytestmark = pytest.mark.slow

Loss = Callable[[Path], object]


def replaced_by_an_older_copy(root: Path) -> None:
    shutil.rmtree(root)
    shutil.copytree(root.with_name("before"), root)


def replaced_by_another(root: Path) -> None:
    """One with as many records, of the very same sizes."""
    for path in (root / "log").iterdir():
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data[::-1])


LOSSES: dict[str, tuple[Loss, str]] = {
    "all of it": (shutil.rmtree, "log/0000000003.json is gone"),
    "moved away": (lambda root: root.rename(root.with_name("away")), "log/0000000003.json is gone"),
    "an older copy": (replaced_by_an_older_copy, "log/0000000003.json is gone"),
    "another store": (replaced_by_another, "log/0000000003.json is another one"),
    "the log": (lambda root: shutil.rmtree(root / "log"), "log/0000000003.json is gone"),
    "the newest record": (lambda root: (root / "log/0000000003.json").unlink(), "log/0000000003.json is gone"),
    "checkpoints": (lambda root: shutil.rmtree(root / "checkpoints"), "ckptstore.json is gone, of the latest"),
}


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def begun(root: Path, **options: Any) -> ckptstore.CheckpointStore:
    """A store with two checkpoints, and a copy from before the second beside it."""
    store = ckptstore.open_store(root, durable=False, **options)
    store.save(0, {"a": 0})
    if not root.with_name("before").exists():
        shutil.copytree(root, root.with_name("before"))
    store.save(1, {"a": 1})
    return store


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("act", ["save", "save_async", "pin", "prune"])
def test_the_next_change_fails_by_name(tmp_path: Path, loss: str, act: str) -> None:
    lose, text = LOSSES[loss]
    if loss == "checkpoints" and act in ("pin", "prune"):
        pytest.skip("they touch no checkpoint that is gone")
    root = tmp_path / "store"
    acts: dict[str, Callable[[Any], Any]] = {
        "save": lambda store: store.save(2, {"a": 2}),
        "save_async": lambda store: store.save_async(2, {"a": 2}).result(),
        "pin": lambda store: store.pin(1),
        "prune": lambda store: store.roll_back(0),
    }
    with begun(root) as store:
        lose(root)
        left = files_of(root) if root.exists() else {}
        for _ in range(2):
            with pytest.raises(StoreMissing, match=f"{text}|There is no store at") as raised:
                acts[act](store)
            assert raised.value.committed is False
            assert not act.startswith("save") or "ckptstore cp --salvage" in (raised.value.hint or "")
    assert (files_of(root) if root.exists() else {}).items() <= left.items(), "nothing was written there"


@pytest.mark.parametrize("loss", ["all of it", "the log"])
def test_a_loss_when_all_bytes_are_stored(tmp_path: Path, loss: str) -> None:
    lost = Once("create", "ckptstore.json", lambda: LOSSES[loss][0](tmp_path / "store"))
    with begun(tmp_path / "store") as store, pytest.raises(StoreMissing, match=r"log/0000000003.json is gone"):
        with_faults(store, lost).save(2, {"a": 2})
    assert lost.action is None
    assert not list((tmp_path / "store").glob("log/*"))


def lose_and_save(root: str) -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    with ckptstore.open_store(root, durable=False) as store:
        store.save(0, {"a": 0})
        if dist.get_rank() == 0:
            shutil.rmtree(root)
        said = "saved"
        try:
            store.save(1, {"a": 1})
        except StoreMissing as error:
            said = error.message
    dist.destroy_process_group()
    return said


def test_all_ranks_hear_of_it(tmp_path: Path) -> None:
    found = run_ranks(2, lose_and_save, str(tmp_path / "store"))
    assert all("log/0000000002.json is gone" in text for text in found), found


def test_a_job_does_not_begin_anew_beside_its_checkpoints(tmp_path: Path) -> None:
    begun(tmp_path / "store").close()
    shutil.rmtree(tmp_path / "store/log")
    with ckptstore.open_store(tmp_path / "store") as store:
        for act in (lambda: store.resume({"a": 9}), lambda: store.save(2, {"a": 2})):
            with pytest.raises(StoreMissing, match=r"The log of the store at .* is gone, and its checkpoints are not"):
                act()


def test_a_job_that_begins_beside_another_one_does_not_take_its_log_for_lost(tmp_path: Path) -> None:
    """It has seen an empty log, and lists the checkpoints when the other one has saved."""
    others: list[ckptstore.CheckpointStore] = []

    def save_between(call: Call) -> None:
        if (call.verb, call.key, call.phase) == ("list", "checkpoints/", "before") and not others:
            others.append(begun(tmp_path / "store"))

    with with_faults(ckptstore.open_store(tmp_path / "store", durable=False), save_between) as store:
        store.save(1, {"a": 1})
        assert [checkpoint.step for checkpoint in store] == [0, 1]
    assert len(others) == 1
    others[0].close()


def test_what_comes_back_is_tolerated_by_who_asks_for_it(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with begun(root) as store:
        root.rename(tmp_path / "unmounted")
        assert isinstance(store.save_async(2, {"a": 2}, max_failures=1).error(), StoreMissing)
        with pytest.raises(StoreMissing) as caught:
            store.save_async(3, {"a": 3}, max_failures=1)
        assert caught.value.step == 3
        (tmp_path / "unmounted").rename(root)
        shutil.rmtree(store[0].uri)  # of an older one nobody needs to know
        assert store.save_async(4, {"a": 4}).result() is not None
    with ckptstore.open_store(root) as store:
        assert [checkpoint.step for checkpoint in store] == [0, 1, 4]


def make_store(root: Path) -> list[str]:
    """A store with five live checkpoints, one of which was annotated, and one in the trash. Returns its keys."""
    with open_store(root, retention=KeepLatest(5)) as store:
        for step in range(6):
            store.save(step, {"epoch": step}, metrics={"loss": 1.0})
        store.annotate(3, {"score": 0.5})
        store.pin(2)
    return keys_of(root)


def keys_of(root: Path) -> list[str]:
    files = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in files if "probe" not in path.parts)


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
    for key in [*(f"log/{number:010}.json" for number in numbers), *([] if hint else ["latest.json"])]:
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
    before = keys_of(replica)
    with open_store(replica, group="solo") as store, pytest.raises(StoreForked, match=r"0000000003.json") as caught:
        store.resume({"epoch": -1})
    assert "wait until all of it is here" in str(caught.value)
    if hint:
        assert "0000000004.json" in str(caught.value)
    assert keys_of(replica) == before
    bring(tmp_path / "source", replica, ["log/0000000003.json", "log/0000000004.json"])
    with open_store(replica, group="solo") as store:
        assert store.resume({"epoch": -1}).step == 5


def test_a_job_that_writes_leaves_no_missing_record_out(tmp_path: Path) -> None:
    with open_store(tmp_path / "run", group="solo") as store:
        store.save(1, {"epoch": 1})
        for _ in range(70):  # as many as the chain is checked for, and more
            store.annotate(1, {"score": 0.5})
    (tmp_path / "run" / "log/0000000002.json").unlink()
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
                bring(tmp_path / "source", replica, ["log/0000000004.json"])
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
