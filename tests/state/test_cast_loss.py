"""A cast may round. Whatever else it does to a value is an error, for all pairs of dtypes, wherever ckptstore casts."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from ckptstore import InvalidState
from ckptstore.state.tensors.cast_loss import check_cast, lost_in_cast

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BYTES = [
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu
]  # fmt: skip
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
EVERY = [*FLOATS, *BYTES, *WHOLE, torch.complex64, torch.complex128]
VALUES = [0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 1.25, 127.0, 128.0, -129.0, 240.0, 256.0, 300.0, 448.0, 480.0, 1000.0, -5e4]
VALUES += [57344.0, 61000.0, 65504.0, 7e4, -1e9, 1e9, 3e9, 1e19, 1e38, -3e38, 1e300, math.inf, -math.inf, math.nan]


def extremes(dtype: torch.dtype) -> torch.Tensor:
    """Numbers that the dtype holds as they are, its ends among them."""
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if not (dtype.is_floating_point or dtype.is_complex):
        ends = torch.iinfo(dtype)
        return torch.tensor(
            [x for x in (ends.min, ends.max, 0, 1, 2, -1, 300) if ends.min <= x <= ends.max], dtype=dtype
        )
    if dtype.is_complex:
        return torch.tensor([complex(x, y) for x, y in product([0.0, 1.0, -1e9, math.inf], [0.0, 2.0])], dtype=dtype)
    ends = torch.finfo(dtype)
    return torch.tensor([*VALUES, ends.max, ends.min, ends.tiny], dtype=torch.float64).to(dtype)


def is_kept(was: complex, now: complex, dtype: torch.dtype) -> bool:
    """True if a number is the same but for rounding, worked out with the numbers of Python."""
    if isinstance(was, complex) or isinstance(now, complex):
        if not isinstance(now, complex):
            return was.imag == 0 and is_kept(was.real, now, dtype)
        return is_kept(complex(was).real, now.real, dtype) and is_kept(complex(was).imag, now.imag, dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return not math.isnan(was) and was == now
    if math.isnan(was) or math.isinf(was):
        return math.isnan(now) if math.isnan(was) else was == now
    beyond = dtype.itemsize == 1 and abs(was) > torch.finfo(dtype).max
    return math.isfinite(now) and was * now >= 0 and not beyond


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_all_pairs_of_dtypes(dtype: torch.dtype) -> None:
    for other in EVERY:
        was = extremes(other)
        made = was.to(dtype)
        expected = [not is_kept(x, y, dtype) for x, y in zip(was.tolist(), made.tolist(), strict=True)]
        assert lost_in_cast(was, made).tolist() == expected, f"{other} to {dtype}: {was.tolist()} {made.tolist()}"
        if any(expected):
            with pytest.raises(InvalidState, match=r"w has the (number|value)"):
                check_cast("w", was, made)
        else:
            check_cast("w", was, made)


def test_large_tensors_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.state.tensors.cast_loss._CHUNK_ELEMENTS", 7)
    for shape in [(100,), (3, 50), (2, 3, 5), (20, 2), (1, 1)]:
        tensor = torch.ones(shape)
        check_cast("w", tensor, tensor.to(torch.float8_e4m3fn))
        tensor.view(-1)[-1] = 1e9
        with pytest.raises(InvalidState, match=r"w has the number 1e\+09, which float8_e4m3fn cannot hold"):
            check_cast("w", tensor, tensor.to(torch.float8_e4m3fn))
