"""Training functions with trainers of other frameworks inside; they run in workers of Ray."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ckptstore


def killed_once(config: dict[str, Any], step: int) -> None:
    """Kill the process of the last rank at a step, in the first start of the run."""
    import ray.train

    worker = ckptstore.ray.current_worker()
    assert worker is not None
    mark = Path(config["notes"], "killed")
    if worker.rank == worker.world_size - 1 and step == config["kill_at"] and not mark.exists():
        mark.touch()
        if config.get("reports", False):
            ray.train.get_all_reported_checkpoints()  # waits for Ray, which would forget what it has not fetched
        os.kill(os.getpid(), signal.SIGKILL)


def note_resumed(config: dict[str, Any], found: Any) -> None:
    """For the test: from what Ray handed back the run went on."""
    Path(config["notes"], "resumed").write_text(str(ckptstore.ray.wrap(found).step))


def lightning(config: dict[str, Any]) -> None:
    """A Lightning Trainer under Ray's own strategy and environment."""
    import lightning.pytorch as pl
    import ray.train
    import torch
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

    from ckptstore.integrations.lightning import CheckpointStoreCallback

    class Line(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            killed_once(config, self.global_step)
            loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    class Reports(pl.Callback):
        """That of Ray's guide, with its last line changed."""

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            with tempfile.TemporaryDirectory() as directory:
                metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
                trainer.save_checkpoint(os.path.join(directory, "ckpt.pt"), weights_only=False)
                checkpoint = None
                if ray.train.get_context().get_world_rank() == 0:
                    checkpoint = ray.train.Checkpoint.from_directory(directory)
                ckptstore.ray.report(metrics=metrics, checkpoint=checkpoint)

    inputs = torch.linspace(-1, 1, 32).unsqueeze(1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, 3 * inputs - 1), batch_size=4)
    reports = config.get("reports", False)
    keep = ckptstore.KeepBest(9, metric="loss", mode="min")
    callback = CheckpointStoreCallback(ckptstore.ray.store, retention=keep, asynchronous=True, every_n_epochs=1)
    trainer = pl.Trainer(
        max_epochs=4,
        default_root_dir=config["notes"],
        accelerator="cpu",
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[Reports() if reports else callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    found = ray.train.get_checkpoint() if reports else None
    if found is not None:
        with ckptstore.ray.wrap(found).as_directory() as directory:
            prepare_trainer(trainer).fit(Line(), data, ckpt_path=f"{directory}/ckpt.pt", weights_only=False)
        note_resumed(config, found)
        return
    prepare_trainer(trainer).fit(Line(), data)
    if callback.resumed is not None:
        Path(config["notes"], "resumed").write_text(str(callback.resumed.step))


def transformers(config: dict[str, Any]) -> None:
    """A Hugging Face Trainer, as it is."""
    import ray.train
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from ckptstore.integrations.transformers import CheckpointStoreCallback

    class Kills(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            killed_once(config, state.global_step)

    class Reports(TrainerCallback):
        """That of Ray's guide, with its last call changed."""

        def __init__(self) -> None:
            self.metrics: dict[str, Any] = {}

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.metrics.update(logs)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                checkpoint = ray.train.Checkpoint.from_directory(get_last_checkpoint(args.output_dir))
            ckptstore.ray.report(metrics=self.metrics, checkpoint=checkpoint)
            self.metrics = {}

    worker = ckptstore.ray.current_worker()
    assert worker is not None
    rows = [{"input_ids": torch.arange(8) + start, "labels": torch.arange(8) + start} for start in range(16)]
    arguments = TrainingArguments(
        f"{config['notes']}/disk-{worker.node_id}",  # each node has a disk of its own
        save_on_each_node=True,
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=8,
        save_steps=2,
        logging_steps=2,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
    )
    reports = config.get("reports", False)
    callback = CheckpointStoreCallback(ckptstore.ray.store)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    saves = Reports() if reports else callback
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[saves, Kills()])
    found = ray.train.get_checkpoint() if reports else None
    if found is not None:
        with ckptstore.ray.wrap(found).as_directory() as directory:
            trainer.train(resume_from_checkpoint=str(directory))
        note_resumed(config, found)
        return
    if reports:
        trainer.train()
        return
    trainer.train(resume_from_checkpoint=callback.resume())
    if callback.resumed is not None:
        Path(config["notes"], "resumed").write_text(str(callback.resumed.step))
