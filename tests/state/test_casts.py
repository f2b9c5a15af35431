"""Casts of a save: the stored bits are those of torch's own cast, a load gives the dtype back, and what would not come
back is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import independent_reader as reader
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from meshes import distributed, mesh_for, new_uri
from safetensors.torch import load_file
from saving import bits
from thread_ranks import run_threads
from torch.distributed.tensor import Shard

from ckptstore import (
    Checkpoint,
    CheckpointStore,
    FastTier,
    InvalidInput,
    InvalidState,
    StateMismatch,
    Subscription,
    open_store,
)
from ckptstore.interchange import export, merge
from ckptstore.tools.cli import main

LARGE = 5_000_001
"""Elements, so that a tensor takes several stretches of a copy, and does not end with one."""
BF16 = {"t.*": "bfloat16"}


def special() -> torch.Tensor:
    """Return numbers at which casts differ: halves, subnormals, zeros, infinities, NaN with several bits."""
    bits = [0x00000001, 0x00400000, 0x007FFFFF, 0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F7F0000, 0x7F800000]
    bits += [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFF7F0000, 0xFF800000, 0xFFC12345]
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def kinds() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    small, large = torch.randn(40, 30), torch.randn(LARGE)
    large[: 16 * 1000] = special().repeat(1000)
    table = torch.randn(900, 1100)
    table[:4, :4] = special().reshape(4, 4)
    return {
        "large": large,
        "small": torch.cat([special(), torch.randn(100)]),
        "transposed": table.t(),
        "strided": torch.randn(2000, 1200)[::2, 1::2],
        "negated": torch._neg_view(torch.randn(600_000)),
        "imaginary": torch.randn(600_000, dtype=torch.complex64).conj().imag,
        "expanded": torch.randn(1, 600).expand(1000, 600),
        "parameter": torch.nn.Parameter(torch.randn(700_000)),
        "double": torch.randn(600_000, dtype=torch.float64),
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(1001.0),
        "small_strided": small.t()[1:],
    }


def stored(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return dtype, shape and bytes of each tensor, read by the format's page alone."""
    root = Path(checkpoint.uri)
    tensors, _ = reader.read_state(lambda name: (root / name).read_bytes())
    return tensors  # type: ignore[no-any-return]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with open_store(tmp_path / "store", durable=False) as opened:
        yield opened


