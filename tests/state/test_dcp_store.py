"""Those who call `dcp.save` themselves, into a store: attempt, manifest, commit and retention as for everybody."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked_ranks import run_ranks
from independent_reader import read_log

from ckptstore import (
    CheckpointStore,
    InvalidMetadata,
    InvalidMetric,
    InvalidStep,
    KeepBest,
    KeepLatest,
    StoreFenced,
    open_store,
)
from ckptstore.dcp import StoreReader, StoreWriter, translated

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def state() -> dict[str, Any]:
    return {"w": torch.arange(300_000, dtype=torch.float32), "nested": {"epoch": 7}}


def test_a_plain_dcp_save_is_a_commit(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", retention=KeepBest(1, "loss"), grace_seconds=0) as store:
        for step, loss in ((1, 0.5), (2, 0.3), (3, 0.4)):
            with translated():
                dcp.save(state(), storage_writer=StoreWriter(store.dcp_target(metrics={"loss": loss}), step=step))
        assert [checkpoint.step for checkpoint in store] == [2, 3]
        checkpoint = store[3]
        assert checkpoint.metrics == {"loss": 0.4}
        assert checkpoint.verify().ok
        ours: dict[str, Any] = {"w": torch.zeros(300_000), "nested": {"epoch": 0}}
        checkpoint.load(ours)
        assert torch.equal(ours["w"], state()["w"])
        assert ours["nested"]["epoch"] == 7
        stock: dict[str, Any] = {"w": torch.zeros(300_000), "nested": {"epoch": 0}}
        dcp.load(stock, checkpoint_id=checkpoint.uri)
        assert torch.equal(stock["w"], state()["w"])
        read: dict[str, Any] = {"w": torch.zeros(300_000), "nested": {"epoch": 0}}
        dcp.load(read, storage_reader=StoreReader(checkpoint.uri))
        assert torch.equal(read["w"], state()["w"])


def test_it_goes_together_with_saves_of_the_store(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        store.resume(state())
        store.save(1, state())
        with translated():
            dcp.save(state(), storage_writer=StoreWriter(store.dcp_target(), step=2))
        store.save(3, state())
        assert [checkpoint.step for checkpoint in store] == [1, 2, 3]
        with open_store(tmp_path / "store") as later:
            later.resume()
        with pytest.raises(StoreFenced), translated():
            dcp.save(state(), storage_writer=StoreWriter(store.dcp_target(), step=4))


def test_a_dcp_save_that_begins_anew_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (4, 2):
        with open_store(tmp_path / "store") as store, translated():
            dcp.save(state(), storage_writer=StoreWriter(store.dcp_target(), step=step))
    assert caplog.text.count("step 2 is the first save of this job, and step 4 is there") == 1


def elsewhere(store: CheckpointStore, step: int) -> StoreWriter:
    """The writer as a process gets it that saves for this one."""
    return pickle.loads(pickle.dumps(StoreWriter(store.dcp_target(), step=step)))


def test_a_process_that_saves_for_a_job_claims_the_store_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path / "store", retention=KeepLatest(1), grace_seconds=0) as store:
        for step in (1, 2, 3):
            if step == 3:
                monkeypatch.setattr("ckptstore.integrations.dcp.target._claims", {})  # it is another process
            dcp.save(state(), storage_writer=elsewhere(store, step))
            assert [checkpoint.step for checkpoint in store] == [step]
        assert not list((tmp_path / "store" / "checkpoints").glob("step-0000000001-*")), "nothing was deleted"
        assert [record["kind"] for record in read_log(tmp_path / "store/log")].count("claim") == 1
        store.save(4, state())  # the claim is the job's too
        with open_store(tmp_path / "store") as later:
            later.resume()
            for writer in (elsewhere(store, 5), StoreWriter(store.dcp_target(), step=5)):
                with pytest.raises(StoreFenced), translated():
                    dcp.save(state(), storage_writer=writer)
            later.save(5, state())


def test_a_job_that_wakes_up_is_fenced_by_the_claim_of_its_process(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as old, open_store(tmp_path / "store") as new:
        dcp.save(state(), storage_writer=elsewhere(old, 1))
        new.resume()
        with pytest.raises(StoreFenced), translated():
            dcp.save(state(), storage_writer=elsewhere(old, 2))
        with pytest.raises(StoreFenced):
            old.save(2, state())
        new.save(2, state())


def test_bad_calls_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", retention=KeepBest(1, "loss")) as store:
        with pytest.raises(InvalidStep), translated():
            dcp.save(state(), storage_writer=StoreWriter(store.dcp_target(metrics={"loss": 1})))
        with pytest.raises(InvalidMetric), translated():
            dcp.save(state(), storage_writer=StoreWriter(store.dcp_target(), step=1))
        for bad, error in (({"metadata": {"a": {1}}}, InvalidMetadata), ({"metrics": {"loss": "x"}}, InvalidMetric)):
            with pytest.raises(error):
                store.dcp_target(**bad)
        assert store.latest() is None


def test_what_a_target_was_given_may_change_before_the_save(tmp_path: Path) -> None:
    metrics, metadata = {"loss": 0.5}, {"seen": [1]}
    with open_store(tmp_path / "store") as store:
        writer = StoreWriter(store.dcp_target(metrics=metrics, metadata=metadata), step=1)
        metrics["loss"] = 0.1
        metadata["seen"].append(2)
        dcp.save(state(), storage_writer=writer)
        assert (store[1].metrics, store[1].metadata) == ({"loss": 0.5}, {"seen": [1]})


def test_an_asynchronous_dcp_save(tmp_path: Path) -> None:
    with warnings.catch_warnings(), open_store(tmp_path / "store") as store:
        warnings.simplefilter("ignore")
        if not torch.distributed.is_initialized():
            init = f"file://{tmp_path / 'init'}"
            torch.distributed.init_process_group("gloo", init_method=init, rank=0, world_size=1)
        try:
            future = dcp.async_save(state(), storage_writer=StoreWriter(store.dcp_target(), step=1))
            future.result()  # type: ignore[union-attr]
        finally:
            torch.distributed.destroy_process_group()
        assert store[1].verify().ok


def cached_saves(root: str) -> dict[str, Any]:
    """What two ranks do: saves of several steps into one store, with cached plans."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    with open_store(root) as store:
        for step in (1, 2, 3):
            mine = {f"of {rank}": torch.full((9,), step)} if step == 3 else {}
            every = {"w": torch.full((600_000,), float(step)), "n": step, **mine}
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            with translated():
                dcp.save(every, storage_writer=StoreWriter(store.dcp_target(), step=step), planner=planner)
        found = {}
        for step in (1, 2, 3):
            read: dict[str, Any] = {"w": torch.zeros(600_000), "n": 0}
            dcp.load(read, storage_reader=StoreReader(store[step].uri))
            keys = sorted(StoreReader(store[step].uri).read_metadata().state_dict_metadata)
            found[str(step)] = store[step].verify().ok, read["w"].unique().tolist(), read["n"], keys
    torch.distributed.destroy_process_group()
    return found


