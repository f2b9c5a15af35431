"""Others that move states and directories to S3, each by its own calls. What is not installed is left out, and said."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed.checkpoint as dcp
from s3_contest import Server

State = Mapping[str, torch.Tensor]
Body = Callable[[], object]

NUM_THREADS = 16


def missing_peers(*modules: str) -> list[str]:
    """Which of these cannot be imported here."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def save_with_fsspec(state: State, uri: str, server: Server) -> None:
    """`dcp.save` through s3fs."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    _save(state, FsspecWriter(uri, sync_files=False, **server.storage_options))


def load_with_fsspec(state: State, uri: str, server: Server) -> None:
    """`dcp.load` through s3fs."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    _load(state, FsspecReader(uri, **server.storage_options))


def save_with_connector(state: State, uri: str, server: Server, *, num_threads: int) -> None:
    """`dcp.save` with s3torchconnector's writer."""
    from s3torchconnector.dcp import S3StorageWriter

    _save(state, _connected(S3StorageWriter("us-east-1", uri, thread_count=num_threads), uri, server))


def load_with_connector(state: State, uri: str, server: Server, *, by_ranges: bool) -> None:
    """`dcp.load` with s3torchconnector's reader, from whole objects or by ranges of them."""
    from s3torchconnector import S3ReaderConstructor
    from s3torchconnector.dcp import S3StorageReader

    kind = S3ReaderConstructor.range_based() if by_ranges else S3ReaderConstructor.sequential()
    _load(state, _connected(S3StorageReader("us-east-1", uri, reader_constructor=kind), uri, server))


def raw_puts(state: State, bucket_path: str, server: Server) -> None:
    """The limit: the bytes of each tensor straight from memory to the socket, on as many threads as there are
    processors, with no digest, no signature and no checkpoint."""
    url = urlsplit(server.endpoint_url)

    def put(items: list[tuple[str, torch.Tensor]]) -> None:
        with closing(HTTPConnection(url.hostname or "", url.port)) as connection:
            for name, tensor in items:
                connection.request(
                    "PUT", f"/{bucket_path}/{name}", body=memoryview(tensor.view(torch.uint8).numpy()).cast("B")
                )
                answer = connection.getresponse()
                assert answer.status == HTTPStatus.OK, answer.read()
                answer.read()

    count = os.cpu_count() or 1
    items = list(state.items())
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(put, [items[first::count] for first in range(count)]))


def _connected(storage: Any, uri: str, server: Server) -> Any:
    """Neither class takes an endpoint, but the client below it does."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    path_style = S3ClientConfig(force_path_style=True)
    storage.fs._client = S3Client("us-east-1", endpoint=server.endpoint_url, s3client_config=path_style)
    return storage


def _save(state: State, writer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), storage_writer=writer, no_dist=True)


def _load(state: State, reader: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(dict(state), storage_reader=reader, no_dist=True)


def pyarrow_copies(server: Server, source: Path, bucket_path: str, target: Path) -> tuple[Body, Body]:
    """Up and down as Ray Train's `StorageContext` does it."""
    from pyarrow import fs

    options = server.storage_options
    remote = fs.S3FileSystem(
        access_key=options["key"],
        secret_key=options["secret"],
        endpoint_override=server.endpoint_url,
        region="us-east-1",
    )
    local = fs.LocalFileSystem()
    up = partial(fs.copy_files, str(source), bucket_path, source_filesystem=local, destination_filesystem=remote)
    down = partial(fs.copy_files, bucket_path, str(target), source_filesystem=remote, destination_filesystem=local)
    return partial(up, use_threads=False), partial(down, use_threads=False)


def s3fs_copies(server: Server, source: Path, bucket_path: str, target: Path) -> tuple[Body, Body]:
    """Up and down with `put` and `get` of whole directories."""
    import s3fs

    remote = s3fs.S3FileSystem(**server.storage_options, skip_instance_cache=True, use_listings_cache=False)
    up = partial(remote.put, f"{source}/", f"{bucket_path}/", recursive=True)
    return up, partial(remote.get, f"{bucket_path}/", f"{target}/", recursive=True)


def boto3_copies(server: Server, source: Path, bucket_path: str, target: Path) -> tuple[Body, Body]:
    """Up and down, a file on each of 16 threads."""
    import boto3
    from botocore.config import Config

    options = server.storage_options
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        config=Config(max_pool_connections=NUM_THREADS * 4),
    )
    bucket, _, prefix = bucket_path.partition("/")

    def up() -> None:
        paths = [path for path in source.rglob("*") if path.is_file()]
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(lambda path: client.upload_file(path, bucket, f"{prefix}/{path.relative_to(source)}"), paths))

    def fetch(key: str) -> None:
        path = target / key.removeprefix(f"{prefix}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, key, str(path))

    def down() -> None:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(fetch, keys))

    return up, down
