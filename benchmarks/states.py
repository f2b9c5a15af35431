"""The states that are saved and loaded: tensors of one size, and those of a Llama 3.2 with 1.2 billion parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from versus import FULL

State = dict[str, torch.Tensor]

TENSOR_BYTES = 16 << 20
TOTAL_BYTES = (2 << 30) if FULL else (64 << 20)


def even_state(total_bytes: int = TOTAL_BYTES, tensor_bytes: int = TENSOR_BYTES) -> State:
    """Tensors of one size with bytes that differ, written once so that their memory is there."""
    pattern = torch.randint(0, 256, (tensor_bytes,), dtype=torch.uint8)
    return {
        f"block.{number}.weight": pattern.roll(number).view(torch.bfloat16).clone()
        for number in range(total_bytes // tensor_bytes)
    }


def llama_state() -> State:
    """A state dict with the names and shapes of Llama 3.2 1B in bfloat16: 146 tensors, 2.5 GB; small unless FULL."""
    hidden, inner, kv, layers, words = (2048, 8192, 512, 16, 128_256) if FULL else (256, 1024, 64, 4, 4096)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    for layer in range(layers):
        inside = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in inside.items()}
    shapes["model.norm.weight"] = (hidden,)
    pattern = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    return {name: _filled(shape, pattern.roll(number)) for number, (name, shape) in enumerate(shapes.items())}


def _filled(shape: tuple[int, ...], pattern: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    flat = tensor.view(-1).view(torch.uint8)
    for start in range(0, len(flat), len(pattern)):
        piece = flat[start : start + len(pattern)]
        piece.copy_(pattern[: len(piece)])
    return tensor


STATES = {"even": even_state, "llama": llama_state}


def empty_like(state: Mapping[str, torch.Tensor]) -> State:
    """Tensors to load into, whose memory is there."""
    return {name: torch.full_like(tensor, 1) for name, tensor in state.items()}


def size_of(state: Mapping[str, torch.Tensor]) -> int:
    """The bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Bit by bit."""
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
