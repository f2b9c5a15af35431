"""Report a load to listeners and tracers: each phase, and the end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckptstore.events import LoadEnded, LoadPhase, emit, is_heard
from ckptstore.format.record import Record
from ckptstore.runtime.tracing import Traced, hear, told
from ckptstore.storage.traffic import Traffic, counting

_numbers = itertools.count(1)


class LoadWatch:
    """One load on one rank. It begins with the phase "open"."""

    def __init__(self, rank: int, store: str) -> None:
        self._rank, self._store = rank, store
        self._name = f"load-{next(_numbers)}"
        self._started_at, self._started = time.time(), time.monotonic()
        self._phase, self._phase_started_at, self._phase_started = "open", self._started_at, self._started
        self._step: int | None = None
        self._number: int | None = None
        self._has_heard = False

    def found(self, step: int, record: Record | None) -> None:
        """Note the checkpoint that the load is about from now on."""
        self._step, self._number = step, None if record is None else record.number

    def enter(self, phase: str) -> None:
        """End the phase before, and begin this one; do nothing if it is the same."""
        if phase != self._phase:
            self._phase_ended()
            self._phase, self._phase_started_at, self._phase_started = phase, time.time(), time.monotonic()

    def told(self) -> dict[str, Any]:
        """Leader: return the trace context, to add to a message to the other ranks; empty without a tracer."""
        return {} if self._has_heard else told(self._operation)

    def hear(self, message: Mapping[str, Any]) -> None:
        """Any rank: take the trace context from the leader's message. Only the first call counts."""
        if not self._has_heard:
            self._has_heard = True
            hear(message, self._operation)

    def end(self, error: BaseException | None, traffic: Traffic) -> None:
        """End the load, with its error or None, and with the traffic that it caused."""
        self._phase_ended()
        if is_heard(LoadEnded):
            emit(
                LoadEnded(
                    step=self._step,
                    number=self._number,
                    rank=self._rank,
                    load=self._name,
                    store=self._store,
                    started_at=self._started_at,
                    seconds=time.monotonic() - self._started,
                    size_bytes=traffic.read_bytes,
                    requests=traffic.requests,
                    retries=traffic.retries,
                    error_type=None if error is None else type(error).__name__,
                )
            )

    def _phase_ended(self) -> None:
        self.hear({})  # without a message of the leader, this is the work of one process
        if is_heard(LoadPhase):
            emit(
                LoadPhase(
                    step=self._step,
                    number=self._number,
                    rank=self._rank,
                    load=self._name,
                    phase=self._phase,
                    started_at=self._phase_started_at,
                    seconds=time.monotonic() - self._phase_started,
                )
            )

    def _operation(self) -> Traced:
        return Traced("load", self._name, self._rank, self._step, self._started_at)


@contextmanager
def watched(rank: int, store: str) -> Iterator[LoadWatch]:
    """Watch a load from the storage with that URI while the context lasts."""
    load = LoadWatch(rank, store)
    with counting() as traffic:
        try:
            yield load
        except BaseException as error:
            load.end(error, traffic)
            raise
    load.end(None, traffic)