@pytest.mark.parametrize("how", ["save", "save_async"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_the_stored_bits_are_those_of_a_cast(store: CheckpointStore, how: str, dtype: torch.dtype) -> None:
    state = kinds()
    if dtype is not torch.bfloat16:  # whose range they are within
        state = {
            key: tensor.detach()[..., :600_000].clamp(-5e4, 5e4) if key in ("large", "small", "transposed") else tensor
            for key, tensor in state.items()
        }
    casts = {"t.scalar": dtype, "t.*": dtype}
    found = getattr(store, how)(1, {"t": state, "rest": torch.ones(3)}, dtype=casts)
    checkpoint = found if isinstance(found, Checkpoint) else found.result()
    name = str(dtype).removeprefix("torch.")
    have = stored(checkpoint)
    for key, tensor in state.items():
        assert have[f"t.{key}"] == (name, tuple(tensor.shape), bits(tensor.to(dtype))), key
    assert have["rest"][0] == "float32"
    again = checkpoint.to_dict()["t"]
    for key, tensor in state.items():
        assert again[key].dtype == tensor.dtype, key
        assert bits(again[key]) == bits(tensor.to(dtype).to(tensor.dtype)), key


def test_a_load_gives_back_the_dtype_of_the_state(store: CheckpointStore) -> None:
    live = torch.randn(400_000)
    store.save(1, {"t": {"a": live, "b": live[:10].clone()}}, dtype=BF16)
    target = {"t": {"a": torch.zeros(400_000), "b": torch.zeros(10)}}
    assert store.resume(target) is not None
    assert torch.equal(target["t"]["a"], live.bfloat16().float())
    newest = store.latest()
    assert newest is not None
    assert newest.check_load(target).problem == ""
    assert "float32" in newest.check_load({"t": {"a": target["t"]["a"].bfloat16(), "b": target["t"]["b"]}}).problem
    small = {"t": {"a": torch.zeros(400_000, dtype=torch.bfloat16), "b": torch.zeros(10)}}
    with pytest.raises(StateMismatch, match="float32"):
        store.load(small)
    store.load(small, dtype="state")
    assert torch.equal(small["t"]["a"], live.bfloat16())
    store.save(2, {"t": {"a": live.bfloat16(), "b": torch.zeros(10)}})
    with pytest.raises(StateMismatch, match="bfloat16"):
        store.load(target)


def test_a_load_casts_back_into_memory_of_any_form(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.state.read.read_plan.BUFFER_BYTES", 1 << 18)
    live = {key: tensor.detach() for key, tensor in kinds().items()} | {"whole": torch.randn(3000)}
    checkpoint = store.save(1, {"t": live}, dtype=BF16)
    target = {
        "large": torch.zeros(2 * LARGE)[::2],
        "small": torch.zeros(116),
        "transposed": torch.zeros(900, 1100).t(),
        "strided": torch.zeros(1000, 600),
        "negated": torch._neg_view(torch.zeros(600_000)),
        "imaginary": torch.zeros(600_000, dtype=torch.complex64).conj().imag,
        "expanded": torch.zeros(600, 1000).t(),
        "parameter": torch.nn.Parameter(torch.zeros(700_000)),
        "double": torch.zeros(600_000, dtype=torch.float64),
        "small_strided": torch.zeros(29, 40),
    }
    with torch.inference_mode():
        target["whole"] = torch.zeros(3000)
    asked = [f"t.{key}" for key in target]
    kept = {"empty": torch.zeros(0, 5), "scalar": torch.zeros(())}
    checkpoint.load({"t": {**target, **kept}}, include=asked)
    for key, tensor in target.items():
        assert bits(tensor) == bits(live[key].bfloat16().to(live[key].dtype)), key
    assert kept["scalar"] == 0


def test_a_box_of_a_cast_tensor_with_gaps_of_its_own_size_is_cast_back() -> None:
    """From its first element to the last, it has as many bytes in the file as in memory."""
    live, uri = torch.randn(2, 30_000), new_uri()
    with open_store(uri) as store:
        store.save(1, {"t": {"a": live}}, dtype=BF16)

    def load(store: CheckpointStore, rank: int) -> bool:
        found = distributed(live, mesh_for(rank, [0, 1, 2]), [Shard(1)], zeros=True)
        store.load({"t": {"a": found}})
        return torch.equal(found.to_local(), live[:, 10_000 * rank :][:, :10_000].bfloat16().float())

    assert run_threads(3, uri, load) == [True] * 3


WORKER = """
import os, sys
from export_worker import status_bytes
from pathlib import Path
import torch
from ckptstore import open_store
def made(number, fill):
    return {"t": {f"{n}": torch.full((8 << 20,), fill) for n in range(number)}}
with open_store(sys.argv[1], durable=False) as store:
    for step, number in enumerate((1, 8)):
        store.save(step, made(number, 1.5), dtype={"t.*": "bfloat16"})
    for step, number in enumerate((1, 8)):  # the first loads what is imported on first use
        state = made(number, 0.0)
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
        store[step].load(state)
        assert all((tensor == 1.5).all() for tensor in state["t"].values())
print(status_bytes("VmHWM") - before)
"""


@pytest.mark.slow
def test_a_load_of_casts_stays_within_the_budget_whatever_their_size(tmp_path: Path) -> None:
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "CKPTSTORE_MEMORY_BUDGET_BYTES": str(64 << 20)}
    command = [sys.executable, "-c", WORKER, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280, env=environment)
    assert int(done.stdout) < 64 << 20  # of 128 MiB in the stored dtype


def test_a_warm_up_makes_memory_for_the_casts_of_the_save(store: CheckpointStore) -> None:
    state = {"t": {"a": torch.randn(3_000_000)}}
    with pytest.raises(InvalidInput, match="fits no tensor"):
        store.warm_up(state, dtype={"u.*": "bfloat16"})
    store.warm_up(state, dtype=BF16)
    assert store._state_saver._staging is not None
    made = [id(buffer) for buffer in store._state_saver._staging.buffers]
    sizes = sum(len(buffer.memory) for buffer in store._state_saver._staging.buffers)
    assert 6_000_000 <= sizes < 9_000_000
    checkpoint = store.save_async(1, state, dtype=BF16).result()
    assert [id(buffer) for buffer in store._state_saver._staging.buffers] == made
    assert torch.equal(checkpoint.to_dict()["t"]["a"], state["t"]["a"].bfloat16().float())


def test_an_optimizer_goes_on_as_from_its_cast_numbers(store: CheckpointStore) -> None:
    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(600, 600)
        return model, torch.optim.AdamW(model.parameters())

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(600)).square().sum().backward()
        optimizer.step()

    model, optimizer = made(1)
    step(model, optimizer)
    for held in optimizer.state.values():
        held["step"].fill_(301)  # which bfloat16 would make 302
    plain = store.save(1, {"model": model, "optimizer": optimizer})
    cast = store.save(2, {"model": model, "optimizer": optimizer}, dtype={"optimizer.*": "bfloat16"})
    assert 0.65 < cast.size_bytes / plain.size_bytes < 0.7
    other = made(2)
    store.resume({"model": other[0], "optimizer": other[1]})
    for mine, its in zip(model.parameters(), other[0].parameters(), strict=True):
        assert torch.equal(mine, its)
        assert its in other[1].state
        assert other[1].state[its]["step"] == optimizer.state[mine]["step"] == 301
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(other[1].state[its][name], optimizer.state[mine][name].bfloat16().float())
    step(*other)


@pytest.mark.parametrize(("how", "size"), [("save", 100), ("save_async", 700_000)])
@pytest.mark.parametrize(
    ("number", "dtype"),
    [(3.4e38, "bfloat16"), (1e5, "float16"), (1e5, "float8_e5m2"), (449.0, "float8_e4m3fn"), (-1e39, torch.float32)],
)
def test_a_number_beyond_the_dtype_is_refused(
    store: CheckpointStore, how: str, size: int, number: float, dtype: Any
) -> None:
    tensor = torch.zeros(size, dtype=torch.float64)
    tensor[size - 1], tensor[0] = number, float("nan")
    save = store.save if how == "save" else lambda *args, **more: store.save_async(*args, **more).result()
    with pytest.raises(InvalidState, match=r"t\.a has the number") as caught:
        save(1, {"t": {"a": tensor}}, dtype={"t.*": dtype})
    assert caught.value.committed is False
    assert store.latest() is None
    tensor[size - 1] = 1
    if how == "save":  # after a failed asynchronous one, the next raises its error once more
        assert store.save(1, {"t": {"a": tensor}}, dtype={"t.*": dtype}).step == 1
    else:
        store._background.failure(max_failures=9)


def test_an_infinity_is_refused_where_it_would_not_stay_one(store: CheckpointStore) -> None:
    state = {"t": torch.tensor([1.0, float("-inf")])}
    with pytest.raises(InvalidState, match="t has the number -inf, which float8_e4m3fn cannot hold"):
        store.save(1, state, dtype={"t": "float8_e4m3fn"})
    assert store.save(1, state, dtype={"t": "float8_e5m2"}).to_dict()["t"].tolist() == [1.0, float("-inf")]


@pytest.mark.parametrize(
    ("casts", "message"),
    [
        ("bfloat16", "it is a dict of patterns"),
        ({"t.*": "int8"}, "'int8', for 't.\\*', is no dtype to cast to"),
        ({"t.*": "float99"}, "is no dtype"),
        ({"t.*": torch.complex64}, "is no dtype"),
        ({"t.*": "float8_e8m0fnu"}, "is no dtype"),
        ({1: "bfloat16"}, "a pattern is text"),
        ({"u.*": "bfloat16"}, "fits no tensor"),
        ({"t.*": "bfloat16", "tt.*": "bfloat16"}, "did you mean 't.\\*'"),
        ({"t.count*": "bfloat16"}, "casts nothing: of the 1 tensors"),
        ({"t.scal*": "bfloat16"}, "casts nothing"),
        ({"t.a": "float32"}, "t.a cannot be stored as float32: it is float32, which is no larger"),
        ({"t.count": "bfloat16"}, "it is int64, which has no fractions"),
        ({"t.mask": "bfloat16"}, "it is bool"),
        ({"t.wave": "bfloat16"}, "it is complex64"),
    ],
)
def test_what_casts_nothing_is_refused(store: CheckpointStore, casts: Any, message: str) -> None:
    state = {
        "t": {
            "a": torch.ones(3),
            "count": torch.arange(3),
            "mask": torch.ones(3) > 0,
            "wave": torch.ones(3, dtype=torch.complex64),
            "scalar": torch.tensor(1.0),
        }
    }
    with pytest.raises((InvalidInput, InvalidState), match=message):
        store.save(1, state, dtype=casts)
    assert store.latest() is None
    kept = stored(store.save(1, state, dtype={"t*": "bfloat16"}))
    assert {key: item[0] for key, item in kept.items()} == {
        "t.a": "bfloat16",
        "t.count": "int64",
        "t.mask": "bool",
        "t.wave": "complex64",
        "t.scalar": "float32",
    }


def test_an_optimizer_that_has_not_stepped_may_be_saved(store: CheckpointStore) -> None:
    model = torch.nn.Linear(2, 3)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "epoch": 0}
    assert {item.dtype for item in store.save(0, state, dtype={"optimizer.*": "bfloat16"}).tensors.values()} == {
        "float32"
    }
    for wrong in ("epoch", "optimiser.*"):
        with pytest.raises(InvalidInput, match="fits no tensor"):
            store.save(1, state, dtype={wrong: "bfloat16"})


