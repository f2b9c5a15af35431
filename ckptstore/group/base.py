"""What a group is: the ranks of one job, and the one collective through which they agree."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Sequence
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
        """This process, counted from 0 within the group. Rank 0 is the leader."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    @property
    def node(self) -> str:
        """The host, told apart from every other one; the same for all ranks on it."""

    @property
    def start_token(self) -> str:
        """Equal on all ranks, new for every start of the job."""

    def meeting(self, tag: str, *, step: int | None = None) -> AbstractContextManager[Meeting, None]:
        """Meet all ranks, which call this in the same order, each with the same `tag`. The one collective.

        Inside, a rank brings a value with `gather`, and hears the leader with `tell`; where it calls neither it brings
        None, and the leader answers None at the end. If the block of any rank raises before `tell` has ended, every
        rank raises an error of the same class: that of the lowest rank that failed; its `rank` and `ranks` say who did.
        An error that is not a CkptstoreError is a RankFailed everywhere, and the cause of it where it happened.

        `committed` of an error is what the leader says: False when its `work` did not run, else what `work` raised. It
        is None on a rank that did not hear the leader, whatever kept it from that: what `work` did is unknown there.

        Raises RankTimeout when a rank gives no sign of life for `rank_timeout_seconds`. Signs go out with each call of
        `runtime.beat.beat` inside, and by themselves until none has come for `rank_timeout_seconds`: one step without
        a beat may take that long, and a rank that hangs is found out after twice that time. A process that ended or was
        stopped is found out after once that time.

        Raises InvalidInput when the ranks do not call the same thing. A rank that did not hear the leader meets the
        others again with its next call; what the others began without it fails on them, and names it.

        Ranks whose calls have failed and are for different steps meet again by `step`, the step that a call is for:
        calls for lower steps fail, with RankFailed, until all ranks are at the same one.
        """

    def lane(self, name: str) -> Group:
        """The same ranks with an order of calls of its own, under a name that they all know.

        Calls in one lane neither wait for those in another nor are mistaken for them. A rank is in one lane at a time
        besides the main one and `DRAIN_LANE`. Each rank closes it when it needs it no more; what is posted there is
        taken away once all have. One that stays open is closed with its group.
        """

    def close(self) -> None:
        """Leave. All ranks call it; it never raises, and waits for the others a few seconds at most."""


class SoloGroup:
    """A process alone: rank 0 of 1. Errors are raised as they are."""

    rank = LEADER
    world_size = 1

    def __init__(self, *, start_token: str | None = None, node: str | None = None) -> None:
        self.start_token = start_token or new_start_token()
        self.node = node or this_node()

    def meeting(self, tag: str, *, step: int | None = None) -> AbstractContextManager[Meeting, None]:
        """See `Group.meeting`."""
        return nullcontext(Alone())

    def lane(self, name: str) -> SoloGroup:
        """The group itself: there is nobody to keep an order with."""
        return self

    def close(self) -> None:
        """Nothing is held."""


class GroupOfParent:
    """In a forked child in the place of the group: the ranks are processes, and the child is none of them."""

    def __init__(self, group: Group) -> None:
        self._group = group  # kept: what ends with it waits for threads that are not here

    def __getattr__(self, name: str) -> Any:
        raise InvalidInput(
            f"Process {os.getpid()} is a fork of rank {self._group.rank} of a job, and no rank itself",
            hint="Save and resume in the process that opened the store, or open it again here",
        )

    def close(self) -> None:
        """The parent leaves, not its child."""


def new_start_token() -> str:
    """A token that no other start of any job has."""
    return secrets.token_hex(8)


def this_node() -> str:
    """The readable host name and a short mark of this boot of it, so that hosts of one name differ."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    host = socket.gethostname() or "unknown"
    return f"{host}-{hashlib.sha256(f'{host}/{boot}'.encode()).hexdigest()[:8]}"


def this_process(node: str) -> str:
    """Words and a random mark that tell this holder of a rank from any other one."""
    return f"process {os.getpid()} on {node} [{secrets.token_hex(4)}]"


def spoken(ranks: Sequence[int]) -> str:
    """Ranks for a message: "rank 3", "ranks 3 and 5", "ranks 0-7, 9 and 12-1023"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(parts) > 20:
        parts = [*parts[:20], f"{len(parts) - 20} more"]
    text = " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]
    return f"rank {text}" if len(set(ranks)) == 1 else f"ranks {text}"
