"""Resuming with a fast tier: what all nodes and the log have, in one row, and what is said of it afterwards.

every node looks at its disk → the leader merges that with the log → one candidate after another is tried →
the log hears from which one the job goes on → every node deletes what is void, superseded or was never finished
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ckptstore.errors import CheckpointDamaged, CkptstoreError
from ckptstore.events import CheckpointSkipped, emit
from ckptstore.fast.candidates import CertificatePlace, FastCandidate, Merged, NodeSighting, merge
from ckptstore.fast.certificate import Certificate
from ckptstore.fast.fast_files import FastFiles, fast_files_of
from ckptstore.fast.nodes.fast_place import FastPlace
from ckptstore.fast.nodes.held_storage import HeldStorage
from ckptstore.fast.upkeep.sweep import SweepView, sweep
from ckptstore.format.changes import Resumed
from ckptstore.format.layout import Attempt
from ckptstore.format.order import SaveOrder
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.loading.checkpoint_files import CheckpointFiles, files_of
from ckptstore.runtime.beat import beat
from ckptstore.transfer import Transfer

logger = logging.getLogger("ckptstore")


@dataclass(frozen=True, slots=True)
class LeaderView:
    """The fast checkpoints of all nodes beside the log, as the leader sees them."""

    sightings: tuple[NodeSighting, ...]
    certificates: Mapping[str, Certificate]
    claims: Mapping[int, Record]
    committed: Sequence[Record]
    merged: Merged
    refused: Sequence[str]

    def to_json(self, order: Callable[[Sequence[FastCandidate]], Sequence[FastCandidate]] | None) -> dict[str, Any]:
        """Return the candidates in the order to try them, and what is refused."""
        by_attempt = {record.entry.attempt: record for record in self.committed}
        tried = self.merged.candidates if order is None else order(self.merged.candidates)
        packed = [_packed(one, by_attempt.get(one.attempt), self.sightings) for one in tried]
        return {"tried": packed, "refused": list(self.refused)}


@dataclass(frozen=True, slots=True)
class Findings:
    """The candidates of a resume with a fast tier, kept until the job has resumed."""

    job: Job
    place: FastPlace
    files: list[CheckpointFiles]
    """In the order in which they are tried."""
    passed_over: tuple[str, ...]
    """What nodes have of newer checkpoints that cannot be used, and why."""
    on_leader: LeaderView | None
    is_ordered: bool
    """True if somebody chose what is tried: what that leaves out is not given up."""

    def resumed(self, files: CheckpointFiles | None) -> None:
        """See `Candidates.resumed`. What nobody needs is deleted on every node. An error of that is only logged: the
        next resume tries again."""
        if files is not None or not self.is_ordered:
            _resumed(self, files)


@runtime_checkable
class FastOrder(Protocol):
    """An order that knows of fast checkpoints too: see `loading.newest.Order`."""

    def __call__(self, numbers: Sequence[int]) -> Iterable[int]:
        """See `Order`."""

    def of_fast(self, candidates: Sequence[FastCandidate]) -> Sequence[FastCandidate]:
        """From what the nodes and the store have, newest first, choose what is tried, in that order."""


def look(
    job: Job,
    place: FastPlace,
    order: Callable[[Sequence[FastCandidate]], Sequence[FastCandidate]] | None = None,
    *,
    is_loaded: bool = True,
) -> Findings:
    """Claim the store, and find everything that this job can go on from, the newest first. Collective.

    The leader calls `order` with that, for what is tried, and in which order. Without `is_loaded` nothing is read now,
    and each candidate is there once, with all places of its files: what is damaged in one of them is found when the
    candidates are forgotten.
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
    return Findings(job, place, candidates, tuple(answer["refused"]), on_leader, is_ordered=order is not None)


def _leader_view(
    job: Job, place: FastPlace, sightings: tuple[NodeSighting, ...], known: dict[str, Certificate]
) -> LeaderView:
    """Claim the store, and merge what the nodes have with the log. Certificates that are read are added to `known`."""
    for sighting in sightings:
        if sighting.sha256 and sighting.sha256 not in known:
            known[sighting.sha256] = place.certificate_of(sighting.place)
            beat()
    certificates = dict(known)
    newest = job.claim(job.log.checked_newest())
    beat()
    committed = job.log.records([*newest.state.live, *newest.state.trash])
    claims = _claims(job, newest, certificates.values())
    merged = merge(sightings, certificates, newest, committed, claims, store_id=job.store_id())
    refused = _tell_refused(merged)
    if not merged.candidates:
        job.log.confirm()
    return LeaderView(sightings, certificates, claims, committed, merged, refused)


