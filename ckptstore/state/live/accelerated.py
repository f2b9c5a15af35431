"""Take Accelerate's objects into a state: an `Accelerator` with all that it has prepared, and its loaders.

Known by their names, so that Accelerate is not loaded for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptstore.errors import InvalidState

ACCELERATOR_KEY = "accelerator"
_LOADERS = ("DataLoaderShard", "DataLoaderDispatcher")
_CONFIGURATION = "Give Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))"


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


def check_can_go_on(loader: Any) -> None:
    """Raise InvalidState for a loader in the middle of a pass that one process reads for all: Accelerate counts a wrong
    position of it."""
    if is_of_accelerate(loader, "DataLoaderDispatcher") and loader.state.num_processes > 1:
        raise InvalidState(
            f"a {type(loader).__name__} is in the middle of a pass, which one process reads for all, and of which "
            "Accelerate counts a wrong position",
            hint="Give DataLoaderConfiguration(dispatch_batches=False); or save at the ends of epochs",
        )
