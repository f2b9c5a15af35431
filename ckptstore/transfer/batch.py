"""Read, hash and write small files many at a time, because each costs more than its bytes do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from ckptstore.errors import CheckpointDamaged, CkptstoreError, FileMissing
from ckptstore.format.digest import Digest, FileDigest, file_digest
from ckptstore.storage.disk.local_parts import READ_ONLY, WRITABLE, write_new
from ckptstore.transfer.engine import STEP_BYTES, Engine
from ckptstore.transfer.moves import Checked, PlannedFile, Stored, Wanted
from ckptstore.transfer.pool import Operation
from ckptstore.transfer.sources import FileSource, Read


def write_batch(engine: Engine, files: Sequence[PlannedFile], run: Operation) -> tuple[list[Stored], float]:
    """Write files, each in one call or all in one; return the results in their order, and the seconds it took."""
    began, used_bytes = time.monotonic(), 0
    stored: list[Stored] = []
    ready: list[tuple[str, Sequence[memoryview]]] = []
    scratch_bytes = sum(0 if file.source.in_memory else file.source.size_bytes for file in files)
    with engine.scratch.take(scratch_bytes, run) as scratch:
        for file in files:
            run.check()
            try:
                result, views = _read(file, engine.algorithm(file), scratch[used_bytes:])
            except CkptstoreError as error:
                raise error.at(file=file.key) from None
            stored.append(result)
            ready.append((file.key, views))
            used_bytes += 0 if file.source.in_memory else result.size_bytes
        _write(engine, ready, run)
    run.moved(1 + sum(result.size_bytes for result in stored))
    return stored, time.monotonic() - began


def _read(file: PlannedFile, algorithm: str, scratch: memoryview) -> tuple[Stored, Sequence[memoryview]]:
    source = file.source
    if type(source) is FileSource and source.size_bytes <= STEP_BYTES and not source.payloads:
        view = source.load(scratch)
        return Stored(file.key, source.size_bytes, Digest.of(view, algorithm=algorithm)), (view,)
    digest = file_digest(source.payloads, algorithm=algorithm)
    with source.open() as read:
        views, _ = read_hashed(read, digest, offset=0, size_bytes=source.size_bytes, scratch=scratch)
    return Stored(file.key, source.size_bytes, digest.digest(), digest.block_digests()), views


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
) -> tuple[Sequence[memoryview], Digest | None]:
    """Read a part in steps, and hash each while it is in the processor's cache. Return its views and its digest, None
    where that is not known."""
    if size_bytes <= STEP_BYTES:
        views = read(offset, size_bytes, scratch)
        return views, digest.add(offset, views)
    found: list[memoryview] = []
    total: Digest | None = None
    for start in range(0, size_bytes, STEP_BYTES):
        size = min(STEP_BYTES, size_bytes - start)
        views = read(offset + start, size, scratch[start : start + size])
        added = digest.add(offset + start, views)
        total = added if total is None or added is None else total.followed_by(added, size)
        found += views
    return found, total


def read_batch(
    engine: Engine, places: Sequence[tuple[Wanted, str | None]], read_only: bool, run: Operation
) -> list[Checked]:
    """Read files, each in one call, and write those with the right bytes to their paths, where they have one.
    The result has their order."""
    with engine.scratch.take(sum(item.size_bytes for item, _ in places), run) as scratch:
        found, start = [], 0
        for item, path in places:
            view = scratch[start : start + item.size_bytes]
            start += item.size_bytes
            run.check()
            try:
                found.append(_read_checked(engine, item, view, path is None, run))
                if path is not None and found[-1].damage is None:
                    write_new(item.key, path, view, mode=READ_ONLY if read_only else WRITABLE)
            except CkptstoreError as error:
                raise error.at(file=item.key) from None
            run.moved(item.size_bytes)
        return found


def _read_checked(engine: Engine, item: Wanted, view: memoryview, whole: bool, run: Operation) -> Checked:
    """Read a file and compare its digest; with `whole` it must also have no byte more."""
    key = item.key
    try:
        version = version_of(engine, item, run) if whole else None
        if view:
            request = partial(engine.storage.read_into, key, 0, (view,), version=version)
            engine.read(run, key, request)
    except (CheckpointDamaged, FileMissing) as error:
        return Checked(item, None, error)
    found = Digest.of(view, algorithm=item.algorithm)
    return Checked(item, found, fault_of(item, found))


def version_of(engine: Engine, item: Wanted, run: Operation) -> str | None:
    """Return the version of a file. Raises CheckpointDamaged when it has another size, FileMissing."""

    def look() -> str | None:
        found = engine.storage.stat(item.key)
        if found.size_bytes != item.size_bytes:
            text = f"{item.key} has {found.size_bytes:,} bytes, {item.size_bytes:,} are expected"
            raise CheckpointDamaged(text, file=item.key)
        return found.version

    return engine.read(run, item.key, look)


def fault_of(item: Wanted, found: Digest) -> CheckpointDamaged | None:
    """Return the error for a file whose bytes have the digest `found`; None if it is right, or no digest is known."""
    if item.digest is None or found == item.digest:
        return None
    text = f"{item.key} is damaged: {item.digest.shown} is expected, {found.hex} is found"
    return CheckpointDamaged(text, file=item.key)
