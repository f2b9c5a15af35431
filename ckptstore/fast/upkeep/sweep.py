"""What may be deleted from the disk of a node: nothing that is neither durable nor superseded. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptstore.errors import InvalidInput
from ckptstore.fast.candidates import foreign, void_reason
from ckptstore.fast.certificate import Certificate
from ckptstore.format.layout import Attempt
from ckptstore.format.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepView:
    """What the leader of a job knows when it decides what goes."""

    newest: Record
    """Read from the log itself: a hint is not enough."""
    committed: Sequence[Record]
    """The records of what is live or in the trash."""
    claims: Mapping[int, Record]
    """The records by which the epochs of the certificates were claimed, by number, as far as they exist."""
    store_id: str
    epoch: int
    """The writer epoch of the job."""
    has_resumed: bool
    """Whether its `resumed` record is in the log."""
    kept: Collection[str] = ()
    """Attempts that stay: those that are being saved, drained or loaded, and certified ones that other nodes keep."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """An attempt directory on the node that may go."""

    attempt: Attempt
    reason: str


def sweep(found: Mapping[Attempt, Certificate | None], view: SweepView, *, keep: int) -> list[Deletion]:
    """The directories on one node that may be deleted, with the reasons; the others must stay.

    `found` has every attempt directory of the store on this node with its certificate, None where there is none. The
    `keep` newest that can be resumed from stay, durable or not. Of the others, a certified one goes when it is durable
    or a newer one is certified here, and at once when it is void. What has no certificate goes when its epoch is lower
    than that of a job that has resumed: certified or not, it would be superseded or void.

    Nothing goes when the job was fenced. A directory of this epoch without a certificate belongs to a save that goes
    on, or to the next start. Raises InvalidInput when `keep` is below 1.
    """
    if keep < 1:
        raise InvalidInput(f"keep is {keep}, and the newest fast checkpoint always stays")
    state = view.newest.state
    if state.epoch != view.epoch:
        return []
    live = {record.entry.attempt for record in view.committed if record.number in state.live}
    trashed = {record.entry.attempt: record for record in view.committed if record.number in state.trash}
    deletions: list[Deletion] = []
    usable: list[Certificate] = []
    for attempt, certificate in sorted(found.items()):
        if certificate is None:
            if attempt.epoch < view.epoch and view.has_resumed and str(attempt) not in view.kept:
                deletions.append(Deletion(attempt, "a save that did not end has left it"))
        elif foreign(certificate, view.claims, store_id=view.store_id):
            continue
        elif str(attempt) not in live and (void := void_reason(certificate, state, trashed)):
            if str(attempt) not in view.kept:
                deletions.append(Deletion(attempt, void))
        else:
            usable.append(certificate)
    usable.sort(key=lambda certificate: certificate.order, reverse=True)
    for certificate in usable[keep:]:
        name = str(certificate.attempt)
        if name not in view.kept:
            reason = "it is in the store" if name in live else f"{usable[0].order} is newer"
            deletions.append(Deletion(certificate.attempt, reason))
    return deletions
