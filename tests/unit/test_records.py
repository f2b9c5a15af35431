"""The log as pure values: the text of number sets, the rules of `apply`, and records as bytes."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from log_entries import entry

from ckptstore.errors import (
    CheckpointDamaged,
    CheckpointGone,
    InvalidInput,
    StoreFenced,
    UnsupportedVersion,
)
from ckptstore.format.changes import (
    EMPTY,
    Annotate,
    Change,
    Claim,
    Commit,
    Noop,
    Pin,
    Remove,
    Restore,
    Resumed,
    StoreState,
    Unpin,
    apply,
)
from ckptstore.format.entry import CheckpointEntry, Thinning
from ckptstore.format.order import BEGINNING, MAX_VOIDS, SaveOrder, Void, void_of, with_void
from ckptstore.format.ranges import Numbers, decode_sequence, encode_sequence
from ckptstore.format.record import Record, sealed

CLAIM = Claim("token", 2)


def first() -> Record:
    """The first record of a log."""
    return Record.following(None, CLAIM, write_id="00" * 16, created_at=1.0)


def states(*changes: Change) -> StoreState:
    """The state after these changes, as records 1, 2, ..."""
    state = EMPTY
    for number, change in enumerate(changes, start=1):
        state = apply(state, number, change)
    return state


def commits(count: int) -> list[Change]:
    """A claim, then `count` checkpoints: numbers 2 to count + 1."""
    return [CLAIM, *(Commit(entry(step)) for step in range(count))]


THINNED = Thinning(dropped=("optimizer.*",), attempt=str(entry(7).attempt), size_bytes=9, thinned_at=1.5)


def thin(number: int, step: int = 0) -> Commit:
    """The checkpoint with that number becomes a thinned one."""
    return Commit(entry(step, thinned=THINNED), thins=number)


# Number sets as text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([3, 4, 5, 6], "3-6"),
        ([3, 4], "3 4"),
        ([10, 20, 30, 31, 32], "10-30/10 31 32"),
        ([3, 10, 11, 12], "3 10-12"),
        ([5, 5, 5, 9], "5*3 9"),
        ([9, 7, 5], "9-5/2"),
        ([3, 2, 1], "3-1"),
    ],
)
def test_sequences_have_one_text(numbers: list[int], text: str) -> None:
    assert encode_sequence(numbers) == text
    assert decode_sequence(text, limit=40) == numbers


@given(st.lists(st.integers(0, 10**10)))
def test_any_sequence_round_trips(numbers: list[int]) -> None:
    assert decode_sequence(encode_sequence(numbers), limit=10**10) == numbers


@given(st.sets(st.integers(0, 400)), st.sets(st.integers(0, 400)), st.integers(0, 500))
def test_numbers_are_a_set(numbers: set[int], others: set[int], more: int) -> None:
    one = Numbers(numbers)
    assert one == numbers
    assert list(one) == sorted(numbers)
    assert list(reversed(one)) == sorted(numbers, reverse=True)
    assert len(one) == len(numbers)
    assert one.highest == max(numbers, default=None)
    assert (more in one) == (more in numbers)
    assert one.with_number(more) == numbers | {more}
    assert str(one.with_number(more)) == str(Numbers(numbers | {more}))
    assert one.without(others) == numbers - others
    assert Numbers.decode(one.encode(), limit=400) == numbers


@given(st.lists(st.integers(1, 50), max_size=60))
def test_numbers_grow_at_the_end_as_if_built_at_once(gaps: list[int]) -> None:
    grown, numbers, top = Numbers(), [], 0
    for gap in gaps:
        top += gap
        numbers.append(top)
        grown = grown.with_number(top)
        assert str(grown) == str(Numbers(numbers))


@pytest.mark.parametrize(
    "text",
    ["x", "3-", "-3", "3--5", "5*0", "3-8/2", "3-8/0", "3-3", "1 ", "²", "1-50", "9*99", "zAAAA", "z", "z!", "41"],
)
def test_hostile_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_sequence(text, limit=40)


@pytest.mark.parametrize("text", ["3 3", "5 4", "5*3", "9-5/2", "3-9 8"])
def test_a_set_is_in_ascending_order(text: str) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Numbers.decode(text, limit=40)


def test_a_packed_set_is_bounded_by_the_limit() -> None:
    numbers = sorted(random.Random(1).sample(range(1, 5000), 1500))
    text = Numbers(numbers).encode()
    assert text.startswith("z")
    assert Numbers.decode(text, limit=5000) == set(numbers)
    for limit in (100, 4000):
        with pytest.raises(ValueError, match="too"):
            Numbers.decode(text, limit=limit)
    with pytest.raises(ValueError, match=r"."):
        Numbers.decode(text[:-8], limit=5000)


# The rules


@pytest.mark.parametrize("epoch", [1, 3])
@pytest.mark.parametrize("kind", ["commit", "remove", "pin", "unpin", "restore", "annotate"])
def test_another_epoch_than_the_highest_is_fenced(kind: str, epoch: int) -> None:
    state = states(*commits(2), CLAIM)
    change: Change = {
        "commit": Commit(entry(9, epoch)),
        "remove": Remove(trash=(2,), epoch=epoch),
        "pin": Pin((2,), epoch),
        "unpin": Unpin((2,), epoch),
        "restore": Restore((2,), epoch=epoch),
        "annotate": Annotate(2, {"eval_loss": 1.0}, epoch),
    }[kind]
    with pytest.raises(StoreFenced) as caught:
        apply(state, 5, change)
    assert caught.value.committed is False


def test_a_pinned_checkpoint_that_is_replaced_stays_live() -> None:
    state = states(*commits(1), Pin((2,)), Commit(entry(0), replaces=(2,)))
    assert state.live == {2, 4}
    assert state.trash == {}


def test_a_replaced_resume_source_is_trashed_but_never_dropped() -> None:
    state = states(*commits(1), CLAIM, Commit(entry(0, 2), replaces=(2,)))
    assert state.trash == {2: 4}
    assert state.droppable([2]) == ()
    with pytest.raises(InvalidInput, match="resumed from"):
        apply(state, 5, Remove(drop=(2,)))
    claimed = apply(state, 5, CLAIM)
    assert claimed.droppable([2]) == (2,)
    assert apply(claimed, 6, Remove(drop=(2,))).trash == {}


@pytest.mark.parametrize("number", [2, 3])
def test_retention_cannot_trash_what_is_pinned_or_resumed_from(number: int) -> None:
    state = states(*commits(2), CLAIM, Pin((2,)), Commit(entry(7, 2)))
    assert state.resume_from == 3
    with pytest.raises(InvalidInput, match=r"pinned|resumed from"):
        apply(state, 7, Commit(entry(8, 2), drops=(number,)))


def test_a_person_trashes_the_resume_source_and_nothing_pinned() -> None:
    state = states(*commits(2), CLAIM, Pin((2,)), Commit(entry(7, 2)))
    with pytest.raises(InvalidInput, match="pinned"):
        apply(state, 7, Remove(trash=(2,)))
    with pytest.raises(InvalidInput, match="pinned"):
        apply(state, 7, Remove(trash=(2, 3, 6)))
    trashed = apply(state, 7, Remove(trash=(3,)))
    assert trashed.trash == {3: 7}
    assert trashed.droppable([3]) == ()


def test_the_latest_goes_only_in_a_roll_back() -> None:
    state = states(*commits(4))
    assert apply(state, 6, Remove(trash=(4, 5), reason="roll back to step 1")).latest == 3
    for trash in [(2, 5), (2, 3, 5)]:
        with pytest.raises(InvalidInput, match="roll back"):
            apply(state, 6, Remove(trash=trash))
    empty = apply(state, 6, Remove(trash=(2, 3, 4, 5), voids=Void(BEGINNING, SaveOrder(2, 0))))
    assert (empty.latest, empty.resume_from) == (None, None)
    assert empty.droppable([2, 3, 4, 5]) == (2, 3, 4, 5)


def test_a_roll_back_names_what_is_pinned_above_the_target() -> None:
    state = states(*commits(4), Pin((4,)))
    with pytest.raises(InvalidInput, match=r"pinned, by number: \[4\]. Unpin"):
        apply(state, 7, Remove(trash=(4, 5)))


def test_a_roll_back_may_take_the_resume_source() -> None:
    state = apply(states(*commits(3), CLAIM), 6, Remove(trash=(3, 4)))
    assert (state.latest, state.resume_from) == (2, 4)
    assert state.droppable([3, 4]) == (3,)


@pytest.mark.parametrize("number", [1, 4, 99])
def test_what_is_not_live_is_gone(number: int) -> None:
    state = states(*commits(3), Remove(trash=(2, 3)), Remove(drop=(2,)), Commit(entry(8), drops=(4,)))
    changes = [
        Commit(entry(9), replaces=(number,)),
        Commit(entry(9), drops=(number,)),
        Commit(entry(9, bases=(number,))),
        Remove(trash=(number,)),
        Pin((number,)),
        Unpin((number,)),
    ]
    for change in changes:
        with pytest.raises(CheckpointGone):
            apply(state, 8, change)


def test_only_the_trash_can_be_dropped() -> None:
    state = states(*commits(3), Remove(trash=(2,)))
    with pytest.raises(InvalidInput, match="is live"):
        apply(state, 6, Remove(drop=(3,)))
    with pytest.raises(CheckpointGone):
        apply(state, 6, Remove(drop=(1,)))
    with pytest.raises(CheckpointGone, match="removed by record 5"):
        apply(state, 6, Remove(trash=(2,)))


def test_a_base_is_dropped_with_its_last_user_or_after() -> None:
    state = states(
        CLAIM, Commit(entry(1)), Commit(entry(2, bases=(2,))), Commit(entry(3, bases=(3,))), Commit(entry(4))
    )
    state = apply(state, 6, Remove(trash=(2,)))
    assert state.droppable([2]) == ()
    with pytest.raises(InvalidInput, match="holds files"):
        apply(state, 7, Remove(drop=(2,)))
    state = apply(state, 7, Remove(trash=(3, 4)))
    assert state.droppable([2, 3]) == ()
    assert state.droppable([2, 3, 4]) == (2, 3, 4)
    assert apply(state, 8, Remove(drop=(4,))).droppable([2, 3]) == (2, 3)
    assert apply(state, 8, Remove(drop=(2, 3, 4))) == StoreState(epoch=1, live=Numbers([5]))


@pytest.mark.parametrize("pin", [True, False])
def test_a_restore_takes_out_of_the_trash(pin: bool) -> None:
    state = states(*commits(4), Remove(trash=(2, 3)))
    restored = apply(state, 7, Restore((2,), pin=pin))
    assert (restored.live, dict(restored.trash), restored.latest) == ({2, 4, 5}, {3: 6}, 5)
    assert restored.pinned == ({2} if pin else set())
    with pytest.raises(CheckpointGone, match="not in the trash any more"):
        apply(restored, 8, Remove(drop=(99,)))
    with pytest.raises(InvalidInput, match="is live"):
        apply(restored, 8, Remove(drop=(2,)))


def test_what_is_live_or_dropped_is_not_restored() -> None:
    state = states(*commits(3), Remove(trash=(2, 3)), Remove(drop=(2,)))
    with pytest.raises(CheckpointGone, match="number 2 is not in the trash any more"):
        apply(state, 7, Restore((3, 2)))
    with pytest.raises(InvalidInput, match="number 4 is live"):
        apply(state, 7, Restore((4,)))


def test_a_restore_after_a_roll_back_makes_the_later_one_the_latest() -> None:
    state = states(*commits(3), Remove(trash=(3, 4)))
    assert (state.latest, apply(state, 6, Restore((4,))).latest) == (2, 4)


def test_the_base_of_what_is_restored_stays() -> None:
    state = states(CLAIM, Commit(entry(1)), Commit(entry(2, bases=(2,))), Commit(entry(3)), Remove(trash=(2, 3)))
    assert state.droppable([2, 3]) == (2, 3)
    restored = apply(state, 6, Restore((3,)))
    assert restored.droppable([2, 3]) == ()
    with pytest.raises(InvalidInput, match="holds files"):
        apply(restored, 7, Remove(drop=(2,)))


def test_an_annotation_lasts_as_long_as_its_checkpoint() -> None:
    state = states(*commits(3), Annotate(2, {"a": 1.0}), Annotate(3, {"a": 1.0}), Annotate(2, {"a": 2.0}))
    assert (dict(state.annotated), state.live) == ({2: 7, 3: 6}, {2, 3, 4})
    state = apply(apply(state, 8, Remove(trash=(2, 3))), 9, Annotate(3, {"a": 3.0}))
    assert dict(state.annotated) == {2: 7, 3: 9}, "also in the trash"
    state = apply(apply(state, 10, Restore((3,))), 11, Remove(drop=(2,)))
    assert dict(state.annotated) == {3: 9}
    state = states(*commits(2), Annotate(2, {"a": 1.0}), thin(2), Remove(drop=(2,)))
    assert dict(state.annotated) == {2: 4}, "the thinned one has it"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (Annotate(3, {"a": 1.0}), CheckpointGone),
        (Annotate(9, {"a": 1.0}), CheckpointGone),
        (Annotate(1, {"a": 1.0}), CheckpointGone),
        (Annotate(7, {"a": 1.0}), InvalidInput),
    ],
)
def test_what_is_not_there_is_not_annotated(change: Change, error: type[Exception]) -> None:
    state = states(*commits(3), Remove(trash=(3,)), Remove(drop=(3,)), thin(2))
    with pytest.raises(error):
        apply(state, 8, change)


def test_a_claim_without_ranks_and_an_annotation_without_metrics_are_refused() -> None:
    for make in (lambda: Claim("", 1), lambda: Claim("token", 0), lambda: Annotate(2, {})):
        with pytest.raises(InvalidInput, match=r"claim needs|no metric"):
            make()


@pytest.mark.parametrize("change", [Remove(), Pin(()), Unpin(()), Restore(())])
def test_a_change_that_names_nothing_is_refused(change: Change) -> None:
    with pytest.raises(InvalidInput, match="no checkpoint"):
        apply(states(*commits(1)), 3, change)


def test_a_noop_changes_nothing() -> None:
    state = states(*commits(2))
    assert apply(state, 4, Noop()) is state


# Invariants over any sequence of changes, and records as bytes

numbers_of = st.lists(st.integers(1, 30), max_size=4).map(tuple)
epochs = st.integers(1, 4)
metric_names = st.text(max_size=4).filter(lambda name: name != "$t")
metrics = st.dictionaries(metric_names, st.floats(), max_size=2)
orders = st.builds(SaveOrder, st.integers(1, 4), st.integers(0, 9))
changes = st.one_of(
    st.builds(
        Claim, st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 2)
    ),
    st.builds(
        lambda step, epoch, save_number, bases, found, replaces, drops: Commit(
            entry(step, epoch, save_number=save_number, bases=bases, metrics=found),
            replaces,
            drops,
            dict.fromkeys(drops, "why"),
        ),
        st.integers(0, 99),
        epochs,
        st.just(0) | st.integers(1, 9),
        st.just(()) | numbers_of,
        metrics,
        st.just(()) | numbers_of,
        st.just(()) | numbers_of,
    ),
    st.builds(
        lambda step, epoch, thins: Commit(entry(step, epoch, thinned=THINNED), thins=thins),
        st.integers(0, 99),
        epochs,
        st.integers(1, 30),
    ),
    st.builds(
        Remove,
        st.just(()) | numbers_of,
        st.just(()) | numbers_of,
        st.none() | epochs,
        st.text(max_size=9),
        st.none() | orders.map(lambda order: Void(SaveOrder(0, 0), order)),
        st.booleans(),
    ),
    st.builds(Pin, numbers_of, st.none() | epochs),
    st.builds(Unpin, numbers_of, st.none() | epochs),
    st.builds(Restore, numbers_of, st.booleans(), st.none() | epochs),
    st.builds(Resumed, epochs, st.none() | orders, st.just("step-0000000001-e0001-0123abcd"), st.integers(0, 9)),
    st.builds(
        Annotate,
        st.integers(1, 40),
        st.dictionaries(metric_names, st.floats(), min_size=1, max_size=2),
        st.none() | epochs,
    ),
    st.just(Noop()),
)


# Thinned checkpoints


def test_a_thinned_checkpoint_takes_the_place_and_the_pin_of_the_whole_one() -> None:
    state = states(*commits(3), Pin((2,)), thin(2))
    assert (state.live, state.pinned, dict(state.trash)) == ({3, 4, 6}, {6}, {2: 6})
    assert (state.in_order(), state.latest, dict(state.thinned)) == ([6, 3, 4], 4, {6: 2})
    assert apply(state, 7, CLAIM).resume_from == 4
    again = apply(state, 7, thin(6))
    assert (again.in_order(), dict(again.thinned), again.pinned) == ([7, 3, 4], {6: 2, 7: 2}, {7})
    dropped = apply(again, 8, Remove(drop=(2, 6)))
    assert (dropped.in_order(), dict(dropped.thinned)) == ([7, 3, 4], {7: 2})


def test_the_latest_and_the_resume_source_stay_whole() -> None:
    state = states(*commits(2), CLAIM, Commit(entry(7, 2)), Commit(entry(8, 2)))
    for number in (3, 6):
        with pytest.raises(InvalidInput, match="cannot be thinned"):
            apply(state, 7, Commit(entry(0, 2, thinned=THINNED), thins=number))
    with pytest.raises(CheckpointGone):
        apply(state, 7, Commit(entry(0, 2, thinned=THINNED), thins=4))
    with pytest.raises(InvalidInput, match="says what was dropped"):
        apply(state, 7, Commit(entry(0, 2), thins=2))


def test_a_directory_of_before_the_last_claim_is_refused() -> None:
    with pytest.raises(StoreFenced):
        apply(states(*commits(2), CLAIM), 5, thin(2))


def test_a_restore_exchanges_the_two_forms() -> None:
    state = states(*commits(2), thin(2), Restore((2,), pin=False))
    assert (state.live, dict(state.trash), state.in_order()) == ({2, 3}, {4: 5}, [2, 3])
    back = apply(state, 6, Restore((4,)))
    assert (back.live, back.pinned, dict(back.trash), back.in_order()) == ({3, 4}, {4}, {2: 6}, [4, 3])
    with pytest.raises(InvalidInput, match="not exchanged"):
        apply(
            states(*commits(2), thin(2), Restore((2,)), Remove(trash=(3,)), CLAIM, Commit(entry(9, 2))),
            9,
            Restore((4,)),
        )
    both = apply(state, 6, Remove(trash=(2,)))
    with pytest.raises(InvalidInput, match="only one can be live"):
        apply(both, 7, Restore((2, 4)))


def test_a_roll_back_ends_at_a_whole_one() -> None:
    state = states(*commits(3), thin(3))
    with pytest.raises(InvalidInput, match="is thinned"):
        apply(state, 6, Remove(trash=(4,)))
    rolled_back = apply(state, 6, Remove(trash=(4, 5)))
    assert (rolled_back.live, rolled_back.latest) == ({2}, 2)
    assert not apply(state, 6, Remove(trash=(2, 4, 5))).live


def test_files_that_others_refer_to_stay_when_their_checkpoint_is_thinned() -> None:
    state = states(CLAIM, Commit(entry(1)), Commit(entry(2, bases=(2,))), Commit(entry(3)), thin(2), thin(3))
    assert state.droppable([2, 3]) == (2, 3)
    assert state.droppable([2]) == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"live": "1", "trash": {"numbers": "1", "removed_by": "1"}},
        {"live": "1", "thinned": {"numbers": "3", "wholes": "2"}},
        {"live": "1", "thinned": {"numbers": "1", "wholes": "1"}},
        {"void": [[1, 5, 1, 5]]},
        {"void": [[number, 1, number, 2] for number in range(MAX_VOIDS + 1)]},
    ],
)
def test_a_state_that_contradicts_itself_is_damage(fields: dict[str, object]) -> None:
    value = json.loads(first().encode())
    value["state"].update(fields)
    with pytest.raises(CheckpointDamaged, match="not a record of the log"):
        _ = Record.decode(sealed(json.dumps(value).encode()), 1).state


def test_a_whole_checkpoint_and_a_thinned_one_are_not_live_in_one_place() -> None:
    value = json.loads(Record.following(first(), Noop(), write_id="w", created_at=0.0).encode())
    value["state"].update(live="1-2", thinned={"numbers": "2", "wholes": "1"})
    with pytest.raises(CheckpointDamaged, match="two live checkpoints have one place"):
        _ = Record.decode(sealed(json.dumps(value).encode()), 2).state


def test_another_process_gets_the_annotations_too() -> None:
    record = replace(first(), annotated={"loss": 1.0})
    assert Record.from_wire(record.to_wire()).annotated == {"loss": 1.0}


# The order of saves, and what is void in it


def test_saves_of_an_epoch_are_committed_in_their_order() -> None:
    state = states(CLAIM, Commit(entry(1, save_number=4)))
    assert state.save_number == 4
    for late in (3, 4):
        with pytest.raises(InvalidInput, match=f"save {late} of epoch 1 cannot be committed"):
            apply(state, 3, Commit(entry(2, save_number=late)))
    assert apply(state, 3, Commit(entry(2, save_number=5))).save_number == 5
    assert apply(state, 3, Commit(entry(2))).save_number == 4  # a record of before they were counted
    assert apply(state, 3, CLAIM).save_number == 0


def test_what_is_newer_than_the_source_of_a_job_is_void() -> None:
    state = states(CLAIM, CLAIM, Resumed(2, SaveOrder(1, 5)))
    newer = [SaveOrder(1, 6), SaveOrder(1, 10**9), SaveOrder(2, 0)]
    assert [void_of(state.void, order) is not None for order in newer] == [True] * 3
    good = [SaveOrder(1, 1), SaveOrder(1, 5), SaveOrder(2, 1), SaveOrder(3, 1)]
    assert [void_of(state.void, order) for order in good] == [None] * 4
    anew = states(CLAIM, CLAIM, Resumed(2, None))
    assert void_of(anew.void, SaveOrder(1, 1))
    assert not void_of(anew.void, SaveOrder(2, 1))
    again = apply(apply(state, 4, Commit(entry(9, 2, save_number=3))), 5, Resumed(2, SaveOrder(2, 2), next_save=7))
    voids = [number for number in range(1, 9) if void_of(again.void, SaveOrder(2, number))]
    assert voids == [3, 4, 5, 6]  # those that the job made before it went back, and none that it makes from now on


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (Resumed(1, None), StoreFenced),
        (Resumed(3, None), StoreFenced),
        (Resumed(2, SaveOrder(2, 9)), InvalidInput),
        (Resumed(2, SaveOrder(1, 1), next_save=2), InvalidInput),
        (Remove(trash=(3,), voids=Void(SaveOrder(1, 1), SaveOrder(1, 2))), InvalidInput),
        (Remove(trash=(4,), voids=Void(SaveOrder(1, 1), SaveOrder(3, 1))), InvalidInput),
    ],
)
def test_no_more_is_voided_than_may_be(change: Change, error: type[Exception]) -> None:
    state = states(CLAIM, CLAIM, *(Commit(entry(step, 2, save_number=step)) for step in (1, 2)))
    with pytest.raises(error):
        apply(state, 5, change)
    allowed = Remove(trash=(4,), voids=Void(SaveOrder(2, 1), SaveOrder(3, 0)))
    assert void_of(apply(state, 5, allowed).void, SaveOrder(2, 8))


@given(
    st.lists(
        st.tuples(orders, orders).filter(lambda pair: pair[0] < pair[1]).map(lambda pair: Void(*pair)),
        max_size=MAX_VOIDS,
    )
)
@example([Void(SaveOrder(1, 1), SaveOrder(2, 2)), Void(SaveOrder(2, 2), SaveOrder(3, 3))])
def test_voids_are_the_union_of_all_that_were_added(added: list[Void]) -> None:
    voids: tuple[Void, ...] = ()
    for void in added:
        voids = with_void(voids, void)
    every = [SaveOrder(epoch, number) for epoch in range(6) for number in range(12)]
    joined = [order for order in every if any(order in void for void in added)]
    found = [order for order in every if void_of(voids, order)]
    assert joined == found
    assert list(voids) == sorted(voids)


def test_the_oldest_voids_are_joined_when_there_are_many() -> None:
    state = EMPTY
    for epoch in range(1, 200):
        state = apply(state, 2 * epoch, CLAIM)
        state = apply(state, 2 * epoch + 1, Resumed(epoch, SaveOrder(epoch - 1, 5)))
    assert len(state.void) == MAX_VOIDS
    assert [void_of(state.void, SaveOrder(epoch, 5)) is None for epoch in range(1, 200)].count(True) == MAX_VOIDS
    assert not void_of(state.void, SaveOrder(198, 5))
    assert all(void_of(state.void, SaveOrder(epoch, 6)) for epoch in range(1, 199))


def metrics_of(change: Change) -> list[float]:
    found = change.entry if isinstance(change, Commit) else change
    return [*found.metrics.values()] if isinstance(found, CheckpointEntry | Annotate) else []


def check_invariants(state: StoreState, number: int) -> None:
    assert state.pinned <= state.live
    assert state.live.isdisjoint(state.trash)
    assert all(1 <= other <= number for other in (*state.live, *state.trash, *state.trash.values()))
    assert all(by > other for other, by in state.trash.items())
    held = {*state.live, *state.trash}
    assert all(base in held and users and users <= held for base, users in state.bases.items())
    assert state.resume_from is None or state.resume_from in held
    assert state.annotated.keys() <= held
    assert all(number < by for number, by in state.annotated.items())
    assert not {*state.droppable(state.trash)} & {state.resume_from, state.latest, *state.pinned}
    assert all(void.before <= (state.epoch + 1, 0) for void in state.void)  # a job to come begins in the clear
    assert state.thinned.keys() <= held
    assert state.latest not in state.thinned
    places = [state.place(other) for other in state.in_order()]
    assert places == sorted(set(places))


@given(st.lists(changes, max_size=40))
def test_every_history_keeps_the_invariants_and_survives_encoding(history: list[Change]) -> None:
    newest: Record | None = None
    for change in [CLAIM, *history]:
        before = newest.state if newest else EMPTY
        try:
            record = Record.following(newest, change, write_id="ff" * 16, created_at=2.5)
        except (InvalidInput, CheckpointGone, StoreFenced):
            continue
        assert record.state.epoch > before.epoch if isinstance(change, Claim) else record.state.epoch == before.epoch
        assert (record.state.latest or 0) >= (before.latest or 0) or isinstance(change, Remove)
        gone = {*before.live, *before.trash} - {*record.state.live, *record.state.trash}
        assert gone <= (set(change.drop) if isinstance(change, Remove) else set())
        check_invariants(record.state, record.number)
        data = record.encode()
        again = Record.decode(data, record.number)
        assert again.state == record.state
        assert again.sha256 == record.sha256
        assert again.encode() == data
        if not any(math.isnan(value) for value in metrics_of(change)):  # NaN differs from itself
            assert again.change == record.change
        newest = again


def largest_state_bytes(*, saves: int, keep_last: int, keep_every: int, restart_every: int, seed: int) -> int:
    """Of a run that prunes after each save, with an irregular grace period, and restarts now and then."""
    chance = random.Random(seed)
    newest: Record | None = None
    largest = 0

    def add(change: Change) -> Record:
        nonlocal largest
        record = Record.following(newest, change, write_id="ab" * 16, created_at=1.0)
        largest = max(largest, len(json.dumps(record.encoded_state)))
        return record

    recent: list[int] = []
    for step in range(saves):
        if step % restart_every == 0:
            newest = add(CLAIM)
        assert newest
        epoch, source = newest.state.epoch, newest.state.resume_from
        old = recent.pop(0) if len(recent) == keep_last else None
        drops = (old,) if old is not None and old != source and old % keep_every else ()
        newest = add(Commit(entry(step, epoch), drops=drops))
        recent.append(newest.number)
        over = newest.number - chance.choice([3, 4, 12])
        expired = newest.state.droppable([number for number, by in newest.state.trash.items() if by < over])
        if expired:
            newest = add(Remove(drop=expired, epoch=epoch))
    return largest


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "restart_every"),
    [(1, 10**9, 10**9), (3, 10, 50), (5, 7, 300), (10**9, 1, 40), (10**9, 1, 10**9)],
)
def test_the_state_stays_below_4_kib_over_long_histories(keep_last: int, keep_every: int, restart_every: int) -> None:
    size = largest_state_bytes(
        saves=3000, keep_last=keep_last, keep_every=keep_every, restart_every=restart_every, seed=1
    )
    assert size < 4096


def test_many_irregular_live_numbers_are_packed() -> None:
    live = Numbers(random.Random(2).sample(range(1, 20_000), 2000))
    assert len(live.encode()) < 4096 < len(str(live))


def test_a_record_keeps_its_exact_bytes() -> None:
    record = Record.following(None, Claim("täglich", 2), write_id="00" * 16, created_at=1.0)
    data = record.encode()
    spaced = sealed(json.dumps(json.loads(data), indent=2).encode())
    again = Record.decode(spaced, 1)
    assert again.encode() == spaced
    assert again.sha256 != record.sha256
    assert again.change == record.change


def test_newer_versions_and_unknown_kinds_are_refused_with_a_hint() -> None:
    value = json.loads(first().encode())
    for change in ({"version": 2}, {"kind": "merge"}):
        with pytest.raises(UnsupportedVersion, match="Upgrade"):
            Record.decode(sealed(json.dumps({**value, **change}).encode()), 1)


def test_every_flipped_bit_of_a_record_is_damage() -> None:
    data = Record.following(first(), Commit(entry(metrics={"loss": 0.5})), write_id="01" * 16, created_at=2.0).encode()
    for place in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            with pytest.raises(
                CheckpointDamaged, match=r"log/0000000002\.json is not a record of the log: .*its bytes"
            ):
                Record.decode(bytes(flipped), 2)


@pytest.mark.parametrize("more", [b"", b" ", b"x"])
def test_a_record_without_its_digest_and_one_with_more_behind_it_are_damaged(more: bytes) -> None:
    data = first().encode()
    value = {name: field for name, field in json.loads(data).items() if name != "body_sha256"}
    for changed in (json.dumps(value).encode() + more, data + (more or b"}"), b" " + data, json.dumps(value, indent=1)):
        with pytest.raises(CheckpointDamaged):
            Record.decode(changed if isinstance(changed, bytes) else changed.encode(), 1)


def test_a_record_of_a_development_version_says_so() -> None:
    value = json.loads(Record.following(None, CLAIM, write_id="00" * 16, created_at=1.0).encode())
    del value["body_sha256"]
    early = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(CheckpointDamaged, match="a development version before format version 1 wrote it"):
        Record.decode(early, 1)


def test_only_a_commit_has_an_entry() -> None:
    with pytest.raises(CheckpointDamaged, match="commits no checkpoint"):
        _ = first().entry
