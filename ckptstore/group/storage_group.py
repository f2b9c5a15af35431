"""The group of ranks that have nothing in common but the store."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckptstore.errors import InvalidInput
from ckptstore.storage.base import Storage

if TYPE_CHECKING:
    from ckptstore.group.board_group import BoardGroup

_TOKEN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
MOST_RANKS = 128
"""The most ranks that may meet. The leader reads each answer with a separate request."""
_met: Counter[tuple[str, str, int]] = Counter()
"""The number of groups in which this process has met the others, by storage, start token and rank: the same on all
ranks. A group without a meeting is not counted, for one rank alone may open a store to look something up."""


@dataclass(frozen=True, slots=True)
class StorageGroup:
    """Ranks that reach each other only through the store: pass it to `open_store(group=...)` on every rank.

    `start_token` is the same on all ranks and new for every start of the job, such as a scheduler's job id with its
    restart count. It has 1 to 64 letters, digits, "_", "-" or ".", and does not begin with ".". `node` names the host;
    None finds the name out.
    """

    rank: int
    world_size: int
    start_token: str
    node: str | None = None

    def __post_init__(self) -> None:
        if type(self.world_size) is not int or self.world_size < 1:
            raise InvalidInput(f"world_size is {self.world_size!r}, it must be an integer above 0")
        if self.world_size > MOST_RANKS:
            raise InvalidInput(
                f"world_size is {self.world_size}, and at most {MOST_RANKS} ranks meet through the store alone",
                hint="Call torch.distributed.init_process_group (gloo or NCCL) first, and give no group",
            )
        if type(self.rank) is not int or not 0 <= self.rank < self.world_size:
            raise InvalidInput(f"rank is {self.rank!r}, it must be an integer from 0 to {self.world_size - 1}")
        if type(self.start_token) is not str or not _TOKEN.fullmatch(self.start_token):
            raise InvalidInput(
                f"start_token is {self.start_token!r}, it must be 1 to 64 letters, digits, '_', '-' or '.', the "
                "first no '.'"
            )

    def open(self, storage: Storage, *, rank_timeout_seconds: float) -> BoardGroup:
        """Return the group, open in this storage. It reads and writes nothing before its first meeting."""
        from ckptstore.group.board_group import BoardGroup
        from ckptstore.group.storage_board import StorageBoard

        board = StorageBoard(
            storage,
            start_token=self.start_token,
            world_size=self.world_size,
            number=partial(_counted, (storage.uri, self.start_token, self.rank)),
        )
        return BoardGroup(
            board,
            rank=self.rank,
            world_size=self.world_size,
            rank_timeout_seconds=rank_timeout_seconds,
            start_token=self.start_token,
            node=self.node,
        )


def _counted(rank: tuple[str, str, int]) -> int:
    _met[rank] += 1
    return _met[rank]
