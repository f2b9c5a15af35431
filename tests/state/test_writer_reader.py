"""What one rank writes it reads back, bit by bit; damage is found; memory and bytes stay within bounds."""

import gc
import itertools
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saving import (
    ATTEMPT,
    bits,
    load_into,
    make_transfer,
    open_index,
    open_stored,
    plain_state,
    save_flat,
    save_plain,
)

from ckptstore.errors import CheckpointDamaged, InvalidState, StateMismatch
from ckptstore.format.digest import BLOCK_BYTES
from ckptstore.format.layout import Attempt
from ckptstore.state.index.outline import INDEX_NAME
from ckptstore.state.live.flatten import TensorRef
from ckptstore.state.read.read_plan import BUFFER_BYTES, ReadPlan, run_steps
from ckptstore.state.tensors.boxes import Box
from ckptstore.state.tensors.dense import dense_of
from ckptstore.state.tensors.placement import Piece
from ckptstore.state.tensors.segments import SegmentSource, Slab, SlabLayout, narrowed, payload_segment
from ckptstore.state.write.assignment import SaveMemo
from ckptstore.state.write.describe import describe

MIB = 1 << 20


def sample():
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


def test_everything_comes_back_bit_by_bit(tmp_path):
    state = sample()
    save_plain(tmp_path, state)
    loaded = load_into(tmp_path, {key: torch.empty(tensor.shape, dtype=tensor.dtype) for key, tensor in state.items()})
    for key, tensor in state.items():
        assert bits(loaded[key]) == bits(tensor), key


def test_it_loads_into_strided_memory(tmp_path):
    state = sample()
    save_plain(tmp_path, state)
    wide = {key: torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)[..., 1] for key, tensor in state.items()}
    loaded = load_into(tmp_path, wide)
    for key, tensor in state.items():
        assert bits(loaded[key]) == bits(tensor), key


def test_large_payloads_begin_at_pages(tmp_path):
    save_plain(tmp_path, sample())
    index = open_index(tmp_path)
    large = [offset for offset, size in zip(index.regions.offset, index.regions.size_bytes, strict=True) if offset]
    assert len(large) >= 5
    assert all(offset % 4096 == 0 for offset in large)
    assert index.chunks("small", 0)[0].region == index.chunks("zero-d", 0)[0].region


@pytest.mark.parametrize("num_files", [1, 3])
def test_several_files_share_the_bytes(tmp_path, monkeypatch, num_files):
    monkeypatch.setattr("ckptstore.state.write.shard_files.LOCAL_SHARED_FILE_BYTES", 4 * MIB)
    state = {f"t{number:02d}": torch.randn(1024, 512) for number in range(12)}
    directory = save_plain(tmp_path, state, num_files=num_files)
    files = sorted(directory.glob("*.distcp"))
    assert [file.name for file in files] == [f"state-rank=00000-{number:02d}.distcp" for number in range(num_files)]
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) - min(sizes) <= 3 * MIB
    loaded = load_into(tmp_path, {key: torch.empty(1024, 512) for key in state})
    assert all(torch.equal(loaded[key], state[key]) for key in state)


@pytest.mark.parametrize(("on_disk", "num_files"), [(True, 4), (False, 1)])
def test_files_are_smaller_on_a_disk(monkeypatch, on_disk, num_files):
    from ckptstore.state.write.agree import Agreement
    from ckptstore.state.write.assignment import plan_rank
    from ckptstore.state.write.shard_files import ShardFiles, Striping

    monkeypatch.setattr("ckptstore.state.write.shard_files.LOCAL_SHARED_FILE_BYTES", 2 * MIB)
    monkeypatch.setattr("ckptstore.state.write.shard_files.SHARED_FILE_BYTES", 8 * MIB)
    tensors = {f"t{number}": torch.zeros(2 * MIB, dtype=torch.uint8) for number in range(5)}
    described = describe(plain_state(tensors), compare=False)
    plan = plan_rank(described.items, Agreement(1), 0)
    assert len(ShardFiles(described, plan, rank=0, striping=Striping(4, on_disk=on_disk)).files) == num_files


