"""The group whose ranks meet at a board."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from contextlib import AbstractContextManager

from ckptstore.errors import CkptstoreError
from ckptstore.group.base import LEADER, Group
from ckptstore.group.board import Seat, Seated
from ckptstore.group.follower import FollowerLane
from ckptstore.group.lane import Lane
from ckptstore.group.leader import LeaderLane
from ckptstore.group.meeting import Meeting

logger = logging.getLogger("ckptstore.group")


class BoardGroup(Seated):
    """See `Group` for what is guaranteed, and `Lanes`."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._lanes: dict[str, Lane] = {}
        """The open lanes by name, without the main one. A name means the same lane until it is closed."""
        self._closed: dict[str, Lane] = {}
        """Leader: the lanes that it has closed and other ranks perhaps have not."""
        self._lock = threading.Lock()
        self._main = self._new_lane("")
        self._givers: dict[str, Lane] = {}
        """A lane for each key of signs of life, without the main lane: many lanes share one key."""

    def meeting(self, tag: str, *, step: int | None = None) -> AbstractContextManager[Meeting, None]:
        """See `Group.meeting`; in the main lane."""
        return self._main.meeting(tag, step=step)

    def lane(self, name: str) -> Group:
        with self._lock:
            if name not in self._lanes:
                self._lanes[name] = self._new_lane(name)
            lane = self._lanes[name]
            self._givers[lane.life_key] = lane
            return lane

    def _new_lane(self, name: str) -> Lane:
        kind = LeaderLane if self.rank == LEADER else FollowerLane
        return kind(self._seat, name, self)

    def open_names(self) -> list[str]:
        with self._lock:
            return sorted(self._lanes)

    def close_lane(self, name: str) -> None:
        with self._lock:
            lane = self._lanes.pop(name, None)
            if lane is not None and self.rank == LEADER:
                self._closed[name] = lane

    def clear_lanes(self, open_names: Collection[str]) -> None:
        with self._lock:
            done = [self._closed.pop(name) for name in sorted(self._closed.keys() - open_names)]
        self._seat.board.remove([key for lane in done for key in lane.call_keys()])

    def close(self) -> None:
        """See `Group.close`: the leader waits for the others, then clears the board."""
        emptied = False
        try:
            if self._seat.is_taken:
                self._seat.settle()
                # The main lane last: by its signs the leader sees that all ranks have left, and clears the board.
                lanes = [*self._givers.values(), self._main]
                for lane in lanes:
                    lane.leave()
                emptied = self.rank == LEADER and self._main.have_all_left()
                if emptied:
                    members = [self._seat.member_key(rank) for rank in range(self.world_size)]
                    life = [key for lane in lanes for key in lane.life_keys()]
                    posted = [self._main, *self._closed.values(), *self._lanes.values()]
                    calls = [key for lane in posted for key in lane.call_keys()]
                    self._seat.board.remove([*members, *life, *calls])
        except CkptstoreError as error:
            logger.warning("rank %d could not take leave of its group: %s", self.rank, error)
        self._seat.is_taken, self._seat.is_closed = False, True
        self._seat.board.close(emptied=emptied)
