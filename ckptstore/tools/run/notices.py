"""What the agent tells: events of its own, beside those of the store."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from ckptstore.events import Event
from ckptstore.runtime.shown import show_seconds, show_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStarted(Event):
    """The agent has started the trainer."""

    pid: int
    command: tuple[str, ...]

    def line(self) -> str:
        return f"started {self.command[0]}, process {self.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerEnded(Event):
    """The trainer has ended."""

    code: int
    """As shells have it: 128 + N after signal N."""
    seconds: float

    def line(self) -> str:
        return f"the trainer ended with exit code {self.code} after {show_seconds(self.seconds)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderWatched(Event):
    """The agent looks into a folder from now on; somebody else starts the trainer."""

    folder: str

    def line(self) -> str:
        return f"watching {self.folder}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalHandedOn(Event):
    """A signal came to the agent, and was given to the trainer."""

    name: str

    def line(self) -> str:
        return f"{self.name} goes to the trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsPassedOver(Event):
    """Finished checkpoints in the folder are not committed, and will not be."""

    level: ClassVar[int] = logging.WARNING
    steps: tuple[int, ...]
    names: tuple[str, ...]
    reason: str

    def line(self) -> str:
        return f"not committed: {', '.join(self.names)}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OlderFound(Event):
    """At its start the agent finds checkpoints in the folder that are older than what the store has."""

    steps: tuple[int, ...]
    names: tuple[str, ...]
    latest_step: int

    def line(self) -> str:
        return f"the store has the newer step {self.latest_step}, so these are left alone: {', '.join(self.names)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitsStopped(Event):
    """The agent commits nothing more. The training goes on."""

    level: ClassVar[int] = logging.ERROR
    reason: str

    def line(self) -> str:
        return f"NOTHING MORE IS COMMITTED, and the training goes on: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitsDelayed(Event):
    """A commit failed; it is tried again."""

    level: ClassVar[int] = logging.WARNING
    wait_seconds: float
    error: str

    def line(self) -> str:
        return f"tried again in {show_seconds(self.wait_seconds)}, the training goes on: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderAhead(Event):
    """The folder has finished checkpoints that are not in the store yet, and more than the one that comes next, or the
    last try has failed. Told when there is a newer one."""

    steps: tuple[int, ...]
    names: tuple[str, ...]
    not_durable_seconds: float
    """How long the first of them has waited."""

    def line(self) -> str:
        waited = show_seconds(self.not_durable_seconds)
        return f"in the folder, and not in the store yet: {', '.join(self.names)}, the first for {waited}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsLeft(Event):
    """The agent ends, and these finished checkpoints of the folder are not in the store."""

    level: ClassVar[int] = logging.ERROR
    steps: tuple[int, ...]
    names: tuple[str, ...]
    reason: str

    def line(self) -> str:
        return f"not committed: {', '.join(self.names)}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedLeft(Event):
    """The agent ends, and these are in the folder without being finished."""

    level: ClassVar[int] = logging.WARNING
    names: tuple[str, ...]
    reasons: tuple[str, ...]

    def line(self) -> str:
        pairs = zip(self.names, self.reasons, strict=True)
        return f"not committed, since not finished: {'; '.join(f'{name}: {reason}' for name, reason in pairs)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDeleted(Event):
    """A checkpoint that is committed was deleted from the folder."""

    step: int
    name: str

    def line(self) -> str:
        return f"{self.name} is deleted from the folder; step {self.step} is in the store"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderNotice(Event):
    """Something about the folder that its owner should know: what fits no shape, what cannot be deleted, a wait."""

    level: ClassVar[int] = logging.WARNING
    text: str

    def line(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRestored(Event):
    """What became of the restore before the trainer was started."""

    step: int
    name: str
    is_restored: bool
    why_not: str | None
    fetched_bytes: int
    kept_bytes: int
    moved_aside: tuple[str, ...]
    skipped: tuple[str, ...]
    best: str | None

    def line(self) -> str:
        if not self.is_restored:
            return f"step {self.step} is not restored: {self.why_not}"
        text = f"step {self.step} is restored as {self.name}: {show_size(self.fetched_bytes)} fetched"
        if self.best is not None:
            text += f", and {self.best}, the best"
        if self.moved_aside:
            text += f"; moved aside: {', '.join(self.moved_aside)}"
        return text + "".join(f"; passed over: {why}" for why in self.skipped)
