"""Modules for states. Each maker returns one that maps (4, 6) floats to (4, 6); weights come from torch's RNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptstore.runtime.torch_private import checkpoint_wrapper
from kit.states.upgraded_makers import NOTING
from kit.states.upgraded_makers import WIDTH as WIDTH

ROWS = 4


class _Reshaped(nn.Module):
    """Reshapes a module's input, and cuts its output to the width."""

    def __init__(self, inner: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = inner
        self._shape = shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _cut(self.inner(x.reshape(self._shape)))


def _cut(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1)[: ROWS * WIDTH].reshape(ROWS, WIDTH)


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, padding_idx=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table((x.sum(1).abs() * 10).long() % 7)
        return found + x


class _Experts(nn.Module):
    """Sends the first rows to one expert, the others to another; one expert never gets any."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.experts[0](x[:2]), self.experts[2](x[2:])])


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.first(x))


class _Buffers(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x


class _ExtraState(_Buffers):
    """Has an extra state of the kind `gives`, which depends on the number of calls."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self._gives = gives
        self.history: Any = None if gives == "none first" else self._of(0)

    def _of(self, count: int) -> Any:
        if self._gives == "dict":
            return {"count": count, "amax": torch.full((2,), float(count), device="cpu")}
        return torch.arange(float(count + 2 if self._gives == "growing" else 2), device="cpu") + count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        self.history = self._of(int(self.seen))
        return x

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state


class _Observed(nn.Module):
    """Has a buffer without elements until the first call, as observers of torch.ao do, and takes one of any shape."""

    highest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("highest", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = x.amax(0)
            self.highest = torch.maximum(self.highest, found) if self.highest.numel() else found
        return self.inner(x)  # type: ignore[no-any-return]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.highest.resize_(state_dict.get(f"{prefix}highest", self.highest).shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _Adapter(nn.Module):
    """Leaves its frozen weights out of its state_dict, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH))
        self.up = nn.Parameter(torch.randn(WIDTH, 2))
        self.register_state_dict_post_hook(self._leave_out)  # type: ignore[no-untyped-call]

    @staticmethod
    def _leave_out(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}base.")]:
            del state[key]

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + x @ self.down.t() @ self.up.t()


class _OtherArgument(nn.Module):
    """Names the argument of load_state_dict differently from torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)

    def load_state_dict(self, weights: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict(weights, strict)


class _Renaming(nn.Module):
    """Writes its weights under other names, and reads those."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_state_dict_post_hook(self._rename)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._rename_back)  # type: ignore[no-untyped-call]

    @staticmethod
    def _rename(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}inner.")]:
            state[key.replace(f"{prefix}inner.", f"{prefix}kernel.")] = state.pop(key)

    @staticmethod
    def _rename_back(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}kernel.")]:
            state[key.replace(f"{prefix}kernel.", f"{prefix}inner.")] = state.pop(key)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def _conv(*, last: bool = False) -> nn.Module:
    conv: Any = nn.Conv2d(3, 4, 2, padding=1)
    return _Reshaped(conv.to(memory_format=torch.channels_last) if last else conv, (2, 3, 2, 2))


def _large_conv() -> nn.Module:
    conv: Any = nn.Conv2d(3, 22_000, 2)
    return _Reshaped(conv.to(memory_format=torch.channels_last), (2, 3, 2, 2))


def _weight_norm() -> Any:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def _orthogonal() -> Any:
    return torch.nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))


def _pruned() -> Any:
    import torch.nn.utils.prune

    linear = nn.Linear(WIDTH, WIDTH)
    torch.nn.utils.prune.l1_unstructured(linear, "weight", 0.5)  # type: ignore[no-untyped-call]
    return linear


def _quantised() -> nn.Module:
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    changed: nn.Module = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
        inner, {nn.Linear}, dtype=torch.qint8
    )
    return changed


def _compiled(module: nn.Module) -> Any:
    # The class and the names of torch.compile, eighty times faster: nothing is ever compiled.
    return torch.compiler.disable(module)  # type: ignore[no-untyped-call]


def _checkpointed(inner: nn.Module) -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(inner))


def _complex() -> nn.Module:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.complex64) @ self.turn).abs()

    return Complex()


def _half() -> nn.Module:
    class Half(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.bfloat16()).float()

    return Half(WIDTH, WIDTH).bfloat16()


MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "conv": _conv,
    "conv channels last": lambda: _conv(last=True),
    "large conv channels last": _large_conv,
    "large linear": lambda: nn.Sequential(nn.Linear(WIDTH, 50_000, bias=False), nn.Linear(50_000, WIDTH, bias=False)),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "embedding": _Words,
    "experts": _Experts,
    "tied": _Tied,
    "buffers": _Buffers,
    "weight norm": _weight_norm,
    "orthogonal": _orthogonal,
    "pruned": _pruned,
    "lazy": lambda: nn.LazyLinear(WIDTH),
    "quantised": _quantised,
    "extra state dict": lambda: _ExtraState("dict"),
    "extra state tensor": lambda: _ExtraState("tensor"),
    "extra state growing": lambda: _ExtraState("growing"),
    "extra state none first": lambda: _ExtraState("none first"),
    "observed": _Observed,
    "adapter": _Adapter,
    "other argument": _OtherArgument,
    "renaming": _Renaming,
    "compiled inside": lambda: nn.Sequential(_compiled(nn.Linear(WIDTH, WIDTH))),
    "checkpointed": lambda: _checkpointed(nn.Linear(WIDTH, WIDTH)),
    "compiled in checkpointed": lambda: _checkpointed(_compiled(nn.Linear(WIDTH, WIDTH))),
    "complex": _complex,
    "half": _half,
    "lstm": lambda: _Reshaped(_First(nn.LSTM(WIDTH, WIDTH)), (2, 2, WIDTH)),
    "empty": lambda: nn.Sequential(),
    **NOTING,
}


UNWRAPPED: Mapping[str, Callable[[], nn.Module]] = dict.fromkeys(
    ("compiled inside", "checkpointed", "compiled in checkpointed"), lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH))
)
"""The same modules without the wrappers inside."""


class _First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)[0]


def _wrapped_ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)


def _wrapped_fsdp1(module: nn.Module, *, use_orig_params: bool = True) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    _need_dense(module)
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=use_orig_params)


def _wrapped_fsdp2(module: nn.Module) -> nn.Module:
    return _fully_sharded(module, dist.get_world_size())


def _wrapped_hsdp(module: nn.Module) -> nn.Module:
    return _fully_sharded(module, 2, dist.get_world_size() // 2, mesh_dim_names=("replicate", "shard"))


def _fully_sharded(module: nn.Module, *sizes: int, **names: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _need_dense(module)
    if any(True for _ in module.parameters()):
        fully_shard(module, mesh=init_device_mesh("cpu", sizes, **names))
    return module


def _need_dense(module: nn.Module) -> None:
    if not all(type(each) is nn.Parameter and each.is_contiguous() for each in module.parameters()):
        raise NotImplementedError("torch shards contiguous parameters alone")


def _tensor_parallel(module: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {
        "left": ColwiseParallel(output_layouts=Replicate()),
        "right": RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(module, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


WRAPPERS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "": lambda module: module,
    "compile": _compiled,
    "ddp": _wrapped_ddp,
    "fsdp1": _wrapped_fsdp1,
    "fsdp1 flat": lambda module: _wrapped_fsdp1(module, use_orig_params=False),
    "fsdp2": _wrapped_fsdp2,
    "hsdp": _wrapped_hsdp,
    "tensor parallel": _tensor_parallel,
}
"""Wrappers that replace the module in the state."""
NEEDS_RANKS = frozenset({"hsdp", "tensor parallel"})
"""Wrappers that need several ranks."""
DIVIDING = NEEDS_RANKS | {"fsdp1", "fsdp1 flat", "fsdp2"}
"""Wrappers that divide parameters over the ranks."""
NEEDS_GROUP = DIVIDING | {"ddp", "zero redundancy"}
"""Wrappers and optimizers that need torch.distributed."""
