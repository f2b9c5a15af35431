"""torchtitan's Trainer with the debug model: our manager against its own DCP manager, on two processes or one.

The losses say what was restored: each step's depends on the weights, the moments of AdamW, the learning rate and the
position in the data.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import forked_ranks
import pytest
import torch
from safetensors.torch import load_file

from ckptstore import open_store
from ckptstore.extensions.exchange.places import on_this_machine
from ckptstore.extensions.tier.candidates import FastCandidate
from ckptstore.format.order import SaveOrder
from ckptstore.integrations.torchtitan.places import ResumeOrder, as_metadata
from ckptstore.testing.s3_server import s3_server

pytestmark = pytest.mark.slow

PACKAGES = Path(__file__).parents[2] / ".servers/torchtitan"
"""torchtitan and what it needs besides the packages of the environment; see tests/servers/install.py."""

SHARDED = {"data_parallel_shard": 2}


@pytest.fixture(autouse=True)
def _torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (PACKAGES / ".installed").exists():
        message = "torchtitan is not installed; run `make servers`"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    monkeypatch.setattr(sys, "path", [*sys.path, str(PACKAGES)])  # behind what the environment has itself


run_ranks = partial(forked_ranks.run_ranks, modules=(*forked_ranks.TORCH, "torchtitan_on_cpu"), timeout_seconds=100)


def call(name: str, *args: Any) -> Any:
    """A function of the worker; only the processes that it runs in load torchtitan."""
    import torchtitan_worker

    return getattr(torchtitan_worker, name)(*args)


def train(n: int, folder: Path, checkpoint: dict[str, Any] | None = None, **how: Any) -> dict[str, Any]:
    """One training of `n` processes. All of them see the same."""
    killed = {"expect_killed": list(range(n))} if how.get("kill_at") else {}
    found: list[Any] = run_ranks(n, call, "train", str(folder), checkpoint or {}, how, **killed)
    assert all(each == found[0] for each in found)
    return found[0] or {}


def losses(n: int, folder: Path, checkpoint: dict[str, Any] | None = None, **how: Any) -> dict[int, float]:
    found = train(n, folder, checkpoint, **how)
    assert "error" not in found, found["error"]
    return dict(found["losses"])


def test_it_goes_on_where_it_ended_as_with_their_own_manager(tmp_path: Path) -> None:
    whole = losses(2, tmp_path / "whole", manager="theirs", steps=6, **SHARDED)
    train(2, tmp_path, {"keep_latest_k": 1}, steps=6, kill_at=5, **SHARDED)
    store = open_store(tmp_path / "checkpoint", group="solo")
    assert [checkpoint.step for checkpoint in store] == [4], "the one before has gone to the trash"
    assert losses(1, tmp_path, steps=6) == pytest.approx({5: whole[5], 6: whole[6]}, rel=1e-6)
    assert [checkpoint.step for checkpoint in store] == [4, 6], "what a job went on from stays"
    assert all(checkpoint.verify().ok for checkpoint in store)


@pytest.mark.slow
def test_the_recipe_of_the_page_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    """It begins with a checkpoint of theirs."""
    page = (Path(__file__).parents[2] / "docs/how-to/coming-from.md").read_text()
    after = (
        page.split("\n## torchtitan's CheckpointManager\n")[1].split("\nAfter:\n")[1].split("```")[1].partition("\n")[2]
    )
    own: dict[str, Any] = {"has_own_loader": True, **SHARDED}
    losses(2, tmp_path / "theirs", manager="theirs", steps=2, **own)
    found = []
    for place, kill_at in (("whole", None), ("killed", 5), ("killed", None)):
        recipe = after.replace("s3://bucket/runs/llama", str(tmp_path / place)).replace("interval=500", "interval=2")
        recipe = recipe.replace("/shared/outputs/checkpoint/step-5000", str(tmp_path / "theirs/checkpoint/step-2"))
        found.append(train(2, tmp_path / place, recipe=recipe, kill_at=kill_at, steps=6, **own))
    whole, _, resumed = found
    assert resumed["losses"] == {step: whole["losses"][step] for step in (5, 6)}
    assert resumed["weights"] == whole["weights"]


@pytest.mark.long
def test_stages_of_a_pipeline_load_into_other_stages(tmp_path: Path) -> None:
    """Several stages on a rank, as interleaved schedules have them, then other ones, and all layers on one rank."""
    first, second = run_ranks(2, call, "stages", str(tmp_path), [[[0], [2]], [[1], [3]]], 1, "save")
    saved = {**first, **second}
    assert len(saved) == 2 * 4 + 3 * 2 * 4 + 2
    for n, deal in ((2, [[[3, 1]], [[2, 0]]]), (1, [[[0, 1, 2, 3]]])):
        found = run_ranks(n, call, "stages", str(tmp_path), deal, 2, "load")
        assert {key: value for held in found for key, value in held.items()} == saved
    (fewer,) = run_ranks(1, call, "stages", str(tmp_path), [[[0], [1, 2]]], 2, "load")
    (warning,) = fewer.pop("told")
    assert "step-0000000001" in warning
    assert warning.partition(" of ")[0].endswith(" keys")
    assert "layers.3.bias, layers.3.weight, optimizer.param_groups.layers.3.bias" in warning
    assert fewer == {key: saved[key] for key in fewer}
    refused = run_ranks(2, call, "stages", str(tmp_path), [[[3, 1]], [[2, 0]]], 2, "refuse")
    assert refused[0] == refused[1]
    assert "the Position at 'train_state' refused its state: AssertionError: not this one (rank 1)" in refused[0]


def test_a_save_that_fails_in_the_background_is_raised_by_the_next_one_on_all_ranks(tmp_path: Path) -> None:
    told = run_ranks(2, call, "stages", str(tmp_path), [[[0, 1]], [[2, 3]]], 1, "fill")
    assert told == [["StorageFull in save(2): step 1 rank 1", "[3]"]] * 2


def test_what_the_options_cannot_mean_is_refused(tmp_path: Path) -> None:
    (told,) = run_ranks(1, call, "refused", str(tmp_path))
    assert told == {
        "mode": "ValueError: Invalid async_mode: sometimes",
        "inside": f"InvalidInput: hf_folder {tmp_path}/a/hf is inside of the store at {tmp_path}/a, where only its own "
        "files may lie",
        "hf_folder": "ValueError: hf_folder is where last_save_in_hf puts its files, and that is False.",
        "keep": "ValueError: keep_latest_k cannot be negative.",
        "copies": "InvalidInput: checkpoint.fast, checkpoint.fast_copies: copies is 3, it is 1 or 2",
        "no_tier": "InvalidInput: checkpoint.fast_keep is there, and checkpoint.fast is not. checkpoint.fast is the "
        "directory for fast checkpoints, on a disk of each node",
        "relative": "ValueError: initial_load_path must be an absolute path or a remote URI (e.g. gs://...): a/b",
        "excluded": "InvalidInput: exclude_from_loading names momentum, which is no part of this training",
        "adapter": "InvalidInput: last_save_in_hf and initial_load_in_hf need the model's sd_adapter, and this model "
        "has none",
        "off": "False False False",
    }


def on_nodes(folder: Path, mode: str = "disabled", **options: Any) -> dict[str, Any]:
    """Each rank is a node, which has a disk."""
    return {"async_mode": mode, "fast": f"{folder}-{{}}", "fast_node": "node{}", "fast_copies": 2, **options}


SLOW = {"fast_drain_bytes_per_second": 1.0}
"""Nothing comes into the store."""


@pytest.mark.slow
def test_a_killed_job_that_lost_a_node_goes_on(tmp_path: Path) -> None:
    """It has a fast tier."""
    mode = "async_with_pinned_mem"
    whole = losses(2, tmp_path / "theirs", manager="theirs", steps=6, **SHARDED)
    train(2, tmp_path / mode, on_nodes(tmp_path / mode, mode, **SLOW), steps=6, kill_at=5, **SHARDED)
    shutil.rmtree(tmp_path / f"{mode}-1")
    assert [checkpoint.step for checkpoint in open_store(tmp_path / mode / "checkpoint", group="solo")] == []
    resumed = losses(2, tmp_path / mode, on_nodes(tmp_path / mode, mode), steps=6, **SHARDED)
    assert resumed == {step: whole[step] for step in resumed}
    assert min(resumed) in (3, 5), "the save of step 4 may have been in flight"
    latest: Any = open_store(tmp_path / mode / "checkpoint", group="solo").latest()
    assert (latest.step, latest.verify().ok) == (6, True), "the last step is waited for"


@pytest.mark.long
def test_a_step_that_the_nodes_alone_have_is_loaded_by_its_number(tmp_path: Path) -> None:
    """And one that nobody has takes nothing away. What holds the model alone is passed over."""
    tier = on_nodes(tmp_path / "disk")
    train(2, tmp_path, {**tier, **SLOW}, steps=6, kill_at=5, **SHARDED)
    missing = train(2, tmp_path, {**tier, "load_step": 3}, steps=6, **SHARDED)["error"]
    assert missing.startswith(f"FileMissing: --checkpoint.load_step=3 not found in {tmp_path}/checkpoint")
    hugging_face = {"last_save_model_only": True, "last_save_in_hf": True}
    whole = losses(2, tmp_path, {**tier, **hugging_face, "load_step": 2}, steps=5, **SHARDED)
    assert whole.keys() == {3, 4, 5}
    assert (tmp_path / "checkpoint-hf/step-5/model.safetensors").exists()
    again = losses(2, tmp_path, tier, steps=5, **SHARDED)
    assert again == {5: whole[5]}, "step 5 holds the model alone, and step 4 all"


def test_the_positions_of_data_loaders_find_their_ranks(tmp_path: Path) -> None:
    """torchtitan's own data loader has a key for each data parallel rank."""
    how: dict[str, Any] = {"steps": 4, "is_counted_by_rank": True}
    whole = losses(2, tmp_path, **how, **SHARDED)
    at_2 = {"load_step": 2}
    assert losses(2, tmp_path, at_2, **how, data_parallel_replicate=2) == pytest.approx({3: whole[3], 4: whole[4]})
    assert losses(2, tmp_path, at_2, **how, tensor_parallel=2) == pytest.approx({3: whole[3], 4: whole[4]})
    how["steps"] = 5  # step 4 is the tensor parallel one's now, which has a single position
    refused = train(2, tmp_path, **how, **SHARDED)["error"]
    assert "StateMismatch" in refused
    assert "1 missing in the checkpoint: dataloader.dp_rank_1" in refused
    assert losses(2, tmp_path, {"exclude_from_loading": ["dataloader"]}, **how, **SHARDED).keys() == {5}


