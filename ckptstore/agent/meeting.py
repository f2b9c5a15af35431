"""What the agents of several nodes find out together before the trainers start. One node is alone in each meeting."""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from ckptstore.agent.notices import FolderRestored
from ckptstore.catalogue import job_of
from ckptstore.errors import InvalidInput
from ckptstore.events import BytesMoved, emit, listening
from ckptstore.folders import Folder, JobSeen, newest_first, restore_folder
from ckptstore.folders.snapshot import OWN_NAME
from ckptstore.group import Beat
from ckptstore.store import CheckpointStore

_SEEN_LATE_SECONDS = 3.0
"""A network file system may show a new file a moment later."""


def is_shared(store: CheckpointStore, folder: Path) -> bool:
    """Whether all nodes see one and the same folder. Collective; False for one node.

    Raises InvalidInput where some do and others do not.
    """
    job = job_of(store)
    if job.group.world_size == 1:
        return False
    token = folder / OWN_NAME / f"shared-{secrets.token_hex(8)}"

    def leave(_beat: object) -> str:
        if not job.is_leader:
            return ""
        token.parent.mkdir(exist_ok=True)
        token.touch()
        return token.name

    name = job.exchange("folder", leave, lambda told, _beat: told[0])
    try:
        seen = job.exchange(
            "shared", lambda _beat: _sees(folder / OWN_NAME / name), lambda told, _beat: [bool(item) for item in told]
        )
    finally:
        if job.is_leader:
            with contextlib.suppress(OSError):
                token.unlink()
    if any(seen[1:]) and not all(seen):
        blind = [rank for rank, sees in enumerate(seen) if not sees]
        raise InvalidInput(
            f"The folder {folder} is shared by some nodes, and not by {blind}",
            hint="Give a folder that all nodes share, or one on a disk of each node",
        )
    return all(seen)


def _sees(path: Path) -> bool:
    until = time.monotonic() + _SEEN_LATE_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def restore(store: CheckpointStore, folder: Folder, *, shared: bool) -> None:
    """Claim the store, and bring the newest checkpoint into the folder of each node. Collective.

    From here on an agent that claimed the store before is fenced. What one node alone has finished later than the store
    stays; several nodes keep it where all have it, and else all go on from what the store has.
    """
    job = job_of(store)
    if store.resume() is None:
        return
    keeps_newer = job.group.world_size == 1 or _agree_on_newest(store, folder)

    def bring(beat: Beat) -> None:
        if shared and not job.is_leader:
            return
        with listening(lambda _event: beat(), BytesMoved):  # a long download is no death
            report = restore_folder(folder, newest_first(store), keeps_newer=keeps_newer)
        if report is not None:
            emit(FolderRestored(**{item.name: getattr(report, item.name) for item in fields(FolderRestored)}))

    job.exchange("restore", bring, lambda _told, _beat: None)


def _agree_on_newest(store: CheckpointStore, folder: Folder) -> bool:
    """Whether all nodes have finished the same newest checkpoint."""

    def newest(_beat: object) -> Any:
        nobody, own = JobSeen(frozenset(), None, is_alive=False), Folder(folder.path, folder.rules)
        own.look(nobody)
        finished = own.look(nobody).finished
        return [finished[-1].step, finished[-1].name] if finished else None

    told = job_of(store).exchange("newest", newest, lambda told, _beat: told)
    return told[0] is not None and all(item == told[0] for item in told)
