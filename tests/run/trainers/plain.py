"""A trainer of its own without any framework: a line fitted by gradient descent, with noise from a generator.

It writes as many home-made trainers do: `step_N/` with the file of the state and an empty `DONE` at the end. With
`--mode megatron` it writes as Megatron-LM does: `iter_0000500/mp_rank_00/model_optim_rng.pt`, then the tracker file
that names the iteration (megatron/training/checkpointing.py).
"""

from __future__ import annotations

import pickle
import random
import time
from pathlib import Path

from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments

PADDING = bytes(range(256)) * 2000
"""So that a checkpoint takes more than one write."""


def save(folder: Path, mode: str, step: int, state: bytes) -> None:
    if mode == "megatron":
        write(folder / f"iter_{step:07d}" / "mp_rank_00" / "model_optim_rng.pt", state)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    else:
        write(folder / f"step_{step}" / f"{mode}.pkl", state)
        (folder / f"step_{step}" / "DONE").touch()


def write(path: Path, state: bytes) -> None:
    """Not all at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for start in range(0, len(state), 100_000):
            file.write(state[start : start + 100_000])
            file.flush()
            time.sleep(0.01)


def newest(folder: Path, mode: str) -> Path | None:
    if mode == "megatron":
        tracker = folder / "latest_checkpointed_iteration.txt"
        return (
            folder / f"iter_{int(tracker.read_text()):07d}/mp_rank_00/model_optim_rng.pt" if tracker.exists() else None
        )
    steps = [int(path.parent.name.removeprefix("step_")) for path in folder.glob("step_*/DONE")]
    return folder / f"step_{max(steps)}" / f"{mode}.pkl" if steps else None


def main() -> None:
    given = arguments()
    progress = Progress(given.losses, given.pause_at)
    numbers, weight, done = random.Random(given.mode), 0.0, 0
    found = newest(given.folder, given.mode)
    if found is not None:
        done, weight, generator, _padding = pickle.loads(found.read_bytes())
        numbers.setstate(generator)
    for step in range(done + 1, LAST_STEP + 1):
        x = numbers.gauss(0, 1)
        error = weight * x - 3 * x + numbers.gauss(0, 0.1)
        weight -= 0.1 * error * x
        time.sleep(given.step_seconds)
        progress.told(step, error * error)
        if step % SAVE_EVERY_STEPS == 0:
            save(given.folder, given.mode, step, pickle.dumps((step, weight, numbers.getstate(), PADDING)))


if __name__ == "__main__":
    main()
