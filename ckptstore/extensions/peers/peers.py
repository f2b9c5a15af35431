"""Read extents from the nodes that own them, so that many nodes take each extent from the storage once.

The owner of an extent is the node whose name gives the lowest number with it (rendezvous hashing): all nodes that know
the same names agree on it without a word, and the loss of a node moves only its own extents. Nobody has to be there:
what no node supplies is read from the storage.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from ckptstore.config import PeerConfig
from ckptstore.errors import CkptstoreError
from ckptstore.events import PeerLeftOut, emit
from ckptstore.extensions.peers.channel import AUTHENTICATED_BYTES, Channel, receive_into, token_keys
from ckptstore.extensions.peers.extents import ExtentRead
from ckptstore.extensions.peers.line_client import LineClient
from ckptstore.extensions.peers.nodes import PeerNode, find_nodes, parse_peers
from ckptstore.extensions.peers.peer_server import GROUP, PeerServer, is_shared, server_at
from ckptstore.extensions.peers.served_store import ServedStore
from ckptstore.format.digest import Digest
from ckptstore.runtime.fork import in_forked_child
from ckptstore.runtime.parallel import started
from ckptstore.storage.base import Storage
from ckptstore.transfer.moves import EXTENT_BYTES, FinishedCopy, Supplied

logger = logging.getLogger("ckptstore")

_LOOK_SECONDS = 30.0
"""The interval at which names are looked up again."""
_LEFT_OUT_SECONDS = (1.0, 30.0)
"""The time for which a node with trouble is not asked: the first and the longest. It doubles, and is longer for trouble
that took long: a node that has not started yet costs next to nothing."""
_MISTRUST_SECONDS = 600.0
"""The time for which a node that gave wrong bytes is not asked."""
_TICK_SECONDS = 0.2
_QUICK_SECONDS = 1.0
"""The time of troubles up to which the next owner is asked before the storage."""
_PATIENCE = 6
"""The time for which a node may say that it still reads, in times of the longest silence."""


class Peers:
    """The nodes that read one storage, as one process sees them. Safe for threads."""

    def __init__(self, storage: Storage, config: PeerConfig, *, num_reads: int) -> None:
        """Serve this node's extents, unless another process of the node does. Does not take over the storage.

        At most `num_reads` extents are read for others at once. Raises InvalidInput for nodes that cannot be meant.
        """
        self.source, self._config, self._num_reads = ServedStore(storage), config, num_reads
        self._entries, self._keys = parse_peers(config.peers), token_keys(config.peers_token)
        self._clients: dict[str, LineClient] = {}
        self._until: dict[str, float] = {}
        """The time until which a node is left out, by its name."""
        self._troubles: Counter[str] = Counter()
        """The troubles in a row of each node."""
        self._lock = threading.Lock()
        self._server: PeerServer | None = None
        self._is_closed = False
        self._process_id = os.getpid()
        self._own_name = ""
        self._nodes: list[PeerNode] = []
        self._look_up()
        in_forked_child(self, Peers._after_fork)
        if not self._nodes:
            logger.warning("no node is found behind the peers %s: the name is looked up again", config.peers)
        elif not self._own_name:
            logger.warning(
                "none of the peers %s is this node: it asks them, and gives nothing to them",
                ", ".join(node.name for node in self._nodes),
            )

    def _after_fork(self) -> None:
        """Ask for everything, also the server of the parent."""
        clients, self._clients = self._clients, {}
        self._lock, self._server = threading.Lock(), None
        for client in clients.values():
            client.close()

    def _look_up(self) -> None:
        """Look the names up, which may lead to other nodes later, and serve."""
        self._looked_seconds = time.monotonic()
        self._nodes = find_nodes(self._entries) or self._nodes
        self._serve()

    def _serve(self) -> None:
        """Serve at the first own address whose port is free. Where all are taken, other processes of this node do."""
        with self._lock:
            if self._server is not None or self._is_closed:  # a slow look-up may end after `close`
                return
            for node in self._nodes:
                for address in node.own_addresses:
                    self._own_name = self._own_name or node.name
                    self._server = server_at(address, self.source, self._config, self._num_reads)
                    if self._server is not None:
                        self._own_name = node.name
                        return

    def _owner(self, file: str, index: int, without: Collection[str] = ()) -> PeerNode | None:
        """Return the node that owns an extent if those named are away, None if there are not two nodes that might."""
        if not self.are_several or not is_shared(file):
            return None
        now = time.monotonic()
        usable = [node for node in self._nodes if node.name not in without and self._until.get(node.name, 0.0) <= now]
        extent = f" {index} {file}".encode()
        return min(usable, key=lambda node: hashlib.blake2b(node.name.encode() + extent).digest(), default=None)

    @property
    def are_several(self) -> bool:
        """True if there are nodes to share extents with, as far as their names are known: they are looked up again when
        it is time."""
        now = time.monotonic()
        with self._lock:
            looks = now - self._looked_seconds > _LOOK_SECONDS and self._process_id == os.getpid()
            if looks:
                self._looked_seconds = now
        if looks:
            started(self._look_up, name="ckptstore-peer-names")  # a name server may be slow
        return len(self._nodes) > 1

    def _file(self, key: str) -> str:
        return f"{self.source.uri}/{key}"

    def fill(
        self,
        key: str,
        offset: int,
        views: Sequence[memoryview],
        check: Callable[[], None],
        *,
        without: Collection[str] = (),
    ) -> Supplied | None:
        """Fill the views with a stretch of one extent, from its owner, which may be this node. Where that has gone, or
        is one of `without`, the node that owns it then is asked. Return None if the storage has to be read; the views
        may hold anything then.

        `check` is called while another node reads; an error that it raises ends the wait.
        """
        file, began, size_bytes = self._file(key), time.monotonic(), sum(map(len, views))
        while (owner := self._owner(file, offset // EXTENT_BYTES, without)) is not None:
            if owner.name == self._own_name and (server := self._server) is not None:
                piece = _copied(server, file, offset, views, check)
                if piece is None:
                    return None
                digest = str(piece.digest_of(offset, size_bytes))
                return Supplied(owner.name, offset, size_bytes, digest)
            reply = self._ask(owner, key, partial(self._exchange, file, offset, views, check))
            if reply is not None:
                has_it = "no" not in reply
                return Supplied(owner.name, offset, size_bytes, str(reply["digest"])) if has_it else None
            if time.monotonic() - began > _QUICK_SECONDS:  # a dead process answers at once, a lost network does not
                return None
        return None

    def _ask(self, owner: PeerNode, key: str, exchange: Callable[[Channel], dict[str, Any]]) -> dict[str, Any] | None:
        """Return the reply of an owner, after its bytes have come. None after trouble: then it is left out."""
        began = time.monotonic()
        try:
            with self._lock:
                client = self._clients.get(owner.name)
                if client is None or client.is_other(owner.addresses):
                    client = self._clients[owner.name] = LineClient(
                        GROUP, owner.addresses, self._keys, timeout_seconds=self._config.peers_timeout_seconds
                    )
            reply = client.talk(key, exchange)
        except CkptstoreError as error:
            first, most = _LEFT_OUT_SECONDS
            took_seconds = time.monotonic() - began
            number = min(self._troubles[owner.name], 10)
            self._leave_out(owner.name, min(most, max(first * 2**number, 3 * took_seconds)), error.message)
            if owner.name == self._own_name:
                self._serve()  # the process that did has ended
            return None
        self._troubles.pop(owner.name, None)
        return reply

    def _exchange(
        self,
        file: str,
        offset: int,
        views: Sequence[memoryview],
        check: Callable[[], None],
        channel: Channel,
    ) -> dict[str, Any]:
        """Ask for a stretch, and receive it. Raises OSError and ValueError when the reply is not that."""
        seconds, size_bytes = self._config.peers_timeout_seconds, sum(map(len, views))
        last = time.monotonic() + _PATIENCE * seconds
        channel.send({"file": file, "offset": offset, "size_bytes": size_bytes})
        reply: dict[str, Any] = {"wait": True}
        while reply.get("wait"):
            check()
            reply = channel.receive(min(last, time.monotonic() + seconds))
        if "no" not in reply:
            if reply.get("size_bytes") != size_bytes or "error" in reply:
                raise ValueError(f"it answers {str(reply)[:80]}, and {size_bytes} bytes were wanted")
            deadline = time.monotonic() + seconds
            for view in views:
                receive_into(channel.line, view, deadline)
            channel.line.settimeout(seconds)
            if size_bytes <= AUTHENTICATED_BYTES:
                channel.check(views)
            if str(Digest.of(*views)) != reply.get("digest"):
                raise ValueError("the bytes do not have their digest")
        channel.line.settimeout(seconds)
        return reply

    def mistrust(self, key: str, wrong: Supplied) -> None:
        """Ask the node that supplied this no more for a while: it is not what the storage has."""
        if wrong.node == self._own_name and self._server is not None:
            self._server.extents.forget(self._file(key), wrong.offset)
        else:
            self._leave_out(wrong.node, _MISTRUST_SECONDS, f"it gave bytes of {key} that are not those stored")

    def _leave_out(self, name: str, seconds: float, reason: str) -> None:
        now = time.monotonic()
        with self._lock:
            is_mistrusted = self._until.get(name, 0.0) > now + _LEFT_OUT_SECONDS[1]
            is_new = not is_mistrusted and (not self._troubles[name] or seconds == _MISTRUST_SECONDS)
            if self._until.get(name, 0.0) <= now:  # else several threads had the same trouble
                self._troubles[name] += 1
            self._until[name] = max(self._until.get(name, 0.0), now + seconds)
        if is_new:
            emit(PeerLeftOut(node=name, seconds=seconds, reason=reason))

    def order(self, stretches: Sequence[tuple[str, int, int]]) -> list[int]:
        """Return the numbers of stretches (key, offset, size) in the order in which this node best reads them: first
        its own extents, then those of the node after it, and so on. So the nodes begin at different places.

        They stay together in windows, since each keeps only so many of its extents for the others.
        """
        names = sorted(node.name for node in self._nodes)
        own = names.index(self._own_name) if self._own_name in names else 0
        turns = {name: (number - own) % len(names) for number, name in enumerate(names)}
        window_bytes = max(1, len(names) * self._config.peers_cache_bytes // 2)
        places, seen_bytes = [], 0
        for number, (key, offset, size_bytes) in enumerate(stretches):
            owner = self._owner(self._file(key), offset // EXTENT_BYTES)
            turn = 0 if owner is None else turns.get(owner.name, 0)  # a node may have joined meanwhile
            places.append((seen_bytes // window_bytes, turn, number))
            seen_bytes += size_bytes
        return [number for *_, number in sorted(places)]

    def offer(self, copy_key: str, names: Iterable[tuple[str, str]], finished: FinishedCopy) -> None:
        """Serve files from a finished copy on this node; see `ServedStore.offer`."""
        self.source.offer(copy_key, names, finished)

    def close(self) -> None:
        """Close the connections, and serve no more once no other node asks."""
        with self._lock:
            self._is_closed = True
            clients, self._clients = self._clients, {}
            server, self._server = self._server, None
        for client in clients.values():
            client.close()
        if server is not None:
            server.remove(self.source)


def _copied(
    server: PeerServer, file: str, offset: int, views: Sequence[memoryview], check: Callable[[], None]
) -> ExtentRead | None:
    """Fill the views from the server of this process, which reads the storage for all. Return the piece that has them,
    None if it could not read it."""
    piece = server.piece(file, offset, sum(map(len, views)), inline=True)
    while piece is not None and not piece.ended.wait(_TICK_SECONDS):
        check()
    if piece is None or piece.data is None:
        return None
    start = offset - piece.offset
    for view in views:
        view[:] = piece.data[start : start + len(view)]
        start += len(view)
    return piece
