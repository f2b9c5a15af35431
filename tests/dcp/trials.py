"""One case of the side-by-side suite: a state that is saved and loaded with torch's own classes and with ours.

A case is a function that gives a `Trial`. It is run four times: saved and loaded by the stock classes, by ours, and
across. What comes back is compared bit by bit.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import pickle
import re
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptstore.dcp import StoreReader, StoreWriter
from ckptstore.errors import CkptstoreError

SAME = "same"
"""What ours loads is what was saved, and what stock loads, if stock loads anything."""


@dataclass
class Trial:
    """What a case saves, and into what it loads."""

    state: Callable[[], dict[str, Any]]
    blank: Callable[[], dict[str, Any]]
    """A state of the same structure with other contents."""
    planner: Callable[[], SavePlanner] | None = None
    load_planner: Callable[[], Any] | None = None
    save: Callable[[Any, dict[str, Any], Any], None] | None = None
    """In place of `dcp.save`: writer, state and planner."""
    load: Callable[[Any, dict[str, Any], Any], dict[str, Any]] | None = None
    """In place of `dcp.load`: reader, blank state and planner."""
    expected: Callable[[], dict[str, Any]] | None = None
    """What comes back, where it is not the state."""
    no_dist: bool = True
    allow_pickle: bool = False
    across: bool = True
    """Whether stock reads what ours wrote, and ours what stock wrote."""


@dataclass(frozen=True)
class Case:
    """A line of the table."""

    name: str
    group: str
    feature: str
    make: Callable[[], Trial]
    ranks: int = 1
    ours: str = SAME
    """`SAME`, or what ours says when it refuses."""
    stock: str = SAME
    """`SAME`, "raises", "any", or "silent": it gives other numbers than were saved, without a word."""
    refused_at: str = "save"
    by_torch: bool = False
    """Whether it is torch itself that refuses."""


CASES: dict[str, Case] = {}


def case(group: str, feature: str, **more: Any) -> Callable[[Callable[[], Trial]], Callable[[], Trial]]:
    """Enter a function into the table."""

    def enter(make: Callable[[], Trial]) -> Callable[[], Trial]:
        add(make.__name__, group, feature, make, **more)
        return make

    return enter


def add(name: str, group: str, feature: str, make: Callable[[], Trial], **more: Any) -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, group, feature, make, **more)


def bits(value: Any) -> Any:
    """A value in which every tensor is its bytes, for comparing."""
    if isinstance(value, torch.Tensor):
        return _tensor_bits(value)
    if isinstance(value, Mapping):
        return type(value).__name__, sorted(((repr(key), bits(item)) for key, item in value.items()), key=repr)
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(item) for item in value]
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        return type(value).__name__, str(value.dtype), getattr(value, "shape", ()), value.tobytes()
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(map(repr, value))
    if hasattr(value, "getvalue"):
        return type(value).__name__, value.getvalue(), value.tell(), vars(value)
    return type(value).__name__, repr(value)


def _tensor_bits(tensor: Any) -> Any:
    if hasattr(tensor, "placements"):
        if tensor.device_mesh.get_coordinate() is None:
            return "elsewhere"
        return "DTensor", str(tensor.placements), tuple(tensor.shape), bits(tensor.to_local().detach())
    if hasattr(tensor, "local_shards"):
        return type(tensor).__name__, [bits(getattr(shard, "tensor", shard)) for shard in tensor.local_shards()]
    is_silent = getattr(tensor, "is_silent", False)
    if is_silent or tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        return object.__repr__(type(tensor))
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        return type(tensor).__name__, repr(context), [(name, bits(getattr(tensor, name))) for name in names]
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return "Tensor", str(tensor.dtype), tuple(tensor.shape), data


@dataclass
class Outcome:
    """What a rank saw of one run."""

    bits: Any = None
    error: str = ""
    """The message of what was raised, with the name of its class."""
    is_ours: bool = False
    failed_at: str = ""


def run_case(one: Case, root: Path) -> dict[str, Outcome]:
    """All runs of a case on this rank, and under "saved" what should come back."""
    trial, found = one.make(), dict[str, Outcome]()
    expected = trial.expected or trial.state
    found["saved"] = Outcome(bits(expected()))
    runs = [("stock", True, True), ("ours", False, False)]
    runs += [("stock reads ours", False, True), ("ours reads stock", True, False)] if trial.across else []
    for name, writes_stock, reads_stock in runs:
        path = root / ("stock" if writes_stock else "ours")
        with _planners_apart():
            found[name] = _run(trial, path, writes_stock, reads_stock, is_written=name not in ("stock", "ours"))
    return found


def _run(trial: Trial, path: Path, writes_stock: bool, reads_stock: bool, *, is_written: bool) -> Outcome:
    at = "save"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not is_written:
                _save(trial, path, writes_stock)
            at = "load"
            return Outcome(bits(_load(trial, path, reads_stock)))
    except (Exception, CheckpointException) as error:
        first: BaseException = error
        if isinstance(error, CheckpointException):
            first = min(error.failures.items())[1][0]
        said = f"{type(first).__name__}: {first}"
        if not isinstance(first, CkptstoreError):
            said += "\n" + traceback.format_exc()
        return Outcome(None, said, isinstance(first, CkptstoreError), at)


def _save(trial: Trial, path: Path, stock: bool) -> None:
    writer: Any = (
        dcp.FileSystemWriter(path, sync_files=False) if stock else StoreWriter(path, allow_pickle=trial.allow_pickle)
    )
    planner = trial.planner() if trial.planner else None
    if trial.save is not None:
        trial.save(writer, trial.state(), planner)
    else:
        dcp.save(trial.state(), storage_writer=writer, planner=planner, no_dist=trial.no_dist)


def _load(trial: Trial, path: Path, stock: bool) -> dict[str, Any]:
    reader: Any = dcp.FileSystemReader(path) if stock else StoreReader(path, allow_pickle=trial.allow_pickle)
    planner, state = trial.load_planner() if trial.load_planner else None, trial.blank()
    if trial.load is not None:
        return trial.load(reader, state, planner)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=trial.no_dist)
    return state


@contextlib.contextmanager
def _planners_apart() -> Iterator[None]:
    """Planners that cache plans keep them in their class: no case may find those of another one."""
    names = [name for name in vars(SavePlanner) if name.startswith("_cached")]
    before = {name: copy.copy(getattr(SavePlanner, name)) for name in names}
    for name in names:
        getattr(SavePlanner, name).clear()
    try:
        yield
    finally:
        for name in names:
            getattr(SavePlanner, name).clear()
            getattr(SavePlanner, name).update(before[name])


def problems(one: Case, found: Mapping[str, Outcome]) -> list[str]:
    """What is not as the case says; empty when all is well."""
    saved, stock, ours = found["saved"].bits, found["stock"], found["ours"]
    wrong = []
    if one.stock == SAME and stock.bits != saved:
        wrong.append(f"stock did not give back what was saved: {stock.error or 'other bits'}")
    if one.stock == "raises" and not stock.error:
        wrong.append("stock raised nothing")
    if one.stock == "silent" and (stock.error or stock.bits == saved):
        wrong.append(f"stock was not silent and wrong: {stock.error}")
    if one.ours == SAME:
        wrong += [
            f"{name} did not give back what was saved: {outcome.error or 'other bits'}"
            for name, outcome in found.items()
            if name in ("ours", *(["stock reads ours", "ours reads stock"] if one.stock == SAME else []))
            if outcome.bits != saved and not (name == "ours reads stock" and outcome.is_ours)
        ]
    else:
        if not ours.error:
            wrong.append("ours was silent")
        elif ours.is_ours == one.by_torch or ours.failed_at != one.refused_at or not re.search(one.ours, ours.error):
            wrong.append(f"ours failed at the {ours.failed_at}: {ours.error}")
        other = found.get("ours reads stock")
        if other is not None and not other.error and other.bits != saved:
            wrong.append("ours read what stock wrote, silently wrong")
    return wrong


def ranks_run(names: list[str], root: str) -> dict[str, dict[str, Outcome]]:
    """What each of several ranks does: all cases, one after another, in one process."""
    import cases_ranks  # noqa: F401 - enters its cases
    import cases_single  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    found = {}
    try:
        for name in names:
            torch.manual_seed(0)
            found[name] = run_case(CASES[name], Path(root) / name)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(Path(root) / name, ignore_errors=True)
    finally:
        dist.destroy_process_group()
    pickle.dumps(found)
    return found
