"""The fast checkpoints that one process was offered for the store, their states, and the choice of the leader.

    offered → active (due, or a caller waits for it) → begun → durable, failed
                     └→ dropped, when a newer one is active before it is begun

Only active ones are kept from being deleted, so a store that is away costs the disk two checkpoints and no more. A
checkpoint that was dropped, or never active, ends with the first newer one that is durable, or that failed while none
was active.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckptstore.errors import CkptstoreError, InvalidInput, NotDurable
from ckptstore.extensions.tier.certificate import Certificate
from ckptstore.extensions.tier.nodes.fast_place import FastPlace
from ckptstore.format.record import Record


class Drain:
    """One fast checkpoint on its way into the store, as one process sees it."""

    def __init__(self, certificate: Certificate, changed: threading.Condition) -> None:
        self.step = certificate.manifest.step
        self.save_number = certificate.save_number
        self.attempt = certificate.manifest.attempt
        self.offered_at = time.monotonic()
        self.certificate: Certificate | None = certificate
        """The certificate; None once the drain has ended or was dropped."""
        self.is_active = False
        self.is_told = False
        """True if this rank has reported it to the others, and they have not chosen yet."""
        self.is_begun = False
        self.may_be_committed = False
        """True if a try failed in such a way that it may have a record: then nobody may remove its files."""
        self.has_made_room = False
        """True if the trash of the store was emptied for it."""
        self._changed = changed
        self._record: Record | None = None
        self._error: CkptstoreError | None = None

    def done(self) -> bool:
        """Return True if it has ended, well or not."""
        return self._record is not None or self._error is not None

    def result(self, timeout_seconds: float | None = None) -> Record:
        """Wait until this checkpoint is durable, or a newer one of this job is, and return the record of that one.

        Raises the error of the drain, and TimeoutError when it has not ended in time.
        """
        with self._changed:
            if not self._changed.wait_for(self.done, timeout_seconds):
                raise TimeoutError(f"Step {self.step} was not in the store after {timeout_seconds} seconds")
        if self._error is not None:
            raise self._error
        assert self._record is not None  # it is done
        return self._record

    @property
    def superseded_by(self) -> Record | None:
        """The record of a newer checkpoint that became durable in place of this one; None if there is none."""
        record = self._record
        return record if record is not None and record.entry.attempt != self.attempt else None

    def error(self) -> CkptstoreError | None:
        """Return the error that it failed with; None while it runs, and when it did not fail."""
        return self._error

    def settle(self, outcome: Record | CkptstoreError, *, changed: threading.Condition | None = None) -> None:
        """End it with this outcome. Only the book calls this."""
        self.certificate, self._changed = None, changed or self._changed
        if isinstance(outcome, Record):
            self._record = outcome
        else:
            self._error = outcome


class Book:
    """The drains of one process that have not ended. Safe for threads; `changed` is notified of every change."""

    def __init__(self, place: FastPlace) -> None:
        self._place = place
        self.changed = threading.Condition()
        self.ended: CkptstoreError | None = None
        """The reason why no more is drained, for good; None while all is well."""
        self._drains: dict[int, Drain] = {}
        """The drains by the number of the save, ascending."""
        self._last: Drain | None = None
        """The last one that was offered, whether or not it has ended."""
        self._wanted = 0
        """The highest number that is active on some rank."""
        self._failed: tuple[float, CkptstoreError] | None = None
        """The offer time of the oldest drain that failed since the last success, and the error of the last one."""

    def offer(self, certificate: Certificate, *, is_active: bool) -> Drain:
        """Add a fast checkpoint. Raises InvalidInput for one that is not newer than the last."""
        with self.changed:
            number = certificate.save_number
            if self._last is not None and number <= self._last.save_number:
                raise InvalidInput(
                    f"Save {number} was offered after save {self._last.save_number}", step=certificate.manifest.step
                )
            self._last = drain = Drain(certificate, self.changed)
            if self.ended is not None:
                drain.settle(self.ended)
                return drain
            self._drains[number] = drain
            if is_active or number == self._wanted:
                self._activate(drain)
            self.changed.notify_all()
            return drain

    def want(self, drain: Drain | None = None) -> Drain | None:
        """Make the newest one active: the caller waits for `drain` or, without it, for the newest. Return the newest
        that was offered, whether or not it has ended; None if there is none.

        Older ones are safe too once it is durable. If one that is not older than `drain` is active, do nothing.
        """
        with self.changed:
            newest = self._newest()
            if newest is not None and not (drain is not None and drain.done()):
                least = newest if drain is None else drain
                if not any(other.save_number >= least.save_number for other in self._active()):
                    self._activate(newest)
                    self.changed.notify_all()
            return self._last

    def told(self, sent: int) -> dict[str, Any]:
        """Report the saves that this rank can drain. `sent` is the save whose files it has sent in part, or 0."""
        with self.changed:
            self._tell()
            self._drop_below(max((drain.save_number for drain in self._active()), default=0), begun_too=False)
            active, newest = self._active(), self._newest()
            self._tell(*active, *([] if newest is None else [newest]))
            numbers = [drain.save_number for drain in active]
            return {"active": numbers, "newest": 0 if newest is None else newest.save_number, "sent": sent}

    def hear(self, choice: Mapping[str, Any]) -> Drain | None:
        """Apply the choice of the leader. Return the drain to run now; None if the ranks have none in common."""
        with self.changed:
            go, self._wanted = choice["go"], max(self._wanted, choice["wanted"])
            self._tell()
            chosen, wanted = self._drains.get(go), self._drains.get(self._wanted)
            if chosen is not None:
                self._activate(chosen)
                chosen.is_begun = True
            if wanted is not None:
                self._activate(wanted)
            self._drop_below(go or self._wanted)
            self.changed.notify_all()
            return chosen

    def has_active(self) -> bool:
        """Return True if one drains or waits. The caller holds `changed`, or accepts an answer of a moment ago."""
        return bool(self._active())

    def settle(self, record: Record) -> None:
        """End all drains that are not newer than a durable checkpoint of this job with its record."""
        with self.changed:
            covered = [number for number in self._drains if number <= record.entry.save_number]
            self._end(covered, record)
            self._failed = None

    def fail(self, numbers: Collection[int], error: CkptstoreError) -> None:
        """End these with an error, and all older ones too, unless one is active.

        A caller may wait for any of those. Which ones gave way, and which could still be drained, differs by rank.
        """
        with self.changed:
            self._end([number for number in numbers if number in self._drains], error)
            if not self._active():
                self._end([number for number in self._drains if number < max(numbers, default=0)], error)

    def end(self, error: CkptstoreError) -> None:
        """Drain no more, for good, and end all drains with this error."""
        with self.changed:
            self.ended = error
            self._end(list(self._drains), error)

    def end_in_child(self, error: CkptstoreError) -> None:
        """As `end`, in a forked child, which does not have the thread that held the lock."""
        self.changed, self.ended = threading.Condition(), error
        for drain in self._drains.values():
            drain.settle(error, changed=self.changed)
        self._drains = {}

    def all_active(self) -> list[Drain]:
        """Return the drains that run or wait, oldest first."""
        with self.changed:
            return self._active()

    def behind(self) -> tuple[float | None, CkptstoreError | None]:
        """Return since when the store is behind, None if it is not, and the last error since the last success.

        It is behind since the offer of the oldest checkpoint that is not durable, and that no newer durable one covers.
        """
        with self.changed:
            oldest = next(iter(self._drains.values()), None)
            since, error = self._failed or (None, None)
            waiting = [at for at in (since, oldest.offered_at if oldest else None) if at is not None]
            return min(waiting, default=None), error

    # The caller holds the lock

    def _active(self) -> list[Drain]:
        return [drain for drain in self._drains.values() if drain.is_active]

    def _newest(self) -> Drain | None:
        """Return the newest, if it can be drained: only the newest is sure to exist without being active."""
        return None if self._last is None or self._last.certificate is None else self._last

    def _activate(self, drain: Drain) -> None:
        if not drain.is_active and drain.certificate is not None:
            drain.is_active = True
            self._place.hold(drain.attempt)
            self._drop_below(drain.save_number, begun_too=False)

    def _tell(self, *told: Drain) -> None:
        """Mark these as reported to the others, and no more."""
        for drain in self._drains.values():
            drain.is_told = drain in told

    def _drop_below(self, number: int, *, begun_too: bool = True) -> None:
        for drain in self._active():
            if drain.save_number < number and (begun_too or not (drain.is_begun or drain.is_told)):
                self._release(drain)
                drain.certificate = None

    def _release(self, drain: Drain) -> None:
        if drain.is_active:
            drain.is_active = False
            self._place.release(drain.attempt)

    def _end(self, numbers: Collection[int], outcome: Record | CkptstoreError) -> None:
        for number in numbers:
            drain = self._drains.pop(number)
            self._release(drain)
            drain.settle(outcome)
            if not isinstance(outcome, Record):
                since = drain.offered_at if self._failed is None else min(drain.offered_at, self._failed[0])
                self._failed = since, outcome
        self.changed.notify_all()


def choose(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Leader: return the save to drain now (0 for none), and the newest that any rank wants. Pure.

    `told` are the reports of all ranks. The choice is the newest save that every rank has and that one wants; but one
    whose files were sent in part goes on, so that one arrives even if the store fails now and then.
    """
    common = set.intersection(*({*each["active"], each["newest"]} for each in told)) - {0}
    wanted = {number for each in told for number in each["active"]}
    sent = {each["sent"] for each in told} & common
    return {"go": max(sent or common & wanted, default=0), "wanted": max(wanted, default=0)}


def given_up(reason: str) -> NotDurable:
    """Return the error of a drain that was given up."""
    return NotDurable(
        f"The fast checkpoint is not in the store: {reason}",
        hint="It stays on the disks of the nodes: the next job resumes from it there",
    )
