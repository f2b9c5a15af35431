"""Merges hold what the same sums of whole tensors hold, and say what they leave out."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from export_worker import save_sharded, sharded_tensors
from forked_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckptstore import Checkpoint, InvalidInput, InvalidState, merge, open_store
from ckptstore.checkpoint import files_behind
from ckptstore.extensions.exchange.merging import merged_files, sums
from ckptstore.extensions.exchange.merging.merged_files import MergeReport, MergeSource
from ckptstore.extensions.exchange.merging.shares import shares
from ckptstore.state.tensors.boxes import Box

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_DURABLE", "false")


def saved(root: Path, *states: dict[str, Any]) -> list[Checkpoint]:
    """Save one checkpoint for each state."""
    with open_store(root, durable=False) as store:
        return [Checkpoint.from_uri(store.save(step, state).uri) for step, state in enumerate(states)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def merged(
    directory: Path, checkpoints: list[Checkpoint], **options: Any
) -> tuple[dict[str, torch.Tensor], MergeReport]:
    report = merge(checkpoints, directory, **options)
    return {key: tensor for name in report.files for key, tensor in load_file(directory / name).items()}, report


floats = st.floats(0, 1, exclude_max=True)


@given(st.integers(2, 12), floats)
def test_shares_are_those_of_the_rule_that_they_stand_for(count: int, decay: float) -> None:
    found = shares(count, "ema", decay=decay)
    average = [1.0] + [0.0] * (count - 1)  # how much of each checkpoint is in it
    for number in range(1, count):
        average = [decay * share for share in average]
        average[number] += 1 - decay
    assert found == pytest.approx(average)
    assert shares(count, "wsm-decay", schedule="linear") == pytest.approx(shares(count, "average"))
    for schedule, rate in (
        ("1-sqrt", lambda at: 1 - math.sqrt(at)),
        ("cosine", lambda at: (1 + math.cos(math.pi * at)) / 2),
    ):
        decayed = shares(count, "wsm-decay", schedule=schedule)
        assert math.fsum(decayed) == pytest.approx(1)
        assert min(decayed) >= 0
        # An update between two checkpoints counts as often as those after it.
        assert [math.fsum(decayed[number:]) for number in range(1, count)] == pytest.approx(
            [rate(number / count) for number in range(1, count)]
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "complex64", "float8_e4m3fn"])
def test_an_average_is_that_of_whole_tensors(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype)
    tensors = [
        {"w": drawn(70, 30, seed=seed).to(kind), "deep.b": drawn(3, seed=9 + seed).to(kind)} for seed in range(3)
    ]
    wide = kind if kind in (torch.float64, torch.complex64) else torch.float32
    found, report = merged(tmp_path / "out", saved(tmp_path / "s", *tensors), weights=[1, 2, 5])
    for key in ("w", "deep.b"):
        total = torch.zeros(tensors[0][key].shape, dtype=wide)
        for state, share in zip(tensors, (0.125, 0.25, 0.625), strict=True):
            total.add_(state[key].to(wide), alpha=share)
        assert found[key].dtype == kind
        assert torch.equal(found[key].view(torch.uint8), total.to(kind).view(torch.uint8))
    assert (report.steps, report.coefficients, report.left_out) == ((0, 1, 2), (0.125, 0.25, 0.625), {})


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float8_e5m2"])
def test_a_merge_in_many_passes_and_threads_is_that_of_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    monkeypatch.setattr(merged_files, "_PASS_BYTES", 40_000)
    monkeypatch.setattr(merged_files, "_PARTS_BYTES", 50_000)
    monkeypatch.setattr(sums, "CHUNK_ELEMENTS", 999)
    states = [
        {"a": drawn(70, 301, seed=seed), "b": drawn(9, 7, 20, seed=seed).bfloat16(), "n": torch.arange(50) + seed}
        for seed in range(3)
    ]
    files = tuple(files_behind(one).alone() for one in saved(tmp_path / "s", *states))
    state = MergeSource(files, (0.5, 0.0, 0.5), dtype, is_arc=False).opened()
    expected = {
        key: ((states[0][key].float() * 0.5).add_(states[2][key].float(), alpha=0.5)).to(
            getattr(torch, dtype) if dtype else states[0][key].dtype
        )
        for key in ("a", "b")
    }
    expected["n"] = states[2]["n"]

    def filled(number: int) -> None:
        order = [*expected][number % 3 :] + [*expected][: number % 3]
        found = {key: torch.empty_like(expected[key]) for key in order}
        for cut in (slice(None, 5), slice(5, None)):
            parts = {key: memory[cut] for key, memory in found.items()}
            boxes = {
                key: Box((cut.start or 0, *(0,) * (part.ndim - 1)), tuple(part.shape)) for key, part in parts.items()
            }
            state.fill_boxes([(key, boxes[key], part) for key, part in parts.items()])
        for key, memory in found.items():
            assert torch.equal(memory.view(torch.uint8), expected[key].view(torch.uint8)), key

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(filled, range(40)))


@pytest.mark.slow
def test_a_merge_of_many_ranks_in_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptstore.extensions.exchange import to_safetensors

    monkeypatch.setattr(to_safetensors, "WINDOW_BYTES", 1 << 19)
    run_ranks(2, save_sharded, str(tmp_path / "sharded"))
    with open_store(tmp_path / "sharded", group="solo") as store:
        first = Checkpoint.from_uri(store[1].uri)
    whole = sharded_tensors()
    other = {"model": {key: tensor * 3 for key, tensor in whole.items()}}
    found, report = merged(tmp_path / "out", [first, *saved(tmp_path / "s", other)], strip_prefix="model.")
    for key, tensor in whole.items():
        assert torch.allclose(
            found[key].float(), tensor.float() * 2, rtol=1e-2 if tensor.dtype == torch.bfloat16 else 1e-6
        )
    assert sorted(report.left_out) == ["model.own", "model.same"]
    assert "it is not in" in report.left_out["model.own"]


def test_slerp_follows_the_arc(tmp_path: Path) -> None:
    a, b = drawn(50, 40, seed=1), drawn(50, 40, seed=2)
    states = [{"w": a, "line": drawn(4), "zero": torch.zeros(3), "empty": torch.zeros(0)}]
    states += [{"w": b, "line": 2 * drawn(4), "zero": torch.zeros(3), "empty": torch.zeros(0)}]
    found, _ = merged(tmp_path / "out", saved(tmp_path / "s", *states), method="slerp", weights=[3, 1])
    angle = math.acos(float((a.double() * b.double()).sum() / a.double().norm() / b.double().norm()))
    arc = (math.sin(0.75 * angle) * a.double() + math.sin(0.25 * angle) * b.double()) / math.sin(angle)
    assert torch.allclose(found["w"].double(), arc, atol=1e-6)
    assert torch.allclose(found["line"], 1.25 * drawn(4))
    assert found["zero"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("ties", [("abc", ""), ("", "abc"), ("abc", "bc"), ("ab", "bc")], ids=str)
@pytest.mark.parametrize(
    "options", [{"method": "slerp"}, {"weights": [1, 3]}, {"method": "ema", "decay": 0.3}], ids=str
)
def test_what_only_some_tie_is_merged_as_if_nobody_did(
    tmp_path: Path, options: dict[str, Any], ties: tuple[str, str]
) -> None:
    states = [{key: drawn(30, 20, seed=seed + number) for number, key in enumerate("abc")} for seed in (0, 5)]
    for state, keys in zip(states, ties, strict=True):
        for key in keys:
            state[key] = state[keys[0]]
    apart = [{key: tensor.clone() for key, tensor in state.items()} for state in states]
    expected, _ = merged(tmp_path / "as apart", saved(tmp_path / "s", *apart), **options)
    found, _ = merged(tmp_path / "out", saved(tmp_path / "t", *states), **options)
    assert found.keys() == {*"abc"}
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key


def test_slerp_of_what_one_save_cast_is_that_of_what_a_load_gives(tmp_path: Path) -> None:
    """Large enough for several pieces of a tensor, which are other ones in another dtype."""
    states = [{"w": drawn(1500, 1000, seed=seed), "v": drawn(30, seed=seed)} for seed in (1, 2)]
    rounded = {key: tensor.bfloat16().float() for key, tensor in states[1].items()}
    expected, _ = merged(tmp_path / "plain", saved(tmp_path / "s", states[0], rounded), method="slerp")
    with open_store(tmp_path / "t", durable=False) as store:
        uris = [store.save(1, states[0]).uri, store.save(2, states[1], dtype={"*": "bfloat16"}).uri]
    for name, turned in (("last", uris), ("first", uris[::-1])):
        found, _ = merged(tmp_path / name, [Checkpoint.from_uri(uri) for uri in turned], method="slerp")
        for key, tensor in expected.items():
            assert torch.allclose(found[key], tensor, atol=1e-6), (name, key)


def test_what_does_not_agree_is_left_out_and_said(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = [
        {"model": {"w": torch.ones(2), "old": torch.ones(1), "shape": torch.ones(2), "n": torch.tensor(1)}, "epoch": 1},
        {"model": {"w": torch.ones(2), "new": torch.ones(1), "shape": torch.ones(3), "n": torch.tensor(7)}, "epoch": 2},
    ]
    checkpoints = saved(tmp_path / "s", *states)
    found, report = merged(tmp_path / "out", checkpoints, include="model.*")
    assert sorted(found) == ["model.n", "model.w"]
    assert found["model.n"] == 7
    assert sorted(report.left_out) == ["model.new", "model.old", "model.shape"]
    assert report.left_out["model.shape"] == "it is float32 (2,) and float32 (3,)"
    assert report.notices == ("model.n is no tensor of floats, it is that of the last checkpoint",)
    with pytest.raises(InvalidInput, match=r"No tensor is the same in all checkpoints.*model.new"):
        merge(checkpoints, tmp_path / "none", include=["model.new", "model.old"])
    with pytest.raises(InvalidInput, match="fits no key of the checkpoint"):
        merge(checkpoints, tmp_path / "none", include=["model.*", "modle.*"])
    with pytest.raises(InvalidInput, match="the beginning of no key"):
        merge(checkpoints, tmp_path / "none", strip_prefix="modle.")
    assert not (tmp_path / "none").exists()


def test_tied_weights_stay_tied_if_all_tie_them(tmp_path: Path) -> None:
    weights = [drawn(3, 3, seed=seed) for seed in range(3)]
    tied = [{"embed": weight, "head": weight} for weight in weights[:2]]
    found, report = merged(tmp_path / "tied", saved(tmp_path / "s", *tied))
    assert list(found) == ["embed"]
    assert "head is tied to embed, and stored as that" in report.notices
    apart = {"embed": weights[2], "head": weights[0]}
    found, _ = merged(tmp_path / "apart", saved(tmp_path / "t", tied[0], apart))
    assert torch.allclose(found["embed"], (weights[0] + weights[2]) / 2)
    assert torch.allclose(found["head"], weights[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
def test_a_sum_beyond_its_dtype_is_refused_and_infinities_stay(tmp_path: Path, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    tensors = [
        torch.tensor([inf, 1.0, value], dtype=dtype) for inf, value in ((math.inf, 1.0), (0.0, most), (0.0, -most))
    ]
    checkpoints = saved(tmp_path / "s", *({"w": tensor} for tensor in tensors))
    found, _ = merged(tmp_path / "out", checkpoints[:2])
    assert found["w"].isfinite().tolist() == [False, True, True]
    with pytest.raises(InvalidState, match=r"w has values that torch.* cannot hold"):
        merge(checkpoints[1:], tmp_path / "none", weights=[2, -1])
    assert not (tmp_path / "none").exists()


def test_a_cast_is_of_floats_and_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    states = [
        {"w": torch.tensor([1.0, -2.0]), "n": torch.tensor([3])},
        {"w": torch.tensor([3.0, 1e6]), "n": torch.tensor([4])},
    ]
    checkpoints = saved(tmp_path / "s", *states)
    found, _ = merged(tmp_path / "out", checkpoints, dtype="bfloat16")
    assert (found["w"].dtype, found["n"].dtype) == (torch.bfloat16, torch.int64)
    with pytest.raises(InvalidState, match=r"w has values that torch\.float16 cannot hold"):
        merge(checkpoints, tmp_path / "half", dtype="float16")
    assert not (tmp_path / "half").exists()
    late = torch.ones(100_000)
    late[-1] = 131_000.0  # rounds to a number that the dtype lacks, in the last of several chunks
    late[40_000] = math.inf
    beyond = saved(tmp_path / "u", {"w": late}, {"w": late})
    with pytest.raises(InvalidState, match="w has values that"):
        merge(beyond, tmp_path / "half", dtype="float16")
    infinite = saved(tmp_path / "t", {"w": torch.tensor([math.inf, math.nan])}, {"w": torch.tensor([1.0, 1.0])})
    found, _ = merged(tmp_path / "inf", infinite, dtype="float16")
    assert str(found["w"].tolist()) == "[inf, nan]"
    found, _ = merged(tmp_path / "last", infinite, weights=[0, 1])
    assert found["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "mean"}, "method is 'mean'"),
        ({"method": "ema"}, "decay is None"),
        ({"method": "ema", "decay": 1.0}, "decay is 1.0"),
        ({"decay": 0.5}, "decay means nothing for 'average'"),
        ({"method": "ema", "decay": 0.5, "weights": [1, 1, 1]}, "weights means nothing for 'ema'"),
        ({"method": "wsm-decay", "schedule": "step"}, "schedule is 'step'"),
        ({"method": "slerp"}, "of two checkpoints, 3 were passed"),
        ({"weights": [1, 2]}, "2 weights for 3 checkpoints"),
        ({"weights": [1, -1, 0]}, "divided by their sum"),
        ({"weights": [1, math.nan, 1]}, "divided by their sum"),
        ({"dtype": "int8"}, "no dtype of floats"),
        ({"dtype": "half precision"}, "no dtype of floats"),
        ({"shard_size_bytes": 0}, "shard_size_bytes is 0"),
        ({"weights": [math.inf, 1.0, 1.0]}, ""),
        ({"weights": [math.inf, -math.inf, 1.0]}, ""),
        ({"weights": [1e308, 1e308, 1e308]}, ""),
        ({"weights": [10**400, 1, 1]}, ""),
        ({"weights": ["1", 1, 1]}, ""),
        ({"weights": [None, 1, 1]}, ""),
        ({"weights": 1}, ""),
        ({"weights": "123"}, ""),
        ({"method": "ema", "decay": "0.9"}, "decay is '0.9'"),
        ({"dtype": 3}, ""),
        ({"dtype": "float4_e2m1fn_x2"}, "cannot cast to float4"),
        ({"include": 3}, "include is 3"),
        ({"shard_size_bytes": "1GB"}, "shard_size_bytes is '1GB'"),
    ],
)
def test_bad_input_writes_nothing(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    checkpoints = saved(tmp_path / "s", *({"w": torch.ones(2)} for _ in range(3)))
    with pytest.raises(InvalidInput, match=words or r"weights|dtype"):
        merge(checkpoints, tmp_path / "out", **options)
    with pytest.raises(InvalidInput, match="two checkpoints or more"):
        merge(checkpoints[:1], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def merge_in_a_job(uris: list[str], directory: str) -> int:
    """Called by all ranks of torch.distributed."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    os.environ["CKPTSTORE_DURABLE"] = "false"
    report = merge(
        [Checkpoint.from_uri(uri) for uri in uris], directory, method="slerp", shard_size_bytes=4000, group=None
    )
    dist.barrier()
    dist.destroy_process_group()
    return len(report.files)


