"""Training functions with trainers of other frameworks inside; they run in workers of Ray."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import ckptstore


def killed_once(config: dict[str, Any], step: int) -> None:
    """Kill the process of the last rank at a step, in the first start of the run."""
    worker: Any = ckptstore.ray.current_worker()
    mark = Path(config["notes"], "killed")
    if worker.rank == worker.world_size - 1 and step == config["kill_at"] and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def note_resumed(config: dict[str, Any], callback: Any) -> None:
    """For the test: from what the run went on."""
    if callback.resumed is not None:
        Path(config["notes"], "resumed").write_text(str(callback.resumed.step))


def lightning(config: dict[str, Any]) -> None:
    """A Lightning Trainer under Ray's own strategy and environment."""
    import lightning.pytorch as pl
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

    inputs = torch.linspace(-1, 1, 32).unsqueeze(1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, 3 * inputs - 1), batch_size=4)
    keep = ckptstore.KeepBest(9, metric="loss", mode="min")
    callback = CheckpointStoreCallback(ckptstore.ray.store, retention=keep, asynchronous=True, every_n_epochs=1)
    quiet: Any = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        max_epochs=4,
        default_root_dir=config["notes"],
        accelerator="cpu",
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[callback],
        **quiet,
    )
    prepare_trainer(trainer).fit(Line(), data)
    note_resumed(config, callback)


def transformers(config: dict[str, Any]) -> None:
    """A Hugging Face Trainer, as it is."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from ckptstore.integrations.transformers import CheckpointStoreCallback

    class Kills(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            killed_once(config, state.global_step)

    rows = [{"input_ids": torch.arange(8) + start, "labels": torch.arange(8) + start} for start in range(16)]
    arguments = TrainingArguments(
        f"{config['notes']}/disk-{ckptstore.ray.current_worker().node_id}",  # each node has a disk of its own
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
    callback = CheckpointStoreCallback(ckptstore.ray.store)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[callback, Kills()])
    trainer.train(resume_from_checkpoint=callback.resume())
    note_resumed(config, callback)
