"""Train a Llama, and measure how a save in the background slows its steps, and if it holds the state of its call.

The decoder has RMSNorm, rotary positions, grouped-query attention and SwiGLU (Touvron et al. 2023).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.figures.report import Sample
from ckptstore.tools.bench.measure import Meter
from ckptstore.tools.bench.peers.base import Contender
from ckptstore.tools.bench.shapes import Preset, difference, size_of
from ckptstore.tools.bench.turns import Contest, Tell

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


_TOKENS = {"cuda": (4, 2048), "cpu": (1, 32)}
"""Number of sequences in a step, and their length."""
_ALONE_SECONDS = {"cuda": 3.0, "cpu": 0.05}
_LEAST_STEPS = 3
_LEAST_SECONDS = 0.001
"""The least loss counted: steps vary by more, and a ratio to nothing says nothing."""


class Steps(Contest):
    """Measures the seconds that the training of a Llama loses to one save: the call, and the longer steps beside it.

    The state is that of the training, and each step changes all of it.
    """

    def __init__(self, case: Case, action: str, *, figure: str, tell: Tell) -> None:
        super().__init__(case, action, figure=figure, tell=tell)
        self._device = torch.device(case.device)
        self._shape = shape_within(case.size_bytes, 2 if case.is_cuda else 4)
        self._model, self._optimizer = parallel_model(self._shape, self._device, None if case.alone else "fsdp")
        self._last: Any = None
        self._step(lambda: None)  # the optimizer makes its moments
        state = {f"model.{name}": tensor for name, tensor in self._model.state_dict().items()}
        for name, parameter in self._model.named_parameters():
            moments = self._optimizer.state[parameter]
            state |= {f"optimizer.{name}.{key}": moments[key] for key in ("exp_avg", "exp_avg_sq")}
        case.state, case.target = state, {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        case.local, case.local_target = ({n: _own(t) for n, t in found.items()} for found in (case.state, case.target))
        case.rank_bytes = size_of(case.local)
        self._seconds_alone(_LEAST_STEPS)  # the first ones choose kernels
        wanted = math.ceil(_ALONE_SECONDS[self._device.type] / self._seconds_alone(_LEAST_STEPS))
        self._num_alone = max(_LEAST_STEPS, *case.gather(wanted))

    def timed(self, contender: Contender, call: Callable[[], Any]) -> Sample:
        """Take steps alone, the call, and steps until everything is stored.

        Raises TurnFailed when the stored state is not that of the call.
        """
        case = self.case
        alone = self._seconds_alone(self._num_alone)
        at_call = {name: tensor.clone() for name, tensor in case.local.items()}
        case.synchronize()
        case.gather(None)
        with ThreadPoolExecutor(1) as pool, Meter() as meter:
            stored: Future[object] = Future()
            try:
                stored = pool.submit(call() or (lambda: None))
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # torch's is none of Exception; and other ranks still take steps
                stored.set_exception(error)
            meter.returned()
            began = time.perf_counter()
            count = self._steps(lambda _: not stored.done(), contender.staged)
            seconds = time.perf_counter() - began

        def check() -> None:
            contender.load(self.case.uri(f"turn-{self._number}"))
            if name := difference(self.case.local_target, at_call):
                raise ValueError(f"what was saved of {name} is not what was there at the call")

        self._together(stored.result)
        contender.note("steps_per_second_alone", 1 / alone)
        if count:
            contender.note("steps_per_second", count / seconds)
        self._together(check)
        lost = max(_LEAST_SECONDS, meter.total_seconds - count * alone)
        retries = meter.retries if contender.role == "ckptstore" else None
        return replace(meter.sample(), total_seconds=lost, retries=retries)

    def _seconds_alone(self, num_steps: int) -> float:
        """Return the seconds of a step, by the mean of some."""
        self.case.synchronize()
        began = time.perf_counter()
        self._steps(lambda count: count < num_steps, lambda: None)
        return (time.perf_counter() - began) / num_steps

    def _steps(self, is_wanted: Callable[[int], bool], before_update: Callable[[], None]) -> int:
        """Take steps as long as any rank wants one more, and wait for them; return their number, the same on all ranks.

        `is_wanted` gets the number of steps taken. `before_update` is called when a step is about to change the state.
        """
        count = 0
        while self._any(is_wanted(count)):
            self._step(before_update)
            count += 1
        self.case.synchronize()
        return count

    def _any(self, is_wanted: bool) -> bool:
        if self.case.alone:
            return is_wanted
        flag = torch.tensor([int(is_wanted)])  # on the CPU: the device goes on with its steps
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _step(self, before_update: Callable[[], None]) -> None:
        """Take a step with random tokens. At most one step waits on the device while another one runs."""
        num_sequences, length = _TOKENS[self._device.type]
        tokens = torch.randint(self._shape.words, (num_sequences, length + 1), device=self._device)
        logits = self._model(tokens[:, :-1])
        loss: Any = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        before_update()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self.case.is_cuda:
            cuda: Any = torch.cuda
            ended = cuda.Event()
            ended.record()
            if self._last is not None:
                self._last.synchronize()
            self._last = ended


def _own(tensor: Any) -> torch.Tensor:
    """Return this rank's part, in the same memory."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
