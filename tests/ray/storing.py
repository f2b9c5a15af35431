"""Checkpoints that Ray keeps, stored without a run of Ray: the ranks are threads, and meet in the storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from pyarrow.fs import FileSystem, LocalFileSystem, S3FileSystem
from ray.train import Checkpoint

from ckptstore import StorageGroup
from ckptstore.integrations.ray.context import Worker
from ckptstore.integrations.ray.kept_by_ray.ray_keeps import RayPublisher, Run
from ckptstore.integrations.ray.kept_by_ray.ray_shards import RayDirectoryShard
from ckptstore.saving import transaction
from ckptstore.storage.retry import with_retries, without_retries
from ckptstore.testing import Hook, wrap
from ckptstore.testing.s3_server import S3Server
from ckptstore.transfer import Transfer


def arrow_s3(server: S3Server) -> S3FileSystem:
    """The server as pyarrow reaches it."""
    return S3FileSystem(
        access_key="test",
        secret_key="testsecret",
        endpoint_override=server.endpoint_url.removeprefix("http://"),
        scheme="http",
        region="us-east-1",
    )


def make_run(path: str, filesystem: FileSystem | None = None) -> None:
    """What the driver does before the workers start."""
    filesystem = filesystem or LocalFileSystem()
    filesystem.create_dir(path)
    with filesystem.open_output_stream(f"{path}/.validate_storage_marker"):
        pass


def worker_at(path: str, *, rank: int = 0, world_size: int = 1, filesystem: FileSystem | None = None) -> Worker:
    """One worker of a run at that path, two of them on each node."""
    return Worker(
        rank=rank,
        world_size=world_size,
        node_id=f"node-{rank // 2}",
        run_path=path,
        filesystem=filesystem or LocalFileSystem(),
    )


def store(
    path: str,
    directories: Sequence[Path | None],
    *,
    name: str = "checkpoint_1",
    filesystem: FileSystem | None = None,
    ranks: Sequence[int] | None = None,
    world_size: int | None = None,
    step: int = 7,
    shared: Collection[str] = (),
    hook_of: Callable[[int], Hook] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> list[Any]:
    """Store one directory for each rank; what a rank raises is its result. With `hook_of`, a hook sees all that a rank
    asks the storage for."""
    ranks = list(range(len(directories))) if ranks is None else ranks
    token = uuid4().hex

    def run_rank(index: int) -> Any:
        worker = worker_at(path, rank=ranks[index], world_size=world_size or len(ranks), filesystem=filesystem)
        try:
            run = Run.open(worker, rank_timeout_seconds=30)
            if hook_of is not None:
                wrapped = with_retries(wrap(without_retries(run.storage), hook_of(ranks[index])), run.config.retry)
                transfer = Transfer(wrapped, config=run.config.transfer, retry=run.config.retry, rank=ranks[index])
                run = replace(run, storage=wrapped, transfer=transfer)
            seat = StorageGroup(index, len(ranks), token, worker.node_id)
            group = seat.open(run.storage, rank_timeout_seconds=30)
            shard = RayDirectoryShard(run, directories[index], ranks=ranks, shared=shared)
            try:
                request = transaction.checked(
                    group, kind="directory", step=step, metrics={"loss": 0.5}, metadata=None, exists="replace"
                )
                return transaction.save(group, RayPublisher(run, name, lambda: beside or shard.beside), shard, request)
            finally:
                group.close()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(directories)) as pool:
        return list(pool.map(run_rank, range(len(directories))))


def stored(
    path: str, directories: Sequence[Path | None], *, filesystem: FileSystem | None = None, **keywords: Any
) -> Checkpoint:
    """The checkpoint of Ray's that all ranks agree on."""
    found = store(path, directories, filesystem=filesystem, **keywords)
    for error in (attempt for attempt in found if isinstance(attempt, Exception)):
        raise error
    assert len({str(attempt) for attempt in found}) == 1
    return Checkpoint(f"{path}/{found[0]}", filesystem or LocalFileSystem())
