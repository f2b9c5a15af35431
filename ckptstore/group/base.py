"""The protocol of groups: the ranks of one job, and the one collective through which they agree."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ckptstore.errors import InvalidInput
from ckptstore.group.meeting import Alone, Meeting

LEADER = 0


@runtime_checkable
class Group(Protocol):
    """The ranks of one job, as one of them sees them."""

    @property
    def rank(self) -> int:
        """The number of this process within the group, from 0. Rank 0 is the leader."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def node(self) -> str:
        """The unique name of the host; the same for all ranks on it."""

    @property
    def start_token(self) -> str:
        """A token that is equal on all ranks and new for every start of the job."""

    def meeting(self, tag: str, *, step: int | None = None) -> AbstractContextManager[Meeting, None]:
        """Meet all ranks, which call this in the same order, each with the same `tag`. The one collective.

        Inside, a rank contributes a value with `gather`, and receives the leader's result with `tell`; without these
        calls, value and result are None. If the block of any rank raises before `tell` has ended, every rank raises an
        error of the same class: that of the lowest rank that failed; its `rank` and `ranks` name the failed ranks. An
        error that is not a CkptstoreError becomes a RankFailed on all ranks, with the original as its cause on the rank
        where it happened.

        The leader sets `committed` of an error: False if its `work` did not run, else as `work` raised it. It is None
        on a rank that did not receive the leader's result, for any reason: the effect of `work` is unknown there.

        Raises RankTimeout if a rank gives no sign of life for `rank_timeout_seconds`. Signs go out with each call of
        `runtime.beat.beat` inside, and by themselves until there was no such call for `rank_timeout_seconds`: one step
        without a beat may take that long, and a hanging rank is detected after twice that time. A process that ended or
        was stopped is detected after once that time.

        Raises InvalidInput if the ranks make different calls. A rank that did not receive the leader's result meets the
        others again with its next call; calls that the others began without it fail on them, with an error that names
        it.

        Ranks whose calls have failed and are for different steps meet again by `step`, the step of a call: calls for
        lower steps fail, with RankFailed, until all ranks are at the same step.
        """

    def lane(self, name: str) -> Group:
        """Return the same ranks with a separate order of meetings, under a name that they all know.

        Meetings in one lane neither wait for those in another nor are mistaken for them. A rank is in one lane at a
        time, besides the main one and `DRAIN_LANE`. Each rank closes a lane that it no longer needs; the messages are
        removed once all ranks have. A lane that stays open is closed with its group.
        """

    def close(self) -> None:
        """Leave the group. All ranks call it. It never raises, and waits for the others for a few seconds at most."""


class SoloGroup:
    """A `Group` of one process: rank 0 of 1. Errors are raised as they are."""

    rank = LEADER
    world_size = 1

    def __init__(self, *, start_token: str | None = None, node: str | None = None) -> None:
        self.start_token = start_token or new_start_token()
        self.node = node or this_node()

    def meeting(self, tag: str, *, step: int | None = None) -> AbstractContextManager[Meeting, None]:
        return nullcontext(Alone())

    def lane(self, name: str) -> SoloGroup:
        """Return the group itself: one rank needs no separate order."""
        return self

    def close(self) -> None:
        """Do nothing: the group holds no resources."""


class GroupOfParent:
    """A stand-in for the group in a forked child, which is not a rank: any use raises InvalidInput."""

    def __init__(self, group: Group) -> None:
        self._group = group  # kept alive: its end would wait for threads that do not exist in the child

    def __getattr__(self, name: str) -> Any:
        raise InvalidInput(
            f"Process {os.getpid()} is a fork of rank {self._group.rank} of a job, and no rank itself",
            hint="Save and resume in the process that opened the store, or open it again here",
        )

    def close(self) -> None:
        """Do nothing: the parent leaves the group, not its child."""


def new_start_token() -> str:
    """Return a token that no other start of any job has."""
    return secrets.token_hex(8)


def this_node() -> str:
    """Return the host name with a short hash of its present boot, so that hosts with equal names differ."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    host = socket.gethostname() or "unknown"
    return f"{host}-{hashlib.sha256(f'{host}/{boot}'.encode()).hexdigest()[:8]}"


def this_process(node: str) -> str:
    """Return a readable, unique description of this process."""
    return f"process {os.getpid()} on {node} [{secrets.token_hex(4)}]"
