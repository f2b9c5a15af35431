"""Stands for the trainers of the pages: writes one checkpoint as the one of that name would, and ends.

Called as `torchrun`, `python`, `python3` or `curl`, with the folder in `TRAINER_FOLDER`. It tells that it ran, and with
which words, in a file beside itself.
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

_FSDP = [f"{what}_world_size_1_rank_0.pt" for what in ("model", "optim", "extra_state")]
_STEP = "global_step_1"
CHECKPOINTS = {
    "verl.trainer": [
        *(f"{_STEP}/actor/{name}" for name in _FSDP),
        f"{_STEP}/data.pt",
        "latest_checkpointed_iteration.txt",
    ],
    "skyrl.train": [
        *(f"{_STEP}/policy/{name}" for name in _FSDP),
        *(f"{_STEP}/{name}.pt" for name in ("data", "trainer_state", "fully_async_state")),
        "latest_ckpt_global_step.txt",
    ],
    "--load ckpt": [
        *(f"iter_0000001/{name}" for name in ("__0_0.distcp", ".metadata", "metadata.json")),
        "latest_checkpointed_iteration.txt",
        "rollout/global_dataset_state_dict_1.pt",
    ],
    "train.py": ["checkpoint-1/model.bin", "checkpoint-1/trainer_state.json"],
}
"""The files of each, in the order in which it writes them, by a part of its command."""
STATE = {"global_step": 1, "log_history": [{"step": 1, "eval_loss": 0.5}]}

line, folder = " ".join(sys.argv[1:]), Path(os.environ.get("TRAINER_FOLDER", "out"))
for name in next((names for part, names in CHECKPOINTS.items() if part in line), []):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".pt":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("state/data.pkl", b"x" * 1000)
    else:
        path.write_text({".txt": "1", ".json": json.dumps(STATE)}.get(path.suffix, "x" * 1000))
with Path(__file__).with_name("ran").open("a") as ran:
    ran.write(f"{line}\n")
