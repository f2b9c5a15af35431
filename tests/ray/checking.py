"""What tests of runs in which ckptstore keeps the files ask of them afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from keeping import losses_alone, notes

from ckptstore.testing.s3_server import S3Server


def s3_path(server: S3Server) -> str:
    """A storage path as users of Ray write it."""
    return f"s3://test/runs?region=us-east-1&endpoint_override={server.endpoint_url}"


def check_losses(directory: Path, steps: int) -> None:
    """Every step was trained, and whatever was trained twice gave the same loss, that of a run without any failure."""
    expected = losses_alone(steps)
    told = [(int(step), float(loss)) for step, loss in notes(directory, "losses")]
    assert {step for step, _ in told} == set(range(steps))
    for step, loss in told:
        assert loss == pytest.approx(expected[step], rel=1e-9), f"step {step}"
