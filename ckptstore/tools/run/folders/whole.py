"""Check that a file has its end: by its own format, without reading its tensors or running anything in it.

A file that its trainer has torn, or that a disk has damaged, can hold anything. What the readers of its format make of
that is nobody's list: whatever they raise says that the file is not what it should be, and of nothing else.
"""

from __future__ import annotations

import ast
import hashlib
import math
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable
from operator import index
from pathlib import Path
from typing import Any, TypeVar

from ckptstore.format.encoding import parse_json, shortened
from ckptstore.format.layout import known_step
from ckptstore.transfer.sources import refuse_shortage

T = TypeVar("T")

ZIP_NAMES = (".pt", ".pth", ".ckpt", ".bin", ".zip", ".keras", ".npz", ".tar")
"""Names of what torch.save and others write: a zip file, whose directory is its end."""
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_MAX_JSON_BYTES = 1 << 20
_MAX_PICKLE_BYTES = 64 << 20


def ends(path: Path) -> tuple[str | None, bool]:
    """Return why a file is not whole, None if that is not known; and True if its format shows that it is whole."""
    return _whatever_it_holds(path, _ends, lambda why: (f"cannot be read: {why}", False))


def _whatever_it_holds(path: Path, read: Callable[[Path], T], failed: Callable[[str], T]) -> T:
    """Return what `read` makes of a file, or else what `failed` makes of the reason why it cannot. Raises StorageError
    where the system lacks something, which says nothing of the file."""
    try:
        return read(path)
    except OSError as error:
        refuse_shortage(error, path)
        return failed(error.strerror or str(error))
    except Exception as error:
        return failed(shortened(f"{type(error).__name__}: {error}"))


def json_in(text: str | bytes | None) -> Any:
    """Return what a JSON text says; None for one that says nothing, is torn, or nests deeper than it can be read."""
    try:
        return parse_json(text or "null")
    except ValueError:
        return None


def _ends(path: Path) -> tuple[str | None, bool]:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(64)
        if path.suffix in ZIP_NAMES:
            if not head:
                return "is empty", False
            if b"PK\x03\x04".startswith(head[:4]):
                return _shown(_torn_zip(path))
        elif path.suffix == ".safetensors":
            return _shown(_torn_safetensors(path, size_bytes))
        elif head[:6] == b"\x93NUMPY":
            file.seek(0)
            return _ends_array(file.read(1 << 16), size_bytes)
        elif head[:8] == b"\x89HDF\r\n\x1a\n":
            return _shown(_torn_hdf5(head, size_bytes))
        elif path.suffix == ".json" and head[:1] in (b"{", b"[") and size_bytes <= _MAX_JSON_BYTES:
            return None, json_in(path.read_bytes()) is not None
    return None, False


def _shown(why: str | None) -> tuple[str | None, bool]:
    return why, why is None


def _torn_zip(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            last = max((entry.header_offset + entry.compress_size for entry in archive.infolist()), default=0)
            return None if last <= archive.start_dir else "has no end: a zip file that lacks bytes"
    except zipfile.BadZipFile:
        return "has no end: a zip file without its directory"


def _torn_safetensors(path: Path, size_bytes: int) -> str | None:
    with path.open("rb") as file:
        begins = file.read(8)
        if len(begins) < 8:
            return "has no header"
        header_bytes = struct.unpack("<Q", begins)[0]
        if header_bytes > _MAX_HEADER_BYTES:
            return "has a header that cannot be one"
        header = file.read(header_bytes)
    entries = json_in(header)
    if not isinstance(entries, dict):
        return "has a header that cannot be read"
    last = [index(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"]
    return _of_wanted(size_bytes, 8 + header_bytes + max(last, default=0))


def _of_wanted(size_bytes: int, wanted_bytes: int) -> str | None:
    return None if size_bytes == wanted_bytes else f"has {size_bytes:,} of {wanted_bytes:,} bytes"


def _ends_array(head: bytes, size_bytes: int) -> tuple[str | None, bool]:
    """Check an array of numpy; see its format, version 1 to 3."""
    begins = 10 if head[6] == 1 else 12
    header_bytes = int.from_bytes(head[8:begins], "little")
    header = ast.literal_eval(head[begins : begins + header_bytes].decode())
    item = re.fullmatch(r"[<>|=]?([a-zA-Z])(\d+)", str(header["descr"]))
    if item is None:
        return None, False
    width = int(item[2]) * (4 if item[1] == "U" else 1)
    return _shown(_of_wanted(size_bytes, begins + header_bytes + width * math.prod(header["shape"])))


def _torn_hdf5(head: bytes, size_bytes: int) -> str | None:
    """Check the end of the file that its superblock names (HDF5 file format 3.0, "Superblock")."""
    if len(head) < 14:
        return "has a header that cannot be read"
    version = head[8]
    at, width = ({0: 24, 1: 28}[version], head[13]) if version < 2 else (12, head[9])
    if version >= 2 and head[11] & 1:
        return "is still open: its superblock says so"
    end = head[at + 2 * width : at + 3 * width]
    if width not in (2, 4, 8) or len(end) < width:
        return "has a header that cannot be read"
    wanted_bytes = int.from_bytes(end, "little")
    return None if size_bytes >= wanted_bytes > 0 else f"has {size_bytes:,} of {wanted_bytes:,} bytes"


def checksums(path: Path) -> str | None:
    """Return the same text for zip files with the same contents, by their directories; None where a file does not say
    it."""
    return _whatever_it_holds(path, _checksums, lambda _: None)


def _checksums(path: Path) -> str | None:
    with zipfile.ZipFile(path) as archive:
        entries = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
    if not entries or any(size_bytes and not checksum for _, size_bytes, checksum in entries):
        return None  # torch can be told to leave them out
    return hashlib.sha256(repr(entries).encode(errors="surrogatepass")).hexdigest()


def number_in(path: Path, key: str) -> int | None:
    """Return the integer under a key of the dict that torch.save wrote, if it can be a step; None where there is none.
    The pickle is not run."""
    return known_step(_whatever_it_holds(path, lambda it: _number_in(it, key), lambda _: None))


def _number_in(path: Path, key: str) -> int | None:
    with zipfile.ZipFile(path) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if name is None or archive.getinfo(name).file_size > _MAX_PICKLE_BYTES:
            return None
        with archive.open(name) as pickled:
            return _number_after(pickled.read(), key)


def _number_after(pickled: bytes, key: str) -> int | None:
    is_next = False
    for code, argument, _ in pickletools.genops(pickled):
        if code.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            continue
        if is_next and isinstance(argument, int) and code.name.startswith(("BININT", "LONG", "INT")):
            return argument
        is_next = argument == key
    return None
