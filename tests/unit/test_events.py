"""Events reach every listener and the log, and a broken listener fails nothing."""

from __future__ import annotations

import json
import logging
from dataclasses import FrozenInstanceError, asdict, fields
from string import Formatter

import pytest

from ckptstore import events
from ckptstore.events import BytesMoved, CheckpointCommitted, Event, FileStored, PruneFailed, emit, is_heard, listening
from ckptstore.tools.run import notices

COMMITTED = CheckpointCommitted(step=5, number=2, rank=0, size_bytes=100, seconds=0.5)
EVENTS = [getattr(events, name) for name in events.__all__]
CLASSES = [value for value in EVENTS if isinstance(value, type) and issubclass(value, Event)]
KINDS = {
    "Mapping[str, float]": {"loss": 0.5},
    "bool": True,
    "dict[str, str]": {"name": "reason"},
    "float": 0.5,
    "float | None": None,
    "int": 7,
    "int | None": None,
    "str": "text",
    "str | None": None,
    "tuple[int, ...]": (1, 2),
    "tuple[str, ...]": ("a", "b"),
}
"""A value for each type that a field has."""
OF_THE_AGENT = [value for value in vars(notices).values() if isinstance(value, type) and value not in CLASSES]


def test_a_listener_hears_only_what_it_wants() -> None:
    heard: list[Event] = []
    stored = FileStored(key="a", size_bytes=1, seconds=0.1, rank=0)
    with listening(heard.append, CheckpointCommitted):
        assert is_heard(CheckpointCommitted)
        assert not is_heard(FileStored)
        emit(stored)
        emit(COMMITTED)
        with listening(heard.append):
            assert is_heard(FileStored)
            emit(stored)
    assert heard == [COMMITTED, stored]


def test_every_listener_hears_even_when_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("cannot listen")

    with listening(broken), listening(heard.append):
        emit(COMMITTED)
    assert heard == [COMMITTED]
    assert "a listener failed on CheckpointCommitted" in caplog.text


def test_a_listener_is_taken_away_when_its_context_fails() -> None:
    heard: list[Event] = []

    def fail() -> None:
        with listening(heard.append):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    emit(COMMITTED)
    assert heard == []


def test_the_log_has_one_line_and_the_fields_of_the_event(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ckptstore")
    emit(COMMITTED)
    emit(PruneFailed(error="no permission"))
    emit(FileStored(key="a", size_bytes=1, seconds=0.1, rank=0))
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.INFO, "step 5 saved: 100 B in 0.50 s (200 B/s)"),
        (logging.WARNING, "deleting from the trash failed, it is tried again after the next commit: no permission"),
    ]
    assert caplog.records[0].event == {"event": "CheckpointCommitted", **asdict(COMMITTED)}


def test_a_save_has_one_line_whatever_the_number_of_ranks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ckptstore")
    size_bytes, seconds = int(2.1 * (1 << 30)), 0.84
    for rank in range(8):
        emit(
            CheckpointCommitted(
                step=300,
                number=2,
                rank=rank,
                size_bytes=size_bytes,
                seconds=seconds,
                world_size=8,
                slowest_rank=3,
                slowest_by_seconds=0.1,
            )
        )
    (record,) = caplog.records
    assert record.getMessage() == "step 300 saved: 2.1 GiB in 0.84 s (2.5 GiB/s), 8 ranks, slowest rank 3 by 0.10 s"


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls.level > logging.DEBUG and cls is not Event])
def test_what_the_log_shows_is_a_sentence(cls: type[Event]) -> None:
    made = {"steps": (1, 2), "step": 3, "error": "no route", "reason": "it is damaged", "what": "write a"}
    event = cls(**{item.name: made.get(item.name, KINDS.get(str(item.type))) for item in fields(cls)})
    assert "=" not in event.line()
    assert not event.line().startswith(cls.__name__)


@pytest.mark.parametrize("cls", [*CLASSES, *OF_THE_AGENT])
def test_what_a_log_record_carries_is_json(cls: type[Event]) -> None:
    """Handlers of others, those of Ray Train for one, put each record into JSON."""
    assert {str(item.type) for item in fields(cls)} <= KINDS.keys(), "a kind of field that JSON may not take"
    event = cls(**{item.name: KINDS[str(item.type)] for item in fields(cls)})
    assert json.loads(json.dumps(event.to_json()))["event"] == cls.__name__


@pytest.mark.parametrize("cls", [*CLASSES, *OF_THE_AGENT])
def test_a_constant_line_has_fields_of_its_class(cls: type[Event]) -> None:
    used = {name for _, name, _, _ in Formatter().parse(cls.template) if name is not None}
    assert used <= {item.name for item in fields(cls)}


def test_what_is_no_event_is_for_listeners_and_those_who_emit() -> None:
    """How a class of events is made is for the modules of ckptstore alone."""
    names = {name for name in events.__all__ if not isinstance(getattr(events, name), type)}
    assert names == {"Listener", "emit", "is_heard", "listening", "log_event"}


def test_progress_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(1, logger="ckptstore")
    emit(BytesMoved(key="a", size_bytes=1, total_bytes=2))
    assert caplog.records == []


@pytest.mark.parametrize("cls", CLASSES)
def test_events_are_keyword_only_and_explained(cls: type[Event]) -> None:
    assert cls.__doc__
    assert not cls.__doc__.startswith(f"{cls.__name__}(")
    for item in fields(cls):
        assert item.kw_only
        assert item.type != "float" or item.name.endswith(("seconds", "_at"))


def test_an_event_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        COMMITTED.step = 6  # type: ignore[misc]