def test_chunks_above_the_limit_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptstore.state.write.assignment.MAX_CHUNK_BYTES", 3 * MIB)
    state = {"rows": torch.randn(2000, 1000), "flat": torch.randn(5, 500_000), "wide": torch.randn(1, 3_000_000)}
    save_plain(tmp_path, state)
    index = open_index(tmp_path)
    assert [len(index.chunks(key, 0)) for key in state] == [3, 5, 4]
    loaded = load_into(tmp_path, {key: torch.empty_like(tensor) for key, tensor in state.items()})
    assert all(torch.equal(loaded[key], state[key]) for key in state)


def test_tied_weights_are_stored_once_and_load_under_both_names(tmp_path):
    weight = torch.randn(600, 600)
    directory = save_plain(tmp_path, {"embed": weight, "head": weight})
    assert sum(file.stat().st_size for file in directory.glob("*.distcp")) < 1.1 * weight.nbytes
    loaded = load_into(tmp_path, {"embed": torch.empty(600, 600), "head": torch.empty(600, 600)})
    assert torch.equal(loaded["embed"], weight)
    assert torch.equal(loaded["head"], weight)
    transfer = make_transfer(tmp_path)
    assert open_stored(tmp_path, transfer).saved().aliases == {"head": "embed"}
    transfer.close()


def test_values_come_back_with_what_travels_beside_them(tmp_path):
    inner = torch.arange(6)
    values = {
        "epoch": 3,
        "blob": bytes(range(256)) * 1000,
        "history": [0.5 * number for number in range(5000)],
        "mixed": {"tensor": inner, "tuple": (1, 2.5)},
    }
    save_plain(tmp_path, {"w": torch.ones(3)}, values)
    transfer = make_transfer(tmp_path)
    saved = open_stored(tmp_path, transfer).saved()
    transfer.close()
    assert set(saved.tensors) == {"w", "mixed.tensor"}
    assert saved.values["mixed"] == {"tensor": TensorRef("mixed.tensor"), "tuple": (1, 2.5)}
    assert {key: saved.values[key] for key in ("epoch", "blob", "history")} == {
        key: values[key] for key in ("epoch", "blob", "history")
    }
    assert torch.equal(load_into(tmp_path, {"mixed.tensor": torch.zeros(6, dtype=torch.int64)})["mixed.tensor"], inner)


def test_what_does_not_fit_is_refused(tmp_path):
    save_plain(tmp_path, {"w": torch.ones(3, 4)})
    for target in (torch.ones(4, 3), torch.ones(3, 4, dtype=torch.float64)):
        with pytest.raises(StateMismatch, match=r"w is .* the checkpoint has float32 \(3, 4\)"):
            load_into(tmp_path, {"w": target})
    with pytest.raises(StateMismatch, match="has nothing"):
        load_into(tmp_path, {"v": torch.ones(3, 4)})


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(3, device="meta"), "meta device"),
        (torch.eye(3).to_sparse(), "layout"),
    ],
    ids=["meta", "sparse"],
)
def test_tensors_without_plain_numbers_are_refused(tensor, reason):
    with pytest.raises(InvalidState, match=reason):
        describe(plain_state({"model.w": tensor}), compare=True)


def test_a_name_that_a_value_needs_must_be_free():
    with pytest.raises(InvalidState, match="taken"):
        describe(plain_state({"blob#0": torch.ones(2)}, {"blob": bytes(100_000)}), compare=False)


DAMAGED = {"small": torch.randn(40, 5), "large": torch.randn(700, 700), "other": torch.randn(700, 700)}


