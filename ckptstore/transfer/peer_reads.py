"""Read files from peers, and find out who gave wrong bytes of a file that has one digest for many extents.

A file that has proved wrong is read from peers a second time. Each extent now comes from another node than before, and
counts only if two nodes gave the same: so the storage is asked for nothing that an honest node has, and a single liar
is outvoted. What proves wrong again is read from the storage. The digest of the file decides, whoever agrees.
"""

from __future__ import annotations

from ckptstore.format.digest import Digest
from ckptstore.transfer.engine import Peers
from ckptstore.transfer.moves import Supplied, Wanted
from ckptstore.transfer.pool import Operation
from ckptstore.transfer.reads import extents_in

_MORE_NODES = 2
"""The number of other nodes that are asked in the second turn: a liar may be one of them, and honest ones agree."""


class PeerReads:
    """The files of one operation. Safe for threads, each of which reads other extents."""

    def __init__(self, peers: Peers) -> None:
        """Begin with the first turn."""
        self.peers = peers
        self._turn = 0
        self._supplied: dict[str, dict[int, list[Supplied]]] = {}
        """The bytes that nodes supplied of each file that has not proved right, by the offset."""
        self._accepted: dict[tuple[str, int], str] = {}
        """The digest of what was used in a later turn, by key and offset."""

    def begin_turn(self) -> bool:
        """Begin the next turn, for files that have proved wrong. Return False if no node was asked in the last one."""
        self._turn += 1
        self._accepted.clear()
        return self._turn <= 2

    def read(self, run: Operation, wanted: Wanted, offset: int, view: memoryview) -> bool:
        """Fill the view from peers, where the file has a digest. Return False if the storage has to be read; then
        `note` follows."""
        if wanted.digest is None or self._turn > 1:
            return False
        return all(self._extent(run, wanted, start, piece) for start, (piece,) in extents_in(offset, [view]))

    def _extent(self, run: Operation, wanted: Wanted, offset: int, view: memoryview) -> bool:
        supplied = self._supplied.setdefault(wanted.key, {}).setdefault(offset, [])
        for _ in range(_MORE_NODES if self._turn else 1):
            nodes, digests = {one.node for one in supplied}, {one.digest for one in supplied}
            new = self.peers.fill(wanted.key, offset, [view], run.check, without=nodes)
            if new is None:
                return False
            supplied.append(new)
            is_whole = len(view) == wanted.size_bytes and wanted.digest is not None
            if not self._turn or new.digest in digests or (is_whole and _is_right(wanted, view)):
                self._accepted[wanted.key, offset] = new.digest
                return True
        return False

    def note(self, key: str, offset: int, view: memoryview) -> None:
        """Note what the storage has, to compare it with what nodes supplied."""
        if self._turn:
            for start, (piece,) in extents_in(offset, [view]):
                self._accepted[key, start] = str(Digest.of(piece))

    def settle(self, key: str) -> None:
        """Note that a file has proved right: each node that supplied anything else of it is left out for a while."""
        for offset, supplied in self._supplied.pop(key, {}).items():
            right = self._accepted.pop((key, offset), None)
            for one in supplied:
                if right not in (None, one.digest):
                    self.peers.mistrust(key, one)


def _is_right(wanted: Wanted, view: memoryview) -> bool:
    return wanted.digest is not None and wanted.digest.like(view) == wanted.digest
