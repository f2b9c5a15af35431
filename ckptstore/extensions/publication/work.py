"""The way of a reader from one version to the next: the files that become others, and their new bytes."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptstore.errors import CheckpointDamaged
from ckptstore.extensions.exchange.safetensors import INDEX_NAME, Header, Located, headed, header_bytes, parse_header
from ckptstore.extensions.publication.codec import Change, Memory, OverwriteChange, XorChange, num_threads, replay
from ckptstore.extensions.publication.wire import OVERWRITE, STRONG, Index
from ckptstore.format.encoding import as_list, as_number, as_object, as_text, parse_json
from ckptstore.runtime.parallel import mapped
from ckptstore.storage.disk import posix

STATE_NAME = ".ckptstore-pull.json"
Digests = dict[str, tuple[str, str]]
"""The kind and the value of the digest of each tensor."""


@dataclass(frozen=True, slots=True)
class Spooled:
    """A version that lies on this machine as it was published."""

    path: Path
    version: int
    identity: str
    index: Index
    metadata: Mapping[str, Any]

    def write_facts(self) -> None:
        """Write what `read` needs, after all files are there."""
        facts = {"version": self.version, "identity": self.identity, "metadata": dict(self.metadata)}
        (self.path / INDEX_NAME).write_bytes(self.index.encode())
        write_json(self.path / STATE_NAME, facts)

    @staticmethod
    def read(path: Path) -> Spooled:
        """Read one that is complete. Raises OSError, ValueError, TypeError, KeyError, CheckpointDamaged."""
        facts = parse_json((path / STATE_NAME).read_bytes())
        index = Index.decode((path / INDEX_NAME).read_bytes(), INDEX_NAME)
        version, identity = as_number(facts["version"]), as_text(facts["identity"])
        return Spooled(path, version, identity, index, as_object(facts["metadata"]))


@dataclass(frozen=True, slots=True)
class State:
    """The version that a directory holds, and its files."""

    version: int
    identity: str
    metadata: Mapping[str, Any]
    digests: Digests
    files: Mapping[str, Sequence[int]]
    """The size and the time of the last change, in nanoseconds, of each file of tensors and each of `config_files`."""
    config_files: Sequence[str]
    """The other files that came with the full version."""
    checks: Mapping[str, str]
    """The SHA-256 of the header of each file of tensors, and of all of the index and of each of `config_files`."""
    boot: str
    """The boot of this machine in which the files were written, or last compared with their digests."""

    def encode(self) -> dict[str, Any]:
        """Return it as JSON."""
        lists = {name: {key: [*row] for key, row in getattr(self, name).items()} for name in ("digests", "files")}
        return {name: getattr(self, name) for name in self.__slots__} | lists

    @staticmethod
    def decode(fields: Mapping[str, Any]) -> State:
        """Return it from JSON. Raises ValueError, TypeError, KeyError."""
        digests, files = as_object(fields["digests"]), as_object(fields["files"])
        pairs = [(name, *as_list(pair)) for name, pair in digests.items()]
        return State(
            version=as_number(fields["version"]),
            identity=as_text(fields["identity"]),
            metadata=as_object(fields["metadata"]),
            digests={name: (as_text(kind), as_text(value)) for name, kind, value in pairs},
            files={name: [as_number(number) for number in as_list(stamp)] for name, stamp in files.items()},
            config_files=[as_text(name) for name in as_list(fields["config_files"])],
            checks={name: as_text(digest) for name, digest in as_object(fields["checks"]).items()},
            boot=as_text(fields["boot"]),
        )

    @staticmethod
    def read(directory: Path, *, needs_index: bool = True) -> State | None:
        """Read it; None where the directory is of no reader, or, if it `needs_index`, was left in the middle of a
        replacement."""
        try:
            state = State.decode(parse_json((directory / STATE_NAME).read_bytes()))
            return state if not needs_index or (directory / INDEX_NAME).exists() else None
        except (OSError, ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True, slots=True)
class TensorMove:
    """A tensor on its way from an old file to a new one."""

    name: str
    old: Located
    new: Located
    deltas: Sequence[tuple[Spooled, Path, Located]]
    digest: tuple[str, str] | None
    """The digest of the result, if it must be compared; None if the old bytes are known to be right."""


@dataclass(slots=True)
class Work:
    """The way to a version: the files that become others, and those that stay."""

    base: Path
    """The directory of the old files."""
    target: Spooled
    rewritten: dict[str, tuple[str, bytes, list[TensorMove]]] = field(default_factory=dict)
    """By the name of an old file: the name, the header and the tensors of the new one."""
    weight_map: dict[str, str] = field(default_factory=dict)
    """The file of each tensor in the end."""
    digests: Digests = field(default_factory=dict)
    total_bytes: int = 0
    config_files: Sequence[str] = ()

    @property
    def rewritten_bytes(self) -> int:
        """The bytes of all new files."""
        return sum(_size_of(head, pieces) for _, head, pieces in self.rewritten.values())

    @property
    def largest_bytes(self) -> int:
        """The bytes of the largest new file."""
        return max((_size_of(head, pieces) for _, head, pieces in self.rewritten.values()), default=0)

    def build(self, name: str, target: Path) -> None:
        """Write a new file to a path. Raises CheckpointDamaged if a tensor does not have its digest."""
        _, head, pieces = self.rewritten[name]
        with (
            posix.opened(self.base / name, os.O_RDONLY) as old,
            posix.opened(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as new,
        ):
            posix.allocate(new, _size_of(head, pieces))  # a full disk is noticed before the work
            os.ftruncate(new, _size_of(head, pieces))
            os.pwrite(new, head, 0)
            self._run([(old, new, piece) for piece in pieces])

    def verify(self) -> None:
        """Compute all changed tensors, and compare them with their digests, without writing. Raises
        CheckpointDamaged."""
        for name, (_, _, pieces) in self.rewritten.items():
            with posix.opened(self.base / name, os.O_RDONLY) as old:
                self._run([(old, None, piece) for piece in pieces if piece.deltas])

    def _run(self, items: Sequence[tuple[int, int | None, TensorMove]]) -> None:
        ordered = sorted(items, key=lambda item: -item[2].old.size_bytes)
        mapped(lambda item: rewrite_tensor(*item), ordered, num_threads=num_threads(), name="ckptstore-apply")


def _size_of(head: bytes, pieces: Sequence[TensorMove]) -> int:
    return len(head) + sum(piece.new.size_bytes for piece in pieces)


def rewrite_tensor(old: int, new: int | None, piece: TensorMove) -> None:
    """Write the new bytes of a tensor to their place, or only compute them."""

    def read(start: int, window: Memory) -> None:
        if os.preadv(old, [window.data], piece.old.offset + start) != len(window):
            raise CheckpointDamaged(f"The file of {piece.name} ends early")

    def write(start: int, window: Memory) -> None:
        done = 0
        while done < len(window):
            done += os.pwrite(new, window.data[done:], piece.new.offset + start + done)  # type: ignore[arg-type]

    kind = STRONG if piece.digest is None else piece.digest[0]
    with contextlib.ExitStack() as stack:
        changes = [_change(stack, piece, *delta) for delta in piece.deltas]
        found = replay(read, None if new is None else write, piece.old.size_bytes, changes, kind)
        changes.clear()
    if piece.digest is not None and found != piece.digest[1].lower():
        raise CheckpointDamaged(
            f"{piece.name} has the digest {found} after its changes, its publisher gave {piece.digest[1]}"
        )


def _change(stack: contextlib.ExitStack, piece: TensorMove, spooled: Spooled, path: Path, place: Located) -> Change:
    data: Any = b""
    if place.size_bytes:
        descriptor = stack.enter_context(posix.opened(path, os.O_RDONLY))
        mapping = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        data = memoryview(mapping)[place.offset : place.offset + place.size_bytes]
    if spooled.index.encoding == OVERWRITE:
        return OverwriteChange(data, piece.name, size_bytes=piece.old.size_bytes)
    return XorChange(data, piece.name)


def header_of(path: Path) -> Header:
    """Read the header of a file of tensors. Raises CheckpointDamaged."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        return parse_header(start + file.read(header_bytes(start, path.name) - 8), path.name, size_bytes=size_bytes)