@pytest.mark.long
def test_the_last_step_leaves_the_model_for_hugging_face_in_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files as theirs on a disk; a new training begins from either with the same losses."""
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text("{}")
    how: dict[str, Any] = {"hf_assets_path": str(assets), **SHARDED}
    last = {"last_save_model_only": True, "last_save_in_hf": True, "export_dtype": "bfloat16"}
    losses(2, tmp_path / "theirs", last, manager="theirs", steps=3, **how)
    files = tmp_path / "theirs/checkpoint/step-3"
    theirs = {name: tensor for file in files.glob("*.safetensors") for name, tensor in load_file(file).items()}
    with s3_server(buckets=["test"]) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        store_uri, export_uri = "s3://test/run", "s3://test/run-hf/step-3"
        train(2, tmp_path, {**last, "folder": store_uri}, steps=3, kill_at=3, **how)
        whole = losses(2, tmp_path, {**last, "folder": store_uri, "async_mode": "async"}, steps=3, **how)
        assert list(whole) == [3]
        with on_this_machine(export_uri, None, of_folder=lambda name: True) as exported:
            assert sorted(file.name for file in exported.iterdir()) == ["config.json", "model.safetensors"]
            ours = load_file(exported / "model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == torch.bfloat16 for name in ours)
        begun = {"initial_load_in_hf": True}
        from_files = {**begun, "initial_load_path": str(files)}
        expected = losses(2, tmp_path / "a", from_files, manager="theirs", steps=2, **how)
        found = losses(2, tmp_path / "b", {**begun, "initial_load_path": export_uri}, steps=2, **how)
        assert found == expected
        again = losses(1, tmp_path, {**last, "folder": store_uri}, steps=3, hf_assets_path=str(assets))
        assert again == pytest.approx(whole), "step 3 holds the model alone, so the step is trained once more"
    assert not list(Path(tempfile.gettempdir()).glob("ckptstore-import-*")), "no download is left"


@pytest.mark.long
def test_the_first_weights_come_from_wherever_they_are(tmp_path: Path) -> None:
    """A folder of theirs and a store, for either manager; a seed; steps that are not there."""
    theirs, ours = tmp_path / "theirs/checkpoint/step-4", tmp_path / "ours/checkpoint"
    losses(2, tmp_path / "theirs", manager="theirs", steps=4, **SHARDED)
    whole = losses(2, tmp_path / "ours", {"enable_first_step_checkpoint": True}, steps=4, **SHARDED)
    store = open_store(ours, group="solo")
    assert [checkpoint.step for checkpoint in store] == [1, 2, 4]
    directory = store[4].uri
    model_only = [
        losses(1, tmp_path / f"begun-{number}", {"initial_load_path": str(path)}, manager=manager, steps=1)
        for number, (manager, path) in enumerate(
            [("theirs", theirs), ("theirs", directory), ("ours", theirs), ("ours", f"{ours}@4"), ("ours", ours)]
        )
    ]
    assert all(found == model_only[0] for found in model_only)
    everything = {"initial_load_path": f"{ours}@2", "initial_load_model_only": False}
    assert losses(1, tmp_path / "all", everything, steps=4) == pytest.approx({3: whole[3], 4: whole[4]})
    everything["initial_load_path"] = str(theirs)
    assert losses(1, tmp_path / "theirs-all", everything, steps=5).keys() == {5}
    assert losses(2, tmp_path / "ours", {"load_only": True, "load_step": 2}, steps=4, **SHARDED).keys() == {3, 4}
    assert [checkpoint.step for checkpoint in store] == [1, 2, 4]
    missing = train(1, tmp_path / "ours", {"load_step": 3}, steps=4)["error"]
    assert missing.startswith(f"FileMissing: --checkpoint.load_step=3 not found in {ours}, which has 1, 2, 4.")
    assert losses(1, tmp_path / "nothing", {"load_only": True}, steps=1).keys() == {1}
    assert not (tmp_path / "nothing/checkpoint").exists()


@pytest.mark.long
def test_a_seed_gives_the_model_and_nothing_else(tmp_path: Path) -> None:
    for manager in ("theirs", "ours"):
        assert train(1, tmp_path / manager, {"create_seed_checkpoint": True}, manager=manager, steps=2)["losses"] == {}
    theirs, ours = (
        losses(2, tmp_path / manager, manager=manager, steps=2, **SHARDED) for manager in ("theirs", "ours")
    )
    assert ours == theirs
    assert sorted(ours) == [1, 2]


def test_checkpoints_of_the_model_alone_are_no_resume_source_wherever_they_lie(tmp_path: Path) -> None:
    """Below the newest whole one too, to which a damaged one leads."""
    with open_store(tmp_path / "store", durable=False) as store:
        saved = {
            step: store.save(step, {"w": torch.ones(1)}, metadata=as_metadata("model" if step in (2, 3, 5) else "all"))
            for step in range(1, 6)
        }
        numbers = {step: checkpoint.number or 0 for step, checkpoint in saved.items()}
        order = ResumeOrder(store)
        assert order([]) == [numbers[4], numbers[1]]
        none: dict[str, Any] = {"attempt": "", "certificate": None, "holders": {}}
        candidates = [
            FastCandidate(step=step, order=SaveOrder(1, step), number=numbers[step], **none) for step in range(5, 0, -1)
        ]
        assert [candidate.step for candidate in order.of_fast(candidates)] == [4, 1]


def test_the_example_of_the_page_and_the_command_line(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs/how-to/torchtitan.md"
    (told,) = run_ranks(1, call, "from_page", str(page), str(tmp_path))
    given = {"folder": "s3://bucket/runs/llama", "interval": 500, "async_mode": "async", "keep_latest_k": 3}
    assert told.items() >= {**given, "enable": True, "last_save_in_hf": True, "hf_folder": "gs://bucket/hf"}.items()
    for option in told:
        assert f"`{option}`" in page.read_text() or f"`{option}=" in page.read_text(), f"the page lacks {option}"
