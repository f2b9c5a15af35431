"""Agreement of the ranks on who writes what: one small exchange before any byte moves, two when something is new.

Each rank sends the digest of its structure and one digest of everything to compare. When that is not what the leader
knows from the last save, it requests the digest of every key from all ranks, and the structure from one rank of each
kind. Keys that differed between ranks are compared one by one from then on, so that the next save needs one exchange
again.

Tensors that are dealt out because ranks should have them alike are compared in two cases: when the structure is new,
within the leader's second request, and at every n-th save, which takes an exchange more. The leader alone counts.
"""

from __future__ import annotations

import json
import logging
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptstore.errors import InvalidState
from ckptstore.format.digest import fingerprint, fingerprinter
from ckptstore.state.index.items import DIGEST_BYTES, WHOLE_MODES, Item, Mode, Structure
from ckptstore.state.index.part import total_bytes
from ckptstore.state.write.describe import Described
from ckptstore.state.write.outlining import RankStructures
from ckptstore.state.write.replicas import Question, answer, check_details, differing, unshared

logger = logging.getLogger("ckptstore")

_AGAIN = b"again"
_HEAD_BYTES = 2 * DIGEST_BYTES
FULL_POST_HEAD = struct.Struct("<iII")
"""The fields behind the identity in a full post: the member, and the sizes of the deflated structure and of the answer
on replicas."""
_NOBODY = -1
_LARGE_ELEMENTS = 1024
_NEARLY_ALL = 0.9


@dataclass(frozen=True, slots=True)
class Agreement:
    """The leader's reply to all ranks; the defaults are those of a rank alone."""

    world_size: int
    classes: tuple[int, ...] = ()
    """The number of each rank's structure; empty if all have the same."""
    partial: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The structures that have a key, if not all have it."""
    differs: frozenset[str] = frozenset()
    """The keys that each rank keeps for itself."""
    untied: frozenset[str] = frozenset()
    """Tied keys that are not tied on all ranks."""
    copies: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The sets of ranks, by their lowest rank, that have a copy each of a distributed tensor."""
    members: tuple[int, ...] = ()
    """Torch's number of each rank, if it matters; -1 if nobody needs it."""
    is_packed: bool = True
    """True if the leader packs the parts of the index into one file; else each rank writes its own."""

    def holders(self, key: str) -> Sequence[int]:
        """Return the ranks that have the key, in order."""
        numbers = self.partial.get(key)
        if numbers is None:
            return range(self.world_size)
        return [rank for rank, number in enumerate(self.classes) if number in numbers]

    def encode(self) -> bytes:
        """Return the agreement as bytes for the other ranks; the same agreement gives the same bytes."""
        copies = dict(sorted(self.copies.items()))
        fields = [self.classes, dict(sorted(self.partial.items())), sorted(self.differs), sorted(self.untied), copies]
        members = None if self.members == tuple(range(self.world_size)) else self.members
        whole = [self.world_size, *fields, members, self.is_packed]
        return zlib.compress(json.dumps(whole).encode(), 1)

    @staticmethod
    def decode(data: bytes) -> Agreement:
        """Read the output of `encode`."""
        world_size, classes, partial, differs, untied, copies, members, is_packed = json.loads(zlib.decompress(data))
        partial = {key: tuple(numbers) for key, numbers in partial.items()}
        copies = {key: tuple(groups) for key, groups in copies.items()}
        whole = tuple(classes), partial, frozenset(differs), frozenset(untied), copies
        numbers = tuple(range(world_size) if members is None else members)
        return Agreement(world_size, *whole, numbers, is_packed)


def is_settled(reply: bytes) -> bool:
    """Return True if the ranks need no further exchange after this reply."""
    return not reply.startswith(_AGAIN) and not Agreement.decode(reply).copies


def _request(examples: Collection[int] | None, question: Question | None) -> bytes:
    """Return the leader's second request. `examples` are the ranks that send their structures, while all send their
    digests; None if no rank sends either."""
    return _AGAIN + json.dumps([None if examples is None else sorted(examples), question]).encode()


