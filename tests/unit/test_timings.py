"""Timings: what is written comes back, and what nobody wrote so is no timings at all, whatever it is."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.format.digest import Digest
from ckptstore.format.encoding import dump_json, load_json
from ckptstore.format.manifest import Manifest, Receipt
from ckptstore.format.timings import MAX_RANKS, PHASES, RankTimings, Spread, Timings, clean_node

SECONDS = st.floats(0, 1e6)
COUNT = st.integers(0, 2**40)


@st.composite
def saves(draw: st.DrawFn) -> list[RankTimings]:
    phases = draw(st.sets(st.sampled_from(PHASES), min_size=1))
    return [
        RankTimings(
            rank=rank,
            node=clean_node(draw(st.text(max_size=8))),
            seconds={phase: draw(SECONDS) for phase in PHASES if phase in phases},
            size_bytes=draw(COUNT),
            requests=draw(COUNT),
            retries=draw(COUNT),
            stalled_seconds=draw(SECONDS),
        )
        for rank in range(draw(st.integers(1, 5)))
    ]


def save_of(num_ranks: int, *, slow: int = 0) -> list[RankTimings]:
    """Ranks that took about as long as each other, but for one."""
    drawn = random.Random(7)
    return [
        RankTimings(
            rank=rank,
            node=f"node-{rank // 8}",
            seconds={phase: drawn.uniform(1, 2) + (9 if rank == slow else 0) for phase in PHASES[:4]}
            | ({"commit": 0.5} if rank == 0 else {}),
            size_bytes=1000,
            requests=3,
            retries=1,
            stalled_seconds=drawn.uniform(1, 2),
        )
        for rank in range(num_ranks)
    ]


@given(saves(), SECONDS)
def test_timings_come_back(ranks: list[RankTimings], seconds: float) -> None:
    timings = Timings.of(ranks, seconds=seconds)
    data = dump_json(timings.to_json())
    again = Timings.from_json(load_json(data, file="timings"))
    assert again == timings
    assert dump_json(again.to_json()) == data


def test_a_spread_has_the_ranks_that_took_longest() -> None:
    assert Spread.of({0: 1.0, 1: 4.0, 2: 2.0, 3: 4.0}) == Spread(1.0, 3.0, 4.0, (1, 3, 2))
    assert Spread.of({5: 2.5}) == Spread(2.5, 2.5, 2.5, (5,))


@pytest.mark.parametrize("num_ranks", [1, 2, MAX_RANKS, MAX_RANKS + 1, 1000])
def test_all_ranks_are_kept_or_the_extremes(num_ranks: int) -> None:
    slow = num_ranks // 2
    ranks = save_of(num_ranks, slow=slow)
    timings = Timings.of(ranks, seconds=30.0)
    kept = [one.rank for one in timings.ranks]
    assert timings.phases["upload"].slowest[0] == slow
    assert (timings.size_bytes, timings.requests, timings.retries) == (1000 * num_ranks, 3 * num_ranks, num_ranks)
    assert timings.phases["commit"] == Spread(0.5, 0.5, 0.5, (0,))
    assert kept == sorted(set(kept))
    if num_ranks <= MAX_RANKS:
        assert timings.ranks == tuple(ranks)
    for phase, spread in [*timings.phases.items(), ("stalled", timings.stalled)]:
        of_kept = {one.rank: one.seconds.get(phase, one.stalled_seconds) for one in timings.ranks}
        assert {of_kept[rank] for rank in spread.slowest} >= {spread.maximum}, phase
        assert spread.minimum in of_kept.values(), phase
    assert len(kept) <= MAX_RANKS
    assert len(dump_json(timings.to_json())) < 20_000, "the field does not grow with the ranks"
    assert Timings.from_json(json.loads(dump_json(timings.to_json()))) == timings


def test_a_name_of_a_node_is_made_harmless() -> None:
    assert clean_node("vm-1.example.com") == "vm-1.example.com"
    assert clean_node("<b onload='x'>\x1b[31m\n") == "-b-onload--x----31m-"
    assert clean_node("") == "unknown"
    assert len(clean_node("n" * 10_000)) == 255
    assert clean_node("knoten-ü") == "knoten-ü"


def test_seconds_that_are_not_in_order_are_no_timings() -> None:
    field = Timings.of(save_of(2), seconds=30.0).to_json()
    assert Timings.from_json({**field, "stalled": {**field["stalled"], "minimum": 5000.0}}) is None


def test_phases_of_a_later_version_are_left_out() -> None:
    timings = Timings.of(save_of(2), seconds=30.0)
    field = copy.deepcopy(timings.to_json())
    field["phases"]["<b>later</b>"] = field["phases"]["upload"]
    field["ranks"][0]["seconds"]["later"] = 1.0
    assert Timings.from_json({**field, "more": [1]}) == timings


def example() -> Manifest:
    return Manifest(
        store_id="00ff" * 8,
        step=12,
        epoch=3,
        attempt="step-0000000012-e0003-0123abcd",
        kind="directory",
        world_size=2,
        created_at=1_700_000_000.5,
        files=(Receipt("a.pt", 10, Digest("crc32c", 0xDEADBEEF), 0),),
    )


def test_a_manifest_keeps_the_bytes_of_its_timings() -> None:
    """So does a version that knows of none: to it they are a field that it does not know."""
    timings = Timings.of(save_of(3), seconds=30.0)
    data = replace(example(), extra={"timings": timings.to_json(), "later": 1}).encode()
    manifest = Manifest.decode(data)
    assert manifest.timings == timings
    assert set(manifest.extra) == {"timings", "later"}
    assert manifest.encode() == data
    assert manifest.made_whole().encode() == data
    linked = replace(manifest, files=(manifest.files[0]._replace(attempt="step-0000000010-e0003-0123abcd"),))
    assert linked.made_whole().encode() == data, "a copy keeps them too"
    assert example().timings is None
