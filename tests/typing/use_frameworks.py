"""The frameworks, with the types of their results. Checkers read this; nobody runs it."""

from typing import Any, assert_type

import ckptstore.ray
from ckptstore import Checkpoint, CheckpointStore
from ckptstore.integrations import lightning, transformers
from ckptstore.ray import RayStore


def use_ray(state: dict[str, Any], result: Any) -> None:
    with ckptstore.ray.store() as store:
        assert_type(store, RayStore)
        assert_type(store.resume(state), Checkpoint | None)
        assert_type(store.save(1, state, metrics={"loss": 0.3}), Checkpoint)
    assert_type(ckptstore.ray.resolve(result), Checkpoint)
    assert_type(ckptstore.ray.report({"loss": 0.3}, directory="epoch-1"), Checkpoint | None)


def use_callbacks() -> None:
    of_lightning = lightning.CheckpointStoreCallback("runs/first", every_n_epochs=1)
    assert_type(of_lightning.store, CheckpointStore)
    assert_type(of_lightning.best_model_path, str)
    of_trainer = transformers.CheckpointStoreCallback("runs/first", asynchronous=True)
    assert_type(of_trainer.store, CheckpointStore)
    assert_type(of_trainer.resume(), str | None)
