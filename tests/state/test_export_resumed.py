"""Exports to a disk that were killed: they go on, lie aside until they are complete, and never mix with others."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from safetensors.torch import load_file
from saving import change_byte

from ckptstore import Checkpoint, InvalidInput, StorageError, open_store
from ckptstore.extensions.exchange.to_safetensors import ExportProgress
from ckptstore.interchange import export

pytestmark = pytest.mark.slow

TENSORS = {name: torch.randn(1000 + number) for number, name in enumerate("abc")}
FILES = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    monkeypatch.setenv("CKPTSTORE_DURABLE", "false")
    with open_store(tmp_path / "store", durable=False) as store:
        return Checkpoint.from_uri(store.save(1, dict(TENSORS)).uri)


def export_and_die(number: int, uri: str, directory: str) -> None:
    done = ExportProgress.done

    def marked(self: Any, name: str, size_bytes: int) -> None:
        done(self, name, size_bytes)
        if name == FILES[number - 1]:
            os.kill(os.getpid(), signal.SIGKILL)

    ExportProgress.done = marked  # type: ignore[method-assign]
    send(Checkpoint.from_uri(uri), Path(directory))


def killed_after(number: int, checkpoint: Checkpoint, directory: Path) -> None:
    """Export in a process that dies when so many files are marked."""
    run_ranks(1, export_and_die, number, checkpoint.uri, str(directory), expect_killed=[0])


def send(checkpoint: Checkpoint, directory: Path, **asked: Any) -> Any:
    return export(Checkpoint.from_uri(checkpoint.uri), directory, to="safetensors", shard_size_bytes=4000, **asked)


def assert_whole(directory: Path) -> None:
    assert sorted(path.name for path in directory.iterdir()) == [*FILES, "model.safetensors.index.json"]
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600 for path in directory.iterdir()), "as other files"
    found = {key: tensor for name in FILES for key, tensor in load_file(directory / name).items()}
    assert all(torch.equal(found[key], tensor) for key, tensor in TENSORS.items())


@pytest.mark.parametrize("number", [1, 2, 3])
def test_it_goes_on_where_it_was_killed(checkpoint: Checkpoint, tmp_path: Path, number: int) -> None:
    out, aside = tmp_path / "out", tmp_path / ".out.partial"
    killed_after(number, checkpoint, out)
    assert not out.exists(), "nothing looks whole"
    kept = {name: (aside / name).stat().st_ino for name in FILES[:number]}
    torn = aside / FILES[min(number, 2)]
    if number < 3:
        torn.write_bytes(b"as long as it may be, it has no mark")
    with pytest.raises(InvalidInput, match="part of an export of"):
        export(checkpoint, out, to="safetensors")
    send(checkpoint, out)
    assert_whole(out)
    assert {name: (out / name).stat().st_ino for name in kept} == kept, "they were not written again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_another_export_takes_its_place_when_that_is_asked_for(checkpoint: Checkpoint, tmp_path: Path) -> None:
    killed_after(2, checkpoint, tmp_path / "out")
    report = export(checkpoint, tmp_path / "out", to="safetensors", overwrite=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*report.files] == ["model.safetensors"]
    killed_after(1, checkpoint, tmp_path / "new")
    (tmp_path / ".new.partial/.ckptstore-export/plan.json").chmod(0o644)
    (tmp_path / ".new.partial/.ckptstore-export/plan.json").write_text('{"plan"')
    with pytest.raises(InvalidInput, match="part of an export of another checkpoint"):
        send(checkpoint, tmp_path / "new")
    send(checkpoint, tmp_path / "new", overwrite=True)
    assert_whole(tmp_path / "new")


def test_a_file_that_is_gone_in_the_end_is_an_error(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = ExportProgress.done

    def lose(self: Any, name: str, size_bytes: int) -> None:
        done(self, name, size_bytes)
        if name == FILES[2]:
            (tmp_path / ".out.partial" / FILES[0]).unlink()

    monkeypatch.setattr(ExportProgress, "done", lose)
    with pytest.raises(StorageError, match=FILES[0]):
        send(checkpoint, tmp_path / "out")
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    send(checkpoint, tmp_path / "out")
    assert_whole(tmp_path / "out")


def export_in_a_job(uri: str, directory: str) -> str:
    """Called by all ranks of torch.distributed."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    os.environ["CKPTSTORE_DURABLE"] = "false"
    checkpoint = Checkpoint.from_uri(uri)
    asked: dict[str, Any] = {"to": "safetensors", "shard_size_bytes": 4000, "group": None}
    try:
        report = export(checkpoint, directory, **asked)
        told = f"{len(report.files)} files"
    except Exception as error:
        told = type(error).__name__
    dist.barrier()
    dist.destroy_process_group()
    return told


def test_all_ranks_of_a_job_export_and_have_one_error(checkpoint: Checkpoint, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert run_ranks(2, export_in_a_job, checkpoint.uri, out) == ["4 files"] * 2
    assert_whole(Path(out))
    assert run_ranks(2, export_in_a_job, checkpoint.uri, out) == ["InvalidInput"] * 2
    change_byte(max(Path(checkpoint.uri).iterdir(), key=lambda path: path.stat().st_size))
    assert run_ranks(2, export_in_a_job, checkpoint.uri, f"{out}-2") == ["CheckpointDamaged"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_one_file_is_not_shared_by_ranks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    class Two:
        """Enough of a group to be refused."""

        rank, world_size = 0, 2

        def meeting(self, *_: Any) -> None:
            raise AssertionError("nothing is begun")

    with pytest.raises(InvalidInput, match="is one file"):
        export(checkpoint, tmp_path / "out", to="torch", group=Two())
    with pytest.raises(InvalidInput, match="group is a str"):
        export(checkpoint, tmp_path / "out", to="torch", group="all")
