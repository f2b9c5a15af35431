"""Check that a file has its end: by its own format, without reading its tensors or running anything in it."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import pickletools
import re
import struct
import zipfile
from pathlib import Path

from ckptstore.transfer.sources import refuse_shortage

ZIP_NAMES = (".pt", ".pth", ".ckpt", ".bin", ".zip", ".keras", ".npz", ".tar")
"""Names of what torch.save and others write: a zip file, whose directory is its end."""
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_MAX_JSON_BYTES = 1 << 20
_MAX_PICKLE_BYTES = 64 << 20


def ends(path: Path) -> tuple[str | None, bool]:
    """Return why a file is not whole, None if that is not known; and True if its format shows that it is whole.

    Raises OSError.
    """
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
            return None, _is_json(path)
    return None, False


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True


def _shown(why: str | None) -> tuple[str | None, bool]:
    return why, why is None


def _torn_zip(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            last = max((entry.header_offset + entry.compress_size for entry in archive.infolist()), default=0)
            return None if last <= archive.start_dir else "has no end: a zip file that lacks bytes"
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
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
    try:
        entries = json.loads(header)
        last = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return "has a header that cannot be read"
    return _of_wanted(size_bytes, 8 + header_bytes + max(last, default=0))


def _of_wanted(size_bytes: int, wanted_bytes: int) -> str | None:
    return None if size_bytes == wanted_bytes else f"has {size_bytes:,} of {wanted_bytes:,} bytes"


def _ends_array(head: bytes, size_bytes: int) -> tuple[str | None, bool]:
    """Check an array of numpy; see its format, version 1 to 3."""
    try:
        begins = 10 if head[6] == 1 else 12
        header_bytes = int.from_bytes(head[8:begins], "little")
        header = ast.literal_eval(head[begins : begins + header_bytes].decode())
        item = re.fullmatch(r"[<>|=]?([a-zA-Z])(\d+)", str(header["descr"]))
        if item is None:
            return None, False
        width = int(item[2]) * (4 if item[1] == "U" else 1)
        return _shown(_of_wanted(size_bytes, begins + header_bytes + width * math.prod(header["shape"])))
    except (ValueError, SyntaxError, TypeError, KeyError, IndexError):
        return "has a header that cannot be read", False


def _torn_hdf5(head: bytes, size_bytes: int) -> str | None:
    """Check the end of the file that its superblock names (HDF5 file format 3.0, "Superblock")."""
    version = head[8]
    at, width = (40, head[13]) if version < 2 else (28, head[9])
    if version == 1:
        at += 4
    if version >= 2 and head[11] & 1:
        return "is still open: its superblock says so"
    if width != 8:
        return None
    wanted_bytes = int.from_bytes(head[at : at + 8], "little")
    return None if size_bytes >= wanted_bytes > 0 else f"has {size_bytes:,} of {wanted_bytes:,} bytes"


def checksums(path: Path) -> str | None:
    """Return the same text for zip files with the same contents, by their directories; None where a file does not say
    it."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
    except OSError as error:
        refuse_shortage(error, path)
        return None
    except (ValueError, zipfile.BadZipFile, NotImplementedError):
        return None
    if not entries or any(size_bytes and not checksum for _, size_bytes, checksum in entries):
        return None  # torch can be told to leave them out
    return hashlib.sha256(repr(entries).encode()).hexdigest()


def number_in(path: Path, key: str) -> int | None:
    """Return the integer under a key of the dict that torch.save wrote; None where there is none. The pickle is not
    run."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if name is None or archive.getinfo(name).file_size > _MAX_PICKLE_BYTES:
                return None
            with archive.open(name) as pickled:
                return _number_after(pickled.read(), key)
    except OSError as error:
        refuse_shortage(error, path)
        return None
    except (ValueError, zipfile.BadZipFile, NotImplementedError):
        return None


def _number_after(pickled: bytes, key: str) -> int | None:
    is_next = False
    for code, argument, _ in pickletools.genops(pickled):
        if code.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            continue
        if is_next and isinstance(argument, int) and code.name.startswith(("BININT", "LONG", "INT")):
            return argument
        is_next = argument == key
    return None