def plan_work(base: Path, local: State | None, links: Sequence[Spooled], *, index: Index | None = None) -> Work:
    """Plan the way from what lies in `base` to the last of `links`.

    `local` is what `base` holds, on which the first link builds; None if `base` is the first link, a full version.
    With the `index` of what `base` held, some of its files may be gone, since they are replaced already.
    Raises CheckpointDamaged for links that do not fit each other.
    """
    target, may_lack = links[-1], index is not None
    if local is None:
        held, links = links[0].index, links[1:]
    else:
        held = index or Index.decode((base / INDEX_NAME).read_bytes(), INDEX_NAME)
    work = Work(base, target, weight_map=dict(held.files))
    old_files = sorted({*held.files.values()})
    headers = {name: header_of(base / name) for name in old_files if not may_lack or (base / name).exists()}
    if local is None:
        named = {INDEX_NAME, STATE_NAME, *headers}
        work.config_files = sorted(item.name for item in base.iterdir() if item.name not in named)
    else:
        work.config_files, work.digests = local.config_files, dict(local.digests)
    tensors: dict[str, Located] = {}
    for name, file in held.files.items():
        if file not in headers:
            continue
        if name not in headers[file].tensors:
            raise CheckpointDamaged(f"{file} lacks {name}, which the index has in it", file=file)
        tensors[name] = headers[file].tensors[name]
        if local is None and held.checksum is not None and name in headers[file].metadata:
            work.digests[name] = (held.checksum, headers[file].metadata[name])
    work.total_bytes = sum(place.size_bytes for place in tensors.values())
    unchecked = {name for name in tensors if local is None and name in work.digests}
    deltas: dict[str, list[tuple[Spooled, Path, Located]]] = {}
    for link in links:
        _take_deltas(link, held.files, deltas, work.digests)
    suffix = target.identity.rpartition("-")[2]
    for number, file in enumerate(old_files, 1):
        if file not in headers:
            continue
        header = headers[file]
        names = sorted((name for name in tensors if held.files[name] == file), key=lambda name: tensors[name].offset)
        if not any(name in deltas for name in names):
            continue
        new_name = f"model-v{target.version:06d}-{suffix}-{number:05d}.safetensors"
        metadata = {"format": header.metadata.get("format", "pt")}
        head, places = headed({name: tensors[name] for name in names}, metadata)
        pieces = [
            TensorMove(
                name,
                tensors[name],
                places[name],
                deltas.get(name, ()),
                work.digests[name] if name in deltas or name in unchecked else None,
            )
            for name in names
        ]
        work.rewritten[file] = new_name, head, pieces
        work.weight_map.update(dict.fromkeys(names, new_name))
    return work


