"""Sources of versions: the log of a publication, or the directories that other publishers leave.

A version is known by its identity, not by its number: a trainer that starts again may use a number a second time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ckptstore.errors import CheckpointDamaged, CheckpointGone, FileMissing, InvalidInput
from ckptstore.extensions.exchange.safetensors import (
    BASE_ATTEMPT,
    INDEX_NAME,
    SINGLE_NAME,
    SUFFIX,
    Header,
    Located,
    header_bytes,
    parse_header,
)
from ckptstore.extensions.publication.wire import Index, directory_of, version_of
from ckptstore.format.layout import MANIFEST_NAME, Attempt
from ckptstore.format.record import Record
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.log import Log
from ckptstore.storage.base import Storage, StoredFile
from ckptstore.storage.second_look import looked_twice
from ckptstore.transfer import Wanted
from ckptstore.transfer.opened import OpenedPlace

_FIRST_BYTES = 64 << 10
"""Read of a file at once for its header."""


@dataclass(frozen=True, slots=True)
class Link:
    """One version at its place, and what it builds on."""

    version: int
    identity: str
    base: str | None
    """The identity of the version on which a delta builds, or how it begins, if no more is known; None for a full
    version."""
    index: Index
    files: Mapping[str, Wanted]
    """By their names in the version: the files of tensors, and those beside them, without the index."""
    place: OpenedPlace
    metadata: Mapping[str, Any]
    """The metadata of the publisher."""
    record: Record | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of all files."""
        return sum(item.size_bytes for item in self.files.values())

    def download(self, directory: Path) -> None:
        """Fetch all files to a directory, checked where they have digests. Raises CheckpointDamaged, FileMissing."""
        wanted = [(item, directory / name) for name, item in self.files.items() if not (directory / name).exists()]
        self.place.transfer.download(wanted, durable=False)

    def headers(self) -> dict[str, Header]:
        """Read the headers of the files of tensors, by name."""
        names = sorted({*self.index.files.values()})
        return {name: remote_header(self.place.storage, self.files[name]) for name in names}

    def held(self) -> AbstractContextManager[object]:
        """Protect the files from a prune while the context lasts. Raises CheckpointGone."""
        if self.record is None:
            return nullcontext()
        return CheckpointFiles.at(self.place, prefix=self.record.entry.prefix, record=self.record).held()


def remote_header(storage: Storage, file: Wanted) -> Header:
    """Read the header of a stored file of tensors. Raises CheckpointDamaged."""

    def read() -> Header:
        first = _read(storage, file.key, min(_FIRST_BYTES, file.size_bytes))
        size_bytes = header_bytes(first, file.key)
        if size_bytes > file.size_bytes:
            raise CheckpointDamaged(f"{file.key} is not a safetensors file", file=file.key)
        data = first[:size_bytes] if size_bytes <= len(first) else _read(storage, file.key, size_bytes)
        return parse_header(data, file.key, size_bytes=file.size_bytes)

    return looked_twice(storage, file.key, read)


