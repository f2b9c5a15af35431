"""One process trains a model and goes on where it ended: run it twice. `python examples/one_process.py STORE`"""

import sys

import torch

import ckptstore

model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = {"model": model, "optimizer": optimizer, "epoch": -1}
retention = ckptstore.KeepLatest(2) | ckptstore.KeepBest(1, "loss")
with ckptstore.open_store(sys.argv[1], retention=retention) as store:
    found = store.resume(state)  # the newest checkpoint that verifies; None in the first run
    print(f"resumed from epoch {state['epoch']}" if found else "began at the beginning")
    for epoch in range(state["epoch"] + 1, state["epoch"] + 4):
        optimizer.zero_grad()
        loss = model(torch.ones(8)).square().sum()
        loss.backward()
        optimizer.step()
        state["epoch"] = epoch
        store.save_async(epoch, state, metrics={"loss": loss.item()})  # the training goes on while it is stored
print(f"saved epochs up to {epoch}")  # leaving the store has waited for the last save
