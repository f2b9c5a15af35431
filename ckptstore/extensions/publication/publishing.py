"""Publish weights: a store whose checkpoints are versions, full ones and deltas, by the log and commits of any store.

So a version is whole or invisible, a trainer that starts again shuts out the one before it, and what is dropped stays
in the trash for a grace period. Besides, other readers find each version in a directory under its number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ckptstore.boundary import boundary, bounded
from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.errors import InvalidInput, InvalidSource
from ckptstore.extensions.exchange.safetensors import INDEX_NAME, SUFFIX
from ckptstore.extensions.publication.wire import CHECKSUMS
from ckptstore.opening import open_store
from ckptstore.retention import Candidate, Policy
from ckptstore.runtime.extras import needs
from ckptstore.saving.transaction import checked
from ckptstore.storage.uri import local_path
from ckptstore.store import CheckpointStore, save_shard, start_shard, wait_in_flight

if TYPE_CHECKING:
    from ckptstore.extensions.publication.directories import Directories
    from ckptstore.extensions.publication.shard import Memo, Rules, WeightsShard
    from ckptstore.extensions.publication.weights import HostCopy
    from ckptstore.job import Job
    from ckptstore.saving.background import PendingSave
    from ckptstore.saving.request import Request


@dataclass(frozen=True, slots=True)
class KeepChains(Policy):
    """Keep the `n` newest chains, each whole: a full version with all that builds on it."""

    n: int

    def kept(self, candidates: Sequence[Candidate]) -> Mapping[int, str]:
        chains: dict[int, int] = {}
        for candidate in candidates:
            below = [chains[base] for base in sorted(candidate.holds) if base in chains]
            chains[candidate.number] = below[-1] if below else candidate.number
        newest = sorted({*chains.values()})[-self.n :]
        return {number: f"in one of the latest {self.n} chains" for number, root in chains.items() if root in newest}

    def compares_times(self) -> bool:
        return False


@boundary
def open_publication(
    uri: str | os.PathLike[str],
    *,
    anchor_every: int = 20,
    keep: int = 2,
    checksum: str = "strong",
    dtype: Any = None,
    strip_prefix: str = "",
    config_from: str | os.PathLike[str] | None = None,
    directories: bool = True,
    **store_options: Any,
) -> Publication:
    """Open the place at `uri` where weights are published. The first version creates it; nothing is written before.

    Args:
        uri: as for `open_store`; a place of its own, not the store of the checkpoints.
        anchor_every: how many deltas follow a full version at most. One also follows once the deltas together are as
            large as the full version before them.
        keep: how many chains stay live: a full version and the deltas on it go together.
        checksum: the digests of tensors: "strong", or "adler32", the only ones that CoreWeave's readers know.
            With these a reader finds less damage, and a trainer that starts again begins with a full version.
        dtype: a torch dtype, to which floating-point tensors are cast; None leaves them as they are.
        strip_prefix: what to remove from the front of names.
        config_from: a directory whose files each full version has too, weights apart: config and tokenizer.
        directories: whether each version also lies in a directory `weight_v000123`, for SGLang, slime, miles and
            CoreWeave. On a disk its files are hard links; in a bucket they are copies, made by the bucket.
        store_options: the other keywords of `open_store`: `group`, `storage_options`, `grace_seconds` and so on.

    Raises InvalidInput for a bad value, and without the packages of the extra "publish".
    """
    needs("publish", what="Publishing weights")
    from ckptstore.extensions.publication.shard import Rules

    for name, value in (("anchor_every", anchor_every), ("keep", keep)):
        if type(value) is not int or value < (name == "keep"):
            raise InvalidInput(f"{name} is {value!r}, it is an integer of at least {int(name == 'keep')}")
    if checksum not in CHECKSUMS:
        raise InvalidInput(f"checksum is {checksum!r}, it is one of {', '.join(CHECKSUMS)}")
    if "retention" in store_options or "fast" in store_options:
        raise InvalidInput("A publication has no retention and no fast tier of its own choice", hint="Use keep")
    rules = Rules(anchor_every, CHECKSUMS[checksum], _config_files(config_from))
    store = open_store(uri, retention=KeepChains(keep), **store_options)
    return Publication(store, rules, dtype=dtype, strip_prefix=strip_prefix, directories=directories)


def _config_files(directory: str | os.PathLike[str] | None) -> tuple[Path, ...]:
    if directory is None:
        return ()
    path = Path(local_path(directory, "The directory of a model's config"))
    found = sorted(path.iterdir()) if path.is_dir() else []
    weights = (SUFFIX, ".bin", ".pt", ".pth", ".h5", ".gguf", ".index.json", INDEX_NAME)
    chosen = tuple(
        item for item in found if item.is_file() and not item.name.endswith(weights) and not item.name.startswith(".")
    )
    if not chosen:
        raise InvalidSource(f"{path} has no files but weights", hint="Give the directory of a model's config")
    return chosen


@bounded
class Publication:
    """The versions of some weights, at one place. `publish`, `publish_async` and `close` are collective."""

    def __init__(
        self, store: CheckpointStore, rules: Rules, *, dtype: Any, strip_prefix: str, directories: bool
    ) -> None:
        from ckptstore.extensions.publication.shard import Memo

        self._store, self._rules = store, rules
        self._dtype, self._strip_prefix, self._has_directories = dtype, strip_prefix, directories
        self._directories: Directories | None = None
        self._memo: Memo = Memo()
        self._shard: WeightsShard | None = None
        self._pending: PendingSave | None = None
        self._job: Job | None = None

    @property
    def store(self) -> CheckpointStore:
        """The versions as checkpoints of a store: to list, pin, verify and roll back. Do not save to it."""
        return self._store

    def publish(self, version: int, weights: Any, *, metadata: Mapping[str, Any] | None = None) -> Checkpoint:
        """Publish weights under a version, which is above all that are live. Collective.

        Returns once the version is visible, on all ranks; if this raises, all ranks raise the same error, and
        `committed` of it says whether it is visible all the same, as for `CheckpointStore.save`.

        Each rank keeps two copies of the tensors that it publishes in host memory. The base of a delta is only what
        this publication has stored, or has found equal to the newest version by digests; without one, with a tensor
        added, removed or of another shape or dtype, and when it is due, the version is full.

        Args:
            version: an integer, the same on all ranks.
            weights: a module in any parallel layout, or a mapping of names to tensors, plain or distributed. Plain
                values in it are left out. A tensor that several ranks hold plain is published by one of them.
            metadata: anything that JSON holds; readers get it with the version.

        Raises InvalidInput and InvalidState before anything is written, StoreFenced, RankFailed, StorageError.
        """
        self._settle()
        checkpoint = None
        try:
            checkpoint = save_shard(self._store, lambda job: self._request(job, version, weights, metadata))
        finally:
            self._end(checkpoint)
        self._show()
        return checkpoint

    def publish_async(self, version: int, weights: Any, *, metadata: Mapping[str, Any] | None = None) -> PendingSave:
        """Publish a copy of weights in the background. Collective; returns once the copy is made.

        At most one version is on its way: this waits for the one before. Its error is raised by `result()`, and on
        every rank by the next call. Tensors that are cut among ranks are gathered before this returns.
        """
        self._settle()
        self._pending = start_shard(
            self._store, lambda job: self._request(job, version, weights, metadata), ended=self._show
        )
        return self._pending

    def _request(
        self, job: Job, version: int, weights: Any, metadata: Mapping[str, Any] | None
    ) -> tuple[Request, WeightsShard]:
        from ckptstore.extensions.publication.shard import WeightsShard
        from ckptstore.extensions.publication.weights import collect_weights

        request = checked(
            job.group,
            kind="directory",
            step=version,
            metrics=None,
            metadata=metadata,
            exists="replace",
            strip_prefix=self._strip_prefix,
            dtype=str(self._dtype),
        )
        self._job = job
        self._shard = WeightsShard(
            job,
            request.step,
            lambda: collect_weights(weights, strip_prefix=self._strip_prefix, dtype=self._dtype),
            self._memo,
            self._rules,
        )
        return request, self._shard

    def _settle(self) -> None:
        """Wait for the version on its way, and learn whether it is the base of the next."""
        wait_in_flight(self._store)
        pending, self._pending = self._pending, None
        if pending is not None:
            self._end(None if pending.error() is not None else pending.result(0))

    def _end(self, checkpoint: Checkpoint | None) -> None:
        """Take the tensors of a version that was stored as the base of the next, or forget them."""
        from ckptstore.extensions.publication.shard import Base

        shard, self._shard = self._shard, None
        copy: HostCopy | None = None if shard is None else shard.copy
        if shard is None or copy is None:
            return
        record = None if checkpoint is None else files_behind(checkpoint).record
        if record is None:
            self._memo.spare = copy
        else:
            if self._memo.base is not None:
                self._memo.spare = self._memo.base.copy
            self._memo.base = Base(record.entry.attempt, copy, shard.structure)

    def _show(self) -> None:
        """On the leader: have the directories for other readers follow the log. Never raises."""
        job = self._job
        if not self._has_directories or job is None or not job.is_leader or job.epoch is None:
            return
        if self._directories is None:
            from ckptstore.extensions.publication.directories import Directories

            self._directories = Directories(job)
        self._directories.follow_log()

    def close(self) -> None:
        """Finish the version on its way, and close connections. Collective if this has published.

        Raises the error of a version on its way, unless it was raised before.
        """
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