def test_tied_tensors_are_cast_together_and_shared_memory_is_not_torn(store: CheckpointStore) -> None:
    tied = torch.randn(300_000)
    checkpoint = store.save(1, {"a": tied, "b": tied}, dtype={"b": "bfloat16"})
    assert {key: item.dtype for key, item in checkpoint.tensors.items()} == {"a": "bfloat16", "b": "bfloat16"}
    target = {"a": torch.zeros(300_000), "b": torch.zeros(300_000)}
    checkpoint.load(target)
    assert torch.equal(target["a"], tied.bfloat16().float())
    assert torch.equal(target["b"], target["a"])
    with pytest.raises(InvalidState, match="have memory in common"):
        store.save(2, {"a": tied, "b": tied[5:]}, dtype={"b": "bfloat16"})
    store.save(2, {"a": tied, "b": tied[5:]}, dtype={"*": "bfloat16"})
    again = torch.zeros(300_000)
    store.load({"a": again, "b": again[5:]})
    assert torch.equal(again, tied.bfloat16().float())


@pytest.mark.parametrize("incremental", [True, "reference"])
def test_an_incremental_save_takes_over_only_the_same_cast(store: CheckpointStore, incremental: Any) -> None:
    state = {"t": {"a": torch.randn(700_000), "b": torch.randn(50)}}
    files = []
    for step, casts in enumerate([None, BF16, BF16, {"t.*": "float16"}, None, BF16], 1):
        found = store.save(step, state, incremental=incremental, dtype=casts)
        files.append(sum(item.attempt is None for item in found.files if item.name.endswith(".distcp")))
        for key, tensor in state["t"].items():
            dtype = getattr(torch, str(casts["t.*"])) if casts else torch.float32
            assert torch.equal(found.to_dict()["t"][key], tensor.to(dtype).float()), (step, key)
    if incremental == "reference":
        assert [number > 0 for number in files] == [True, True, False, True, True, True]


