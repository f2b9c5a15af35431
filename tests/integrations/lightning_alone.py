"""A Trainer of `pytorch_lightning`, the other name under which Lightning is installed."""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptstore import KeepAll, KeepBest, KeepLatest, open_store
from ckptstore.errors import InvalidInput
from ckptstore.integrations.lightning import CheckpointStoreCallback
from ckptstore.integrations.loaders import MapLoader, StreamLoader


class Small(pytorch_lightning.LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.batches: list[tuple[int, int, float]] = []
        """Epoch, number and sum of each."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append((self.trainer.current_epoch, batch_idx, batch.sum().item()))
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).square().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def quiet_trainer(*callbacks: Any, **given: Any) -> Any:
    """A Trainer that prints and logs nothing."""
    quiet: Any = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    return pytorch_lightning.Trainer(accelerator="cpu", callbacks=list(callbacks), **quiet, **given)


def by_steps(root: str, stops_at: int, every: dict[str, int], given: dict[str, int], *, validates: bool) -> list[Any]:
    """The batches and weights of a fit of 12 steps, three an epoch, that stops after some and goes on."""
    torch.manual_seed(1)
    data = DataLoader(torch.arange(48.0).reshape(12, 4) / 48, batch_size=4)
    seen: list[Any] = []
    for last in sorted({stops_at, 12}):
        torch.manual_seed(2)
        module = Small()
        trainer = quiet_trainer(CheckpointStoreCallback(root, **every), max_steps=last, **given)
        trainer.fit(module, data, data if validates else None)
        seen += module.batches
    return [*seen, module.layer.weight.tolist()]


def ends_of_epochs(root: str) -> list[tuple[str, bool]]:
    """For ways to train and to save: whether a fit that was stopped at the end of an epoch is as one that was not. One
    that was stopped in the middle goes on with the next batch there, though a plain loader begins anew."""
    found = []
    for validates in (False, True):
        for given in ({}, {"max_epochs": 4}):
            whole = by_steps(f"{root}/{validates}{len(given)}", 12, {"every_n_epochs": 100}, given, validates=validates)
            for every in ({"every_n_train_steps": 3}, {"every_n_epochs": 1}):
                for stops_at in (3, 4, 6):
                    if stops_at == 4 and ("every_n_train_steps" in every or given):
                        continue  # nothing was saved there; with `max_epochs` Lightning itself leaves the epoch
                    name = f"{validates} {given} {every} {stops_at}"
                    batches = by_steps(f"{root}/{name}", stops_at, every, given, validates=validates)
                    numbers = [batch[:2] for batch in batches[:-1]] == [batch[:2] for batch in whole[:-1]]
                    found.append((name, numbers and (stops_at == 4 or batches == whole)))
    return found


class StopAt(pytorch_lightning.Callback):
    """Raises after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise Stopped


class Stopped(Exception):
    """Ends a training."""


SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every validation of an epoch": ({"val_check_interval": 0.5}, {}),
    "validations by batches": ({"val_check_interval": 3}, {}),
    "validations by batches across epochs": ({"val_check_interval": 5, "check_val_every_n_epoch": None}, {}),
    "validations with their metric": ({"val_check_interval": 0.5}, {"monitor": "val_loss"}),
    "every second epoch is validated": ({"check_val_every_n_epoch": 2}, {}),
    "no validation": ({"limit_val_batches": 0}, {}),
    "accumulated": ({"accumulate_grad_batches": 2}, {"every_n_train_steps": 2}),
    "steps": ({}, {"every_n_train_steps": 2}),
    "steps with a metric": ({"val_check_interval": 0.5}, {"every_n_train_steps": 2, "monitor": "val_loss"}),
    "epochs": ({}, {"every_n_epochs": 2}),
    "always": ({}, {"train_time_interval": timedelta(0)}),
    "never in time": ({}, {"train_time_interval": timedelta(hours=1), "save_last": True}),
    "the last": ({"max_steps": 7}, {"every_n_train_steps": 3, "save_last": True}),
    "an exception": ({"stop_at": 6}, {"every_n_epochs": 1, "save_on_exception": True}),
    "weights": ({}, {"save_weights_only": True}),
}
"""Arguments of the Trainer, and those that both callbacks have."""


