"""The directories `weight_v000123` in which other readers look for versions. They follow the log.

On a disk a directory is of hard links, and appears whole, by a rename. In a bucket the bucket copies the files, and the
index, by which readers find the others, comes last and goes first. Names of files have the attempt in them, so that
versions of one number never mix.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ckptstore.errors import CkptstoreError
from ckptstore.extensions.exchange.replacing import replace_directory
from ckptstore.extensions.exchange.safetensors import ATTEMPT, INDEX_NAME
from ckptstore.extensions.publication.wire import Index, directory_of, version_of
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.loading.checkpoint_files import files_of
from ckptstore.runtime.parallel import mapped
from ckptstore.storage.base import Disk, adopt

logger = logging.getLogger("ckptstore")

_PREFIX = "weight_v"


class Directories:
    """The directories at one place, as far as this process knows them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._present: dict[int, str] | None = None
        """The attempt of each version that has a directory; None until they are listed."""

    def follow_log(self) -> None:
        """Make a directory for each version that is live, or on which one builds, and remove the others.

        Never raises: a failure is logged, and the next version tries again. Readers of the log need no directory.
        """
        job = self._job
        try:
            newest = job.log.newest()
            if newest is None or newest.state.epoch != job.epoch:
                return  # a later job has directories of its own
            present = self._present = self._listed() if self._present is None else self._present
            wanted = _needed(job, newest)
            for version in sorted(present.keys() - wanted.keys()):
                self._remove_directory(version)
                del present[version]
            for version, record in sorted(wanted.items()):
                if present.get(version) != record.entry.attempt:
                    self._add_directory(version, record)
                    present[version] = record.entry.attempt
        except (CkptstoreError, OSError) as error:
            self._present = None
            logger.warning("the directories %s... at %s are behind: %s", _PREFIX, job.storage.uri, error)

    def _listed(self) -> dict[int, str]:
        storage = self._job.storage
        if isinstance(storage, Disk):  # a process that was killed may have left one on its way, with links to files
            root = Path(storage.local_path(_PREFIX)).parent
            for left in (*root.glob(f".{_PREFIX}*"), *root.glob(f"..{_PREFIX}*")):
                shutil.rmtree(left, ignore_errors=True)
        found: dict[int, str] = {}
        for file in storage.list(_PREFIX):
            directory, _, name = file.key.partition("/")
            version = version_of(directory)
            if version is None or "/" in name:
                continue
            found.setdefault(version, "")
            if name == INDEX_NAME:
                with contextlib.suppress(CkptstoreError):
                    index = Index.decode(storage.read(file.key), file.key)
                    found[version] = str(index.metadata.get(ATTEMPT, ""))
        return found

    def _remove_directory(self, version: int) -> None:
        storage, directory = self._job.storage, directory_of(version)
        if isinstance(storage, Disk):
            aside = storage.local_path(f".{directory}")
            shutil.rmtree(aside, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                os.rename(storage.local_path(directory), aside)
            shutil.rmtree(aside, ignore_errors=True)
            return
        storage.delete([f"{directory}/{INDEX_NAME}"])
        storage.delete([file.key for file in storage.list(f"{directory}/")])

    def _add_directory(self, version: int, record: Record) -> None:
        job, directory = self._job, directory_of(version)
        manifest, _ = files_of(job, record).read_manifest()
        names = sorted((item.name for item in manifest.files), key=lambda name: name == INDEX_NAME)
        if isinstance(job.storage, Disk):
            made, target, old = (Path(job.storage.local_path(f"{dots}{directory}")) for dots in (".", "", ".."))
            shutil.rmtree(made, ignore_errors=True)
            _adopt(job, names, record.entry.prefix, f".{directory}/")
            replaced = replace_directory(made, target, aside=old)
            if replaced is not None:
                shutil.rmtree(replaced, ignore_errors=True)
            return
        self._remove_directory(version)
        *files, index = names
        _adopt(job, files, record.entry.prefix, f"{directory}/")
        _adopt(job, [index], record.entry.prefix, f"{directory}/")


def _adopt(job: Job, names: Sequence[str], prefix: str, target: str) -> None:
    moves, num_threads = [(prefix + name, target + name) for name in names], job.config.transfer.num_threads

    def stream(move: tuple[str, str]) -> None:
        source, key = move
        job.storage.write(key, [memoryview(job.storage.read(source))])

    left = adopt(job.storage, moves, num_threads=num_threads)
    mapped(stream, left, num_threads=num_threads, name="ckptstore-copy")


def _needed(job: Job, newest: Record) -> dict[int, Record]:
    """Return the versions that are live, or on which one builds, by number; of two with one number the later."""
    left = list(job.log.readable(newest.state.live))
    found: dict[int, Record] = {}
    seen: set[int] = set()
    while left:
        record = left.pop()
        if record.number not in seen:
            seen.add(record.number)
            other = found.get(record.entry.step)
            if other is None or other.number < record.number:
                found[record.entry.step] = record
            left += job.log.records(record.entry.bases)
    return found
