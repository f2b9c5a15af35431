"""Take Accelerate's objects into a state: an `Accelerator` with all that it has prepared, and its loaders.

Known by their names, so that Accelerate is not loaded for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckptstore.errors import InvalidState

ACCELERATOR_KEY = "accelerator"
_LOADERS = ("DataLoaderShard", "DataLoaderDispatcher")
_CONFIGURATION = (
    "Give Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, "
    "use_seedable_sampler=True))"
)


def is_of_accelerate(item: Any, *names: str) -> bool:
    """Return True for an instance of one of Accelerate's classes, by their names."""
    return any(cls.__name__ in names and cls.__module__.startswith("accelerate.") for cls in type(item).__mro__)


def prepared_by(accelerator: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an `Accelerator` would save by itself, with names: model, model_1, optimizer, scheduler, loader ...

    Raises InvalidState for models that an engine of their own saves.
    """
    engine = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if engine in ("DEEPSPEED", "MEGATRON_LM"):
        raise InvalidState(
            f"{engine} keeps model and optimizer in a form of its own, which is not saved as a state",
            hint="Save the directory that accelerator.save_state writes: store.save_directory(step, directory)",
        )
    own = vars(accelerator)  # there is no public way to what it has prepared
    kinds = {
        "model": own["_models"],
        "optimizer": own["_optimizers"],
        "scheduler": own["_schedulers"],
        "loader": own["_dataloaders"],
        "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
        "custom": own["_custom_objects"],
    }
    for name, items in kinds.items():
        for number, item in enumerate(items):
            yield f"{name}_{number}" if number else name, item
    yield ACCELERATOR_KEY, _Counts(accelerator)


class _Counts:
    """The numbers that an `Accelerator` counts: batches since the last step, and saves of automatic naming."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step, "iteration": self._accelerator.project_configuration.iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._accelerator.step = state["step"]
        self._accelerator.project_configuration.iteration = state["iteration"]


def is_prepared_loader(item: Any) -> bool:
    """Return True for a loader that Accelerate has prepared."""
    return is_of_accelerate(item, *_LOADERS)


def check_has_position(name: str, loader: Any) -> None:
    """Raise InvalidState for a loader that Accelerate has prepared without a position: its `state_dict` only fails."""
    if not hasattr(loader.base_dataloader, "state_dict"):
        raise InvalidState(
            f"{name} is a {type(loader).__name__}, which cannot say where it is in its data",
            hint=f"{_CONFIGURATION}; or leave it out and save at the ends of epochs",
        )


class PreparedLoader:
    """A loader that Accelerate has prepared: its position, and what its order follows from.

    Accelerate counts the passes in `iteration`, of which a sampler with a seed makes the order. torch's own
    RandomSampler draws the order at the beginning of a pass, from a generator whose state nobody has kept; and where
    one process deals out the batches of several, Accelerate counts a wrong position. A save in the middle of such a
    pass is refused.

    Raises InvalidState for a loader without a position.
    """

    def __init__(self, name: str, loader: Any) -> None:
        self._name, self._loader = name, loader
        check_has_position(name, loader)

    def _sampler(self) -> Any:
        find = getattr(self._loader, "get_sampler", None)
        return None if find is None else find()

    def _generators(self) -> dict[str, torch.Generator]:
        places = {
            "sampler": getattr(self._sampler(), "generator", None),
            "synchronized": getattr(self._loader, "synchronized_generator", None),
            "loader": getattr(self._loader.base_dataloader, "generator", None),
        }
        return {name: item for name, item in places.items() if isinstance(item, torch.Generator)}

    def state_dict(self) -> dict[str, Any]:
        loader, sampler, position = self._loader, self._sampler(), self._loader.state_dict()
        is_in_pass = any(item is loader for item in loader.gradient_state.dataloader_references)
        has_ended = bool(position.get("_iterator_finished", False))
        if is_in_pass and not has_ended:
            self._check_position(sampler)
        return {
            "position": position,
            "iteration": loader.iteration + (is_in_pass and has_ended),
            "seed": getattr(sampler, "initial_seed", None),
            "generators": {name: item.get_state() for name, item in self._generators().items()},
        }

    def _check_position(self, sampler: Any) -> None:
        """Raise InvalidState for a pass in whose middle nobody can go on."""
        why = ""
        if isinstance(sampler, torch.utils.data.RandomSampler) and not hasattr(sampler, "initial_seed"):
            why, hint = "whose order torch's RandomSampler has drawn and not kept", _CONFIGURATION
        elif is_of_accelerate(self._loader, "DataLoaderDispatcher") and self._loader.state.num_processes > 1:
            why = "which one process reads for all, and Accelerate counts a wrong position then"
            hint = "Give DataLoaderConfiguration(dispatch_batches=False)"
        if why:
            raise InvalidState(
                f"{self._name} is in the middle of a pass, {why}", hint=f"{hint}; or save at the ends of epochs"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loader, sampler = self._loader, self._sampler()
        if state["seed"] is not None and hasattr(sampler, "initial_seed"):
            sampler.initial_seed = state["seed"]
        loader.set_epoch(state["iteration"])
        loader.load_state_dict(state["position"])
        # torchdata's loader makes its iterator now, and not from the random numbers that are restored after this.
        loader.base_dataloader.state_dict()
        for name, generator in self._generators().items():
            if name in state["generators"]:
                generator.set_state(state["generators"][name])