def beside_model_checkpoint(root: str) -> dict[str, tuple[list[int], list[int]]]:
    """Return the steps that Lightning's own callback saves in a fit of three epochs of four batches, and ours."""
    data = DataLoader(torch.arange(64.0).reshape(16, 4) / 64, batch_size=4)
    found = {}
    for name, (given, every) in SCHEDULES.items():
        store = f"{root}/{name}/store"
        resume = {"resume": False} if "save_weights_only" in every else {}
        theirs = ModelCheckpoint(f"{root}/{name}/files", filename="{epoch}-{step}", save_top_k=-1, **every)
        callbacks = [StopAt(given.get("stop_at", -1)), theirs, CheckpointStoreCallback(store, **every, **resume)]
        options = {"max_epochs": 3, **{key: value for key, value in given.items() if key != "stop_at"}}
        trainer = quiet_trainer(*callbacks, **options)
        with suppress(Stopped):
            trainer.fit(Small(), data, data)
        files = [torch.load(path, weights_only=False) for path in Path(f"{root}/{name}/files").glob("*.ckpt")]
        with open_store(store, group="solo") as opened:
            found[name] = (sorted({file["global_step"] for file in files}), [checkpoint.step for checkpoint in opened])
    return found


def by_their_file(root: str) -> tuple[list[float], list[float], list[float], list[str]]:
    """The weights of a fit of four epochs, of one that went on from Lightning's file after two, those that are in the
    best file, and the names of the stored files."""

    def fit(store: Any, last: int, where: str | None) -> tuple[list[float], CheckpointStoreCallback]:
        torch.manual_seed(2)
        callback, module = CheckpointStoreCallback(store, as_file=True, resume=False, monitor="val_loss"), Small()
        trainer = quiet_trainer(callback, max_epochs=last, num_sanity_val_steps=0)
        trainer.fit(module, data, data, ckpt_path=where)
        return module.layer.weight.flatten().tolist(), callback

    torch.manual_seed(1)
    data = DataLoader(torch.rand(12, 4), batch_size=4)
    whole, _ = fit(f"{root}/whole", 4, None)
    with open_store(f"{root}/ended") as store:
        fit(store, 2, None)
        with store.resume().as_directory() as directory:
            ended, callback = fit(store, 4, f"{directory}/{CheckpointStoreCallback.CHECKPOINT_NAME}")
        best = Small.load_from_checkpoint(callback.best_model_path).layer.weight.flatten().tolist()
        names = [receipt.name for each in store for receipt in each.files]
    return whole, ended, best, names


def last_beside_best(root: str) -> list[tuple[int, bool]]:
    """Fit ten steps of epochs of four with a best validation at the eighth; each checkpoint's step, and if it has the
    metric; then the best one's."""
    torch.manual_seed(0)
    for number, options in enumerate(({"save_last": True}, {"save_on_exception": True})):
        retention = KeepBest(1, "val_loss", "min") | KeepLatest(1)
        callback = CheckpointStoreCallback(f"{root}/{number}", monitor="val_loss", retention=retention, **options)  # type: ignore[arg-type]
        trainer = quiet_trainer(callback, *([StopAt(10)] if number else []), max_steps=10)
        data = DataLoader(torch.rand(16, 4), batch_size=4)
        with suppress(Stopped):
            trainer.fit(Small(), data, data)
    found = []
    for number in range(2):
        with open_store(f"{root}/{number}") as store:
            found += [(checkpoint.step, "val_loss" in checkpoint.metrics) for checkpoint in store]
            best = store.best("val_loss", "min")
            found.append((best.step if best else -1, True))
    return found