def _read(storage: Storage, key: str, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    storage.read_into(key, 0, [memoryview(data)])
    return bytes(data)


class VersionSource(Protocol):
    """A place that has versions."""

    @property
    def is_foreign(self) -> bool:
        """True if it has no log."""

    def newest(self) -> Link | None:
        """Return the newest version; None where there is none."""

    def find(self, version: int) -> Link:
        """Return a version by its number. Raises CheckpointGone."""

    def base_of(self, link: Link) -> Link:
        """Return the version on which a delta builds. Raises CheckpointGone."""


def chain(source: VersionSource, link: Link, *, known: str | None) -> list[Link]:
    """Return the deltas after the version `known`, or else all from the full version on, up to `link`; oldest first.

    Raises CheckpointGone for a link that is missing, CheckpointDamaged for a chain that never ends.
    """
    found = [link]
    while (base := found[-1].base) is not None and not (known or "").startswith(base):
        found.append(source.base_of(found[-1]))
        if found[-1].version >= found[-2].version:
            raise CheckpointDamaged(f"Version {found[-2].version} says that it builds on {found[-1].version}")
    return found[::-1]


class PublishedVersions:
    """The versions that a log has."""

    is_foreign = False

    def __init__(self, place: OpenedPlace, log: Log) -> None:
        self._place, self._log = place, log

    def newest(self) -> Link | None:
        """See `VersionSource.newest`."""
        record = self._log.latest()
        return None if record is None else self._link(record)

    def find(self, version: int) -> Link:
        """See `VersionSource.find`."""
        live = self._live()
        found = [record for record in live if record.entry.step == version]
        if not found:
            shown = ", ".join(str(record.entry.step) for record in live[-10:]) or "none"
            raise CheckpointGone(f"There is no version {version} at {self._place.storage.uri}; there are {shown}")
        return self._link(found[-1])

    def base_of(self, link: Link) -> Link:
        """See `VersionSource.base_of`."""
        assert link.record is not None  # it came from this source
        bases = self._log.records(link.record.entry.bases) or self._live()
        found = [record for record in bases if identity_of(record.entry.attempt) == link.base]
        if not found:
            raise CheckpointGone(
                f"Version {link.version} builds on version {link.index.base_version}, which is not there"
            )
        return self._link(found[-1])

    def _live(self) -> list[Record]:
        newest = self._log.newest()
        return list(self._log.readable(newest.state.live if newest else ()))

    def _link(self, record: Record) -> Link:
        prefix = record.entry.prefix
        files = CheckpointFiles.at(self._place, prefix=prefix, record=record)
        manifest, _ = files.read_manifest()
        receipt = manifest.by_name.get(INDEX_NAME)
        if receipt is None:
            uri = self._place.storage.uri
            raise CheckpointDamaged(
                f"Step {record.entry.step} at {uri} is no version of weights: it lacks {INDEX_NAME}",
                hint="Publish weights to a place of their own",
            )
        index = Index.decode(files.read_file(receipt), INDEX_NAME)
        base = None
        if index.is_delta:
            base = identity_of(str(index.metadata.get(BASE_ATTEMPT, "")))
        wanted = {item.name: files.wanted(item) for item in manifest.files if item.name != INDEX_NAME}
        _check_files(index, wanted, record.entry.step)
        identity = identity_of(record.entry.attempt)
        return Link(record.entry.step, identity, base, index, wanted, self._place, manifest.metadata, record)


def identity_of(attempt: str) -> str:
    """Return the identity of the version of an attempt, which a copy of the store keeps.

    Raises CheckpointDamaged for what is no attempt.
    """
    parsed = Attempt.parse(attempt)
    if parsed is None:
        raise CheckpointDamaged(f"{attempt!r} is no attempt on which a delta could build")
    return f"{parsed.step}-{parsed.suffix}"


def _check_files(index: Index, files: Mapping[str, Wanted], version: int) -> None:
    missing = sorted({*index.files.values()} - files.keys())
    if missing:
        raise CheckpointDamaged(f"Version {version} lacks {missing[0]}, which its index names", file=missing[0])


Foreign = Mapping[int, Mapping[str, StoredFile]]
"""The files of each version by their names, by its number."""


class ForeignVersions:
    """The directories `weight_v...` of another publisher, and the model on which its first version builds."""

    is_foreign = True

    def __init__(self, place: OpenedPlace, base: OpenedPlace | None) -> None:
        self._place, self._base = place, base

    def newest(self) -> Link | None:
        """See `VersionSource.newest`. A version whose index is not there yet does not count.

        Raises InvalidInput for the directory of one checkpoint, to which no version will ever come.
        """
        found = self._versions()
        if not found and any(file.key == MANIFEST_NAME for file in self._place.storage.list(MANIFEST_NAME)):
            raise InvalidInput(
                f"{self._place.storage.uri} is one checkpoint, and no place to which versions are published",
                hint="Load or export it; what follows its store is `ckptstore publish STORE URI`",
            )
        return None if not found else self._link(max(found), found)

    def find(self, version: int) -> Link:
        """See `VersionSource.find`."""
        if version == 0 and self._base is not None:
            base_files = {file.key: file for file in self._base.storage.list("") if "/" not in file.key}
            return _foreign_link(0, self._base, {0: base_files}, "")
        found = self._versions()
        if version not in found:
            shown = ", ".join(map(str, sorted(found)[-10:])) or "none"
            hint = "Give the directory of the model on which the first version builds as the base"
            raise CheckpointGone(
                f"There is no version {version} at {self._place.storage.uri}; there are {shown}",
                hint=hint if version == 0 else None,
            )
        return self._link(version, found)

    def base_of(self, link: Link) -> Link:
        """See `VersionSource.base_of`."""
        return self.find(link.index.base_version)

    def _versions(self) -> Foreign:
        found: dict[int, dict[str, StoredFile]] = {}
        for file in self._place.storage.list("weight_v"):
            directory, _, name = file.key.partition("/")
            version = version_of(directory)
            if version is not None and name and "/" not in name:
                found.setdefault(version, {})[name] = file
        return {version: files for version, files in found.items() if _is_whole(files)}

    def _link(self, version: int, found: Foreign) -> Link:
        return _foreign_link(version, self._place, found, f"{directory_of(version)}/")


def _is_whole(files: Mapping[str, StoredFile]) -> bool:
    tensors = [name for name in files if name.endswith(SUFFIX)]
    return INDEX_NAME in files or tensors == [SINGLE_NAME]


def _foreign_identity(version: int, place: OpenedPlace, files: Mapping[str, StoredFile] | None) -> str:
    """Return what tells a version from another of its number, by its place and the sizes and times of its files; only
    the beginning of it if they are gone."""
    if files is None:
        return f"foreign-{version}-"
    seen = [[name, file.size_bytes, file.modified_seconds] for name, file in sorted(files.items())]
    return f"foreign-{version}-{hashlib.sha256(json.dumps([place.storage.uri, seen]).encode()).hexdigest()[:16]}"


def _foreign_link(version: int, place: OpenedPlace, found: Foreign, prefix: str) -> Link:
    files = found[version]
    wanted = {name: Wanted(prefix + name, file.size_bytes, None) for name, file in files.items() if name != INDEX_NAME}
    if INDEX_NAME in files:
        data = place.storage.read(prefix + INDEX_NAME)
        index = Index.decode(data, prefix + INDEX_NAME)
    elif SINGLE_NAME in files:
        header = remote_header(place.storage, wanted[SINGLE_NAME])
        index = Index(dict.fromkeys(header.tensors, SINGLE_NAME), {})
    else:
        raise FileMissing(f"There are no weights at {place.storage.uri}/{prefix}", file=prefix + INDEX_NAME)
    _check_files(index, wanted, version)
    if not index.is_delta:
        named = {*index.files.values()}
        wanted = {name: item for name, item in wanted.items() if name in named or not name.endswith(SUFFIX)}
    else:
        wanted = {name: wanted[name] for name in {*index.files.values()}}
    base = _foreign_identity(index.base_version, place, found.get(index.base_version)) if index.is_delta else None
    return Link(version, _foreign_identity(version, place, files), base, index, wanted, place, {})


def source_at(place: OpenedPlace, base: OpenedPlace | None) -> VersionSource:
    """Return the versions at an opened place: those of its log, or of directories where it has no log."""
    log = Log(place.storage)
    if log.newest() is not None:
        return PublishedVersions(place, log)
    return ForeignVersions(place, base)


Stored = dict[str, tuple[Located, str]]
"""Each tensor of a version with its digest."""


def stored_digests(source: VersionSource, newest: Link) -> tuple[str, Stored] | None:
    """Return the kind of digests and all tensors of a version, from the headers of its chain alone.

    None where a tensor has no digest, or digests are of several kinds.
    """
    found: dict[str, tuple[Located, str]] = {}
    links = chain(source, newest, known=None)
    kinds = {link.index.checksum for link in links}
    for link in links:
        for header in link.headers().values():
            for name, tensor in header.tensors.items():
                place = found[name][0] if link.base is not None else tensor
                if name not in header.metadata:
                    return None
                found[name] = (place, header.metadata[name])
    (kind,) = kinds if len(kinds) == 1 else (None,)
    return None if kind is None else (kind, found)
