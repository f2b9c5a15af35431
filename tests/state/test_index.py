"""The tensor index comes back as it was written, and one that lies is found out."""

import json

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from saving import index_of

from ckptstore import CheckpointDamaged, CkptstoreError, UnsupportedVersion
from ckptstore.format.digest import BLOCK_BYTES, Digest
from ckptstore.loading import index_read
from ckptstore.state.index.outline import Outline, PartFile, encode_table
from ckptstore.state.index.part import DTYPES, Part, PartBuilder, Tensor
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.tensors import boxes
from ckptstore.state.tensors.boxes import Box

SIZES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def boxes_in(sizes):
    ranges = [st.tuples(st.integers(0, size - 1), st.integers(1, size)) for size in sizes]
    return st.tuples(*ranges).map(
        lambda pairs: Box(
            tuple(offset for offset, _ in pairs),
            tuple(min(length, size - offset) for (offset, length), size in zip(pairs, sizes, strict=True)),
        )
    )


@given(SIZES.flatmap(lambda sizes: st.tuples(st.just(sizes), boxes_in(sizes), boxes_in(sizes))), st.integers(1, 9))
def test_boxes_agree_with_numpy(drawn, gap):
    sizes, left, right = drawn
    elements = numpy.arange(int(numpy.prod(sizes))).reshape(sizes)

    def inside(box):
        return elements[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))].reshape(-1)

    shared = boxes.overlap(left, right)
    common = sorted(set(inside(left)) & set(inside(right)))
    assert (sorted(inside(shared)) if shared else []) == common
    first, count = boxes.span(left, sizes)
    assert (first, first + count - 1) == (inside(left).min(), inside(left).max())
    assert boxes.is_range(left, sizes) == (list(inside(left)) == list(range(first, first + count)))
    assert boxes.within(boxes.inside(left, right), right) == left
    pieces = list(boxes.runs(left, sizes, gap))
    assert numpy.concatenate([inside(piece) for piece in pieces]).tolist() == inside(left).tolist()
    for piece in pieces:
        held = inside(piece)
        assert (numpy.diff(held) <= gap).all()


@given(SIZES, st.integers(1, 1000))
def test_a_granule_is_a_row_of_some_depth(sizes, most):
    rows = [int(numpy.prod(sizes[depth:])) for depth in range(len(sizes) + 1)]
    assert boxes.granule(sizes, most) in rows
    assert boxes.granule(sizes, most) <= most


def sample_part(rank=0, tensors=5, flags=0):
    """Rows of float32 tensors, a slab and a large payload, as a rank of two would write them."""
    builder = PartBuilder(rank)
    builder.add_file(f"state-rank={rank:05d}-00.distcp", [b"slab", b"big0big1"])
    builder.add_slab(0, 1000 * tensors)
    for number in range(tensors):
        row = builder.add_tensor(f"t{number}", "float32", (8, 16), flags)
        builder.add_chunk(row, 1000 * number + 300, Box((4 * rank, 0), (4, 16)))
    row = builder.add_tensor("big", "uint8", (2, BLOCK_BYTES + 1))
    builder.add_chunk(row, 8192, Box((rank, 0), (1, BLOCK_BYTES + 1)))
    tied = builder.add_tensor("tied", "uint8", (2, BLOCK_BYTES + 1))
    builder.add_chunk(tied, 8192, Box((rank, 0), (1, BLOCK_BYTES + 1)))
    return builder


def encoded(rank=0, **keywords):
    return sample_part(rank, **keywords).encode(
        common=json.dumps({"epoch": rank}).encode() if rank == 0 else b"", own=json.dumps({"rng": rank}).encode()
    )


def joined(*parts):
    return TensorIndex([Part.decode(part, rank=rank, file="f") for rank, part in enumerate(parts)])


def packed(*parts, **fields):
    """The file that has these parts; `fields` are those in which its outline lies."""
    ranks = [int.from_bytes(part[12:16], "little") for part in parts]
    index = TensorIndex(Part.decode(part, rank=rank, file="f") for part, rank in zip(parts, ranks, strict=True))
    tensors = sorted(tensor for tensor in index.tensors.values() if not tensor.beside_value)
    own = {**dict.fromkeys(index.value_ranks(), ranks[0]), **{one.key: ranks[0] for one in tensors if one.per_rank}}
    files = tuple(PartFile(len(part), Digest.of(part)) for part in parts)
    said = {"table": encode_table(tensors), "tied": {"tied": "big"}, "own": own, "common": (0,), "is_packed": True}
    return b"".join([Outline(files, **{**said, **fields}).encode(), *parts])


