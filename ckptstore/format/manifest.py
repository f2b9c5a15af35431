"""The manifest, the list of everything in one checkpoint. Pure values, encoded as JSON (format-v1, "Manifest")."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ckptstore.errors import CheckpointDamaged, InvalidName
from ckptstore.format.digest import Digest
from ckptstore.format.encoding import (
    FORMAT_VERSION,
    as_list,
    as_number,
    as_object,
    as_text,
    check_seconds,
    dump_json,
    load_object,
    shortened,
)
from ckptstore.format.entry import Thinning, check_metrics
from ckptstore.format.layout import MANIFEST_NAME, MAX_STEP, Attempt, check_collisions, check_name
from ckptstore.format.timings import Timings

if TYPE_CHECKING:
    from ckptstore.format.provenance import Provenance

Kind = Literal["directory", "state"]


class Receipt(NamedTuple):
    """The proof that one file is stored."""

    name: str
    """The stored name, relative to the checkpoint."""
    size_bytes: int
    digest: Digest | None
    """The digest; None for a file that was linked and not read, so that only its size can be checked."""
    rank: int
    """The rank that wrote it."""
    original_name: str | None = None
    """The name on that rank, None if that is `name`."""
    attempt: str | None = None
    """The directory of another checkpoint of the store in which it lies, None if it lies in its own."""

    def to_json(self) -> dict[str, Any]:
        """Return the receipt as an entry of the manifest."""
        name, size_bytes, digest, rank, original_name, attempt = self
        text = None if digest is None else str(digest)
        entry: dict[str, Any] = {"digest": text, "name": name, "rank": rank, "size_bytes": size_bytes}
        if original_name is not None:
            entry["original_name"] = original_name
        if attempt is not None:
            entry["attempt"] = attempt
        return entry

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> Receipt:
        """Return the receipt of an entry; raise KeyError, TypeError or ValueError if it is not one, and
        UnsupportedVersion for a digest that this version does not know."""
        size_bytes, rank, text = as_number(entry["size_bytes"]), as_number(entry["rank"]), entry["digest"]
        original, attempt = entry.get("original_name"), entry.get("attempt")
        if original is not None:
            check_name(original)
        digest = None if text is None else Digest.parse(text)
        if attempt is not None and Attempt.parse(attempt) is None:
            raise ValueError("an attempt is not the name of a directory")
        return Receipt(check_name(entry["name"]), size_bytes, digest, rank, original, attempt)


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint. Immutable; records have the SHA-256 of its bytes."""

    store_id: str
    step: int
    epoch: int
    attempt: str
    """The name of the directory it was written to. A copy keeps the name of its original."""
    kind: Kind
    world_size: int
    created_at: float
    """Seconds since the epoch by the leader's clock; for people, never for decisions."""
    files: tuple[Receipt, ...]
    """The receipts, sorted by name."""
    directories: tuple[str, ...] = ()
    """Directories without a file in them."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    thinned: Thinning | None = None
    """The facts on what was dropped from the checkpoint after its save; None if it is whole."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that this version does not know, and `timings` and `provenance`, which it need not understand; kept as
    they are."""

    @cached_property
    def timings(self) -> Timings | None:
        """The timings of the save; None if the manifest has none, or none that this version can read."""
        return Timings.from_json(self.extra.get("timings"))

    @cached_property
    def provenance(self) -> Provenance | None:
        """The program that saved it; None if the manifest does not say, or not in a way that this version can read."""
        from ckptstore.format.provenance import Provenance

        return Provenance.from_json(self.extra.get("provenance"))

    @cached_property
    def size_bytes(self) -> int:
        """The bytes of all files, without the manifest."""
        return sum(receipt.size_bytes for receipt in self.files)

    @cached_property
    def by_name(self) -> Mapping[str, Receipt]:
        """The receipts by stored name."""
        return {receipt.name: receipt for receipt in self.files}

    @cached_property
    def references(self) -> frozenset[str]:
        """The directories of other checkpoints in which some of its files lie."""
        return frozenset(receipt.attempt for receipt in self.files if receipt.attempt is not None)

    def made_whole(self) -> Manifest:
        """Return the manifest of a copy that has all files in its own directory."""
        if not self.references:
            return self
        return replace(self, files=tuple(receipt._replace(attempt=None) for receipt in self.files))

    def encode(self) -> bytes:
        """Return the manifest as bytes; the same manifest always gives the same bytes."""
        return dump_json(
            {
                **self.extra,
                **({} if self.thinned is None else {"thinned": self.thinned.to_json()}),
                "version": FORMAT_VERSION,
                "kind": self.kind,
                "store_id": self.store_id,
                "step": self.step,
                "epoch": self.epoch,
                "attempt": self.attempt,
                "world_size": self.world_size,
                "created_at": self.created_at,
                "metrics": dict(self.metrics),
                "metadata": dict(self.metadata),
                "directories": list(self.directories),
            },
            what="manifest",
            plain={"files": [receipt.to_json() for receipt in self.files]},
        )

    @staticmethod
    def decode(data: bytes, *, file: str = MANIFEST_NAME) -> Manifest:
        """Read a manifest, and check every name and value in it.

        Raises CheckpointDamaged when it is torn or not a manifest, InvalidName when a name is hostile,
        UnsupportedVersion when it is from a newer major version.
        """
        value = load_object(data, file=file)
        try:
            files = tuple(sorted_receipts(Receipt.from_json(entry) for entry in as_list(value.pop("files"))))
            directories = tuple(check_name(name) for name in as_list(value.pop("directories")))
            check_collisions([*(receipt.name for receipt in files), *directories])
            known: dict[str, Any] = {name: as_text(value.pop(name)) for name in ("kind", "store_id", "attempt")}
            known |= {name: as_object(value.pop(name)) for name in ("metrics", "metadata")}
            known |= {name: as_number(value.pop(name), low) for name, low in (("epoch", 0), ("world_size", 1))}
            known |= {"step": as_number(value.pop("step"), 0, MAX_STEP + 1), "created_at": value.pop("created_at")}
            check_seconds(known["created_at"])
            if known["kind"] not in ("directory", "state"):
                raise ValueError(f"unknown kind {known['kind']!r}")
            check_metrics(known["metrics"])
            thinned = None if value.get("thinned") is None else Thinning.from_json(value.pop("thinned"))
        except InvalidName as error:
            raise error.at(file=file) from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointDamaged(f"{file} is not a manifest: {shortened(repr(error))}", file=file) from None
        value.pop("version")
        value.pop("thinned", None)
        return Manifest(**known, files=files, directories=directories, thinned=thinned, extra=value)


def sorted_receipts(receipts: Iterable[Receipt]) -> list[Receipt]:
    """Return the receipts sorted by name, as a manifest has them."""
    return sorted(receipts, key=attrgetter("name"))


def sha256_of(data: bytes) -> str:
    """Return the SHA-256, hexadecimal, as records have it of a manifest and of the record before."""
    return hashlib.sha256(data).hexdigest()
