"""The storage of torch_checkpointing: its paths and verbs over a store."""

from __future__ import annotations

import errno
import io
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch_checkpointing.storage.base_storage import ReadArgs, Storage

from ckptstore.boundary import bounded
from ckptstore.errors import FileMissing, InvalidInput, StorageError
from ckptstore.group import SoloGroup
from ckptstore.integrations.torch_checkpointing.committed import Committed, Shelf
from ckptstore.integrations.torch_checkpointing.drafts import Draft, JobStart, Writing, checked_file, publish
from ckptstore.integrations.torch_checkpointing.paths import PathReader, StoredPath
from ckptstore.integrations.torch_checkpointing.streams import CheckedFile, ReadStream, WriteStream
from ckptstore.job import Job, Start
from ckptstore.log import Log
from ckptstore.retention import Policy
from ckptstore.transfer.opened import OpenedPlace
from ckptstore.upkeep.retain import remove

logger = logging.getLogger("ckptstore")


@bounded
class StoreStorage(Storage):
    """A store as a tree of two levels: checkpoints, and the files in them. Safe for threads.

    All ranks of the job see a temporary directory's files, and nobody else does. Checkpoints are immutable; the rename
    of a temporary directory is their commit. Of the table of renames, all rows for directories hold; files cannot be
    renamed, because object stores can only copy them.
    """

    def __init__(self, place: OpenedPlace, paths: PathReader, policy: Policy, start: JobStart) -> None:
        place.transfer.set_rank(start.rank)
        group = SoloGroup(start_token=start.token)
        group.world_size = start.world_size
        self._job = Job(
            storage=place.storage,
            log=Log(place.storage),
            transfer=place.transfer,
            config=place.config,
            policy=policy,
            missing="error",
            given_group=group,
            start=Start(start.token, start.since),
        )
        self._paths = paths
        self._start = start
        self._shelf = Shelf(self._job)
        self._writing: dict[str, Writing] = {}
        """The drafts that this process writes to, or has renamed."""
        self._lock = threading.Lock()
        self._claiming = threading.Lock()
        weakref.finalize(self, place.close)

    @property
    def mmap_fill_workers(self) -> int:
        """One: a read of a whole file is parallel by itself."""
        return 1

    # Reading

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> Any:
        """Open the file as a stream, every block checked. `direct_io` and `timeout_us` are ignored: the disk engine and
        the retries of ckptstore decide.

        Raises FileMissing, CheckpointDamaged; StorageError for another size than `known_size_bytes`.
        """
        file = self._checked_file(path)
        known = read_args.known_size_bytes if read_args else None
        if known is not None and known != file.size_bytes:
            raise StorageError(f"{path} has {file.size_bytes} bytes, {known} are expected", file=file.key)
        if read_args is None or read_args.pre_read_full_file:
            return io.BytesIO(file.read(self._job.transfer))
        return ReadStream(self._job.transfer, file)

    def getsize(self, path: Path) -> int:
        """Return the bytes of a file. Raises FileMissing."""
        return self._checked_file(path).size_bytes

    def exists(self, path: Path) -> bool:
        """True if the file or directory exists now."""
        place = self._paths.place(path)
        if not place.name:
            return True
        files, directories = self._entries(place)
        return place.file in files or place.file in directories

    def isdir(self, path: Path) -> bool:
        """True if the directory exists now."""
        place = self._paths.place(path)
        return not place.name or place.file in self._entries(place)[1]

    def ls(self, path: Path) -> list[str]:
        """List the names in a directory; in the root, all checkpoints, without temporary directories."""
        place = self._paths.place(path)
        if not place.name:
            return sorted(found.name for found in self._shelf.live())
        files, directories = self._entries(place)
        if place.file in files:
            raise NotADirectoryError(errno.ENOTDIR, f"{path} is a file")
        if place.file not in directories:
            raise FileNotFoundError(errno.ENOENT, f"There is no directory {path} in {self._job.storage.uri}")
        below = f"{place.file}/" if place.file else ""
        inside = (name.removeprefix(below) for name in files | directories if name and name.startswith(below))
        return sorted({name.partition("/")[0] for name in inside if name})

    def remap_path(self, path: Path) -> str:
        """Return the URI of a path. Raises FileMissing."""
        place, uri = self._paths.place(path), self._job.storage.uri.rstrip("/")
        if not place.name:
            return uri
        if not place.is_draft:
            found = self._committed(place)
            return f"{found.files.uri}/{place.file}".rstrip("/")
        if place.file and not self.isdir(path):
            return f"{uri}/{self._checked_file(path).key}"
        raise FileMissing(f"{path} is a temporary directory, and has no URI of its own", file=str(path))

    # Writing

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Create a directory in a temporary one, or that itself; all ranks see it. An existing one is no error.

        The first of a job claims the store. Raises FileExistsError when the step is committed already, StoreFenced when
        a later job has claimed the store, InvalidInput for a path that cannot become a checkpoint.
        """
        place = self._writable(path)
        writing = self._begin(place)
        parts = place.file.split("/") if place.file else []
        wanted = ["/".join(parts[:count]) for count in range(len(parts) + 1)]
        if not recursive and wanted[:-1] and wanted[-2] not in writing.draft.entries()[1]:
            raise FileNotFoundError(errno.ENOENT, f"There is no directory above {path}")
        writing.draft.make_directories(name for name in wanted if name not in writing.directories)
        writing.directories.update(wanted)

    def stream_write(self, path: Path) -> WriteStream:
        """Open a stream whose bytes become the file when it is closed, and not before."""
        return self.get_write_stream(path, None)

    def get_write_stream(self, path: Path, data: object) -> WriteStream:
        """Open a stream as `stream_write` does; the memory of the tensors in `data` is written without a copy."""
        place = self._writable(path)
        writing = self._begun(place)
        return WriteStream(lambda views: self._store(writing, place.file, views), data)

    def write(self, path: Path, data: Any) -> None:
        """Write a file: durable, and seen by all ranks, when this returns."""
        place = self._writable(path)
        self._store(self._begun(place), place.file, [memoryview(data).cast("B")])

    def delete(self, path: Path) -> None:
        """Delete a file of a temporary directory. Raises FileMissing, and PermissionError in a checkpoint."""
        place = self._paths.place(path)
        if not place.is_draft or not place.file:
            self._refuse_change(place)
        draft = self._draft(place.name)
        receipt, _ = draft.read(place.file)
        draft.forget(place.file)
        self._job.storage.delete([f"checkpoints/{receipt.attempt}/{place.file}"])

    def rmdir(self, path: Path) -> None:
        """Remove a temporary directory with all its contents, or put a checkpoint into the trash.

        Raises PermissionError for a checkpoint that has to stay: the latest, a pinned one, and the one that was the
        latest when this job began to write.
        """
        place = self._paths.place(path)
        if not place.name or place.file:
            self._refuse_change(place)
        if not place.is_draft:
            found = self._committed(place)
            log, step = self._job.log, found.record.entry.step
            try:
                log.append(lambda newest: remove(log, newest, step, epoch=None, next_save=0, force=False))
            except InvalidInput as error:
                raise PermissionError(errno.EPERM, f"{found.name} stays in {self._job.storage.uri}: {error}") from error
            return
        draft = self._draft(place.name)
        files, directories = draft.entries()
        if not directories:
            raise FileNotFoundError(errno.ENOENT, f"There is no directory {path}")
        stored = draft.read_all(files)
        draft.remove()
        self._job.storage.delete([f"checkpoints/{receipt.attempt}/{receipt.name}" for receipt, _ in stored])
        with self._lock:
            self._writing.pop(place.name, None)

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Commit: the temporary directory becomes the checkpoint of its name, whole, by one record of the log.

        Called again after a lost reply, it succeeds. After an error whose `committed` is None the outcome is unknown;
        `exists` tells. Raises FileExistsError when the step is committed already, StoreFenced when a later job has
        claimed the store, io.UnsupportedOperation for a file.
        """
        source, target = self._paths.place(src_path), self._paths.place(dst_path)
        if source.file or target.file:
            raise io.UnsupportedOperation(
                f"The file {src_path} cannot be renamed in {self._job.storage.uri}: object stores can only copy it"
            )
        if not source.is_draft or target.is_draft or source.name != target.name:
            raise io.UnsupportedOperation(
                f"{src_path} cannot become {dst_path}: {self._paths.temp_dir_prefix}NAME becomes the checkpoint NAME"
            )
        with self._lock:
            mine = self._writing.get(source.name)
        is_again = mine is not None and mine.is_sealed and not self._draft(source.name).entries()[1]
        writing = mine if mine is not None and is_again else self._begin(source, may_exist=True)
        earlier = self._shelf.of_step(source.step)
        if earlier is not None and earlier.entry.attempt == str(writing.attempt):
            return
        if earlier is not None:
            self._refuse_taken(source, earlier.entry.attempt)
        publish(self._job, self._start, writing, source)

    # Inside

    def _draft(self, name: str) -> Draft:
        return Draft.current(self._job.storage, self._start.token, name)

    def _writable(self, path: Path) -> StoredPath:
        place = self._paths.place(path)
        if not place.is_draft:
            prefix = self._paths.temp_dir_prefix
            raise InvalidInput(
                f"{path} is not in a temporary directory ({prefix}...), so no rename would make it a checkpoint",
                hint="Leave write_to_temp_dir=True, and give the writer's temp_dir_prefix to StoreStorageConfig too",
            )
        place.check_writable()
        return place

    def _begin(self, place: StoredPath, *, may_exist: bool = False) -> Writing:
        """Return the open draft, for this job."""
        epoch = self._claimed_epoch()
        taken = None if may_exist else self._shelf.of_step(place.step)
        if taken is not None:
            self._refuse_taken(place, taken.entry.attempt)
        draft = self._draft(place.name)
        with self._lock:
            found = self._writing.get(place.name)
            if found is None or found.draft.number != draft.number:
                attempt = draft.attempt(place.step, epoch, self._start.token)
                found = self._writing[place.name] = Writing(draft, attempt)
            return found

    def _claimed_epoch(self) -> int:
        """Return the writer epoch of the job: claimed by the rank that writes first, found in the log by the others.

        Raises StoreFenced when a later job has claimed the store.
        """
        job = self._job
        with self._claiming:
            job.log.try_creates()
            if not job.log.is_exclusive:
                raise InvalidInput(
                    f"{job.storage.uri} cannot create a file only where there is none, so ranks could claim it twice"
                )
            job.claim(job.log.newest())
            return job.claimed_epoch

    def _begun(self, place: StoredPath) -> Writing:
        """Return the draft begun by `mkdir`. Raises FileNotFoundError if a file's directory was never made."""
        parent = place.file.rpartition("/")[0]
        with self._lock:
            found = self._writing.get(place.name)
        if found is None or found.is_sealed or parent not in found.directories:
            found = self._begin(place)
            found.directories |= found.draft.entries()[1]
        if parent not in found.directories:
            raise FileNotFoundError(errno.ENOENT, f"There is no directory for {place.path}: make it first")
        return found

    def _store(self, writing: Writing, file: str, views: Sequence[memoryview]) -> None:
        writing.draft.store(self._job.transfer, writing.attempt, file, views, rank=self._start.rank)

    def _committed(self, place: StoredPath) -> Committed:
        try:
            found = self._shelf.find(place.name, place.step)
        except InvalidInput:  # no step, so no checkpoint
            found = None
        if found is None:
            raise FileMissing(f"There is no checkpoint {place.name} in {self._job.storage.uri}", file=place.name)
        return found

    def _entries(self, place: StoredPath) -> tuple[set[str], set[str]]:
        if place.is_draft:
            return self._draft(place.name).entries()
        try:
            found = self._committed(place)
        except FileMissing:
            return set(), set()
        return set(found.names), set(found.directories)

    def _checked_file(self, path: str | os.PathLike[str]) -> CheckedFile:
        place = self._paths.place(path)
        if place.is_draft:
            receipt, blocks = self._draft(place.name).read(place.file)
            return checked_file(f"checkpoints/{receipt.attempt}/", receipt, blocks)
        return self._committed(place).checked(place.file)

    def _refuse_taken(self, place: StoredPath, attempt: str) -> NoReturn:
        raise FileExistsError(
            errno.ENOTEMPTY, f"Step {place.step} is committed in {self._job.storage.uri} already, by {attempt}"
        )

    def _refuse_change(self, place: StoredPath) -> NoReturn:
        raise PermissionError(
            errno.EPERM,
            f"{place.path or '.'} cannot be deleted from {self._job.storage.uri}: checkpoints are immutable",
        )