BIG = Tensor("big", "uint8", (2, BLOCK_BYTES + 1))
TENSORS = [BIG, *(Tensor(f"t{number}", "float32", (8, 16)) for number in range(5)), BIG._replace(key="tied")]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"table": encode_table([BIG._replace(dtype="int8"), *TENSORS[1:]]), "tied": {}}, "rank 0 disagree on .* big"),
        ({"table": encode_table(TENSORS[:1] + TENSORS[2:])}, "no tensor t0 as rank 0 has it"),
        ({"table": encode_table([*TENSORS, BIG._replace(key="z")])}, "has the tensor z, which no rank has"),
        ({"own": {"rng": 0, "t0": 1}}, "no tensor t0 as rank 0 has it"),
        ({"tied": {"t3": "t1"}}, "ties t3 to t1"),
        ({"tied": {"ghost": "t1"}}, "ghost"),
    ],
    ids=lambda value: value if type(value) is str else "",
)
def test_an_outline_that_its_parts_contradict_is_damage(fields, words):
    parts = encoded(0), encoded(1)
    assert index_of(packed(*parts, table=encode_table(TENSORS))).aliases == {"tied": "big"}
    with pytest.raises(CheckpointDamaged, match=words):
        index_of(packed(*parts, **fields))


def test_shapes_that_differ_between_ranks_are_damage():
    builder = PartBuilder(1)
    builder.add_file("f", [])
    builder.add_tensor("t0", "float32", (8, 17))
    with pytest.raises(CheckpointDamaged, match="ranks 0 and 1 disagree on the tensor t0"):
        joined(encoded(0), builder.encode())


@given(st.data())
def test_holes_and_overlaps_are_found(data):
    shape = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    cuts = [sorted({0, size, *data.draw(st.sets(st.integers(0, size)))}) for size in shape]
    grid = [
        Box((a, c), (b - a, d - c))
        for a, b in zip(cuts[0], cuts[0][1:], strict=False)
        for c, d in zip(cuts[1], cuts[1][1:], strict=False)
    ]

    def index_of(held):
        builder = PartBuilder(0)
        builder.add_file("f", [b"crc."])
        builder.add_slab(0, 1 << 16)
        row = builder.add_tensor("t", "uint8", shape)
        for number, box in enumerate(data.draw(st.permutations(held))):
            builder.add_chunk(row, number * 50, box)
        return joined(builder.encode())

    index_of(grid).check_complete()
    with pytest.raises(CheckpointDamaged, match="exactly once"):
        index_of(grid[1:]).check_complete()
    with pytest.raises(CheckpointDamaged, match="exactly once"):
        index_of([*grid, grid[0]]).check_complete()
    if len(grid) > 1 and grid[0].volume == grid[1].volume:
        with pytest.raises(CheckpointDamaged, match="exactly once"):
            index_of([grid[0], grid[0], *grid[2:]]).check_complete()


def chunk_of(low, size_bytes, offset, *slabs, digests=(b"crc.",)):
    """A part with a box of a tensor of eight bytes, at an offset in a file with these slabs."""
    builder = PartBuilder(0)
    builder.add_file("f", digests)
    for slab in slabs:
        builder.add_slab(*slab)
    builder.add_chunk(builder.add_tensor("t", "uint8", (8,)), offset, Box((low,), (size_bytes,)))
    return builder.encode()


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (chunk_of(4, 8, 0, (0, 64)), "a chunk leaves its tensor"),
        (chunk_of(0, 8, 60, (0, 64)), "a chunk leaves its region"),
        (chunk_of(0, 8, 0, (8, 64)), "a chunk lies in no region"),
        (chunk_of(0, 8, 0, (0, 64), (60, 64), digests=(b"crc.crc.",)), "its regions overlap"),
        (chunk_of(0, 8, 0, (0, 64), (64, 0), digests=(b"crc.crc.",)), "a region has no size"),
        (chunk_of(0, 8, 0, (0, 64), digests=(b"crc.crc.",)), "not one digest for each block"),
    ],
)
def test_places_that_cannot_be_are_damage(part, words):
    with pytest.raises(CheckpointDamaged, match=words):
        Part.decode(part, rank=0, file="f")


@given(st.integers(0, 10_000), st.integers(0, 255), st.integers(0, 60))
def test_flipped_and_torn_parts_are_damage_or_harmless(position, value, torn):
    data = bytearray(encoded(1))
    data[position % len(data)] = value
    for candidate in (bytes(data), bytes(data[: len(data) - torn])):
        try:
            index = TensorIndex([Part.decode(candidate, rank=1, file="f")])
            index.check_files(dict.fromkeys(index.files, 1 << 30))
            for fqn in index.tensors:
                index.chunks(fqn, 1)
        except CkptstoreError:
            continue


