"""What a checkpoint and a store say of themselves, of what was and of what lies beside, and who reads them alone."""

from __future__ import annotations

import logging
import math
import multiprocessing
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from thread_ranks import run_threads
from torch import nn
from trees import directories, make_tree, settle

from ckptstore import (
    Checkpoint,
    CheckpointGone,
    CheckpointStore,
    FastTier,
    GroupMissing,
    InvalidInput,
    KeepLatest,
    StoreMissing,
    open_store,
)
from ckptstore.testing.s3_server import s3_server
from ckptstore.tools.cli import main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two ranks: a tensor that both have, tied ones, one that each has of its own, and plain values."""
    tied = nn.ModuleDict({"a": nn.Linear(2, 3, bias=False), "b": nn.Linear(2, 3, bias=False)})
    tied["b"].weight = tied["a"].weight

    def flow(store: CheckpointStore, rank: int) -> None:
        own = torch.full((rank + 2,), rank)
        big = torch.ones(1_000_000, 2, dtype=torch.bfloat16)
        store.save(1, {"model": tied, "big": big, "own": own, "epoch": 1, "mine": rank}, metrics={"<loss>": 0.5})

    assert run_threads(2, tmp_path / "store", flow) == [None, None]
    return tmp_path / "store"


def test_the_tensors_of_a_checkpoint(root: Path) -> None:
    with open_store(root) as store:
        tensors = store[1].tensors
        assert list(tensors) == ["big", "model.a.weight", "model.b.weight", "own"]
        big = tensors["big"]
        assert (big.dtype, big.shape, big.size_bytes, big.ranks) == ("bfloat16", (1_000_000, 2), 4_000_000, (0, 1))
        assert set(big.files) <= {receipt.name for receipt in store[1].files}
        assert len(big.files) == 2
        assert tensors["model.b.weight"].files == tensors["model.a.weight"].files
        own = tensors["own"]
        assert (own.is_per_rank, own.shape, own.ranks, big.is_per_rank) == (True, (2,), (0, 1), False)
        assert store[1].keys() == ["big", "epoch", "mine", "model.a.weight", "model.b.weight", "own"]
        with pytest.raises(KeyError, match=r"did you mean 'model\.a\.weight'"):
            tensors["model.a.wieght"]
        assert "missing" not in tensors


def test_a_store_has_a_length_and_is_true(root: Path, tmp_path: Path) -> None:
    with open_store(root) as store, open_store(tmp_path / "empty") as empty:
        assert (len(store), len(empty)) == (1, 0)
        assert empty
        for text in (store._repr_html_(), store[1]._repr_html_()):
            assert "<table>" in text
            assert "&lt;loss&gt;" in text
            assert "<loss>" not in text
        (tmp_path / "d").mkdir()
        checkpoint = empty.save_directory(1, tmp_path / "d")
        with pytest.raises(InvalidInput, match="directory checkpoint"):
            checkpoint.keys()


def test_show_lists_tensors(root: Path) -> None:
    def show(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(main, ["show", f"{root}@1", *arguments])
        assert result.exit_code == code, result.output
        return result

    lines = show("--tensors").stdout.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("tensor "))
    cells = [line.split() for line in lines[start + 1 :]]
    assert [row[:5] for row in cells] == [
        ["big", "bfloat16", "1000000x2", "3.8", "MiB"],
        ["model.a.weight", "float32", "3x2", "24", "B"],
        ["model.b.weight", "float32", "3x2", "24", "B"],
        ["own", "int64", "2", "16", "B"],
    ]
    assert cells[0][5:] == ["0-1"]
    assert cells[1][5:] in (["0"], ["1"])
    assert cells[3][5:] == ["0-1,", "each", "its", "own"]
    assert "model.a.weight" not in show("--tensors", "own").stdout
    assert "did you mean 'model.*'" in show("--tensors", "modle.*", code=2).stderr


def test_metrics_outlive_the_files(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", {"f": b"x" * 10})
    root = tmp_path / "store"
    with open_store(root) as store:
        assert store.history() == []
        assert store.history().to_pandas().empty
        store.save_directory(1, source, metrics={"loss": 0.9, "step": 7})
        store.save_directory(2, source, metrics={"loss": math.inf})
        store.save_directory(2, source, metrics={"accuracy": 0.5})
    with open_store(root, retention=KeepLatest(1), grace_seconds=0) as store:
        store.save_directory(3, source)
        settle(store)
        store.save_directory(4, source, metrics={"loss": 0.1})
        settle(store)
        store.prune()
        assert [item.step for item in store] == [2, 4], "the job began with step 2"
        assert len(directories(root)) == 2
        past = store.history()
    assert [(save.step, save.epoch, save.status) for save in past] == [
        (1, 1, "deleted"),
        (2, 1, "deleted"),
        (2, 1, "live"),
        (3, 2, "deleted"),
        (4, 2, "live"),
    ]
    reasons = [save.removed_because for save in past]
    assert reasons == ["no rule keeps it", "step 2 was saved again", "", "no rule keeps it", ""]
    assert [dict(save.metrics) for save in past][:2] == [{"loss": 0.9, "step": 7.0}, {"loss": math.inf}]
    assert {(save.size_bytes, save.world_size, save.kind) for save in past} == {(10, 1, "directory")}
    frame = past.to_pandas()
    assert frame["step"].tolist() == [1, 2, 2, 3, 4]
    assert frame["metrics.step"].tolist()[0] == 7.0
    assert frame["loss"].isna().tolist() == [False, False, True, True, False]
    assert frame.columns[-1] == "accuracy"


def test_what_came_back_from_the_trash_is_live_again(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        for step in (1, 2, 3):
            store.save_directory(step, None)
        store.roll_back(1)
        store.restore(3)
        found = [(save.status, save.removed_because) for save in store.history()]
    assert found == [("live", ""), ("trash", "roll back to step 1"), ("live", "")]


def test_without_pandas_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with open_store(tmp_path / "store") as store, pytest.raises(InvalidInput, match="pandas, which is not installed"):
        store.history().to_pandas()


def test_one_process_of_a_job_reads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path / "store", durable=False) as store:
        uri = store.save(1, {"a": torch.ones(3)}).uri
    monkeypatch.setenv("WORLD_SIZE", "4")
    with open_store(tmp_path / "store") as store, pytest.raises(GroupMissing, match="group='solo'"):
        store.load({"a": torch.zeros(3)})
    with pytest.raises(GroupMissing, match="group='solo'"):
        Checkpoint.from_uri(uri).load({"a": torch.zeros(3)})
    for load in (open_store(tmp_path / "store", group="solo").load, Checkpoint.from_uri(uri, group="solo").load):
        state = {"a": torch.zeros(3)}
        load(state)
        assert torch.equal(state["a"], torch.ones(3))


def test_a_name_that_is_no_checkpoint_says_what_opens_it(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with open_store(root, durable=False) as store:
        store.save_directory(30, None)
    with pytest.raises(InvalidInput, match=rf"is a store\. Write open_store\('{root}'\)\.latest\(\)"):
        Checkpoint.from_uri(str(root))
    with pytest.raises(InvalidInput, match=rf"Write open_store\('{root}'\)\[30\]"):
        Checkpoint.from_uri(f"{root}@30")
    with pytest.raises(InvalidInput, match=rf"Write open_store\('{root}'\)\.latest\(\)"):
        Checkpoint.from_uri(f"{root}@latest")
    with pytest.raises(CheckpointGone):
        Checkpoint.from_uri(f"{tmp_path / 'other'}@30")
    assert not (tmp_path / "other@30").exists()


def look_at(data: bytes) -> tuple[object, ...]:
    checkpoint = pickle.loads(data)
    state = {"a": torch.zeros(3)}
    checkpoint.load(state)
    with checkpoint.as_directory() as path:
        names = sorted(item.name for item in path.iterdir())
    return checkpoint.step, checkpoint.number, checkpoint.metrics, checkpoint.uri, state["a"].tolist(), names


def test_another_process_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path / "store", durable=False) as store:
        sent = store.save(7, {"a": torch.ones(3)}, metrics={"loss": 0.5})
        assert pickle.loads(pickle.dumps(sent)) == sent
    monkeypatch.setenv("WORLD_SIZE", "4")  # as in a worker of a data loader
    monkeypatch.setenv("RANK", "2")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        step, number, metrics, uri, values, names = pool.apply(look_at, [pickle.dumps(sent)])
        alone = pool.apply(look_at, [pickle.dumps(Checkpoint.from_uri(sent.uri))])
    assert (step, number, metrics, uri, values) == (7, sent.number, {"loss": 0.5}, sent.uri, [1.0, 1.0, 1.0])
    assert {file.name for file in sent.files} <= set(names)
    assert alone[0] == 7
    assert alone[4] == [1.0, 1.0, 1.0]


def test_no_secret_travels() -> None:
    with s3_server(buckets=["bucket"]) as server:
        options = {**server.storage_options, "key": "AKIACANARY", "secret": "canary-secret"}
        with open_store("s3://bucket/run", storage_options=options) as store:
            saved = store.save_directory(1, None)
            for checkpoint in (saved, Checkpoint.from_uri(saved.uri, storage_options=options)):
                data = pickle.dumps(checkpoint)
                assert b"canary" not in data.lower()
                assert server.endpoint_url.encode() not in data
                assert pickle.loads(data).uri == saved.uri


def test_what_lives_in_memory_cannot_be_sent() -> None:
    with open_store("memory://sent") as store:
        checkpoint = store.save_directory(1, None)
        with pytest.raises(InvalidInput, match="lives in the memory of this process"):
            pickle.dumps(checkpoint)


def full(uri: str, step: int, **options: Any) -> None:
    with open_store(uri, group="solo", **options) as store:
        store.save(step, {"epoch": step})


def lines_of_start(caplog: pytest.LogCaptureFixture, uri: str, state: Any, **options: Any) -> list[tuple[int, str]]:
    caplog.clear()
    with caplog.at_level(logging.INFO), open_store(uri, group="solo", **options) as store:
        assert store.resume(state) is None
    return [(record.levelno, record.getMessage()) for record in caplog.records if "begins anew" in record.getMessage()]


@pytest.mark.parametrize("state", [None, {"epoch": -1}], ids=["files", "state"])
def test_a_misspelt_place_is_told_by_the_likest_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: Any
) -> None:
    assert lines_of_start(caplog, str(tmp_path / "alone"), state) == []
    full(str(tmp_path / "runs/mistral"), 7)
    full(str(tmp_path / "runs/llama-7"), 12000)
    (tmp_path / "runs/lima-7").write_bytes(b"")
    ((level, line),) = lines_of_start(caplog, str(tmp_path / "runs/lama-7"), state)
    assert level == logging.WARNING
    assert f"{tmp_path}/runs/llama-7, beside it, has step 12000" in line
    ((level, line),) = lines_of_start(caplog, str(tmp_path / "runs/llama-8"), state)  # a run of its own
    assert level == logging.INFO
    assert "step 12000" in line


def test_a_misspelt_prefix_of_a_bucket_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    with s3_server(buckets=["b"]) as server:
        options = {"storage_options": server.storage_options}
        full("s3://b/runs/llama", 3, **options)
        ((level, line),) = lines_of_start(caplog, "s3://b/runs/Llama", {"epoch": -1}, **options)
        assert level == logging.WARNING
        assert "s3://b/runs/llama, beside it, has step 3" in line
        assert lines_of_start(caplog, "s3://b", None, **options) == []


def test_a_start_can_require_something_to_resume_and_writes_nothing_without_it(tmp_path: Path) -> None:
    full(str(tmp_path / "llama"), 12)

    def flow(store: CheckpointStore, _rank: int) -> str:
        with pytest.raises(StoreMissing, match=r"llama, beside it, has step 12\. Was that meant") as caught:
            store.resume({"epoch": -1}, required=True)
        return str(caught.value)

    assert len(set(run_threads(2, tmp_path / "lama", flow))) == 1
    assert [path for path in (tmp_path / "lama").rglob("*") if path.is_file()] == []
    fast = FastTier(tmp_path / "fast", node="a")
    with open_store(tmp_path / "lima", group="solo", fast=fast) as store, pytest.raises(StoreMissing):
        store.resume(required=True)
    with open_store(tmp_path / "llama", group="solo", fast=fast) as store:
        assert store.resume({"epoch": -1}, required=True).step == 12
