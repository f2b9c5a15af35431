"""What a node knows of a checkpoint whose files lie on several nodes."""

from __future__ import annotations

from pathlib import Path

from ckptstore.tools.run.folders import Folder, JobSeen, Look
from tests.folders.test_finished_property import zipped


def looked(path: Path, rank: int) -> Look:
    """After two looks at the folder of a node with one rank of two."""
    folder, job = Folder(path), JobSeen(frozenset([rank]), is_started=True)
    folder.look(job)
    return folder.look(job)


def test_a_marker_that_is_written_behind_a_barrier_counts_for_all_nodes(tmp_path: Path) -> None:
    for rank in (0, 1):
        for name in ("step-5", "iter_0000005"):
            (tmp_path / str(rank) / name).mkdir(parents=True)
            (tmp_path / str(rank) / name / f"__{rank}_0.distcp").write_bytes(b"d")
    (tmp_path / "0/step-5/.metadata").write_bytes(b"m")
    (tmp_path / "0/latest_checkpointed_iteration.txt").write_text("5")
    leader, other = looked(tmp_path / "0", 0), looked(tmp_path / "1", 1)
    assert [(found.name, found.tells_all) for found in leader.finished] == [("iter_0000005", True), ("step-5", True)]
    assert other.finished == ()
    assert [found.name for found in other.uncertain] == ["iter_0000005", "step-5"]


def test_a_file_of_a_rank_that_is_missing_or_open_is_not_uncertain(tmp_path: Path) -> None:
    """A Trainer's ranks write behind no barrier: each node waits for its own."""
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5/optimizer.bin").write_bytes(b"o")
    look = looked(tmp_path, 1)
    assert (look.finished, look.uncertain) == ((), ())
    assert look.unfinished["checkpoint-5"] == "rng_state_1.pth is not there yet"
    (tmp_path / "step-5").mkdir()
    with (tmp_path / "step-5/__1_0.distcp").open("wb"):
        look = looked(tmp_path, 1)
    assert look.uncertain == ()
    assert "open for writing" in look.unfinished["step-5"]


def test_a_node_without_rank_0_knows_a_trainers_checkpoint_by_the_files_of_its_ranks(tmp_path: Path) -> None:
    """trainer_state.json is on the node of rank 0 alone; nobody waits for a quiet time."""
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5/rng_state_1.pth").write_bytes(zipped(5, "rng"))
    assert [found.name for found in looked(tmp_path, 1).finished] == ["checkpoint-5"]
    assert looked(tmp_path, 0).unfinished == {"checkpoint-5": "trainer_state.json is not there yet"}
