"""Find out whether a checkpoint can be loaded into a state, from the index alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from difflib import SequenceMatcher
from typing import Any

from ckptstore.errors import StateMismatch
from ckptstore.group import SOLO, find_group
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.loading.load_report import LoadCheck
from ckptstore.loading.load_state import LoadOptions, matched
from ckptstore.state.index.part import Tensor

_MOST_PAIRS = 100_000
_LEAST_RATIO = 0.6
"""The least likeness of two names, of which one may have become the other."""


def check_load(files: CheckpointFiles, state: Mapping[str, Any], options: LoadOptions) -> LoadCheck:
    """Return whether a load by this process alone would succeed; see `Checkpoint.check_load`."""
    group = find_group(SOLO, storage=files.storage, config=files.config)
    try:
        with ExitStack() as stack:
            loading, saved = matched(group, files, state, options, stack)
            cast = loading.casts
            loading.abandon()
    finally:
        group.close()
    mismatch = loading.mismatch
    try:
        mismatch.check(strict=options.strict)
        problem = ""
    except StateMismatch as error:
        problem = str(error)
    return LoadCheck(
        step=files.step,
        problem=problem,
        missing=tuple(sorted(mismatch.missing)),
        unexpected=tuple(sorted(mismatch.unexpected)),
        differing=dict(sorted(mismatch.differing.items())),
        renamed=_renamed(
            loading.lacking,
            {key: saved.tensors[key] for key in mismatch.unexpected & saved.tensors.keys()},
            casts=options.dtype == "state",
        ),
        cast=cast,
        left_out=tuple(sorted(mismatch.left_out)),
        num_tied=len(loading.conflicts),
    )


def _renamed(
    lacking: Mapping[str, tuple[str, tuple[int, ...]]], unexpected: Mapping[str, Tensor], *, casts: bool
) -> dict[str, str]:
    """Return pairs of a key that the checkpoint lacks and one that the state lacks, the most alike first. Each key is
    in one pair at most. Of very many tensors of one form none is guessed."""
    mine, stored = defaultdict[Any, list[str]](list), defaultdict[Any, list[str]](list)
    for key, (dtype, shape) in lacking.items():
        mine[shape if casts else (dtype, shape)].append(key)
    for key, tensor in unexpected.items():
        stored[tensor.shape if casts else tensor.form].append(key)
    pairs = [
        (SequenceMatcher(None, key, other).ratio(), key, other)
        for form, keys in mine.items()
        if len(keys) * len(stored[form]) <= _MOST_PAIRS
        for key in keys
        for other in stored[form]
    ]
    found: dict[str, str] = {}
    taken = set[str]()
    for ratio, key, other in sorted(pairs, key=lambda pair: (-pair[0], pair[1:])):
        if ratio >= _LEAST_RATIO and key not in found and other not in taken:
            found[key] = other
            taken.add(other)
    return dict(sorted(found.items()))
