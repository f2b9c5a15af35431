"""Retries: only what can be mended, at most so often, at most so long, and every one is told."""

from __future__ import annotations

import pytest

from ckptstore.config import RetryConfig
from ckptstore.errors import AccessDenied, CheckpointDamaged, FileMissing, StorageUnavailable
from ckptstore.events import Event, RequestRetried, listening
from ckptstore.storage.retry import retrying

QUICK = RetryConfig(retry_attempts=4, retry_wait_initial_seconds=0.001, retry_wait_max_seconds=0.002)


class Request:
    """Raises the errors one after another, then returns "done"."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.num_calls = 0

    def __call__(self) -> str:
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_a_request_that_works_is_made_once() -> None:
    request = Request()
    assert (retrying(QUICK, "read a", request), request.num_calls) == ("done", 1)


def test_a_request_that_recovers_returns_and_every_retry_is_told() -> None:
    heard: list[Event] = []
    request = Request(StorageUnavailable("slow down"), StorageUnavailable("reset"))
    with listening(heard.append):
        assert retrying(QUICK, "read a", request) == "done"
    assert request.num_calls == 3
    assert [(type(event), event.what, event.error, event.attempt) for event in heard] == [
        (RequestRetried, "read a", "slow down", 1),
        (RequestRetried, "read a", "reset", 2),
    ]
    assert all(0 <= event.wait_seconds <= 0.002 for event in heard)


def test_the_attempts_are_counted_with_the_first_and_the_last_error_comes_out() -> None:
    errors = [StorageUnavailable(f"try {number}") for number in range(1, 9)]
    request = Request(*errors)
    with pytest.raises(StorageUnavailable) as caught:
        retrying(QUICK, "read a", request)
    assert caught.value is errors[3]
    assert request.num_calls == 4


def test_no_try_begins_after_the_deadline() -> None:
    config = RetryConfig(retry_attempts=1000, retry_deadline_seconds=0.05, retry_wait_max_seconds=0.02)
    request = Request(*(StorageUnavailable("slow down") for _ in range(2000)))
    with pytest.raises(StorageUnavailable):
        retrying(config, "read a", request)
    assert 1 <= request.num_calls < 1000


@pytest.mark.parametrize(
    "error", [FileMissing("a"), AccessDenied("a"), CheckpointDamaged("a"), KeyError("a"), ConnectionResetError("a")]
)
def test_what_no_retry_mends_is_raised_at_once(error: Exception) -> None:
    request = Request(error)
    with pytest.raises(type(error)):
        retrying(QUICK, "read a", request)
    assert request.num_calls == 1


def test_an_error_that_turns_permanent_ends_the_retries() -> None:
    request = Request(StorageUnavailable("slow down"), AccessDenied("token expired"), StorageUnavailable("never seen"))
    with pytest.raises(AccessDenied):
        retrying(QUICK, "read a", request)
    assert request.num_calls == 2
