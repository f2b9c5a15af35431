"""The directory of the node cache: its paths, its safety, and the powers of its file system."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ckptstore.errors import CacheError, CkptstoreError, StorageFull
from ckptstore.runtime.file_locks import locks_work
from ckptstore.storage.disk import posix
from ckptstore.storage.disk.posix import make_private

logger = logging.getLogger("ckptstore")

_NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2"}
    | {"orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"}
)
_LOCAL_FUSE = frozenset({"fuseblk", "fuse.fuse-overlayfs", "fuse.ext4", "fuse.ntfs-3g", "fuse.overlayfs"})


@cache
def boot_id() -> str:
    """Return the id of this boot of the machine (random(4)), empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def copy_key(content: str) -> str:
    """Return the key of a copy of the content with that name: 64 hex digits.

    The key differs from boot to boot, so that no copy of an earlier boot is found.
    """
    # A copy is not forced to the disk: after a loss of power files may have their sizes and not their bytes.
    return hashlib.sha256(f"{content}\n{boot_id()}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CachePlace:
    """A checked cache directory."""

    root: Path
    locks_work: bool
    """True if flock keeps others out. If not, every process downloads for itself and nothing is ever evicted."""

    def copy(self, key: str) -> Path:
        """Return the path of the finished copy."""
        return self.root / key

    def lock(self, key: str) -> Path:
        """Return the path of the lock for the turn to download."""
        return self.root / "locks" / f"{key}.lock"

    def holder(self, key: str) -> Path:
        """Return the path of the file that names the process with the turn, for messages."""
        return self.root / "locks" / f"{key}.holder"

    def lease(self, name: str) -> Path:
        """Return the path of the file that readers of a copy lock."""
        return self.root / "leases" / f"{name}.lease"

    def private(self, name: str) -> Path:
        """Return the path of a private directory, which no reader uses."""
        return self.root / f".tmp-{name}"

    def private_lease(self, name: str) -> Path:
        """Return the path of the file that the owner of a private directory locks."""
        return self.root / "leases" / f"tmp-{name}"

    def free_bytes(self) -> int:
        """Return the bytes that can still be written. Raises CacheError."""
        with self.using():
            return posix.free_bytes(str(self.root))

    @contextmanager
    def using(self) -> Iterator[None]:
        """Raise errors of the system in this context as StorageFull or CacheError."""
        try:
            yield
        except CkptstoreError:
            raise
        except OSError as error:
            raise _translate(error, self.root) from error


_known: dict[Path, CachePlace] = {}
"""The opened places. No mutex guards it: a process that is forked meanwhile would find it locked for ever."""


def root_of(cache_dir: Path) -> Path:
    """Return the path of the cache directory as everybody uses it: absolute, and with no link above it."""
    return Path(os.path.realpath(cache_dir.parent)) / cache_dir.name


def open_place(cache_dir: Path) -> CachePlace:
    """Open the cache directory, created if absent, for this user alone.

    Raises CacheError when it is a symbolic link, belongs to another user, lets others in, or cannot be written. On a
    file system that other nodes may share, warns once per process and keeps the copies of each node apart.
    """
    given = root_of(cache_dir)
    try:
        is_new = not given.exists()
        _make_private(given)
        place = _known.get(given)
        kind = "" if place else filesystem_of(given)
        root = place.root if place else (given / f"node-{socket.gethostname()}" if is_network(kind) else given)
        for path in (root, root / "locks", root / "leases"):
            _make_private(path)
        if place is None or is_new:
            posix.spread_directories(str(root))
        if place is None:
            looked_at = CachePlace(root, locks_work(root / "locks" / "probe"))
            place = _known.setdefault(given, looked_at)
            if place is looked_at:
                _warn(place, kind)
        return place
    except CkptstoreError:
        raise
    except OSError as error:
        raise _translate(error, given) from error


_HINT = "Set CKPTSTORE_CACHE_DIR to a directory on a disk of this node that belongs to you alone"


_CONTENTS = re.compile(r"[0-9a-f]{64}|\.tmp-.+|locks|leases|node-.+")


def _make_private(path: Path) -> None:
    fault = make_private(path)
    if fault and _is_made_again(path):
        path.chmod(0o700)
        fault = make_private(path)
    if fault:
        raise CacheError(f"The node cache {path} {fault}", hint="chmod it to 700" if "mode" in fault else _HINT)


def _is_made_again(path: Path) -> bool:
    """Return True for a directory that a download may have made after somebody removed the cache: it is of this user,
    nobody else can have put anything into it, and it holds nothing but copies."""
    status = path.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return is_own and all(_CONTENTS.fullmatch(name) for name in os.listdir(path))


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the kind of file system that holds an absolute path, "" where it is unknown."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, facts = before.split(" "), after.split(" ")
        if len(fields) < 5 or not facts[0]:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if len(mount) >= best and path.is_relative_to(mount):  # a later mount on the same point hides the earlier
            best, kind = len(mount), facts[0]
    return kind


def is_network(kind: str) -> bool:
    """Return True if other nodes may see a file system of that kind."""
    return kind in _NETWORK or (kind.startswith("fuse") and kind not in _LOCAL_FUSE)


def _warn(place: CachePlace, kind: str) -> None:
    if is_network(kind):
        logger.warning("The node cache %s lies on %s. %s", place.root, kind, _HINT)
    if not place.locks_work:
        logger.warning(
            "flock does not work in the node cache %s: every process downloads for itself, and nothing is removed. %s",
            place.root,
            _HINT,
        )


def _translate(error: OSError, root: Path) -> CkptstoreError:
    full = posix.translate(error, what=f"Using the node cache {root}", file=str(root), directory=str(root))
    return full if isinstance(full, StorageFull) else CacheError(f"The node cache {root} fails: {error}", hint=_HINT)
