"""Choose the attempts to delete from the disk of a node: none that is neither durable nor superseded. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptstore.errors import InvalidInput
from ckptstore.extensions.tier.candidates import foreign, void_reason
from ckptstore.extensions.tier.certificate import Certificate
from ckptstore.format.layout import Attempt
from ckptstore.format.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepView:
    """The knowledge of the leader of a job from which it decides, once its `resumed` record is in the log."""

    newest: Record
    """The newest record, as read from the log itself: a hint is not enough."""
    committed: Sequence[Record]
    """The records of all checkpoints that are live or in the trash."""
    claims: Mapping[int, Record]
    """The records that claimed the epochs of the certificates, by number, as far as they exist."""
    store_id: str
    epoch: int
    """The writer epoch of the job."""
    kept: Collection[str] = ()
    """Attempts to keep: those that are being saved, drained or loaded, and certified ones that other nodes keep."""


def sweep(found: Mapping[Attempt, Certificate | None], view: SweepView, *, keep: int) -> dict[str, str]:
    """Return the attempts whose directories on one node may be deleted, with the reasons; all others must stay.

    `found` has every attempt directory of the store on this node with its certificate, None if it has none. The `keep`
    newest that can be resumed from stay, durable or not. Of the others, a certified one goes when it is durable or a
    newer one is certified on this node, and at once when it is void. One without a certificate goes when its epoch is
    lower than that of the job: even if another node certified it, it would be superseded or void.

    Nothing goes when the job was fenced. A directory of this epoch without a certificate belongs to a save in progress,
    or is left to the next start. Raises InvalidInput when `keep` is below 1.
    """
    if keep < 1:
        raise InvalidInput(f"keep is {keep}, and the newest fast checkpoint always stays")
    state = view.newest.state
    if state.epoch != view.epoch:
        return {}
    live = {record.entry.attempt for record in view.committed if record.number in state.live}
    trashed = {record.entry.attempt: record for record in view.committed if record.number in state.trash}
    deletions: dict[str, str] = {}
    usable: list[Certificate] = []
    for attempt, certificate in sorted(found.items()):
        if certificate is None:
            if attempt.epoch < view.epoch and str(attempt) not in view.kept:
                deletions[str(attempt)] = "a save that did not end has left it"
        elif foreign(certificate, view.claims, store_id=view.store_id):
            continue
        elif str(attempt) not in live and (void := void_reason(certificate.order, str(attempt), state, trashed)):
            if str(attempt) not in view.kept:
                deletions[str(attempt)] = void
        else:
            usable.append(certificate)
    usable.sort(key=lambda certificate: certificate.order, reverse=True)
    for certificate in usable[keep:]:
        name = str(certificate.attempt)
        if name not in view.kept:
            deletions[name] = "it is in the store" if name in live else f"{usable[0].order} is newer"
    return deletions
