"""Bring a committed checkpoint to a path on this node.

Tensors take another way, straight into memory (`ckptstore.state`).
"""

from __future__ import annotations

import atexit
import fnmatch
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from ckptstore.errors import CacheError, CheckpointDamaged, InvalidInput, StorageError, StorageFull
from ckptstore.format.layout import MANIFEST_NAME
from ckptstore.format.manifest import Manifest, Receipt, sha256_of
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.loading.load_watch import LoadWatch, watched
from ckptstore.storage.base import Disk
from ckptstore.storage.disk import posix
from ckptstore.storage.uri import local_path


class NodeCopies:
    """Single files of a checkpoint, each downloaded once per node, on first use by one of its processes."""

    def __init__(self, files: CheckpointFiles, manifest: Manifest, stack: ExitStack) -> None:
        """The copies are held until `stack` is left."""
        from ckptstore.node_cache import root_of

        self._files = files
        self._manifest = manifest
        self._digest = _content_of(files, manifest, manifest.encode())
        self._stack = stack
        self._paths: dict[str, Path] = {}
        self._lock = threading.Lock()
        self.root = root_of(files.config.cache.cache_dir)

    def path(self, name: str) -> Path:
        """Return the path of the copy of a file on this node, after downloading and checking it if need be."""
        from ckptstore.node_cache import NodeCache, copy_key

        with self._lock:
            if name not in self._paths:
                receipt = self._manifest.by_name[name]

                def download(path: Path) -> None:
                    download_files(self._files, self._manifest, [receipt], path, cached=True, with_directories=False)

                fetched = NodeCache(self._files.config.cache).fetch_once(
                    copy_key(f"{self._digest}/{name}"),
                    step=self._manifest.step,
                    size_bytes=receipt.size_bytes,
                    download=download,
                    expected={name: receipt.size_bytes},
                )
                self._paths[name] = self._stack.enter_context(fetched) / name
            return self._paths[name]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise CacheError if a copy that is read inside is damaged or cannot be read. It is removed, so that the next
        one who wants it downloads it again."""
        try:
            yield
        except (CheckpointDamaged, StorageError) as error:
            if error.file:
                with suppress(OSError):
                    (self.root / error.file).unlink()
            raise CacheError(
                f"A copy of step {self._manifest.step} in the node cache {self.root} cannot be used: {error.message}",
                step=self._manifest.step,
                hint="Set CKPTSTORE_CACHE_DIR to a directory on a healthy disk, which nothing cleans up",
            ) from error


def _content_of(files: CheckpointFiles, manifest: Manifest, data: bytes) -> str:
    """Return the identity of a copy's content: a digest of the manifest, and of the place if it is not in a store."""
    # A manifest that was made from a listing has no digests of files: two checkpoints may have equal ones.
    return sha256_of(data if manifest.store_id else f"{files.uri}\n".encode() + data)


@contextmanager
def open_directory(files: CheckpointFiles) -> Iterator[Path]:
    """Provide the checkpoint as a read-only directory on this node while the context lasts; see
    `Checkpoint.as_directory`. One that refers to files of other checkpoints is a copy on a disk too."""
    with ExitStack() as stack:
        with watched(files.transfer.rank, files.storage.uri) as load:
            path = _opened_directory(files, load, stack)
        yield path


def _opened_directory(files: CheckpointFiles, load: LoadWatch, stack: ExitStack) -> Path:
    """Return the path of the directory, which is held until `stack` is left."""
    stack.enter_context(files.held(is_handed_out=True))
    manifest, data = files.read_manifest()
    load.found(manifest.step, files.record)
    files.check_here(manifest)
    if isinstance(files.storage, Disk) and not manifest.references:
        return files.storage.local_path(files.prefix.rstrip("/"))

    from ckptstore.node_cache import NodeCache, copy_key

    own_data = manifest.made_whole().encode() if manifest.references else data
    expected: dict[str, int | None] = {receipt.name: receipt.size_bytes for receipt in manifest.files}
    expected |= {**dict.fromkeys(manifest.directories), MANIFEST_NAME: len(own_data)}

    def download(path: Path) -> None:
        download_files(files, manifest, manifest.files, path, cached=True)
        (path / MANIFEST_NAME).write_bytes(own_data)

    cache, key = NodeCache(files.config.cache), copy_key(_content_of(files, manifest, data))
    fetched = cache.fetch_once(
        key,
        step=manifest.step,
        size_bytes=manifest.size_bytes + len(own_data),
        download=download,
        expected=expected,
    )
    load.enter("read")
    path = stack.enter_context(fetched)
    names = ((files.key_of(receipt), receipt.name) for receipt in manifest.files)
    files.transfer.offer(key, names, partial(cache.finished, key))
    return path


def copy_directory(files: CheckpointFiles, path: str | os.PathLike[str], *, include: str | None) -> Path:
    """Copy the files whose name matches `include` (None for all) to a new or empty directory, and check every byte.

    The directory appears whole under `path`: it is written beside it and renamed.
    """
    target = Path(local_path(path, "The directory of a copy"))
    posix.check_replaceable(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidInput(f"{target} exists and is not an empty directory")
    partial = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        with watched(files.transfer.rank, files.storage.uri) as load, files.held():
            _copy_to(files, partial, load, include=include)
            partial.replace(target)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def copy_until_exit(files: CheckpointFiles, *, include: str | None) -> Path:
    """Copy the files as `copy_directory` does, to a directory that is removed when this process ends."""
    root = Path(tempfile.mkdtemp(prefix="ckptstore-copy-"))
    maker = os.getpid()

    def remove() -> None:
        if os.getpid() == maker:  # a forked child that ends must leave the copy to its parent
            shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    return copy_directory(files, root / f"step-{files.step}", include=include)


def _copy_to(files: CheckpointFiles, path: Path, load: LoadWatch, *, include: str | None) -> None:
    manifest, _ = files.read_manifest()
    load.found(manifest.step, files.record)
    chosen = [item for item in manifest.files if include is None or _matches(item, include)]
    if include is not None and not chosen:
        raise InvalidInput(f"No file of step {manifest.step} matches {include!r}")
    needed_bytes = sum(item.size_bytes for item in chosen)
    path.mkdir(parents=True)
    free_bytes = posix.free_bytes(str(path))
    if needed_bytes > free_bytes:
        raise StorageFull(f"{path.parent} needs {needed_bytes} bytes, and {free_bytes} bytes are free")
    load.enter("read")
    download_files(files, manifest, chosen, path, with_directories=include is None)


def _matches(receipt: Receipt, include: str) -> bool:
    return fnmatch.fnmatchcase(receipt.name, include) or fnmatch.fnmatchcase(receipt.original_name or "", include)


def download_files(
    files: CheckpointFiles,
    manifest: Manifest,
    chosen: Sequence[Receipt],
    path: Path,
    *,
    cached: bool = False,
    with_directories: bool = True,
) -> None:
    """Copy these files of a checkpoint below a directory, and check every byte. The files appear one by one.

    `cached` makes copies for the node cache: read-only, and not synced to the disk.
    """
    wanted = [(files.wanted(item), f"{path}/{item.name}") for item in chosen]
    with files.missing_is_damage():
        files.transfer.download(wanted, read_only=cached, durable=not cached)
    if with_directories:
        for name in manifest.directories:
            (path / name).mkdir(parents=True, exist_ok=True)
