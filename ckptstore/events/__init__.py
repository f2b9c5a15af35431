"""Report what ckptstore does, as it does it, to listeners and to the log.

A listener is any callable that takes an event. It is called on the thread where the event happens, so it is quick and
does not raise: what it raises is logged and dropped. Without a listener of your own, events go to the log
"ckptstore", at the level of their class.
"""

from ckptstore.events.fast_saves import (
    DrainEnded,
    DrainFailed,
    DrainRecovered,
    DrainStalled,
    DrainStarted,
    FastBypassed,
    FastCommitted,
)
from ckptstore.events.listeners import Event, Listener, emit, event, is_heard, listening, log_event
from ckptstore.events.loads import (
    CheckpointResumed,
    CheckpointSkipped,
    DownloadFinished,
    DownloadStarted,
    DownloadWaited,
    LoadEnded,
    LoadPhase,
)
from ckptstore.events.requests import CheckpointsPruned, ConcurrencyChanged, PruneFailed, RequestRetried
from ckptstore.events.saves import (
    BytesMoved,
    CheckpointCommitted,
    FileStored,
    ResumeForgotten,
    SaveEnded,
    SaveFailed,
    SavePhase,
    SaveStarted,
    StateStaged,
)

__all__ = [
    "BytesMoved",
    "CheckpointCommitted",
    "CheckpointResumed",
    "CheckpointSkipped",
    "CheckpointsPruned",
    "ConcurrencyChanged",
    "DownloadFinished",
    "DownloadStarted",
    "DownloadWaited",
    "DrainEnded",
    "DrainFailed",
    "DrainRecovered",
    "DrainStalled",
    "DrainStarted",
    "Event",
    "FastCommitted",
    "FastBypassed",
    "FileStored",
    "Listener",
    "LoadEnded",
    "LoadPhase",
    "PruneFailed",
    "RequestRetried",
    "ResumeForgotten",
    "SaveEnded",
    "SaveFailed",
    "SavePhase",
    "SaveStarted",
    "StateStaged",
    "emit",
    "event",
    "is_heard",
    "listening",
    "log_event",
]
