"""torchtitan where there is no accelerator: what it asks of one is put aside before it is imported.

Its own Trainer, model, optimizers and parallelisms run as they are, with gloo. Put aside are kernels for GPUs (torch's
build for CPUs has no triton), the counter of device memory, a change of time limits that gloo does not have, the wait
of two seconds at the end of a training, and flex attention, which has no backward pass on a CPU. Hugging Face's
datasets are put aside too: they want older packages than ckptstore is tested with, and start threads when imported.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

torch.set_num_threads(1)
torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes "cuda" where torch names none
for put_aside in ("torchtitan.distributed.minimal_async_ep.kernels", "datasets", "datasets.distributed"):
    module: Any = ModuleType(put_aside)
    module.__getattr__ = lambda name: None
    sys.modules[put_aside] = module

import torchtitan.components.metrics as metrics  # noqa: E402
import torchtitan.distributed.utils  # noqa: E402
import torchtitan.trainer  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402

from ckptstore.integrations.torchtitan import CkptstoreCheckpointManager  # noqa: E402

__all__ = ["CheckpointManager", "CkptstoreCheckpointManager", "config_of", "trainer_of"]

Trainer = torchtitan.trainer.Trainer
VOCABULARY, LENGTH, BATCH = 2048, 16, 4


class NoDeviceMemory:
    """Stands for the counter of an accelerator's memory."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None: ...


metrics.build_device_memory_monitor = NoDeviceMemory
torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None
torchtitan.trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _seconds: None)


class Tokens(BaseDataLoader):
    """Tokens of the whole batch from its number, of which each rank takes its rows: the same for any number of ranks.

    `is_counted_by_rank` gives the state that torchtitan's own data loader has, a key for each data parallel rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        is_counted_by_rank: bool = False

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.key = f"dp_rank_{dp_rank}" if config.is_counted_by_rank else "position"
        self.rows = slice(dp_rank * BATCH // dp_world_size, (dp_rank + 1) * BATCH // dp_world_size)
        self.local_batch_size = local_batch_size
        self.position = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            numbers = torch.Generator().manual_seed(self.position)
            self.position += 1
            rows = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=numbers)[self.rows]
            for tokens in rows.split(self.local_batch_size):
                positions = torch.arange(LENGTH).repeat(len(tokens), 1)
                yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {self.key: self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state[self.key]


class Stream(IterableDataset[Any]):
    """Those tokens as the data set of a loader of torchtitan's own."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.state_dict, self.load_state_dict = tokens.state_dict, tokens.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tokens)


class Loaded(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config): ...

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **given: Any) -> None:
        tokens = Tokens(Tokens.Config(), dp_world_size=dp_world_size, dp_rank=dp_rank, **given)
        super().__init__(Stream(tokens), dp_rank, dp_world_size, batch_size=None)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config): ...

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_args: Any, **_options: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_args: Any, **_options: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


def config_of(
    folder: str,
    checkpoint: Any,
    *,
    steps: int,
    is_counted_by_rank: bool = False,
    has_own_loader: bool = False,
    hf_assets_path: str = "",
    **degrees: int,
) -> Any:
    """The debug model, two layers of it. `degrees` are those of `ParallelismConfig`, such as `tensor_parallel=2`."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    shares = degrees.get("data_parallel_shard", 1) * degrees.get("data_parallel_replicate", 1)
    given = {f"{name}_degree": degree for name, degree in {"data_parallel_shard": 1, **degrees}.items()}
    config = Trainer.Config(
        model_spec=spec,
        hf_assets_path=hf_assets_path,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=default_adamw(lr=8e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8, decay_type="linear"),
        training=TrainingConfig(
            local_batch_size=BATCH // shares,
            seq_len=LENGTH,
            steps=steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=Loaded.Config() if has_own_loader else Tokens.Config(is_counted_by_rank=is_counted_by_rank),
        tokenizer=NoTokenizer.Config(),
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", pipeline_parallel_schedule="1F1B", **given),
        checkpoint=checkpoint,
    )
    config.debug.seed = 1
    return config


def trainer_of(config: Any) -> Any:
    """The Trainer, with sums in place of the averages that gloo does not have."""
    trainer = config.build()
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return trainer
