"""Storages that break one clause each, and the test of the contract that notices. Run by test_contract_strict.py."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptstore.errors import CheckpointDamaged, FileMissing, StorageError
from ckptstore.storage.base import CopiesInside, CreatesExclusively, StoredFile, WritesParts
from ckptstore.storage.memory import MemoryStorage
from ckptstore.testing.storage_contract import StorageContract


class _OnMemory(StorageContract):
    powers = frozenset({CreatesExclusively, WritesParts, CopiesInside})
    travels = False
    num_listed_files = 1100
    broken: Callable[[str], Any] = MemoryStorage
    caught_by = ""
    """The test of the suite that must fail; it passes for the sound storage."""

    @pytest.fixture
    def storage(self) -> Any:
        self.place = f"memory://{uuid.uuid4().hex}"
        return type(self).broken(self.place)

    def raw_write(self, key: str, data: bytes) -> None:
        MemoryStorage(self.place).write(key, [memoryview(data)])

    def raw_read(self, key: str) -> bytes:
        return MemoryStorage(self.place).read(key)


class TestSound(_OnMemory):
    """The one for which the same tests must pass."""


class TestLosesAPower(_OnMemory):
    caught_by = "test_it_has_the_powers_that_are_declared"

    class broken(MemoryStorage):
        copy = None  # type: ignore[assignment]


class TestHasAnUndeclaredPower(_OnMemory):
    caught_by = "test_it_has_the_powers_that_are_declared"

    powers = frozenset({CreatesExclusively, WritesParts})


class TestHasHalfOfAPower(_OnMemory):
    caught_by = "test_it_has_no_half_of_a_power"

    class broken(MemoryStorage):
        def local_path(self, key: str) -> Path:
            return Path("/dev/shm", key)


class TestMakesDirectories(_OnMemory):
    caught_by = "test_what_a_disk_alone_needs_does_nothing_elsewhere"

    class broken(MemoryStorage):
        def make_directory(self, key: str) -> None:
            self.write(key, [])


class TestShowsASecret(_OnMemory):
    caught_by = "test_it_shows_its_place_and_no_secret"

    secrets = frozenset({"memory"})


class TestCreateOverwrites(_OnMemory):
    caught_by = "test_create_changes_nothing_that_exists"

    class broken(MemoryStorage):
        def create(self, key: str, data: bytes) -> bool:
            created = super().create(key, data)
            if not created:
                self.write(key, [memoryview(data)])
            return created


class TestCreateLooksThenWrites(_OnMemory):
    caught_by = "test_of_many_creators_one_wins_and_nobody_sees_a_part"

    class broken(MemoryStorage):
        def create(self, key: str, data: bytes) -> bool:
            try:
                self.stat(key)
            except FileMissing:
                time.sleep(0.001)
                self.write(key, [memoryview(data)])
                return True
            return False


class TestCreateShowsAPart(_OnMemory):
    caught_by = "test_of_many_creators_one_wins_and_nobody_sees_a_part"

    class broken(MemoryStorage):
        def __init__(self, uri: str) -> None:
            super().__init__(uri)
            self._was_read = threading.Event()

        def read(self, key: str) -> bytes:
            data = super().read(key)
            self._was_read.set()
            return data

        def create(self, key: str, data: bytes) -> bool:
            created = super().create(key, data[:10])
            if created:
                self._was_read.wait(1)  # the machine may be too busy for a reader within any short time
                self.write(key, [memoryview(data)])
            return created


class TestAppends(_OnMemory):
    caught_by = "test_writing_again_replaces_all"

    class broken(MemoryStorage):
        def write(self, key: str, views: Sequence[memoryview]) -> None:
            try:
                old = self.read(key)
            except FileMissing:
                old = b""
            super().write(key, [*views, memoryview(old)[sum(map(len, views)) :]])


class TestKeepsViews(_OnMemory):
    caught_by = "test_views_are_not_kept"

    class broken(MemoryStorage):
        def write(self, key: str, views: Sequence[memoryview]) -> None:
            self.kept = list(views)
            super().write(key, views)


class TestFillsHolesWithZeros(_OnMemory):
    caught_by = "test_a_file_that_ends_early_is_damaged"

    class broken(MemoryStorage):
        def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
            self.stat(key)
            try:
                super().read_into(key, offset, views, version=version)
            except CheckpointDamaged:
                if version is not None:
                    raise


class TestIgnoresVersions(_OnMemory):
    caught_by = "test_a_version_stands_for_contents"

    class broken(MemoryStorage):
        def read_into(self, key: str, offset: int, views: Sequence[memoryview], *, version: str | None = None) -> None:
            super().read_into(key, offset, views)


class TestListsDirectories(_OnMemory):
    caught_by = "test_a_prefix_is_a_string_and_no_directory"

    class broken(MemoryStorage):
        def list(self, prefix: str) -> Iterator[StoredFile]:
            found = list(super().list(""))
            return iter([file for file in found if not prefix or f"{file.key}/".startswith(f"{prefix.rstrip('/')}/")])


class TestListsOnePage(_OnMemory):
    caught_by = "test_a_long_listing_is_complete"

    class broken(MemoryStorage):
        def list(self, prefix: str) -> Iterator[StoredFile]:
            return iter([*super().list(prefix)][:1000])


class TestUnquotesNames(_OnMemory):
    caught_by = "test_names_that_look_alike_are_different_files"

    class broken(MemoryStorage):
        def read(self, key: str) -> bytes:
            return super().read(key.replace("+", " "))


class TestDeleteNeedsTheFile(_OnMemory):
    caught_by = "test_delete_removes_these_files_and_no_other"

    class broken(MemoryStorage):
        def delete(self, keys: Sequence[str]) -> None:
            for key in keys:
                self.stat(key)
            super().delete(keys)


class TestDeletesOneBatch(_OnMemory):
    caught_by = "test_delete_takes_thousands_of_keys"

    class broken(MemoryStorage):
        def delete(self, keys: Sequence[str]) -> None:
            super().delete(keys[:1000])


class TestDeletesPrefixes(_OnMemory):
    caught_by = "test_what_leads_to_a_file_is_not_deleted"

    class broken(MemoryStorage):
        def delete(self, keys: Sequence[str]) -> None:
            super().delete([file.key for key in set(keys) for file in [*self.list(key)]])


class TestRaisesPlainErrors(_OnMemory):
    caught_by = "test_what_is_missing_is_named"

    class broken(MemoryStorage):
        def stat(self, key: str) -> StoredFile:
            try:
                return super().stat(key)
            except FileMissing:
                raise StorageError(f"no {key}") from None


class TestAbortLeavesParts(_OnMemory):
    caught_by = "test_aborted_parts_are_no_file"

    class broken(MemoryStorage):
        def open_parts(self, key: str, size_bytes: int) -> Any:
            writer = super().open_parts(key, size_bytes)
            writer.abort = lambda: self.write(key, [])  # type: ignore[method-assign]
            return writer


class TestCopyIsALink(_OnMemory):
    caught_by = "test_copies"

    class broken(MemoryStorage):
        def copy(self, source_key: str, key: str) -> None:
            self.links = {**getattr(self, "links", {}), key: source_key}
            super().copy(source_key, key)

        def write(self, key: str, views: Sequence[memoryview]) -> None:
            super().write(key, views)
            for name, source in getattr(self, "links", {}).items():
                if source == key:
                    super().copy(key, name)


class TestStartsClocksAnew(_OnMemory):
    caught_by = "test_stat_and_list_say_the_same"

    class broken(MemoryStorage):
        def stat(self, key: str) -> StoredFile:
            found = super().stat(key)
            return StoredFile(found.key, found.size_bytes, time.monotonic(), found.version)


class TestTravelsByAccident(_OnMemory):
    caught_by = "test_it_opens_again_in_a_new_process"

    class broken(MemoryStorage):
        def __reduce__(self) -> Any:
            return MemoryStorage, (self.uri,)
