"""Test the optional powers of the storage contract; see `storage_contract`.

A test runs when the storage has the power; another test checks that it has the declared ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ckptstore.errors import CheckpointDamaged, FileMissing, StorageError
from ckptstore.storage import base
from ckptstore.testing.ranks import run_ranks


def _need(storage: Any, power: type) -> None:
    if not isinstance(storage, power):
        pytest.skip(f"the storage does not have {power.__name__}")


class PowersContract:
    """Tests create-if-absent, parts, the powers of a disk, copies, unfinished uploads."""

    travels: ClassVar[bool]
    leaves_unfinished: ClassVar[bool]
    raw_write: Callable[[str, bytes], None]
    raw_read: Callable[[str], bytes]

    # ---- CreatesExclusively

    @pytest.mark.parametrize("data", [b"", b"first", b"x" * 100_000])
    def test_create_makes_what_is_absent(self, storage: Any, data: bytes) -> None:
        _need(storage, base.CreatesExclusively)
        assert storage.create("log/0000000001.json", data) is True
        assert self.raw_read("log/0000000001.json") == data == storage.read("log/0000000001.json")
        assert [file.key for file in storage.list("log/")] == ["log/0000000001.json"]

    def test_create_changes_nothing_that_exists(self, storage: Any) -> None:
        _need(storage, base.CreatesExclusively)
        storage.write("written", [memoryview(b"1")])
        self.raw_write("by others", b"2")
        assert storage.create("created", b"3") is True
        before = {key: storage.stat(key) for key in ("written", "by others", "created")}
        for key in before:
            for data in (b"other", b"", storage.read(key)):
                assert storage.create(key, data) is False
        assert {key: storage.stat(key) for key in before} == before
        assert [storage.read(key) for key in before] == [b"1", b"2", b"3"]
        assert {file.key for file in storage.list("")} == set(before)

    def test_create_again_after_delete(self, storage: Any) -> None:
        _need(storage, base.CreatesExclusively)
        assert storage.create("k", b"1")
        storage.delete(["k"])
        assert storage.create("k", b"2") is True
        assert storage.read("k") == b"2"

    def test_of_many_creators_one_wins_and_nobody_sees_a_part(self, storage: Any) -> None:
        _need(storage, base.CreatesExclusively)
        size_bytes, racers, keys = 65_536, 8, [f"race/{index}" for index in range(20)]
        start, done = threading.Barrier(racers + 2), threading.Event()

        def create(racer: int) -> list[bool]:
            start.wait()
            return [storage.create(key, bytes([racer]) * size_bytes) for key in keys]

        def watch() -> set[tuple[str, int]]:
            start.wait()
            seen = set()
            while not done.is_set():
                for key in keys:
                    try:
                        data = storage.read(key)
                    except FileMissing:
                        break  # the racers have not come further
                    assert len(data) == size_bytes
                    assert len(set(data)) == 1
                    seen.add((key, data[0]))
            return seen

        with ThreadPoolExecutor(racers + 2) as pool:
            watchers = [pool.submit(watch) for _ in range(2)]
            try:
                ends = [end.result() for end in [pool.submit(create, racer) for racer in range(racers)]]
            finally:
                done.set()
            seen = set().union(*(watcher.result() for watcher in watchers))
        for index, key in enumerate(keys):
            winners = [racer for racer in range(racers) if ends[racer][index]]
            assert len(winners) == 1
            assert self.raw_read(key) == bytes(winners) * size_bytes
            assert {racer for seen_key, racer in seen if seen_key == key} <= set(winners)
        assert sorted(file.key for file in storage.list("")) == sorted(keys)

    def test_of_several_processes_one_wins(self, storage: Any) -> None:
        _need(storage, base.CreatesExclusively)
        if not self.travels:
            pytest.skip("the storage belongs to one process")
        ends = run_ranks(4, _create_in_process, storage, time.time() + 2, timeout_seconds=250)
        for index in range(20):
            (winner,) = [rank for rank in range(4) if ends[rank][index]]
            assert self.raw_read(f"race/{index}") == bytes([winner]) * 1000

    # ---- WritesParts

    @pytest.mark.parametrize("last_bytes", [1, -1, 0])
    def test_parts_in_any_order_from_several_threads(self, storage: Any, last_bytes: int) -> None:
        _need(storage, base.WritesParts)
        data, part_bytes = _parts_of(storage, last_bytes)
        writer = storage.open_parts("dir/parts", len(data))
        offsets = list(range(0, len(data), part_bytes))[::-1]

        def write(offset: int) -> None:
            part = memoryview(data)[offset : offset + part_bytes]
            writer.write_part(offset, [part[:100], part[100:100], part[100:]])

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(write, offsets))
        writer.finish()
        assert self.raw_read("dir/parts") == data
        assert storage.read("dir/parts") == data
        found = storage.stat("dir/parts")
        assert [(file.key, file.size_bytes, file.version) for file in storage.list("")] == [
            ("dir/parts", len(data), found.version)
        ]

    def test_parts_replace_a_file(self, storage: Any) -> None:
        _need(storage, base.WritesParts)
        data, part_bytes = _parts_of(storage, 1)
        storage.write("f", [memoryview(b"old")])
        _write_parts(storage.open_parts("f", len(data)), data, part_bytes)
        assert storage.read("f") == data

    def test_a_part_may_be_written_again(self, storage: Any) -> None:
        _need(storage, base.WritesParts)
        data, part_bytes = _parts_of(storage, 1)
        writer = storage.open_parts("f", len(data))
        writer.write_part(0, [memoryview(bytes(part_bytes))])
        _write_parts(writer, data, part_bytes)
        assert storage.read("f") == data

    def test_two_writers_do_not_mix(self, storage: Any) -> None:
        _need(storage, base.WritesParts)
        data, part_bytes = _parts_of(storage, 1)
        other = data[::-1]
        first, second = storage.open_parts("one", len(data)), storage.open_parts("two", len(other))
        for offset in range(0, len(data), part_bytes):
            first.write_part(offset, [memoryview(data)[offset : offset + part_bytes]])
            second.write_part(offset, [memoryview(other)[offset : offset + part_bytes]])
        second.finish()
        first.finish()
        assert (storage.read("one"), storage.read("two")) == (data, other)

    @pytest.mark.parametrize("num_parts", [0, 1, 3])
    def test_aborted_parts_are_no_file(self, storage: Any, num_parts: int) -> None:
        _need(storage, base.WritesParts)
        data, part_bytes = _parts_of(storage, 1)
        writer = storage.open_parts("f", len(data))
        for offset in range(0, len(data), part_bytes)[:num_parts]:
            writer.write_part(offset, [memoryview(data)[offset : offset + part_bytes]])
        writer.abort()
        writer.abort()
        with pytest.raises(FileMissing):
            storage.stat("f")
        assert list(storage.list("")) == []
        _write_parts(storage.open_parts("f", len(data)), data, part_bytes)
        assert storage.read("f") == data

    # ---- Disk

    def test_many_files_are_written_as_one_by_one(self, storage: Any) -> None:
        _need(storage, base.Disk)
        files = {f"many/{index % 3}/é {index}": (bytes([index % 256]) * (index % 50)) for index in range(300)}
        storage.write("many/0/é 0", [memoryview(b"old, and longer than what replaces it")])
        pieces = [(key, [memoryview(data)[:10], memoryview(data)[10:]]) for key, data in files.items()]
        storage.write_many([*pieces, ("empty", []), ("other/large", [memoryview(bytes(100_000))])])
        files.update({"empty": b"", "other/large": bytes(100_000)})
        assert {file.key: file.size_bytes for file in storage.list("")} == {key: len(files[key]) for key in files}
        assert {key: self.raw_read(key) for key in files} == files
        assert storage.useful_threads() >= 1
        storage.write_many([])
        storage.write_many(pieces[:1])
        storage.persist([*files])
        assert {key: storage.read(key) for key in files} == files

    def test_overwrite(self, storage: Any) -> None:
        _need(storage, base.Disk)
        for data in (b"first", b"second, and longer", b"3rd", b""):
            storage.overwrite("hints/hint", data)
            assert storage.read("hints/hint") == data
        storage.write("before", [memoryview(b"read-only")])
        storage.overwrite("before", b"new")
        assert self.raw_read("before") == b"new"
        assert {file.key for file in storage.list("")} == {"hints/hint", "before"}

    def test_persist(self, storage: Any) -> None:
        _need(storage, base.Disk)
        keys = [f"deep/er/{index}" for index in range(20)] + ["top"]
        for key in keys:
            storage.write(key, [memoryview(b"x")])
        storage.persist(keys)
        storage.persist(keys[:1])
        storage.persist([])
        assert all(storage.read(key) == b"x" for key in keys)
        assert not any(storage.local_path(key).stat().st_mode & 0o222 for key in keys)
        storage.delete(keys)
        assert list(storage.list("")) == []

    def test_what_is_missing_cannot_be_made_durable(self, storage: Any) -> None:
        _need(storage, base.Disk)
        storage.write("there", [memoryview(b"x")])
        storage.persist(["there"])
        with pytest.raises(StorageError):
            storage.persist(["missing"])

    def test_free_bytes(self, storage: Any) -> None:
        _need(storage, base.Disk)
        assert storage.free_bytes() > 0
        storage.write("f", [memoryview(b"x")])
        assert isinstance(storage.free_bytes(), int)

    def test_paths_lead_to_the_files(self, storage: Any) -> None:
        _need(storage, base.Disk)
        storage.write("dir/a b", [memoryview(b"x")])
        assert storage.local_path("dir/a b").read_bytes() == b"x"
        assert storage.local_path("") / "dir/a b" == storage.local_path("dir/a b")
        assert not storage.local_path("new/file").parent.exists()

    def test_directories_are_made_and_not_listed(self, storage: Any) -> None:
        _need(storage, base.Disk)
        for _ in range(2):
            storage.make_directory("one/two/three")
        assert storage.local_path("one/two/three").is_dir()
        assert list(storage.list("")) == []
        for request in (storage.stat, storage.read):
            with pytest.raises(FileMissing):
                request("one/two")

    def test_only_empty_directories_are_removed(self, storage: Any) -> None:
        _need(storage, base.Disk)
        storage.make_directory("one/two/three")
        storage.make_directory("one/four")
        storage.write("one/two/file", [memoryview(b"x")])
        storage.remove_directories("one")
        assert storage.read("one/two/file") == b"x"
        assert not storage.local_path("one/two/three").exists()
        assert not storage.local_path("one/four").exists()
        storage.delete(["one/two/file"])
        storage.remove_directories("one")
        storage.remove_directories("never")
        assert not storage.local_path("one").exists()

    def test_a_link_is_the_same_file_or_is_refused(self, storage: Any, tmp_path_factory: Any) -> None:
        _need(storage, base.Disk)
        source: Path = tmp_path_factory.mktemp("outside") / "source"
        source.write_bytes(b"linked")
        keys = ["some/where", "some/where else", "other"]
        linked = storage.link([(source, key) for key in keys])
        existing = [key for key, is_linked in zip(keys, linked, strict=True) if is_linked]
        assert {file.key for file in storage.list("")} == set(existing)
        source.unlink()
        assert all(storage.read(key) == b"linked" for key in existing)
        assert list(storage.link([])) == []

    def test_steps_are_looked_at_as_they_are_filled_and_read_again_if_refused(self, storage: Any) -> None:
        _need(storage, base.Disk)
        data = bytes(range(250)) * 12_000
        storage.write("f", [memoryview(data)])
        sizes = [1, 1_000_000, 0, 70_000, 1_900_000]
        found = [memoryview(bytearray(size)) for size in sizes]
        steps = [[view[: len(view) // 3], view[len(view) // 3 :]] for view in found]
        looked: list[int] = []

        def accept(number: int) -> bool:
            start = 7 + sum(sizes[:number])
            assert found[number] == data[start : start + sizes[number]]
            assert not any(map(any, found[number + 1 :]))
            looked.append(number)
            if looked.count(1) == 1 == number:
                found[1][500] ^= 1
                return False
            return True

        storage.read_steps("f", 7, steps, accept)
        assert looked == [0, 1, 1, 2, 3, 4]

    def test_steps_that_cannot_be_read_raise_what_a_read_raises(self, storage: Any) -> None:
        _need(storage, base.Disk)
        storage.write("f", [memoryview(b"12345")])
        version = storage.stat("f").version
        steps = [[memoryview(bytearray(2))], [memoryview(bytearray(4))]]
        looked: list[int] = []

        def accept(number: int) -> bool:
            looked.append(number)
            return True

        with pytest.raises(CheckpointDamaged, match="5 bytes at most, 6 were expected"):
            storage.read_steps("f", 0, steps, accept, version=version)
        assert looked == [0]
        with pytest.raises(CheckpointDamaged):
            storage.read_steps("f", 0, steps[:1], lambda _: True, version=f"{version}x")
        with pytest.raises(FileMissing):
            storage.read_steps("missing", 0, steps, lambda _: True)

    # ---- no Disk

    def test_what_a_disk_alone_needs_does_nothing_elsewhere(self, storage: Any) -> None:
        if isinstance(storage, base.Disk):
            pytest.skip("the storage is a disk")
        storage.write("dir/f", [memoryview(b"x")])
        storage.make_directory("dir/empty")
        storage.persist(["dir/f"])
        storage.remove_directories("dir")
        assert storage.free_bytes() is None
        assert {file.key: storage.read(file.key) for file in storage.list("")} == {"dir/f": b"x"}

    # ---- CopiesInside

    def test_copies(self, storage: Any) -> None:
        _need(storage, base.CopiesInside)
        data = bytes(range(256)) * 5000
        storage.write("from/a b+c%", [memoryview(data)])
        storage.write("empty", [])
        storage.write("old", [memoryview(b"old")])
        storage.copy("from/a b+c%", "to/é")
        storage.copy("empty", "to/empty")
        storage.copy("from/a b+c%", "old")
        assert storage.read("to/é") == data == storage.read("from/a b+c%") == storage.read("old")
        assert storage.read("to/empty") == b""
        storage.write("from/a b+c%", [memoryview(b"changed")])
        assert self.raw_read("to/é") == data
        with pytest.raises(FileMissing, match="missing"):
            storage.copy("missing", "x")
        assert "x" not in [file.key for file in storage.list("")]

    # ---- Doubt

    def test_what_is_doubted_reads_the_same(self, storage: Any) -> None:
        data, view = bytes(range(256)) * 5000, memoryview(bytearray(5000))
        storage.write("f", [memoryview(data)])
        for key in ("f", "missing"):
            storage.doubt(key)
            storage.doubt(key, 100, 5000)
            storage.read_into("f", 100, [view])
            assert view == data[100:5100]
            assert storage.read("f") == data

    # ---- Settings

    def test_what_it_was_told_is_said_in_words(self, storage: Any) -> None:
        settings = storage.resolved()
        assert not settings or {"endpoint", "credentials", "proxy"} <= settings.keys()
        assert all(isinstance(value, str) and value for value in settings.values())

    # ---- Bucket

    def test_unfinished_uploads_are_found_and_dropped(self, storage: Any) -> None:
        _need(storage, base.Bucket)
        _need(storage, base.WritesParts)
        data, part_bytes = _parts_of(storage, 1)
        for key in ("up/one", "up/two", "elsewhere"):
            storage.open_parts(key, len(data)).write_part(0, [memoryview(data)[:part_bytes]])
        found = storage.unfinished("up/")
        if not self.leaves_unfinished:
            assert list(found) == []
            storage.abort_unfinished("up/one", "any")
            return
        assert sorted(key for key, _ in found) == ["up/one", "up/two"]
        assert list(storage.list("up/")) == []
        for key, upload_id in found:
            storage.abort_unfinished(key, upload_id)
            storage.abort_unfinished(key, upload_id)
        assert list(storage.unfinished("up/")) == []
        assert [key for key, _ in storage.unfinished("")] == ["elsewhere"]

    def test_finished_uploads_are_not_found(self, storage: Any) -> None:
        _need(storage, base.Bucket)
        _need(storage, base.WritesParts)
        data, part_bytes = _parts_of(storage, 1)
        _write_parts(storage.open_parts("f", len(data)), data, part_bytes)
        storage.open_parts("g", len(data)).abort()
        assert list(storage.unfinished("")) == []


def _parts_of(storage: Any, last_bytes: int) -> tuple[bytes, int]:
    """Return bytes for two whole parts and some more or less, and the size of a part."""
    size_bytes = 2 * storage.part_bytes(1) + last_bytes
    while (part_bytes := storage.part_bytes(size_bytes)) * 2 + last_bytes > size_bytes:
        size_bytes = 2 * part_bytes + last_bytes
    assert part_bytes > 0
    return (bytes(range(251)) * (size_bytes // 251 + 1))[:size_bytes], part_bytes


def _write_parts(writer: base.PartWriter, data: bytes, part_bytes: int) -> None:
    for offset in range(0, len(data), part_bytes):
        writer.write_part(offset, [memoryview(data)[offset : offset + part_bytes]])
    writer.finish()


def _create_in_process(storage: base.CreatesExclusively, start_at: float) -> Sequence[bool]:
    import os

    racer = int(os.environ["RANK"])
    time.sleep(max(0.0, start_at - time.time()))
    return [storage.create(f"race/{index}", bytes([racer]) * 1000) for index in range(20)]
