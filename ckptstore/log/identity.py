"""The identity of a store: `store.json`, created once and never changed (format-v1, "store.json")."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptstore.errors import CheckpointDamaged, FileMissing, InvalidInput, StorageUnavailable
from ckptstore.format.encoding import FORMAT_VERSION, check_seconds, dump_json, load_object
from ckptstore.format.layout import CHECKPOINT_PREFIX, MANIFEST_NAME, STORE_KEY
from ckptstore.storage.base import Disk, Storage, create_if_able

KEPT_BY_CKPTSTORE = "ckptstore"
KEPT_BY_RAY = "ray"


@dataclass(frozen=True)
class StoreIdentity:
    """The content of `store.json`."""

    store_id: str
    """The random id, 32 hexadecimal digits. A copy of a store keeps it."""
    kept_by: str
    """The keeper, which decides what stays: "ckptstore" by its log, or "ray" by its own retention."""
    created_at: float
    """The time in seconds since the epoch by the creator's clock; for people, never for decisions."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The fields that this version does not know; they are kept."""

    def encode(self) -> bytes:
        """Return the identity as bytes."""
        return dump_json(
            {
                **self.extra,
                "version": FORMAT_VERSION,
                "store_id": self.store_id,
                "kept_by": self.kept_by,
                "created_at": self.created_at,
            },
            what="store.json",
        )

    @staticmethod
    def decode(data: bytes) -> StoreIdentity:
        """Decode a `store.json`.

        Raises CheckpointDamaged if it is not one, UnsupportedVersion if it is from a newer major version.
        """
        value = load_object(data, file=STORE_KEY)
        value.pop("version")
        store_id, kept_by, created_at = (value.pop(name, None) for name in ("store_id", "kept_by", "created_at"))
        try:
            seconds = check_seconds(created_at)
        except ValueError:
            seconds = None
        if not isinstance(store_id, str) or not store_id or not isinstance(kept_by, str) or seconds is None:
            raise CheckpointDamaged(f"{STORE_KEY} is not the identity of a store", file=STORE_KEY)
        return StoreIdentity(store_id, kept_by, seconds, value)


def read_store_json(storage: Storage) -> StoreIdentity | None:
    """Return the identity of the store; None if there is none."""
    data = storage.read_if_there(STORE_KEY)
    return None if data is None else StoreIdentity.decode(data)


def read_or_create_store_json(
    storage: Storage, *, kept_by: str = KEPT_BY_CKPTSTORE, store_id: str | None = None
) -> StoreIdentity:
    """Return the identity of the store; create it, with that id or a random one, if there is none.

    Concurrent callers get the same identity. An existing one is returned as it is: its id and its keeper may differ
    from the arguments. Raises InvalidInput for the directory of a checkpoint.
    """
    found = read_store_json(storage)
    if found is not None:
        return found
    _refuse_checkpoint(storage)
    mine = StoreIdentity(store_id or uuid.uuid4().hex, kept_by, time.time())
    is_unsupported = create_if_able(storage, STORE_KEY, mine.encode()) is None
    if is_unsupported and read_store_json(storage) is None:
        storage.write(STORE_KEY, [memoryview(mine.encode())])
        storage.persist([STORE_KEY])
    stored = read_store_json(storage)  # whoever was first, all callers read the same identity back
    if stored is None:
        raise StorageUnavailable(f"{STORE_KEY} was created and cannot be read", file=STORE_KEY)
    return stored


def _refuse_checkpoint(storage: Storage) -> None:
    """Raise InvalidInput if the root is the directory of a checkpoint that lies on its own or, on a disk, the one in
    which a store has its checkpoints."""
    root = storage.local_path("") if isinstance(storage, Disk) else None
    if root is not None and root.name == CHECKPOINT_PREFIX.rstrip("/") and os.path.lexists(root.with_name(STORE_KEY)):
        raise InvalidInput(f"{root} has the checkpoints of the store {root.parent}", hint=f"Open {root.parent}")
    try:
        storage.stat(MANIFEST_NAME)
    except FileMissing:
        return
    raise InvalidInput(
        f"{storage.uri} is a checkpoint, and no store can be made in it",
        hint="Checkpoint.from_uri opens it; give the store a place of its own",
    )


def read_identity(storage: Storage) -> str | None:
    """Return the id of the store; None if there is none."""
    found = read_store_json(storage)
    return found.store_id if found else None


def read_or_create_identity(storage: Storage) -> str:
    """Return the id of the store; create it if there is none.

    Raises InvalidInput if Ray keeps the checkpoints: such a root has no log, and none may be started.
    """
    found = read_or_create_store_json(storage)
    if found.kept_by != KEPT_BY_CKPTSTORE:
        raise InvalidInput(
            f"The checkpoints at {storage.uri} are kept by {found.kept_by}", hint="Give the store a root of its own"
        )
    return found.store_id
