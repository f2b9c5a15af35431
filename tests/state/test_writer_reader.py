"""What one rank writes it reads back, bit by bit; damage is found; memory and bytes stay within bounds."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import distributed, mesh_for, new_uri
from saving import bits, blank, change_byte, directory_of, save_plain, stored
from thread_ranks import run_threads
from torch.distributed.tensor import Shard

from ckptstore import CheckpointDamaged, InvalidState, StateMismatch, open_store
from ckptstore.state.index.part import Part, PartBuilder
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.read.read_plan import ReadPlan
from ckptstore.state.tensors.boxes import Box
from ckptstore.state.tensors.placement import Piece
from ckptstore.testing import CountCalls, with_faults

MIB = 1 << 20
SHARD_FILES = "ckptstore.state.write.shard_files"


def sample() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    base = torch.randn(900, 800)
    return {
        "small": torch.randn(30, 7),
        "large": torch.randn(1024, 700),
        "bf16": torch.randn(2000, 800).bfloat16(),
        "fp8": torch.randn(99).to(torch.float8_e4m3fn),
        "int": torch.arange(700_000),
        "bool": torch.rand(5, 5) > 0.5,
        "complex": torch.randn(400, 500, dtype=torch.complex64),
        "conj": torch.randn(500, 400, dtype=torch.complex64).conj(),
        "neg": torch.randn(40, dtype=torch.complex64).conj().imag,
        "zero-d": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 7),
        "view": base[100:800],
        "columns": base[:, 3:790],
        "transposed": base.t(),
        "expanded": torch.randn(1, 600).expand(900, 600),
        "nan": torch.full((3,), float("nan")),
        "parameter": torch.nn.Parameter(torch.randn(4)),
        "odd": torch.randn(262_144 + 3),
    }


@pytest.mark.parametrize("form", ["dense", "strided"])
def test_everything_comes_back_bit_by_bit(tmp_path: Path, form: str) -> None:
    state = sample()
    found = blank(state)
    if form == "strided":
        found = {key: torch.zeros((*one.shape, 2), dtype=one.dtype)[..., 1] for key, one in state.items()}
    save_plain(tmp_path, state).load(found)
    for key, tensor in state.items():
        assert bits(found[key]) == bits(tensor), key


def test_large_payloads_begin_at_pages(tmp_path: Path) -> None:
    index = stored(save_plain(tmp_path, sample())).index
    large = [offset for offset, size in zip(index.regions.offset, index.regions.size_bytes, strict=True) if offset]
    assert len(large) >= 5
    assert all(offset % 4096 == 0 for offset in large)
    assert index.chunks("small", 0)[0].region == index.chunks("zero-d", 0)[0].region


@pytest.mark.parametrize(("on_disk", "shared_mib", "num_files"), [(True, 4, 4), (True, 12, 2), (False, 4, 1)])
def test_several_files_share_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: bool, shared_mib: int, num_files: int
) -> None:
    monkeypatch.setattr(f"{SHARD_FILES}.LOCAL_SHARED_FILE_BYTES", shared_mib * MIB)
    state = {f"t{number:02d}": torch.randn(1024, 512) for number in range(12)}
    checkpoint = save_plain(tmp_path if on_disk else new_uri(), state)
    files = [file for file in checkpoint.files if file.name.endswith(".distcp")]
    assert [file.name for file in files] == [f"state-rank=00000-{number:02d}.distcp" for number in range(num_files)]
    sizes = [file.size_bytes for file in files]
    assert max(sizes) - min(sizes) <= 3 * MIB
    found = blank(state)
    checkpoint.load(found)
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())


def test_chunks_above_the_limit_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.state.write.assignment.MAX_CHUNK_BYTES", 3 * MIB)
    state = {"rows": torch.randn(2000, 1000), "flat": torch.randn(5, 500_000), "wide": torch.randn(1, 3_000_000)}
    checkpoint, found = save_plain(tmp_path, state), blank(state)
    assert [len(stored(checkpoint).index.chunks(key, 0)) for key in state] == [3, 5, 4]
    checkpoint.load(found)
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())


def test_tied_weights_are_stored_once_and_load_under_both_names(tmp_path: Path) -> None:
    weight = torch.randn(600, 600)
    checkpoint = save_plain(tmp_path, {"embed": weight, "head": weight})
    assert checkpoint.size_bytes < 1.1 * weight.nbytes
    assert stored(checkpoint).saved().aliases == {"head": "embed"}
    found = {"embed": torch.empty(600, 600), "head": torch.empty(600, 600)}
    checkpoint.load(found)
    assert torch.equal(found["embed"], weight)
    assert torch.equal(found["head"], weight)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"model": {"w": torch.ones(3, device="meta")}}, r"model\.w is on the meta device"),
        ({"blob#0": torch.ones(2), "blob": bytes(100_000)}, "taken"),
    ],
    ids=["meta", "a name that a value needs"],
)
def test_what_cannot_be_stored_is_refused(tmp_path: Path, state: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidState, match=words):
        save_plain(tmp_path, state)


DAMAGED = {"small": torch.randn(40, 5), "large": torch.randn(700, 700), "other": torch.randn(700, 700)}


@pytest.mark.parametrize("key", ["small", "large"])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, key: str) -> None:
    checkpoint, found = save_plain(tmp_path, DAMAGED), blank(DAMAGED)
    change_byte(
        directory_of(checkpoint) / "state-rank=00000-00.distcp", stored(checkpoint).index.chunks(key, 0)[0].offset
    )
    with pytest.raises(CheckpointDamaged, match=r"state-rank=00000-00\.distcp is damaged .* is expected, .* is found"):
        checkpoint.load({key: found[key]})
    checkpoint.load({"other": found["other"]})
    assert torch.equal(found["other"], DAMAGED["other"])


@pytest.mark.parametrize("name", ["tensors.index", "state-rank=00000-00.distcp"])
def test_torn_files_are_found(tmp_path: Path, name: str) -> None:
    checkpoint = save_plain(tmp_path, DAMAGED)
    path = directory_of(checkpoint) / name
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointDamaged):
        checkpoint.load(blank(DAMAGED))


@pytest.mark.parametrize(
    ("state", "wanted", "most_reads", "most_bytes"),
    [
        ({f"t{number:04d}": torch.full((300, 1000), float(number)) for number in range(100)}, ["t0077"], 2, 1.05),
        ({f"t{number:05d}": torch.randn(512) for number in range(5000)}, None, 2, 1.45),
    ],
    ids=["one of many", "many small ones"],
)
def test_reads_are_few_and_of_little_more_than_is_wanted(
    tmp_path: Path, state: dict[str, Any], wanted: list[str] | None, most_reads: int, most_bytes: float
) -> None:
    checkpoint = save_plain(tmp_path, state)
    counted = CountCalls()
    found = {key: torch.empty_like(state[key]) for key in wanted or state}
    with with_faults(open_store(tmp_path), counted) as store:
        store.load(found)
    assert all(torch.equal(tensor, state[key]) for key, tensor in found.items())
    reads = [call for call in counted.calls if call.key.endswith(".distcp") and call.verb.startswith("read")]
    assert 0 < len(reads) <= most_reads
    size_bytes = sum(tensor.nbytes for tensor in found.values())
    assert sum(call.size_bytes for call in reads) <= most_bytes * size_bytes
    if wanted is None:
        assert sum(file.size_bytes for file in checkpoint.files if file.name != ".metadata") <= 1.45 * size_bytes


def test_tensors_of_a_slab_are_read_straight_into_their_memory(tmp_path: Path) -> None:
    """All but the small and the strided ones, which lie between them."""
    state = {f"t{number}": torch.randn(200 if number % 5 == 0 else 60_000 + number) for number in range(80)}
    checkpoint, found = save_plain(tmp_path, state), blank(state)
    found["t17"] = torch.zeros(len(state["t17"]), 2)[:, 0]
    tracemalloc.start()
    checkpoint.load(found)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(torch.equal(found[key], state[key]) for key in state)
    assert peak_bytes < sum(tensor.nbytes for tensor in state.values()) / 4


@given(st.data())
def test_small_and_larger_tensors_of_a_slab_load_in_any_mixture(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    """Into dense memory, strided memory and memory that is not aligned; saved twice with one plan."""
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 7, 1000, 4096, 20_000, 300_000]), min_size=1, max_size=30))
    wide = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    with open_store(tmp_path_factory.mktemp("mixture"), durable=False) as store:
        for turn in range(2):
            drawn = [torch.randint(0, 256, (size, 2), dtype=torch.uint8)[:, 0] for size in sizes]
            state = {f"t{at:02d}": one if at in wide else one.contiguous() for at, one in enumerate(drawn)}
            store.save(turn, {**state, "turn": turn})
        keys = data.draw(st.lists(st.sampled_from(sorted(state)), unique=True, min_size=1))
        found: dict[str, Any] = {key: torch.zeros(len(state[key]) + 1, dtype=torch.uint8)[1:] for key in keys}
        for key in data.draw(st.lists(st.sampled_from(keys), unique=True)):
            found[key] = torch.zeros(len(state[key]), 3, dtype=torch.uint8)[:, 1]
        found["turn"] = -1
        store.load(found)
    assert found.pop("turn") == 1
    assert all(torch.equal(tensor, state[key]) for key, tensor in found.items())


def test_the_buffers_of_a_load_are_bounded(tmp_path: Path) -> None:
    state = {f"t{number}": torch.randn(1000, 1000) for number in range(12)}
    opened = stored(save_plain(tmp_path, state))
    read, waves = opened.read, []
    opened.buffer_bytes = 10 * MIB
    opened.read = lambda ranges: waves.append(len(ranges)) or read(ranges)
    wide = {key: torch.zeros(1000, 1000, 2)[..., 0] for key in state}
    opened.fill({key: (tensor, key) for key, tensor in wide.items()})
    assert len(waves) == 6
    assert all(torch.equal(wide[key], state[key]) for key in state)
    for target in (torch.ones(4, 3), torch.ones(1000, 1000, dtype=torch.float64)):
        with pytest.raises(StateMismatch, match=r"w is .* the checkpoint has float32 \(1000, 1000\)"):
            opened.fill({"w": (target, "t0")})


BOXED = {"large": torch.randn(1500, 1100), "small": torch.randn(41, 30)}


def test_any_box_of_any_boxes_is_read() -> None:
    """Saved in four boxes, by rows and columns."""

    def save(store: Any, rank: int) -> None:
        mesh = mesh_for(rank, [[0, 1], [2, 3]])
        store.save(1, {key: distributed(tensor, mesh, [Shard(0), Shard(1)]) for key, tensor in BOXED.items()})

    uri = new_uri()
    assert run_threads(4, uri, save) == [None] * 4
    with open_store(uri) as store:
        opened = stored(store[1])

        @settings(max_examples=min(60, settings.default.max_examples))
        @given(st.sampled_from(sorted(BOXED)), st.booleans(), st.data())
        def check(key: str, is_strided: bool, data: Any) -> None:
            shape = BOXED[key].shape
            low = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
            sizes = tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, low, strict=True))
            memory = torch.zeros((*sizes, 2))[..., 0] if is_strided else torch.zeros(sizes)
            opened.fill_boxes([(key, Box(low, sizes), memory)])
            assert torch.equal(memory, BOXED[key][low[0] : low[0] + sizes[0], low[1] : low[1] + sizes[1]])

        check()


def test_a_missing_chunk_is_damage() -> None:
    builder = PartBuilder(0)
    builder.add_file("f", [b"crc!"])
    builder.add_slab(0, 1000)
    builder.add_chunk(builder.add_tensor("t", "float32", (4, 4)), 100, Box((0, 0), (2, 4)))
    plan = ReadPlan(TensorIndex([Part.decode(builder.encode(), rank=0, file="f")]), prefix="")
    with pytest.raises(CheckpointDamaged, match="a chunk is missing"):
        plan.add("t", [Piece(Box((0, 0), (4, 4)), torch.zeros(4, 4))], rank=0)


@pytest.mark.parametrize("values", [{}, {"epoch": 3}])
@pytest.mark.parametrize("tensors", [{}, {"none": torch.empty(0, 3)}])
def test_a_state_of_hardly_anything(tmp_path: Path, tensors: dict[str, Any], values: dict[str, Any]) -> None:
    checkpoint = save_plain(tmp_path, tensors, values)
    assert set(checkpoint.tensors) == set(tensors)
    assert checkpoint.to_dict().keys() == {*tensors, *values}
    checkpoint.load({**blank(tensors), **dict.fromkeys(values)})
    assert gc.isenabled(), "as before"
