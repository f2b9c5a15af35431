"""A store that is removed, replaced or taken to pieces under a running job: the next save says so, on all ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks

import ckptstore
from ckptstore.errors import StoreMissing
from ckptstore.testing import Call, with_faults

pytestmark = pytest.mark.slow

Loss = Callable[[Path], object]


def first_of(directory: Path, pattern: str) -> Path:
    return min(directory.glob(pattern))


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
def test_a_loss_when_all_bytes_are_stored(tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.saving import commit

    write = commit.write_manifest

    def written(*given: Any, **options: Any) -> None:
        LOSSES[loss][0](tmp_path / "store")
        write(*given, **options)

    with begun(tmp_path / "store") as store:
        monkeypatch.setattr(commit, "write_manifest", written)
        with pytest.raises(StoreMissing, match=r"log/0000000003.json is gone"):
            store.save(2, {"a": 2})
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


def test_a_restart_goes_on_from_an_older_checkpoint(tmp_path: Path) -> None:
    """The newest one was deleted by hand: what a resume has passed over is no reason to refuse a save."""
    begun(tmp_path / "store").close()
    shutil.rmtree(first_of(tmp_path / "store", "checkpoints/step-0000000001-*"))
    with ckptstore.open_store(tmp_path / "store", durable=False) as store:
        state = {"a": 9}
        store.resume(state)
        assert state == {"a": 0}
        store.save(1, {"a": 1}, exists="replace")
        store.save(2, {"a": 2})


def test_a_mount_that_comes_back(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with begun(root) as store:
        root.rename(tmp_path / "away")
        with pytest.raises(StoreMissing):
            store.save(2, {"a": 2})
        (tmp_path / "away").rename(root)
        assert store.save(2, {"a": 2}).step == 2


def test_what_comes_back_is_tolerated_by_who_asks_for_it(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with begun(root) as store:
        root.rename(tmp_path / "unmounted")
        assert isinstance(store.save_async(2, {"a": 2}, max_failures=1).error(), StoreMissing)
        with pytest.raises(StoreMissing) as caught:
            store.save_async(3, {"a": 3}, max_failures=1)
        assert caught.value.step == 3
        (tmp_path / "unmounted").rename(root)
        assert store.save_async(4, {"a": 4}).result() is not None
    with ckptstore.open_store(root) as store:
        assert [checkpoint.step for checkpoint in store] == [0, 1, 4]
