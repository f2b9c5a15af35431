"""Publish a checkpoint of a store, so that serving follows a training that knows nothing of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.interchange.selection import fitting, select
from ckptstore.loading.load_state import open_alone
from ckptstore.state.tensors.boxes import whole


def weights_of(
    checkpoint: Checkpoint, *, include: str | Sequence[str] | None, strip_prefix: str
) -> dict[str, torch.Tensor]:
    """Read tensors of a state checkpoint into host memory, by the names that an export gives them.

    Where ranks differ, the lowest rank's value is taken, as in an export. Tied names have one tensor. Every block is
    checked. Raises InvalidInput where nothing fits, InvalidState for a directory, CheckpointDamaged.
    """
    files = files_behind(checkpoint)
    with files.held():
        stored = open_alone(files)
        saved = stored.saved(lambda key: False)
        selection = select(saved, include=include, strip_prefix=strip_prefix, paths={})
        fits = fitting(include)
        found: dict[str, torch.Tensor] = {}
        named: dict[str, torch.Tensor] = {}
        for key, source in selection.sources.items():
            if source not in found:
                entry = stored.entry(source)
                found[source] = torch.empty(entry.shape, dtype=entry.torch_dtype, device="cpu")
            if fits(key):
                named[selection.name_of(key)] = found[source]
        stored.fill_boxes([(source, whole(tuple(item.shape)), item) for source, item in found.items() if item.numel()])
        return named
