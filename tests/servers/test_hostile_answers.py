"""Servers, proxies and caches that do not keep to the letter: what they do to reads is trouble of the way, and never
damage of a file that is whole. All engines, all clouds."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from hostile_front import (
    Front,
    Manner,
    answers_an_odd_status,
    answers_an_older_version,
    answers_another_range,
    breaks_off,
    compresses,
    ends_early,
    flips_a_bit,
    ignores_the_range,
    is_gone,
    options_behind,
    says_another_length,
    says_no_range,
)

import ckptstore
from ckptstore.errors import CheckpointDamaged, FileMissing, StorageUnavailable
from ckptstore.storage.open import open_storage

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_tries")]

CLOUDS = {"s3": "fast_s3", "gs": "fake_gcs", "az": "azurite"}
ENGINES = [(cloud, "native") for cloud in CLOUDS]
LATER = pytest.param("s3", "fsspec", marks=pytest.mark.long)
GENERIC = pytest.param("s3", "fsspec")
"""s3fs keeps the head of an answer to itself, so that digests alone find what is odd there (`UNSEEN`)."""
SEEN: list[Manner] = [
    ignores_the_range,
    answers_another_range,
    says_no_range,
    compresses,
    answers_an_odd_status,
    answers_an_older_version,
    says_another_length,
    breaks_off,
]
"""What shows in the head of an answer, or in its length."""
UNSEEN = (answers_another_range, says_no_range, answers_an_odd_status)
DATA = os.urandom(9 << 20)
RANGES = {"a small range": (1 << 20, 1000), "a large range": (1 << 20, 6 << 20), "the end": (len(DATA) - 1000, 1000)}


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, Any], Front]]:
    """A bucket behind a front: its URI, options and the front."""
    cloud: str = request.param
    with options_behind(request.getfixturevalue(CLOUDS[cloud])) as (options, front):
        yield f"{cloud}://test/hostile/{os.urandom(4).hex()}", options, front


@pytest.mark.parametrize(("place", "engine"), [*ENGINES, GENERIC], indirect=["place"])
@pytest.mark.parametrize("manner", SEEN)
def test_what_is_no_answer_is_no_damage(place: tuple[str, dict[str, Any], Front], engine: str, manner: Manner) -> None:
    if engine == "fsspec" and manner in UNSEEN:
        pytest.skip("s3fs does not look at it")
    uri, options, front = place
    with closing(open_storage(uri, storage_options=options, engine=engine)) as storage:
        storage.write("file", [memoryview(DATA)])
        version = storage.stat("file").version
        for name, (offset, size_bytes) in RANGES.items():
            for pin in (None, version):
                if manner is answers_an_older_version and pin is None:
                    continue
                view = memoryview(bytearray(size_bytes))
                front.misbehave(manner, "file", whole=DATA)
                with pytest.raises(StorageUnavailable) as caught:
                    storage.read_into("file", offset, [view], version=pin)
                assert front.done, name
                assert "file" in str(caught.value)
                front.behave()
                storage.read_into("file", offset, [view], version=pin)
                assert view == DATA[offset : offset + size_bytes], name
        if manner in (compresses, breaks_off):
            front.misbehave(manner, "file")
            with pytest.raises(StorageUnavailable):
                storage.read("file")
            front.behave()
        assert storage.read("file") == DATA


def state_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(300_000, generator=generator), "s": torch.full((4,), float(step))}


def resumed(uri: str, options: dict[str, Any], engine: str) -> int | None:
    state = {"w": torch.zeros(300_000), "s": torch.zeros(4)}
    with ckptstore.open_store(uri, group="solo", storage_options=options, engine=engine) as store:
        checkpoint = store.resume(state)
    if checkpoint is not None:
        assert all(torch.equal(state[name], item) for name, item in state_of(checkpoint.step).items())
    return None if checkpoint is None else checkpoint.step


@pytest.fixture
def two_steps(place: tuple[str, dict[str, Any], Front], engine: str) -> tuple[str, dict[str, Any], Front]:
    uri, options, _ = place
    with ckptstore.open_store(uri, group="solo", storage_options=options, engine=engine) as store:
        for step in (1, 2):
            store.save(step, state_of(step))
    return place


@pytest.mark.parametrize(("place", "engine"), [*ENGINES, LATER], indirect=["place"])
@pytest.mark.parametrize(
    "manner", [ignores_the_range, answers_another_range, flips_a_bit, is_gone, ends_early, compresses]
)
def test_a_resume_passes_over_nothing_for_one_odd_answer(
    two_steps: tuple[str, dict[str, Any], Front],
    engine: str,
    manner: Manner,
    caplog: pytest.LogCaptureFixture,
) -> None:
    uri, options, front = two_steps
    for match in ("step-0000000002.*distcp", "step-0000000002.*ckptstore.json", "step-0000000002"):
        if manner in (ignores_the_range, answers_another_range) and match != "step-0000000002.*distcp":
            continue  # what is read whole has no range
        front.misbehave(manner, match, times=1)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert resumed(uri, options, engine) == 2
        assert front.done == 1
        if manner in (flips_a_bit, is_gone, ends_early):
            by_s3fs = engine == "fsspec" and "damaged on their way" in caplog.text  # it checks whole files
            assert by_s3fs or "was whole when it was read again" in caplog.text


@pytest.mark.parametrize(("place", "engine"), ENGINES, indirect=["place"])
def test_what_nobody_can_read_is_not_passed_over(two_steps: tuple[str, dict[str, Any], Front], engine: str) -> None:
    uri, options, front = two_steps
    front.misbehave(says_no_range, "step-0000000002.*distcp")
    with pytest.raises(StorageUnavailable):
        resumed(uri, options, engine)


@pytest.mark.parametrize(("place", "engine"), [*ENGINES, GENERIC], indirect=["place"])
def test_what_is_wrong_on_every_way_is_damage(two_steps: tuple[str, dict[str, Any], Front], engine: str) -> None:
    uri, options, front = two_steps
    front.misbehave(flips_a_bit, "step-0000000002.*distcp")
    assert resumed(uri, options, engine) == 1
    assert len(front.connections) > 1
    with closing(open_storage(uri, storage_options=options, engine=engine)) as storage:
        for manner, kind in ((is_gone, FileMissing), (ends_early, (CheckpointDamaged, StorageUnavailable))):
            front.misbehave(manner, "distcp")
            key = next(file.key for file in storage.list("checkpoints/") if file.key.endswith("distcp"))
            with pytest.raises(kind):
                storage.read_into(key, 0, [memoryview(bytearray(10))])


@pytest.mark.parametrize("cloud", CLOUDS)
def test_what_is_doubted_again_and_again_uses_up_no_descriptors(request: pytest.FixtureRequest, cloud: str) -> None:
    server: Any = request.getfixturevalue(CLOUDS[cloud])
    uri = f"{cloud}://test/doubted/{os.urandom(4).hex()}"
    with closing(open_storage(uri, storage_options=server.storage_options)) as storage:
        storage.write("file", [memoryview(b"data")])
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(30):
            assert storage.read("file") == b"data"
            storage.doubt("file")
        assert len(os.listdir("/proc/self/fd")) - before < 15
