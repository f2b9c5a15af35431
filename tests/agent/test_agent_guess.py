"""`ckptstore run` without --folder: what it finds, what it says, and what never ends the training."""

from __future__ import annotations

from pathlib import Path

from agents import Start, small

from ckptstore.tools.run import guess
from ckptstore.tools.run.story import NOTHING_FOUND


def test_where_there_is_too_much_to_look_at_it_asks_for_the_folder(start: Start, tmp_path: Path) -> None:
    (tmp_path / "work/made").mkdir(parents=True)
    for number in range(guess._MAX_ENTRIES):
        (tmp_path / "work" / str(number)).touch()
    agent = start(tmp_path / "store", None, "--require-commit", trainer=small("made", 2), cwd=tmp_path / "work")
    assert agent.code() == NOTHING_FOUND, agent.output
    said = [event["text"] for event in agent.events("FolderNotice")]
    assert len(said) == 2, "once at the start, and at the end"
    assert all("20,000" in text and "--folder" in text for text in said)
    told = [event["event"] for event in agent.events()]
    assert told.index("FolderNotice") == told.index("TrainerStarted") + 1