@pytest.mark.parametrize("key", ["small", "large"])
def test_a_flipped_bit_is_found_and_named(tmp_path, key):
    directory = save_plain(tmp_path, DAMAGED)
    chunk = open_index(tmp_path).chunks(key, 0)[0]
    path = directory / "state-rank=00000-00.distcp"
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[chunk.offset + 11] ^= 4
    path.write_bytes(data)
    targets = {key: torch.empty_like(DAMAGED[key])}
    with pytest.raises(CheckpointDamaged, match=r"state-rank=00000-00\.distcp is damaged .* is expected, .* is found"):
        load_into(tmp_path, targets)
    whole = {"other": torch.empty(700, 700)}
    assert torch.equal(load_into(tmp_path, whole)["other"], DAMAGED["other"])


@pytest.mark.parametrize("name", [INDEX_NAME, "state-rank=00000-00.distcp"])
def test_torn_files_are_found(tmp_path, name):
    path = save_plain(tmp_path, DAMAGED) / name
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointDamaged):
        load_into(tmp_path, {key: torch.empty_like(tensor) for key, tensor in DAMAGED.items()})


def test_one_tensor_of_a_thousand_reads_little_more_than_itself(tmp_path):
    state = {f"t{number:04d}": torch.full((300, 1000), float(number)) for number in range(100)}
    save_plain(tmp_path, state)
    counted = CountedReads(make_transfer(tmp_path))
    stored = open_stored(tmp_path, counted)
    target = torch.empty(300, 1000)
    stored.fill({"x": (target, "t0077")})
    assert torch.equal(target, state["t0077"])
    assert counted.size_bytes <= 1.05 * target.nbytes


class CountedReads:
    """A transfer that counts the bytes and ranges it is asked for, and the most that buffers took."""

    def __init__(self, transfer):
        self._transfer = transfer
        self.size_bytes = 0
        self.ranges = 0
        self.waves = 0

    def read(self, ranges):
        self.size_bytes += sum(item.size_bytes for item in ranges)
        self.ranges += len(ranges)
        self.waves += 1
        self._transfer.read(ranges)


def test_small_tensors_cost_requests_in_proportion_to_bytes(tmp_path):
    state = {f"t{number:05d}": torch.randn(512) for number in range(5000)}
    directory = save_plain(tmp_path, state)
    written = sum(file.stat().st_size for file in directory.iterdir() if file.name != ".metadata")
    assert written <= 1.45 * 5000 * 2048
    counted = CountedReads(make_transfer(tmp_path))
    targets = {key: torch.empty(512) for key in state}
    open_stored(tmp_path, counted).fill({key: (tensor, key) for key, tensor in targets.items()})
    assert all(torch.equal(targets[key], state[key]) for key in state)
    assert counted.ranges <= 2
    assert counted.size_bytes <= written


def test_tensors_of_a_slab_are_read_straight_into_their_memory(tmp_path):
    """All but the small and the strided ones, which lie between them."""
    state = {f"t{number}": torch.randn(200 if number % 5 == 0 else 60_000 + number) for number in range(80)}
    save_plain(tmp_path, state)
    targets = {key: torch.zeros(len(tensor)) for key, tensor in state.items()}
    targets["t17"] = torch.zeros(len(state["t17"]), 2)[:, 0]
    wanted = {key: (tensor, key) for key, tensor in targets.items()}
    stored = open_stored(tmp_path, make_transfer(tmp_path))
    tracemalloc.start()
    stored.fill(wanted)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(torch.equal(targets[key], state[key]) for key in state)
    assert peak_bytes < sum(tensor.nbytes for tensor in state.values()) / 4


