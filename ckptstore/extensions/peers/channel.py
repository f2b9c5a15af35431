"""Connections between two processes: each proves its identity, and then they exchange authentic messages.

Processes that were given one token have a key in common: `token_keys`. Those of a job need none: `NodeKeys`. There each
process has a pair of keys (Diffie and Hellman's, in the group of 2,048 bits of RFC 3526), and all learn all public
keys when the ranks meet. They may meet in a bucket that others read: public keys are no secret. Each side derives the
same key from its own private key and the other's public one; that key is never sent. First each side proves that it has
the key, for two numbers that were never used before:

    client    {"rank", "node", "nonce"}
    server    {"nonce", "proof"}            HMAC of both numbers
    client    {"proof"}                     HMAC of both numbers, the other way round

From then on every header, and the bytes of every file of at most 1 MiB, are followed by an HMAC with a key of this
connection, which counts the messages. Larger files are neither encrypted nor authenticated, like the collectives of
torch: their digests find damage, but no attacker on the network who changes bytes on purpose.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptstore.format.encoding import parse_json

AUTHENTICATED_BYTES = 1 << 20
"""Files up to this size are authenticated as a whole: indexes, certificates, plain values."""
MAC_BYTES = 32
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 16
_MAX_GREETING_BYTES = 1 << 12
_PRIVATE_BITS = 512
_PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DDEF9519B3CD3A431B"
    "302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7EDEE386BFB5A899FA5AE9F24117C4B1FE6"
    "49286651ECE45B3DC2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB9ED529077096966D"
    "670C354E4ABC9804F1746C08CA18217C32905E462E36CE3BE39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF695581718"
    "3995497CEA956AE515D2261898FA051015728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
"""The prime of group 14 of RFC 3526; its generator is 2."""


class NotProved(ConnectionError):
    """The other side does not have the key of the job."""


SharedKeys = Callable[[int], bytes]
"""Returns the key that this process shares with the one of a rank. Raises NotProved when there is none."""


def token_keys(token: str) -> SharedKeys:
    """Return the keys of processes that were given the same token: all have one."""
    key = hmac.digest(token.encode(), b"ckptstore peers", "sha256")
    return lambda _rank: key


class NodeKeys:
    """The keys of one process of a job, and the public ones of all its ranks."""

    def __init__(self) -> None:
        self._private = secrets.randbits(_PRIVATE_BITS) | 1 << (_PRIVATE_BITS - 1)
        self.public = f"{pow(2, self._private, _PRIME):x}"
        self.of_ranks: Sequence[str] = ()
        """The public keys of all ranks, once they have met."""
        self.job = ""
        """A text that no other start of a job has."""

    def shared_with(self, rank: int) -> bytes:
        """Return the key that only this process and a rank of the job have.

        Raises NotProved when there is no such rank, or it has sent no public key.
        """
        if not 0 <= rank < len(self.of_ranks):
            raise NotProved(f"there is no rank {rank} in this job")
        public = int(self.of_ranks[rank], 16)
        if not 1 < public < _PRIME - 1:
            raise NotProved(f"rank {rank} has told no public key")
        size_bytes = (_PRIME.bit_length() + 7) // 8
        shared = pow(public, self._private, _PRIME).to_bytes(size_bytes, "big")
        return hmac.digest(hashlib.sha256(shared).digest(), f"ckptstore nodes {self.job}".encode(), "sha256")


class Channel:
    """One connection between a rank and the node server of another rank, after both have proved who they are."""

    def __init__(self, line: socket.socket, key: bytes, *, is_client: bool) -> None:
        self.line = line
        self._key = key
        self._names = (b"client", b"server") if is_client else (b"server", b"client")
        self._counts = [0, 0]

    def send(self, header: Mapping[str, Any]) -> None:
        """Send a header."""
        data = json.dumps(header).encode()
        self.line.sendall(_LENGTH.pack(len(data)) + data + self._mac(0, [memoryview(data)]))

    def receive(self, deadline: float | None = None) -> dict[str, Any]:
        """Receive a header, before the deadline of `time.monotonic`.

        Raises OSError at the end of the connection, ValueError for a malformed header, NotProved for one that the other
        side has not sent.
        """
        data = _received(self.line, _MAX_HEADER_BYTES, deadline)
        self.check([memoryview(data)])
        return _parsed(data)

    def check(self, views: Sequence[memoryview]) -> None:
        """Receive the HMAC of bytes that were received. Raises NotProved when it does not match them."""
        mac = bytearray(MAC_BYTES)
        receive_into(self.line, memoryview(mac))
        if not hmac.compare_digest(mac, self._mac(1, views)):
            raise NotProved("what came is not what was sent")

    def prove(self, views: Sequence[memoryview]) -> None:
        """Send the HMAC of bytes that were sent."""
        self.line.sendall(self._mac(0, views))

    def _mac(self, direction: int, views: Sequence[memoryview]) -> bytes:
        count, self._counts[direction] = self._counts[direction], self._counts[direction] + 1
        found = hmac.new(self._key, self._names[direction] + struct.pack("<Q", count), "sha256")
        for view in views:
            found.update(view)
        return found.digest()


def greet(line: socket.socket, keys: SharedKeys, *, rank: int, server_rank: int, node: str, seconds: float) -> Channel:
    """Client: prove its identity to the server of a node, which `server_rank` runs, and have the server prove its own,
    in at most so many seconds in all.

    Raises NotProved when the server does not, OSError and ValueError when it sends something else, or too slowly.
    """
    key, deadline = keys(server_rank), time.monotonic() + seconds
    mine = secrets.token_hex(32)
    _send(line, {"rank": rank, "node": node, "nonce": mine})
    answer = _parsed(_received(line, _MAX_GREETING_BYTES, deadline))
    theirs = str(answer.get("nonce"))
    context = f"{rank} {node} {mine} {theirs}"
    _check_proof(answer, _proof(key, "server", context))
    _send(line, {"proof": _proof(key, "client", context)})
    return Channel(line, bytes.fromhex(_proof(key, "session", context)), is_client=True)


def welcome(line: socket.socket, keys: SharedKeys, *, node: str, seconds: float) -> Channel:
    """Server: have a client prove its identity, in at most so many seconds in all.

    Raises NotProved when it does not, OSError and ValueError when it sends something else, or too slowly.
    """
    deadline = time.monotonic() + seconds
    asked = _parsed(_received(line, _MAX_GREETING_BYTES, deadline))
    rank, theirs = asked.get("rank"), str(asked.get("nonce"))
    if not isinstance(rank, int) or asked.get("node") != node:
        raise NotProved("another node was meant")
    key = keys(rank)
    mine = secrets.token_hex(32)
    context = f"{rank} {node} {theirs} {mine}"
    _send(line, {"nonce": mine, "proof": _proof(key, "server", context)})
    answer = _parsed(_received(line, _MAX_GREETING_BYTES, deadline))
    _check_proof(answer, _proof(key, "client", context))
    return Channel(line, bytes.fromhex(_proof(key, "session", context)), is_client=False)


def receive_into(line: socket.socket, view: memoryview, deadline: float | None = None) -> None:
    """Fill the view. Raises OSError when the connection ends, or the deadline of `time.monotonic` comes, before."""
    while view:
        if deadline is not None:
            line.settimeout(max(0.001, deadline - time.monotonic()))
        count = line.recv_into(view)
        if not count:
            raise ConnectionResetError("the connection has ended")
        view = view[count:]


def _proof(key: bytes, who: str, context: str) -> str:
    return hmac.new(key, f"{who} {context}".encode(), "sha256").hexdigest()


def _check_proof(answer: Mapping[str, Any], proof: str) -> None:
    """Raise NotProved unless an answer has this proof."""
    if not hmac.compare_digest(str(answer.get("proof")).encode(), proof.encode()):  # a stranger sends any characters
        raise NotProved("it does not have the key of the job")


def _send(line: socket.socket, header: Mapping[str, Any]) -> None:
    data = json.dumps(header).encode()
    line.sendall(_LENGTH.pack(len(data)) + data)


def _received(line: socket.socket, most_bytes: int, deadline: float | None = None) -> bytearray:
    length = bytearray(_LENGTH.size)
    receive_into(line, memoryview(length), deadline)
    (size_bytes,) = _LENGTH.unpack(length)
    if size_bytes > most_bytes:
        raise ValueError(f"a header of {size_bytes} bytes")
    data = bytearray(size_bytes)
    receive_into(line, memoryview(data), deadline)
    return data


def _parsed(data: bytearray) -> dict[str, Any]:
    header = parse_json(data)
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    return header
