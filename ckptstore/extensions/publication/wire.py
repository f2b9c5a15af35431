"""The format of published versions: names and indexes, and which versions lead to another. Pure.

A version is a directory of safetensors with an index, as Hugging Face libraries read it. The index of a delta says on
which version it builds, and in the files of a delta a vector of bytes stands for each tensor that changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import CheckpointDamaged, InvalidName, UnsupportedVersion
from ckptstore.extensions.exchange.safetensors import BASE_ATTEMPT, METADATA, SUFFIX
from ckptstore.format.encoding import parse_json
from ckptstore.format.layout import check_name

STRONG = "xxh3-128"
"""The digest of tensors by which two contents count as equal."""
WEAK = "adler32"
"""The digest that more readers know, and that finds less."""
CHECKSUMS = {"strong": STRONG, "adler32": WEAK}
"""The digests that a publisher can choose."""
XOR = "xor"
OVERWRITE = "overwrite"
COMPRESSION = "zstd"

_DIRECTORY = re.compile(r"weight_v(\d{6,10})")


def directory_of(version: int) -> str:
    """Return the name of the directory in which other readers look for a version."""
    return f"weight_v{version:06d}"


def version_of(directory: str) -> int | None:
    """Return the version of a directory, None if it is not one of a version."""
    match = _DIRECTORY.fullmatch(directory)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a version."""

    files: Mapping[str, str]
    """Maps the name of each tensor of the version, or each that changed, to its file."""
    metadata: Mapping[str, Any]

    @property
    def is_delta(self) -> bool:
        """True if it has changes of another version."""
        return "delta_encoding" in self.metadata

    @property
    def encoding(self) -> str:
        """The encoding of a delta. Raises UnsupportedVersion for one that is not known."""
        encoding, compression = str(self.metadata["delta_encoding"]), self.metadata.get("compression_format")
        if encoding not in (XOR, OVERWRITE) or compression != COMPRESSION:
            raise UnsupportedVersion(f"A delta of the encoding {encoding} and the compression {compression}")
        return encoding

    @property
    def checksum(self) -> str | None:
        """The kind of the digests of tensors; None where a full version has none."""
        found = self.metadata.get("checksum_format")
        if found is None and self.is_delta:
            raise UnsupportedVersion("A delta without digests")
        return None if found is None else str(found)

    @property
    def base_version(self) -> int:
        """The version on which a delta builds. Raises CheckpointDamaged where it says none."""
        try:
            return int(str(self.metadata["base_version"]).removeprefix("weight_v"))
        except (KeyError, ValueError):
            raise CheckpointDamaged("The index of a delta says on no version that it builds") from None

    def encode(self) -> bytes:
        """Return it as a file."""
        return json.dumps({"metadata": dict(self.metadata), "weight_map": dict(sorted(self.files.items()))}).encode()

    @staticmethod
    def decode(data: bytes, file: str) -> Index:
        """Parse it. Raises CheckpointDamaged."""
        try:
            found = parse_json(data)
            metadata, files = found.get("metadata"), found["weight_map"]
            metadata = {} if metadata is None else metadata
            if not isinstance(metadata, dict):
                raise ValueError("metadata of a wrong kind")
            for name in set(files.values()):
                if "/" in check_name(name) or not name.endswith(SUFFIX):
                    raise ValueError(f"{name} is no name of a file of tensors")
        except (ValueError, TypeError, KeyError, AttributeError, InvalidName) as error:
            raise CheckpointDamaged(f"{file} is not an index: {error}", file=file) from None
        return Index(files, metadata)


def full_metadata(version: int, *, size_bytes: int) -> dict[str, Any]:
    """Return the metadata that the index of a full version has besides digests and attempt."""
    return {"total_size": size_bytes, "version": f"{version:06d}"}


def delta_metadata(version: int, base_version: int, base_attempt: str) -> dict[str, Any]:
    """Return the metadata that the index of a delta has besides digests and attempt."""
    return {
        "version": f"{version:06d}",
        "base_version": f"{base_version:06d}",
        "delta_encoding": XOR,
        "compression_format": COMPRESSION,
        BASE_ATTEMPT: base_attempt,
    }


def check_tensor_names(names: Sequence[str]) -> list[str]:
    """Return the names that the format, or Hugging Face libraries, could not hold."""
    return [name for name in names if not name or name in (METADATA, "format") or not name.isprintable()]
