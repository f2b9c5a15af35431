"""What counts as the same, and what `check` says of a user's state."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from ckptstore.errors import InvalidState
from ckptstore.store import CheckpointStore
from ckptstore.testing.oracle import difference
from ckptstore.testing.states import StateDiffers, check

NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
OTHER_NAN = torch.tensor([0x7FC00002], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(1), -torch.zeros(1)),
        (NAN, OTHER_NAN),
        (torch.ones(2, dtype=torch.complex64) * 1j, (torch.ones(2, dtype=torch.complex64) * 1j).conj()),
        (torch.zeros(2), torch.zeros(2, requires_grad=True)),
        (torch.zeros(2), torch.zeros(2, device="meta")),
        (torch.nn.LazyLinear(2).weight, torch.zeros(2)),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ((1, 2), [1, 2]),
        ([1], [1, 1]),
        ({"a": 1}, {"a": 1, "b": None}),
        ({"a": 1}, OrderedDict(a=1)),
        (np.float32(1), np.float64(1)),
        (np.zeros(2), np.zeros((1, 2))),
        ({1, 2}, {1, 3}),
    ],
    ids=str,
)
def test_what_differs_is_seen(one: Any, other: Any) -> None:
    assert difference({"key": one}, {"key": other}).startswith("key: ")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "make",
    [
        lambda: NAN.clone(),
        lambda: torch.ones(2, 2, dtype=torch.complex64).mH,
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.nn.LazyLinear(2).weight,
        lambda: [float("nan"), complex("nan"), np.arange(3), {1: (2, {3})}],
    ],
)
def test_the_same_has_no_difference(make: Any) -> None:
    assert difference(make(), make()) is None


def test_memory_formats_are_not_compared() -> None:
    x = torch.randn(2, 3, 4, 4)
    assert difference(x, x.to(memory_format=torch.channels_last)) is None


def make() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"model": model, "rest": {"optimizer": optimizer, "schedule": schedule, "table": torch.zeros(2), "seen": []}}


def step(state: dict[str, Any]) -> None:
    state["model"](torch.ones(2, 3)).sum().backward()
    state["rest"]["optimizer"].step()
    state["rest"]["schedule"].step()
    state["rest"]["seen"].append(len(state["rest"]["seen"]))


def test_a_state_that_comes_back_passes() -> None:
    state = make()
    step(state)
    check(state, make=make, step=step)


def test_a_state_that_the_save_changes_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    save = CheckpointStore.save

    def changed(self: Any, step: int, state: Any, **arguments: Any) -> Any:
        torch.nn.init.zeros_(state["model"][0].bias)
        return save(self, step, state, **arguments)

    monkeypatch.setattr(CheckpointStore, "save", changed)
    with pytest.raises(StateDiffers, match=r"save changes the state: .*model.*0\.bias: other bits"):
        check(make(), make=make)


def test_a_state_of_other_keys_does_not_pass() -> None:
    with pytest.raises(StateDiffers, match=r"make returns the keys .* and the state has \['extra', "):
        check({**make(), "extra": 1}, make=make)


def test_a_step_that_differs_after_the_load_does_not_pass() -> None:
    counted = [0.0]

    def uneven(state: dict[str, Any]) -> None:
        counted[0] += 1.0
        state["rest"]["table"].fill_(counted[0])

    with pytest.raises(StateDiffers, match=r"a step after the load of save differs: .*table"):
        check(make(), make=make, step=uneven)


def test_what_is_refused_is_raised_as_it_is() -> None:
    with pytest.raises(InvalidState, match="other"):
        check({"other": object()}, make=make)
