"""The story of an export in the layout of Hugging Face: stream every file from the checkpoint to its place.

A file is uploaded in parts while it is read, and never lies on this machine. The files that lead a reader to the
others, the index and then the config, are written when all of them exist. Files that were complete when an export was
killed are found by their marks (`progress`) and not written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore.errors import CkptstoreError, InvalidInput, RankFailed, StorageError
from ckptstore.group.base import LEADER, Group
from ckptstore.interchange.export_place import PROGRESS_FOLDER, ExportPlace, leads
from ckptstore.interchange.hugging_face.progress import ExportProgress
from ckptstore.interchange.hugging_face.safetensors_layout import INDEX_NAME, LaidOut, Layout
from ckptstore.interchange.hugging_face.source import SafetensorsSource
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.loading.load_state import open_alone
from ckptstore.transfer.executor import Executor, deal
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.sources import FileSource, MemorySource


def write_safetensors(
    files: CheckpointFiles, layout: Layout, place: ExportPlace, *, manifest: bytes, group: Group, executor: Executor
) -> tuple[str, ...]:
    """Write all files, or the missing ones, and return all names. Collective: each rank writes a share.

    Raises InvalidInput before anything is written, CheckpointDamaged (nothing is left then), and errors of writing to
    the target (complete files stay, and the same export goes on there).
    """
    plan = layout.digest(manifest)
    tag = f"export {plan[:16]}"
    with place.opened_target() as target:
        writing = _Writing(layout, place, ExportProgress(target, plan), files.uri)
        with group.meeting(f"begin {tag}") as meeting:
            left = meeting.tell(writing.begin)
        share = _Share(files.alone(), layout, writing.progress)
        try:
            _write_all(share, [file for file in layout.files if file[0] in left], group, executor, tag)
            with group.meeting(f"finish {tag}") as meeting:
                names = meeting.tell(writing.finish)
        except CkptstoreError as error:
            if group.rank == LEADER and not isinstance(error, StorageError | RankFailed):
                writing.discard()
            raise
    return tuple(names)


def _write_all(share: _Share, files: Sequence[LaidOut], group: Group, executor: Executor, tag: str) -> None:
    if group.world_size == 1:
        executor.run(share, files, size_bytes=_size_of)
        return
    shares = deal(files, _size_of, group.world_size)
    mine = shares[group.rank] if group.rank < len(shares) else []
    with group.meeting(f"write {tag}"):
        share(mine)


def _size_of(file: LaidOut) -> int:
    return sum(entry.size_bytes for entry in file[1])


@dataclass(frozen=True, slots=True)
class _Share:
    """Writes some of the files, in any process. The state is opened there, as it cannot be pickled."""

    files: CheckpointFiles
    layout: Layout
    progress: ExportProgress

    def __call__(self, share: Sequence[LaidOut]) -> None:
        if not share:
            return
        target = self.progress.place
        if not self.progress.is_begun():
            hint = "Export to an object store, or to a file system that all nodes share"
            raise InvalidInput(f"{target.storage.uri} is not seen by a node that is to write to it", hint=hint)
        stored = open_alone(self.files)
        stored.saved(lambda key: False)  # chooses the lowest rank where ranks differ
        for file in share:
            name, entries = file
            if self.progress.is_done(name):
                continue
            source = SafetensorsSource(stored, self.layout.head(file), entries, self.layout.keys)
            target.transfer.upload([PlannedFile(name, source)])
            self.progress.done(name, source.size_bytes)


@dataclass(slots=True)
class _Writing:
    """The leader's part of an export, before and after the files."""

    layout: Layout
    place: ExportPlace
    progress: ExportProgress
    checkpoint: str
    """Location of the checkpoint, for people."""
    replaced: Sequence[str] = ()
    """Files in the place of the export, deleted when this one is complete."""

    def begin(self) -> list[str]:
        """Prepare the target, and return the names of the files to write."""
        self.place.check(resumable=True)
        target, names = self.progress.place, [name for name, _ in self.layout.files]
        present = sorted(target.sizes_bytes())
        is_resumed = self.progress.begin(present, checkpoint=self.checkpoint, overwrite=self.place.overwrite)
        self.replaced = [name for name in present if not name.startswith(PROGRESS_FOLDER)]
        if is_resumed:
            self.progress.abort_unfinished(names)
            names = [name for name in names if not self.progress.is_done(name)]
        else:  # an object store's readers must find no mixture; a partial directory on a disk has no reader
            gone = [name for name in self.replaced if self.place.path is not None or leads(name)]
            target.storage.delete(gone)
        return names

    def finish(self) -> list[str]:
        """Write the files by which readers find the others, remove the replaced ones, and publish the export."""
        target, layout, beside = self.progress.place, self.layout, self.place.beside
        self.progress.check_complete({file[0]: len(layout.head(file)) + _size_of(file) for file in layout.files})
        index = [PlannedFile(INDEX_NAME, MemorySource([memoryview(layout.index())]))] if len(layout.files) > 1 else []
        others = [PlannedFile(file.name, FileSource.of(file)) for file in beside if not leads(file.name)]
        config = [PlannedFile(file.name, FileSource.of(file)) for file in beside if leads(file.name)]
        for file in (*others, *index, *config):
            target.transfer.upload([file])
        names = [name for name, _ in layout.files] + [file.key for file in index] + [file.name for file in beside]
        target.storage.delete([name for name in self.replaced if name not in names])
        self.progress.abort_unfinished(names)
        self.progress.forget()
        self.place.publish()
        return names

    def discard(self) -> None:
        """Remove the written files: nobody can complete the export."""
        storage = self.progress.place.storage
        if self.progress.is_begun():
            storage.delete([name for name, _ in self.layout.files if self.progress.is_done(name)])
            self.progress.forget()
        self.place.remove_aside()
