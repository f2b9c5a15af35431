"""Decide which candidates are finished: a state machine over looks. Pure.

A candidate is finished when its shape says that nothing is missing, no process has a file of it open for writing, and
it looks as it did at the look before. Where the shape does not tell the end, it must have stayed so for the quiet
time, and its job must have lived on meanwhile: what a job left behind when it died may be half of something. A job of
one process has finished what it wrote before it began the next one. What is finished stays so until it changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ckptstore.tools.run.folders.candidate import Prospect, fingerprint
from ckptstore.tools.run.folders.snapshot import Sign


@dataclass(slots=True)
class _Seen:
    files: Mapping[str, Sign]
    since_seconds: float
    is_left_over: bool
    """Its job ended before it was known to be finished."""
    was_finished: bool = False


@dataclass(slots=True)
class Verdicts:
    """The results of a look."""

    finished: list[Prospect] = field(default_factory=list)
    unfinished: dict[str, str] = field(default_factory=dict)
    """Why each of the others is not finished."""
    uncertain: list[Prospect] = field(default_factory=list)
    """Those of them that lack nothing, stand still and are not open, but nothing on this node shows their end."""
    settling: set[str] = field(default_factory=set)
    """Names of those that need nothing but time."""


class Finisher:
    """Remembers what the last look saw."""

    def __init__(self, quiet_seconds: float, known: Mapping[str, str] | None = None) -> None:
        """`known` has the fingerprints of what was finished before this process began, None when nobody knows."""
        self._quiet_seconds = quiet_seconds
        self._known = known
        self._seen: dict[str, _Seen] = {}
        self._is_first = True

    def learn(self, candidate: Prospect) -> None:
        """Count a candidate as finished before this process began: it comes from the store."""
        if self._known is not None:
            self._known = {**self._known, candidate.name: fingerprint(candidate)}

    def judge(
        self,
        candidates: Iterable[Prospect],
        *,
        open_files: Collection[str],
        unseen: Collection[str] = (),
        job_lives: bool,
        now_seconds: float,
        ended_well: bool = False,
        began_after: bool = True,
        is_one_process: bool = False,
    ) -> Verdicts:
        """Judge all candidates of a look. Of the files that are `unseen` nobody can tell whether they are open: as long
        as somebody may write to them, time decides. A job that `ended_well` left nothing half-written. One that
        `began_after` the first look did not write what was there then. A job that `is_one_process` writes one after the
        other."""
        verdicts, candidates = Verdicts(), list(candidates)
        first_written = {it.name: min((sign.mtime_ns for sign in it.files.values()), default=0) for it in candidates}
        seen: dict[str, _Seen] = {}
        may_be_left_over = began_after and self._is_first and self._known is not None
        for candidate in candidates:
            before = self._seen.get(candidate.name)
            if before is None or dict(before.files) != dict(candidate.files):
                is_left_over = may_be_left_over and not self._is_known(candidate)
                now = _Seen(candidate.files, now_seconds, is_left_over=is_left_over)
                why = "it is seen for the first time" if before is None else "it has changed since the last look"
            else:
                now, why = before, ""
            seen[candidate.name] = now
            is_settling = bool(why) and not candidate.lacks
            why = self._open(candidate, open_files) or candidate.lacks or why
            is_left_whole = ended_well and not now.is_left_over
            may_be_written = job_lives and not now.is_left_over and _any_file(candidate, unseen)
            is_certain = candidate.is_certain and not may_be_written
            if not (why or is_certain or now.was_finished or is_left_whole or self._is_known(candidate)):
                may_be_followed = is_one_process and not now.is_left_over and not may_be_written
                why = self._uncertain(now, now_seconds, job_lives)
                if why and may_be_followed and _is_followed(candidate, candidates, first_written):
                    why = ""
                if why:
                    verdicts.uncertain.append(candidate)
                    is_settling = job_lives and not now.is_left_over
            if is_settling or (why and self._open(candidate, open_files)):
                verdicts.settling.add(candidate.name)
            now.is_left_over = now.is_left_over or bool(why and not job_lives and not ended_well)
            now.was_finished = not why
            if why:
                verdicts.unfinished[candidate.name] = why
            else:
                verdicts.finished.append(candidate)
        self._seen, self._is_first = seen, False
        return verdicts

    def _is_known(self, candidate: Prospect) -> bool:
        return self._known is not None and self._known.get(candidate.name) == fingerprint(candidate)

    @staticmethod
    def _open(candidate: Prospect, open_files: Collection[str]) -> str:
        opened = _any_file(candidate, open_files)
        return f"{opened} is open for writing" if opened else ""

    def _uncertain(self, seen: _Seen, now_seconds: float, job_lives: bool) -> str:
        if seen.is_left_over:
            return "a job that has ended left it, and nothing in it tells whether it is whole"
        if not job_lives:
            return "its job ended before it had been quiet for long enough, and nothing in it tells whether it is whole"
        quiet_seconds = now_seconds - seen.since_seconds
        if quiet_seconds >= self._quiet_seconds:
            return ""
        return f"it has been quiet for {quiet_seconds:.0f} of {self._quiet_seconds:.0f} seconds"


def _any_file(candidate: Prospect, paths: Collection[str]) -> str:
    """Return a file of it that is among these paths, "" without one."""
    return min((file for file in candidate.files if candidate.path_of(file) in paths), default="")


def _is_followed(candidate: Prospect, others: Iterable[Prospect], first_written: Mapping[str, int]) -> bool:
    """Return True if all of it was written before another one of its kind was begun."""
    return any(
        (other.shape, other.parent) == (candidate.shape, candidate.parent)
        and first_written[other.name] > candidate.written_at_ns
        for other in others
    )
