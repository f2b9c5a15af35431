"""What a directory may hold, and what is refused before anything is written."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ckptstore.errors import InvalidName, InvalidSource
from ckptstore.saving.directories import scan, sha256_of_files


def test_nested_empty_and_odd_names_are_found(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "with space \u00e9\u4e2d.bin").write_bytes(b"123")
    (tmp_path / "zero").touch()
    (tmp_path / "a" / "nothing").mkdir()
    found = scan(tmp_path)
    assert sorted(found.files) == ["a/b/with space \u00e9\u4e2d.bin", "zero"]
    assert found.empty == ("a/nothing",)
    assert found.size_bytes == 3
    assert scan(None).files == {}


def test_links_are_followed_inside_only(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "secret"
    inside.mkdir()
    outside.write_text("s")
    (inside / "real").write_text("r")
    (inside / "link").symlink_to("real")
    assert sorted(scan(inside).files) == ["link", "real"]
    (inside / "leak").symlink_to(outside)
    with pytest.raises(InvalidSource, match="outside"):
        scan(inside)
    (inside / "leak").unlink()
    (inside / "dangling").symlink_to("nowhere")
    with pytest.raises(InvalidSource, match="dangling"):
        scan(inside)


def test_a_link_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "up").symlink_to("..")
    with pytest.raises(InvalidSource, match="circle"):
        scan(tmp_path)


def test_the_given_directory_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "f").touch()
    (tmp_path / "link").symlink_to("real")
    assert list(scan(tmp_path / "link").files) == ["f"]


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidSource, match="no regular file"):
        scan(tmp_path)
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "sock"))
        with pytest.raises(InvalidSource, match="no regular file"):
            scan(tmp_path)


@pytest.mark.parametrize("name", [b"back\\slash", b"new\nline", b"bad\xffutf", b"ckptstore.json"])
def test_names_that_cannot_be_stored_are_refused(tmp_path: Path, name: bytes) -> None:
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))).touch()
    with pytest.raises(InvalidName):
        scan(tmp_path)


def test_a_missing_directory_and_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSource, match="no directory"):
        scan(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidSource, match="no directory"):
        scan(tmp_path / "file")


def test_digests_of_shared_files(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"abc")
    found = sha256_of_files(scan(tmp_path), ["c", "absent"])
    assert found == {"c": (3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")}
