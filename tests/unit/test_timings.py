"""Timings: what is written comes back, and what nobody wrote so is no timings at all, whatever it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptstore.format.encoding import dump_json, load_json
from ckptstore.format.timings import PHASES, RankTimings, Timings, clean_node

SECONDS = st.floats(0, 1e6)
COUNT = st.integers(0, 2**62)


@st.composite
def saves(draw: st.DrawFn, most: int = 80) -> list[RankTimings]:
    phases = draw(st.sets(st.sampled_from(PHASES), min_size=1))
    node = st.text(max_size=8).map(clean_node)
    return [
        RankTimings(
            rank=rank,
            node=draw(node),
            seconds={phase: draw(SECONDS) for phase in PHASES if phase in phases},
            size_bytes=draw(COUNT) // 100,
            requests=draw(COUNT) // 100,
            retries=draw(COUNT) // 100,
            stalled_seconds=draw(SECONDS),
        )
        for rank in range(draw(st.integers(1, most)))
    ]


@given(saves(), SECONDS)
def test_timings_come_back(ranks: list[RankTimings], seconds: float) -> None:
    timings = Timings.of(ranks, seconds=seconds)
    data = dump_json(timings.to_json())
    again = Timings.from_json(load_json(data, file="timings"))
    assert again == timings
    assert dump_json(again.to_json()) == data
