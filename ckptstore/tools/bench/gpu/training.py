"""Train a Llama on one device, or over the ranks by FSDP2. The parameters and moments are the state to save.

The decoder has RMSNorm, rotary positions, grouped-query attention and SwiGLU (Touvron et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from ckptstore.tools.bench.case import Case

_STATE_TENSORS = 3
"""The parameters, and both moments of AdamW."""
_TOKENS = {"cuda": (4, 2048), "cpu": (1, 32)}
"""Number of sequences in a step, and their length."""


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
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for part in (*llama.blocks, llama):
            fully_shard(part, mesh=mesh)
    llama.to_empty(device=device)
    for parameter in llama.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    model = nn.parallel.DistributedDataParallel(llama) if parallel == "ddp" else llama
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def shape_within(size_bytes: int, itemsize: int) -> Shape:
    """Return the shape of the largest model whose state has at most so many bytes, or of the smallest model."""
    found = next(iter(SHAPES.values()))
    for shape in SHAPES.values():
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in Llama(shape).parameters())
        if count * _STATE_TENSORS * itemsize <= size_bytes:
            found = shape
    return found


class Training:
    """Steps of a Llama with AdamW over random tokens. At most one step waits on the device while another one runs."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._device = torch.device(case.device)
        self._shape = shape_within(case.size_bytes, 2 if case.is_cuda else 4)
        self._model, self._optimizer = parallel_model(self._shape, self._device, None if case.alone else "fsdp")
        self._before: Any = None
        self._step(lambda: None)  # the optimizer makes its moments

    def state(self) -> Mapping[str, Any]:
        """Return the tensors themselves, which each step changes."""
        found = {f"model.{name}": tensor for name, tensor in self._model.state_dict().items()}
        for name, parameter in self._model.named_parameters():
            moments = self._optimizer.state[parameter]
            found |= {f"optimizer.{name}.{key}": moments[key] for key in ("exp_avg", "exp_avg_sq")}
        return found

    def steps(self, is_wanted: Callable[[int], bool], before_update: Callable[[], None]) -> int:
        """Take steps as long as any rank wants one more, and wait for them; return their number, the same on all ranks.

        `is_wanted` gets the number of steps taken. `before_update` is called when a step is about to change the state.
        """
        count = 0
        while self._any(is_wanted(count)):
            self._step(before_update)
            count += 1
        self._case.synchronize()
        return count

    def _any(self, is_wanted: bool) -> bool:
        if self._case.alone:
            return is_wanted
        flag = torch.tensor([int(is_wanted)])  # on the CPU: the device goes on with its steps
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _step(self, before_update: Callable[[], None]) -> None:
        num_sequences, length = _TOKENS[self._device.type]
        tokens = torch.randint(self._shape.vocabulary, (num_sequences, length + 1), device=self._device)
        logits = self._model(tokens[:, :-1])
        loss: Any = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        before_update()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._case.is_cuda:
            cuda: Any = torch.cuda
            ended = cuda.Event()
            ended.record()
            if self._before is not None:
                self._before.synchronize()
            self._before = ended
