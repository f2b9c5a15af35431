"""Peers: every table has them or says why not, and each one loads what it saved, with every setting that is tried."""

from __future__ import annotations

import filecmp
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import forked_ranks
import pytest

from ckptstore.tools.bench import matrix
from ckptstore.tools.bench.case import Case, process_group
from ckptstore.tools.bench.destination import Place, opened_place
from ckptstore.tools.bench.figures.report import Options, Workload, WorkloadOutcome
from ckptstore.tools.bench.figures.text import absent
from ckptstore.tools.bench.peers.base import Contender
from ckptstore.tools.bench.peers.registry import TABLES
from ckptstore.tools.bench.run import contests
from ckptstore.tools.bench.turns import Contest
from ckptstore.tools.bench.work import Task

pytestmark = pytest.mark.slow

READERS = {
    "dcp": "DCP FileSystemWriter",
    "torch_checkpointing": "torch_checkpointing",
    "lightning": "Lightning TorchCheckpointIO",
    "ray": "Ray Train, torch.save and persist",
}
"""Who loads what one of them saved in the background; the others do so themselves."""


def peers(table: str) -> list[type[Contender]]:
    return [kind for kind in TABLES[table].contenders if kind.role == "peer"]


def test_each_peer_is_in_each_table_or_a_reason_says_why_not() -> None:
    headers, rows, reasons = matrix.matrix()
    assert [row[0] for row in rows] == [*matrix.NAMES_OF_PEERS]
    letters = {line.partition(":")[0] for line in reasons}
    for row in rows:
        for table, word in zip(headers[1:], row[1:], strict=True):
            assert word == "yes" or word in letters, f"{row[0]} in {table}: {word!r}"
    assert all(len(line) > 10 for line in reasons)


def test_no_reason_is_left_of_a_hole_that_was_filled() -> None:
    for table, holes in matrix.HOLES.items():
        there = {kind.family for kind in peers(table)}
        assert not there & {*holes}, f"they are in {table}, where a reason says that they are not"
        assert there | {*holes} == {*matrix.NAMES_OF_PEERS}, f"{table} has no reason for all holes"


@pytest.mark.parametrize("table", TABLES)
def test_contenders_of_a_table_and_settings_of_a_contender_differ(table: str) -> None:
    names = [kind.name for kind in TABLES[table].contenders]
    assert len({*names}) == len(names)
    for kind in peers(table):
        for place in (matrix.DISK, matrix.S3):
            case = matrix.case_of(place, 2)
            settings = [] if kind.unfit(case) else kind.sweep(case, "load" if table == "load" else "save")
            assert len({str(sorted(each.items())) for each in settings}) == len(settings)


class Missing(Contender):
    """A peer whose package nobody has."""

    name, family, modules = "missing", "dcp", ("no_such_package.inner",)


class Picky(Contender):
    """One of its two settings fails."""

    name, family, warmed = "picky", "dcp", ("save",)
    turns = 0

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        return [{"odd": True}, {"odd": False}]

    def save(self, place: str) -> None:
        type(self).turns += 1
        if self.settings["odd"]:
            raise OSError("no odd ones")


class Broken(Picky):
    """Both fail."""

    name = "broken"

    def save(self, place: str) -> None:
        raise OSError("never")


def test_what_is_missing_and_what_fails_is_named(tmp_path: Path) -> None:
    case = Case(place=Place(uri=str(tmp_path)), rank=0, world_size=1, durable=False)
    contests = Contest(case, "save", figure="total_seconds", tell=lambda *_: None)
    outcomes = contests.run([Missing, Picky, Broken], repeat=3)
    assert [one.status for one in outcomes] == ["skipped", "measured", "failed"]
    assert Picky.turns == 1 + 2 + 3, "a warm-up and a turn for the setting that works, and three rounds"
    assert outcomes[1].settings == {"odd": False}
    workload = Workload(name="save", title="Save", size_bytes=1, ranks=1, outcomes=tuple(outcomes))
    assert absent(workload) == [
        "skipped: missing: no_such_package.inner is not installed",
        "failed: broken: rank 0: OSError: never",
        "failed: picky with odd: rank 0: OSError: no odd ones",
    ]


PEERS = (*forked_ranks.LIGHTNING, "orbax.checkpoint", "safetensors.torch")
"""What takes seconds to import, and starts no thread as pyarrow does."""
ON_S3 = {"DCP FsspecWriter", "s3torchconnector DCP", "s3torchconnector S3Checkpoint"}
ON_S3 |= {"torch.save through fsspec", "safetensors through fsspec"}
ON_A_DISK = {"DCP FileSystemWriter", "DCP HuggingFaceStorageWriter", "torch_checkpointing"}
ON_A_DISK |= {"torch.save", "safetensors", "Orbax"}


@pytest.fixture
def _peers_are_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.tools.bench.run.run_ranks", partial(forked_ranks.run_ranks, modules=PEERS))


def run(tables: Sequence[str], place: Place, *, ranks: int, **of_task: Any) -> dict[str, Workload]:
    """Contests of all peers of some tables, with tiny tensors, or with the files."""
    tasks = []
    for table in tables:
        options = Options(workloads=(table,), repeat=1, shape="tensors", tensor_bytes=4 << 10)
        own = replace(place, uri=f"{place.uri}/{table}")
        if own.is_local:
            own.path.mkdir()
        tasks.append(Task(name=table, options=options, place=own, size_bytes=64 << 10, **of_task))
    return dict(zip(tables, contests(tasks, ranks, lambda *_: None), strict=True))


RAYS_OWN_RACE = "even though it should have been created by another process"
"""What `as_directory` of Ray says when another process has left its copy, and so removed it, before this one looked."""


