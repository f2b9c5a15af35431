"""Jobs with a fast tier on simulated nodes; and mistakes put into it, each of which some seed must find."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from kit.simulation import Action, Actor, Plan, Simulation, Trouble, report
from kit.simulation.fast_tier.fast_jobs import draw_fast
from seed_items import broken_rule

from ckptstore.errors import CheckpointDamaged, StorageError
from ckptstore.extensions.tier import candidates, finding, publisher, saver
from ckptstore.extensions.tier.nodes import fast_place
from ckptstore.extensions.tier.nodes.node_disk import NodeDisk
from ckptstore.loading import load_state

pytestmark = pytest.mark.slow


def _run(simulation: Simulation, first: int, count: int) -> None:
    for seed in range(first, first + count):
        outcome = simulation.run(draw_fast(seed))
        assert outcome.ok, report(outcome)


def test_every_promise_of_the_fast_tier_holds(simulation: Simulation) -> None:
    _run(simulation, 0, 15)


def test_ranks_that_cannot_even_be_asked_are_not_asked_again_at_once(simulation: Simulation) -> None:
    """In this seed the leader owes the others a result, and the key-value store refuses each connection."""
    _run(simulation, 73, 1)


def test_a_node_is_lost_beside_a_command_that_is_on_no_node(simulation: Simulation) -> None:
    _run(simulation, 16, 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "num_steps", [pytest.param(12_000, marks=pytest.mark.slow), pytest.param(60_000, marks=pytest.mark.long)]
)
def test_thousands_of_steps_with_a_fast_tier(simulation: Simulation, num_steps: int) -> None:
    done, seed = 0, 1000
    while done < num_steps:
        outcome = simulation.run(draw_fast(seed))
        assert outcome.ok, report(outcome)
        done, seed = done + outcome.requests, seed + 1


def _rules(simulation: Simulation, count: int, rule: str, *, first: int = 0) -> set[str]:
    found = set()
    for seed in range(first, first + count):
        found.add(broken_rule(simulation.run(draw_fast(seed))))
        if rule in found:
            break
    return found


def test_an_error_of_the_simulation_itself_is_no_promise(simulation: Simulation) -> None:
    def fails(_world: Any) -> None:
        raise IndexError("tuple index out of range")

    with pytest.raises(AssertionError, match="tuple index out of range"):
        broken_rule(simulation.run(draw_fast(0), prepare=fails))


def test_oldest_first_is_found(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    real = candidates.merge

    def merge(*given: Any, **more: Any) -> Any:
        merged = real(*given, **more)
        return candidates.Merged(merged.candidates[::-1], merged.refused)

    monkeypatch.setattr(finding, "merge", merge)
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
        from ckptstore.extensions.tier.certificate import Certificate

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
    assert rule in _rules(simulation, 1, rule, first=211)


def test_a_save_that_needs_the_bucket_is_found(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket is away for minutes in some seeds; jobs whose ranks do not meet there save all the same."""
    real = publisher.FastPublisher.begin

    def begin(self: publisher.FastPublisher, *given: Any) -> Any:
        self._job.log.newest()
        return real(self, *given)

    monkeypatch.setattr(publisher.FastPublisher, "begin", begin)
    rule = "a call that nothing disturbs succeeds"
    assert rule in _rules(simulation, 60, rule)


def test_a_save_that_needs_every_node_is_found(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "StorageUnavailable", KeyError)  # so what reaches no node does not go to the store
    rule = "a call that nothing disturbs succeeds"
    assert rule in _rules(simulation, 1, rule, first=23)


def a_node_takes_no_connection_at_a_restart(seed: int) -> Plan:
    """Ranks change places, and the job before was killed in its third save: so the newest is on the nodes alone."""
    saves = tuple(Action("state", step=step) for step in (10, 20, 30))
    killed = Actor("job1", saves, ranks=2, nodes=("a", "b"))
    again = Actor("job2", (Action("resume"),), ranks=2, nodes=("b", "a"), begins="after job1")
    kills = [Trouble("node kill", f"job1.{rank}", at_call=90 + seed % 20) for rank in range(2)]
    deaf = Trouble("node deaf", "job2.0", at_call=3 + seed % 4, seconds=3600.0)
    return Plan(seed, contents="state", fast_copies=1, actors=(killed, again), troubles=(*kills, deaf))


def test_a_resume_that_is_silent_about_a_node_is_found(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    def next_best(found: Any, use: Any, _reasons: Any) -> Any:
        for files in found:
            with suppress(CheckpointDamaged, StorageError):
                return files, use(files)
        return None

    for seed in range(4):
        outcome = simulation.run(a_node_takes_no_connection_at_a_restart(seed))
        assert outcome.ok, report(outcome)
    monkeypatch.setattr(load_state, "first_usable", next_best)
    rules = {broken_rule(simulation.run(a_node_takes_no_connection_at_a_restart(seed))) for seed in range(4)}
    assert "what a resume passes over is told" in rules
