"""The bench can fail: each of these mistakes is planted in the library, and some seed must find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kit.states import StateOutcome, run

from ckptstore.errors import InvalidState, StateMismatch
from ckptstore.state.live import flatten, held, matching, module_load, values
from ckptstore.state.tensors import segments
from ckptstore.state.write import shard_files
from ckptstore.store import CheckpointStore

pytestmark = pytest.mark.slow

MOST_SEEDS = 400
Plant = Callable[[pytest.MonkeyPatch], None]


def staging_writes_over_the_payload(patch: pytest.MonkeyPatch) -> None:
    """As when headers were copied to where a payload lay already; and nobody compares the copies."""
    real = segments.Copied.fill

    def fill(copied: Any, offset: int, target: memoryview) -> None:
        real(copied, offset, target)
        target[: min(4096, len(target))] = bytes(min(4096, len(target)))

    patch.setattr(segments.Copied, "fill", fill)
    patch.setattr(shard_files.CopyCheck, "compare", lambda self, copies: None)


def identity_forgets_conj_and_neg(patch: pytest.MonkeyPatch) -> None:
    def identity(tensor: torch.Tensor) -> Any:
        if not tensor.numel() or tensor.is_meta:
            return id(tensor)
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype

    for module in (flatten, module_load):
        patch.setattr(module, "identity_of", identity, raising=False)


def strides_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(segments, "is_plain_memory", lambda tensor: tensor.is_cpu and not tensor.is_conj())


def nothing_is_ever_missing(patch: pytest.MonkeyPatch) -> None:
    check = matching.Mismatch.check
    patch.setattr(matching.Mismatch, "check", lambda self, *, strict: check(self, strict=False))


def tuples_come_back_as_lists(patch: pytest.MonkeyPatch) -> None:
    decode = values.Decoder.decode

    def lists(value: Any) -> Any:
        if type(value) is dict:
            return {key: lists(item) for key, item in value.items()}
        return list(map(lists, value)) if type(value) in (tuple, list) else value

    patch.setattr(values.Decoder, "decode", lambda self, value, *, path: lists(decode(self, value, path=path)))


def what_has_changed_is_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shard_files, "digest_of", lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}")


def _after_load(patch: pytest.MonkeyPatch, change: Callable[[Any, Any], None]) -> None:
    load = CheckpointStore.load

    def changed(self: Any, state: Any, **arguments: Any) -> Any:
        optimizer = state.get("optimizer")
        before = [] if optimizer is None else [group["lr"] for group in optimizer.param_groups]
        loaded = load(self, state, **arguments)
        if optimizer is not None:
            change(optimizer, before)
        return loaded

    patch.setattr(CheckpointStore, "load", changed)


def learning_rates_stay(patch: pytest.MonkeyPatch) -> None:
    def keep(optimizer: Any, before: Any) -> None:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate

    _after_load(patch, keep)


def a_load_steps(patch: pytest.MonkeyPatch) -> None:
    def step(optimizer: Any, before: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step(lambda: torch.zeros(()))

    _after_load(patch, step)


def a_refused_load_has_begun(patch: pytest.MonkeyPatch) -> None:
    load = CheckpointStore.load

    def begun(self: Any, state: Any, **arguments: Any) -> Any:
        try:
            return load(self, state, **arguments)
        except StateMismatch:
            for parameter in state["a"].parameters() if "a" in state else ():
                torch.nn.init.zeros_(parameter)
            raise

    patch.setattr(CheckpointStore, "load", begun)


def a_refused_save_is_committed(patch: pytest.MonkeyPatch) -> None:
    save = CheckpointStore.save

    def committed(self: Any, step: int, state: Any, **arguments: Any) -> Any:
        try:
            return save(self, step, state, **arguments)
        except InvalidState:
            save(self, step, {"a": 1})
            raise

    patch.setattr(CheckpointStore, "save", committed)


def what_objects_write_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(held.Held, "restore", lambda self, fill: held.Written({}, {}))


PLANTED: Sequence[tuple[Plant, str]] = [
    (staging_writes_over_the_payload, "other bits"),
    (identity_forgets_conj_and_neg, "other bits"),
    (strides_are_not_looked_at, "other bits"),
    (nothing_is_ever_missing, "load"),
    (tuples_come_back_as_lists, "load"),
    (what_has_changed_is_not_seen, "other bits"),
    (learning_rates_stay, "param_groups"),
    (a_load_steps, "optimizer"),
    (what_objects_write_stays, "param_groups"),
    (what_objects_write_stays, "module"),
    (a_refused_load_has_begun, "refused, and changes"),
    (a_refused_save_is_committed, "refused save leaves a checkpoint"),
]
"""A mistake, and what the kind of the fault says."""


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("plant", "kind"), PLANTED, ids=[f"{plant.__name__}: {kind}" for plant, kind in PLANTED])
def test_a_mistake_is_found(plant: Plant, kind: str) -> None:
    with _one_thread():
        found = first_found(plant, kind)
    assert found is not None, f"none of {MOST_SEEDS} seeds finds it"


def first_found(plant: Plant, kind: str) -> StateOutcome | None:
    """Return the outcome of the first seed that fails with the mistake in that way, and does not without it."""
    for seed in range(MOST_SEEDS):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            outcome = run(seed)
        if not outcome.ok and kind in outcome.kind and run(seed).ok:
            return outcome
    return None
