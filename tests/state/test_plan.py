"""Who writes what: every element once, whatever the ranks have, and in equal shares."""

import itertools

import numpy
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.state.index.items import Item, Mode
from ckptstore.state.index.part import BESIDE_VALUE, PER_RANK
from ckptstore.state.tensors.boxes import Box, whole
from ckptstore.state.write.agree import Negotiator
from ckptstore.state.write.assignment import MAX_CHUNK_BYTES, Dealt, chunks_of, deal, plan_rank
from ckptstore.state.write.describe import Described

MIB = 1 << 20


class Exchanges:
    """A group of ranks in one process: each step of an agreement is run for all of them."""

    def __init__(self, ranks):
        self.negotiators = [Negotiator() for _ in range(ranks)]
        self.sizes = []

    def agree(self, states):
        """The agreements of all ranks."""
        for rank, (negotiator, state) in enumerate(zip(self.negotiators, states, strict=True)):
            negotiator.begin(Described(items=state), rank)
        while True:
            posts = [negotiator.describe() for negotiator in self.negotiators]
            self.sizes.append(max(map(len, posts)))
            told = self.negotiators[0].join(posts)
            agreements = [negotiator.hear(told) for negotiator in self.negotiators]
            if None not in agreements:
                return agreements


def plain(key, mode, *, shape=(4, 3), dtype="float32", content=b"", **more):
    return Item(
        key, mode, dtype, shape, (whole(shape),), digest=xxhash.xxh3_128_digest(content or key.encode()), **more
    )


def value(key, content=b"same"):
    return Item(key, Mode.VALUE, digest=xxhash.xxh3_128_digest(content))


def by_key(items):
    return sorted(items, key=lambda item: item.key)


def plans_of(states, exchanges=None):
    states = [by_key(items) for items in states]
    agreements = (exchanges or Exchanges(len(states))).agree(states)
    return states, [
        plan_rank(items, agreed, rank) for rank, (items, agreed) in enumerate(zip(states, agreements, strict=True))
    ]


def written(states, plans, key):
    """For each rank the boxes of a key that it writes."""
    return [
        [write.box for write in plan.writes if items[write.item].key == key]
        for items, plan in zip(states, plans, strict=True)
    ]


def assert_covered_once(shape, boxes):
    counts = numpy.zeros(shape, int)
    for box in boxes:
        counts[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))] += 1
    assert (counts == 1).all()


SHAPES = st.lists(st.integers(1, 12), max_size=3).map(tuple)


@given(st.lists(st.tuples(SHAPES, st.integers(1, 400_000)), max_size=12), st.integers(1, 5))
def test_dealt_items_are_covered_once_in_order(drawn, shares):
    items = [Dealt(shape, element_bytes) for shape, element_bytes in drawn]
    found = [piece for share in range(shares) for piece in deal(items, shares, share)]
    assert found == sorted(found)
    for index, item in enumerate(items):
        pieces = [(start, stop) for number, start, stop in found if number == index]
        ends = list(itertools.chain.from_iterable(pieces))
        volume = int(numpy.prod(item.sizes))
        assert ends[0] == 0
        assert ends[-1] == volume
        assert ends[1:-1:2] == ends[2::2]
        if item.size_bytes < MIB:
            assert len(pieces) == 1


@pytest.mark.parametrize("shape", [(4096, 65536), (1, 2**28), (2, 3, 44739243), (2**28,)])
@pytest.mark.parametrize("shares", [2, 4, 7])
def test_one_large_tensor_is_shared_within_five_percent(shape, shares):
    item = Dealt(shape, 4)
    for share in range(shares):
        size_bytes = sum((stop - start) * 4 for _, start, stop in deal([item], shares, share))
        assert abs(size_bytes * shares / item.size_bytes - 1) < 0.05


@pytest.mark.parametrize(
    ("num_items", "num_shares"), [(0, 1), (1, 1), (511, 1), (512, 2), (1000, 3), (1024, 4), (1001, 3), (9999, 4)]
)
def test_there_are_no_shares_below_a_block(num_items, num_shares):
    items = [Dealt((64, 16), 4)] * num_items
    counts = [len(list(deal(items, 4, share))) for share in range(4)]
    assert sum(counts) == num_items
    assert counts[num_shares:] == [0] * (4 - num_shares)
    assert all(counts[:num_shares]) or not num_items
    assert max(counts[:num_shares]) - min(counts[:num_shares]) <= 1


