"""What several tests of the fast tier listen to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptstore.events import CheckpointSkipped, listening


@pytest.fixture
def skipped() -> Iterator[list[str]]:
    """The reasons why checkpoints are passed over."""
    reasons: list[str] = []
    with listening(lambda event: reasons.append(event.reason), CheckpointSkipped):
        yield reasons
