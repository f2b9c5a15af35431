"""The group whose ranks meet at a board."""

from __future__ import annotations

import logging
import threading

from ckptstore.errors import CkptstoreError
from ckptstore.group.base import LEADER, Join, Work
from ckptstore.group.board import Board, Seat, Seated
from ckptstore.group.lane import Lane

logger = logging.getLogger("ckptstore.group")


class BoardGroup(Seated):
    """See `Group` for what is guaranteed."""

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
        super().__init__(
            Seat(
                board,
                rank=rank,
                world_size=world_size,
                rank_timeout_seconds=rank_timeout_seconds,
                start_token=start_token,
                node=node,
            )
        )
        self._lanes: dict[str, Lane] = {}
        self._lock = threading.Lock()
        self._main = self.lane("")

    def exchange(self, tag: str, work: Work, join: Join) -> bytes:
        """See `Group.exchange`; in the main lane."""
        return self._main.exchange(tag, work, join)

    def lane(self, name: str) -> Lane:
        """See `Group.lane`."""
        with self._lock:
            if name not in self._lanes:
                self._lanes[name] = Lane(self._seat, name, open_lane=self.lane)
            return self._lanes[name]

    def close(self) -> None:
        """See `Group.close`: the leader waits for the others, then clears the board."""
        emptied = False
        try:
            if self._seat.is_taken:
                lanes = list(self._lanes.values())
                for lane in lanes:
                    lane.leave()
                emptied = self.rank == LEADER and self._main.have_all_left()
                if emptied:
                    members = [self._seat.member_key(rank) for rank in range(self.world_size)]
                    self._seat.board.remove([*members, *(key for lane in lanes for key in lane.all_keys())])
        except CkptstoreError as error:
            logger.warning("rank %d could not take leave of its group: %s", self.rank, error)
        self._seat.is_taken, self._seat.is_closed = False, True
        self._seat.board.close(emptied=emptied)