@given(SHAPES, st.integers(1, 200), st.integers(0, 400), st.integers(0, 400))
def test_chunks_cover_a_range_and_stay_small(shape, element_mib, start, stop):
    box = Box(tuple(range(len(shape))), shape)
    start, stop = min(start, box.volume), min(stop, box.volume)
    found = chunks_of(box, element_mib * MIB, start, stop)
    assert sum(chunk.volume for chunk in found) == max(0, stop - start)
    assert all(chunk.volume * element_mib * MIB <= MAX_CHUNK_BYTES for chunk in found)
    assert all(all(a >= b for a, b in zip(chunk.offsets, box.offsets, strict=True)) for chunk in found)


def test_values_are_written_once_by_the_lowest_rank_that_has_them():
    _, plans = plans_of([[value("a")], [value("a"), value("b")], [value("b")]])
    assert [plan.common for plan in plans] == [("a",), ("b",), ()]


def test_tensors_beside_a_value_go_with_it():
    def state(rank):
        beside = {"owner": "rng"}
        return [
            value("rng", b"%d" % rank),
            plain("rng#0", Mode.BESIDE, dtype="uint8", **beside),
            value("epoch"),
            plain("epoch#0", Mode.BESIDE, dtype="uint8", owner="epoch"),
        ]

    states, plans = plans_of([state(0), state(1)])
    assert written(states, plans, "rng#0") == [[whole((4, 3))]] * 2
    assert written(states, plans, "epoch#0") == [[whole((4, 3))], []]
    assert plans[1].flags == {"rng#0": PER_RANK | BESIDE_VALUE}


def test_tied_tensors_are_written_once():
    items = [plain("a", Mode.SPLIT), plain("z", Mode.SPLIT, content=b"a", tied_to="a")]
    states, plans = plans_of([items, items])
    assert sum(map(len, written(states, plans, "z"))) == 0
    assert plans[0].ties == {"a": ("z",)}


def test_a_tie_that_not_all_ranks_have_is_no_tie():
    tied = [plain("a", Mode.SPLIT), plain("z", Mode.SPLIT, content=b"a", tied_to="a")]
    loose = [plain("a", Mode.SPLIT), plain("z", Mode.SPLIT, content=b"a")]
    states, plans = plans_of([tied, loose])
    assert_covered_once((4, 3), itertools.chain.from_iterable(written(states, plans, "z")))
    assert all(not plan.ties for plan in plans)


def test_the_second_save_exchanges_a_few_bytes_once():
    exchanges = Exchanges(3)

    def save(epoch, *more):
        return plans_of(
            [
                [
                    *(plain(f"t{number}", Mode.COMPARE) for number in range(500)),
                    value("epoch", b"%d" % epoch),
                    value("rng", b"%d.%d" % (epoch, rank)),
                    *more,
                ]
                for rank in range(3)
            ],
            exchanges,
        )[1]

    first = save(1)
    assert len(exchanges.sizes) == 2
    assert save(2) == first
    assert len(exchanges.sizes) == 3
    assert exchanges.sizes[2] == 3 * 16
    assert [plan.own for plan in save(3, value("new"))] == [("rng",)] * 3
    assert len(exchanges.sizes) == 5


def test_what_was_different_may_become_equal_and_different_again():
    exchanges = Exchanges(2)

    def save(*contents):
        return [plan.own for plan in plans_of([[value("a", content)] for content in contents], exchanges)[1]]

    assert save(b"1", b"2") == [("a",), ("a",)]
    assert save(b"3", b"3") == [(), ()]
    assert save(b"4", b"5") == [("a",), ("a",)]


@given(st.data())
def test_any_mixture_of_ranks_is_written_exactly_once(data):
    ranks = data.draw(st.integers(1, 4))
    keys = [f"k{number}" for number in range(data.draw(st.integers(1, 6)))]
    modes = {key: data.draw(st.sampled_from([Mode.SPLIT, Mode.LOWEST, Mode.COMPARE])) for key in keys}
    states = []
    for _ in range(ranks):
        held = [key for key in keys if data.draw(st.booleans())]
        states.append([plain(key, modes[key], content=data.draw(st.sampled_from([b"a", b"b"]))) for key in held])
    states, plans = plans_of(states)
    for key in keys:
        boxes = written(states, plans, key)
        holders = [rank for rank, items in enumerate(states) if key in {item.key for item in items}]
        if any(plan.flags.get(key, 0) & PER_RANK for plan in plans):
            assert [rank for rank in range(ranks) if boxes[rank] == [whole((4, 3))]] == holders
        elif holders:
            assert_covered_once((4, 3), itertools.chain.from_iterable(boxes))
