"""Whatever writes into a folder, in whichever way, dying wherever: only what was whole is committed, and all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.folders.writers import play


@pytest.mark.parametrize("first", range(0, 500, 50))
def test_what_is_committed_was_whole_and_what_is_whole_is_committed(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 50):
        place = tmp_path / str(seed)
        place.mkdir()
        try:
            play(place, seed).check()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
