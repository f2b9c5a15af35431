"""Sources give exactly the bytes of a range, and a file that is not what it was is noticed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import open_store
from ckptstore.errors import InvalidSource, SourceChanged, StorageError
from ckptstore.transfer.sources import FileSource, MemorySource


@given(st.lists(st.binary(max_size=20), max_size=8), st.data())
def test_memory_gives_any_range_without_a_copy(buffers: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(buffers)
    source = MemorySource([memoryview(buffer) for buffer in buffers])
    assert source.size_bytes == len(whole)
    offset = data.draw(st.integers(0, len(whole)))
    size_bytes = data.draw(st.integers(0, len(whole) - offset))
    with source.open() as read:
        views = read(offset, size_bytes, memoryview(b""))
    assert b"".join(views) == whole[offset : offset + size_bytes]
    assert all(any(view.obj is buffer for buffer in buffers) for view in views)


@given(st.data())
def test_a_file_gives_any_range(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole = data.draw(st.binary(max_size=64))
    path = tmp_path_factory.mktemp("source") / "file"
    path.write_bytes(whole)
    source = FileSource.of(path)
    offset = data.draw(st.integers(0, len(whole)))
    size_bytes = data.draw(st.integers(0, len(whole) - offset))
    scratch = memoryview(bytearray(64))
    with source.open() as read:
        assert b"".join(read(offset, size_bytes, scratch)) == whole[offset : offset + size_bytes]
    assert bytes(source.load(scratch)) == whole


def grown(path: Path) -> None:
    path.write_bytes(b"longer than it was")


def cut(path: Path) -> None:
    path.write_bytes(b"")


def rewritten(path: Path) -> None:
    path.write_bytes(b"DATA")
    os.utime(path, ns=(0, 0))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"DATA")
    other.replace(path)


@pytest.mark.parametrize("change", [grown, cut, rewritten, replaced])
def test_a_file_that_changed_is_noticed(tmp_path: Path, change: object) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"data")
    source = FileSource.of(path)
    assert callable(change)
    change(path)
    scratch = memoryview(bytearray(64))
    with pytest.raises(SourceChanged, match="while it was read"):
        source.load(scratch)
    with pytest.raises(SourceChanged, match="while it was read"), source.open() as read:
        read(0, 4, scratch)


def test_an_error_of_the_reader_is_not_hidden_by_a_change(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"data")
    source = FileSource.of(path)

    def fail_while_open() -> None:
        with source.open():
            grown(path)
            raise KeyError

    with pytest.raises(KeyError):
        fail_while_open()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A directory stands for a file that the system refuses to read; root may read all files."""
    source = FileSource.of(tmp_path)
    with pytest.raises(InvalidSource, match=str(tmp_path)):
        source.load(memoryview(bytearray(1 << 16)))
    with pytest.raises(InvalidSource, match=str(tmp_path)), source.open() as read:
        read(0, 1, memoryview(bytearray(1)))


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"data")
    source = FileSource.of(path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        source.load(memoryview(bytearray(4)))
        with source.open() as read:
            read(0, 4, memoryview(bytearray(4)))
    grown(path)
    with pytest.raises(SourceChanged):
        source.load(memoryview(bytearray(4)))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_a_shortage_of_open_files_says_nothing_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuses(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    (tmp_path / "file").write_bytes(b"data")
    source, store = FileSource.of(tmp_path / "file"), open_store("memory://shortage")
    monkeypatch.setattr(os, "open", refuses)
    monkeypatch.setattr(os, "scandir", refuses)
    with pytest.raises(StorageError, match="ulimit -n"):
        source.load(memoryview(bytearray(4)))
    with pytest.raises(StorageError, match="ulimit -n"), source.open():
        pass
    with pytest.raises(StorageError, match="ulimit -n"):
        store.save_directory(1, tmp_path)
