"""What a kill leaves half-written in a folder must never be taken for the newest checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptstore import open_store
from ckptstore.errors import SourceChanged
from ckptstore.tools.run.folders import Folder, JobSeen, newest_first, restore_folder, save_found

pytestmark = pytest.mark.slow

OF_RANK = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def write_deepspeed(folder: Path, step: int, ranks: tuple[int, ...]) -> None:
    place = folder / f"global_step{step}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "mp_rank_00_model_states.pt").write_text(f"model {step}")
    for rank in ranks:
        (place / OF_RANK.format(rank)).write_text(f"optimizer {step} {rank}")
    (folder / "latest").write_text(place.name)


def test_a_tag_that_latest_names_before_all_ranks_have_written(tmp_path: Path) -> None:
    """DeepSpeed's rank 0 writes `latest` and waits for the others only then: a kill in between leaves a tag that its
    own loader would take, and fail on."""
    path = tmp_path / "out"
    write_deepspeed(path, 6, (0, 1))
    folder = Folder(path)
    job = JobSeen(frozenset({0, 1}), is_started=True, is_alive=False)
    folder.look(job)
    with open_store(tmp_path / "store", group="solo") as store:
        for found in folder.look(job).finished:
            with folder.hold(found) as held:
                save_found(store, found, held)
        write_deepspeed(path, 9, (0,))
        report = restore_folder(folder, newest_first(store))
    assert report is not None
    assert report.is_restored, report.why_not
    assert report.step == 6
    assert (path / "latest").read_text() == "global_step6"
    assert not (path / "global_step9").exists()


def test_a_file_that_comes_after_the_look_is_no_part_of_it(tmp_path: Path) -> None:
    """A rank may write several files. What is saved is what was judged, or nothing."""
    path = tmp_path / "out"
    write_deepspeed(path, 6, (0,))
    folder = Folder(path)
    job = JobSeen(frozenset(), is_started=True, is_alive=False)
    folder.look(job)
    (found,) = folder.look(job).finished
    write_deepspeed(path, 6, (1,))
    with pytest.raises(SourceChanged):
        folder.hold(found)
