"""What a directory may hold, and what is refused before anything is written."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from uuid import uuid4

import pytest

from ckptstore import InvalidName, InvalidSource, open_store


def saved_names(directory: Path) -> list[str]:
    """The files that a save finds there."""
    with open_store(f"memory://{uuid4().hex}") as store:
        return [item.name for item in store.save_directory(1, directory).files]


def test_links_are_followed_inside_only(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "secret"
    inside.mkdir()
    outside.write_text("s")
    (inside / "real").write_text("r")
    (inside / "link").symlink_to("real")
    (tmp_path / "whole").symlink_to("in")
    assert saved_names(inside) == saved_names(tmp_path / "whole") == ["link", "real"]
    for name, target, said in (("leak", outside, "outside"), ("off", "nowhere", "off"), ("up", "../in", "circle")):
        (inside / name).symlink_to(target)
        with pytest.raises(InvalidSource, match=said):
            saved_names(inside)
        (inside / name).unlink()


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidSource, match="no regular file"):
        saved_names(tmp_path)
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "sock"))
        with pytest.raises(InvalidSource, match="no regular file"):
            saved_names(tmp_path)


@pytest.mark.parametrize("name", [b"back\\slash", b"new\nline", b"bad\xffutf", b"ckptstore.json"])
def test_names_that_cannot_be_stored_are_refused(tmp_path: Path, name: bytes) -> None:
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))).touch()
    with pytest.raises(InvalidName):
        saved_names(tmp_path)


def test_a_missing_directory_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(InvalidSource, match="no directory"):
            saved_names(path)
