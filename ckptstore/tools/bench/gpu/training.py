"""Create a Llama to train, on one device, or over the ranks by DDP or FSDP2.

The decoder has RMSNorm, rotary positions, grouped-query attention and SwiGLU (Touvron et al. 2023).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from ckptstore.tools.bench.shapes import Preset

_STATE_TENSORS = 3
"""The parameters, and both moments of AdamW."""
SHAPES = {
    "tiny": Preset(words=256, hidden=64, layers=2, heads=4, kv_heads=2, inner=128),
    "300m": Preset(words=32000, hidden=1024, layers=16, heads=16, kv_heads=8, inner=4096),
    "1b": Preset(words=128256, hidden=2048, layers=16, heads=32, kv_heads=8, inner=8192),
    "7b": Preset(words=32000, hidden=4096, layers=32, heads=32, kv_heads=32, inner=11008),
}
"""From the smallest to the largest."""


class Block(nn.Module):
    """Attention and a gated layer, each around a residual."""

    def __init__(self, shape: Preset) -> None:
        super().__init__()
        self.head_size = shape.hidden // shape.heads
        self.sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, sum(self.sizes) * self.head_size, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.hidden)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Apply the block to `x` (batch, sequence, width); `turns` are (sequence, head_size / 2) unit numbers."""
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, -1, self.head_size).transpose(1, 2)
        query, key, value = heads.split(self.sizes, dim=1)
        query, key = turned(query, turns), turned(key, turns)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        done: Tensor = x + self.down(functional.silu(gate) * up)
        return done


class Llama(nn.Module):
    """Maps token numbers (batch, sequence) to logits (batch, sequence, vocabulary)."""

    def __init__(self, shape: Preset) -> None:
        super().__init__()
        self.head_size = shape.hidden // shape.heads
        self.embedding = nn.Embedding(shape.words, shape.hidden)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        turns = angles(tokens.shape[1], self.head_size, tokens.device)
        for block in self.blocks:
            x = block(x, turns)
        logits: Tensor = self.head(self.norm(x))
        return logits


def angles(length: int, head_size: int, device: torch.device) -> Tensor:
    """Return the rotations of all positions (Su et al. 2021)."""
    speeds = 10_000.0 ** -(torch.arange(0, head_size, 2, device=device) / head_size)
    each = torch.outer(torch.arange(length, device=device), speeds)
    return torch.polar(torch.ones_like(each), each)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Multiply each pair of `x`, as a complex number, with that of its position."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def parallel_model(
    shape: Preset, device: torch.device, parallel: Literal["ddp", "fsdp"] | None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Create a model and its AdamW on this rank's device, over all ranks by DDP or FSDP2; in 16 bits on a GPU.

    With FSDP no rank ever holds the whole of it.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        llama = Llama(shape).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    if parallel == "fsdp":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for part in (*llama.blocks, llama):
            fully_shard(part, mesh=mesh)
    llama.to_empty(device=device)
    for parameter in llama.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    model = nn.parallel.DistributedDataParallel(llama) if parallel == "ddp" else llama
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def shape_within(size_bytes: int, itemsize: int) -> Preset:
    """Return the shape of the largest model whose state has at most so many bytes, or of the smallest model."""
    fitting = [one for one in SHAPES.values() if one.num_parameters * _STATE_TENSORS * itemsize <= size_bytes]
    return fitting[-1] if fitting else SHAPES["tiny"]
