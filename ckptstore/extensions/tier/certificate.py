"""The certificate of a fast checkpoint: the proof that all ranks stored their files, and on which nodes. Pure.

Every node that holds files of the checkpoint has the same certificate beside them. The first one that is written is the
commit of the fast checkpoint, so any one of them is enough. See format-v1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckptstore.errors import CheckpointDamaged, CkptstoreError, UnsupportedVersion
from ckptstore.format.encoding import FORMAT_VERSION, as_text, dump_json, is_sha256, load_object, shortened
from ckptstore.format.layout import MAX_NUMBER, Attempt
from ckptstore.format.manifest import Manifest, Receipt, sha256_of
from ckptstore.format.order import SaveOrder
from ckptstore.format.ranges import Numbers

CERTIFICATE_NAME = "fast.json"
MAX_RANKS = 1 << 18
"""The most ranks of a fast checkpoint, so that a false certificate costs no more memory than a true one."""

MAX_CERTIFICATE_BYTES = 1 << 30
"""The largest certificate that a node reads from another one, whatever size that one states."""

_NODE = re.compile(r"[\w.:@+-]{1,255}")


@dataclass(frozen=True)
class Certificate:
    """The contents of `fast.json`. Immutable; `decode` has checked that it does not contradict itself."""

    manifest_data: bytes
    """The exact bytes of the manifest, as the store will have them."""
    save_number: int
    """The number of the save within its epoch, from 1."""
    claim_number: int
    """The number of the record that claimed its epoch."""
    claim_sha256: str
    """The SHA-256 of that record's exact bytes: copies of a store share its id, yet their epochs are other jobs."""
    holders: Mapping[str, Numbers]
    """The ranks of the save whose files a node holds, by its name. Each rank has one node or two."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that this version does not know; kept."""
    stored: bytes | None = field(default=None, repr=False, compare=False)
    """The exact bytes that it was read from; None if it was not read."""

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the checkpoint."""
        return Manifest.decode(self.manifest_data, file=CERTIFICATE_NAME)

    @cached_property
    def attempt(self) -> Attempt:
        """The attempt; its directory has the same name."""
        return Attempt.of(self.manifest.attempt)

    @property
    def order(self) -> SaveOrder:
        """The place of the save among all saves of the store."""
        return SaveOrder(self.manifest.epoch, self.save_number)

    @cached_property
    def by_rank(self) -> Mapping[int, tuple[Receipt, ...]]:
        """The receipts of each rank that has files."""
        found: dict[int, list[Receipt]] = {}
        for receipt in self.manifest.files:
            found.setdefault(receipt.rank, []).append(receipt)
        return {rank: tuple(files) for rank, files in found.items()}

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the exact bytes of `fast.json`.

        Two certificates of one attempt differ only if one of them is false.
        """
        return sha256_of(self.encode())

    def ranks_in(self, sizes: Mapping[str, int]) -> frozenset[int]:
        """Return the ranks all of whose files are in `sizes`, by name, with the right size."""
        return frozenset(
            rank
            for rank, files in self.by_rank.items()
            if all(sizes.get(receipt.name) == receipt.size_bytes for receipt in files)
        )

    def encode(self) -> bytes:
        """Return the certificate as bytes: those that it was read from, if it was read.

        Raises CheckpointDamaged when it contradicts itself, so that no certificate is written that cannot be read.
        """
        if self.stored is not None:
            return self.stored
        manifest = self.manifest
        _check(self, manifest)
        inner = dump_json(
            {
                **self.extra,
                "version": FORMAT_VERSION,
                "store_id": manifest.store_id,
                "epoch": manifest.epoch,
                "save_number": self.save_number,
                "step": manifest.step,
                "attempt": manifest.attempt,
                "manifest_sha256": sha256_of(self.manifest_data),
                "claim": {"number": self.claim_number, "sha256": self.claim_sha256},
                "holders": {node: ranks.encode() for node, ranks in self.holders.items()},
            },
            what="certificate",
        )
        outer = {
            "version": FORMAT_VERSION,
            "certificate": inner.decode(),
            "sha256": sha256_of(inner),
            "manifest": self.manifest_data.decode(),
        }
        return dump_json(outer, what="certificate")

    @staticmethod
    def decode(data: bytes, *, file: str = CERTIFICATE_NAME) -> Certificate:
        """Read and check a certificate.

        Raises CheckpointDamaged when it is torn, was changed, contradicts itself or has a hostile name in it, and
        UnsupportedVersion when it is from a newer major version.
        """
        outer = load_object(data, file=file)
        try:
            text, manifest_data = as_text(outer["certificate"]).encode(), as_text(outer["manifest"]).encode()
            if sha256_of(text) != outer["sha256"]:
                raise ValueError("its digest is another one")
            value = load_object(text, file=file)
            value.pop("version")
            if value.pop("manifest_sha256") != sha256_of(manifest_data):
                raise ValueError("the manifest in it is another one")
            manifest = Manifest.decode(manifest_data, file=file)
            for name in ("store_id", "epoch", "step", "attempt"):
                found = value.pop(name)
                if type(found) is not type(getattr(manifest, name)) or found != getattr(manifest, name):
                    raise ValueError(f"{name} differs from that of the manifest in it")
            claim, holders = value.pop("claim"), value.pop("holders")
            certificate = Certificate(
                manifest_data=manifest_data,
                save_number=SaveOrder.of(manifest.epoch, value.pop("save_number")).save_number,
                claim_number=claim["number"],
                claim_sha256=as_text(claim["sha256"]),
                holders={node: Numbers.decode(ranks, limit=MAX_RANKS) for node, ranks in holders.items()},
                extra=value,
                stored=bytes(data),
            )
            _check(certificate, manifest)
        except UnsupportedVersion:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, CkptstoreError) as error:
            text_of = error.message if isinstance(error, CkptstoreError) else repr(error)
            raise CheckpointDamaged(f"{file} is not a certificate: {shortened(text_of)}", file=file) from None
        return certificate


