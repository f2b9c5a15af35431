"""Ray Train: a worker fails, Ray starts the group again, and it resumes. `python examples/ray_train.py DIRECTORY`"""

import sys
from pathlib import Path

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import ckptstore


def train() -> None:
    model = prepare_model(torch.nn.Linear(8, 2))  # DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "epoch": -1}
    store = ckptstore.ray.store(retention=ckptstore.KeepLatest(2))
    found = ckptstore.ray.resume(state, store)
    for epoch in range(state["epoch"] + 1, 4):
        if epoch == 2 and found is None:
            raise RuntimeError("a worker fails, once")
        optimizer.zero_grad()
        loss = model(torch.ones(8)).square().sum()
        loss.backward()
        optimizer.step()
        state["epoch"] = epoch
        store.save(epoch, state, metrics={"loss": loss.item()})  # and reports to Ray
    store.close()


run = RunConfig(
    storage_path=str(Path(sys.argv[1]).absolute()), name="run", failure_config=FailureConfig(max_failures=1)
)
result = TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2), run_config=run).fit()
checkpoint = ckptstore.ray.resolve(result.checkpoint)
print(f"the last checkpoint is of epoch {checkpoint.step}: {checkpoint.uri}")
