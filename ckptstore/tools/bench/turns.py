"""Let contenders take turns, round by round, so that changes on the machine hit all alike.

Each round has an order of its own: the remains of one, such as pages to be written back, do not always meet the same
other one.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.destination import drop_caches, read_through
from ckptstore.tools.bench.figures.report import Sample, WorkloadOutcome
from ckptstore.tools.bench.measure import Meter
from ckptstore.tools.bench.peers.base import Contender, Settings
from ckptstore.tools.bench.raw import sync

T = TypeVar("T")

Tell = Callable[[str, int], None]
"""Called before each turn with its name, and the total number of turns."""
_SHOWN_CHARACTERS = 500


class TurnFailed(Exception):
    """Some rank failed; the text is the same on all ranks."""


@dataclass(kw_only=True)
class Entrant:
    """One contender, from the choice of its settings to its last turn, and its outcome so far on this rank."""

    outcome: WorkloadOutcome
    contender: Contender | None = None


class Contest:
    """One workload's turns. All ranks make the same calls in the same order."""

    def __init__(self, case: Case, action: str, *, figure: str, tell: Tell) -> None:
        self.case, self.action, self.figure, self.tell = case, action, figure, tell
        self._number = 0
        self._total = 0

    def run(self, kinds: list[type[Contender]], *, repeat: int) -> list[WorkloadOutcome]:
        """Choose each contender's settings, then let all take `repeat` turns."""
        able = [kind for kind in kinds if kind.objection(self.case) is None]
        self._total = sum(len(kind.sweep(self.case, self.action)) * self._tries(kind) + repeat for kind in able)
        entrants = [self.enter(kind) for kind in kinds]
        for number in range(repeat):
            for entrant in Random(number).sample(entrants, len(entrants)):  # the same order on all ranks
                self.take(entrant)
        return [self.leave(entrant) for entrant in entrants]

    def take(self, entrant: Entrant) -> None:
        """Add the sample of one turn, unless it is skipped or has failed. A failure excludes it from further turns."""
        outcome, contender = entrant.outcome, entrant.contender
        if contender is None or outcome.status != "measured":
            return
        try:
            time.sleep(self.case.pause_seconds)
            samples = (*outcome.samples, self.turn(contender))
            facts = {name: statistics.median(values) for name, values in contender.noted.items()}
            entrant.outcome = replace(outcome, samples=samples, facts=facts)
        except TurnFailed as error:
            entrant.outcome = replace(outcome, status="failed", reason=_shown(error), samples=(), facts={})

    def leave(self, entrant: Entrant) -> WorkloadOutcome:
        """Release all that it holds, and return this rank's outcome."""
        if entrant.contender is not None:
            self._quietly(entrant.contender.close)
        return entrant.outcome

    def enter(self, kind: type[Contender]) -> Entrant:
        """Try every setting for a turn, after one more turn if that warms up; keep the fastest."""
        outcome = WorkloadOutcome(name=kind.name, family=kind.family, role=kind.role, status="skipped")
        if objection := _first(self.case.gather(kind.objection(self.case))):
            return Entrant(outcome=replace(outcome, reason=objection.partition(": ")[2]))
        best_seconds, best, reason, sweep = math.inf, None, "it has no settings", []
        for settings in kind.sweep(self.case, self.action):
            try:
                seconds, contender = self._tried(kind, settings)
            except TurnFailed as error:  # the others may work
                reason = _shown(error)
                sweep.append({**settings, "failed": reason})
                continue
            sweep.append({**settings, "seconds": round(seconds, 6)})
            loser: Contender | None = contender
            if seconds < best_seconds:
                best_seconds, best, loser = seconds, contender, best
            if loser is not None:
                self._dismiss(loser)
        outcome = replace(outcome, sweep=tuple(sweep))
        if best is None:
            return Entrant(outcome=replace(outcome, status="failed", reason=reason))
        best.noted.clear()  # only what is timed is reported
        return Entrant(outcome=replace(outcome, status="measured", settings=best.settings), contender=best)

    def _dismiss(self, contender: Contender) -> None:
        """Release its resources and its stored state."""
        self._quietly(contender.close)
        if self.action == "load":
            self._quietly(lambda: contender.discard(self._stored_place(contender)) if self.case.rank == 0 else None)

    def _tries(self, kind: type[Contender]) -> int:
        """Return the number of turns to judge a setting by: the last one counts."""
        return 2 if self.action in kind.warmed else 1

    def _tried(self, kind: type[Contender], settings: Settings) -> tuple[float, Contender]:
        contender = self._together(lambda: kind(self.case, **settings))
        try:
            if self.action == "load":
                self._store(contender)
            for _ in range(self._tries(kind)):
                sample = self.turn(contender)
        except TurnFailed:
            self._dismiss(contender)
            raise
        return max(self.case.gather(getattr(sample, self.figure))), contender

    def _store(self, contender: Contender) -> None:
        """Store the state to be loaded."""
        place = self._stored_place(contender)

        def store() -> None:
            if wait := contender.save(place):
                wait()

        for call in (lambda: contender.prepare(place), store, lambda: contender.after(place)):
            self._together(call)

    def turn(self, contender: Contender) -> Sample:
        """Take one timed turn on all ranks. Raises TurnFailed on all of them when it fails on one."""
        self.tell(contender.name, self._total)
        return self._load(contender) if self.action == "load" else self._save(contender)

    def _save(self, contender: Contender) -> Sample:
        self._number += 1
        above = self.case.uri(f"turn-{self._number}")
        place = contender.at(above)
        try:
            self._together(lambda: contender.prepare(place))
            sample = self.timed(contender, lambda: contender.save(place))
            self._together(lambda: contender.after(place))
        finally:
            self._together(lambda: self._remove(above))
        return sample

    def _load(self, contender: Contender) -> Sample:
        place = self._stored_place(contender)
        for tensor in self.case.local_target.values():
            tensor.zero_()  # else the load of another turn would pass for one that does nothing
        self._together(lambda: self._even_caches(place))
        sample = self.timed(contender, lambda: contender.load(place))
        if wrong := _first(self.case.gather(self._together(contender.wrong))):
            raise TurnFailed(f"what was loaded differs: {wrong}")
        return sample

    def timed(self, contender: Contender, call: Callable[[], Any]) -> Sample:
        """Time one call on all ranks, and the wait for its work."""
        case = self.case
        server = case.bucket or case.place
        is_counted = case.rank == 0 and server.endpoint_url is not None
        before = server.counts() if is_counted else ()
        case.synchronize()
        case.gather(None)

        def measured() -> Meter:
            with Meter() as meter:
                wait = call()
                contender.staged()
                meter.returned()
                if wait is not None:
                    wait()
                case.synchronize()
            return meter

        found = self._together(measured).sample()
        if is_counted:
            counts = (now - then for now, then in zip(server.counts(), before, strict=True))
            found = replace(found, **dict(zip(("requests", "sent_bytes", "received_bytes"), counts, strict=True)))
        if (requests := contender.requests()) is not None:
            found = replace(found, requests=requests)
        return found if contender.role == "ckptstore" else replace(found, retries=None)

    def _together(self, call: Callable[[], T]) -> T:
        """Return the result of a call that all ranks make. Raises TurnFailed on all when it raises on one."""
        result, error = None, None
        try:
            result = call()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as failure:  # torch's CheckpointException is none of Exception
            error = f"{type(failure).__name__}: {failure}"
        if found := _first(self.case.gather(error)):
            raise TurnFailed(found)
        return result  # type: ignore[return-value]

    def _quietly(self, call: Callable[[], None]) -> None:
        """Call on all ranks; show a failure, which says nothing of the turns, without raising it."""
        try:
            self._together(call)
        except TurnFailed as error:
            self.tell(str(error), self._total)

    def _stored_place(self, contender: Contender) -> str:
        settings = "-".join(f"{name}-{value}" for name, value in contender.settings.items())
        name = re.sub(r"\W+", "-", f"{contender.name} {settings}").strip("-").lower()
        return contender.at(self.case.uri(f"kept-{name}"))

    def _remove(self, place: str) -> None:
        if self.case.rank == 0:
            self.case.place.remove(place)
            if self.case.place.is_local:
                sync(self.case.place.path)

    def _even_caches(self, place: str) -> None:
        """Bring all files to be read into the page cache, or none."""
        if self.case.rank == 0 and self.case.place.is_local:
            drop_caches() if self.case.drop_caches else read_through(Path(place))


def _first(errors: Sequence[str | None]) -> str | None:
    """Return the first error, with its rank."""
    return next((f"rank {rank}: {error}" for rank, error in enumerate(errors) if error), None)


def _shown(error: TurnFailed) -> str:
    return str(error)[:_SHOWN_CHARACTERS]
