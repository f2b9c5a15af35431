"""Raw tensors for states, and tensors to load them into. Numbers come from torch's RNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

LARGE = (560, 600)
"""Above 1 MiB in float32, where tensors are copied in blocks, and packed apart from small ones."""

DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16"),
    *("float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)


def _of_dtype(name: str) -> torch.Tensor:
    """Return a (3, 4) tensor of the dtype with random bits, including NaN and denormal numbers; bool has 0 and 1.

    No NaN of complex32 is a signalling one, which torch makes quiet when it copies to a conjugate.
    """
    if name == "bool":
        return torch.rand(3, 4) < 0.5
    dtype: torch.dtype = getattr(torch, name)
    size_bytes = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 256, (3, 4 * size_bytes), dtype=torch.uint8)
    if dtype is torch.complex32:
        halves = bits.view(torch.float16)
        bits.view(torch.int16)[halves.isnan()] |= 0x0200
    return bits.view(dtype)


def _in_one_storage() -> dict[str, torch.Tensor]:
    base = torch.randn(40)
    return {"head": base[:20], "tail": base[20:], "every other": base[::2]}


def _conjugates() -> dict[str, torch.Tensor]:
    x = torch.randn(5, 3, dtype=torch.complex64)
    return {"a": x, "b": x.conj()}


def _imaginary_parts() -> dict[str, torch.Tensor]:
    x = torch.randn(5, 3, dtype=torch.complex64)
    return {"a": x.imag, "b": x.conj().imag}


def _same_twice() -> dict[str, torch.Tensor]:
    x = torch.randn(4, 4)
    return {"a": x, "b": x, "turned": x.t()}


TENSORS: Mapping[str, Callable[[], Any]] = {
    **{f"dtype {name}": partial(_of_dtype, name) for name in DTYPES},
    "0-dim": lambda: torch.randn(()),
    "zero size": lambda: torch.randn(0, 3),
    "zero size transposed": lambda: torch.randn(0, 3).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "channels last 3d": lambda: torch.randn(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.randn(6, 5).t(),
    "column slice": lambda: torch.randn(5, 9)[:, 2:6],
    "stepped": lambda: torch.randn(21)[1::3],
    "with an offset": lambda: torch.randn(30)[7:19].view(3, 4),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "one element, stride 0": lambda: torch.randn(()).expand(1),
    "sliding window": lambda: torch.randn(8).as_strided((5, 4), (1, 1)),
    "conj": lambda: torch.randn(4, 3, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(4, 3, dtype=torch.complex128).conj().imag,
    "conj transposed": lambda: torch.randn(4, 3, dtype=torch.complex64).mH,
    "in one storage": _in_one_storage,
    "conj beside": _conjugates,
    "neg beside": _imaginary_parts,
    "same twice": _same_twice,
    "parameter": lambda: torch.nn.Parameter(torch.randn(3, 2)),
    "needs grad, no leaf": lambda: torch.randn(3, 2, requires_grad=True) * 2,
    "a block of digests": lambda: torch.randn(512, 512),
    "large": lambda: torch.randn(*LARGE),
    "large transposed": lambda: torch.randn(*LARGE).t(),
    "large channels last": lambda: torch.randn(70, 70, 8, 8).to(memory_format=torch.channels_last),
    "large column slice": lambda: torch.randn(LARGE[0], LARGE[1] + 50)[:, : LARGE[1]],
    "large expanded": lambda: torch.randn(1, LARGE[1]).expand(*LARGE),
    "large conj": lambda: torch.randn(300, 500, dtype=torch.complex64).conj(),
    "large reals of complex": lambda: torch.randn(*LARGE, dtype=torch.complex64).real,
    "sparse": lambda: torch.randn(4, 4).relu().to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged),
    "meta": lambda: torch.empty(3, 3, device="meta"),
}
"""Each maker returns one tensor, or a dict of several that share memory."""
OVERLAPPING = ("expanded", "large expanded", "sliding window")
"""Tensors, and targets, with several elements in the same memory."""


def _zeros(tensor: torch.Tensor) -> Any:
    """Return new contiguous zeros without the gradient, conj and neg marks of `tensor`."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        return tensor.clone() if not tensor.is_meta else torch.empty_like(tensor)
    size_bytes = max(1, tensor.numel() * tensor.element_size())
    return (
        torch.zeros(size_bytes, dtype=torch.uint8)[: tensor.numel() * tensor.element_size()]
        .view(tensor.dtype)
        .view(tensor.shape)
    )


def _strided(tensor: torch.Tensor) -> Any:
    if not tensor.dim():
        return _zeros(tensor)
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
    return wide[..., ::2]


def _transposed(tensor: torch.Tensor) -> Any:
    if not tensor.dim():
        return _zeros(tensor)
    return torch.zeros(tuple(reversed(tensor.shape)), dtype=tensor.dtype).permute(*reversed(range(tensor.dim())))


def _sliding(tensor: torch.Tensor) -> torch.Tensor:
    strides = (1,) * tensor.dim()
    return torch.zeros(sum(tensor.shape) + 1, dtype=tensor.dtype).as_strided(tensor.shape, strides)


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((1,) * tensor.dim(), dtype=tensor.dtype).expand(tensor.shape)


def _conjugated(tensor: torch.Tensor) -> Any:
    return torch.zeros(tensor.shape, dtype=tensor.dtype).conj()


def _other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=torch.float64 if tensor.dtype is torch.float32 else torch.float32)


TARGETS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "zeros": _zeros,
    "strided": _strided,
    "transposed": _transposed,
    "sliding window": _sliding,
    "expanded": _expanded,
    "conj": _conjugated,
    "meta": lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"),
    "other dtype": _other_dtype,
    "nothing": lambda tensor: None,
}
"""Maps a tensor of the saved state to its counterpart in the state that is loaded."""
