"""Where things lie: what a path of torchtitan's options names, and which checkpoint of a store a job goes on from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import dropwhile
from typing import Literal

from ckptstore.catalogue import Entry
from ckptstore.errors import CheckpointDamaged, CheckpointGone, InvalidInput
from ckptstore.loading.newest import Order
from ckptstore.opening import open_store
from ckptstore.storage.uri import redact
from ckptstore.store import CheckpointStore

Contents = Literal["all", "model", "hugging_face"]
"""What a checkpoint of this integration holds: all states, the model alone, or that under Hugging Face's names."""

_FIELD = "torchtitan"
_AT_STEP = re.compile(r"(.+)@(\d+|latest)")


def as_metadata(contents: Contents) -> dict[str, dict[str, str]]:
    """How a checkpoint says what it holds."""
    return {_FIELD: {"contents": contents}}


def checkpoint_uri(path: str) -> str:
    """The checkpoint that a path names: STORE@STEP, a store (its latest), or a directory of a checkpoint.

    Raises CheckpointGone, InvalidInput for a store without checkpoints.
    """
    at_step = _AT_STEP.fullmatch(path)
    for root, step in ([(at_step[1], at_step[2])] if at_step else []) + [(path, "latest")]:
        with open_store(root, group="solo") as store:
            if not store.exists():
                continue
            found = store.latest() if step == "latest" else store[int(step)]
            if found is None:
                raise InvalidInput(f"The store {redact(root)} has no checkpoint to begin from")
            return found.uri
    return path


def resumable(store: CheckpointStore) -> Order:
    """The checkpoints that a job can go on from, newest first. The leader asks for it.

    Those above the newest one that holds all states are left out. Further down nothing is looked at: only a damaged
    checkpoint leads there.
    """

    def order(_numbers: Sequence[int]) -> Sequence[int]:
        newest_first = [entry for entry in reversed(store.entries()) if entry.checkpoint.step > 0]
        return [_number(entry) for entry in dropwhile(_is_partial, newest_first)]

    return order


def of_step(store: CheckpointStore, step: int) -> Order:
    """The checkpoints of one step. The leader asks for it."""

    def order(_numbers: Sequence[int]) -> Sequence[int]:
        return [_number(entry) for entry in reversed(store.entries()) if entry.checkpoint.step == step]

    return order


def _number(entry: Entry) -> int:
    assert entry.checkpoint.number is not None  # it is of a store
    return entry.checkpoint.number


def _is_partial(entry: Entry) -> bool:
    """Whether it says that it holds the model alone. What is damaged says nothing, and is found out by the load."""
    try:
        said = entry.checkpoint.metadata.get(_FIELD)
    except (CheckpointDamaged, CheckpointGone):
        return False
    return isinstance(said, dict) and said.get("contents") in ("model", "hugging_face")
