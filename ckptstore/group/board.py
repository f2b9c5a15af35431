"""A board, where ranks post small pieces of bytes under keys, and the seat that one process has at it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from ckptstore.errors import InvalidInput
from ckptstore.group.base import new_start_token, this_node, this_process
from ckptstore.group.message import Message


class Board(Protocol):
    """Where ranks post. Used from several threads at once. Its errors are CkptstoreErrors."""

    hint: str
    """What to look at when a rank is not heard of."""
    shortest_poll_seconds: float
    longest_poll_seconds: float

    def post(self, key: str, data: bytes) -> bytes | None:
        """Create the key. Returns None when it now holds `data`, else the bytes that were there, unchanged."""

    def fetch(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Those of the keys that are there. Does not wait."""

    def remove(self, keys: Sequence[str]) -> None:
        """Take keys away, soon. Best effort, never raises."""

    def give_sign(self, key: str, *, last: bool = False) -> None:
        """Change what `signs` shows for the key; with `last`, to LEFT."""

    def signs(self, keys: Sequence[str]) -> Mapping[str, Hashable]:
        """What was last shown for each key: any value that a new sign changes, or LEFT. Without those never given."""

    def close(self, *, emptied: bool) -> None:
        """Give back what is held. `emptied` says that no rank uses the board any more. Never raises."""


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
        """A message from this process."""
        return Message(tag=tag, rank=self.rank, world_size=self.world_size, by=self._by, payload=payload, error=error)

    def owe(self, key: str, message: Message) -> None:
        """A message could not be posted: `settle` posts it, before anything else of this rank."""
        with self._lock:
            self._owed[key] = message

    def settle(self) -> None:
        """Post what is owed. Raises what keeps it from being posted."""
        with self._lock:
            owed = dict(self._owed)
        for key, message in owed.items():
            self.post(key, message)
            with self._lock:
                self._owed.pop(key, None)

    def post(self, key: str, message: Message) -> None:
        """Post a message; InvalidInput when another process has posted a different one in its place."""
        there = self.board.post(key, message.encode())
        if there is None:
            return
        other = Message.decode(there)
        whose = f"{other.by} (world size {other.world_size})" if other else "a process that stopped half-way"
        raise InvalidInput(
            f"Two processes take part as rank {self.rank} of the job start {self.start_token!r}: "
            f"{message.by} (world size {self.world_size}) and {whose}",
            ranks=(self.rank,),
            hint="Give a start_token that is new for every start of the job, and each rank to one process; "
            "close a store before opening it again",
        )

    def take(self) -> None:
        """Claim the rank for this process, before its first exchange: a token used twice is found out here."""
        with self._lock:
            if self.is_closed:
                raise InvalidInput("The group is closed: its store was closed before this call")
            if not self.is_taken:
                self.post(self.member_key(self.rank), self.message("member"))
                self.is_taken = True

    @staticmethod
    def member_key(rank: int) -> str:
        """Where a rank is claimed."""
        return f"member.{rank:05d}"


class Seated:
    """What a group says of itself."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    @property
    def rank(self) -> int:
        """See `Group.rank`."""
        return self._seat.rank

    @property
    def world_size(self) -> int:
        """See `Group.world_size`."""
        return self._seat.world_size

    @property
    def node(self) -> str:
        """See `Group.node`."""
        return self._seat.node

    @property
    def start_token(self) -> str:
        """See `Group.start_token`."""
        return self._seat.start_token

    @start_token.setter
    def start_token(self, token: str) -> None:
        self._seat.start_token = token

    @property
    def rank_timeout_seconds(self) -> float:
        """How long a rank may give no sign of life."""
        return self._seat.rank_timeout_seconds
