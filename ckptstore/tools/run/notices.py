"""Define the events of the agent."""

from __future__ import annotations

import logging

from ckptstore.events import Event
from ckptstore.events.listeners import event
from ckptstore.runtime.shown import show_seconds, show_size

_SHOWN = 5


@event()
class TrainerStarted(Event):
    """The agent has started the trainer."""

    pid: int
    command: tuple[str, ...]

    def line(self) -> str:
        return f"started {self.command[0]}, process {self.pid}"


@event()
class TrainerEnded(Event):
    """The trainer has ended."""

    code: int
    """As shells have it: 128 + N after signal N."""
    seconds: float

    def line(self) -> str:
        return f"the trainer ended with exit code {self.code} after {show_seconds(self.seconds)}"


@event()
class CommandEnded(Event):
    """The command that `ckptstore follow` runs for each checkpoint has ended for one."""

    step: int
    number: int | None
    code: int
    """As shells have it: 128 + N after signal N."""
    seconds: float

    def line(self) -> str:
        return f"step {self.step}: exit code {self.code} after {show_seconds(self.seconds)}"


@event(line="watching {folder}")
class FolderWatched(Event):
    """The agent looks into a folder from now on; somebody else starts the trainer."""

    folder: str


@event(line="{name} is taken for a checkpoint of the shape {shape}: {rule}")
class ShapeFound(Event):
    """The folder has a first checkpoint of a shape. Those that follow are taken in the same way."""

    name: str
    shape: str
    step: int | None
    rule: str


@event()
class RunSummary(Event):
    """The agent ends: what has become of everything that it saw in the folder."""

    committed: int
    passed_over: dict[str, str]
    """The names that were passed over, with the reasons."""
    left: tuple[str, ...]
    """The names of finished ones that are not in the store."""
    unfinished: tuple[str, ...]

    def line(self) -> str:
        counts = (("passed over", self.passed_over), ("left", self.left), ("unfinished", self.unfinished))
        named = "".join(f"; {len(names)} {what}: {_some(tuple(names))}" for what, names in counts if names)
        return f"{self.committed} committed{named}"


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


@event(line="{name} goes to the trainer")
class SignalHandedOn(Event):
    """A signal came to the agent, which sends it on to the trainer."""

    name: str


@event(level=logging.WARNING)
class CheckpointsPassedOver(Event):
    """Finished checkpoints in the folder are not committed, and will not be."""

    steps: tuple[int, ...]
    names: tuple[str, ...]
    reason: str

    def line(self) -> str:
        return f"not committed: {', '.join(self.names)}: {self.reason}"


@event()
class OlderFound(Event):
    """At its start the agent finds checkpoints in the folder that are older than what the store has."""

    steps: tuple[int, ...]
    names: tuple[str, ...]
    latest_step: int

    def line(self) -> str:
        return f"the store has the newer step {self.latest_step}, so these are left alone: {', '.join(self.names)}"


@event(level=logging.ERROR, line="NOTHING MORE IS COMMITTED, and the training goes on: {reason}")
class CommitsStopped(Event):
    """The agent commits nothing more. The training goes on."""

    reason: str


@event(level=logging.WARNING)
class CommitsDelayed(Event):
    """A commit failed; it is tried again."""

    wait_seconds: float
    error: str

    def line(self) -> str:
        return f"tried again in {show_seconds(self.wait_seconds)}, the training goes on: {self.error}"


@event()
class FolderAhead(Event):
    """The folder has finished checkpoints that are not in the store yet, and more than the one that comes next, or the
    last try has failed. Repeated when there is a newer one."""

    steps: tuple[int, ...]
    names: tuple[str, ...]
    not_durable_seconds: float
    """The time that the first of them has waited."""

    def line(self) -> str:
        waited = show_seconds(self.not_durable_seconds)
        return f"in the folder, and not in the store yet: {', '.join(self.names)}, the first for {waited}"


@event(level=logging.ERROR)
class CheckpointsLeft(Event):
    """The agent ends, and these finished checkpoints of the folder are not in the store."""

    steps: tuple[int, ...]
    names: tuple[str, ...]
    reason: str

    def line(self) -> str:
        return f"not committed: {', '.join(self.names)}: {self.reason}"


@event(level=logging.WARNING)
class UnfinishedLeft(Event):
    """The agent ends, and these are in the folder without being finished."""

    names: tuple[str, ...]
    reasons: tuple[str, ...]

    def line(self) -> str:
        pairs = zip(self.names, self.reasons, strict=True)
        return f"not committed, since not finished: {'; '.join(f'{name}: {reason}' for name, reason in pairs)}"


@event(line="{name} is deleted from the folder; step {step} is in the store")
class LocalDeleted(Event):
    """A checkpoint that is committed was deleted from the folder."""

    step: int
    name: str


@event(level=logging.WARNING, line="{text}")
class FolderNotice(Event):
    """Something about the folder that its owner should know: what fits no shape, what cannot be deleted, a wait."""

    text: str


@event()
class FolderRestored(Event):
    """The restore before the start of the trainer has ended, well or not."""

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
            text += f", and {self.best} with it"
        if self.moved_aside:
            text += f"; moved aside: {', '.join(self.moved_aside)}"
        return text + "".join(f"; passed over: {why}" for why in self.skipped)
