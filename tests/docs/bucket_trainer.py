"""Stands for the trainers of the pages: writes one checkpoint as the one of that name would, and ends.

Called as `torchrun`, `python`, `python3` or `curl`, with the folder in `TRAINER_FOLDER`. It tells that it ran, and with
which words, in a file beside itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

FSDP = [f"{what}_world_size_1_rank_0.pt" for what in ("model", "optim", "extra_state")]


def main(program: str, words: list[str]) -> None:
    folder = Path(os.environ.get("TRAINER_FOLDER", "out"))
    line = " ".join(words)
    if "verl.trainer" in line:
        put(folder / "global_step_1", *(f"actor/{name}" for name in FSDP), "data.pt")
        (folder / "latest_checkpointed_iteration.txt").write_text("1")
    elif "skyrl.train" in line:
        late = ["data.pt", "trainer_state.pt", "fully_async_state.pt"]
        put(folder / "global_step_1", *(f"policy/{name}" for name in FSDP), *late)
        (folder / "latest_ckpt_global_step.txt").write_text("1")
    elif "--load ckpt" in line:
        put(folder / "iter_0000001", "__0_0.distcp", ".metadata", "metadata.json")
        (folder / "latest_checkpointed_iteration.txt").write_text("1")
        put(folder, "rollout/global_dataset_state_dict_1.pt")
    elif "train.py" in line:
        put(folder / "checkpoint-1", "model.bin")
        state = {"global_step": 1, "log_history": [{"step": 1, "eval_loss": 0.5}]}
        (folder / "checkpoint-1/trainer_state.json").write_text(json.dumps(state))
    with Path(__file__).with_name("ran").open("a") as ran:
        ran.write(f"{program} {line}\n")


def put(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000 if path.suffix != ".pt" else zipped())


def zipped() -> bytes:
    import io
    import zipfile

    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as file:
        file.writestr("state/data.pkl", b"x" * 1000)
    return held.getvalue()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