def held_by(nodes: Mapping[str, Iterable[int]]) -> dict[str, Numbers]:
    """Return the holders as a certificate has them, from the ranks on each node."""
    return {node: Numbers(ranks) for node, ranks in nodes.items()}


def is_node_name(name: object) -> bool:
    """Return True if a certificate can have it as the name of a node."""
    return isinstance(name, str) and _NODE.fullmatch(name) is not None


def _check(certificate: Certificate, manifest: Manifest) -> None:
    """Raise CheckpointDamaged if the parts contradict each other."""
    attempt = Attempt.parse(manifest.attempt)
    number = certificate.claim_number
    ranks = Numbers() if manifest.world_size > MAX_RANKS else Numbers(range(manifest.world_size))
    num_held = sum(map(len, certificate.holders.values()))
    held = {rank for numbers in certificate.holders.values() for rank in numbers} if num_held <= 2 * len(ranks) else {}
    faults = {
        "its attempt is of another step or epoch": (
            attempt is None or (attempt.step, attempt.epoch) != (manifest.step, manifest.epoch)
        ),
        "its epoch or the number of its save is below 1": manifest.epoch < 1 or certificate.save_number < 1,
        "its claim is no record": type(number) is not int or not 1 <= number <= MAX_NUMBER,
        "the digest of its claim is no SHA-256": not is_sha256(certificate.claim_sha256),
        "the name of a node is none": not all(map(is_node_name, certificate.holders)),
        "the nodes do not hold the ranks, each once or twice": held != set(ranks) or not held,
        "a file is of a rank that there was not": any(receipt.rank not in ranks for receipt in manifest.files),
        "it has files of another checkpoint": bool(manifest.references),
        "a file has no digest": any(receipt.digest is None for receipt in manifest.files),
    }
    for fault, is_there in faults.items():
        if is_there:
            raise CheckpointDamaged(fault, file=CERTIFICATE_NAME)
