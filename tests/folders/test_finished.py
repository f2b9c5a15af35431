"""What is finished where nothing but time tells it."""

from __future__ import annotations

from ckptstore.tools.run.folders.candidate import Prospect, fingerprint
from ckptstore.tools.run.folders.finished import Finisher
from ckptstore.tools.run.folders.snapshot import Sign


def silent(name: str = "mine_1", size_bytes: int = 5) -> Prospect:
    """One that no marker ends."""
    files = {"weights": Sign(size_bytes, 1, 1)}
    return Prospect(name=name, shape="pattern", step=1, is_directory=True, files=files, is_certain=False)


def look(finisher: Finisher, now_seconds: float, *found: Prospect, lives: bool = True, **asked: bool) -> list[str]:
    """The names of what is finished."""
    told = finisher.judge(found, open_files=(), job_lives=lives, now_seconds=now_seconds, **asked)
    assert {it.name for it in told.finished} | set(told.unfinished) == {it.name for it in found}
    assert {it.name for it in told.uncertain} <= set(told.unfinished)
    return [it.name for it in told.finished]


def test_it_must_be_quiet_for_the_whole_time_and_stays_finished() -> None:
    finisher = Finisher(10)
    assert look(finisher, 0, silent()) == []
    assert look(finisher, 9, silent(size_bytes=6)) == []
    assert look(finisher, 18, silent(size_bytes=6)) == []
    assert look(finisher, 19, silent(size_bytes=6)) == ["mine_1"]
    assert look(finisher, 20, silent(size_bytes=6), lives=False) == ["mine_1"]
    assert look(finisher, 99, silent(size_bytes=7), lives=False) == []


def test_the_end_of_the_job_counts_as_quiet_only_if_it_ended_well() -> None:
    for ended_well, finished in ((True, ["mine_1"]), (False, [])):
        finisher = Finisher(10)
        look(finisher, 0, silent())
        look(finisher, 1, silent(), lives=False, ended_well=ended_well)
        assert look(finisher, 99, silent(), lives=False, ended_well=ended_well) == finished
        assert look(finisher, 199, silent()) == finished, "a next job has not written it"


def test_what_lay_there_before_a_job_began_is_not_its_own() -> None:
    known = {"mine_2": fingerprint(silent("mine_2"))}
    finisher = Finisher(10, known)
    look(finisher, 0, silent("mine_1"), silent("mine_2"))
    assert look(finisher, 99, silent("mine_1"), silent("mine_2")) == ["mine_2"]


def test_a_job_that_nobody_knows_may_have_written_it_since_the_last_watch() -> None:
    finisher = Finisher(10, {})
    look(finisher, 0, silent(), began_after=False)
    assert look(finisher, 99, silent(), began_after=False) == ["mine_1"]
