"""A tree of two levels, through which the answers of many ranks reach the leader in few reads.

Ranks are divided into blocks of `fan_in`. The first rank of a block (rank 1 in that of the leader) is its head. The
head reads the answers of its block once, and posts them together as a bundle. The leader reads the bundles.

A bundle is a copy, and nobody depends on one. The answers stay where they are, and the leader watches every rank. Where
a bundle does not come (the head is dead, or slow, or one rank of its block is) the leader reads the answers themselves.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ckptstore.errors import CkptstoreError, StorageUnavailable
from ckptstore.group.board import Board
from ckptstore.group.message import Message

logger = logging.getLogger("ckptstore.group")

_PATIENCE_SECONDS = 1.0
"""For how long the leader leaves answers to the bundles, since the last one that came."""

Fetch = Callable[[Sequence[str]], dict[str, bytes]]


def pack(answers: Mapping[str, bytes]) -> bytes:
    """The payload of a bundle."""
    sizes = [[key, len(data)] for key, data in answers.items()]
    return json.dumps(sizes).encode() + b"\n" + b"".join(answers.values())


def unpack(payload: bytes) -> dict[str, bytes]:
    """What `pack` was given. ValueError for anything else."""
    line, newline, rest = payload.partition(b"\n")
    answers: dict[str, bytes] = {}
    begin = 0
    try:
        for key, size in json.loads(line):
            answers[str(key)] = rest[begin : begin + size]
            begin += size
    except (TypeError, RecursionError) as error:
        raise ValueError("no bundle") from error
    if not newline or begin != len(rest):
        raise ValueError("no bundle")
    return answers


class Head:
    """The head of a block, while it waits for the result."""

    def __init__(
        self, board: Board, keys: Iterable[str], bundle_key: str, *, message: Callable[[bytes], Message]
    ) -> None:
        """`keys` are those of the answers of its block; `message` makes one of a payload."""
        self._board = board
        self._missing = list(keys)
        self._found: dict[str, bytes] = {}
        self._bundle_key = bundle_key
        self._message = message
        self._is_done = False

    def fetch(self, keys: Sequence[str]) -> dict[str, bytes]:
        """As `Board.fetch`. Where none of the keys is there yet, it goes on with the bundle."""
        found = self._board.fetch(keys)
        if not found and not self._is_done:
            self._gather()
        return found

    def _gather(self) -> None:
        """One try of each request: the result must not be heard late because a bundle is retried."""
        board = self._board.hasty()
        try:
            if self._missing:
                posted = board.fetch(self._missing)
                self._found |= {key: data for key, data in posted.items() if Message.decode(data) is not None}
                self._missing = [key for key in self._missing if key not in self._found]
            if not self._missing:
                board.post(self._bundle_key, self._message(pack(self._found)).encode())
                self._end()
        except StorageUnavailable as error:
            logger.debug("%s is tried again: %s", self._bundle_key, error)
        except CkptstoreError as error:
            logger.warning("%s is not posted, the leader reads these answers itself: %s", self._bundle_key, error)
            self._end()

    def _end(self) -> None:
        self._is_done = True
        self._found.clear()


class Bundles:
    """The leader's view of the answers to one exchange."""

    def __init__(self, board: Board, answers_of: Mapping[str, Iterable[str]]) -> None:
        """`answers_of` has the keys of the answers by the key of the bundle that should hold them."""
        self._board = board
        self._unread = {bundle: frozenset(keys) for bundle, keys in answers_of.items()}
        self._look_around_at = time.monotonic() + _PATIENCE_SECONDS

    def fetch(self, keys: Sequence[str]) -> dict[str, bytes]:
        """As `Board.fetch`, by way of the bundles. Answers that no bundle brings are found some seconds later."""
        wanted = set(keys)
        self._unread = {bundle: held for bundle, held in self._unread.items() if held & wanted}
        found = self._in_bundles(wanted)
        is_late = time.monotonic() >= self._look_around_at
        awaited = frozenset[str]() if is_late else frozenset[str]().union(*self._unread.values())
        if left := [key for key in keys if key not in found and key not in awaited]:
            began_at = time.monotonic()
            found |= self._board.fetch(left)
            if is_late:  # looking everywhere takes a tenth of the time at most
                now = time.monotonic()
                self._look_around_at = now + max(_PATIENCE_SECONDS, 10 * (now - began_at))
        return found

    def _in_bundles(self, wanted: set[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        if not self._unread:
            return found
        for bundle, data in self._board.fetch(list(self._unread)).items():
            message = Message.decode(data)
            if message is None:
                continue  # seen half-written, or damaged: the answers are still there
            try:
                answers = unpack(message.payload)
            except ValueError:
                answers = {}
            found |= {key: answer for key, answer in answers.items() if key in wanted}
            del self._unread[bundle]
            self._look_around_at = max(self._look_around_at, time.monotonic() + _PATIENCE_SECONDS)
        return found
