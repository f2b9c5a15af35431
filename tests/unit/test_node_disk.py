"""The directory of fast checkpoints on a node: private, whole at every moment, no more deleted than was meant."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptstore.errors import AccessDenied, CheckpointDamaged, InvalidInput, StorageFull, StorageUnavailable, StoreFenced
from ckptstore.extensions.tier.certificate import CERTIFICATE_NAME, Certificate, held_by
from ckptstore.extensions.tier.nodes.node_disk import NodeDisk
from ckptstore.format.digest import Digest
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Manifest, Receipt
from ckptstore.testing.ranks import run_ranks

STORE_ID = "5f0c3a9e4b7d41d8a2c6e1f09b83d754"
ATTEMPT = Attempt(7, 2, "0123abcd")
OTHER = Attempt(8, 2, "0123abcd")
FILES = {"model-rank=00000.pt": (0, b"zero"), "deep/model.pt": (1, b"one"), "elsewhere.pt": (2, b"two")}
HERE = [0, 1]


def certificate(attempt: Attempt = ATTEMPT) -> Certificate:
    manifest = Manifest(
        store_id=STORE_ID,
        step=attempt.step,
        epoch=attempt.epoch,
        attempt=str(attempt),
        kind="directory",
        world_size=3,
        created_at=1.5,
        files=tuple(
            Receipt(name, len(data), Digest("crc32c", 7), rank) for name, (rank, data) in sorted(FILES.items())
        ),
    )
    return Certificate(manifest.encode(), 3, 5, "ab" * 32, held_by({"a": HERE, "b": [2]}))


DATA = certificate().encode()


def open_disk(tmp_path: Path) -> NodeDisk:
    return NodeDisk.open(tmp_path / "fast", STORE_ID, node="a")


def store(disk: NodeDisk, attempt: Attempt = ATTEMPT) -> None:
    """What the ranks of this node bring."""
    for name, (rank, data) in FILES.items():
        if rank in HERE:
            disk.storage.write(attempt.key(name), [memoryview(data)])


def test_a_certificate_comes_last_and_goes_first(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    assert disk.look() == ([], {})
    store(disk)
    assert [(each.sha256, each.fault, dict(each.sizes)) for each in disk.look()[0]] == [
        ("", "", {"model-rank=00000.pt": 4, "deep/model.pt": 3})
    ]
    assert disk.certify(DATA, ranks=HERE) == certificate() == disk.certify(DATA, ranks=HERE)
    seen, certificates = open_disk(tmp_path).look()
    assert certificates == {certificate().sha256: certificate()}
    assert (seen[0].node, seen[0].sha256) == ("a", certificate().sha256)
    assert certificate().ranks_in(seen[0].sizes) == {0, 1}
    disk.delete(ATTEMPT)
    disk.delete(ATTEMPT)
    assert disk.look() == ([], {})
    assert list((tmp_path / "fast" / STORE_ID / "checkpoints").iterdir()) == []


def test_a_certificate_is_made_when_the_names_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(open_disk(tmp_path))
    disk, before, after = open_disk(tmp_path), set[str](), set[str]()
    path = disk.storage.local_path(ATTEMPT.key(CERTIFICATE_NAME))
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        (after if path.exists() else before).add(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    disk.certify(DATA, ranks=HERE)
    attempt = path.parent
    assert {str(attempt), str(attempt / "deep"), str(attempt.parent)} <= before
    assert not before & {str(attempt / name) for name in FILES}, "whoever stored a file has made it durable"
    assert str(attempt) in after


@pytest.mark.parametrize("name", ["model-rank=00000.pt", "deep/model.pt"])
@pytest.mark.parametrize("data", [None, b"longer or shorter"])
def test_nothing_is_certified_that_is_not_there(tmp_path: Path, name: str, data: bytes | None) -> None:
    disk = open_disk(tmp_path)
    store(disk)
    disk.storage.delete([ATTEMPT.key(name)])
    if data is not None:
        disk.storage.write(ATTEMPT.key(name), [memoryview(data)])
    with pytest.raises(CheckpointDamaged, match=f"{name} has .* bytes on a, its rank stored") as failed:
        disk.certify(DATA, ranks=HERE)
    assert (failed.value.step, failed.value.rank, failed.value.file) == (7, FILES[name][0], name)
    assert disk.certificate(ATTEMPT) is None


def test_a_certificate_is_not_exchanged_for_another(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    store(disk)
    disk.certify(DATA, ranks=HERE)
    with pytest.raises(CheckpointDamaged, match="with other contents"):
        disk.certify(replace(certificate(), save_number=4).encode(), ranks=HERE)
    assert disk.certificate(ATTEMPT) == certificate()


def test_damage_is_told_and_hides_nothing_else(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    for attempt in (ATTEMPT, OTHER):
        store(disk, attempt)
        disk.certify(certificate(attempt).encode(), ranks=HERE)
    path = disk.storage.local_path(ATTEMPT.key(CERTIFICATE_NAME))
    for data, reason in ((DATA[:-9], "is not valid JSON"), (certificate(OTHER).encode(), f"certificate of {OTHER}")):
        path.unlink()
        path.write_bytes(data)
        seen, certificates = disk.look()
        assert list(certificates.values()) == [certificate(OTHER)]
        assert [each.sha256 for each in seen] == ["", certificate(OTHER).sha256]
        assert reason in seen[0].fault
    path.unlink()
    path.symlink_to(disk.storage.local_path(OTHER.key(CERTIFICATE_NAME)))
    seen, _ = disk.look()
    assert (seen[0].sha256, "symbolic link" in seen[0].fault) == ("", True)  # nothing is read through a link


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EAGAIN, errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_an_error_that_may_pass_is_no_fault_of_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Else a resume would pass it over, and delete it for good."""
    disk, opened = open_disk(tmp_path), os.open
    store(disk)
    disk.certify(DATA, ranks=HERE)

    def refuses(path: Any, *args: Any, **more: Any) -> int:
        if os.fspath(path).endswith(CERTIFICATE_NAME):
            raise OSError(code, os.strerror(code))
        return opened(path, *args, **more)

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises((StorageUnavailable, AccessDenied), match=CERTIFICATE_NAME):
        disk.look()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_directory_that_others_can_reach_is_refused(tmp_path: Path, depth: int) -> None:
    open_disk(tmp_path)
    path = [tmp_path / "fast", tmp_path / "fast" / STORE_ID, tmp_path / "fast" / STORE_ID / "checkpoints"][depth]
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o750)
    with pytest.raises(InvalidInput, match="has mode 750 and lets other users in"):
        open_disk(tmp_path)
    path.chmod(0o700)
    moved = path.rename(tmp_path / "moved")
    path.symlink_to(moved)
    with pytest.raises(InvalidInput, match="is no directory, or a symbolic link"):
        open_disk(tmp_path)


