"""Test the contract of `ckptstore.storage.base`: inherit, provide the storage, and run pytest.

    class TestMine(StorageContract):
        powers = {CreatesExclusively}

        @pytest.fixture
        def storage(self, tmp_path):
            self.root = tmp_path
            return MyStorage(tmp_path)

        def raw_write(self, key, data): ...
        def raw_read(self, key): ...

The tests of the optional powers are inherited from `ckptstore.testing.storage_powers`. Only these two modules of
ckptstore need pytest.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from ckptstore.config import RetryConfig
from ckptstore.errors import CheckpointDamaged, CkptstoreError, FileMissing, StorageError
from ckptstore.storage.base import POWERS, Storage, methods_of
from ckptstore.storage.retry import retrying
from ckptstore.testing.ranks import run_ranks
from ckptstore.testing.storage_powers import PowersContract

ODD_NAMES = (
    "with space",
    " space before",
    "ünïcödé/文件/😀",
    "n\u0303 as two characters, \u00f1 as one",
    "a+b",
    "100%",
    "%41",
    "a%2Fb",
    "a=b/step=3",
    "~home/~",
    "#fragment",
    "what?x=1&y=2",
    "quotes'\"`",
    "[glob]*{x}",
    "semi;colon:and,comma",
    "user@host",
    "$HOME(1)!",
    "-dash/--dash",
    ".hidden/..two/...three",
    "lower/UPPER/Mixed",
    "<tag>|pipe^",
    "x" * 255,
    "/".join(["deep"] * 60),
    "/".join([*(letter * 255 for letter in "abc"), "é" * 127, "z"]),
)
"""Legal by `layout.check_name`, and each one hard for some storage. The last has 1,024 bytes or one less."""


class StorageContract(PowersContract):
    """Tests every clause of the storage contract. A subclass provides `storage`, `powers` and raw access."""

    powers: ClassVar[Collection[Any]] = ()
    """The protocols of `storage.base` that the storage must have, besides `Storage`. It must have no other."""
    travels: ClassVar[bool] = True
    """True if the storage can be pickled and opened in a new process. If not, pickling must be refused with its URI."""
    leaves_unfinished: ClassVar[bool] = True
    """True if an unfinished upload in parts leaves something behind in a `Bucket`."""
    secrets: ClassVar[Collection[str]] = ()
    """Secrets of the storage that it must never show."""
    num_listed_files: ClassVar[int] = 1100
    """The number of files in a listing; more than a page of an object store."""
    num_deleted_files: ClassVar[int] = 2500
    """The number of keys in a call of `delete`; more than an object store takes in one request."""

    @pytest.fixture
    def storage(self) -> Any:
        """Return an empty storage, a new one for each test."""
        raise NotImplementedError("The subclass gives a fixture `storage`")

    def raw_write(self, key: str, data: bytes) -> None:
        """Write a file at the location of the storage under test without using it."""
        raise NotImplementedError("The subclass writes bytes past the storage")

    def raw_read(self, key: str) -> bytes:
        """Read a file at the location of the storage under test without using it."""
        raise NotImplementedError("The subclass reads bytes past the storage")

    def test_it_has_the_powers_that_are_declared(self, storage: Any) -> None:
        assert isinstance(storage, Storage)
        found = {power.__name__ for power in POWERS if isinstance(storage, power)}
        assert found == {power.__name__ for power in self.powers}

    def test_it_has_no_half_of_a_power(self, storage: Any) -> None:
        for power in POWERS:
            found = {name for name in methods_of(power) if callable(getattr(storage, name, None))}
            missing = methods_of(power) - found
            assert not found or not missing, (
                f"{type(storage).__name__} has {', '.join(sorted(found))} of {power.__name__}, and lacks "
                f"{', '.join(sorted(missing))}. Half a power is never used: write the rest, or take it away"
            )

    def test_it_shows_its_place_and_no_secret(self, storage: Any) -> None:
        assert isinstance(storage.uri, str)
        assert storage.uri
        with pytest.raises(FileMissing) as caught:
            storage.read("nowhere")
        for shown in (storage.uri, repr(storage), str(storage), str(caught.value), repr(caught.value)):
            assert not [secret for secret in self.secrets if secret in shown]

    @pytest.mark.parametrize(
        "pieces", [(), (b"",), (b"x",), (b"ab", b"", b"c", b"defg"), (b"x" * 70_000, b"y", b"z" * 4096)]
    )
    def test_what_was_written_is_read(self, storage: Any, pieces: tuple[bytes, ...]) -> None:
        storage.write("some/file", [memoryview(piece) for piece in pieces])
        data = b"".join(pieces)
        assert storage.read("some/file") == data
        assert self.raw_read("some/file") == data
        assert storage.stat("some/file").size_bytes == len(data)
        assert [(file.key, file.size_bytes) for file in storage.list("")] == [("some/file", len(data))]

    def test_what_others_wrote_is_read(self, storage: Any) -> None:
        self.raw_write("a/b", b"123")
        assert storage.read("a/b") == b"123"
        assert storage.stat("a/b").size_bytes == 3
        assert [file.key for file in storage.list("a/")] == ["a/b"]
        self.raw_write("a/b", b"4567")
        assert storage.read("a/b") == b"4567"
        assert storage.stat("a/b").size_bytes == 4

    def test_many_views_become_one_file(self, storage: Any) -> None:
        whole = bytearray(range(256)) * 40
        storage.write("f", [memoryview(whole)[at : at + 5] for at in range(0, len(whole), 5)])
        assert storage.read("f") == whole

    @pytest.mark.parametrize("size_bytes", [0, 1, 9])
    def test_writing_again_replaces_all(self, storage: Any, size_bytes: int) -> None:
        storage.write("f", [memoryview(b"12345")])
        storage.write("f", [memoryview(bytes(size_bytes))])
        assert storage.read("f") == bytes(size_bytes) == self.raw_read("f")

    def test_views_are_not_kept(self, storage: Any) -> None:
        buffer = bytearray(b"before")
        storage.write("f", [memoryview(buffer)])
        buffer[:] = b"after."
        assert storage.read("f") == b"before"
        buffer.append(0)  # would raise BufferError if a view of it lived on

    def test_large_file_in_ranges_from_many_threads(self, storage: Any) -> None:
        data = bytes(range(251)) * (3 * (1 << 20) // 251) + b"end"
        half = len(data) // 2 + 1
        storage.write("large", [memoryview(data)[:half], memoryview(data)[half:]])
        assert storage.read("large") == data
        step = 300_007
        found = bytearray(len(data))

        def read(at: int) -> None:
            end = min(at + step, len(data))
            middle = (at + end) // 2
            storage.read_into("large", at, [memoryview(found)[at:middle], memoryview(found)[middle:end]])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(0, len(data), step)))
        assert found == data

    @pytest.mark.parametrize(
        ("offset", "sizes"),
        [(0, [10]), (0, [1]), (9, [1]), (3, [4]), (2, [1, 0, 5, 2]), (0, [0, 10, 0]), (10, [0]), (5, []), (0, [0])],
    )
    def test_ranges(self, storage: Any, offset: int, sizes: list[int]) -> None:
        storage.write("f", [memoryview(b"0123456789")])
        buffers = [bytearray(size) for size in sizes]
        storage.read_into("f", offset, [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == b"0123456789"[offset : offset + sum(sizes)]

    @pytest.mark.parametrize(
        ("size_bytes", "offset", "sizes"),
        [(10, 0, [11]), (10, 9, [2]), (10, 9, [1, 1]), (10, 10, [1]), (10, 1000, [1]), (0, 0, [1])],
    )
    def test_a_file_that_ends_early_is_damaged(
        self, storage: Any, size_bytes: int, offset: int, sizes: list[int]
    ) -> None:
        self.raw_write("dir/short", bytes(size_bytes))
        with pytest.raises(CheckpointDamaged, match="dir/short"):
            storage.read_into("dir/short", offset, [memoryview(bytearray(size)) for size in sizes])

    def test_what_is_missing_is_named(self, storage: Any) -> None:
        storage.write("dir/there", [memoryview(b"x")])
        view = memoryview(bytearray(1))
        for key in ("dir/missing", "dir", "dir/there2", "else/where"):
            for request in (storage.read, storage.stat, lambda key: storage.read_into(key, 0, [view])):
                with pytest.raises(FileMissing) as caught:
                    request(key)
                assert key in str(caught.value)
                assert isinstance(caught.value, FileNotFoundError)

    def test_stat_and_list_say_the_same(self, storage: Any) -> None:
        storage.write("a/b", [memoryview(b"123")])
        found = storage.stat("a/b")
        assert (found.key, found.size_bytes) == ("a/b", 3)
        assert found.modified_seconds > 1e9, "seconds since the epoch"
        assert storage.stat("a/b") == found
        (listed,) = storage.list("a/")
        assert (listed.key, listed.size_bytes) == ("a/b", 3)
        assert abs(listed.modified_seconds - found.modified_seconds) <= 1, "some listings have whole seconds"
        assert listed.version == found.version

    def test_the_clock_of_the_storage_does_not_run_backwards(self, storage: Any) -> None:
        times = []
        for index in range(3):
            storage.write(f"f{index}", [memoryview(b"x")])
            times.append(storage.stat(f"f{index}").modified_seconds)
        assert times == sorted(times)

    def test_a_version_stands_for_contents(self, storage: Any) -> None:
        storage.write("f", [memoryview(b"first")])
        versions = [storage.stat("f").version]
        if versions[0] is None:
            pytest.skip("this storage has no versions")
        for text in (b"secon", b"third"):
            storage.write("f", [memoryview(text)])
            versions.append(storage.stat("f").version)
        assert len(set(versions)) == 3
        found = bytearray(5)
        storage.read_into("f", 0, [memoryview(found)], version=versions[-1])
        assert found == b"third"
        for version in versions[:-1]:
            with pytest.raises(CheckpointDamaged, match="f"):
                storage.read_into("f", 0, [memoryview(found)], version=version)

    @pytest.mark.parametrize(
        ("prefix", "keys"),
        [
            ("", {"a", "ab", "ab.c/x", "abc/d/e", "abc/f", "b/a", "b/ab"}),
            ("a", {"a", "ab", "ab.c/x", "abc/d/e", "abc/f"}),
            ("ab", {"ab", "ab.c/x", "abc/d/e", "abc/f"}),
            ("abc", {"abc/d/e", "abc/f"}),
            ("abc/", {"abc/d/e", "abc/f"}),
            ("abc/d", {"abc/d/e"}),
            ("abc/d/e", {"abc/d/e"}),
            ("abc/d/e/", set()),
            ("ab.", {"ab.c/x"}),
            ("b/a", {"b/a", "b/ab"}),
            ("b/ab", {"b/ab"}),
            ("c", set()),
            ("a/", set()),
            ("nowhere/at/all", set()),
        ],
    )
    def test_a_prefix_is_a_string_and_no_directory(self, storage: Any, prefix: str, keys: set[str]) -> None:
        for key in ("a", "ab", "ab.c/x", "abc/d/e", "abc/f", "b/a", "b/ab"):
            storage.write(key, [memoryview(b"x")])
        found = [file.key for file in storage.list(prefix)]
        assert sorted(found) == sorted(keys)

    def test_an_empty_place_lists_nothing(self, storage: Any) -> None:
        assert list(storage.list("")) == []
        assert list(storage.list("log/")) == []
        storage.delete(["log/1"])

    def test_a_long_listing_is_complete(self, storage: Any) -> None:
        keys = {f"many/{index % 7}/{index:05d}" for index in range(self.num_listed_files)}
        _write_all(storage, keys)
        found = [file.key for file in storage.list("many/")]
        assert len(found) == len(keys)
        assert set(found) == keys

    @pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
    def test_odd_names(self, storage: Any, name: str) -> None:
        storage.write("other", [memoryview(b"")])
        storage.write(name, [memoryview(b"123")])
        assert self.raw_read(name) == b"123"
        assert storage.read(name) == b"123"
        found = bytearray(2)
        storage.read_into(name, 1, [memoryview(found)])
        assert found == b"23"
        assert storage.stat(name).key == name
        for prefix in ("", name[: len(name) // 2 + 1], name):
            assert name in [file.key for file in storage.list(prefix)]
        storage.delete([name])
        assert [file.key for file in storage.list("")] == ["other"]
        self.raw_write(name, b"4")
        assert storage.read(name) == b"4"

    def test_names_that_look_alike_are_different_files(self, storage: Any) -> None:
        keys = ["a b", "a+b", "a%20b", "a%2Bb", "A b", "é", "e\u0301"]
        for key in keys:
            storage.write(key, [memoryview(key.encode())])
        assert [storage.read(key).decode() for key in keys] == keys
        assert sorted(file.key for file in storage.list("")) == sorted(keys)

    def test_delete_removes_these_files_and_no_other(self, storage: Any) -> None:
        for key in ("d/a", "d/ab", "d/a.c", "e"):
            storage.write(key, [memoryview(b"x")])
        storage.delete(["d/a"])
        assert {file.key for file in storage.list("")} == {"d/ab", "d/a.c", "e"}
        with pytest.raises(FileMissing):
            storage.read("d/a")
        storage.delete(["d/a", "d/a", "never/was", "e"])
        storage.delete([])
        assert {file.key for file in storage.list("")} == {"d/ab", "d/a.c"}
        storage.write("e", [memoryview(b"again")])
        assert storage.read("e") == b"again"

    def test_what_leads_to_a_file_is_not_deleted(self, storage: Any) -> None:
        storage.write("d/e/f", [memoryview(b"x")])
        for key in ("d", "d/e", "d/e/f/g"):
            with contextlib.suppress(StorageError):  # a disk may say that it is a directory
                storage.delete([key])
        assert [file.key for file in storage.list("")] == ["d/e/f"]

    def test_delete_takes_thousands_of_keys(self, storage: Any) -> None:
        keys = [f"many/{index:05d}" for index in range(self.num_deleted_files)]
        edges = {index for batch in (256, 1000, 2000) for index in range(batch - 2, batch + 2)}
        existing = [*keys[:2], *(keys[index] for index in sorted(edges) if index < len(keys) - 2), *keys[-2:]]
        _write_all(storage, [*existing, "many/stays"])
        retrying(RetryConfig.from_env(), "delete", lambda: storage.delete(keys))  # as all callers do
        assert [file.key for file in storage.list("many/")] == ["many/stays"]

    def test_threads_do_not_disturb_each_other(self, storage: Any) -> None:
        start = threading.Barrier(8)

        def work(worker: int) -> None:
            start.wait()
            for turn in range(5):
                key, data = f"{worker}/{turn}", bytes([worker, turn]) * 5000
                storage.write(key, [memoryview(data)])
                assert storage.read(key) == data
                assert storage.stat(key).size_bytes == len(data)
                assert [file.key for file in storage.list(f"{worker}/")] == [key]
                storage.delete([key])

        with ThreadPoolExecutor(8) as pool:
            for end in [pool.submit(work, worker) for worker in range(8)]:
                end.result()
        assert list(storage.list("")) == []

    def test_it_opens_again_in_a_new_process(self, storage: Any) -> None:
        if not self.travels:
            with pytest.raises(CkptstoreError) as caught:
                pickle.dumps(storage)
            assert storage.uri in str(caught.value)
            return
        storage.write("here", [memoryview(b"written here")])
        (found,) = run_ranks(1, _exchange_files, storage)
        assert found == b"written here"
        assert storage.read("there") == b"written there"

    def test_a_fork_works_or_says_why_not(self, storage: Any) -> None:
        if not self.travels:
            pytest.skip("the storage cannot be sent to a process in which forking is safe")
        storage.write("here", [memoryview(b"x")])
        (outcome,) = run_ranks(1, _use_in_fork, storage, timeout_seconds=60)
        assert outcome in ("works", "refused")

    def test_close_comes_last(self, storage: Any) -> None:
        storage.write("f", [memoryview(b"x")])
        storage.close()
        assert self.raw_read("f") == b"x"


def _write_all(storage: Storage, keys: Iterable[str]) -> None:
    with ThreadPoolExecutor(16) as pool:
        for end in [pool.submit(storage.write, key, [memoryview(b"x")]) for key in keys]:
            end.result()


def _exchange_files(storage: Storage) -> bytes:
    storage.write("there", [memoryview(b"written there")])
    return storage.read("here")


def _use_in_fork(storage: Storage) -> str:
    import os

    storage.read("here")
    process_id = os.fork()
    if process_id == 0:
        try:
            works = storage.read("here") == b"x"
            os._exit(10 if works else 12)
        except CkptstoreError:
            os._exit(11)
        finally:
            os._exit(13)
    status = os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
    return {10: "works", 11: "refused"}.get(status, f"ended with {status}")
