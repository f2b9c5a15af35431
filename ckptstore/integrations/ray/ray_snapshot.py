"""Ray Train's own list of the checkpoints of a run: a file that it overwrites in place, without a second copy.

Ray reads it when a run restarts. Without it Ray starts from scratch; if it is torn, or names a missing directory, the
run cannot start.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import FileMissing
from ckptstore.format.encoding import parse_json
from ckptstore.format.layout import MANIFEST_NAME
from ckptstore.log.identity import KEPT_BY_RAY, read_store_json
from ckptstore.storage.base import Disk, Storage

SNAPSHOT_NAME = "checkpoint_manager_snapshot.json"
ROOT_NAME = "_ckptstore"
"""The name of the default store's root, inside the directory of a run of Ray Train."""

_LIST = re.compile(r'"checkpoint_results"\s*:\s*\[')


@dataclass(frozen=True, slots=True)
class Listed:
    """One checkpoint in Ray's list."""

    directory: str
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The contents of the file."""

    text: str
    listed: tuple[Listed, ...]
    """The checkpoints that can be read from it, even if the file ends early; in Ray's order."""
    latest: str
    """The directory of the latest one; "" if unknown."""
    fault: str
    """The reason for which Ray cannot read the file; "" if it can."""


def read_snapshot(storage: Storage) -> Snapshot | None:
    """Return the list of the run whose directory the storage is; None if there is none."""
    try:
        return parse_snapshot(storage.read(SNAPSHOT_NAME))
    except FileMissing:
        return None


def parse_snapshot(data: bytes) -> Snapshot:
    """Parse the file, or as much of it as exists. Never raises."""
    text = data.decode(errors="replace")
    try:
        value = parse_json(text)
    except ValueError as error:
        what = f"is torn after {len(data)} bytes" if data else "is empty"
        return Snapshot(text, tuple(_listed_in(text)), "", f"it {what}: {error}")
    results = value.get("checkpoint_results") if isinstance(value, dict) else None
    if not isinstance(results, list):
        return Snapshot(text, (), "", "it is not what Ray Train writes there")
    listed = tuple(found for found in map(_listed, results) if found is not None)
    latest = _listed(value.get("latest_checkpoint_result"))
    fault = "" if len(listed) == len(results) else "some of its checkpoints have no directory or no metrics"
    return Snapshot(text, listed, latest.directory if latest else "", fault)


def _listed(value: Any) -> Listed | None:
    if not isinstance(value, dict):
        return None
    directory, metrics = value.get("checkpoint_dir_name"), value.get("metrics")
    return Listed(directory, metrics) if isinstance(directory, str) and isinstance(metrics, dict) else None


def _listed_in(text: str) -> list[Listed]:
    """Return the checkpoints at the beginning of a list that ends early."""
    found: list[Listed] = []
    begin = _LIST.search(text)
    position = begin.end() if begin else len(text)
    while position < len(text):
        try:
            value, position = json.JSONDecoder().raw_decode(text, position)
        except (ValueError, RecursionError):
            break
        if (item := _listed(value)) is not None:
            found.append(item)
        while position < len(text) and text[position] in ", \n":
            position += 1
    return found


def obstacle(storage: Storage, snapshot: Snapshot) -> str:
    """Return the reason for which Ray cannot start the run from the list, "" if it can: each directory must exist."""
    gone = [item.directory for item in snapshot.listed if not _is_there(storage, item.directory)]
    if snapshot.fault or not gone:
        return snapshot.fault
    return f"it names {len(gone)} checkpoints whose directories are not there: {', '.join(gone[:5])}"


def _is_there(storage: Storage, directory: str) -> bool:
    if isinstance(storage, Disk):
        return os.path.isdir(storage.local_path(directory))
    return any(True for _ in storage.list(f"{directory}/"))


def uris_in_run(storage: Storage) -> list[str] | None:
    """Return the checkpoints with a manifest in the directory of a run whose files Ray keeps; None for other places."""
    identity = read_store_json(storage)
    if identity is None or identity.kept_by != KEPT_BY_RAY:
        return None
    end, own = f"/{MANIFEST_NAME}", f"{ROOT_NAME}/"
    keys = sorted(file.key for file in storage.list(""))
    return [f"{storage.uri}/{key.removesuffix(end)}" for key in keys if key.endswith(end) and not key.startswith(own)]
