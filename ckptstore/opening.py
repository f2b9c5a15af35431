"""Open a store, from a URI and a few keywords."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from ckptstore import extended
from ckptstore.boundary import boundary
from ckptstore.config import StoreConfig, TransferConfig
from ckptstore.errors import InvalidInput
from ckptstore.format.layout import store_of
from ckptstore.job import Job, Tier
from ckptstore.log import Log
from ckptstore.retention import KeepAll, Missing, Policy
from ckptstore.storage.open import open_storage
from ckptstore.storage.uri import parse_uri
from ckptstore.store import CheckpointStore
from ckptstore.transfer.opened import open_place

if TYPE_CHECKING:
    from ckptstore.extended import FastTier


@boundary
def open_store(
    uri: str | os.PathLike[str],
    *,
    retention: Policy | None = None,
    missing: Missing = "error",
    grace_seconds: float | None = None,
    durable: bool | None = None,
    engine: str | None = None,
    fs: object = None,
    storage_options: Mapping[str, Any] | None = None,
    group: object = None,
    rank_timeout_seconds: float | None = None,
    memory_budget_bytes: int | None = None,
    single_writer: bool | None = None,
    num_prefixes: int | None = None,
    compare_every: int | None = None,
    provenance: bool | None = None,
    fast: FastTier | None = None,
    peers: str | None = None,
) -> CheckpointStore:
    """Open the store at `uri`. It need not exist: the first save creates it.

    This writes nothing and waits for no rank: the ranks meet at the first collective call.

    Args:
        uri: a path, file://, memory://, s3://, gs://, az://, abfs:// or any fsspec URL; taken literally or refused.
        retention: which checkpoints stay live; all of them by default.
        missing: how to treat a save without a metric that retention needs: raise an "error", or rank it as the "worst".
        grace_seconds: how long a dropped checkpoint stays in the trash, by the storage's clock (3600).
        durable: whether files on a disk are synced before a commit (True).
        engine: "native" or "fsspec"; None for the native one where it knows the scheme.
        fs: a file system of fsspec that serves the URI, with its own options and credentials.
        storage_options: credentials and the like in fsspec's names; never written anywhere, never logged.
        group: a ProcessGroup or `StorageGroup`; None for torch.distributed where it runs, "solo" for this process.
        rank_timeout_seconds: how long a rank may give no sign of life (280).
        memory_budget_bytes: the most memory that transfers of this process take for buffers (512 MiB).
        single_writer: promise that no other job ever writes, for storages without create-if-absent.
        num_prefixes: over how many directories the ranks spread a state, where requests per prefix are limited (1).
        compare_every: every how many saves of a structure the ranks compare what they must have alike (16).
        provenance: whether manifests say what program saved them: commit, command line, packages, hosts (True).
        fast: save states to disks of the nodes first, and bring them into the store behind the training.
        peers: host:port of each node that reads the same, with commas, or one DNS name of all; they share it.

    Raises InvalidInput for an unknown scheme or a bad value, and for the directory of a checkpoint in a store.
    """
    if missing not in get_args(Missing):
        raise InvalidInput(f"missing is {missing!r}, it is one of {', '.join(get_args(Missing))}")
    policy = KeepAll() if retention is None else retention
    if not isinstance(policy, Policy):
        raise InvalidInput(f"retention is {retention!r}, it is a policy such as KeepLatest(3)")
    tier: Tier | None = None
    if fast is not None:
        tier = extended.Guest(fast)
    root = parse_uri(uri).uri
    if (store := store_of(root)) is not None:
        raise InvalidInput(f"{root} is a checkpoint, not a store", hint=f"Its store is {store}")
    config = StoreConfig.from_env(
        grace_seconds=grace_seconds,
        rank_timeout_seconds=rank_timeout_seconds,
        single_writer=single_writer,
        num_prefixes=num_prefixes,
        compare_every=compare_every,
        provenance=provenance,
        transfer=TransferConfig.from_env(durable=durable, memory_budget_bytes=memory_budget_bytes),
    )
    place = open_place(uri, config=config, storage_options=storage_options, engine=engine, fs=fs, peers=peers)
    open_at = partial(open_storage, storage_options=storage_options, engine=engine)
    job = Job(
        storage=place.storage,
        log=Log(place.storage, single_writer=config.single_writer),
        transfer=place.transfer,
        config=config,
        policy=policy,
        missing=missing,
        given_group=group,
        tier=tier,
        open_at=None if fs is not None else open_at,
    )
    return CheckpointStore(job)