@dataclass(slots=True)
class Negotiator:
    """One process's side of the agreements of a store. Keeps the findings of the last one; not safe for threads.

    For an agreement every rank calls `begin`. Then the leader joins the descriptions of all ranks, and every rank
    passes its reply to `hear`, until that returns the agreement.
    """

    _found: Described = field(default_factory=Described)
    _rank: int = 0
    _structure: bytes = b""
    _own_identity: bytes = b""
    _digests: Mapping[str, bytes] = field(default_factory=dict)
    _differed: frozenset[str] = frozenset()
    _asked: tuple[Collection[int] | None, Question | None] | None = None
    """The leader's second request, if it made one."""
    _identity: bytes = b""
    """On the leader: the structure that all ranks had last, empty if there were several."""
    _compared: list[str] = field(default_factory=list)
    _members: tuple[int, ...] = ()
    size_bytes: int = 0
    """On the leader: the size of the tensors that all ranks together have to write."""
    structures: RankStructures = field(default_factory=lambda: RankStructures.of((), (), ()))
    """On the leader: those of the last agreement."""
    _pending: bytes = b""
    """On the leader: the agreement that holds if the replicas are alike."""
    _unshared: frozenset[bytes] = frozenset()
    """On the leader: the names in the answers on replicas that are not dealt out."""
    _posted: bytes = b""
    """On the leader: the structures of all ranks in this save."""
    _compared_last: tuple[bytes, int] = b"", 0
    """On the leader: the `_posted` of the save that compared the replicas last, and the number of saves since."""
    _has_warned: bool = False

    def begin(self, found: Described, rank: int) -> None:
        """Begin an agreement on the state of this rank."""
        self._found, self._rank, self._asked = found, rank, None
        self._structure = Structure.of(found.items, found.modules, found.paths).encode()
        self._own_identity = fingerprint(self._structure)
        self._digests = {item.key: item.digest for item in found.items if item.mode in (Mode.COMPARE, Mode.VALUE)}

    def describe(self) -> bytes:
        """Return this rank's post: digests, and whatever else the leader requested from this rank."""
        digests = self._digests
        if self._asked is not None:
            examples, question = self._asked
            replicas = b"" if question is None else answer(self._found, question)
            if examples is None:
                return replicas
            deflated = zlib.compress(self._structure, 1) if self._rank in examples else b""
            head = FULL_POST_HEAD.pack(member_of(self._found.items), len(deflated), len(replicas))
            return b"".join([self._own_identity, head, deflated, replicas, *digests.values()])
        stable = fingerprinter(b"".join(digests[key] for key in digests if key not in self._differed))
        apart = [digests[key] for key in digests if key in self._differed]
        return b"".join([self._own_identity, stable.digest(), *apart])

    def join(self, posts: Sequence[bytes], *, may_spread: bool = False, compare_every: int = 0) -> bytes:
        """Leader: return the reply to the posts of all ranks. Compare replicas whenever the structures are new and at
        every `compare_every`-th save, never for 0.

        Raises InvalidState when a key is something else on another rank, and when replicas differ.
        """
        if self._asked is None:
            return self._compare_roughly(posts, may_spread, compare_every)
        examples, question = self._asked
        answers = posts
        if examples is not None:
            self._pending = self._compare(posts, may_spread)
            answers = [_full_post(post)[2] for post in posts]
        if question is None:
            return self._agreed(is_compared=False)
        if question.names:
            check_details(answers)
        elif wrong := [name.hex() for name in differing(answers) if name not in self._unshared]:
            return _request(None, question._replace(names=tuple(wrong)))
        return self._agreed(is_compared=True)

    def _agreed(self, *, is_compared: bool) -> bytes:
        posted, since = self._compared_last
        self._compared_last = (self._posted, 0) if is_compared else (posted, since + 1)
        return self._pending

    def hear(self, reply: bytes) -> Agreement | None:
        """Return the agreement of all ranks; None when the leader makes a second request."""
        if reply.startswith(_AGAIN):
            examples, question = json.loads(reply.removeprefix(_AGAIN))
            self._asked = examples, None if question is None else Question(question[0], tuple(question[1]))
            return None
        agreement = Agreement.decode(reply)
        self._differed = agreement.differs
        return agreement

    def _compare_roughly(self, posts: Sequence[bytes], may_spread: bool, compare_every: int) -> bytes:
        """Return the agreement, if all ranks have the structure of the last save, only differ where they did then, and
        replicas are not due to be compared. Else return the second request."""
        identities = [post[:DIGEST_BYTES] for post in posts]
        self._posted = fingerprint(b"".join(identities))
        last, since = self._compared_last
        is_due = compare_every > 0 and (self._posted != last or since + 1 >= compare_every)
        question = Question(one_by_one=len(set(identities)) > 1) if is_due else None
        if len({(len(post), post[:_HEAD_BYTES]) for post in posts}) > 1 or identities[0] != self._identity:
            first = {identity: rank for rank, identity in reversed(list(enumerate(identities)))}
            return _request(first.values(), question)
        apart = [key for key in self._compared if key in self._differed]
        differs = frozenset(apart[index] for index in _differing([post[_HEAD_BYTES:] for post in posts]))
        is_packed = not (may_spread and self.structures.can_spread)
        self._unshared = frozenset()
        agreement = Agreement(len(posts), differs=differs, members=self._members, is_packed=is_packed)
        self._pending = agreement.encode()
        return self._agreed(is_compared=False) if question is None else _request(None, question)

    def _compare(self, posts: Sequence[bytes], may_spread: bool) -> bytes:
        numbers: dict[bytes, int] = {}
        classes = tuple(numbers.setdefault(post[:DIGEST_BYTES], len(numbers)) for post in posts)
        examples = [posts[classes.index(number)] for number in range(len(numbers))]
        structures = [Structure.decode(zlib.decompress(_full_post(post)[0])) for post in examples]
        members = tuple(FULL_POST_HEAD.unpack_from(post, DIGEST_BYTES)[0] for post in posts)
        differs = _different_signatures(structures, classes)
        seen: dict[str, bytes] = {}
        for number, structure in enumerate(structures):
            compared = structure.compared()
            digests = [_full_post(post)[1] for post, own in zip(posts, classes, strict=True) if own == number]
            differs |= {compared[index] for index in _differing(digests)}
            for index, key in enumerate(compared):
                digest = digests[0][index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
                if seen.setdefault(key, digest) != digest:
                    differs.add(key)
        is_one = len(structures) == 1
        self._identity = posts[0][:DIGEST_BYTES] if is_one else b""
        self._compared = structures[0].compared() if is_one else []
        self._members = members if max(members) > _NOBODY else ()
        self._unshared = unshared(structures, differs)
        if is_one:
            self._warn(structures[0], differs)
        self.structures = RankStructures.of(structures, classes, members)
        self.size_bytes = self.structures.size_bytes(differs)
        return Agreement(
            len(posts),
            classes=() if is_one else classes,
            partial=_partial(structures),
            differs=frozenset(differs),
            untied=frozenset(_untied(structures)),
            copies=_copies(structures),
            members=self._members,
            is_packed=not (may_spread and self.structures.can_spread),
        ).encode()

    def _warn(self, structure: Structure, differs: Collection[str]) -> None:
        """Warn once for a store if ranks each seem to train a separate model: nearly all large tensors differ between
        them and were not marked as each rank's own, and nothing large is distributed or kept alike by a wrapper."""
        large = [
            row
            for row in structure.rows
            if row.dtype.startswith(("float", "bfloat"))
            and not row.tied_to
            and total_bytes("uint8", row.shape) >= _LARGE_ELEMENTS
        ]
        keys = [row.key for row in large if row.key in differs and row.key not in self._found.own]
        is_whole = all(row.mode == Mode.COMPARE for row in large)
        if is_whole and len(keys) > 1 and len(keys) >= _NEARLY_ALL * len(large) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%d of %d large tensors differ between ranks (%s, ...), and each rank's own is stored. Did you forget "
                "DistributedDataParallel? If not, mark what belongs to its rank with ckptstore.state.per_rank",
                len(keys),
                len(large),
                ", ".join(keys[:3]),
            )