def requeued_by_slurm(root: str) -> list[int | None]:
    """Fit to step 2, as Slurm requeues the job; go on to 6, where a node fails; start again. What each start resumed
    from in the store, and its first step."""
    assert not [cls for cls in CheckpointStoreCallback.__mro__ if cls.__module__.startswith("lightning.")]
    found: list[int | None] = []
    for last in (2, 6, 8):
        callback = CheckpointStoreCallback(f"{root}/store", every_n_train_steps=2)
        module = Small()
        trainer = quiet_trainer(callback, max_steps=last, default_root_dir=root)
        trainer.fit(module, DataLoader(torch.rand(32, 4), batch_size=4))
        if last == 2:
            trainer.save_checkpoint(f"{root}/hpc_ckpt_1.ckpt")
        found += [callback.resumed.step if callback.resumed else None, len(module.batches)]
    return found


def last_of_a_store(root: str) -> tuple[list[str], dict[str, Any]]:
    """The calls with ckpt_path="last" that do not have the weights of the newest checkpoint then; and the steps, or the
    errors, of `fit` with it."""
    data = DataLoader(torch.arange(48.0).reshape(12, 4) / 48, batch_size=4)

    def weights(module: Any) -> list[float]:
        return list(module.layer.weight.flatten().tolist())

    def fit(name: str, epochs: int, path: str | None = None, **options: Any) -> tuple[Any, list[float], list[Any]]:
        callback = CheckpointStoreCallback(f"{root}/{name}", **options)
        trainer, module = quiet_trainer(callback, max_epochs=epochs), Small()
        trainer.fit(module, data, ckpt_path=path)
        return trainer, weights(module), [callback.resumed and callback.resumed.step, len(module.batches)]

    trainer, newest, _ = fit("run", 2)
    for name in ("beside", "weights", "files"):
        shutil.copytree(f"{root}/run", f"{root}/{name}")
    wrong = []
    for name in ("validate", "test", "predict"):
        for resume in (True, False):
            fresh, module = quiet_trainer(CheckpointStoreCallback(f"{root}/run", resume=resume)), Small()
            getattr(fresh, name)(module, data, ckpt_path="last")
            assert weights(module) == newest, name
            for had in (fresh, trainer):
                torch.nn.init.zeros_(had.lightning_module.layer.weight)
                getattr(had, name)(dataloaders=data, ckpt_path="last")
                wrong += [f"{name} {resume} alone"] * (weights(had.lightning_module) != newest)

    found: dict[str, Any] = {}
    torch.nn.init.zeros_(trainer.lightning_module.layer.weight)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(trainer.lightning_module, data, ckpt_path="last")  # one that has trained
    shutil.copytree(f"{root}/beside", f"{root}/again")
    found["fresh"] = fit("beside", 4, "last")[2]
    _, whole, found["no resume"] = fit("again", 4, "last", resume=False)
    wrong += ["fit of a trainer that has trained"] * (weights(trainer.lightning_module) != whole)
    found["empty"] = fit("empty", 1, "last", resume=False)[2]
    fit("files of Lightning", 1, as_file=True, resume=False)
    found["as_file"] = fit("files of Lightning", 2, "last", as_file=True, resume=False)[2]

    # A file of ModelCheckpoint beside the store: the newer one counts.
    both = [ModelCheckpoint(f"{root}/theirs", save_last=True), CheckpointStoreCallback(f"{root}/both")]
    quiet_trainer(*both, max_epochs=1).fit(Small(), data)
    _, newest, _ = fit("both", 2)
    for later in (quiet_trainer(*both), quiet_trainer(*both[::-1])):
        later.validate(module, data, ckpt_path="last")
        wrong += ["beside ModelCheckpoint"] * (weights(module) != newest)
    quiet_trainer(*both, max_epochs=3).fit(Small(), data, ckpt_path="last")
    found["beside ModelCheckpoint"] = both[1].resumed and both[1].resumed.step

    def refused(call: Any, name: str, **options: Any) -> str:
        try:
            call(quiet_trainer(CheckpointStoreCallback(f"{root}/{name}", **options)), Small())
        except InvalidInput as error:
            return str(error)
        return "not refused"

    found["nothing"] = refused(lambda one, module: one.test(module, data, ckpt_path="last"), "nothing")
    only = {"save_weights_only": True, "resume": False}
    found["weights"] = refused(lambda one, module: one.fit(module, data, ckpt_path="last"), "weights", **only)
    found["best"] = refused(lambda one, module: one.fit(module, data, ckpt_path="best"), "run")
    return wrong, found


