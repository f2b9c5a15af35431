"""The merge story: checkpoints of one run as one model, tensor by tensor in float32, without holding any of them.

Each element of the result is the sum of the same element of all checkpoints, times coefficients that depend on the
method. Every block that is read is checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ckptstore.boundary import boundary
from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.errors import InvalidInput
from ckptstore.extensions.exchange.merging.shares import Method, Schedule, shares
from ckptstore.group.find import SOLO, find_group
from ckptstore.transfer.executor import Executor

if TYPE_CHECKING:
    from ckptstore.extensions.exchange.merging.merged_files import MergeReport


@boundary
def merge(
    checkpoints: Sequence[Checkpoint],
    directory: str | os.PathLike[str],
    *,
    method: Method = "average",
    weights: Sequence[float] | None = None,
    decay: float | None = None,
    schedule: Schedule | None = None,
    dtype: str | None = None,
    include: str | Sequence[str] | None = None,
    strip_prefix: str = "",
    shard_size_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    beside: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
    group: object = SOLO,
) -> MergeReport:
    """Merge state checkpoints into safetensors files, at most 256 MiB of memory at a time, whatever their size.

    Tensors of floats are added up in float32 (float64 and complex ones in their own dtype). Other tensors are those of
    the last checkpoint. A tensor that a checkpoint lacks, or has with another shape or dtype, is left out and reported.
    Plain values are left out, as in an export to safetensors.

    Args:
        checkpoints: two or more, in the order of training.
        method: "average", by `weights`, else of equal shares; "ema", an exponential moving average by `decay`;
            "wsm-decay", the shares that make of a run with a constant learning rate one whose rate decayed by
            `schedule` over these checkpoints (Tian et al. 2025, "WSM: Decay-Free Learning Rate Schedule via
            Checkpoint Merging"); "slerp", of two checkpoints, along the arc between each pair of tensors (Shoemake
            1985), with `weights` for the place on it, else its middle.
        weights: a number for each checkpoint; they are divided by their sum.
        decay: between 0 and 1: the share of the average before, when the next checkpoint is added to it.
        schedule: "1-sqrt" (default), "cosine" or "linear", which is the average.
        dtype: of the tensors of floats in the result, such as "bfloat16"; else their own.
        directory, include, strip_prefix, shard_size_bytes, overwrite, beside, executor, storage_options, group: as for
            `export`. A killed merge goes on where it ended when it is called again.

    Raises InvalidInput and InvalidState before anything is written; InvalidState for a value that `dtype` cannot hold,
    and CheckpointDamaged (nothing is left then); errors of writing the files, the same on all ranks.
    """
    wanted: Any = checkpoints
    if not isinstance(wanted, Sequence) or not all(isinstance(one, Checkpoint) for one in wanted):
        raise InvalidInput(
            f"checkpoints is {checkpoints!r}, it is a list of checkpoints", hint="Such as [store[1], store[2]]"
        )
    if len(checkpoints) < 2:
        raise InvalidInput(f"A merge is of two checkpoints or more, {len(checkpoints)} was passed")
    coefficients = shares(len(checkpoints), method, weights=weights, decay=decay, schedule=schedule)
    from ckptstore.extensions.exchange.merging.merged_files import MergeSource, write_merged
    from ckptstore.extensions.exchange.places import ExportPlace

    place = ExportPlace(
        target=os.fspath(directory), beside_from=beside, overwrite=overwrite, storage_options=storage_options
    )
    files = [files_behind(checkpoint) for checkpoint in checkpoints]
    source = MergeSource(tuple(one.alone() for one in files), coefficients, dtype=dtype, is_arc=method == "slerp")
    ranks = find_group(group, storage=files[0].storage, config=files[0].config)
    try:
        if ranks.world_size > 1 and executor is not None:
            raise InvalidInput("A merge is shared by ranks or by an engine", hint="Leave one of them out")
        with ExitStack() as stack:
            for one in files:
                stack.enter_context(one.held())
            return write_merged(
                source,
                place,
                steps=tuple(checkpoint.step for checkpoint in checkpoints),
                include=include,
                strip_prefix=strip_prefix,
                shard_size_bytes=shard_size_bytes,
                group=ranks,
                executor=executor,
            )
    finally:
        if ranks is not group:
            ranks.close()
