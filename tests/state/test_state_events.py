"""What a save of a state from several ranks says of itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked_ranks import run_ranks

from ckptstore import StorageGroup, open_store
from ckptstore.dcp import StoreWriter
from ckptstore.events import CheckpointCommitted, Event, FileStored, SaveStarted, listening
from ckptstore.saving.transaction import _slowest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage"),
]


def save_and_listen(root: str) -> list[Event]:
    heard: list[Event] = []
    group = StorageGroup(int(os.environ["RANK"]), 2, "start")
    with open_store(root, group=group, durable=False) as store, listening(heard.append):
        state = {"own": torch.full((4,), float(group.rank)), "rank": group.rank}
        store.save(1, state)
        store.save_async(2, state).result()
    return heard


def test_events_say_which_rank_did_what(tmp_path: Path) -> None:
    for rank, heard in enumerate(run_ranks(2, save_and_listen, str(tmp_path / "store"))):
        assert {event.rank for event in heard if isinstance(event, FileStored)} == {rank}
        started = [event for event in heard if isinstance(event, SaveStarted)]
        assert [(event.step, event.rank) for event in started] == [(1, rank), (2, rank)]
        assert all(event.num_files > 0 and event.size_bytes > 0 for event in started)
        committed = [event for event in heard if isinstance(event, CheckpointCommitted)]
        assert [event.world_size for event in committed] == [2, 2]
        assert all(event.slowest_rank in (0, 1) and event.slowest_by_seconds >= 0 for event in committed)


def test_the_slowest_rank_is_compared_with_the_one_in_the_middle() -> None:
    assert _slowest([1.0]) == {}
    assert _slowest([1.0, 1.5]) == {"slowest_rank": 1, "slowest_by_seconds": 0.5}
    assert _slowest([1.0, 4.0, 1.5, 2.0]) == {"slowest_rank": 1, "slowest_by_seconds": 2.5}


def test_a_save_by_dcp_says_that_it_is_committed(tmp_path: Path) -> None:
    heard: list[Event] = []
    with open_store(tmp_path / "store", durable=False) as store, listening(heard.append):
        dcp.save({"a": torch.ones(3)}, storage_writer=StoreWriter(store.dcp_target(), step=7), no_dist=True)
    (event,) = [event for event in heard if isinstance(event, CheckpointCommitted)]
    assert (event.step, event.number, event.world_size) == (7, 2, 1)
    assert event.seconds > 0
