"""Another user of the node: what belongs to somebody else, or lets others in, is refused with a word that says why."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_ranks
import pytest
import torch

from ckptstore import FastTier, open_store
from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.fast.nodes import node_disk
from ckptstore.fast.nodes.arrival import join_arrivals
from ckptstore.fast.nodes.members import Members

pytestmark = pytest.mark.slow

NOBODY = 65534


def save_as_nobody(root: Path, disks: list[str]) -> list[Any]:
    """What a save says with each of these directories, as a user with no rights."""
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    os.environ["CKPTSTORE_CACHE_DIR"] = str(root / "cache")
    found: list[Any] = []
    for number, name in enumerate(disks):
        try:
            with open_store(root / "store", group="solo", fast=FastTier(root / name, node="a")) as store:
                store._deadline.set(0.0)
                found.append(store.save(number, {"w": torch.ones(1000)}).is_durable)
        except CkptstoreError as error:
            found.append((type(error).__name__, str(error)))
    os.seteuid(0)  # to tell it
    return found


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that all users may pass, with one that belongs to nobody."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    root = Path(tempfile.mkdtemp(prefix="ckptstore-users-"))
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)


def test_a_directory_of_somebody_else_is_refused(shared: Path) -> None:
    for name, mode, owner in [
        ("store", 0o700, NOBODY),
        ("own", 0o700, NOBODY),
        ("of-root", 0o700, 0),
        ("open-of-root", 0o777, 0),
        ("of-a-group", 0o770, NOBODY),
        ("linked-to", 0o700, NOBODY),
        ("closed", 0o700, 0),
    ]:
        (shared / name).mkdir()
        os.chown(shared / name, owner, owner)
        (shared / name).chmod(mode)
    (shared / "link").symlink_to(shared / "linked-to")
    disks = ["own", "of-root", "open-of-root", "of-a-group", "link", "closed/inner"]
    ((saved, *errors),) = forked_ranks.run_ranks(1, save_as_nobody, shared, disks)
    assert saved is False
    words = ["belongs to user 0", "belongs to user 0", "lets other users in", "symbolic link", "ermission denied"]
    for (kind, text), word in zip(errors, words, strict=True):
        assert word in text
        assert kind in ("InvalidInput", "StorageError", "AccessDenied")
    assert [*(shared / "linked-to").iterdir()] == [*(shared / "open-of-root").iterdir()] == []
    for path in (shared / "own").glob("*"):  # whoever cannot pass this reaches no file below
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_machines_that_were_set_up_alike_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One name, one path, and equal numbers of device and inode: only the boot of the machine differs."""
    found = []
    for boot in ("one", "other"):
        (tmp_path / boot).write_text(boot)
        monkeypatch.setattr(node_disk, "_BOOT_ID", tmp_path / boot)
        tier = FastTier(tmp_path / "disk", node="node")
        disk = node_disk.NodeDisk.open(tier.path, "a" * 32, node="node")
        found.append({"identity": disk.identity(), "addresses": []})
    with pytest.raises(InvalidInput, match="Ranks 0 and 1 are on node and were given different directories"):
        join_arrivals(found, Members(("node", "node"), 0), copies=1)
