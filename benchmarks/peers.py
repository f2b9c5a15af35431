"""Others that save and load tensors, each by its own calls; what is best for them is found by trying."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

State = Mapping[str, torch.Tensor]


def save_with_dcp(
    state: State, directory: Path, *, num_threads: int = 1, durable: bool = True, alone: bool = True
) -> None:
    """`dcp.save` with its own file writer; `alone` says that there are no other ranks."""
    writer = FileSystemWriter(directory, thread_count=num_threads, sync_files=durable)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), storage_writer=writer, no_dist=alone)


def load_with_dcp(state: State, directory: Path, *, alone: bool = True) -> None:
    """`dcp.load` into the tensors of `state`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(dict(state), storage_reader=FileSystemReader(directory), no_dist=alone)


def save_with_dcp_in_background(state: State, directory: Path, *, stager: Any = None, by_process: bool = False) -> Any:
    """`dcp.async_save`; returns what it returns. Needs a process group."""
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    kind = AsyncCheckpointerType.PROCESS if by_process else AsyncCheckpointerType.THREAD
    writer = FileSystemWriter(directory, thread_count=2, sync_files=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dcp.async_save(dict(state), storage_writer=writer, async_stager=stager, async_checkpointer_type=kind)


def save_with_torch(state: State, path: Path) -> None:
    """`torch.save`, which makes nothing durable."""
    torch.save(dict(state), path)


def load_with_torch(state: State, path: Path, *, mapped: bool = False) -> None:
    """`torch.load`, and a copy into the tensors of `state`."""
    _copy(torch.load(path, mmap=mapped, weights_only=True), state)


def save_with_safetensors(state: State, path: Path) -> None:
    """`save_file`, which makes nothing durable."""
    safetensors.torch.save_file(dict(state), path)


def load_with_safetensors(state: State, path: Path) -> None:
    """`load_file`, and a copy into the tensors of `state`."""
    _copy(safetensors.torch.load_file(path), state)


def _copy(found: State, state: State) -> None:
    for name, tensor in state.items():
        tensor.copy_(found[name])
