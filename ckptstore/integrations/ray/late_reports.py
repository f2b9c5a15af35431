"""Reports of saves that are complete on the nodes before they are in the store.

Ray registers what is in the store, and nothing else. So a report waits, in the order of the saves, until it is known
what became of the save: it is in the store, a newer one took its place there, or it could not be brought there. The
leader finds that out between two steps of the training; no rank waits for the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.format.record import Record
from ckptstore.group import Beat
from ckptstore.integrations.ray.reports import Reports
from ckptstore.job import Job
from ckptstore.loading.story import files_of
from ckptstore.saving.background import PendingSave
from ckptstore.saving.drain import Drain

_NOT_KNOWN = "it is on the nodes, and the store was closed before it came there"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unreported:
    """A save of which Ray has not heard."""

    step: int
    told: dict[str, Any]
    """Its metrics, at the time of the call."""
    validation: Any
    saved: PendingSave | Checkpoint


@dataclass(kw_only=True)
class LateReports:
    """The reports of a store with a fast tier, in one worker. Called from the training thread."""

    job: Job
    reports: Reports
    drains: dict[str, Drain] = field(default_factory=dict)
    """By attempt: the way of a fast checkpoint into the store. Added by the thread of the save."""
    _waiting: list[_Unreported] = field(default_factory=list)

    def add(
        self, step: int, metrics: Mapping[str, Any] | None, validation: Any, saved: PendingSave | Checkpoint
    ) -> None:
        """A save that was made, or begun. All ranks add the same, and call `send` afterwards."""
        told = self.reports.ranked(step, metrics)
        if isinstance(saved, PendingSave):
            told["ckptstore_stalled_seconds"] = saved.stalled_seconds
        self._waiting.append(_Unreported(step=step, told=told, validation=validation, saved=saved))

    def send(self, *, is_last: bool = False) -> None:
        """Report the saves of which it is known what became of them, and with `is_last` the others too. Collective."""

        def look(_parts: list[Any], _beat: Beat) -> list[Any]:
            found: list[Any] = []
            for save in self._waiting:
                outcome = self._outcome(save)
                if outcome is None and not is_last:
                    break
                found.append({"error": _NOT_KNOWN} if outcome is None else outcome)
            return found

        outcomes = self.job.exchange("reports", lambda _beat: None, look)
        known, self._waiting = self._waiting[: len(outcomes)], self._waiting[len(outcomes) :]
        for save, outcome in zip(known, outcomes, strict=True):
            self._report(save, outcome)
        if is_last:
            self.reports.settle()

    def _report(self, save: _Unreported, outcome: Mapping[str, Any]) -> None:
        if "record" in outcome:
            number, text = outcome["record"]
            checkpoint = Checkpoint(files_of(self.job, Record.decode(text.encode(), number)))
            self.reports.stored(checkpoint, save.told, validation=save.validation)
            return
        if "went_to_the_store" in outcome:
            stored = save.saved.result() if isinstance(save.saved, PendingSave) else save.saved
            assert stored is not None  # one that was left out is not added
            self.reports.stored(stored, save.told, validation=save.validation)
            return
        if "error" in outcome:
            self.reports.counts.failed_saves += 1
        self.reports.alone({**save.told, **{f"ckptstore_{name}": text for name, text in outcome.items()}})

    def _outcome(self, save: _Unreported) -> dict[str, Any] | None:
        """Leader: what became of a save; None where that is not known yet. A dict of a record, of an error, or of the
        step that took its place."""
        saved = save.saved
        if isinstance(saved, PendingSave):
            if not saved.done():
                return None
            error = saved.error()
            if error is not None:
                return {"error": str(error)}
            found = saved.result()
            assert found is not None  # one that was left out is not added
            saved = found
        drain = self.drains.get(saved.uri.rpartition("/")[2])
        if drain is None:  # the disk of a node was full
            return {"went_to_the_store": True}
        if not drain.done():
            return None
        del self.drains[drain.attempt]
        if (failed := drain.error()) is not None:
            return {"error": str(failed)}
        newer = drain.superseded_by
        if newer is not None:
            return {"superseded_by_step": newer.entry.step}
        record = drain.result(0.0)
        return {"record": [record.number, record.encode().decode()]}
