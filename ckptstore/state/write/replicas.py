"""Comparison of tensors that several ranks should have alike. They are dealt out between the ranks, or one copy of
them is stored, so that a difference would not show otherwise.

Each rank makes a digest of all its bytes of each such tensor, and the leader compares them. If all ranks have one
structure, the tensors that the same ranks share have one digest together, so that the posts stay small; only those that
do not agree are compared one by one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ckptstore.errors import InvalidState
from ckptstore.format.digest import fingerprint
from ckptstore.runtime.collector import collector_paused
from ckptstore.runtime.shown import show_ranks
from ckptstore.state.index.items import DIGEST_BYTES, Item, Mode, Structure
from ckptstore.state.tensors.boxes import Box, whole
from ckptstore.state.tensors.tensor_memory import digest_of, digest_of_host, fingerprints_of
from ckptstore.state.write.describe import Described

_DEALT = frozenset({Mode.SPLIT, Mode.MESH})
_CLAIM_BYTES = 2 * DIGEST_BYTES
_SHOWN = 5


class Question(NamedTuple):
    """The leader's question on the tensors that ranks should have alike."""

    one_by_one: bool
    """True if each tensor has a separate digest, as ranks of several structures need."""
    names: tuple[str, ...] = ()
    """The claims, in hex, of which the answer lists the keys and the exact digest of each; empty for all claims, in
    brief."""


@collector_paused()
def answer(found: Described, question: Question) -> bytes:
    """Return, of the tensors that are dealt out between ranks, for each claim its name and digest, or a JSON list of
    key, mode, name and digest for each tensor in those that the question names."""
    dealt = [item for item in found.items if item.mode in _DEALT and item.boxes]
    groups: dict[Any, list[Item]] = {}
    """The tensors by the ranks that have them. One whose ranks are unknown is a separate group."""
    for item in dealt:
        is_alone = question.one_by_one or (item.mode is Mode.MESH and item.layout is None)
        groups.setdefault(item.key if is_alone else (item.mode, item.group, item.sharers), []).append(item)
    claims = {
        fingerprint(b"".join([name_of(item.key, item.mode, item.group, item.boxes) for item in group])): group
        for group in groups.values()
    }
    if question.names:
        wanted = [claims[name] for text in question.names if (name := bytes.fromhex(text)) in claims]
        return json.dumps([_detail(item, found.memory[item.key]) for group in wanted for item in group]).encode()
    digests = fingerprints_of({_memory_of(item): found.memory[item.key] for item in dealt})
    parts = []
    for claim, group in claims.items():
        parts += [claim, fingerprint(b"".join([digests[_memory_of(item)] for item in group]))]
    return b"".join(parts)


def _detail(item: Item, memory: Sequence[torch.Tensor]) -> list[Any]:
    digests = b"".join([digest_of_host(tensor) for tensor in memory])
    name = name_of(item.key, item.mode, item.group, item.boxes)
    return [item.key, int(item.mode), name.hex(), fingerprint(digests).hex()]


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
    shown = [f"{key} ({' vs '.join(map(show_ranks, ranks[:4]))})" for key, (_, ranks) in list(first.items())[:_SHOWN]]
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


def is_stored_elsewhere(item: Item, copies: Mapping[str, Sequence[int]]) -> bool:
    """Return True if other ranks have their own copy of the whole tensor, and that copy is stored; `copies` are those
    of the `Agreement`."""
    return item.group != copies.get(item.key, (item.group,))[0]


def digests_of_copies(found: Described, copies: Mapping[str, Sequence[int]]) -> bytes:
    """Return the digests of all bytes that this rank has of distributed tensors of which several sets of ranks have
    copies.

    Training waits for it, because nothing can be compared later with a copy that is not stored. Takes a copy in host
    memory of each tensor on a device.
    """
    told = {}
    for item in found.items:
        if item.key in copies and not item.tied_to:
            boxes = {
                json.dumps([box.offsets, box.sizes]): digest_of(tensor)
                for box, tensor in zip(item.boxes, found.memory[item.key], strict=True)
            }
            told[item.key] = [is_stored_elsewhere(item, copies), boxes]
    return json.dumps(told).encode()


def check_copies(posts: Sequence[bytes]) -> None:
    """Leader: raise InvalidState, with keys and ranks, for a copy that differs from the stored one, or that lies in
    other boxes, so that they cannot be compared."""
    told = [
        (rank, key, box, digest, is_elsewhere)
        for rank, post in enumerate(posts)
        for key, (is_elsewhere, boxes) in json.loads(post).items()
        for box, digest in boxes.items()
    ]
    stored: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, key, box, digest, is_elsewhere in told:
        if not is_elsewhere:
            stored.setdefault((key, box), (rank, digest))
    for rank, key, box, digest, is_elsewhere in told:
        first, known = stored.get((key, box), (None, ""))
        if not is_elsewhere or known == digest:
            continue
        if first is None:
            raise InvalidState(
                f"{key} is on several meshes, on rank {rank}'s in other parts than on the first, so that no one can "
                f"tell whether they are the same",
                ranks=(rank,),
                hint=_COPIES_HINT,
            )
        raise InvalidState(
            f"{key} is on several meshes with other numbers: those of rank {rank} are not those of rank {first}",
            ranks=(first, rank),
            hint=_COPIES_HINT,
        )


_COPIES_HINT = "One copy is stored: give what differs keys of its own, or distribute it over one mesh of all its ranks"
