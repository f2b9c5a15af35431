"""Create the states to save and load: tensors of one size, or a rank's share of a Llama 3 in training.

The Llama presets have the dimensions of the checkpoint workloads of MLPerf Storage: 16-bit weights, and in 32 bits the
master weights and both moments of Adam, which makes 14 bytes for each parameter. Every rank has the same rows of every
tensor, so the number of tensors is the real one; `scale` shortens the rows. "llama-1b" is no workload of MLPerf: it is
the state dict of Llama 3.2 1B, 146 tensors in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckptstore.errors import InvalidInput

State = dict[str, torch.Tensor]

TENSOR_BYTES = 16 << 20
TRAINED_BYTES = 14
NUMBER_BYTES = 2
"""The least that a tensor takes: one number of 16 bits."""
_PATTERN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The sizes of a Llama."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    words: int = 128_256
    is_trained: bool = True
    """True if there is an optimizer, and a head with weights of its own."""

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor of the model."""
        kv = self.hidden // self.heads * self.kv_heads
        yield "model.embed_tokens.weight", (self.words, self.hidden)
        inside: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }
        for layer in range(self.layers):
            for name, shape in inside.items():
                yield f"model.layers.{layer}.{name}.weight", shape
        yield "model.norm.weight", (self.hidden,)
        if self.is_trained:
            yield "lm_head.weight", (self.words, self.hidden)

    @property
    def num_parameters(self) -> int:
        """The numbers of all tensors of the model."""
        return sum(math.prod(shape) for _, shape in self.weights())

    @property
    def size_bytes(self) -> int:
        """The bytes of a whole checkpoint."""
        return self.num_parameters * (TRAINED_BYTES if self.is_trained else NUMBER_BYTES)


PRESETS = {
    "llama-1b": Preset(hidden=2048, inner=8192, heads=32, kv_heads=8, layers=16, is_trained=False),
    "llama-8b": Preset(hidden=4096, inner=14_336, heads=32, kv_heads=8, layers=32),
    "llama-70b": Preset(hidden=8192, inner=28_672, heads=128, kv_heads=8, layers=80),
    "llama-405b": Preset(hidden=16_384, inner=53_248, heads=128, kv_heads=8, layers=126),
}


def state_bytes(shape: str, *, size_bytes: int, scale: float | None) -> int:
    """Return the bytes of the whole state, or that share of the preset. Raises InvalidInput without a preset."""
    if scale is None:
        return size_bytes
    if shape not in PRESETS:
        raise InvalidInput(f"--scale is a share of a preset, and {shape} is none", hint=f"One of {', '.join(PRESETS)}")
    return int(PRESETS[shape].size_bytes * scale)


def shapes_of(
    shape: str, rank_bytes: int, tensor_bytes: int = TENSOR_BYTES
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the tensors of one rank: about `rank_bytes`, at least one row of every tensor."""
    if shape not in PRESETS:
        count = max(1, round(rank_bytes / tensor_bytes))
        size = rank_bytes // count // NUMBER_BYTES
        return {f"block.{number}.weight": ((size,), torch.bfloat16) for number in range(count)}
    share = rank_bytes / PRESETS[shape].size_bytes
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, whole in PRESETS[shape].weights():
        rows = whole[0] * share
        # Below one row the rows themselves get shorter: the number of tensors stays.
        part = (
            (max(1, round(rows)), *whole[1:]) if rows >= 1 or len(whole) == 1 else (1, max(1, round(whole[1] * rows)))
        )
        found[f"model.{name}"] = (part, torch.bfloat16)
        for moment in ("master", "exp_avg", "exp_avg_sq") if PRESETS[shape].is_trained else ():
            found[f"optimizer.{name}.{moment}"] = (part, torch.float32)
    return found


def rank_state(shape: str, rank_bytes: int, *, rank: int, tensor_bytes: int = TENSOR_BYTES) -> State:
    """Create the tensors of one rank, with bytes that differ from tensor to tensor and rank to rank."""
    generator = torch.Generator().manual_seed(rank)
    pattern = torch.randint(0, 256, (_PATTERN_BYTES,), dtype=torch.uint8, generator=generator).repeat(2)
    return {
        name: _filled(size, dtype, pattern[number % _PATTERN_BYTES :][:_PATTERN_BYTES])
        for number, (name, (size, dtype)) in enumerate(shapes_of(shape, rank_bytes, tensor_bytes).items())
    }


def _filled(shape: tuple[int, ...], dtype: torch.dtype, pattern: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    flat = tensor.view(-1).view(torch.uint8)
    for start in range(0, len(flat), len(pattern)):
        piece = flat[start : start + len(pattern)]
        piece.copy_(pattern[: len(piece)])
    return tensor


def empty_like(state: Mapping[str, torch.Tensor]) -> State:
    """Create tensors to load into, in allocated memory."""
    return {name: torch.full_like(tensor, 1) for name, tensor in state.items()}


def size_of(state: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Return the first tensor whose bytes differ; None when there is none."""
    for name, tensor in expected.items():
        if not torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)):
            return name
    return None
