"""A decoder in the shape of Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU (Touvron et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model."""

    vocabulary: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden: int


SHAPES = {
    "tiny": Shape(vocabulary=256, width=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden=128),
    "300m": Shape(vocabulary=32000, width=1024, num_layers=16, num_heads=16, num_kv_heads=8, hidden=4096),
    "1b": Shape(vocabulary=128256, width=2048, num_layers=16, num_heads=32, num_kv_heads=8, hidden=8192),
    "7b": Shape(vocabulary=32000, width=4096, num_layers=32, num_heads=32, num_kv_heads=32, hidden=11008),
}
"""From the smallest to the largest."""


class Block(nn.Module):
    """Attention and a gated layer, each around a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.width // shape.num_heads
        self.sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self.attention_norm = nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, sum(self.sizes) * self.head_size, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.gate_up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

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

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.width // shape.num_heads
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.num_layers)])
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

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
    shape: Shape, device: torch.device, parallel: Literal["ddp", "fsdp"] | None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Create a model and its AdamW on this rank's device, over all ranks by DDP or FSDP2; in 16 bits on a GPU.

    With FSDP no rank ever holds the whole of it.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        llama = Llama(shape).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    if parallel == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        for part in (*llama.blocks, llama):
            fully_shard(part, mesh=mesh)
    llama.to_empty(device=device)
    for parameter in llama.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    model = nn.parallel.DistributedDataParallel(llama) if parallel == "ddp" else llama
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)
