"""Every frame is a file that stock torch.load reads, and the payload of stock frames is found."""

import io
import os
import pickle
import random
import struct
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import CheckpointDamaged, InvalidState
from ckptstore.state.tensors import frames

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def random_tensor(dtype, sizes):
    count = torch.Size(sizes).numel()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(sizes) if count else torch.empty(sizes, dtype=dtype)


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def framed(tensor):
    made = frames.template(tensor.dtype, tuple(tensor.shape))
    assert made.size_bytes == len(made.header) + len(raw(tensor)) + len(made.trailer)
    return made.header + raw(tensor) + made.trailer


def test_a_frame_costs_less_than_500_bytes_and_no_memory():
    made = frames.template(torch.float32, (1 << 9, 1 << 20))
    assert made.payload_bytes == 2 << 30
    assert made.size_bytes - made.payload_bytes < 500
    with pytest.raises(InvalidState):
        frames.template(torch.uint8, (4 << 30,))


def test_making_templates_leaves_the_crc_option_alone():
    before = torch.serialization.get_crc32_options()
    frames.template.cache_clear()
    frames.template(torch.float32, (3,))
    assert torch.serialization.get_crc32_options() == before


@given(st.lists(st.integers(1, 40), max_size=4), st.sampled_from(DTYPES), st.booleans())
def test_the_payload_is_found_in_frames_of_stock_torch(sizes, dtype, whole_tail):
    tensor = random_tensor(dtype, tuple(sizes))
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    data = buffer.getvalue()
    tail = data if whole_tail else data[-1200:]
    header, size_bytes, plain = frames.payload_range(tail, len(data), file="f")
    offset = frames.payload_offset(data[header : header + 30], header, file="f")
    assert plain
    assert data[offset : offset + size_bytes] == raw(tensor)


def test_a_frame_with_two_payloads_is_not_taken_for_plain():
    buffer = io.BytesIO()
    torch.save((torch.ones(2), torch.ones(3)), buffer)
    assert frames.payload_range(buffer.getvalue(), len(buffer.getvalue()), file="f") == (0, 0, 0)


def test_a_frame_in_the_byte_order_of_other_machines_is_not_taken_for_plain(tmp_path):
    torch.save(torch.ones(20_000), tmp_path / "here")
    with zipfile.ZipFile(tmp_path / "here") as here, zipfile.ZipFile(tmp_path / "there", "w") as there:
        for name in here.namelist():
            there.writestr(name, b"big" if name.endswith("byteorder") else here.read(name))
    for name, is_plain in (("here", 1), ("there", 0)):
        data = (tmp_path / name).read_bytes()
        assert frames.payload_range(data[-2000:], len(data), file="f")[2] == is_plain


@pytest.mark.parametrize(
    "value",
    [3, "x", b"\xff", None, (1, [2.5, {"a": {1: -(1 << 70)}}]), [(n, f"name-{n}") for n in range(5000)]],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("weights_only", [True, False])
def test_frames_of_pickles_are_what_torch_load_reads(value, weights_only, tmp_path):
    data = frames.pickle_frame(pickle.dumps(value, 2))
    assert torch.load(io.BytesIO(data), weights_only=weights_only) == value
    (tmp_path / "x.pt").write_bytes(data)
    assert torch.load(tmp_path / "x.pt", weights_only=weights_only) == value
    with zipfile.ZipFile(io.BytesIO(data)) as archive:  # which looks at the CRC-32
        assert archive.testzip() is None
        pickled = archive.read("t/data.pkl")
    buffer = io.BytesIO()
    torch.save(value, buffer)
    assert len(data) <= len(buffer.getvalue())
    with zipfile.ZipFile(buffer) as archive:
        assert archive.read("archive/data.pkl") == pickled


@pytest.mark.parametrize(("value", "is_less"), [("a" * 200_000, True), (random.Random(0).randbytes(200_000), False)])
def test_a_long_pickle_is_compressed_where_that_helps(value, is_less):
    pickled = pickle.dumps(value, 2)
    data = frames.pickle_frame(pickled)
    assert (len(data) < len(pickled)) is is_less
    assert torch.load(io.BytesIO(data), weights_only=True) == value


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_torn_and_flipped_archives_are_damage(noise, position, flipped):
    data = bytearray(framed(torch.ones(3)))
    data[position % len(data)] = flipped
    for torn in (noise, b"PK\5\6" + noise, bytes(data)):
        try:
            header, size_bytes, _ = frames.payload_range(torn, len(torn), file="f")
            frames.payload_offset(torn[header : header + 30], header, file="f")
        except CheckpointDamaged:
            continue
        assert size_bytes >= 0


@pytest.mark.slow
def test_stock_frames_above_4_gib_are_found(tmp_path):
    path = tmp_path / "huge.pt"
    with torch.serialization.skip_data():
        torch.save(torch.empty((4 << 30) + 5, dtype=torch.uint8), path)
    size_bytes = os.path.getsize(path)
    with path.open("rb") as file:
        file.seek(size_bytes - 2000)
        header, payload_bytes, plain = frames.payload_range(file.read(), size_bytes, file="f")
        file.seek(header)
        assert frames.payload_offset(file.read(30), header, file="f") > header
    assert (payload_bytes, plain) == ((4 << 30) + 5, 1)


def test_pickles_of_frames_hold_nothing_but_the_tensor():
    made = frames.template(torch.bfloat16, (2, 2))
    start = 30 + struct.unpack_from("<H", made.header, 26)[0]
    with pytest.raises(pickle.UnpicklingError, match="persistent"):
        pickle.loads(made.header[start:])
