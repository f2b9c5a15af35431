"""Small files: read, hashed and written many at a time, because each costs more than its bytes do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from ckptstore.errors import CkptstoreError
from ckptstore.format.digest import FileDigest, combine, crc32c
from ckptstore.transfer.engine import STEP_BYTES, Engine
from ckptstore.transfer.moves import Stored
from ckptstore.transfer.planned import PlannedFile
from ckptstore.transfer.pool import Operation
from ckptstore.transfer.sources import FileSource, Read


def write_batch(engine: Engine, files: Sequence[PlannedFile], run: Operation) -> tuple[list[Stored], float]:
    """Write files, each in one call or all in one; give the results in their order, and the seconds it took."""
    began, used_bytes = time.monotonic(), 0
    stored: list[Stored] = []
    ready: list[tuple[str, Sequence[memoryview]]] = []
    scratch_bytes = sum(0 if file.source.in_memory else file.source.size_bytes for file in files)
    with engine.scratch.take(scratch_bytes, run) as scratch:
        for file in files:
            run.check()
            try:
                result, views = _read(file, scratch[used_bytes:])
            except CkptstoreError as error:
                raise error.at(file=file.key) from None
            stored.append(result)
            ready.append((file.key, views))
            used_bytes += 0 if file.source.in_memory else result.size_bytes
        _write(engine, ready, run)
    run.moved(1 + sum(result.size_bytes for result in stored))
    return stored, time.monotonic() - began


def _read(file: PlannedFile, scratch: memoryview) -> tuple[Stored, Sequence[memoryview]]:
    source = file.source
    if type(source) is FileSource and source.size_bytes <= STEP_BYTES and not source.payloads:
        view = source.load(scratch)
        return Stored(file.key, source.size_bytes, crc32c(view)), (view,)
    digest = FileDigest(source.payloads)
    with source.open() as read:
        views, _ = read_hashed(read, digest, offset=0, size_bytes=source.size_bytes, scratch=scratch)
    return Stored(file.key, source.size_bytes, digest.crc32c(), digest.block_crcs()), views


def _write(engine: Engine, ready: Sequence[tuple[str, Sequence[memoryview]]], run: Operation) -> None:
    if engine.disk is not None and len(ready) > 1:
        engine.request(run, f"write {len(ready)} files", partial(engine.disk.write_many, ready))
        return
    for key, views in ready:
        try:
            engine.request(run, f"write {key}", partial(engine.storage.write, key, views))
        except CkptstoreError as error:
            raise error.at(file=key) from None


def read_hashed(
    read: Read, digest: FileDigest, *, offset: int, size_bytes: int, scratch: memoryview
) -> tuple[Sequence[memoryview], int]:
    """Read a part in steps, and hash each while it is in the processor's cache; the CRC32C is that of the part."""
    if size_bytes <= STEP_BYTES:
        views = read(offset, size_bytes, scratch)
        return views, digest.add(offset, views)
    found: list[memoryview] = []
    total = 0
    for start in range(0, size_bytes, STEP_BYTES):
        size = min(STEP_BYTES, size_bytes - start)
        views = read(offset + start, size, scratch[start : start + size])
        total = combine(total, digest.add(offset + start, views), size)
        found += views
    return found, total