def places_in_a_store(root: str) -> list[str]:
    """What is said to each place in a store as a ckpt_path, with our callback and without."""
    callback = CheckpointStoreCallback(f"{root}/store")
    data, module = DataLoader(torch.ones(4, 4)), Small()
    quiet_trainer(callback, max_epochs=1).fit(module, data)
    checkpoint: Any = callback.store.latest()
    files = CheckpointStoreCallback(f"{root}/files", as_file=True, resume=False)
    quiet_trainer(files, max_epochs=1).fit(module, data)
    stored: Any = files.store.latest()
    quiet_trainer().validate(module, data, ckpt_path=f"{stored.uri}/checkpoint.ckpt")  # is Lightning's own
    copy = shutil.copytree(checkpoint.uri, f"{root}/copy")
    away = "s3://no-such-bucket/run/checkpoints/" + Path(checkpoint.uri).name
    places = [checkpoint.uri, f"{root}/store/", copy, away]
    places += [f"{checkpoint.uri}/{receipt.name}" for receipt in checkpoint.files]
    said = []
    for path in [*map(Path, places[:3]), *places, stored.uri]:
        for given in ([], [callback], [CheckpointStoreCallback(f"{root}/store", resume=False)]):
            for name in ("fit", "validate", "test", "predict"):
                try:
                    getattr(quiet_trainer(*given), name)(module, data, ckpt_path=path)
                except InvalidInput as error:
                    said.append(f"{str(path) == stored.uri} {name} {bool(given)} {error}")
                else:
                    said.append(f"{path} was read by {name}")
    return said