@given(st.data())
def test_small_and_larger_tensors_of_a_slab_load_in_any_mixture(tmp_path_factory, data):
    """Into dense memory, strided memory and memory that is not aligned; saved twice with one plan, and read once."""
    root, memo = tmp_path_factory.mktemp("mixture"), SaveMemo()
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 7, 1000, 4096, 20_000, 300_000]), min_size=1, max_size=30))
    wide = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    for turn in range(2):
        state = {
            f"t{number:02d}": torch.randint(0, 256, (size, 2), dtype=torch.uint8)[:, 0]
            for number, size in enumerate(sizes)
        }
        state = {key: one if int(key[1:]) in wide else one.contiguous() for key, one in state.items()}
        save_flat(root, plain_state(state, {"turn": turn}), memo=memo, attempt=Attempt(turn, 1, "0123abcd"))
    keys = data.draw(st.lists(st.sampled_from(sorted(state)), unique=True, min_size=1))
    targets = {key: torch.zeros(len(state[key]) + 1, dtype=torch.uint8)[1:] for key in keys}
    for key in data.draw(st.lists(st.sampled_from(keys), unique=True)):
        targets[key] = torch.zeros(len(state[key]), 3, dtype=torch.uint8)[:, 1]
    doubled = torch.zeros_like(state[keys[0]])
    wanted = {key: (tensor, key) for key, tensor in targets.items()} | {"doubled": (doubled, keys[0])}
    transfer = make_transfer(root)
    stored = open_stored(root, transfer, attempt=Attempt(1, 1, "0123abcd"))
    assert stored.saved().values == {"turn": 1}
    stored.fill(wanted)
    transfer.close()
    assert all(torch.equal(targets[key], state[key]) for key in keys)
    assert torch.equal(doubled, state[keys[0]])


def test_a_tensor_whose_memory_was_given_back_is_not_written_to(tmp_path):
    save_plain(tmp_path, {"x": torch.arange(100.0)})
    target = torch.zeros(100)
    target.untyped_storage().resize_(200)
    with pytest.raises(InvalidState, match="given back, or is smaller"):
        load_into(tmp_path, {"x": target})


def test_the_buffers_of_a_load_are_bounded(tmp_path):
    state = {f"t{number}": torch.randn(1000, 1000) for number in range(12)}
    save_plain(tmp_path, state)
    counted = CountedReads(make_transfer(tmp_path))
    stored = open_stored(tmp_path, counted, buffer_bytes=10 * MIB)
    wide = {key: torch.zeros(1000, 1000, 2)[..., 0] for key in state}
    stored.fill({key: (tensor, key) for key, tensor in wide.items()})
    assert counted.waves == 6
    assert all(torch.equal(wide[key], state[key]) for key in state)


BOX = st.tuples(st.integers(0, 899), st.integers(0, 599), st.integers(1, 900), st.integers(1, 600)).map(
    lambda drawn: Box(drawn[:2], (min(drawn[2], 900 - drawn[0]), min(drawn[3], 600 - drawn[1])))
)


@pytest.fixture(scope="module")
def boxed(tmp_path_factory):
    """A tensor that is stored in four boxes by columns and rows, small ones and large ones, and its reader."""
    root = tmp_path_factory.mktemp("boxed")
    transfer = make_transfer(root)
    whole = torch.randn(900, 600, generator=torch.Generator().manual_seed(1))
    rows, columns = (0, 870, 900), (0, 595, 600)
    flat = plain_state({"t": whole})
    described = describe(flat, compare=False)
    boxes = [
        Box((top, left), (bottom - top, right - left))
        for top, bottom in itertools.pairwise(rows)
        for left, right in itertools.pairwise(columns)
    ]
    yield root, transfer, whole, described, boxes
    transfer.close()


def test_any_box_of_any_boxes_is_read(boxed):
    from ckptstore.state.index.part import Part
    from ckptstore.state.index.tensor_index import TensorIndex
    from ckptstore.state.write.assignment import RankPlan, Write
    from ckptstore.state.write.shard_files import ShardFiles, Striping
    from ckptstore.transfer.moves import PlannedFile

    _, transfer, whole, described, boxes = boxed
    plan = RankPlan(tuple(Write(0, 0, box) for box in boxes))
    files = ShardFiles(described, plan, rank=0, striping=Striping())
    stored = transfer.upload([PlannedFile(name, source) for name, source in files.sources()])
    index = TensorIndex([Part.decode(files.index_part([one.block_digests for one in stored]), rank=0, file="f")])
    index.check_complete()

    @settings(max_examples=60)
    @given(BOX, st.booleans())
    def check(box, is_strided):
        shape = box.sizes
        memory = torch.zeros((*shape, 2))[..., 0] if is_strided else torch.zeros(shape)
        plan = ReadPlan(index, prefix="")
        plan.add("t", [Piece(box, memory)], rank=0)
        steps = list(plan.steps())
        assert all(step.buffer_bytes <= BUFFER_BYTES + 2 * BLOCK_BYTES for step in steps)
        run_steps(steps, transfer.read, buffer_bytes=64 * MIB)
        assert torch.equal(memory, narrowed(whole, box))

    check()


