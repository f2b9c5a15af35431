"""Jobs with a fast tier on simulated nodes; and mistakes put into it, each of which some seed must find."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.fast import candidates, fast_place
from ckptstore.fast.node_disk import NodeDisk
from ckptstore.loading import fast_newest
from ckptstore.saving import fast_keeper
from ckptstore.testing.simulation import Simulation, report
from ckptstore.testing.simulation.fast_tier.fast_jobs import draw_fast


def _run(simulation: Simulation, first: int, count: int) -> None:
    for seed in range(first, first + count):
        outcome = simulation.run(draw_fast(seed))
        assert outcome.ok, report(outcome)


def test_every_promise_of_the_fast_tier_holds(simulation: Simulation) -> None:
    _run(simulation, 0, 15)


def test_ranks_that_cannot_even_be_asked_are_not_asked_again_at_once(simulation: Simulation) -> None:
    """In this seed the leader owes the others a result, and the key-value store refuses each connection."""
    _run(simulation, 73, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_steps_with_a_fast_tier(simulation: Simulation) -> None:
    done, seed = 0, 1000
    while done < 100_000:
        outcome = simulation.run(draw_fast(seed))
        assert outcome.ok, report(outcome)
        done, seed = done + outcome.requests, seed + 1


def _rules(simulation: Simulation, count: int, rule: str, *, first: int = 0) -> set[str]:
    found = set()
    for seed in range(first, first + count):
        found.add(simulation.run(draw_fast(seed)).rule)
        if rule in found:
            break
    return found


def test_oldest_first_is_found(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    real = candidates.merge

    def merge(*given: Any, **more: Any) -> Any:
        merged = real(*given, **more)
        return candidates.Merged(merged.candidates[::-1], merged.refused)

    monkeypatch.setattr(fast_newest, "merge", merge)
    assert "a resume takes the newest" in _rules(simulation, 20, "a resume takes the newest")


def test_a_deletion_that_is_too_early_is_found(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    def delete_all(self: fast_place.FastPlace) -> None:
        for attempt in self.disk.attempts():
            self.disk.delete_as(self.epoch, attempt)

    monkeypatch.setattr(fast_place.FastPlace, "delete_old", delete_all)
    rule = "what is neither durable nor superseded stays"
    assert rule in _rules(simulation, 20, rule)


def test_a_certificate_that_is_too_early_is_found(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(self: NodeDisk, data: bytes, *, ranks: Any) -> Any:
        from ckptstore.fast.certificate import Certificate

        attempt = Certificate.decode(data).attempt
        some = next(file.key for file in self.storage.list(attempt.prefix))
        self.storage.delete([some])
        self.storage.create(attempt.key("fast.json"), data)
        return Certificate.decode(data)

    monkeypatch.setattr(NodeDisk, "certify", torn)
    rule = "a certificate means that all is whole"
    assert rule in _rules(simulation, 5, rule)


def test_void_ones_that_count_are_found(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "void_reason", lambda *_: "")
    rule = "nothing void is resumed from"
    assert rule in _rules(simulation, 12, rule, first=176)


def test_a_save_that_needs_the_bucket_is_found(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket is away for minutes in some seeds; jobs whose ranks do not meet there save all the same."""
    real = fast_keeper.FastKeeper.begin

    def begin(self: fast_keeper.FastKeeper, *given: Any) -> Any:
        self._job.log.newest()
        return real(self, *given)

    monkeypatch.setattr(fast_keeper.FastKeeper, "begin", begin)
    rule = "a call that nothing disturbs succeeds"
    assert rule in _rules(simulation, 60, rule)
