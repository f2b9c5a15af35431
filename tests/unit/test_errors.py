"""The tree of errors: stable codes, pickling, travelling between ranks."""

from __future__ import annotations

import inspect
import json
import pickle

import pytest

from ckptstore import errors
from ckptstore.errors import CkptstoreError, RankFailed, StorageUnavailable, all_errors, from_wire, to_wire

CLASSES = sorted(all_errors().values(), key=lambda cls: cls.__name__)

CODES = {
    "access-denied": 32,
    "cache-error": 24,
    "checkpoint-damaged": 3,
    "record-missing": 27,
    "checkpoint-gone": 4,
    "error": 1,
    "file-missing": 31,
    "group-missing": 22,
    "invalid-input": 2,
    "invalid-metadata": 2,
    "invalid-metric": 2,
    "invalid-name": 2,
    "invalid-source": 2,
    "invalid-state": 2,
    "invalid-step": 2,
    "no-usable-checkpoint": 5,
    "not-durable": 25,
    "checkpoint-thinned": 26,
    "rank-failed": 20,
    "rank-timeout": 21,
    "save-busy": 23,
    "source-changed": 7,
    "state-mismatch": 8,
    "step-exists": 6,
    "storage-error": 30,
    "storage-archived": 36,
    "storage-full": 33,
    "storage-unavailable": 34,
    "storage-throttled": 35,
    "store-fenced": 11,
    "store-forked": 12,
    "store-missing": 10,
    "store-not-shared": 13,
    "unsupported-version": 14,
}
"""Promised to users: a code is added here, never changed."""


def test_codes_and_exit_codes_are_the_promised_ones() -> None:
    assert {cls.code: cls.exit_code for cls in CLASSES} == CODES


def test_no_two_classes_share_a_code() -> None:
    defined = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, CkptstoreError)]
    assert sorted(cls.__name__ for cls in defined) == [cls.__name__ for cls in CLASSES]


def test_the_tree_is_drawn_in_the_docstring() -> None:
    drawing = inspect.getdoc(errors) or ""
    for cls in CLASSES:
        line = next((line for line in drawing.splitlines() if cls.__name__ in line.split()), "")
        parent = next(base for base in cls.__mro__[1:] if issubclass(base, Exception))
        assert line, f"{cls.__name__} is not drawn"
        if parent is not Exception:
            above = drawing[: drawing.index(line)]
            assert parent.__name__ in above, f"{cls.__name__} is not drawn below {parent.__name__}"


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_pickling_with_all_it_knows(cls: type[CkptstoreError]) -> None:
    error = cls("it broke", step=7, rank=3, file="model.pt", hint="Mend it", committed=None, ranks=(1, 2))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert vars(again) == vars(error)
    assert str(again) == str(error) == "it broke (step 7, rank 3, file model.pt). Mend it"


@pytest.mark.parametrize(
    ("message", "step", "text"),
    [
        ("it is lost.", None, "it is lost. Mend it"),
        ("it is lost.", 7, "it is lost (step 7). Mend it"),
        ("did you mean it?", None, "did you mean it? Mend it"),
        ("did you mean it?", 7, "did you mean it? (step 7). Mend it"),
    ],
)
def test_a_sentence_ends_once(message: str, step: int | None, text: str) -> None:
    assert str(CkptstoreError(message, step=step, hint="Mend it")) == text


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("committed", [True, False, None])
def test_an_error_reaches_other_ranks_as_the_same_class(cls: type[CkptstoreError], committed: bool | None) -> None:
    error = cls("it broke", step=7, file="model.pt", hint="Mend it", committed=committed, ranks=(1, 2))
    again = from_wire(json.loads(json.dumps(to_wire(error, rank=5, step=9))))
    assert type(again) is cls
    assert (again.step, again.rank, again.file, again.committed, again.ranks) == (7, 5, "model.pt", committed, (1, 2))
    assert str(again) == str(error)


def test_a_foreign_exception_becomes_a_rank_failure_with_its_type_and_text() -> None:
    again = from_wire(to_wire(ZeroDivisionError("division by zero"), rank=2, step=4))
    assert type(again) is RankFailed
    assert str(again) == "ZeroDivisionError: division by zero (step 4, rank 2)"


def test_an_unknown_code_from_a_newer_rank_is_still_an_error() -> None:
    assert type(from_wire({"code": "not-invented-yet", "message": "new", "committed": False})) is RankFailed


def test_at_fills_in_only_what_is_unknown() -> None:
    error = CkptstoreError("it broke", step=1).at(step=2, rank=3)
    assert (error.step, error.rank, error.file) == (1, 3, None)


def test_handlers_of_the_standard_classes_catch_them() -> None:
    assert issubclass(errors.InvalidInput, ValueError)
    assert issubclass(errors.StorageError, OSError)
    assert issubclass(errors.FileMissing, FileNotFoundError)
    assert issubclass(errors.AccessDenied, PermissionError)
    assert {cls for cls in CLASSES if cls.retryable} == {errors.StorageUnavailable, errors.StorageThrottled}


def test_an_error_of_a_storage_travels_as_its_parent() -> None:
    class OfMyStorage(StorageUnavailable):
        """Without a code of its own."""

    assert all_errors()["storage-unavailable"] is StorageUnavailable
    told = from_wire(to_wire(OfMyStorage("away", file="a"), rank=1))
    assert (type(told), told.message, told.file) == (StorageUnavailable, "away", "a")
