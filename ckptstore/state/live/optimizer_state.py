"""Creating the state of an optimizer that has not stepped, so that a checkpoint can be read into it.

Only the optimizer knows what its state looks like and how it is laid out over the ranks, so it is asked: it takes a
step with gradients of zero. Everything else that the step changes is set aside and put back, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ckptstore.errors import StateMismatch
from ckptstore.runtime.torch_private import bare_step
from ckptstore.state.live.contents import same_random_numbers
from ckptstore.state.live.optimizers import parameters_of

COPIED_BYTES = 256 << 20
"""Parameters and zero gradients are copied in portions of about this size."""


def create_state(key: str, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Have an optimizer create its state for these parameters, and for no others.

    Parameters, gradients, hyperparameters and random numbers are afterwards as they were; step hooks do not run. All
    ranks of a sharded parameter take the same number of steps. Raises StateMismatch when the optimizer cannot take a
    step, as those that need a closure.
    """
    step = bare_step(optimizer)
    with _set_aside(optimizer), same_random_numbers():
        for portion in _portions(parameters):
            kept = [parameter.detach().clone() for parameter in portion]
            for parameter in portion:
                parameter.grad = torch.zeros_like(parameter)
            try:
                step(optimizer)  # the class's own: a scheduler counts the calls of the object's
            except Exception as error:  # optimizers are the user's, and so is what they raise
                raise StateMismatch(
                    f"the optimizer at {key!r} cannot create its state: {type(error).__name__}: {error}",
                    hint="Let it step once before loading",
                ) from error
            finally:
                with torch.no_grad():
                    for parameter, before in zip(portion, kept, strict=True):
                        parameter.copy_(before)
                        parameter.grad = None


@contextmanager
def _set_aside(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in parameters_of(optimizer)]
    settings = [dict(group) for group in optimizer.param_groups]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.clear()
            group.update(before)


def _portions(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut by global size, so that all ranks cut alike."""
    portion: list[torch.Tensor] = []
    size_bytes = 0
    for parameter in parameters:
        portion.append(parameter)
        size_bytes += parameter.numel() * parameter.element_size()
        if size_bytes >= COPIED_BYTES:
            yield portion
            portion, size_bytes = [], 0
    if portion:
        yield portion


def set_flat(state: Any, name: str, value: Any) -> None:
    """Set one item of a parameter's state, whose nested dicts torch's helper flattened with dots."""
    if name in state:
        state[name] = value
        return
    for key, inner in state.items():
        if isinstance(inner, dict) and name.startswith(f"{key}."):
            set_flat(inner, name.removeprefix(f"{key}."), value)
            return
    by_text = {str(key): key for key in state}
    state[by_text.get(name, name)] = value
