"""Calls for disks that `os` lacks, checks of directories, and the translation of errors to those of `ckptstore.errors`.

A Linux call that is missing on another system, or refused by a file system, is either reported as False, or skipped if
it is only a hint. Calls into the C library release the interpreter lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import stat
import struct
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ckptstore.errors import AccessDenied, FileMissing, InvalidInput, StorageError, StorageFull, StorageUnavailable
from ckptstore.storage.base import Shortage, Unsupported

_libc: Any = ctypes.CDLL(None, use_errno=True)

_MAX_VIEWS = 1024
"""The most buffers that one call takes (IOV_MAX)."""
_COPY_BYTES = 1 << 20
_WRITE_BYTES = 1 << 20
"""The most that one call writes to the page cache. For more the kernel takes larger pages, and those of 2 MiB and more
are up to ten times as slow where the host of a virtual machine has taken them back. For less it takes more calls."""
_FLAGS = struct.Struct("i")
_GET_FLAGS = 2 << 30 | struct.calcsize("l") << 16 | ord("f") << 8 | 1
_SET_FLAGS = 1 << 30 | struct.calcsize("l") << 16 | ord("f") << 8 | 2
"""The requests of ioctl_iflags(2); the numbers name a long, but an int is exchanged."""
_TOP_DIRECTORY = 0x00020000
_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_SYNC_FILE_RANGE_WRITE = 2
_FICLONE = 0x40049409
REFUSED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY, errno.EXDEV, errno.EPERM})
_SYNCFS_REPORTS_SINCE = (5, 8)
_PLAIN_FILE_SYSTEMS = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994, 0x2FC12FC1})
"""The magic numbers of ext2 to ext4, XFS, Btrfs, F2FS, tmpfs and ZFS. Others, FUSE and those on a network, may be
durable only after an fsync of each file."""
_DIRECT_FILE_SYSTEMS = frozenset({0xEF53, 0x58465342})
"""The magic numbers of ext2 to ext4 and XFS. Others copy all the same, or send each direct write to a server before
they return."""
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIO_AT = 152

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_MANY_OPEN = "Raise the limit of open files (ulimit -n)"
_HINTS = {
    errno.EMFILE: _MANY_OPEN,
    errno.ENFILE: _MANY_OPEN,
    errno.EFBIG: "Raise the limit of a file's size (ulimit -f), or take a file system that holds larger ones",
}
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})
DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_PASSING = frozenset(
    {errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.EBUSY, errno.ENETDOWN, errno.ENETUNREACH}
    | {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOLCK}
    | {getattr(errno, "EREMOTEIO", errno.ESTALE)}  # Linux alone has it
)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library that returns 0 or sets errno. Raises OSError."""
    function = getattr(_libc, name, None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while function(*arguments) != 0:
        code = ctypes.get_errno()
        # A signal that the trainer handles has come first: nothing was done yet.
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], flags: int) -> Iterator[int]:
    """Yield the descriptor of a file, which is open while the context lasts. Raises OSError."""
    # A child of the trainer, such as a data loader's worker, would keep the blocks of a deleted file until it ends.
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_at(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
    """Write all bytes of the views, one after another, from `offset` on, to the page cache. Raises OSError."""
    for pending in _shared_out(views, _WRITE_BYTES):
        offset = write_whole(descriptor, pending, offset)


def write_whole(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
    """Write all bytes of the views in as few calls as can be, and return the offset behind them. Raises OSError."""
    for first in range(0, len(views), _MAX_VIEWS):
        pending = views[first : first + _MAX_VIEWS]
        while pending:
            count = os.pwritev(descriptor, pending, offset)
            offset += count
            pending = after(pending, count)
    return offset


def _shared_out(views: Sequence[memoryview], most_bytes: int) -> Iterator[Sequence[memoryview]]:
    """Yield the views one after another, in groups of at most so many bytes."""
    if sum(map(len, views)) <= most_bytes:
        yield views
        return
    found, found_bytes = list[memoryview](), 0
    for view in views:
        start = 0
        while start < len(view):
            piece = view[start : start + most_bytes - found_bytes]
            found.append(piece)
            found_bytes, start = found_bytes + len(piece), start + len(piece)
            if found_bytes == most_bytes:
                yield found
                found, found_bytes = [], 0
    if found:
        yield found


def read_at(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
    """Fill the views from `offset` on, and return the number of bytes read before the file ended. Raises OSError."""
    start = offset
    for first in range(0, len(views), _MAX_VIEWS):
        pending = views[first : first + _MAX_VIEWS]
        while pending:
            # Views without bytes also give 0, and are not the end of the file.
            count = os.preadv(descriptor, pending, offset)
            if count == 0 and any(pending):
                return offset - start
            offset += count
            pending = after(pending, count)
    return offset - start


def forget_pages(descriptor: int) -> None:
    """Drop the cached pages of a file, so that it is read from its disk or server again. Best effort: pages that are
    not written back yet stay."""
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def after(views: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """Return the views behind their first `count` bytes: a call may move fewer bytes than requested."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return ()


def allocate(descriptor: int, size_bytes: int) -> None:
    """Reserve the room for a file, if the file system can: it is written faster, and a full disk is found first.

    Raises OSError (ENOSPC).
    """
    # Not by posix_fallocate, which writes zeros where the file system cannot.
    try:
        _call("fallocate", descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes))
    except OSError as error:
        if error.errno not in REFUSED:
            raise


def spread_directories(path: str) -> None:
    """Spread the directories that are created in this one from now on over the disk, each with all files below it.

    A hint by the attribute T of chattr(1): never raises.
    """
    # For a new file ext4 looks near its directory, and passes over every place there from which a file was deleted in
    # the last minutes, one by one: thousands of files beside thousands of just deleted ones take three times as long.
    with contextlib.suppress(OSError), opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        (flags,) = _FLAGS.unpack(fcntl.ioctl(descriptor, _GET_FLAGS, bytes(_FLAGS.size)))
        if not flags & _TOP_DIRECTORY:
            fcntl.ioctl(descriptor, _SET_FLAGS, _FLAGS.pack(flags | _TOP_DIRECTORY))


def start_writing_back(descriptor: int, offset: int, size_bytes: int) -> None:
    """Make the disk begin with these bytes now instead of at the fsync. A hint: never raises."""
    with contextlib.suppress(OSError):
        _call(
            "sync_file_range",
            descriptor,
            ctypes.c_int64(offset),
            ctypes.c_int64(size_bytes),
            ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
        )


def writes_directly(path: str) -> bool:
    """Return True if the file system of a path is known to write past the page cache when it is told to."""
    return _file_system_of(path) in _DIRECT_FILE_SYSTEMS


def direct_alignment(descriptor: int) -> tuple[int, int]:
    """Return the alignment that a direct write requires of addresses in memory and of offsets in the file, in bytes; 0
    where the system does not report it (Linux before 6.1)."""
    facts = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        _call("statx", descriptor, b"", _AT_EMPTY_PATH, ctypes.c_uint(_STATX_DIOALIGN), facts)
    except OSError:
        return 0, 0
    memory, offset = struct.unpack_from("=II", facts, _STATX_DIO_AT)
    return memory, offset


def flush(path: str) -> None:
    """Call fsync for a file. Raises OSError."""
    with opened(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


def flush_directory(path: str) -> None:
    """Call fsync for a directory, if the file system supports it; many in user space do not. Raises OSError."""
    try:
        flush(path)
    except OSError as error:
        if error.errno not in REFUSED:
            raise


@cache
def _syncfs_reports() -> bool:
    if platform.system() != "Linux" or not hasattr(_libc, "syncfs"):
        return False
    major, _, rest = platform.release().partition(".")
    minor = rest.partition(".")[0]
    return major.isdigit() and minor.isdigit() and (int(major), int(minor)) >= _SYNCFS_REPORTS_SINCE


def is_on_disk(path: str) -> bool:
    """Return True if the file system of a path, which need not exist yet, is a plain one of this machine."""
    return _file_system_of(path) in _PLAIN_FILE_SYSTEMS


def _file_system_of(path: str) -> int:
    """Return the magic number of the file system of a path, which need not exist yet (statfs(2)); 0 if unknown."""
    facts = ctypes.create_string_buffer(256)
    try:
        _call("statfs", os.fsencode(_existing(path)), facts)
    except OSError:
        return 0
    return ctypes.c_long.from_buffer(facts).value


def flush_filesystem(path: str) -> bool:
    """Flush everything on the file system of `path` in one call that reports errors, and return True.

    Return False, and do nothing, if that call would guarantee less than an fsync of each file. Raises OSError.
    """
    if not _syncfs_reports() or not is_on_disk(path):
        return False
    with opened(path, os.O_RDONLY) as descriptor:
        _call("syncfs", descriptor)
    return True


def link_new(temporary: str, path: str) -> bool:
    """Give a temporary file its name unless that is taken, atomically; return True if it was free.

    Raises OSError, with EOPNOTSUPP where the file system offers no way.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        # On a network file system the reply may have been lost and the request repeated: then the file is ours.
        return os.stat(temporary).st_nlink == 2
    except OSError as error:
        if error.errno not in REFUSED | {errno.EMLINK}:
            raise
        return _rename_new(temporary, path)
    return True


def _rename_new(temporary: str, path: str) -> bool:
    try:
        _call("renameat2", _AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        raise OSError(errno.EOPNOTSUPP, "neither hard links nor renames without replacement") from error
    return True


def exchange(path: os.PathLike[str], other: os.PathLike[str]) -> None:
    """Give two directories each other's names, atomically. Raises OSError where the file system cannot."""
    _call("renameat2", _AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)


def clone(source: int, target: int) -> bool:
    """Let an empty file share the blocks of another one (a reflink); return False if that is not possible."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in _FULL:
            raise
        return False
    return True


def copy_contents(source: int, target: int, size_bytes: int) -> None:
    """Copy the first bytes of a file into an empty one, inside the kernel if possible.

    Raises OSError, EIO if the file has fewer.
    """
    done = 0
    while done < size_bytes:
        try:
            count = os.copy_file_range(source, target, size_bytes - done, done, done)
        except (OSError, AttributeError) as error:
            if isinstance(error, OSError) and error.errno not in REFUSED:
                raise
            count = 0
        if count == 0:  # refused, at the end, or on a file system that returns 0 instead of refusing
            data = os.pread(source, min(size_bytes - done, _COPY_BYTES), done)
            write_at(target, [memoryview(data)], done)
            count = len(data)
        if count == 0:
            raise OSError(errno.EIO, "the file became shorter while it was copied")
        done += count


def _existing(path: str) -> str:
    """Return the path if it is a directory, else the lowest existing directory above it."""
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def free_bytes(directory: str) -> int:
    """Return the bytes that can be written to the file system of a directory, which need not exist yet. Some that are
    mounted by FUSE report no size at all, and count as endless. Raises OSError."""
    # Not f_bfree, which counts the blocks that only root may take.
    facts = os.statvfs(_existing(directory))
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else sys.maxsize


def check_replaceable(path: Path, *, may_be_current: bool = False) -> None:
    """Raise InvalidInput for a path at which a rename cannot put another directory, and for the current directory, in
    which this process and the shell around it would be lost, unless it `may_be_current`."""
    kinds = {
        "a symbolic link": path.is_symlink(),
        "a mount": os.path.ismount(path),
        "the current directory": not may_be_current and path.exists() and os.path.samefile(path, os.curdir),
    }
    for kind, is_so in kinds.items():
        if is_so:
            raise InvalidInput(
                f"{path} is {kind}, which cannot be exchanged for another directory",
                hint="Give a directory inside of it",
            )


def make_private(path: Path) -> str:
    """Create the directory and its parents if absent. Return the reason why it is not safe to use, "" if it is.

    It is safe if it is a directory and no link, belongs to this user, and lets nobody else in. So nobody else can have
    put anything into it. Raises OSError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except FileExistsError:
        """An existing one is checked below."""
    return privacy_fault(path)


def privacy_fault(path: Path) -> str:
    """Return the reason why a directory is not safe to use, "" if it is; see `make_private`. Raises OSError."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "is no directory, or a symbolic link"
    # Whoever owns the directory can replace what is in it, whatever its mode says.
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not {os.geteuid()}"
    if status.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(status.st_mode):o} and lets other users in"
    return ""


def translate(error: OSError, *, what: str, file: str, directory: str, needed_bytes: int | None = None) -> StorageError:
    """Translate an error of the system to one of ckptstore; `what` names the failed operation, with the path.

    For a full disk the message has the needed bytes and those that are free in `directory`.
    """
    reason = f"{what} failed, {error.strerror or error}"
    code = error.errno
    if code in _FULL:
        if needed_bytes is not None:
            reason += f": {needed_bytes:,} bytes are needed"
        with contextlib.suppress(OSError):
            reason += f", {free_bytes(directory):,} bytes are free"
            facts = os.statvfs(_existing(directory))
            if facts.f_files > 0 and facts.f_favail == 0:  # those that make inodes as they need them report none at all
                reason += ", but no inodes: the file system takes no more files"
                return StorageFull(reason, file=file, hint="Remove files, many small ones first")
        return StorageFull(reason, file=file, hint="Make room, or have retention keep less")
    if code in _MISSING:
        return FileMissing(reason, file=file)
    if code in DENIED:
        return AccessDenied(reason, file=file, hint="Check owner, permissions and mount options")
    if code in (errno.EOPNOTSUPP, errno.ENOTSUP):
        return Unsupported(reason, file=file)
    if code in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return Shortage(reason, file=file, hint=_HINTS.get(code))
    cls = StorageUnavailable if code in _PASSING else StorageError
    return cls(reason, file=file, hint=_HINTS.get(code or 0))


@contextlib.contextmanager
def translated(doing: str, path: Path) -> Iterator[None]:
    """Translate errors of the system to those of ckptstore, for a file or a directory of a path."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        file = error.filename if isinstance(error.filename, str) else str(path)
        raise translate(error, what=f"{doing} {file}", file=Path(file).name, directory=str(path)) from error
