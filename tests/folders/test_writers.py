"""Whatever writes into a folder, in whichever way, dying wherever: only what was whole is committed, and all of it."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest

from tests.folders.writers import play

LATER = [pytest.param(first, marks=pytest.mark.long) for first in range(50, 500, 50)]


@pytest.mark.parametrize("first", [0, *LATER])
def test_what_is_committed_was_whole_and_what_is_whole_is_committed(
    tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The writers open files of this process and map none: what it and others have mapped would take most of the time.
    monkeypatch.setattr(import_module("ckptstore.tools.run.folders.open_files"), "pids", lambda: [os.getpid()])
    monkeypatch.setattr(import_module("ckptstore.tools.run.folders.open_files"), "_mappings", lambda *_: ())
    for seed in range(first, first + 50):
        place = tmp_path / str(seed)
        place.mkdir()
        try:
            play(place, seed).check()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