def _resumed(seen: Findings, files: CheckpointFiles | None) -> None:
    job, place = seen.job, seen.place
    certificate = files.certificate if isinstance(files, FastFiles) else None
    record = None if files is None else files.record

    def decide(view: LeaderView) -> Any:
        source = certificate.order if certificate else record.entry.order if record else None
        attempt = str(certificate.attempt) if certificate else record.entry.attempt if record else ""

        def change(newest: Record | None) -> Resumed:
            beat()
            state = job.claim(newest).state
            assert job.epoch is not None  # claimed
            return Resumed(epoch=job.epoch, source=source, attempt=attempt, next_save=job.peek_save_number(state))

        newest = job.log.append(change)
        assert newest is not None  # a change is always written
        beat()
        return _sweeps(job, place, view, newest, source)

    with job.group.meeting("resumed") as meeting:
        told = meeting.tell(lambda: seen.on_leader and decide(seen.on_leader))
    if not place.members.is_reporter:
        return
    mine = told[place.members.node]
    deleted = [(name, reason) for name, reason in mine["deleted"] if name not in place.in_use]
    place.saved = [name for name, _ in mine["deleted"] if name in place.in_use] + mine["kept"]
    for name, reason in deleted:
        attempt = Attempt.parse(name)
        try:
            assert attempt is not None  # the leader got it from this node
            logger.info("the fast checkpoint %s on %s is deleted: %s", name, place.disk.node, reason)
            if not place.disk.delete_as(place.epoch, attempt):
                place.saved.insert(0, name)  # somebody reads it: the next save tries again
        except CkptstoreError as error:
            logger.warning("the fast checkpoint %s on %s could not be deleted: %s", name, place.disk.node, error)


def _claims(job: Job, newest: Record, certificates: Iterable[Certificate]) -> dict[int, Record]:
    """The records by which the epochs of the certificates were claimed, as far as there are such and can be read."""
    found = {}
    for number in {one.claim_number for one in certificates}:
        try:
            if number <= newest.number:
                found[number] = job.log.records([number])[0]
        except CheckpointDamaged as error:  # who only cannot be asked now is no reason to do without a checkpoint
            logger.warning("record %d, by which a fast checkpoint is known, cannot be read: %s", number, error)
    return found


def _tell_refused(merged: Merged) -> list[str]:
    """Tell of what cannot be used, and return it."""
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
        "record": [record.number, record.encode().decode()] if record and candidate.is_durable else None,
        "certificates": [[*sighting.place] for sighting in sightings if sha256 and sighting.sha256 == sha256],
        "holders": [[rank, list(nodes)] for rank, nodes in candidate.holders.items()],
    }


def _opened(
    job: Job, place: FastPlace, told: Mapping[str, Any], known: Mapping[str, Certificate], *, is_loaded: bool
) -> list[CheckpointFiles]:
    """The files of a candidate in the ways to read them: the disk of this node where it has all; all nodes, and the
    store where it is durable; the store alone. All ranks have equally many."""
    found = []
    record = Record.decode(told["record"][1].encode(), told["record"][0]) if told["record"] else None
    places = [CertificatePlace(*one) for one in told["certificates"]]
    if places:
        certificate = known.get(places[0].sha256) or place.certificate_of(*places)
        holders = {rank: tuple(nodes) for rank, nodes in told["holders"]}
        everywhere = _held(job, place, certificate, holders, record)
        has_all = all(place.members.node in holders.get(rank, ()) for rank in certificate.by_rank)
        is_alone = len(place.members.all_nodes) == 1 and record is None
        if is_loaded or is_alone:
            found.append(fast_files_of(job, place, certificate, record) if has_all else everywhere)
        if len(place.members.all_nodes) > 1 or not found:
            found.append(everywhere)
    if record is not None:
        found.append(files_of(job, record))
    return found


def _held(
    job: Job,
    place: FastPlace,
    certificate: Certificate,
    holders: Mapping[int, tuple[str, ...]],
    record: Record | None,
) -> CheckpointFiles:
    store = None if record is None else job.storage
    storage = HeldStorage(place.disk, certificate, holders, place.clients, store=store)
    config = job.config
    transfer = Transfer(storage, config=config.transfer, retry=config.retry, rank=place.members.rank)
    job.at_close(transfer.close)
    return FastFiles(
        storage=storage,
        transfer=transfer,
        config=config,
        prefix=certificate.attempt.prefix,
        record=record,
        job=job,
        place=place,
        certificate=certificate,
    )


def _sweeps(job: Job, place: FastPlace, seen: LeaderView, newest: Record, source: SaveOrder | None) -> dict[str, Any]:
    """Leader: by node which attempts stay, the first to go first, and which are deleted and why.

    What is newer than the source was found damaged: it goes, or is the first to go where the log has it.
    """
    assert job.epoch is not None
    keep = place.tier.keep
    certified = [one for one in reversed(seen.merged.candidates) if one.certificate is not None]
    usable = [one.attempt for one in certified if source is not None and one.order <= source]
    damaged = [one.attempt for one in certified if one.attempt not in usable]
    view = SweepView(
        newest=newest,
        committed=job.log.records([*newest.state.live, *newest.state.trash]),
        claims=seen.claims,
        store_id=job.store_id(),
        epoch=job.epoch,
        has_resumed=True,
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
        gone = {str(deletion.attempt) for deletion in deletions}
        told[node] = {
            "kept": [name for name in (*damaged, *usable) if name not in gone],
            "deleted": [[str(deletion.attempt), deletion.reason] for deletion in deletions],
        }
    return told
