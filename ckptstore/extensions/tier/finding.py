"""Resume with a fast tier: put the checkpoints of all nodes and of the log into one row, and record the choice.

every node looks at its disk → the leader merges that with the log → one candidate after another is tried →
the log records from which one the job goes on → every node deletes what is void, superseded or was never finished
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ckptstore.errors import CheckpointDamaged, CkptstoreError
from ckptstore.events import CheckpointSkipped, emit
from ckptstore.extensions.tier.candidates import CertificatePlace, FastCandidate, Merged, NodeSighting, merge
from ckptstore.extensions.tier.certificate import Certificate
from ckptstore.extensions.tier.fast_files import FastFiles, fast_files_of, held_files_of
from ckptstore.extensions.tier.nodes.fast_place import FastPlace
from ckptstore.extensions.tier.nodes.held_storage import HeldStorage
from ckptstore.extensions.tier.upkeep.sweep import SweepView, sweep
from ckptstore.format.changes import Resumed
from ckptstore.format.layout import Attempt
from ckptstore.format.order import SaveOrder
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.loading.checkpoint_files import CheckpointFiles, files_of
from ckptstore.loading.newest import Candidates
from ckptstore.runtime.beat import beat

logger = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True)
class LeaderView:
    """The fast checkpoints of all nodes and the log, as the leader sees them."""

    sightings: tuple[NodeSighting, ...]
    certificates: Mapping[str, Certificate]
    claims: Mapping[int, Record]
    committed: Sequence[Record]
    merged: Merged
    refused: Sequence[str]

    def to_json(self, order: Callable[[Sequence[FastCandidate]], Sequence[FastCandidate]] | None) -> dict[str, Any]:
        """Return the candidates in the order in which to try them, and the texts on those that are refused."""
        by_attempt = {record.entry.attempt: record for record in self.committed}
        tried = self.merged.candidates if order is None else order(self.merged.candidates)
        packed = [_packed(one, by_attempt.get(one.attempt), self.sightings) for one in tried]
        return {"tried": packed, "refused": list(self.refused)}


@runtime_checkable
class FastOrder(Protocol):
    """An order of candidates that covers fast checkpoints too: see `loading.newest.Order`."""

    def __call__(self, numbers: Sequence[int]) -> Iterable[int]:
        """See `Order`."""

    def of_fast(self, candidates: Sequence[FastCandidate]) -> Sequence[FastCandidate]:
        """Choose which of the candidates are tried, and in which order. `candidates` has the newest first."""


def look(
    job: Job,
    place: FastPlace,
    order: Callable[[Sequence[FastCandidate]], Sequence[FastCandidate]] | None = None,
    *,
    is_loaded: bool = True,
) -> Candidates:
    """Claim the store, and find all checkpoints that this job can go on from, newest first. Collective.

    The leader calls `order` with them, to choose which are tried, and in which order. Without `is_loaded` the
    caller loads nothing yet, and each candidate comes once, with all places of its files: damage in one place is found
    only after the candidates are forgotten.
    """
    place.settle()
    known: dict[str, Certificate] = {}
    on_leader: LeaderView | None = None
    with job.group.meeting("look") as meeting:
        mine: list[Any] = []
        if place.members.is_reporter:
            own, known = place.disk.look()
            mine = [sighting.to_json() for sighting in own]
        parts = meeting.gather(mine)
        if job.is_leader:
            sightings = tuple(NodeSighting.from_json(one) for part in parts for one in part)
            on_leader = _leader_view(job, place, sightings, known)
        answer = meeting.tell(lambda: on_leader and on_leader.to_json(order))
    with job.group.meeting("open fast"):  # certificates are large, and most nodes have those that matter
        candidates = [
            files for one in answer["tried"] for files in _opened(job, place, one, known, is_loaded=is_loaded)
        ]

    def resumed(files: CheckpointFiles | None) -> None:
        if files is not None or order is None:  # what a caller's order has left out is not given up
            _resumed(job, place, on_leader, files)

    return Candidates(candidates, answer["refused"], resumed)


def _leader_view(
    job: Job, place: FastPlace, sightings: tuple[NodeSighting, ...], known: dict[str, Certificate]
) -> LeaderView:
    """Claim the store, and merge the sightings with the log. Certificates that are read are added to `known`."""
    for sighting in sightings:
        if sighting.sha256 and sighting.sha256 not in known:
            known[sighting.sha256] = place.certificate_of(sighting.place)
            beat()
    certificates = dict(known)
    newest = job.claim(job.log.checked_newest())
    beat()
    committed = job.log.annotated(job.log.records([*newest.state.live, *newest.state.trash]), newest)
    claims = _claims(job, newest, certificates.values())
    merged = merge(sightings, certificates, newest, committed, claims, store_id=job.store_id())
    refused = _tell_refused(merged)
    if not merged.candidates:
        job.log.confirm()
    return LeaderView(sightings, certificates, claims, committed, merged, refused)


def _resumed(job: Job, place: FastPlace, on_leader: LeaderView | None, files: CheckpointFiles | None) -> None:
    """See `Candidates.resumed`. Then delete superfluous attempts on every node.

    An error of the deletion is only logged: the next resume tries again.
    """
    certificate = files.certificate if isinstance(files, FastFiles) else None
    record = None if files is None else files.record

    def decide(view: LeaderView) -> Any:
        source = certificate.order if certificate else record.entry.order if record else None
        attempt = str(certificate.attempt) if certificate else record.entry.attempt if record else ""

        def change(newest: Record | None) -> Resumed:
            beat()
            state = job.claim(newest).state
            next_save = job.peek_save_number(state)
            return Resumed(epoch=job.claimed_epoch, source=source, attempt=attempt, next_save=next_save)

        newest = job.log.append(change)
        beat()
        return _sweeps(job, place, view, newest, source)

    with job.group.meeting("resumed") as meeting:
        told = meeting.tell(lambda: on_leader and decide(on_leader))
    if not place.members.is_reporter:
        return
    mine = told[place.members.node]
    deleted = [(name, reason) for name, reason in mine["deleted"] if name not in place.in_use]
    place.saved = [name for name, _ in mine["deleted"] if name in place.in_use] + mine["kept"]
    for name, reason in deleted:
        try:
            logger.info("the fast checkpoint %s on %s is deleted: %s", name, place.disk.node, reason)
            if not place.disk.delete_as(place.epoch, Attempt.of(name)):
                place.saved.insert(0, name)  # somebody reads it: the next save tries again
        except CkptstoreError as error:
            logger.warning("the fast checkpoint %s on %s could not be deleted: %s", name, place.disk.node, error)


def _claims(job: Job, newest: Record, certificates: Iterable[Certificate]) -> dict[int, Record]:
    """Return the records that claimed the epochs of the certificates, as far as they exist and can be read."""
    found = {}
    for number in {one.claim_number for one in certificates}:
        try:
            if number <= newest.number:
                found[number] = job.log.records([number])[0]
        except CheckpointDamaged as error:  # no more: a store that is away now must not cost a checkpoint
            logger.warning("record %d, by which a fast checkpoint is known, cannot be read: %s", number, error)
    return found


def _tell_refused(merged: Merged) -> list[str]:
    """Log or emit each checkpoint that cannot be used; return the texts on those that are not void."""
    told = []
    for refused in merged.refused:
        attempt = Attempt.parse(refused.attempt)
        nodes = ", ".join(refused.nodes)
        if refused.is_void or attempt is None:
            logger.info("the fast checkpoint %s on %s is not used: %s", refused.attempt, nodes, refused.reason)
        else:
            told.append(f"step {attempt.step}: on {nodes}: {refused.reason}")
            emit(CheckpointSkipped(step=attempt.step, number=None, reason=f"on {nodes}: {refused.reason}"))
    return told


def _packed(candidate: FastCandidate, record: Record | None, sightings: Sequence[NodeSighting]) -> dict[str, Any]:
    sha256 = candidate.certificate.sha256 if candidate.certificate else ""
    return {
        "record": record.to_wire() if record and candidate.is_durable else None,
        "certificates": [[*sighting.place] for sighting in sightings if sha256 and sighting.sha256 == sha256],
        "holders": [[rank, list(nodes)] for rank, nodes in candidate.holders.items()],
    }


def _opened(
    job: Job, place: FastPlace, told: Mapping[str, Any], known: Mapping[str, Certificate], *, is_loaded: bool
) -> list[CheckpointFiles]:
    """Return the files of a candidate once for each way to read them; all ranks return equally many.

    The ways are: the disk of this node, if it has all; all nodes, with the store if it is durable; the store alone.
    """
    found: list[CheckpointFiles] = []
    record = Record.from_wire(told["record"]) if told["record"] else None
    places = [CertificatePlace(*one) for one in told["certificates"]]
    if places:
        certificate = known.get(places[0].sha256) or place.certificate_of(*places)
        holders = {rank: tuple(nodes) for rank, nodes in told["holders"]}
        store = None if record is None else job.storage
        held = HeldStorage(place.disk, certificate, holders, place.clients, store=store)
        everywhere = held_files_of(job, place, certificate, held, record)
        job.at_close(everywhere.transfer.close)
        has_all = all(place.members.node in holders.get(rank, ()) for rank in certificate.by_rank)
        is_alone = len(place.members.all_nodes) == 1 and record is None
        if is_loaded or is_alone:
            found.append(fast_files_of(job, place, certificate, record) if has_all else everywhere)
        if len(place.members.all_nodes) > 1 or not found:
            found.append(everywhere)
    if record is not None:
        found.append(files_of(job, record))
    return found


def _sweeps(job: Job, place: FastPlace, seen: LeaderView, newest: Record, source: SaveOrder | None) -> dict[str, Any]:
    """Leader: return, by node, the attempts that stay, the first to go first, and those to delete with the reasons.

    A candidate newer than the source was found damaged: it goes, or is the first to go if the log has it.
    """
    keep = place.tier.keep
    certified = [one for one in reversed(seen.merged.candidates) if one.certificate is not None]
    usable = [one.attempt for one in certified if source is not None and one.order <= source]
    damaged = [one.attempt for one in certified if one.attempt not in usable]
    view = SweepView(
        newest=newest,
        committed=job.log.records([*newest.state.live, *newest.state.trash]),
        claims=seen.claims,
        store_id=job.store_id(),
        epoch=job.claimed_epoch,
        kept=frozenset(usable[-keep:]),
    )
    told: dict[str, Any] = {}
    for node in place.members.all_nodes:
        found = {
            attempt: seen.certificates.get(sighting.sha256)
            for sighting in seen.sightings
            if sighting.node == node and (attempt := Attempt.parse(sighting.attempt)) is not None
        }
        deletions = sweep(found, view, keep=keep)
        told[node] = {
            "kept": [name for name in (*damaged, *usable) if name not in deletions],
            "deleted": [*deletions.items()],
        }
    return told
