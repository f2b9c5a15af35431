"""The directory of a reader: a model of Hugging Face at one version, and the way from one version to the next.

New bytes go to new files, under new names. Every tensor is compared with its digest before anything is replaced. Then
the directory is exchanged for the new one, in one step. Where there is no room for that, one file after another is
replaced, by a journal, and the index is away meanwhile, so that no program takes the directory for a model.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptstore.errors import CheckpointDamaged, InvalidInput, StorageError, StorageFull, UnsupportedVersion
from ckptstore.extensions.exchange.replacing import finish_replacement, replace_directory
from ckptstore.extensions.exchange.safetensors import INDEX_NAME, Located, header_bytes
from ckptstore.extensions.publication.codec import num_threads
from ckptstore.extensions.publication.wire import Index, full_metadata
from ckptstore.extensions.publication.work import (
    STATE_NAME,
    Spooled,
    State,
    TensorMove,
    Work,
    files_of_work,
    header_of,
    plan_work,
    rewrite_tensor,
    write_bytes,
    write_json,
)
from ckptstore.format.encoding import parse_json
from ckptstore.format.manifest import sha256_of
from ckptstore.runtime.parallel import mapped, started
from ckptstore.storage.disk import posix

logger = logging.getLogger("ckptstore")

LOCK_NAME, CONFIRMED_NAME = "lock", "confirmed"
_OWN_ASIDE = re.compile(r"next|moved|(spool|old)-[0-9a-f]{8}|\.?journal\.json(\.new)?|file\.new")
"""The names of what is on its way, in the folder beside the directory."""
_MARGIN_BYTES = 16 << 20
_FREED_SECONDS = 5.0
"""The time in which a disk frees what a file held whose name is gone already."""
_NO_JOURNAL = (CheckpointDamaged, UnsupportedVersion, OSError, ValueError, TypeError, LookupError, AttributeError)
_WEIGHTS = re.compile(r"model(-.+)?\.safetensors")
"""The names of files of weights: beside a full version, those of an earlier one are of no use."""


class LocalModel:
    """A directory that holds a model at one version, and the folder beside it for what is on its way."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.aside = directory.with_name(f".{directory.name}.ckptstore")
        self.spool = self._new("spool")
        """The folder of versions as they were published."""
        self._next, self._moved = self.aside / "next", self.aside / "moved"
        self._journal = self.aside / "journal.json"
        self.fault = ""
        """Why the last call of `state` has found no version, though the directory holds files of one."""
        self._old: list[Path] = []
        self._removal: threading.Thread | None = None
        self._room_comes_until = 0.0

    def _new(self, name: str) -> Path:
        """Return a path that nobody has, so that it can be removed while another process works."""
        return self.aside / f"{name}-{secrets.token_hex(4)}"

    def prepare(self) -> None:
        """Make the folder beside the directory. Raises InvalidInput where a directory cannot be exchanged."""
        with posix.translated("Reading", self.path):
            posix.check_replaceable(self.path, may_be_current=True)
            for path in (self.path, self.aside):
                if path.exists() and not path.is_dir():
                    raise InvalidInput(f"{path} is no directory", hint="Give a new or empty directory")
            if self.path.exists() and not (self.path / STATE_NAME).exists() and any(self.path.iterdir()):
                raise InvalidInput(
                    f"{self.path} holds files, and not of a reader", hint="Give a new or empty directory"
                )
            self.aside.mkdir(parents=True, exist_ok=True)

    def recover(self) -> None:
        """Go on with what a process that was killed has begun, and remove what is of no use. Call it with the lock."""
        self.settle()
        with posix.translated("Reading", self.path):
            finish_replacement(self._next, self.path, aside=self._moved)
            if self._journal.exists():
                self._go_on()
            for left in (item for item in self.aside.iterdir() if _OWN_ASIDE.fullmatch(item.name)):
                if left.is_dir():
                    self._room_comes_until = time.monotonic() + _FREED_SECONDS  # if another process removes it just now
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink(missing_ok=True)
            self.spool = self._new("spool")
            self.spool.mkdir()

    def _go_on(self) -> None:
        """Finish the replacement that the journal describes, or forget it. Unless nothing was replaced yet, there is no
        index then, so that a full version is fetched. Raises StorageFull."""
        try:
            journal = parse_json(self._journal.read_bytes())
            links = [Spooled.read(Path(path)) for path in journal["links"]]
            # What was written before the machine started again may have been lost.
            self._replace(journal, links, boot=_boot_id() if journal.get("boot") == _boot_id() else "")
        except StorageFull:
            raise
        except _NO_JOURNAL as error:
            logger.warning("%s cannot go on from where it was interrupted: %s", self.path, error)
            self._journal.unlink(missing_ok=True)

    def state(self) -> State | None:
        """Return what the directory holds, if its files are as they were written: else None, and `fault` says why.

        After the machine has started again, or where times differ, all that the state has digests of is compared.
        """
        self.fault = ""
        state = State.read(self.path)
        if state is None or self._journal.exists():
            self.fault = f"{INDEX_NAME} or {STATE_NAME} is not there, or cannot be read" if state is None else ""
            return None
        with posix.translated("Reading", self.path):
            is_as_written = state.boot == _boot_id() and all(
                _stamp(self.path / name) == [*found] for name, found in state.files.items()
            )
            self.fault = self._fault(state, [INDEX_NAME] if is_as_written else state.checks)
            if not self.fault and not is_as_written:
                self.fault = self._damaged_tensor(state)
                return None if self.fault else self._write_state(self.path, state, _boot_id())
        return None if self.fault else state

    def _fault(self, state: State, names: Iterable[str]) -> str:
        """Return which of these files is not what the state says, "" if all are."""
        for name in names:
            try:
                if (
                    _check_of(self.path / name, has_header=name in state.files and name not in state.config_files)
                    != (state.checks[name])
                ):
                    return f"{name} has been changed"
            except FileNotFoundError:
                return f"{name} is gone"
            except (CheckpointDamaged, KeyError):
                return f"{name} has been changed"
        return ""

    def _damaged_tensor(self, state: State) -> str:
        """Return which tensor does not have its digest, "" if all have."""
        try:
            index = Index.decode((self.path / INDEX_NAME).read_bytes(), INDEX_NAME)
            headers = {name: header_of(self.path / name) for name in {*index.files.values()}}
            items = [(self.path / file, headers[file].tensors[name], name) for name, file in index.files.items()]
        except (CheckpointDamaged, KeyError) as error:
            return str(error)

        def fault(item: tuple[Path, Located, str]) -> str:
            path, place, name = item
            if name not in state.digests:
                return f"{name} in {path.name} has no digest to compare with"
            with posix.opened(path, os.O_RDONLY) as descriptor:
                try:
                    rewrite_tensor(descriptor, None, TensorMove(name, place, place, (), state.digests[name]))
                except CheckpointDamaged:
                    return f"{name} in {path.name} is not what was written"
            return ""

        faults = mapped(fault, items, num_threads=num_threads(), name="ckptstore-verify")
        return next(filter(None, faults), "")

    def switch(self, local: State | None, links: Sequence[Spooled]) -> State:
        """Bring the directory from what it holds to the last of `links`.

        Without `local` the first link is a full version. Raises CheckpointDamaged and StorageFull; the directory is
        then as it was, unless its files were being replaced one by one: then the next call goes on.
        """
        base = self.path if local is not None else links[0].path
        work = plan_work(base, local, links)
        needed_bytes = work.rewritten_bytes if local is not None else work.largest_bytes
        free_bytes = self._free_bytes(needed_bytes)
        with self._full_disk(needed_bytes):
            if needed_bytes <= free_bytes:
                return self._exchange(work, local)
            if local is None or work.largest_bytes > free_bytes:  # a full version is never put in file by file
                raise OSError(errno.ENOSPC, f"{free_bytes} bytes are free")
            work.verify()
            journal = {
                "links": [str(link.path) for link in links],
                "local": local.encode(),
                "old_files": dict(Index.decode((self.path / INDEX_NAME).read_bytes(), INDEX_NAME).files),
                "weight_map": work.weight_map,
                "total_bytes": work.total_bytes,
                "boot": _boot_id(),
            }
            write_json(self._journal, journal)
            return self._replace(journal, links, boot=_boot_id())

    def _free_bytes(self, needed_bytes: int) -> int:
        while True:
            free_bytes = posix.free_bytes(str(self.aside)) - _MARGIN_BYTES
            if needed_bytes <= free_bytes or time.monotonic() >= self._room_comes_until:
                return free_bytes
            time.sleep(0.05)

    @contextlib.contextmanager
    def _full_disk(self, needed_bytes: int) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise StorageError(f"{self.path} could not be brought to the version: {error}") from error
            raise StorageFull(
                f"The next version needs {needed_bytes} bytes beside {self.path}, which are not free",
                hint="Make room there, and pull again",
            ) from error

    def _exchange(self, work: Work, local: State | None) -> State:
        """Build the new directory, and exchange it for the old one."""
        shutil.rmtree(self._next, ignore_errors=True)
        self._next.mkdir()
        try:
            for name in sorted({*files_of_work(work)}):
                if name in work.rewritten:
                    work.build(name, self._next / work.rewritten[name][0])
                    if local is None:
                        (work.base / name).unlink()  # room for the next one
                elif local is None:
                    os.rename(work.base / name, self._next / name)
                else:
                    os.link(work.base / name, self._next / name)
            if local is None:
                for name in work.config_files:
                    shutil.copyfile(work.base / name, self._next / name)
                    posix.flush(str(self._next / name))
            self._link_others(local, {*work.config_files} if local is None else set())
            state = self._finish(self._next, work, _boot_id(), local)
        except BaseException:
            shutil.rmtree(self._next, ignore_errors=True)
            raise
        self._put_in_place()
        return state

    def _link_others(self, local: State | None, taken: set[str]) -> None:
        """Take what users have put into the directory along."""
        if not self.path.exists():
            return
        # Without its index the directory is of no version any more, and its state still names its files.
        before = local or State.read(self.path, needs_index=False)
        own = {INDEX_NAME, STATE_NAME, *taken, *(before.files if before else ())}
        own -= {*before.config_files} if before and local is not None else set()
        for item in self.path.iterdir():
            if item.name in own or (local is None and _WEIGHTS.fullmatch(item.name)):
                continue
            if item.is_dir():
                shutil.copytree(item, self._next / item.name, copy_function=os.link, symlinks=True)
            elif not (self._next / item.name).exists():
                os.link(item, self._next / item.name, follow_symlinks=False)

    def _put_in_place(self) -> None:
        old = replace_directory(self._next, self.path, aside=self._moved)
        if old is not None:
            os.rename(old, free := self._new("old"))
            self._old.append(free)

    def remove_old(self) -> None:
        """Remove the version before, and what was fetched, beside whoever loads the new one: a disk may take a second
        for each GiB, and hold up other changes meanwhile."""
        paths, self._old = [*self._old, self.spool], []

        def remove() -> None:
            for path in paths:
                shutil.rmtree(path, ignore_errors=True)

        self._removal = started(remove, name="ckptstore-remove")
        if self._removal is None:
            remove()

    def settle(self) -> None:
        """Wait until all is removed."""
        if self._removal is not None:
            self._removal.join()
            self._removal = None

    def _replace(self, journal: Mapping[str, Any], links: Sequence[Spooled], *, boot: str) -> State:
        """Replace one file after another, as the journal says; begun or not. `boot` is that of the state."""
        local = State.decode(journal["local"])
        work = plan_work(self.path, local, links, index=Index(journal["old_files"], {}))
        work.weight_map, work.total_bytes = journal["weight_map"], journal["total_bytes"]
        with self._full_disk(work.largest_bytes):
            (self.path / INDEX_NAME).unlink(missing_ok=True)
            for name, (new_name, _, _) in work.rewritten.items():
                if not (self.path / new_name).exists():
                    temporary = self.aside / "file.new"
                    work.build(name, temporary)
                    os.rename(temporary, self.path / new_name)
                (self.path / name).unlink()
            state = self._finish(self.path, work, boot, local)
            self._journal.unlink()
        return state

    def _finish(self, directory: Path, work: Work, boot: str, local: State | None) -> State:
        """Write the state and the index, in this order: without its index the directory is of no version."""
        version = work.target.version
        index = Index(work.weight_map, full_metadata(version, size_bytes=work.total_bytes))
        names = sorted({*work.weight_map.values()})
        checks = {name: _check_of(directory / name, has_header=True) for name in names}
        for name in work.config_files:  # one that came with an earlier version is what it was then
            checks[name] = local.checks[name] if local else _check_of(directory / name, has_header=False)
        checks[INDEX_NAME] = sha256_of(index.encode())
        state = State(
            version=version,
            identity=work.target.identity,
            metadata=work.target.metadata,
            digests=work.digests,
            files=dict.fromkeys([*names, *work.config_files], ()),
            config_files=work.config_files,
            checks=checks,
            boot="",
        )
        state = self._write_state(directory, state, boot)
        write_bytes(directory / INDEX_NAME, index.encode())
        return state

    def _write_state(self, directory: Path, state: State, boot: str) -> State:
        files = {name: _stamp(directory / name) for name in state.files}
        state = replace(state, files=files, boot=boot)
        write_json(directory / STATE_NAME, state.encode())
        return state


def _check_of(path: Path, *, has_header: bool) -> str:
    """Return the SHA-256 of the header of a file of tensors, or of all of another file. Raises CheckpointDamaged,
    FileNotFoundError."""
    with path.open("rb") as file:
        if not has_header:
            return hashlib.file_digest(file, "sha256").hexdigest()
        start = file.read(8)
        return sha256_of(start + file.read(header_bytes(start, path.name) - 8))


def _stamp(path: Path) -> list[int]:
    try:
        status = path.stat()
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns]


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
