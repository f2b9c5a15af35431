"""Add faults to a store: the same store, with a hook around every call of its storage."""

from __future__ import annotations

from dataclasses import replace

from ckptstore.catalogue import job_of
from ckptstore.log import Log
from ckptstore.storage.retry import with_retries, without_retries
from ckptstore.store import CheckpointStore
from ckptstore.testing.hooked import Hook, wrap
from ckptstore.transfer import Transfer


def with_faults(store: CheckpointStore, hook: Hook) -> CheckpointStore:
    """Return the store with `hook` called around every call of its storage. Use it instead of `store`.

        store = with_faults(open_store(uri), KillAt("write_part checkpoints/*", when="during"))

    Closing it closes both.
    """
    job, config = job_of(store), job_of(store).config
    storage = with_retries(wrap(without_retries(job.storage), hook), config.retry)
    return CheckpointStore(
        replace(
            job,
            storage=storage,
            log=Log(storage, single_writer=config.single_writer),
            transfer=Transfer(storage, config=config.transfer, retry=config.retry),
        )
    )
