"""Publish a checkpoint of a store, so that serving follows a training that knows nothing of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.extensions.exchange.selection import select
from ckptstore.loading.load_state import open_alone
from ckptstore.state.index.key_paths import KeyPaths
from ckptstore.state.live.patterns import fitting
from ckptstore.state.read.stored import read_whole


def weights_of(
    checkpoint: Checkpoint, *, include: str | Sequence[str] | None, strip_prefix: str
) -> dict[str, torch.Tensor]:
    """Read tensors of a state checkpoint into host memory, by the names that an export gives them, in the dtypes that
    they had in the state.

    Where ranks differ, the lowest rank's value is taken, as in an export. Tied names have one tensor. Every block is
    checked. Raises InvalidInput where nothing fits, InvalidState for a directory, CheckpointDamaged.
    """
    files = files_behind(checkpoint)
    with files.held():
        stored = open_alone(files)
        saved = stored.saved(lambda key: False)
        selection = select(
            saved, all_keys=stored.all_keys(), include=include, strip_prefix=strip_prefix, paths=KeyPaths()
        )
        found = read_whole(stored, {source: stored.entry(source).restored for source in selection.sources.values()})
        fits = fitting(include)  # but for tensors inside of values
        return {selection.name_of(key): found[source] for key, source in selection.sources.items() if fits(key)}
