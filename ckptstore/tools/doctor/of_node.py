"""Examine a directory for fast checkpoints: can jobs use it, and what lies there."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from ckptstore.config import StoreConfig
from ckptstore.errors import InvalidInput, StorageError
from ckptstore.extensions.tier.upkeep.node_inventory import take_inventory
from ckptstore.extensions.tier.upkeep.node_view import FastOnNode, view_node
from ckptstore.log import Log
from ckptstore.log.identity import read_identity
from ckptstore.node_cache.place import filesystem_of, is_network
from ckptstore.runtime.file_locks import locks_work
from ckptstore.runtime.shown import show_duration, show_size
from ckptstore.storage.base import Storage
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.disk.posix import privacy_fault
from ckptstore.tools.doctor.finding import IN_MEMORY, Finding, finding_of

_BULK_BYTES = 32 << 20
_LITTLE_SHARE = 0.05
"""With less of a disk free, saves will soon go to the store directly."""


def examine_fast(directory: str, storage: Storage, config: StoreConfig) -> list[Finding]:
    """Examine the directory. `storage` is the place of the store. Writes 32 MiB there, and removes them again.

    Nothing more is tried of a directory that does not exist: a job creates it.
    """
    path = Path(os.path.abspath(directory))
    checks: dict[str, Callable[[], Finding | str]] = {
        "fast directory": lambda: _directory(path),
        "fast disk": lambda: _disk(path),
        "fast locks": lambda: _locks(path),
        "fast throughput": lambda: _throughput(path, config),
        "fast checkpoints": lambda: _checkpoints(path, storage, config),
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        findings.append(finding_of(name, check))
        if findings[-1].status == "failed" or not path.is_dir():
            break
    return findings


def _directory(path: Path) -> str:
    if not os.path.lexists(path):
        parent = next(one for one in path.parents if one.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            raise StorageError(f"{path} is not there, and this user cannot create it in {parent}")
        return f"{path} is not there yet: the first job creates it"
    if fault := privacy_fault(path):
        raise InvalidInput(f"{path} {fault}", hint="Jobs refuse it: give a directory of your own with mode 700")
    return f"{path} belongs to this user alone"


def _disk(path: Path) -> Finding | str:
    kind, usage = filesystem_of(path), shutil.disk_usage(path)
    detail = f"{kind or 'a file system that has no name'}, {show_size(usage.free)} of {show_size(usage.total)} are free"
    if kind in IN_MEMORY:
        hint = "A node that starts again has lost it, and it takes memory from the job. copies=2 helps against one node"
    elif is_network(kind):
        hint = "A disk of the node is faster, and a server that is away stops saves too"
    elif usage.free < _LITTLE_SHARE * usage.total:
        hint = "Make room: a save that does not fit goes to the store directly"
    else:
        return detail
    return Finding("warning", detail, hint)


def _locks(path: Path) -> Finding | str:
    """Try the locks that keep a job from deleting what another process reads."""
    probe = path / f".ckptstore-probe-{uuid.uuid4().hex}"
    try:
        if locks_work(probe):
            return "they work"
    finally:
        probe.unlink(missing_ok=True)
    hint = "A checkpoint may be deleted while another process reads it: that read fails. Resume is not concerned"
    return Finding("warning", "they do not work here", hint)


def _throughput(path: Path, config: StoreConfig) -> str:
    name, sent = f".ckptstore-probe-{uuid.uuid4().hex}", os.urandom(_BULK_BYTES)
    storage = LocalStorage(path, direct_io=config.transfer.direct_io)
    with closing(storage):
        try:
            began = time.monotonic()
            storage.write(name, [memoryview(sent)])
            storage.persist([name])
            seconds = time.monotonic() - began
        finally:
            storage.delete([name])
    rate = _BULK_BYTES / max(seconds, 1e-6) / (1 << 20)
    return f"one file at a time, durable: {rate:.0f} MiB/s"


def _checkpoints(path: Path, storage: Storage, config: StoreConfig) -> Finding | str:
    """Measure what the checkpoints of all stores take, and how far this store is behind."""
    inventory = take_inventory(path)
    total = sum(each.size_bytes for store in inventory.stores for each in store.attempts)
    words = [f"{show_size(total)} of {len(inventory.stores)} stores" if inventory.stores else "none"]
    store_id = read_identity(storage)
    view = FastOnNode()
    if store_id is not None:
        log = Log(storage)
        view = view_node(path, store_id, log, storage, newest=log.newest())
        newest, since = view.newest, view.not_durable_since
        words.append(f"the newest of this store is step {newest.manifest.step}" if newest else "none of this store")
        if since is not None:
            words.append(f"the store has been behind for {show_duration(max(0.0, time.time() - since))}")
    faults = [f"step {one.found.attempt.step}: {one.fault}" for one in view.fast if one.fault]
    detail = "; ".join([*words, *faults])
    if faults or view.fault:
        hint = "A resume takes another copy or an older checkpoint; `ckptstore fast ls --store` shows them"
        return Finding("warning", detail, hint)
    return detail
