"""Comparison of tensors that several ranks should have alike. They are dealt out between the ranks, so that a
difference would not show otherwise.

Each rank makes a digest of all its bytes of each such tensor, and the leader compares them. If all ranks have one
structure, the tensors that the same ranks share have one digest together, so that the posts stay small; only those that
do not agree are compared one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ckptstore.errors import InvalidState
from ckptstore.format.digest import fingerprint
from ckptstore.group.base import spoken
from ckptstore.runtime.collector import collector_paused
from ckptstore.state.index.items import DIGEST_BYTES, Item, Mode, Structure
from ckptstore.state.index.part import total_bytes
from ckptstore.state.tensors.boxes import Box, whole
from ckptstore.state.tensors.tensor_memory import digest_of_host, fingerprints_of

_DEALT = frozenset({Mode.SPLIT, Mode.MESH})
_CLAIM_BYTES = 2 * DIGEST_BYTES
_SHOWN = 5
_LARGE_ELEMENTS = 1024
_NEARLY_ALL = 0.9


class Question(NamedTuple):
    """The leader's question on the tensors that ranks should have alike."""

    one_by_one: bool
    """True if each tensor has a separate digest, as ranks of several structures need."""
    names: tuple[str, ...] = ()
    """The claims, in hex, of which the answer lists the keys and the exact digest of each; empty for all claims, in
    brief."""


class Replicas:
    """One rank's tensors that are dealt out between ranks. Reads their bytes only for an answer."""

    def __init__(self, items: Sequence[Item], memory: Mapping[str, tuple[torch.Tensor, ...]]) -> None:
        self._dealt = [item for item in items if item.mode in _DEALT and item.boxes]
        self._memory = memory

    @collector_paused()
    def answer(self, question: Question) -> bytes:
        """Return for each claim its name and digest, or a JSON list of key, mode, name and digest for each tensor in
        those that the question names."""
        groups = self._groups(question.one_by_one)
        names = {
            name: [name_of(item.key, item.mode, item.group, item.boxes) for item in groups[name]] for name in groups
        }
        claims = {fingerprint(b"".join(names[name])): name for name in groups}
        if question.names:
            wanted = [claims[name] for text in question.names if (name := bytes.fromhex(text)) in claims]
            return json.dumps([self._detail(item) for name in wanted for item in groups[name]]).encode()
        digests = fingerprints_of({_memory_of(item): self._memory[item.key] for item in self._dealt})
        parts = []
        for claim, name in claims.items():
            parts += [claim, fingerprint(b"".join([digests[_memory_of(item)] for item in groups[name]]))]
        return b"".join(parts)

    def _groups(self, one_by_one: bool) -> dict[Any, list[Item]]:
        """Return the tensors by the ranks that have them. One whose ranks are unknown is a separate group."""
        groups: dict[Any, list[Item]] = {}
        for item in self._dealt:
            is_alone = one_by_one or (item.mode is Mode.MESH and item.layout is None)
            groups.setdefault(item.key if is_alone else (item.mode, item.group, item.sharers), []).append(item)
        return groups

    def _detail(self, item: Item) -> list[Any]:
        digests = b"".join([digest_of_host(tensor) for tensor in self._memory[item.key]])
        name = name_of(item.key, item.mode, item.group, item.boxes)
        return [item.key, int(item.mode), name.hex(), fingerprint(digests).hex()]


Answer = Callable[[Question], bytes]
"""The type of `Replicas.answer`."""


def _memory_of(item: Item) -> str:
    """Return the key of the memory that an item shows: tied ones show the same."""
    return item.tied_to or item.key


def name_of(key: str, mode: int, group: int, boxes: Iterable[Box]) -> bytes:
    """Return the name of a tensor among the ranks that have the same boxes of it."""
    boxed = [(box.offsets, box.sizes) for box in boxes]
    return fingerprint(json.dumps([key, int(mode), group, boxed]).encode())