def test_a_missing_chunk_is_damage(boxed):
    from ckptstore.state.index.part import Part, PartBuilder
    from ckptstore.state.index.tensor_index import TensorIndex

    builder = PartBuilder(0)
    builder.add_file("f", [b"crc!"])
    builder.add_slab(0, 1000)
    builder.add_chunk(builder.add_tensor("t", "float32", (4, 4)), 100, Box((0, 0), (2, 4)))
    plan = ReadPlan(TensorIndex([Part.decode(builder.encode(), rank=0, file="f")]), prefix="")
    with pytest.raises(CheckpointDamaged, match="a chunk is missing"):
        plan.add("t", [Piece(Box((0, 0), (4, 4)), torch.zeros(4, 4))], rank=0)


@given(st.data())
def test_sources_give_the_same_bytes_in_any_ranges(data):
    from ckptstore.state.tensors.frames import template

    base = torch.arange(6000, dtype=torch.float32).reshape(60, 100)
    tensors = [base[:7], base.t(), base[:, 5:9], base[3:3], torch.tensor(3, dtype=torch.uint8), base.bfloat16()[:, ::3]]
    tensors = data.draw(st.permutations([*tensors, base[7:9], base[:7], base[20], torch.tensor(5.0)]))
    made = [template(one.dtype, tuple(one.shape)) for one in tensors]
    is_known = data.draw(st.booleans())
    addresses = [held.address if is_known and (held := dense_of(tensor)) else 0 for tensor in tensors]
    segments = [Slab(SlabLayout(made), tensors, addresses)]
    segments += [payload_segment(tensor) for tensor in tensors if tensor.numel()]
    source = SegmentSource(segments, ())
    expected = b"".join(
        one.header + bits(tensor) + one.trailer for one, tensor in zip(made, tensors, strict=True)
    ) + b"".join(bits(tensor) for tensor in tensors)
    assert source.size_bytes == len(expected)
    cuts = sorted({0, len(expected), *data.draw(st.lists(st.integers(0, len(expected)), max_size=8))})
    found = b""
    with source.open() as read:
        for start, stop in itertools.pairwise(cuts):
            scratch = memoryview(bytearray(stop - start))
            found += b"".join(read(start, stop - start, scratch))
    assert found == expected


def test_the_second_save_reuses_templates_and_leaves_no_cycles(tmp_path):
    flat = plain_state({"w": torch.randn(100)}, {"epoch": 1})
    transfer = make_transfer(tmp_path)
    gc.collect()
    was_enabled = gc.isenabled()
    for number in range(3):
        save_flat(tmp_path, flat, transfer=transfer, attempt=Attempt(number, 1, "0123abcd"))
    assert gc.isenabled() == was_enabled
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3
    assert not (tmp_path / ATTEMPT.prefix).exists()
    transfer.close()


@pytest.mark.parametrize("values", [{}, {"epoch": 3}])
@pytest.mark.parametrize("tensors", [{}, {"none": torch.empty(0, 3)}])
def test_a_state_of_hardly_anything(tmp_path, tensors, values):
    save_plain(tmp_path, tensors, values)
    transfer = make_transfer(tmp_path)
    saved = open_stored(tmp_path, transfer).saved()
    transfer.close()
    assert set(saved.tensors) == set(tensors)
    assert saved.values == values
    load_into(tmp_path, {key: torch.empty_like(tensor) for key, tensor in tensors.items()})
