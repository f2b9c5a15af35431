"""A copy of a store that is made again: what is later stays later, pins come along, what was replaced goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from trees import save_tree, steps

from ckptstore import CheckpointStore, KeepAll, KeepLatest, open_store
from ckptstore.interchange import copying
from ckptstore.interchange.copying import CopyReport, copy_store
from ckptstore.transfer.opened import open_place


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with open_store(tmp_path / "store", retention=KeepAll()) as opened:
        for step in (100, 200, 300):
            save_tree(opened, tmp_path, step)
        yield opened


def copied(store: CheckpointStore, tmp_path: Path) -> CopyReport:
    place = open_place(tmp_path / "copy")
    try:
        return copy_store(store, place)
    finally:
        place.close()


def test_what_comes_late_does_not_become_the_latest(store: CheckpointStore, tmp_path: Path) -> None:
    store.remove(200)
    copied(store, tmp_path)
    store.restore(200)
    report = copied(store, tmp_path)
    assert (report.steps, report.present) == ((), (100, 300))
    assert "become its latest" in next(iter(report.left_out.values()))
    save_tree(store, tmp_path, 400)
    assert copied(store, tmp_path).steps == (400,)
    with open_store(tmp_path / "copy") as copy:
        assert steps(copy) == [100, 300, 400]
        copy.retain(KeepLatest(1))
    assert len(copied(store, tmp_path).left_out) == 2  # the trash of a copy holds what its versions of weights need
    with open_store(tmp_path / "copy") as copy:
        assert copy.latest().step == 400  # type: ignore[union-attr]


@pytest.mark.parametrize("is_late", [False, True])
def test_pins_come_with_a_copy_that_goes_on(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    if is_late:
        copied(store, tmp_path)
    store.pin(100)
    if not is_late:
        with monkeypatch.context() as patch:
            patch.setattr(copying, "Pin", killed)
            with pytest.raises(KeyboardInterrupt):
                copied(store, tmp_path)
    copied(store, tmp_path)
    with open_store(tmp_path / "copy") as copy:
        assert [entry.checkpoint.step for entry in copy.entries() if entry.is_pinned] == [100]


def test_a_step_that_was_saved_again_replaces_its_copy(store: CheckpointStore, tmp_path: Path) -> None:
    copied(store, tmp_path)
    save_tree(store, tmp_path, 300)
    copied(store, tmp_path)
    with open_store(tmp_path / "copy") as copy:
        assert steps(copy) == steps(store) == [100, 200, 300]