def unshared(structures: Sequence[Structure], differs: Collection[str]) -> frozenset[bytes]:
    """Return the names of tensors that are not dealt out after all, because ranks have something else under their
    keys."""
    rows = (row for structure in structures for row in structure.rows if row.mode == Mode.SPLIT and row.key in differs)
    return frozenset(fingerprint(name_of(row.key, row.mode, row.group, [whole(row.shape)])) for row in rows)


def differing(answers: Sequence[bytes]) -> list[bytes]:
    """Leader: return the names of the claims for which ranks sent different digests."""
    known: dict[bytes, bytes] = {}
    found: dict[bytes, None] = {}
    for answer in dict.fromkeys(answers):
        for start in range(0, len(answer), _CLAIM_BYTES):
            name = answer[start : start + DIGEST_BYTES]
            digest = answer[start + DIGEST_BYTES : start + _CLAIM_BYTES]
            if known.setdefault(name, digest) != digest:
                found[name] = None
    return list(found)


def check_details(answers: Sequence[bytes]) -> None:
    """Leader: raise InvalidState, with keys and ranks, for tensors whose bytes differ between ranks."""
    told: dict[str, tuple[str, int, dict[str, list[int]]]] = {}
    for rank, answer in enumerate(answers):
        for key, mode, name, digest in json.loads(answer):
            told.setdefault(name, (key, mode, {}))[2].setdefault(digest, []).append(rank)
    check_alike(told.values())


def check_alike(held: Iterable[tuple[str, int, Mapping[Any, Sequence[int]]]], *, hint: str = "") -> None:
    """Raise InvalidState, with keys and ranks, for tensors whose bytes differ between ranks. `held` has each by its
    key, its mode and the ranks that have each digest; `hint` replaces the advice by mode."""
    wrong = [(key, mode, list(ranks.values())) for key, mode, ranks in held if len(ranks) > 1]
    if not wrong:
        return
    first: dict[str, tuple[int, list[Sequence[int]]]] = {}
    for key, mode, ranks in sorted(wrong):
        first.setdefault(key, (mode, ranks))
    shown = [f"{key} ({' vs '.join(map(spoken, ranks[:4]))})" for key, (_, ranks) in list(first.items())[:_SHOWN]]
    more = f" and {len(first) - len(shown)} more" if len(first) > len(shown) else ""
    mode, ranks = next(iter(first.values()))
    what = f"{len(first)} tensors differ" if len(first) > 1 else "A tensor differs"
    raise InvalidState(
        f"{what} between ranks that should have the same, of which one copy is stored: {', '.join(shown)}{more}",
        ranks=tuple(sorted(rank for group in ranks for rank in group)),
        hint=hint or (_MESH_HINT if mode == Mode.MESH else _HINT),
    )


_HINT = (
    "Make them alike before the save: average the weights (local SGD), end the gradient accumulation with a "
    "synchronised step, broadcast what was set on one rank. To keep each rank's own, mark the module and its optimizer "
    "with ckptstore.state.per_rank, or take replicated() away from the tensor"
)
_MESH_HINT = (
    "A DTensor's Replicate says that its ranks have the same. Broadcast or average it before the save, or store what "
    "each rank has of its own as a plain tensor, marked with ckptstore.state.per_rank"
)


def apart(structure: Structure, differs: Collection[str], own: Collection[str]) -> tuple[list[str], int]:
    """Return the large tensors that differ between ranks, if these are nearly all and were not marked as each rank's
    own, and the number of all large ones. Return none of them if anything large is distributed or kept alike by a
    wrapper."""
    large = [
        row
        for row in structure.rows
        if row.dtype.startswith(("float", "bfloat"))
        and not row.tied_to
        and total_bytes("uint8", row.shape) >= _LARGE_ELEMENTS
    ]
    found = [row.key for row in large if row.mode == Mode.COMPARE and row.key in differs and row.key not in own]
    is_whole = all(row.mode == Mode.COMPARE for row in large)
    is_nearly_all = len(found) > 1 and len(found) >= _NEARLY_ALL * len(large)
    return (found if is_whole and is_nearly_all else []), len(large)
