"""The peak memory of each operation beside the state itself, each in a process of its own that has done it once with a
small state. What ckptstore may take is a bound, which a run at any size checks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from sizes import FULL, Take, group, turns
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptstore
from ckptstore.extensions.exchange.copying import copy_store
from ckptstore.extensions.exchange.exporting import export
from ckptstore.extensions.exchange.places import opened_folder
from ckptstore.tools.bench.figures.report import OURS, Role, Sample, WorkloadOutcome
from ckptstore.tools.bench.measure import Meter

MIB = 1 << 20
SIZE_BYTES = (1024 if FULL else 256) * MIB
TENSOR_BYTES = 16 * MIB
DCP, SAFETENSORS = "DCP", "safetensors"

State = dict[str, torch.Tensor]
Operation = Callable[[State, Path, Path], object]
"""Called with the state, a directory with what was saved, and one to write to."""


def made(size_bytes: int, fill: float) -> State:
    """Tensors whose memory has been written."""
    return {f"t{number:03}": torch.full((TENSOR_BYTES // 4,), fill) for number in range(size_bytes // TENSOR_BYTES)}


def ours_saved(state: State, source: Path, target: Path) -> None:
    with ckptstore.open_store(target / "store", group="solo") as store:
        store.save(1, state)


def ours_saved_async(state: State, source: Path, target: Path) -> None:
    with ckptstore.open_store(target / "store", group="solo") as store:
        store.save_async(1, state).result()


def ours_loaded(state: State, source: Path, target: Path) -> None:
    with ckptstore.open_store(source / "store", group="solo") as store:
        store[1].load(state)


def ours_verified(state: State, source: Path, target: Path) -> None:
    with ckptstore.open_store(source / "store", group="solo") as store:
        assert store[1].verify().ok


def ours_copied(state: State, source: Path, target: Path) -> None:
    with (
        ckptstore.open_store(source / "store", group="solo") as store,
        opened_folder(str(target / "copy"), None) as copied,
    ):
        copy_store(store, copied)


def ours_exported(state: State, source: Path, target: Path) -> None:
    with ckptstore.open_store(source / "store", group="solo") as store:
        export(store[1], target / "exported", to="safetensors", include="*")


def theirs_loaded(state: State, source: Path, target: Path) -> None:
    for key, tensor in load_file(source / "model.safetensors").items():
        state[key].copy_(tensor)


OPERATIONS: Mapping[str, Mapping[str, Operation]] = {
    "save": {
        OURS: ours_saved,
        DCP: lambda state, source, target: dcp.save(state, checkpoint_id=target / "dcp", no_dist=True),
        SAFETENSORS: lambda state, source, target: save_file(state, target / "model.safetensors"),
    },
    "save_async": {
        OURS: ours_saved_async,
        DCP: lambda state, source, target: dcp.async_save(state, checkpoint_id=target / "dcp", no_dist=True).result(),
    },
    "load": {
        OURS: ours_loaded,
        DCP: lambda state, source, target: dcp.load(state, checkpoint_id=source / "dcp", no_dist=True),
        SAFETENSORS: theirs_loaded,
    },
    "verify": {OURS: ours_verified},
    "cp": {
        OURS: ours_copied,
        "shutil.copytree": lambda state, source, target: shutil.copytree(source / "store", target / "copy"),
    },
    "export to one file": {
        OURS: ours_exported,
        DCP: lambda state, source, target: dcp_to_torch_save(source / "dcp", target / "model.pt"),
    },
}
MOST_BYTES = {
    "save": 64 * MIB,
    "save_async": SIZE_BYTES + 64 * MIB,
    "load": 64 * MIB,
    "verify": 96 * MIB,
    "cp": 160 * MIB,
    "export to one file": 160 * MIB,
}
"""The most that ckptstore may take beside the state: nothing that grows with it, but for the copy of `save_async`."""
CASES = [(what, name) for what, ways in OPERATIONS.items() for name in ways if FULL or name == OURS or what == "load"]
LATER = {case: [pytest.mark.long] for case in CASES if case not in (("save_async", OURS), ("load", OURS))}
_SIZES = (2 * TENSOR_BYTES, SIZE_BYTES)


def prepare(name: str, directory: str) -> None:
    """Save what is then read, a small state and the large one; in a process of its own, whose memory goes."""
    for size_bytes in _SIZES:
        path = Path(directory, str(size_bytes))
        path.mkdir()
        OPERATIONS["save"][name](made(size_bytes, 1.0), path, path)


def measured(what: str, name: str, source: str, target: str) -> Sample:
    """The second time counts: the first one loads what is imported on first use."""
    for size_bytes in _SIZES:
        read, written = Path(source, str(size_bytes)), Path(target, str(size_bytes))
        written.mkdir()
        state = made(size_bytes, 0.0 if what == "load" else 1.0)
        with Meter() as meter:
            OPERATIONS[what][name](state, read, written)
        assert all(tensor.eq(1.0).all() for tensor in state.values())
    return meter.sample()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory with what a contender has saved, which is made once."""

    @cache
    def find(name: str) -> Path:
        path = tmp_path_factory.mktemp("saved")
        run_ranks(1, prepare, name, str(path))
        return path

    return find


@pytest.mark.parametrize("turn", turns(3))
@pytest.mark.parametrize(
    ("what", "name"),
    [
        pytest.param(*case, marks=[group(f"Peak memory: {case[0]}"), *LATER.get(case, ())], id="-".join(case))
        for case in CASES
    ],
)
def test_peak_memory(take: Take, saved: Callable[[str], Path], tmp_path: Path, what: str, name: str, turn: int) -> None:
    source = tmp_path if what.startswith("save") else saved(name if name in OPERATIONS["save"] else OURS)
    (sample,) = run_ranks(1, measured, what, name, str(source), str(tmp_path))
    role: Role = "ckptstore" if name == OURS else "peer"
    take(lambda: (WorkloadOutcome.of(name, [sample], role=role), SIZE_BYTES))
    if name == OURS:
        assert sample.peak_bytes is not None
        assert sample.peak_bytes < MOST_BYTES[what], f"{what} took {sample.peak_bytes / MIB:.0f} MiB"
