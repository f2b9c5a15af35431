"""Let the agents of several nodes agree before the trainers start. One node is alone in each meeting."""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import fields
from pathlib import Path

from ckptstore.catalogue import job_of
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import InvalidInput
from ckptstore.events import emit
from ckptstore.store import CheckpointStore
from ckptstore.tools.run.folders import Folder, newest_first, restore_folder, set_aside_unfinished, whole_in
from ckptstore.tools.run.folders.own_directory import is_on_one_disk
from ckptstore.tools.run.notices import FolderNotice, FolderRestored

_SEEN_LATE_SECONDS = 3.0
"""A network file system may show a new file a moment later."""


def is_shared(store: CheckpointStore, folder: Folder) -> bool:
    """Return True if all nodes see one and the same folder. Collective; False for one node.

    The leader leaves a file beside the folder for a moment, or in it if it is a mount point. Raises InvalidInput where
    some nodes see that and others do not.
    """
    job = job_of(store)
    if job.group.world_size == 1:
        return False
    place = folder.own if is_on_one_disk(folder.path, folder.path.parent) else folder.path
    token = place / f"shared-{secrets.token_hex(8)}"

    def leave() -> str:
        token.parent.mkdir(parents=True, exist_ok=True)
        token.touch()
        return token.name

    try:
        with job.group.meeting("folder") as meeting:
            name = meeting.tell(leave)
        with job.group.meeting("shared") as meeting:
            brought = meeting.gather(_sees(place / name))
            seen = meeting.tell(lambda: brought)
    finally:
        if job.is_leader:
            with contextlib.suppress(OSError):
                token.unlink()
    if any(seen[1:]) and not all(seen):
        blind = [rank for rank, sees in enumerate(seen) if not sees]
        raise InvalidInput(
            f"The folder {folder.path} is shared by some nodes, and not by {blind}",
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

    From here on an agent that claimed the store before is fenced. The folder is a fast tier: what it has finished and
    the store has not is newer, and stays. Of several nodes the newest counts that all have finished; where that is not
    newer than what the store has, all go on from the store.
    """
    job = job_of(store)
    latest, since_ns = store.resume(), folder.first_worked_ns()
    is_alone = job.group.world_size == 1
    if latest is None:
        if since_ns is not None and (is_alone or (shared and job.is_leader)):
            for moved in set_aside_unfinished(folder, since_ns=since_ns):
                text = "the store has no checkpoint yet, and one that was not finished is moved aside"
                emit(FolderNotice(text=f"{text}: {moved}"))
        return
    common = None if is_alone else _newest_of_all(store, folder, latest)

    with job.group.meeting("restore"):
        if shared and not job.is_leader:
            return
        report = restore_folder(
            folder, newest_first(store), keeps_newer=is_alone or common is not None, only_newer=common
        )
        if report is not None:
            emit(FolderRestored(**{item.name: getattr(report, item.name) for item in fields(FolderRestored)}))


def _newest_of_all(store: CheckpointStore, folder: Folder, latest: Checkpoint) -> str | None:
    """Return the name of the newest checkpoint that every node has finished; None where there is none. Collective."""
    with job_of(store).group.meeting("newest") as meeting:
        brought = meeting.gather(list(whole_in(folder, latest)))
        of_all = meeting.tell(lambda: brought)
    common = set.intersection(*({(step, name) for step, name in whole} for whole in of_all))
    return max(common)[1] if common else None