def test_cached_plans_never_lead_into_an_earlier_checkpoint(tmp_path: Path) -> None:
    for found in run_ranks(2, cached_saves, str(tmp_path / "store")):
        assert found == {str(step): (True, [float(step)], step, KEYS[step]) for step in (1, 2, 3)}


KEYS = {1: ["n", "w"], 2: ["n", "w"], 3: ["n", "of 0", "of 1", "w"]}


def saves_of_its_own(root: str) -> dict[str, Any]:
    """What two ranks do: each saves something of its own, which it loads through DCP."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    dtype = torch.float64 if rank else torch.float32
    with open_store(root) as store:
        own = {"dtype": torch.arange(6, dtype=dtype) + rank, "shape": torch.full((3 + rank,), 7.0), "n": {"of": rank}}
        checkpoint = store.save(1, {**own, "w": torch.ones(2)})
        read: dict[str, Any] = {"dtype": torch.zeros(6, dtype=dtype), "shape": torch.zeros(3 + rank), "n": {"of": -1}}
        dcp.load(read, storage_reader=StoreReader(checkpoint.uri))
    torch.distributed.destroy_process_group()
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in read.items()}


def test_each_rank_reads_its_own_and_another_number_of_ranks_may_skip_it(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, saves_of_its_own, str(tmp_path / "store"))):
        own = {"dtype": [n + rank for n in range(6)], "shape": [7.0] * (3 + rank), "n": {"of": rank}}
        assert found == own
    (checkpoint,) = open_store(tmp_path / "store", group="solo")
    read: dict[str, Any] = {"dtype": torch.full((6,), 9.0), "n": {"of": 9}, "w": torch.zeros(2)}
    reader = StoreReader(checkpoint.uri, per_rank="skip")
    assert reader.read_metadata().state_dict_metadata.keys() == {"w"}
    dcp.load(read, storage_reader=reader, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert (read["dtype"].tolist(), read["n"], read["w"].tolist()) == ([9.0] * 6, {"of": 9}, [1, 1])