@pytest.mark.parametrize("head_bytes", [64, -1, 1 << 20], ids=["a bit", "all but a byte", "all"])
def test_a_flip_anywhere_in_the_file_is_found(head_bytes, monkeypatch):
    data = bytearray(packed(encoded(0), encoded(1)))
    monkeypatch.setattr(index_read, "HEAD_BYTES", head_bytes % len(data) if head_bytes < 0 else head_bytes)
    digest = Digest.of(data)
    assert index_of(data, digest).is_whole
    for position in range(len(data)):
        data[position] ^= 1 + position % 255
        with pytest.raises(CheckpointDamaged, match=r"tensors\.index"):
            index_of(data, digest)
        data[position] ^= 1 + position % 255


def test_what_is_larger_than_its_file_is_found():
    index = joined(encoded(0))
    with pytest.raises(CheckpointDamaged, match="beyond the end"):
        index.check_files(dict.fromkeys(index.files, 8192))
    with pytest.raises(CheckpointDamaged, match="has not"):
        index.check_files({})


def test_parts_in_each_others_places_are_damage():
    with pytest.raises(CheckpointDamaged, match="the part of rank 1 in the place of rank 0"):
        index_of(packed(encoded(1), encoded(0)))


@pytest.mark.parametrize(
    "harm", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:40], bytes.upper]
)
def test_a_file_of_another_size_is_damage(harm):
    with pytest.raises(CheckpointDamaged):
        index_of(harm(packed(encoded(0))))


@pytest.mark.parametrize(("version", "error"), [(2, UnsupportedVersion), (0, CheckpointDamaged)])
def test_another_version_is_refused(version, error):
    part = bytearray(encoded(0))
    part[8] = version
    with pytest.raises(error, match=f"version {version}"):
        Part.decode(bytes(part), rank=0, file="f")


@pytest.mark.parametrize("name", ["save", "nn", "Tensor", "float99", "half", "os.system", ""])
def test_a_name_of_something_else_is_no_dtype(name):
    with pytest.raises(CheckpointDamaged, match=r"model\.w has the dtype"):
        _ = Tensor("model.w", name, (2,)).torch_dtype
    assert {str(Tensor("w", known, ()).torch_dtype) for known in DTYPES} == {f"torch.{known}" for known in DTYPES}


def test_deflated_bombs_are_refused():
    part = bytearray(encoded(0))
    part[8 + 32 + 40 : 8 + 32 + 48] = (1 << 40).to_bytes(8, "little")
    with pytest.raises(CheckpointDamaged, match="longer than"):
        Part.decode(bytes(part), rank=0, file="f")


def llama(rank, *, ranks, layers):
    """The part of a rank that holds an equal share of the rows of a Llama-shaped state."""
    builder = PartBuilder(rank)
    shapes = {
        "attention.wq.weight": (4096, 4096),
        "attention.wk.weight": (1024, 4096),
        "attention.wo.weight": (4096, 4096),
        "feed_forward.w1.weight": (14336, 4096),
        "feed_forward.w2.weight": (4096, 14336),
    }
    shapes = {name: (rows * ranks // 8, columns) for name, (rows, columns) in shapes.items()}
    tensors = [(f"model.layers.{layer}.{name}", shape) for layer in range(layers) for name, shape in shapes.items()]
    blocks = [-(-rows * columns * 4 // ranks // BLOCK_BYTES) for _, (rows, columns) in tensors]
    builder.add_file(f"state-rank={rank:05d}-00.distcp", [b"crc!" * count for count in blocks])
    offset = 4096
    for fqn, (rows, columns) in tensors:
        share = rows // ranks
        builder.add_chunk(
            builder.add_tensor(fqn, "float32", (rows, columns)), offset, Box((rank * share, 0), (share, columns))
        )
        offset += share * columns * 4 + 4096
    return builder.encode(), sum(blocks)


def test_a_chunk_costs_at_most_32_bytes_beside_its_digests():
    part, blocks = llama(3, ranks=8, layers=200)
    assert (len(part) - 4 * blocks) / 1000 <= 32


@pytest.mark.slow
def test_a_thousand_ranks_are_joined_and_looked_up():
    index = joined(*(llama(rank, ranks=1024, layers=200)[0] for rank in range(1024)))
    index.check_complete()
    assert index.num_chunks == 1_024_000
    (chunk,) = index.chunks("model.layers.7.attention.wq.weight", 0, Box((512 * 77, 0), (512, 4096)))
    assert index.files[chunk.file] == "state-rank=00077-00.distcp"