def test_what_others_see_of_a_cast(store: CheckpointStore, tmp_path: Path) -> None:
    live = torch.randn(400_000)
    checkpoint = store.save(1, {"t": {"a": live}}, dtype=BF16)
    manifest = json.loads((Path(checkpoint.uri) / "ckptstore.json").read_text())
    assert manifest["casts"] == BF16
    one = checkpoint.tensors["t.a"]
    assert (one.dtype, one.live_dtype, one.size_bytes) == ("bfloat16", "float32", 800_000)
    assert not checkpoint.verify().problems
    stock = {"t": {"a": torch.zeros(400_000, dtype=torch.bfloat16)}}
    dcp.load(stock, checkpoint_id=checkpoint.uri, no_dist=True)
    assert torch.equal(stock["t"]["a"], live.bfloat16())
    told = CliRunner().invoke(main, ["publish", f"{tmp_path / 'store'}@1", str(tmp_path / "published")])
    assert told.exit_code == 0, told.output
    with Subscription(tmp_path / "published", tmp_path / "pulled") as subscription:
        subscription.apply()
    (pulled,) = (tmp_path / "pulled").glob("*.safetensors")
    assert bits(load_file(pulled)["t.a"]) == bits(live.bfloat16().float())
    store.save(2, {"t": {"a": live + 1}}, dtype=BF16)
    merge([store[1], store[2]], tmp_path / "merged")
    (merged,) = load_file(tmp_path / "merged/model.safetensors").values()
    assert torch.allclose(merged, live + 0.5, rtol=1e-2, atol=1e-2)
    assert merged.dtype == torch.float32
    export(checkpoint, tmp_path / "out", to="safetensors")
    assert b'"dtype":"BF16"' in (tmp_path / "out/model.safetensors").read_bytes()[:300]


