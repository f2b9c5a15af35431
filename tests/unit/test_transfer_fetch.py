"""Downloads and checks: a file on the local disk is the one that was wanted, or it is not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moving import DATA, MIB, make_storage, transfer_over, transfers_end, wanted  # noqa: F401
from small_disks import mounted

from ckptstore.errors import AccessDenied, CheckpointDamaged, FileMissing, StorageError, StorageFull
from ckptstore.events import BytesMoved, Event, listening
from ckptstore.format.digest import ALGORITHMS, Digest
from ckptstore.runtime.beat import beating
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.testing.faults import CountCalls, FailAt, TearAt, wrap
from ckptstore.transfer import Wanted

SIZES = [0, 1, 4096, MIB, MIB + 1, 17 * MIB + 3, len(DATA)]


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    storage = make_storage(request.param, tmp_path)
    for size in SIZES:
        storage.write(f"d/{size}", [memoryview(DATA)[:size]])
    for number in range(300):
        storage.write(f"many/{number % 5}/{number}", [memoryview(DATA)[number : 2 * number]])
    return storage


ALL = [
    *(wanted(f"d/{size}", DATA[:size]) for size in SIZES),
    *(wanted(f"many/{number % 5}/{number}", DATA[number : 2 * number]) for number in range(300)),
]


def files_below(path: Path) -> set[str]:
    return {str(item.relative_to(path)) for item in path.rglob("*") if item.is_file()}


@pytest.mark.parametrize("durable", [True, False])
def test_a_download_is_what_was_stored(storage: Any, tmp_path: Path, durable: bool) -> None:
    target = tmp_path / "target"
    beats: list[int] = []
    with beating(lambda: beats.append(1)):
        transfer_over(storage, durable=durable).download([(item, target / item.key) for item in ALL])
    assert files_below(target) == {item.key for item in ALL}
    for item in ALL:
        assert (target / item.key).read_bytes() == storage.read(item.key)
    assert beats


@pytest.mark.parametrize("size", [4096, 17 * MIB + 3])
def test_a_directory_that_is_removed_meanwhile_is_no_missing_file(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(os, "makedirs", lambda *_, **__: None)  # removed as soon as it is made
    with pytest.raises(StorageError, match="No such file or directory") as caught:
        transfer_over(storage).download([(wanted(f"d/{size}", DATA[:size]), tmp_path / "gone/file")])
    assert not isinstance(caught.value, FileMissing)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_download_may_be_for_reading_alone(storage: Any, tmp_path: Path, read_only: bool) -> None:
    transfer_over(storage).download([(item, f"{tmp_path}/target/{item.key}") for item in ALL], read_only=read_only)
    found = [path for path in (tmp_path / "target").rglob("*") if path.is_file()]
    assert len(found) == len(ALL)
    assert {bool(path.stat().st_mode & 0o222) for path in found} == {not read_only}


@pytest.mark.parametrize("durable", [True, False])
def test_a_download_is_made_durable(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    flushed: list[str] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    transfer_over(storage).download([(item, tmp_path / "target" / item.key) for item in ALL[:4]], durable=durable)
    expected = {str(tmp_path / "target" / item.key) for item in ALL[:4]} | {str(tmp_path / "target/d")}
    assert expected <= set(flushed) if durable else not flushed


def damage(storage: Any, key: str, at: int) -> None:
    data = bytearray(storage.read(key))
    data[at] ^= 1
    storage.write(key, [memoryview(data)])


@pytest.mark.parametrize("size", [4096, len(DATA)])
def test_a_damaged_file_is_not_kept(storage: Any, tmp_path: Path, size: int) -> None:
    damage(storage, f"d/{size}", size - 1)
    counted = CountCalls()
    with pytest.raises(CheckpointDamaged, match=r"expected, [0-9a-f]{8} is found") as caught:
        transfer_over(wrap(storage, counted)).download([(item, tmp_path / "target" / item.key) for item in ALL])
    assert caught.value.file == f"d/{size}"
    assert f"d/{size}" not in files_below(tmp_path / "target")
    assert len([call for call in counted.calls if call.key == "d/4096"]) == (2 if size == 4096 else 1)


@pytest.mark.parametrize("key", ["d/4096", f"d/{len(DATA)}"])
def test_a_bit_that_flips_on_its_way_is_fetched_again(storage: Any, tmp_path: Path, key: str) -> None:
    flipped: list[str] = []

    class Flipping:
        def __getattr__(self, name: str) -> Any:
            return getattr(storage, name)

        def read_into(self, name: str, offset: int, views: Any, *, version: str | None = None) -> None:
            storage.read_into(name, offset, views, version=version)
            if name == key and not flipped:
                flipped.append(name)
                views[0][0] ^= 1

    transfer_over(Flipping()).download([(item, tmp_path / "target" / item.key) for item in ALL])
    assert flipped
    assert (tmp_path / "target" / key).read_bytes() == storage.read(key)


def test_a_missing_or_short_file_is_named(storage: Any, tmp_path: Path) -> None:
    transfer = transfer_over(storage)
    with pytest.raises(FileMissing) as caught:
        transfer.download([(Wanted("gone", 10, Digest.of()), tmp_path / "a/gone")])
    assert caught.value.file == "gone"
    with pytest.raises(CheckpointDamaged, match="d/4096"):
        transfer.download([(Wanted("d/4096", 5 * MIB, Digest.of()), tmp_path / "b/short")])
    assert files_below(tmp_path / "a") == files_below(tmp_path / "b") == set()


def test_other_errors_end_the_download(storage: Any, tmp_path: Path) -> None:
    big = wanted(f"d/{len(DATA)}", DATA)
    fault = FailAt(f"read_into {big.key}", AccessDenied("no"), skip=1, times=None)
    with pytest.raises(AccessDenied) as caught:
        transfer_over(wrap(storage, fault)).download([(item, tmp_path / "target" / item.key) for item in ALL])
    assert caught.value.file == big.key
    assert big.key not in files_below(tmp_path / "target"), "a torn file is left"


def test_passing_errors_are_retried(storage: Any, tmp_path: Path) -> None:
    flaky = wrap(storage, TearAt("read_into *", times=5))
    transfer_over(flaky).download([(item, tmp_path / "target" / item.key) for item in ALL])
    assert all((tmp_path / "target" / item.key).read_bytes() == storage.read(item.key) for item in ALL)


def test_nothing_is_overwritten(storage: Any, tmp_path: Path) -> None:
    for item in (ALL[2], ALL[-1], ALL[6]):
        path = tmp_path / "target" / item.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"keep")
        with pytest.raises(StorageError, match="File exists"):
            transfer_over(storage).download([(item, path)])
        assert path.read_bytes() == b"keep"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "8m") as place:
        yield place


def test_a_full_disk_ends_a_download(storage: Any, small_disk: Path) -> None:
    transfer = transfer_over(storage)
    with pytest.raises(StorageFull, match=r"bytes are needed, [\d,]+ bytes are free") as caught:
        transfer.download([(wanted(f"d/{len(DATA)}", DATA), small_disk / "file")])
    assert caught.value.file == f"d/{len(DATA)}"
    assert files_below(small_disk) == set()
    few = [(wanted("d/1", DATA[:1]), small_disk / "few")]
    transfer.download(few)


def test_a_full_disk_ends_an_upload(small_disk: Path, tmp_path: Path) -> None:
    from moving import from_file, from_memory

    storage = LocalStorage(small_disk / "store")
    transfer = transfer_over(storage)
    with pytest.raises(StorageFull, match=r"bytes are needed, [\d,]+ bytes are free") as caught:
        transfer.upload([from_memory("big", DATA)])
    assert caught.value.file == "big"
    assert list(storage.list("")) == []
    files = [from_file(f"{n}", tmp_path / f"source/{n}", DATA[:100_000]) for n in range(200)]
    with pytest.raises(StorageFull) as caught:
        transfer.upload(files)
    assert caught.value.file in {file.key for file in files}


def test_a_check_names_every_bad_file(storage: Any) -> None:
    transfer = transfer_over(storage)
    assert [found.damage for found in transfer.check(ALL)] == [None] * len(ALL)
    assert [found.digest for found in transfer.check(ALL)] == [item.digest for item in ALL]
    damage(storage, f"d/{len(DATA)}", 20 * MIB)
    damage(storage, "many/2/7", 3)
    storage.write("d/4096", [memoryview(DATA)[:4095]])
    storage.write("d/1", [memoryview(DATA)[:2]])
    storage.delete(["many/0/20", f"d/{MIB + 1}"])
    found = {item.wanted.key: item.damage for item in transfer.check(ALL) if item.damage}
    assert set(found) == {f"d/{len(DATA)}", "many/2/7", "d/4096", "d/1", "many/0/20", f"d/{MIB + 1}"}
    assert {key for key, error in found.items() if isinstance(error, FileMissing)} == {"many/0/20", f"d/{MIB + 1}"}
    assert all(error.file == key for key, error in found.items())
    assert "2 bytes, 1 are expected" in str(found["d/1"])


def test_a_check_without_a_digest_compares_the_size(storage: Any) -> None:
    good, bad = transfer_over(storage).check([Wanted("d/4096", 4096, None), Wanted("d/1", 5, None)])
    assert good.damage is None
    assert good.digest == wanted("d/4096", DATA[:4096]).digest
    assert isinstance(bad.damage, CheckpointDamaged)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("fetches", [True, False])
def test_every_byte_is_told(storage: Any, tmp_path: Path, algorithm: str, fetches: bool) -> None:
    """Of a large file more than once, though all of it is one task where its digest needs an order."""
    files = [item._replace(digest=Digest.of(storage.read(item.key), algorithm=algorithm)) for item in ALL]
    heard: list[Event] = []
    transfer = transfer_over(storage)
    with listening(heard.append):
        if fetches:
            transfer.download([(item, tmp_path / "target" / item.key) for item in files])
        else:
            transfer.check(files)
    moved = [event for event in heard if isinstance(event, BytesMoved)]
    total_bytes = sum(item.size_bytes for item in files)
    assert sum(event.size_bytes for event in moved) == total_bytes
    assert {event.total_bytes for event in moved} == {total_bytes}
    assert sum(event.key == f"d/{len(DATA)}" for event in moved) > 1


def test_a_check_that_is_not_allowed_to_read_says_so(storage: Any) -> None:
    with pytest.raises(AccessDenied):
        transfer_over(wrap(storage, FailAt("read_into many/1/*", AccessDenied("no"), times=None))).check(ALL)
