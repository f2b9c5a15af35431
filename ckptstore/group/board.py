"""The board, where ranks post small messages under keys, and the seat of one process at it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from ckptstore.errors import InvalidInput
from ckptstore.group.base import new_start_token, this_node, this_process
from ckptstore.group.message import Message


class Board(Protocol):
    """A place where ranks post messages. Safe for threads. Its errors are CkptstoreErrors."""

    hint: str
    """The advice for the case that a rank gives no sign of life."""
    shortest_poll_seconds: float
    longest_poll_seconds: float

    def post(self, key: str, data: bytes) -> bytes | None:
        """Create the key. Return None if it now holds `data`, else its existing bytes, which stay."""

    def fetch(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the existing ones of the keys, with their bytes. Does not wait."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove keys soon. Best effort, never raises."""

    def give_sign(self, key: str, *, last: bool = False) -> None:
        """Change the value that `signs` returns for the key; with `last`, to LEFT."""

    def signs(self, keys: Sequence[str]) -> Mapping[str, Hashable]:
        """Return the last sign for each key: a value that changes with each new sign, or LEFT. Keys without a sign are
        left out."""

    def close(self, *, emptied: bool) -> None:
        """Release all resources. `emptied` says that no rank uses the board any more. Never raises."""


class Seat:
    """One process as one rank at a board."""

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        world_size: int,
        rank_timeout_seconds: float,
        start_token: str | None = None,
        node: str | None = None,
    ) -> None:
        """`rank_timeout_seconds` is the longest time that a rank may give no sign of life."""
        self.board = board
        self.rank = rank
        self.world_size = world_size
        self.rank_timeout_seconds = rank_timeout_seconds
        self.start_token = start_token or new_start_token()
        self.node = node or this_node()
        self.is_taken = False
        self.is_closed = False
        self._by = this_process(self.node)
        self._lock = threading.Lock()
        self._owed: dict[str, Message] = {}

    def message(self, tag: str, payload: bytes = b"", *, error: Mapping[str, Any] | None = None) -> Message:
        """Make a message from this process."""
        return Message(tag=tag, rank=self.rank, world_size=self.world_size, by=self._by, payload=payload, error=error)

    def owe(self, key: str, message: Message) -> None:
        """Keep a message that could not be posted, for `settle` to post it before anything else of this rank."""
        with self._lock:
            self._owed[key] = message

    def settle(self) -> None:
        """Post the messages that are owed. Raises as `post` does."""
        with self._lock:
            owed = dict(self._owed)
        for key, message in owed.items():
            self.post(key, message)
            with self._lock:
                self._owed.pop(key, None)

    def post(self, key: str, message: Message) -> None:
        """Post a message. Raises InvalidInput if another process has posted a different one under its key."""
        there = self.board.post(key, message.encode())
        if there is None:
            return
        other = Message.decode(there)
        whose = f"{other.by} (world size {other.world_size})" if other else "a process that stopped half-way"
        raise InvalidInput(
            f"Two processes take part as rank {self.rank} of the job start {self.start_token!r}: "
            f"{message.by} (world size {self.world_size}) and {whose}",
            ranks=(self.rank,),
            hint="Give a start_token that is new for every start of the job, and each rank to one process",
        )

    def take(self) -> None:
        """Claim the rank for this process before its first meeting. Raises InvalidInput if another process has it, so a
        start token that is used twice is detected, or if the group is closed."""
        with self._lock:
            if self.is_closed:
                raise InvalidInput("The group is closed: its store was closed before this call")
            if not self.is_taken:
                self.post(self.member_key(self.rank), self.message("member"))
                self.is_taken = True

    @staticmethod
    def member_key(rank: int) -> str:
        """Return the key by which a rank is claimed."""
        return f"member.{rank:05d}"


class Seated:
    """The properties of a group, taken from its seat. See `Group`."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self.rank, self.world_size, self.node = seat.rank, seat.world_size, seat.node
        self.rank_timeout_seconds = seat.rank_timeout_seconds

    @property
    def start_token(self) -> str:
        """See `Group.start_token`. A rank of torch.distributed hears it from its leader when the group is open."""
        return self._seat.start_token

    @start_token.setter
    def start_token(self, token: str) -> None:
        self._seat.start_token = token
