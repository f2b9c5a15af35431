"""What the changes alone lead to is what the records say, for every history that the rules allow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_entries import entry

from ckptstore.errors import CkptstoreError
from ckptstore.format.changes import Annotate, Change, Claim, Commit, Noop, Pin, Remove, Restore, Resumed, Unpin
from ckptstore.format.order import SaveOrder
from ckptstore.format.record import Record
from ckptstore.tools.report.history import History

KINDS = ["claim", "commit", "commit", "replace", "remove", "rollback", "drop", "pin", "unpin"]
KINDS += ["restore", "resume", "annotate", "noop"]
CHOICES = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 50), st.booleans()), max_size=40)


def change(kind: str, at: int, flag: bool, newest: Record | None) -> Change | None:
    """A change of that kind, on something that is there; the rules may refuse it."""
    state = newest.state if newest else None
    live = list(state.live) if state else []
    trash = sorted(state.trash) if state else []
    some = [number for number in live if number % (at + 1) == 0]
    match kind:
        case "claim":
            return Claim("start", at + 1, above_epoch=at if flag else 0)
        case "commit" | "replace" if state is not None and state.epoch:
            same = [number for number in live if number % 3 == at % 3] if kind == "replace" else []
            dropped = [number for number in some if number not in same] if flag else []
            made, reasons = entry(at, state.epoch, size_bytes=at + 1), dict.fromkeys(dropped[:1], "old")
            return Commit(made, tuple(same), tuple(dropped), reasons)
        case "remove" if some:
            return Remove(trash=tuple(some), reason="by hand")
        case "rollback" if len(live) > 1:
            return Remove(trash=tuple(live[at % (len(live) - 1) + 1 :]), reason="roll back")
        case "drop" if trash:
            return Remove(drop=tuple(trash[: at % len(trash) + 1]))
        case "pin" | "unpin" if some:
            return Pin(tuple(some)) if kind == "pin" else Unpin(tuple(some))
        case "restore" if trash:
            return Restore(tuple(trash[at % len(trash) :]), pin=flag)
        case "resume" if state is not None and state.epoch:
            return Resumed(state.epoch, SaveOrder(state.epoch, 0) if flag else None)
        case "annotate" if some:
            return Annotate(some[0], {f"metric {at}": float(at)})
        case "noop":
            return Noop()
    return None


def log_of(choices: list[tuple[str, int, bool]]) -> list[Record]:
    made: list[Record] = []
    for kind, at, flag in choices:
        newest = made[-1] if made else None
        wanted = change(kind, at, flag, newest)
        if wanted is None:
            continue
        try:
            made.append(Record.following(newest, wanted, write_id="w", created_at=float(len(made))))
        except CkptstoreError:
            continue
    return [Record.decode(record.encode(), record.number) for record in made]


@given(CHOICES)
def test_a_history_agrees_with_the_records(choices: list[Any]) -> None:
    made = log_of(choices)
    history = History()
    for record in made:
        history.add(record)
        state = history.settle()
        assert history.problems == []
        sizes = {number: life.entry.size_bytes for number, life in history.lives.items()}
        assert {number for number, life in history.lives.items() if life.status == "live"} == set(state.live)
        assert {number for number, life in history.lives.items() if life.status == "trash"} == set(state.trash)
        usage = history.usage(1e12)
        assert usage.live_bytes == sum(history.lives[number].entry.held_bytes for number in state.live)
        assert usage.live_bytes + usage.trash_bytes == history._held[-1][1]
        assert usage.price_per_month == pytest.approx(history._held[-1][1])
        if history.sizes:
            point = history.sizes[-1]
            assert point.live_bytes == sum(sizes[number] for number in state.live)
            assert point.trash_bytes == sum(sizes[number] for number in state.trash)
            assert point.freed_bytes == sum(sizes.values()) - point.live_bytes - point.trash_bytes
        for number, removed_by in state.trash.items():
            assert history.lives[number].removed_at == made[removed_by - 1].created_at
    assert len(history.changes) == len(made)


@given(CHOICES, st.sets(st.integers(0, 39), max_size=3))
def test_records_that_cannot_be_read_hide_no_others(choices: list[Any], broken: set[int]) -> None:
    made = log_of(choices)
    broken = {at for at in broken if at < len(made) - 1}
    history = History()
    for at, record in enumerate(made):
        history.add(None if at in broken else record)
    state = history.settle()
    assert len(history.problems) == len(broken)
    known = set(history.lives)
    assert {number for number, life in history.lives.items() if life.status == "live"} == known & set(state.live)
    assert {number for number, life in history.lives.items() if life.status == "trash"} == known & set(state.trash)
