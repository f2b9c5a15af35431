"""Find the checkpoints that a job can resume from: merge the findings of all nodes with the log. Pure.

The order of saves puts fast and committed checkpoints into one row. A fast one counts if its certificate belongs to
this history of this store, the log does not void it, and each of its files lies on a node of this job. A committed one
always counts; copies of its files on nodes save requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ckptstore.extensions.tier.certificate import Certificate
from ckptstore.format.changes import Claim, StoreState
from ckptstore.format.manifest import sha256_of
from ckptstore.format.order import SaveOrder, void_of
from ckptstore.format.record import Record


class CertificatePlace(NamedTuple):
    """The place of a certificate, with the digest and the size that it must have."""

    node: str
    attempt: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSighting:
    """The contents of the directory of one attempt on one node."""

    node: str
    attempt: str
    sha256: str = ""
    """The SHA-256 of its certificate; empty if it has none."""
    certificate_bytes: int = 0
    fault: str = ""
    """The reason why its certificate cannot be read; empty if it can, or if it has none."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The size of each file by name, without the certificate."""

    @property
    def place(self) -> CertificatePlace:
        """The place of its certificate, if it has one."""
        return CertificatePlace(self.node, self.attempt, self.sha256, self.certificate_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, for the leader."""
        return {**asdict(self), "sizes": dict(self.sizes)}

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> NodeSighting:
        """Return the sighting of which `to_json` made this on a rank of this job."""
        return NodeSighting(**told)


@dataclass(frozen=True, slots=True, kw_only=True)
class FastCandidate:
    """A checkpoint that a job may resume from."""

    attempt: str
    step: int
    order: SaveOrder
    number: int | None
    """The number of the record that committed it; None if there is none."""
    certificate: Certificate | None
    """None if no node of this job has one: then the store has the files."""
    holders: Mapping[int, tuple[str, ...]]
    """The names of the nodes that hold all files of a rank of the save, by rank. Ranks without files, or without such a
    node, are left out."""

    @property
    def is_durable(self) -> bool:
        """True if a record of the log names it."""
        return self.number is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A fast checkpoint that a job may not, or cannot, resume from."""

    attempt: str
    nodes: tuple[str, ...]
    reason: str
    is_void: bool = False
    """True if the log says that nobody ever may."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of `merge`."""

    candidates: tuple[FastCandidate, ...]
    """The candidates, newest first."""
    refused: tuple[Refused, ...]


def merge(
    sightings: Iterable[NodeSighting],
    certificates: Mapping[str, Certificate],
    newest: Record,
    committed: Sequence[Record],
    claims: Mapping[int, Record],
    *,
    store_id: str,
) -> Merged:
    """Merge the findings of the nodes with the log into one row of candidates.

    `certificates` has the certificates of the sightings by their SHA-256. `newest` is the newest record, read after the
    claim of the job that resumes; `committed` are the records of all checkpoints that are live or in the trash;
    `claims` are the records that claimed the epochs of the certificates, by number, as far as they exist.
    """
    seen = list(sightings)
    live = {record.entry.attempt: record for record in committed if record.number in newest.state.live}
    trashed = {record.entry.attempt: record for record in committed if record.number in newest.state.trash}
    candidates: list[FastCandidate] = []
    refused = [
        Refused(attempt=sighting.attempt, nodes=(sighting.node,), reason=sighting.fault)
        for sighting in seen
        if sighting.fault
    ]
    found: set[str] = set()
    for sha256 in sorted({sighting.sha256 for sighting in seen if sighting.sha256}):
        certificate = certificates[sha256]
        attempt = str(certificate.attempt)
        holders = _holders(certificate, sha256, seen)
        record = live.get(attempt)
        reason = foreign(certificate, claims, store_id=store_id) or contradicts(certificate, record)
        void = "" if record else void_reason(certificate.order, attempt, newest.state, trashed)
        lost = "" if record else _lost(certificate, holders)
        if why := reason or void or lost:
            nodes = tuple(sorted(sighting.node for sighting in seen if sighting.sha256 == sha256))
            refused.append(Refused(attempt=attempt, nodes=nodes, reason=why, is_void=not reason and bool(void)))
            continue
        found.add(attempt)
        candidates.append(
            FastCandidate(
                attempt=attempt,
                step=certificate.manifest.step,
                order=certificate.order,
                number=record.number if record else None,
                certificate=certificate,
                holders=holders,
            )
        )
    candidates += [
        FastCandidate(
            attempt=attempt,
            step=record.entry.step,
            order=record.entry.order,
            number=record.number,
            certificate=None,
            holders={},
        )
        for attempt, record in live.items()
        if attempt not in found
    ]
    candidates.sort(key=lambda candidate: (candidate.order, candidate.number or 0), reverse=True)
    return Merged(tuple(candidates), tuple(refused))


def foreign(certificate: Certificate, claims: Mapping[int, Record], *, store_id: str) -> str:
    """Say why a certificate is of another store, or of another history of this one; "" if it is of this one.

    A copy of a store has its id, and so has one that was put back from a backup. Only in the history in which the epoch
    was claimed does the log have that claim.
    """
    if certificate.manifest.store_id != store_id:
        return "it is of another store"
    claim = claims.get(certificate.claim_number)
    if (
        claim is None
        or claim.sha256 != certificate.claim_sha256
        or not isinstance(claim.change, Claim)
        or claim.state.epoch != certificate.order.epoch
    ):
        return "it is of another history of this store: the log has another record where its epoch was claimed"
    return ""


def void_reason(order: SaveOrder | None, attempt: str, state: StoreState, trashed: Mapping[str, Record]) -> str:
    """Say why nobody may resume from an attempt that is not live; "" if anybody may. Its `order` is in its
    certificate."""
    void = None if order is None else void_of(state.void, order)
    if void is not None:
        return f"it is {order}, and what came of {void.after} takes its place"
    removed = trashed.get(attempt)
    return "" if removed is None else f"it was removed by record {state.trash[removed.number]}"


def contradicts(certificate: Certificate, record: Record | None) -> str:
    """Say that a certificate has another manifest than the record of its attempt; "" if it has the same."""
    if record is None or record.entry.manifest_sha256 == sha256_of(certificate.manifest_data):
        return ""
    return f"its manifest is not the one that record {record.number} names"


def _holders(certificate: Certificate, sha256: str, seen: Iterable[NodeSighting]) -> dict[int, tuple[str, ...]]:
    """Return the nodes that hold all files of a rank, by rank."""
    # A node that crashed before it wrote the certificate counts too: it stored its files before any node wrote one.
    nodes: dict[int, set[str]] = {}
    for sighting in seen:
        if sighting.attempt == str(certificate.attempt) and sighting.sha256 in (sha256, "") and not sighting.fault:
            for rank in certificate.ranks_in(sighting.sizes):
                nodes.setdefault(rank, set()).add(sighting.node)
    return {rank: tuple(sorted(names)) for rank, names in sorted(nodes.items())}


def _lost(certificate: Certificate, holders: Mapping[int, tuple[str, ...]]) -> str:
    """Say which files no node of this job has; "" if there are none."""
    lost = sorted(certificate.by_rank.keys() - holders.keys())
    if not lost:
        return ""
    had = sorted({node for node, ranks in certificate.holders.items() if lost[0] in ranks})
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return f"no node that is here has the files of rank {lost[0]}{more}, which were on {', '.join(had)}"