def test_every_byte_of_a_staged_cast_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_CHECK_COPIES", "all")
    state = kinds()
    with open_store(tmp_path / "store", fast=FastTier(str(tmp_path / "fast")), durable=False) as store:
        store.save_async(1, {"t": state}, dtype=BF16).result()
        found = store.drain()
        assert found is not None
        assert found.tensors["t.large"].dtype == "bfloat16"
        assert bits(found.to_dict()["t"]["large"]) == bits(state["large"].bfloat16().float())


@pytest.mark.parametrize("incremental", [False, "reference"])
def test_sharded_tensors_are_cast_on_each_rank(incremental: Any) -> None:
    """And a tensor that one rank alone has; for another number of ranks too."""
    uri, table, own = new_uri(), torch.randn(1100, 601), torch.full((300_000,), 1.1)
    casts = {"o.*": "bfloat16", "late": torch.float16}

    def state(rank: int, ranks: int, *, zeros: bool = False) -> dict[str, Any]:
        part = distributed(table, mesh_for(rank, list(range(ranks))), [Shard(0)], zeros=zeros)
        late = {"late": torch.zeros_like(own) if zeros else own} if rank == 1 or ranks == 1 else {}
        step = torch.zeros(()) if zeros else torch.tensor(301.0)
        return {"m": part, "o": {"mean": part if not zeros else torch.zeros_like(part), "step": step}, **late}

    def right(found: dict[str, Any], rank: int, ranks: int) -> bool:
        local = state(rank, ranks)["m"].to_local()
        late = torch.equal(found["late"], own.half().float()) if "late" in found else True
        mean = torch.equal(found["o"]["mean"].to_local(), local.bfloat16().float())
        return late and mean and torch.equal(found["m"].to_local(), local) and found["o"]["step"] == 301

    def save(store: CheckpointStore, rank: int) -> list[Any]:
        given, sizes = state(rank, 2), []
        given["o"]["mean"] = distributed(table, mesh_for(rank, [0, 1]), [Shard(0)])
        for step, dtype in enumerate([None, casts, casts]):
            asked: dict[str, Any] = {"dtype": dtype, "incremental": incremental}
            how = store.save_async(step, given, **asked).result() if step == 2 else store.save(step, given, **asked)
            sizes.append(how.size_bytes)
        found = state(rank, 2, zeros=True)
        store.load(found)
        mixed = {"mixed": torch.ones(5, dtype=torch.float64 if rank else torch.float32)}
        for what, dtype, words in [
            (given, {"nothing.*": "bfloat16"}, "fits no tensor"),
            (given, {"m": "bfloat16" if rank else "float16"}, "rank 1 asks for"),
            (mixed, {"mixed": "bfloat16"}, "mixed is float32 on rank 0 and float64 on rank 1"),
        ]:
            with pytest.raises((InvalidInput, InvalidState), match=words):
                store.save(4, what, dtype=dtype)
        with pytest.raises(InvalidInput, match="rank 1 asks for"):
            store.warm_up(given, dtype={"m": "bfloat16" if rank else "float16"})
        return [right(found, rank, 2), sizes[2] < 0.8 * sizes[0]]

    def load(store: CheckpointStore, rank: int) -> bool:
        found = state(rank, 1, zeros=True)
        store.load(found)
        return right(found, rank, 1)

    assert run_threads(2, uri, save) == [[True, True]] * 2
    assert run_threads(1, uri, load) == [True]
