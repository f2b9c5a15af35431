"""Run work for which ranks wait: an error of any is raised on all, and long work gives signs of life."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ckptstore.catalogue import job_of
from ckptstore.runtime.beat import beat
from ckptstore.runtime.parallel import started
from ckptstore.store import CheckpointStore

T = TypeVar("T")

_BEAT_EVERY_SECONDS = 1.0


def on_all_ranks(store: CheckpointStore, what: str, work: Callable[[], Any]) -> list[Any]:
    """Return the result of `work` from every rank, as JSON holds it. Collective."""
    with job_of(store).group.meeting(what) as meeting:
        values = meeting.gather(beating(work))
        return list(meeting.tell(lambda: values))


def on_leader(store: CheckpointStore, what: str, work: Callable[[], Any]) -> Any:
    """Return the result of `work` on rank 0, as JSON holds it. Collective."""
    with job_of(store).group.meeting(what) as meeting:
        return meeting.tell(lambda: beating(work))


def beating(work: Callable[[], T]) -> T:
    """Run long work that gives no signs of life itself, giving them meanwhile."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # raised again by the caller
            found.set_exception(error)

    thread = started(run, name="ckptstore-torchtitan")
    if thread is None:
        run()
        return found.result()
    try:
        while thread.is_alive():
            thread.join(_BEAT_EVERY_SECONDS)
            beat()
    finally:
        thread.join()
    return found.result()


def rank_of(store: CheckpointStore) -> int:
    """Return this process's rank in the job."""
    return job_of(store).group.rank