class Drawing(Small):
    """Has a dropout, and a learning rate that falls."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.dropout(self.layer(batch) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def with_random_numbers(root: str) -> list[str]:
    """The fits with a dropout and a shuffled loader that do not go on as one that never ended: at the ends of epochs,
    by either limit, and in the middle of one."""
    different = []
    cases: dict[str, tuple[Any, dict[str, int], dict[str, int], int]] = {
        "epochs": (DataLoader, {"every_n_epochs": 1}, {"max_epochs": 4}, 2),
        "steps": (DataLoader, {"every_n_epochs": 1}, {"max_steps": 12}, 6),
        "middle": (StatefulDataLoader, {"every_n_train_steps": 2}, {"max_steps": 12}, 4),
    }
    for name, (loader, every, limit, first) in cases.items():
        found = []
        for ends in ([], [first]):
            torch.manual_seed(1)
            for at in (*ends, *limit.values()):
                module = Drawing()
                callback = CheckpointStoreCallback(f"{root}/{name}{len(ends)}", **every)
                rows = loader(torch.arange(48.0).reshape(12, 4) / 48, batch_size=4, shuffle=True)
                trainer = quiet_trainer(callback, **dict.fromkeys(limit, at))
                trainer.fit(module, rows, DataLoader(torch.ones(2, 4)))
                torch.manual_seed(7)  # another process
            assert (callback.resumed is not None) == bool(ends)
            found.append(module.layer.weight.tolist())
        different += [name] * (found[0] != found[1])
    return different


class Rows(Small):
    """Trains on the rows that a loader gives, and notes with the step whether a validation has followed it."""

    stops_at = -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.stops_at:
            raise Stopped
        self.batches.append((self.trainer.current_epoch, self.trainer.global_step, batch.sum().item()))
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.batches.append((self.trainer.current_epoch, self.trainer.global_step, 0.0))

    def on_train_epoch_end(self) -> None:
        self.batches.append((self.trainer.current_epoch, self.trainer.global_step, -1.0))


def with_a_loader_that_has_a_position(root: str, kind: str, limit: dict[str, int]) -> list[int]:
    """Fit two epochs of four batches, saving every second; return the steps from which a fit does not go on so."""
    data = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4) / 48)
    held_out = DataLoader(torch.ones(1, 4))

    def fit(store: str) -> list[Any]:
        torch.manual_seed(1)
        collate: Any = {"collate_fn": lambda rows: torch.stack([row for (row,) in rows])}
        kinds = {
            "map": lambda: MapLoader(data, 3, seed=3, **collate),
            "torchdata": lambda: StatefulDataLoader(data, 3, **collate),
        }
        module = Rows()
        callback = CheckpointStoreCallback(store, every_n_train_steps=2, retention=KeepAll())
        quiet_trainer(callback, **limit, num_sanity_val_steps=0).fit(module, kinds[kind](), held_out)
        return module.batches

    whole = fit(f"{root}/whole")
    assert len({batch for batch in whole if batch[2] > 0}) == 8
    different = []
    for step in (2, 4):
        copy = shutil.copytree(f"{root}/whole", f"{root}/{step}")
        with open_store(copy) as store:
            store.roll_back(step)
        if fit(copy) != [batch for batch in whole if batch[1] >= step and (batch[1] > step or batch[2] > 0)]:
            different.append(step)
    return different


def on_other_numbers_of_ranks(root: str) -> list[list[Any]]:
    """The steps of an epoch of 24 samples that begins with two batches of 3 on two ranks, and goes on with one, and
    the other way round; this is rank 0 of each."""
    found = []
    for first, second in ((2, 1), (1, 2)):
        for world_size, stop_at in ((first, 3), (second, -1)):
            loader = MapLoader(torch.arange(96.0).reshape(24, 4), 3, rank=0, world_size=world_size)
            module = Rows()
            callback = CheckpointStoreCallback(f"{root}/{first}", every_n_train_steps=1)
            trainer = quiet_trainer(StopAt(stop_at), callback, max_epochs=1, num_sanity_val_steps=0)
            with suppress(Stopped):
                trainer.fit(module, loader, DataLoader(torch.ones(1, 4)))
        found.append([(step, min(total, 1.0)) for _, step, total in module.batches])
    return found


def interrupted_in_a_batch(root: str) -> list[tuple[int, float]]:
    """What is left of an epoch of four batches to a fit after one in whose third batch an exception came: the steps,
    and what was done at them."""
    for stop_at in (2, -1):
        module = Rows()
        module.stops_at = stop_at
        callback = CheckpointStoreCallback(root, every_n_epochs=1, save_on_exception=True)
        loader = StatefulDataLoader(torch.ones(12, 4), 3)
        trainer = quiet_trainer(callback, max_epochs=1, num_sanity_val_steps=0)
        with suppress(Stopped):
            trainer.fit(module, loader, DataLoader(torch.ones(1, 4)))
    return [(step, total) for _, step, total in module.batches]


class Plateau(Small):
    """Has a scheduler that waits for a metric."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def warned_of(root: str) -> list[str]:
    """The warnings of a fit and its resume, with a loader that has a position and no length."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckptstore.lightning").addHandler(handler)
    for max_epochs in (1, 2):
        loader = StreamLoader(["a", "b"], lambda name, start: iter(torch.ones(4, 4)[start:]), 2)
        trainer = quiet_trainer(CheckpointStoreCallback(root), max_epochs=max_epochs)
        trainer.fit(Plateau(), loader, DataLoader(torch.ones(1, 4)))
    return records


def loaders_of_a_trainer(root: str) -> tuple[list[Any], ...]:
    """What the four functions above return; of the first for two loaders, by epochs and by steps."""
    kinds: list[tuple[str, dict[str, int]]] = [("map", {"max_epochs": 2}), ("map", {"max_steps": 8})]
    positions = [
        (kind, limit, with_a_loader_that_has_a_position(f"{root}/{number}", kind, limit))
        for number, (kind, limit) in enumerate([*kinds, ("torchdata", {"max_steps": 8})])
    ]
    others = on_other_numbers_of_ranks(f"{root}/ranks")
    return positions, others, interrupted_in_a_batch(f"{root}/interrupted"), warned_of(f"{root}/warned")