def _take_deltas(
    link: Spooled,
    known: Mapping[str, str],
    deltas: dict[str, list[tuple[Spooled, Path, Located]]],
    digests: Digests,
) -> None:
    files: dict[str, set[str]] = {}
    for name, file in link.index.files.items():
        files.setdefault(file, set()).add(name)
    kind = link.index.checksum
    for file, names in files.items():
        header = header_of(link.path / file)
        if header.tensors.keys() != names:
            odd = min(header.tensors.keys() ^ names)
            raise CheckpointDamaged(f"{file} of version {link.version} and its index differ in {odd}", file=file)
        for name, place in header.tensors.items():
            if name not in known:
                raise CheckpointDamaged(f"Version {link.version} changes {name}, which its base does not have")
            if name not in header.metadata or kind is None:
                raise CheckpointDamaged(f"Version {link.version} has no digest of {name}", file=file)
            deltas.setdefault(name, []).append((link, link.path / file, place))
            digests[name] = (kind, header.metadata[name])


def files_of_work(work: Work) -> list[str]:
    """Return the names of the old files of tensors."""
    new = {name for name, _, _ in work.rewritten.values()}
    return [*work.rewritten, *(name for name in work.weight_map.values() if name not in new)]


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    write_bytes(path, json.dumps(fields).encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(data)
    os.replace(temporary, path)
