"""The bench of states finds no fault: some hundred seeds, alone and on two ranks. And every refusal is met."""

from __future__ import annotations

import pytest
from kit.states import REFUSALS, Refusal, draw, refusals, run
from seed_runs import check

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", [0, pytest.param(150, marks=pytest.mark.slow)])
def test_seeds(first: int) -> None:
    """More than half are the same, see `check`; few are no programs, which would find nothing."""
    assert check(range(first, first + 150)).count("no program") < 15


@pytest.mark.parametrize(("first", "count"), [(0, 20), pytest.param(20, 40, marks=pytest.mark.slow)])
def test_seeds_on_two_ranks(first: int, count: int) -> None:
    check(range(first, first + count), num_ranks=2)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.reason[:40])
def test_every_refusal_is_met(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nothing meets would only hide faults."""
    met: list[Refusal | None] = []
    real = refusals.explanation
    monkeypatch.setattr("kit.states.case_runner.explanation", lambda *given: met.append(real(*given)) or met[-1])
    cases = (case for case in map(draw, range(20_000)) if refusal.applies(case))
    assert any(run(case).ok and refusal in met for case, _ in zip(cases, range(400), strict=False))
