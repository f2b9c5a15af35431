"""Any trainer that writes to a folder, without a change: `ckptstore run` commits what this one writes.

`ckptstore run --store STORE --folder out --pattern 'model-step{step}.pt' -- python examples/any_trainer.py out`
goes on where it ended, on a new machine too: the folder comes back from the store.
"""

import re
import sys
from pathlib import Path

import torch

folder = Path(sys.argv[1])
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
done = sorted(folder.glob("model-step*.pt"), key=lambda path: int(re.findall(r"\d+", path.name)[-1]))
first = 0
if done:  # what ckptstore has restored, or what was here
    saved = torch.load(done[-1])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"] + 1
print(f"begins with step {first}")
for step in range(first, first + 3):
    optimizer.zero_grad()
    model(torch.ones(8)).square().sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(saved, folder / f"model-step{step}.pt")
