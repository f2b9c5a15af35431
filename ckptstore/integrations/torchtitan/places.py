"""Resolve the paths of torchtitan's options, and order the checkpoints of a store for a resume."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from ckptstore.catalogue import Entry
from ckptstore.errors import CheckpointDamaged, CheckpointGone, InvalidInput
from ckptstore.extensions.tier.candidates import FastCandidate
from ckptstore.opening import open_store
from ckptstore.storage.uri import redact
from ckptstore.store import CheckpointStore

T = TypeVar("T")
_MOST_LOOKED_AT = 3

Contents = Literal["all", "model", "hugging_face"]
"""The contents of a checkpoint: all states, the model alone, or the model under Hugging Face's names."""

_FIELD = "torchtitan"
_AT_STEP = re.compile(r"(.+)@(\d+|latest)")


def as_metadata(contents: Contents) -> dict[str, dict[str, str]]:
    """Return the metadata that records a checkpoint's contents."""
    return {_FIELD: {"contents": contents}}


def checkpoint_uri(path: str) -> str:
    """Return the URI of a path's checkpoint: STORE@STEP, a store (its latest), or a checkpoint's directory.

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


class ResumeOrder:
    """The checkpoints to resume from, in the order to try them; an `Order` of the store. Called on the leader.

    Without a step: those that hold all states, newest first, since below a damaged one may be some of the model alone.
    What lies below three that hold all is not looked at: a look is two requests, and a store may have thousands.
    """

    def __init__(self, store: CheckpointStore, step: int | None = None) -> None:
        self._store, self._step = store, step

    def __call__(self, _numbers: Sequence[int]) -> list[int]:
        """Return the numbers of the checkpoints in the store."""
        entries = [entry for entry in reversed(self._store.entries()) if self._is_wanted(entry.checkpoint.step)]
        if self._step is None:
            entries = _whole_ones(entries, _is_partial)
        return [_number(entry) for entry in entries]

    def of_fast(self, candidates: Sequence[FastCandidate]) -> list[FastCandidate]:
        """Return the candidates of the nodes and the store in the same order."""
        chosen = [candidate for candidate in candidates if self._is_wanted(candidate.step)]
        if self._step is not None or not chosen:
            return chosen
        entries = {_number(entry): entry for entry in self._store.entries()}

        def is_partial(candidate: FastCandidate) -> bool:
            if candidate.certificate is not None:
                return _says_partial(candidate.certificate.manifest.metadata)
            assert candidate.number is not None  # the store has it
            return candidate.number in entries and _is_partial(entries[candidate.number])

        return _whole_ones(chosen, is_partial)

    def _is_wanted(self, step: int) -> bool:
        return step > 0 if self._step is None else step == self._step


def _whole_ones(items: Sequence[T], is_partial: Callable[[T], bool]) -> list[T]:
    found: list[T] = []
    for item in items:
        if len(found) >= _MOST_LOOKED_AT or not is_partial(item):
            found.append(item)
    return found


def _number(entry: Entry) -> int:
    assert entry.checkpoint.number is not None  # it is of a store
    return entry.checkpoint.number


def _is_partial(entry: Entry) -> bool:
    """True if it holds the model alone. A damaged one counts as whole, and fails in the load."""
    try:
        return _says_partial(entry.checkpoint.metadata)
    except (CheckpointDamaged, CheckpointGone):
        return False


def _says_partial(metadata: Mapping[str, Any]) -> bool:
    field = metadata.get(_FIELD)
    return isinstance(field, dict) and field.get("contents") in ("model", "hugging_face")
