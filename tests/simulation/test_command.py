"""`python -m kit.simulation`."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.simulation import Plan, draw
from kit.simulation.__main__ import main
from kit.simulation.virtual import storages


def test_a_seed_that_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "900000"]) == 0
    assert "all promises held" in capsys.readouterr().out


def test_seeds_for_some_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "900000", "--seeds", "3", "--seconds", "100"]) == 0
    assert "3 seeds" in capsys.readouterr().out


def test_a_failure_shows_its_seed_and_is_made_smaller(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(storages._Disk, "persist", lambda self, keys: None)
    plan = draw(900_000, storage="disk")
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert main(["--plan", str(tmp_path / "plan.json"), "--shrink"]) == 1
    smaller, failure, *trace = capsys.readouterr().out.splitlines()
    assert failure.startswith("seed 900000: Violation: what is committed is durable")
    assert trace[-1] == smaller  # no seed has this plan
    assert sum(len(actor.actions) for actor in Plan.from_json(smaller).actors) <= 1


def test_seeds_are_made_smaller_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages._Disk, "persist", lambda self, keys: None)
    seed = next(seed for seed in range(900_000, 900_100) if draw(seed).storage == "disk")
    assert main(["--seed", str(seed), "--seeds", "20", "--shrink"]) == 1
    smaller, failure, *_ = capsys.readouterr().out.splitlines()
    assert failure.startswith(f"seed {Plan.from_json(smaller).seed}: Violation")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--seeds", "0"], "--seeds is 0"),
        (["--seconds", "nan"], "--seconds is nan"),
        (["--plan", "nothing.json"], "nothing.json cannot be read"),
        (["--plan", "/dev/null"], "/dev/null is no plan"),
        (["--plan", "/dev/null", "--seeds", "5", "--keep-going"], "leave out seeds, keep_going"),
    ],
)
def test_what_runs_nothing_is_an_error(capsys: pytest.CaptureFixture[str], arguments: list[str], error: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert error in capsys.readouterr().err
