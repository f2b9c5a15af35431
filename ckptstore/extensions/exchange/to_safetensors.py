"""Export in the layout of Hugging Face: stream every safetensors file from the checkpoint to its place.

A file is uploaded in parts while it is read, and never lies on this machine. The files that lead a reader to the
others, the index and then the config, are written when all of them exist. Files that were complete when an export was
killed are found by their marks and not written again.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch

from ckptstore.errors import (
    AccessDenied,
    CkptstoreError,
    FileMissing,
    InvalidInput,
    RankFailed,
    StorageError,
)
from ckptstore.extensions.exchange.places import PROGRESS_FOLDER, ExportPlace, leads
from ckptstore.extensions.exchange.safetensors import INDEX_NAME
from ckptstore.extensions.exchange.safetensors_file import LaidOut, Layout, SafetensorsEntry
from ckptstore.extensions.exchange.streaming import ReadableState, boxes_of_stretch
from ckptstore.format.encoding import parse_json
from ckptstore.format.layout import PART_NAME
from ckptstore.group.base import LEADER, Group
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.loading.load_state import open_alone
from ckptstore.runtime.new_memory import new_memory
from ckptstore.state.read.stored import StoredState
from ckptstore.state.tensors.tensor_memory import view_of
from ckptstore.storage.base import Bucket
from ckptstore.transfer.executor import Executor, deal
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.opened import OpenedPlace
from ckptstore.transfer.sources import FileSource, MemorySource, Read

_RECORD = f"{PROGRESS_FOLDER}plan.json"
WINDOW_BYTES = 8 << 20
"""Bytes read at once. A multiple of every element's size, and parts begin at such multiples, so that no element spans
two windows."""
_WINDOWS_AT_ONCE = 2
"""Windows that are filled at once: while bytes for one are read, those of another may be calculated."""
_BUFFER_BYTES = 32 << 20
"""The most memory for buffers beside the windows, for pieces whose order in the checkpoint and the file differ."""


class ExportSource(Protocol):
    """The checkpoints that are exported. It can be pickled, and is opened where the files are written."""

    @property
    def uri(self) -> str:
        """The name of the checkpoint, for people."""

    def opened(self) -> ReadableState:
        """Open the state in this process."""


@dataclass(frozen=True, slots=True)
class OneCheckpoint:
    """See `ExportSource`."""

    files: CheckpointFiles

    @property
    def uri(self) -> str:
        """See `ExportSource.uri`."""
        return self.files.uri

    def opened(self) -> StoredState:
        """See `ExportSource.opened`."""
        stored = open_alone(self.files)
        stored.saved(lambda key: False)  # chooses the lowest rank where ranks differ
        return stored


def write_safetensors(
    source: ExportSource, layout: Layout, place: ExportPlace, *, identity: bytes, group: Group, executor: Executor
) -> tuple[str, ...]:
    """Write all files, or the missing ones, and return all names. Collective: each rank writes a share.

    An export of the same layout and `identity`, which stands for all bytes of the tensors, goes on where it was killed.

    Raises InvalidInput before anything is written, CheckpointDamaged (nothing is left then), and errors of writing to
    the target (complete files stay, and the same export goes on there).
    """
    plan = layout.digest(identity)
    tag = f"export {plan[:16]}"
    with place.opened_target() as target:
        progress = ExportProgress(target, plan)
        with group.meeting(f"begin {tag}") as meeting:
            left, replaced = meeting.tell(lambda: _begin(layout, place, progress, checkpoint=source.uri))
        write = partial(_write, source, layout, progress)
        left = [file for file in layout.files if file[0] in left]
        try:
            if group.world_size == 1:
                executor.run(write, left, size_bytes=_size_of)
            else:
                shares = deal(left, _size_of, group.world_size)
                with group.meeting(f"write {tag}"):
                    write(shares[group.rank] if group.rank < len(shares) else [])
            with group.meeting(f"finish {tag}") as meeting:
                names = meeting.tell(lambda: _finish(layout, place, progress, replaced))
        except CkptstoreError as error:
            if group.rank == LEADER and not isinstance(error, StorageError | RankFailed):  # nobody can complete it
                if progress.is_begun():
                    target.storage.delete([name for name, _ in layout.files if progress.is_done(name)])
                    progress.forget()
                place.remove_aside()
            raise
    return tuple(names)


def _size_of(file: LaidOut) -> int:
    return sum(entry.size_bytes for entry in file[1])


def _begin(layout: Layout, place: ExportPlace, progress: ExportProgress, *, checkpoint: str) -> list[list[str]]:
    """Leader: prepare the target; return the files to write, and those at the target that the export replaces."""
    place.check(resumable=True)
    names = [name for name, _ in layout.files]
    present = sorted(progress.place.sizes_bytes())
    is_resumed = progress.begin(present, checkpoint=checkpoint, overwrite=place.overwrite)
    replaced = [name for name in present if not name.startswith(PROGRESS_FOLDER)]
    if is_resumed:
        progress.abort_unfinished(names)
        names = [name for name in names if not progress.is_done(name)]
    else:  # an object store's readers must find no mixture; a partial directory on a disk has no reader
        progress.place.storage.delete([name for name in replaced if place.path is not None or leads(name)])
    return [names, replaced]


def _write(source: ExportSource, layout: Layout, progress: ExportProgress, share: Sequence[LaidOut]) -> None:
    """Write some of the files, in any process. The state is opened there, as it cannot be pickled."""
    if not share:
        return
    target = progress.place
    if not progress.is_begun():
        hint = "Export to an object store, or to a file system that all nodes share"
        raise InvalidInput(f"{target.storage.uri} is not seen by a node that is to write to it", hint=hint)
    stored = source.opened()
    for file in share:
        name, entries = file
        if not progress.is_done(name):
            contents = SafetensorsSource(stored, layout.head(file), entries, layout.keys)
            target.transfer.upload([PlannedFile(name, contents)])
            progress.done(name, contents.size_bytes)


def _finish(layout: Layout, place: ExportPlace, progress: ExportProgress, replaced: Sequence[str]) -> list[str]:
    """Leader: write the files by which readers find the others, remove the replaced ones, and publish the export."""
    target, beside = progress.place, place.beside
    progress.check_complete({file[0]: len(layout.head(file)) + _size_of(file) for file in layout.files})
    index = [PlannedFile(INDEX_NAME, MemorySource([memoryview(layout.index())]))] if len(layout.files) > 1 else []
    others = [PlannedFile(file.name, FileSource.of(file)) for file in beside if not leads(file.name)]
    config = [PlannedFile(file.name, FileSource.of(file)) for file in beside if leads(file.name)]
    for file in (*others, *index, *config):
        target.transfer.upload([file])
    names = [name for name, _ in layout.files] + [file.key for file in index] + [file.name for file in beside]
    target.storage.delete([name for name in replaced if name not in names])
    progress.abort_unfinished(names)
    place.publish(progress.forget)
    return names


@dataclass(frozen=True, slots=True)
class ExportProgress:
    """The progress of one plan at its target, until the export is complete. It can be pickled.

    The record names the plan. Each complete file has a mark with the plan, its size and its version at the storage. A
    mark is written after its file, and all marks of another plan are deleted before the record of a new one is written.
    """

    place: OpenedPlace
    plan: str
    """The digest of the layout of all files and of the checkpoint."""

    def is_begun(self) -> bool:
        """True if the record of this plan is at the target."""
        return self._read(_RECORD).get("plan") == self.plan

    def begin(self, present: Sequence[str], *, checkpoint: str, overwrite: bool) -> bool:
        """Continue this plan, or begin it; True if it had been begun before. `present` lists the files at the target.

        Raises InvalidInput if another export was begun there and may not be replaced.
        """
        if self.is_begun():
            return True
        begun = [name for name in present if name.startswith(PROGRESS_FOLDER)]
        if begun and not overwrite:
            other = self._read(_RECORD).get("checkpoint", "another checkpoint")
            raise InvalidInput(
                f"{self.place.storage.uri} has a part of an export of {other} that is another one than this",
                hint="Run that one again to complete it, give another directory, or overwrite it",
            )
        self.place.storage.delete([name for name in begun if name != _RECORD])
        self._write(_RECORD, {"plan": self.plan, "checkpoint": checkpoint})
        return False

    def is_done(self, name: str) -> bool:
        """True if a file exists as this plan wrote it."""
        mark = self._read(_mark_of(name))
        if mark.get("plan") != self.plan:
            return False
        try:
            found = self.place.storage.stat(name)
        except FileMissing:
            return False
        return (mark.get("size_bytes"), mark.get("version")) == (found.size_bytes, found.version)

    def done(self, name: str, size_bytes: int) -> None:
        """Mark a file as written. Raises StorageError if the storage has another size."""
        found = self.place.storage.stat(name)
        if found.size_bytes != size_bytes:
            raise StorageError(f"{name} has {found.size_bytes} bytes, {size_bytes} were written", file=name)
        self._write(_mark_of(name), {"plan": self.plan, "size_bytes": size_bytes, "version": found.version})

    def check_complete(self, sizes: dict[str, int]) -> None:
        """Raise StorageError unless each of these files exists with its size and a mark. One listing."""
        found = self.place.sizes_bytes()
        for name, size_bytes in sizes.items():
            if found.get(name) != size_bytes or _mark_of(name) not in found:
                raise StorageError(
                    f"{name} is not at {self.place.storage.uri} as it was written", file=name, hint="Export again"
                )

    def abort_unfinished(self, names: Sequence[str]) -> None:
        """Abort uploads of these files that killed processes never finished, and delete their parts."""
        storage = self.place.storage
        storage.delete([file.key for file in storage.list(".part-") if PART_NAME.search(file.key)])
        if isinstance(storage, Bucket):
            # They cost money, but the account may lack the right.
            with suppress(AccessDenied):
                for key, upload_id in storage.unfinished(""):
                    if key in names:
                        storage.abort_unfinished(key, upload_id)

    def forget(self) -> None:
        """Delete the marks, and the record last."""
        storage = self.place.storage
        found = [file.key for file in storage.list(PROGRESS_FOLDER)]
        storage.delete([name for name in found if name != _RECORD])
        storage.delete([_RECORD])
        storage.remove_directories(PROGRESS_FOLDER.rstrip("/"))

    def _read(self, key: str) -> dict[str, Any]:
        """Return the contents of a progress file; empty if it is missing or torn."""
        try:
            found = parse_json(self.place.storage.read(key))
        except (FileMissing, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, key: str, fields: dict[str, Any]) -> None:
        self.place.storage.write(key, [memoryview(json.dumps(fields).encode())])


def _mark_of(name: str) -> str:
    return f"{PROGRESS_FOLDER}{name}.json"


class SafetensorsSource:
    """A file that is made while it is read: a `Source`. Every block of the checkpoint is checked as it is read.

    The position of each byte is known before the first one is read. So the file can be written in the parts that a
    storage wants, by several threads, and its bytes pass through one window of memory for each thread that reads,
    whatever the sizes of the file and of its tensors. Two windows are filled at a time.
    """

    payloads: Sequence[tuple[int, int]] = ()
    in_memory = False

    def __init__(
        self, stored: ReadableState, head: bytes, entries: Sequence[SafetensorsEntry], keys: Mapping[str, str]
    ) -> None:
        """Create the source; `keys` maps each tensor's name to its key in the checkpoint."""
        stored.buffer_bytes = _BUFFER_BYTES // _WINDOWS_AT_ONCE
        self._stored = stored
        self._head = head
        self._entries = entries
        self._keys = keys
        *self._starts, self.size_bytes = accumulate((entry.size_bytes for entry in entries), initial=len(head))
        self._turns = threading.BoundedSemaphore(_WINDOWS_AT_ONCE)
        self._unused: list[torch.Tensor] = []
        """Windows whose bytes are all read."""

    @contextmanager
    def open(self) -> Iterator[Read]:
        """Yield a function that reads the file, best from front to back. Reading raises CheckpointDamaged."""
        begin, window = 0, torch.empty(0, dtype=torch.uint8, device="cpu")

        def read(offset: int, size_bytes: int, scratch: memoryview) -> Sequence[memoryview]:
            nonlocal begin, window
            view, done = scratch[:size_bytes], 0
            while done < size_bytes:
                start = offset + done
                if not begin <= start < begin + len(window):
                    window = window.new_empty(0)  # unusable after an error
                    begin, window = start, self._filled(start)
                found = view_of(window)[start - begin :][: size_bytes - done]
                view[done : done + len(found)] = found
                done += len(found)
                if start + len(found) == begin + len(window):
                    if len(window) == WINDOW_BYTES:  # not the end of a file, which is shorter
                        self._unused.append(window)
                    begin, window = 0, window.new_empty(0)
            return [view]

        yield read

    def _filled(self, begin: int) -> torch.Tensor:
        """Return a window with the bytes of the file from `begin` on."""
        with self._turns:
            try:
                window = self._unused.pop()
            except IndexError:
                # Mapped memory returns to the system when unused; the heaps of several threads would keep it.
                window = torch.frombuffer(new_memory(min(WINDOW_BYTES, self.size_bytes)), dtype=torch.uint8)
            self._fill(window, begin)
        return window[: self.size_bytes - begin]

    def _fill(self, memory: torch.Tensor, begin: int) -> None:
        """Read the bytes of the file from `begin` on."""
        end = min(begin + WINDOW_BYTES, self.size_bytes)
        head = self._head[begin:end]
        view_of(memory)[: len(head)] = head
        wanted = []
        for index in range(max(0, bisect_right(self._starts, begin) - 1), len(self._entries)):
            start, entry = self._starts[index], self._entries[index]
            if start >= end:
                break
            first, last = max(start, begin), min(start + entry.size_bytes, end)
            if first < last:
                key = self._keys[entry.name]
                stretch = memory[first - begin : last - begin]
                wanted += [(key, *piece) for piece in boxes_of_stretch(self._stored, key, first - start, stretch)]
        self._stored.fill_boxes(wanted)
