"""A wrong value for any parameter of a public call is refused by an error of ckptstore, and changes no store."""

from __future__ import annotations

import inspect
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import Checkpoint, CheckpointStore, CkptstoreError, KeepAll, PendingSave, open_store

pytestmark = pytest.mark.slow

WRONG: list[Any] = [None, 5, -1, 0, 1.5, float("nan"), float("inf"), 2**64, 10**400, True, b"b", print, int]
WRONG += ["", "x\0y", "\ud800", "nothing", "../up", Path("to/nothing"), object()]
WRONG += [[], {}, set(), [5], {5: 5}, ["a", "\0"], {"a": object()}]
WAITING = (None, 5, 1.5, float("inf"), 2**64, True)
"""Timeouts that are none of them."""
INTERNAL = {"save_shard", "start_shard", "load_in_order"}
"""Methods for other parts of ckptstore, which take functions."""
CALLS: dict[str, dict[str, Any]] = {
    "drain": {"timeout_seconds": 0.0},
    "follow": {"timeout_seconds": 0.0},
    "restore": {"step": 2},
    "roll_back": {"step": 1},
    "thin": {"step": 1},
}
"""What the calls of some methods have besides."""
SOUND: dict[str, Any] = {
    "budget": "1GB",
    "checkpoint": 3,
    "drop": "number",
    "key": "number",
    "metadata": {"b": 1},
    "metric": "loss",
    "metrics": {"loss": 1.0},
    "n": 1,
    "policy": KeepAll(),
    "rank": 0,
    "rule": KeepAll(),
    "seconds": 1.0,
    "start_token": "token",
    "state": {"w": torch.zeros(4)},
    "step": 3,
    "world_size": 1,
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a directory of its own, where some texts are names of new directories."""
    (tmp_path / "cwd/here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd/here")
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def made(root: Path) -> CheckpointStore:
    shutil.rmtree(root, ignore_errors=True)
    store = open_store(root, durable=False, grace_seconds=1e6)
    for step in (1, 2, 3):
        store.save(step, {"w": torch.arange(4.0), "number": step}, metrics={"loss": float(step)})
    store.remove(2)
    return store


def end(result: Any) -> None:
    """Do with a result what its caller does."""
    if inspect.isgenerator(result):
        next(result, None)
        result.close()
    elif isinstance(result, PendingSave):
        result.result()
    elif isinstance(result, CheckpointStore):
        result.close()
    elif isinstance(result, AbstractContextManager) and not isinstance(result, Path):
        with result:
            pass


def cases(function: Callable[..., Any], sound: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield calls, each with one wrong value."""
    named = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [item for item in inspect.signature(function).parameters.values() if item.kind not in named]
    base = {item.name: sound[item.name] for item in parameters if item.default is item.empty and item.name != "self"}
    base |= CALLS.get(function.__name__, {})
    for item in parameters:
        if item.name == "self":
            continue
        for wrong in WRONG:
            if item.name != "timeout_seconds" or wrong not in WAITING:
                yield base | {item.name: wrong}


@pytest.mark.parametrize("cls", [CheckpointStore, Checkpoint])
def test_a_method_refuses_them(cls: type, tmp_path: Path) -> None:
    root, num_refused, odd = tmp_path / "store", 0, []
    (source := tmp_path / "source").mkdir()
    store = made(root)
    before = contents(root)
    names = [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]
    for name in sorted({*names} - INTERNAL - {"close"}):
        sound = SOUND | {"path": source, "uri": source}
        for keywords in cases(getattr(cls, name), sound):
            target, refusal = store if cls is CheckpointStore else store[3], ""
            try:
                end(getattr(target, name)(**keywords))
            except CkptstoreError:
                refusal = "refused"
            except Exception as error:
                refusal = repr(error)
                odd.append(f"{name}({keywords}): {refusal}")
            num_refused += bool(refusal)
            after = contents(root)
            if after != before:
                if refusal:
                    odd.append(f"{name}({keywords}) was refused, and has changed the store")
                store.close()
                store, before = made(root), contents(root)
    store.close()
    assert odd == []
    assert num_refused > 300


def test_a_function_and_a_class_refuse_them(tmp_path: Path) -> None:
    odd = []
    with made(tmp_path / "store") as store:
        sound = SOUND | {"checkpoints": [store[1], store[3]], "directory": tmp_path / "merged"}
        sound |= {"path": tmp_path / "tier", "uri": tmp_path / "other"}
        before = contents(tmp_path / "store")
        policies = [name for name in ckptstore.__all__ if name.startswith("Keep")]
        for name in ["FastTier", "StorageGroup", "merge", "open_publication", "open_store", *policies]:
            for keywords in cases(getattr(ckptstore, name), sound):
                try:
                    end(getattr(ckptstore, name)(**keywords))
                except CkptstoreError:
                    continue
                except Exception as error:
                    odd.append(f"{name}({keywords}): {error!r}")
        assert contents(tmp_path / "store") == before
    assert odd == []
