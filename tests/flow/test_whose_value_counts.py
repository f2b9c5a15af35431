"""An argument of a collective call that one rank alone gives counts, or is refused on all ranks: never dropped."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import forked_ranks
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from outcomes import end_of
from thread_ranks import in_threads, run_threads
from trees import steps

from ckptstore import Checkpoint, CheckpointStore, KeepBest, KeepLatest, StorageGroup, open_store
from ckptstore.dcp import StoreWriter
from ckptstore.errors import InvalidInput, InvalidMetadata, InvalidMetric, InvalidStep, StateMismatch

PAGE = Path(__file__).parents[2] / "docs" / "explain" / "how-ranks-meet.md"
SAVES = {
    "exists": ("replace", "error"),
    "incremental": (False, True),
    "stock_readable": ("auto", True),
    "dtype": (None, {"w": "bfloat16"}),
    "on_busy": ("wait", "skip"),
}
COLLECTIVE = ("save", "save_async", "save_directory", "load", "resume", "warm_up", "drain")


def state() -> dict[str, Any]:
    return {"w": torch.ones(3)}


def save(store: CheckpointStore, step: int, **options: Any) -> Checkpoint | None:
    return store.save_async(step, state(), **options).result()


def ends(root: Path, call: Callable[[CheckpointStore, int], Any], **options: Any) -> list[Any]:
    """What each of two ranks gets of the call, after which both save and load as if nothing had been."""

    def flow(store: CheckpointStore, rank: int) -> Any:
        store.save(1, state())
        end = end_of(lambda: call(store, rank))
        store.save(3, state())
        assert store.load(state()) is not None
        return end

    return run_threads(2, root, flow, **options)


@pytest.mark.parametrize("bearer", [0, 1])
def test_metrics_and_metadata_of_one_rank_alone_count(tmp_path: Path, bearer: int) -> None:
    options = {"retention": KeepBest(1, metric="loss", mode="min") | KeepLatest(9), "missing": "worst"}
    given = {"metrics": {"loss": 0.5}, "metadata": {"stage": [1]}}
    found = ends(tmp_path, lambda store, rank: save(store, 2, **(given if rank == bearer else {})), **options)
    assert [(dict(end.metrics), dict(end.metadata)) for end in found] == [({"loss": 0.5}, {"stage": [1]})] * 2


def test_of_unlike_values_those_of_the_lowest_rank_count_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def flow(store: CheckpointStore, rank: int) -> Any:
        for step in (2, 4):
            found = save(store, step, metrics={"a": rank, "b": float("nan")}, metadata={"c": {"d": rank}})
        return found

    with caplog.at_level(logging.WARNING, "ckptstore"):
        found = run_threads(2, tmp_path, flow)
    assert [(end.metrics["a"], dict(end.metadata)) for end in found] == [(0, {"c": {"d": 0}})] * 2
    words = [record.getMessage() for record in caplog.records]
    assert words == [
        "step 2: 'a' of the metrics is 0.0 on rank 0 and 1.0 on rank 1: that of the lowest rank counts",
        "step 2: 'c' of the metadata is {'d': 0} on rank 0 and {'d': 1} on rank 1: that of the lowest rank counts",
    ]


@pytest.mark.parametrize("name", SAVES)
def test_options_of_a_save_are_the_same_or_refused_with_both_ranks(tmp_path: Path, name: str) -> None:
    for error in ends(tmp_path, lambda store, rank: save(store, 2, **{name: SAVES[name][rank]})):
        assert isinstance(error, InvalidInput)
        assert {"rank 0", "rank 1"} <= set(re.findall(r"rank \d", str(error)))


BAD = {
    "metrics": ({"a": "b"}, InvalidMetric),
    "metadata": ({"a": object()}, InvalidMetadata),
    "dtype": (5, InvalidInput),
    "on_busy": ("later", InvalidInput),
    "max_failures": (-1, InvalidInput),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_on_one_rank_is_raised_on_all(tmp_path: Path, name: str) -> None:
    value, kind = BAD[name]
    for error in ends(tmp_path, lambda store, rank: save(store, 2, **({name: value} if rank else {}))):
        assert isinstance(error, kind)
        assert error.rank == 1


def test_steps_and_directories_are_compared(tmp_path: Path) -> None:
    for error in ends(tmp_path / "steps", lambda store, rank: save(store, 2 + rank)):
        assert isinstance(error, InvalidStep)
        assert "step 2" in str(error)
        assert "step 3" in str(error)
    for name, value in {"exists": "error", "suffix": "always", "shared": ["a"], "link": True}.items():

        def call(store: CheckpointStore, rank: int, given: Mapping[str, Any] = {name: value}) -> Any:
            return store.save_directory(2, None, **(given if rank else {}))

        for error in ends(tmp_path / name, call):
            assert isinstance(error, InvalidInput), name
            assert "rank 1" in str(error), name


LOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dtype": ({}, {"dtype": "half"}),
    "per_rank": ({}, {"per_rank": "last"}),
    "read_once": ({}, {"read_once": "node"}),
    "strict, rank 0": ({}, {"strict": False}),
    "strict, rank 1": ({"strict": False}, {}),
}


@pytest.mark.parametrize("how", LOADS)
def test_options_of_a_load_are_refused_on_all_ranks(tmp_path: Path, how: str) -> None:
    def call(store: CheckpointStore, rank: int) -> Any:
        more = {"x": torch.ones(2)} if how.startswith("strict") and rank else {}
        return store.load({**state(), **more}, **LOADS[how][rank])

    for error in ends(tmp_path, call):
        assert isinstance(error, InvalidInput | StateMismatch)


def test_some_ranks_that_resume_while_others_load_are_told_so(tmp_path: Path) -> None:
    def call(store: CheckpointStore, rank: int) -> Any:
        return store.load(state()) if rank else store.resume(state())

    def without_state(store: CheckpointStore, rank: int) -> Any:
        return store.resume() if rank else store.resume(state())

    for what, flow in (("load", call), ("state", without_state)):
        for error in ends(tmp_path / what, flow):
            assert isinstance(error, InvalidInput)
            assert "do not do the same" in str(error)


def test_another_retention_on_another_rank_is_refused_and_that_of_rank_0_alone_counts(tmp_path: Path) -> None:
    policies = {"alike": (2, 2), "rank-0-alone": (2, None), "unlike": (2, 3), "rank-1-alone": (None, 2)}

    for name, given in policies.items():

        def run(rank: int, name: str = name, given: tuple[int | None, int | None] = given) -> Any:
            policy = None if given[rank] is None else KeepLatest(given[rank])
            with open_store(tmp_path / name, group=StorageGroup(rank, 2, name), retention=policy) as store:
                return [store.save(step, state()).step for step in range(4)] and steps(store)

        found = in_threads(2, run)
        if name in ("alike", "rank-0-alone"):
            assert found == [[2, 3], [2, 3]]
        else:
            assert ["rank 1 opened the store with" in str(error) for error in found] == [True, True]


def dcp_ranks(root: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with open_store(root) as store:
        for step in (1, 2):
            given = {"metrics": {"loss": 0.5}, "metadata": {"stage": rank}} if rank else {}
            writer = StoreWriter(store.dcp_target(**given), step=step)
            dcp.save({f"w{rank}": torch.ones(3)}, storage_writer=writer)
        seen = {"step": store[2].step, **store[2].metrics, **store[2].metadata}
    dist.destroy_process_group()
    return seen


def test_what_one_rank_gives_to_a_target_of_dcp_counts(tmp_path: Path) -> None:
    seen = forked_ranks.run_ranks(2, dcp_ranks, str(tmp_path), env={"CKPTSTORE_DURABLE": "false"})
    assert seen[0] == {"step": 2, "loss": 0.5, "stage": 1}


def test_the_page_has_each_argument_of_each_collective_call() -> None:
    rows = re.findall(r"^\| (`.+?) \| (`.+?) \|", PAGE.read_text(), re.MULTILINE)
    named = {
        (call, argument)
        for arguments, calls in rows
        for call in re.findall(r"`([\w.]+)`", calls)
        for argument in re.findall(r"`(\w+)`", arguments)
    }
    for call in COLLECTIVE:
        for name in list(inspect.signature(getattr(CheckpointStore, call)).parameters)[1:]:
            assert (call, name) in named, f"{call}({name}=...) is in no row"
    for call, name in named:
        of = open_store if call == "open_store" else getattr(CheckpointStore, call, None)
        assert of is None or name in inspect.signature(of).parameters, f"{call} has no {name}"
