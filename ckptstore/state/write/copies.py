"""Comparison of the copies of a distributed tensor that several sets of ranks have; one of them is stored."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ckptstore.errors import InvalidState
from ckptstore.state.tensors.tensor_memory import digest_of
from ckptstore.state.write.agree import Agreement
from ckptstore.state.write.assignment import is_stored_elsewhere
from ckptstore.state.write.describe import Described


def boxes_of(found: Described, agreement: Agreement) -> bytes:
    """Return the digests of all bytes that this rank has of tensors of which there are several copies.

    Training waits for it, because nothing can be compared later with a copy that is not stored. Takes a copy in host
    memory of each tensor on a device.
    """
    told = {}
    for item in found.items:
        if item.key in agreement.copies and not item.tied_to:
            boxes = {
                json.dumps([box.offsets, box.sizes]): digest_of(tensor)
                for box, tensor in zip(item.boxes, found.memory[item.key], strict=True)
            }
            told[item.key] = [is_stored_elsewhere(item, agreement), boxes]
    return json.dumps(told).encode()


def check_equal(posts: Sequence[bytes]) -> bytes:
    """Leader: raise InvalidState, with keys and ranks, for a copy that differs from the stored one, or that lies in
    other boxes, so that they cannot be compared."""
    told = [json.loads(post) for post in posts]
    stored: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, keys in enumerate(told):
        for key, (is_elsewhere, boxes) in keys.items():
            for box, digest in {} if is_elsewhere else boxes.items():
                stored.setdefault((key, box), (rank, digest))
    for rank, keys in enumerate(told):
        for key, (is_elsewhere, boxes) in keys.items():
            for box, digest in boxes.items() if is_elsewhere else ():
                first, known = stored.get((key, box), (None, ""))
                if known != digest:
                    raise _refusal(key, rank, first)
    return b""


def _refusal(key: str, rank: int, first: int | None) -> InvalidState:
    if first is None:
        what = f"{key} is on several meshes, on rank {rank}'s in other parts than on the first, so that no one can tell"
        return InvalidState(f"{what} whether they are the same", ranks=(rank,), hint=_HINT)
    what = f"{key} is on several meshes with other numbers: those of rank {rank} are not those of rank {first}"
    return InvalidState(what, ranks=(first, rank), hint=_HINT)


_HINT = "One copy is stored: give what differs keys of its own, or distribute it over one mesh of all its ranks"