@pytest.mark.slow
def test_all_ranks_of_a_job_merge_one_model(tmp_path: Path) -> None:
    states = [{name: drawn(1000, seed=seed + number) for number, name in enumerate("abc")} for seed in (0, 5)]
    checkpoints = saved(tmp_path / "s", *states)
    assert run_ranks(2, merge_in_a_job, [one.uri for one in checkpoints], str(tmp_path / "job")) == [4, 4]
    merge(checkpoints, tmp_path / "alone", method="slerp", shard_size_bytes=4000)
    for file in (tmp_path / "alone").iterdir():
        assert file.read_bytes() == (tmp_path / "job" / file.name).read_bytes()


WORKER = """
import sys
from export_worker import status_bytes
from pathlib import Path
from ckptstore import Checkpoint, merge
uris, directory = sys.argv[2:], sys.argv[1]
checkpoints = [Checkpoint.from_uri(uri) for uri in uris]
merge(checkpoints, directory + "/small", include="small")  # what is loaded on first use
Path("/proc/self/clear_refs").write_text("5")
before = status_bytes("VmRSS")
merge(checkpoints, directory + "/large", dtype="bfloat16")
print(status_bytes("VmHWM") - before)
"""


@pytest.mark.slow
def test_memory_is_bounded_whatever_the_size(tmp_path: Path) -> None:
    states = [
        {"a": torch.full((64 << 18,), float(step)), "b": torch.ones(64 << 18), "small": torch.ones(2)}
        for step in (1, 3)
    ]
    checkpoints = saved(tmp_path / "s", *states)
    command = [sys.executable, "-c", WORKER, str(tmp_path), *(one.uri for one in checkpoints)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280, env=environment)
    assert int(done.stdout) < 256 * MIB
    found = load_file(tmp_path / "large/model.safetensors")
    assert (found["a"] == 2).all()