def assert_all_took_part(workload: Workload, but: Collection[str] = ()) -> dict[str, WorkloadOutcome]:
    """Nobody failed with any setting, and only those were skipped that are named."""
    failed = [line for line in absent(workload) if line.startswith("failed")]
    assert [line for line in failed if RAYS_OWN_RACE not in line] == []
    skipped = {one.name for one in workload.outcomes if one.status == "skipped" and one.role == "peer"}
    assert skipped == {*but}
    return {one.name: one for one in workload.outcomes}


@pytest.mark.usefixtures("_peers_are_imported_once")
def test_what_peers_saved_to_a_disk_they_load_equal(tmp_path: Path) -> None:
    """With each of their settings; the contest compares what was loaded, and keeps nothing of a setting that lost."""
    with opened_place(str(tmp_path), {}) as place:
        found = assert_all_took_part(run(["load"], place, ranks=1)["load"], but=ON_S3)
        kept = [path.name for path in (place.path / "load").iterdir() if path.name.startswith("kept-")]
    assert len(found["safetensors"].samples) == 1
    assert len(kept) == len([one for one in found.values() if one.status == "measured"])


@pytest.mark.long
@pytest.mark.usefixtures("_peers_are_imported_once")
def test_two_ranks_save_to_a_disk_with_every_setting(tmp_path: Path) -> None:
    """Their loads, and saves in the background, are in the test of the fast tier."""
    with opened_place(str(tmp_path), {}) as place:
        assert_all_took_part(run(["save"], place, ranks=2)["save"], but=ON_S3)


@pytest.mark.long
@pytest.mark.usefixtures("_peers_are_imported_once")
def test_two_ranks_save_to_s3_and_load_with_every_setting() -> None:
    with opened_place("s3-test", {}) as place:
        for workload in run(["save", "load"], place, ranks=2).values():
            assert_all_took_part(workload, but=ON_A_DISK)


def save_and_go_on(uri: str, num_settings: int | None) -> list[str]:
    """Save with so many settings, or each one, twice, and change the state as soon as the call returns. Who then loads
    something else than what was there when it saved."""
    wrong = []
    by_name = {kind.name: kind for kind in peers("load")}
    with process_group() as (rank, world_size):
        case = Case(place=Place(uri=uri), rank=rank, world_size=world_size, durable=True)
        case.make_state("tensors", 64 << 10, 4 << 10)
        case.make_target()
        expected = {name: tensor.clone() for name, tensor in case.local.items()}
        for kind in peers("async"):
            for number, settings in enumerate(kind.sweep(case, "save")[:num_settings]):
                contender = kind(case, **settings)
                reader = by_name[READERS[kind.family]](case, **settings) if kind.family in READERS else contender
                for turn in range(2):
                    place = f"{uri}/{kind.family}-{kind.name[-7:]}-{number}-{turn}"
                    for name, tensor in case.local.items():
                        tensor.copy_(expected[name])
                    contender.prepare(place)
                    case.gather(None)
                    wait = contender.save(place)
                    for tensor in case.local.values():
                        tensor.zero_()
                    assert wait is not None, f"{kind.name} does not save in the background"
                    wait()
                    contender.after(place)
                    case.gather(None)
                    reader.load(place)
                    case.local, zeroed = expected, case.local
                    if any(case.gather(reader.wrong())):
                        wrong.append(f"{kind.name} {settings}, turn {turn}")
                    case.local = zeroed
                contender.close()
    return wrong


@pytest.mark.long
@pytest.mark.parametrize("num_settings", [1, None])
def test_a_peer_that_saves_in_the_background_has_copied_the_state_when_it_returns(
    tmp_path: Path, num_settings: int | None
) -> None:
    found = forked_ranks.run_ranks(2, save_and_go_on, str(tmp_path), num_settings, modules=PEERS, timeout_seconds=240)
    assert found == [[], []]


def test_directories_are_copied_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("a.bin", "inner/b.bin", "inner/deeper/c.bin"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(name.encode() * 1000)
    case = Case(place=Place(uri=str(target)), rank=0, world_size=1, durable=True, files=source)
    for kind in peers("directory"):
        if kind.objection(case) is not None or kind.family == "ray":  # whose import takes long; it is in the slow ones
            continue
        place = str(target / kind.family)
        contender = kind(case, **kind.sweep(case, "save")[0])
        contender.prepare(place)
        contender.save(place)
        compared = filecmp.dircmp(source, f"{place}/rank-0")
        assert (compared.left_only, compared.right_only, compared.diff_files) == ([], [], [])
        inner = Path(place) / "rank-0/inner/deeper/c.bin"
        assert inner.read_bytes() == (source / "inner/deeper/c.bin").read_bytes()


@pytest.mark.usefixtures("_peers_are_imported_once")
@pytest.mark.long
@pytest.mark.parametrize("where", ["disk", "s3-test"])
def test_peers_copy_directories_to_and_from_each_place(tmp_path: Path, where: str) -> None:
    """The contest of a node's processes compares the files that they got with those that were saved."""
    for rank in range(2):
        path = tmp_path / "source" / f"rank-{rank}/inner/file-{rank}.bin"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 5000)
    with opened_place(str(tmp_path) if where == "disk" else where, {}) as place:
        found = run(["directory", "node-cache"], place, ranks=2, files=str(tmp_path / "source"))
    assert_all_took_part(found["directory"], but=[] if where == "disk" else ["cp -r"])
    assert_all_took_part(found["node-cache"])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_peers_are_imported_once")
def test_peers_stand_beside_a_fast_tier(tmp_path: Path) -> None:
    with opened_place(str(tmp_path), {}) as place, opened_place("s3-test", {}) as bucket:
        for workload in run(["tier-save", "tier-resume", "tier-steps"], place, ranks=2, bucket=bucket).values():
            assert_all_took_part(workload)