def test_a_full_disk_to_which_no_job_has_come_is_marked_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = open_disk(tmp_path)
    with monkeypatch.context() as here:
        here.setattr(os, "pwrite", full)
        disk.mark_epoch(3)
        assert disk.marked_epoch() == 0
    disk.mark_epoch(4)
    monkeypatch.setattr(os, "pwrite", full)
    disk.mark_epoch(4)
    with pytest.raises(StorageFull):
        disk.mark_epoch(5)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_disk_without_locks_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuses(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuses)
    disk = open_disk(tmp_path)
    store(disk)
    disk.certify(DATA, ranks=HERE)
    disk.mark_epoch(3)
    with disk.reading(ATTEMPT), pytest.raises(StoreFenced):
        disk.delete_as(2, ATTEMPT)
    assert disk.delete_as(3, ATTEMPT)
    assert disk.attempts() == []


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_somebody_removes_comes_back_private(tmp_path: Path, depth: int) -> None:
    """Else the next start of the job is refused."""
    disk = open_disk(tmp_path)
    paths = [tmp_path / "fast", tmp_path / "fast" / STORE_ID, tmp_path / "fast" / STORE_ID / "checkpoints"]
    shutil.rmtree(paths[depth])
    store(disk)
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o700] * 3
    open_disk(tmp_path).certify(DATA, ranks=HERE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir(mode=0o700)
    os.chown(tmp_path / "fast", 12345, -1)
    with pytest.raises(InvalidInput, match="belongs to user 12345"):
        open_disk(tmp_path)


@pytest.mark.parametrize("store_id", ["", "..", "a/b", "x" * 65, "a\n"])
def test_the_id_of_a_store_stays_one_name(tmp_path: Path, store_id: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be the name of a directory"):
        NodeDisk.open(tmp_path / "fast", store_id, node="a")
    assert not (tmp_path / "fast").exists()


def test_stores_do_not_see_each_other_and_links_lead_nowhere(tmp_path: Path) -> None:
    disk, other = open_disk(tmp_path), NodeDisk.open(tmp_path / "fast", "ab" * 16, node="a")
    store(other)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    store(disk)
    (disk.storage.local_path(ATTEMPT.key("link"))).symlink_to(outside)
    disk.storage.local_path(OTHER.prefix.rstrip("/")).symlink_to(outside)
    assert disk.attempts() == [ATTEMPT]
    disk.delete(ATTEMPT)
    assert (outside / "precious").read_bytes() == b"x"
    assert other.attempts() == [ATTEMPT]


# Killed at any moment

EVENTS = {"open", "os.link", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "os.mkdir"}


def act_and_die(base: str, action: str, kills: str) -> int:
    """Do it and die at the call that has the number of this rank; or return how many calls there are."""
    rank = int(os.environ["RANK"])
    disk = open_disk(Path(base) / f"{action}-{rank}")
    store(disk)
    if action == "delete":
        disk.certify(DATA, ranks=HERE)
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS and STORE_ID in os.fsdecode(arguments[0] if isinstance(arguments[0], str | bytes) else ""):
            if kills == "kill" and count == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(watch)
    disk.certify(DATA, ranks=HERE) if action == "certify" else disk.delete(ATTEMPT)
    return count


@pytest.mark.parametrize("action", ["certify", "delete"])
def test_killed_at_any_call_it_is_certified_and_whole_or_not_certified(tmp_path: Path, action: str) -> None:
    (count,) = run_ranks(1, act_and_die, str(tmp_path / "counted"), action, "count")
    assert count >= 8
    run_ranks(count, act_and_die, str(tmp_path), action, "kill", expect_killed=range(count))
    certified = 0
    for rank in range(count):
        disk = open_disk(tmp_path / f"{action}-{rank}")
        for seen in disk.look()[0]:
            assert not seen.fault
            assert not seen.sha256 or certificate().ranks_in(seen.sizes) == {0, 1}
            certified += bool(seen.sha256)
        if action == "certify":
            disk.certify(DATA, ranks=HERE)
        disk.delete(ATTEMPT)
        assert list(disk.storage.local_path("checkpoints").iterdir()) == []
    assert 0 < certified < count
