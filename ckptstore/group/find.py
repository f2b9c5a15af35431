"""Find the group of a store, and check that all its ranks see the same root."""

from __future__ import annotations

import os
import secrets
import sys
import time
from contextlib import suppress
from typing import Any, cast

from ckptstore.config import StoreConfig
from ckptstore.errors import CkptstoreError, GroupMissing, InvalidInput, StoreNotShared
from ckptstore.format.layout import PROBE_PREFIX
from ckptstore.group.base import LEADER, Group, SoloGroup
from ckptstore.group.storage_group import StorageGroup
from ckptstore.runtime.beat import beat
from ckptstore.runtime.shown import show_ranks
from ckptstore.storage.base import Storage
from ckptstore.storage.retry import briefly

SOLO = "solo"
"""The value of `group` for a process that works alone, whatever the environment says."""

_SEEN_LATE_SECONDS = 30.0
"""The longest time after which a node sees what another one has written; at most a quarter of the rank timeout."""


def find_group(given: object, *, storage: Storage, config: StoreConfig) -> Group:
    """Return the group of this job. Collective if there are several ranks.

    `given` is a ProcessGroup of torch, a `StorageGroup`, "solo" for this process alone, an object of an integration
    with a method `open_group`, an open group, or None for torch.distributed if it is initialised, else this process
    alone. Raises GroupMissing if there are several processes and no way between them; InvalidInput if `given` is none
    of these or several processes share a `memory://` store.
    """
    group = _group_for(given, storage=storage, config=config)
    if group.world_size > 1 and storage.uri.startswith("memory://") and group is not given:
        size = group.world_size
        group.close()
        raise InvalidInput(
            f"{storage.uri} lives in the memory of one process, and this job has {size}",
            hint="Use a shared directory or an object store",
        )
    return group


def _group_for(given: object, *, storage: Storage, config: StoreConfig) -> Group:
    if isinstance(given, str) and given == SOLO:
        return SoloGroup()
    if isinstance(given, StorageGroup):
        if given.world_size == 1:
            return SoloGroup(start_token=given.start_token, node=given.node)
        return given.open(storage, rank_timeout_seconds=config.rank_timeout_seconds)
    if callable(open_group := getattr(given, "open_group", None)):
        return cast(Group, open_group(storage, config))
    torch = _initialised_torch()
    if given is None:
        return _torch_group(None, config) if torch is not None else _alone()
    if torch is not None and isinstance(given, torch.distributed.ProcessGroup):
        return _torch_group(given, config)
    if callable(getattr(given, "meeting", None)):
        return cast(Group, given)
    raise InvalidInput(
        f"group is a {type(given).__name__}, it must be a StorageGroup, a ProcessGroup of torch or 'solo'",
        hint="A process that is no member of a process group takes no part in its store",
    )


def _torch_group(process_group: Any, config: StoreConfig) -> Group:
    from ckptstore.group.torch_board import open_torch_group

    return open_torch_group(process_group, rank_timeout_seconds=config.rank_timeout_seconds)


def _initialised_torch() -> Any:
    """Return the torch module if this process has initialised torch.distributed, else None. Never imports torch."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    return torch if distributed is not None and distributed.is_available() and distributed.is_initialized() else None


def has_torch_group() -> bool:
    """Return True if this process has initialised torch.distributed."""
    return _initialised_torch() is not None


def _alone() -> Group:
    size = os.environ.get("WORLD_SIZE", "").strip()
    if size.isdecimal() and int(size) > 1:
        raise GroupMissing(
            f"WORLD_SIZE is {size}, and nothing says how this process reaches the others",
            hint="Call torch.distributed.init_process_group first, or give group=StorageGroup(rank, world_size, "
            "start_token); a process that reads or writes alone gives group='solo'",
        )
    return SoloGroup()


def check_shared(group: Group, storage: Storage, *, config: StoreConfig | None = None) -> None:
    """Raise StoreNotShared, with the nodes, unless every rank can read a file that the leader writes. Collective."""
    if group.world_size == 1:
        return
    config = config or StoreConfig()
    nonce = secrets.token_hex(16)
    key = f"{PROBE_PREFIX}{nonce}"

    def write() -> str:
        storage.write(key, [memoryview(nonce.encode())])
        return key

    try:
        with group.meeting("probe the root") as meeting:
            probe = meeting.tell(write)
        with group.meeting("read the probe") as meeting:
            nodes = meeting.gather(None if _sees(probe, storage, config) else group.node)
            meeting.tell(lambda: _judge(nodes, group, storage))
    finally:
        if group.rank == LEADER:
            with suppress(CkptstoreError), briefly():  # one small object stays below probe/; nothing reads it
                storage.delete([key])


def _sees(key: str, storage: Storage, config: StoreConfig) -> bool:
    nonce = key.removeprefix(PROBE_PREFIX).encode()
    until = time.monotonic() + min(_SEEN_LATE_SECONDS, config.rank_timeout_seconds / 4)
    while True:
        beat()
        if (found := storage.read_if_there(key)) is not None:
            return found == nonce
        if time.monotonic() > until:
            return False
        time.sleep(0.1)


def _judge(answers: list[str | None], group: Group, storage: Storage) -> None:
    blind = {rank: node for rank, node in enumerate(answers) if node is not None}
    if not blind:
        return
    nodes = sorted(set(blind.values()))
    shown = ", ".join(nodes[:20]) + (f" and {len(nodes) - 20} more" if len(nodes) > 20 else "")
    raise StoreNotShared(
        f"What {group.node} (rank 0) writes to {storage.uri} is not seen on {shown} ({show_ranks(list(blind))})",
        ranks=tuple(blind),
        hint="Use a directory on a file system that all nodes mount, or an object store",
    )
