"""Check that a file has its end: by its own format, without reading its tensors or running anything in it."""

from __future__ import annotations

import json
import pickletools
import struct
import zipfile
from pathlib import Path

ZIP_NAMES = (".pt", ".pth", ".ckpt", ".bin")
"""Names of what torch.save writes: a zip file, whose directory is its end."""
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


def torn(path: Path) -> str | None:
    """Return why a file is not whole, None for one that is, or whose format does not tell. Raises OSError."""
    if path.suffix in ZIP_NAMES:
        with path.open("rb") as file:
            begins = file.read(4)
        if not begins:
            return "is empty"
        if b"PK\x03\x04".startswith(begins) and not zipfile.is_zipfile(path):
            return "has no end: a zip file without its directory"
    elif path.suffix == ".safetensors":
        return _torn_safetensors(path)
    return None


def _torn_safetensors(path: Path) -> str | None:
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
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return "has a header that cannot be read"
    size_bytes, wanted_bytes = path.stat().st_size, 8 + header_bytes + max(ends, default=0)
    return None if size_bytes == wanted_bytes else f"has {size_bytes:,} of {wanted_bytes:,} bytes"


def number_in(path: Path, key: str) -> int | None:
    """Return the integer under a key of the dict that torch.save wrote; None where there is none. The pickle is not
    run."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if name is None:
                return None
            with archive.open(name) as pickled:
                return _number_after(pickled.read(), key)
    except (OSError, ValueError, zipfile.BadZipFile):
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
