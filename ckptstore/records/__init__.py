"""The log as pure values: what a store holds, what may change it, and the records that say so."""

from ckptstore.records.changes import (
    EMPTY,
    Change,
    CheckpointEntry,
    Claim,
    Commit,
    Noop,
    Pin,
    Remove,
    StoreState,
    Unpin,
    apply,
)
from ckptstore.records.ranges import Numbers
from ckptstore.records.record import Record

__all__ = [
    "EMPTY",
    "Change",
    "CheckpointEntry",
    "Claim",
    "Commit",
    "Noop",
    "Numbers",
    "Pin",
    "Record",
    "Remove",
    "StoreState",
    "Unpin",
    "apply",
]