def member_of(items: Sequence[Item]) -> int:
    """Return torch's number of this rank, if a mesh has it; else -1."""
    return next((item.member for item in items if item.member != _NOBODY), _NOBODY)


def _full_post(post: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the deflated structure, the digests and the answer on replicas of a full post."""
    _, deflated_bytes, answer_bytes = FULL_POST_HEAD.unpack_from(post, DIGEST_BYTES)
    start = DIGEST_BYTES + FULL_POST_HEAD.size
    answer, end = start + deflated_bytes, start + deflated_bytes + answer_bytes
    return post[start:answer], post[end:], post[answer:end]


def _differing(digests: list[bytes]) -> list[int]:
    """Return the places at which not all of these rows of digests are equal."""
    if len(set(digests)) == 1:
        return []
    table = np.frombuffer(b"".join(digests), "u1").reshape(len(digests), -1, DIGEST_BYTES)
    found: list[int] = np.flatnonzero((table != table[0]).any(axis=(0, 2))).tolist()
    return found


def _different_signatures(structures: list[Structure], classes: tuple[int, ...]) -> set[str]:
    """Return the keys that are whole on every rank that has them, but not the same thing."""
    first: dict[str, tuple[int, Any]] = {}
    live: dict[str, tuple[str, int]] = {}
    differs = set()
    for number, structure in enumerate(structures):
        for row in structure.rows:
            key, *signature = list[Any](row[:4])
            if live.setdefault(key, (row.dtype and row.live, number))[0] != row.live and row.dtype:
                ranks = classes.index(live[key][1]), classes.index(number)
                raise InvalidState(
                    f"{key} is {live[key][0] or row.dtype} on rank {ranks[0]} and {row.live or row.dtype} on rank "
                    f"{ranks[1]}, is stored as {row.dtype}, and a load could give back one of them alone",
                    ranks=ranks,
                )
            other, known = first.setdefault(key, (number, signature))
            if known == signature:
                continue
            if Mode(known[0]) not in WHOLE_MODES or Mode(signature[0]) not in WHOLE_MODES:
                ranks = classes.index(other), classes.index(number)
                raise InvalidState(
                    f"{key} is {_words(known)} on rank {ranks[0]} and {_words(signature)} on rank {ranks[1]}",
                    ranks=ranks,
                    hint="All ranks must give the same structure for what they share",
                )
            differs.add(key)
    return differs


def _words(signature: Any) -> str:
    mode, dtype, shape = signature
    if mode == Mode.VALUE:
        return "a plain value"
    kind = "distributed tensor" if mode in (Mode.SHARD, Mode.MESH) else "tensor"
    return f"a {kind} of {dtype} and shape {tuple(shape)}"


def _partial(structures: list[Structure]) -> dict[str, tuple[int, ...]]:
    """Return the structures that have a key, for keys that not all have, if that decides who writes the key."""
    found: dict[str, list[int]] = {}
    for number, structure in enumerate(structures):
        for row in structure.rows:
            if row.mode in WHOLE_MODES or row.mode == Mode.MESH:
                found.setdefault(row.key, []).append(number)
    return {key: tuple(numbers) for key, numbers in found.items() if len(numbers) < len(structures)}


def _copies(structures: list[Structure]) -> dict[str, tuple[int, ...]]:
    """Return the distributed tensors that several sets of ranks have, each the whole of it."""
    found: dict[str, set[int]] = {}
    for structure in structures:
        for row in structure.rows:
            if row.mode in (Mode.SHARD, Mode.MESH):
                found.setdefault(row.key, set()).add(row.group)
    return {key: tuple(sorted(groups)) for key, groups in found.items() if len(groups) > 1}


def _untied(structures: list[Structure]) -> set[str]:
    """Return the keys that are tied to another one on some ranks only."""
    held = [{row.key: row.tied_to for row in structure.rows} for structure in structures]
    ties = {(key, other) for rows in held for key, other in rows.items() if other}
    return {
        key
        for key, other in ties
        if any(rows.get(key, other) != other or (key in rows) != (other in rows) for rows in held)
    }
