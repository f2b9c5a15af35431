"""A trainer of its own without any framework: a line fitted by gradient descent, with noise from a generator.

It writes as many home-made trainers do: `step_N/` with the files of a checkpoint and an empty `DONE` at the end, or
with `--mode megatron` as Megatron-LM does: `iter_0000500/mp_rank_00/model_optim_rng.pt`, then the tracker file that
names the iteration (megatron/training/checkpointing.py).
"""

from __future__ import annotations

import pickle
import random
import time
from pathlib import Path

from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments

PADDING = bytes(range(256)) * 2000
"""So that a checkpoint takes more than one write."""


def save_steps(folder: Path, step: int, state: bytes) -> None:
    place = folder / f"step_{step}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text("{}")
    with (place / "state.pkl").open("wb") as file:
        for start in range(0, len(state), 100_000):
            file.write(state[start : start + 100_000])
            file.flush()
            time.sleep(0.01)
    (place / "DONE").touch()


def newest_of_steps(folder: Path) -> Path | None:
    steps = [int(path.parent.name.removeprefix("step_")) for path in folder.glob("step_*/DONE")]
    return folder / f"step_{max(steps)}" / "state.pkl" if steps else None


def save_megatron(folder: Path, step: int, state: bytes) -> None:
    place = folder / f"iter_{step:07d}" / "mp_rank_00"
    place.mkdir(parents=True, exist_ok=True)
    (place / "model_optim_rng.pt").write_bytes(state)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


def newest_of_megatron(folder: Path) -> Path | None:
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return None
    return folder / f"iter_{int(tracker.read_text()):07d}" / "mp_rank_00" / "model_optim_rng.pt"


def main() -> None:
    given = arguments()
    progress = Progress(given.losses, given.pause_at)
    save, newest = (save_megatron, newest_of_megatron) if given.mode == "megatron" else (save_steps, newest_of_steps)
    numbers, weight, first = random.Random(5), 0.0, 1
    found = newest(given.folder)
    if found is not None:
        first, weight, generator, _padding = pickle.loads(found.read_bytes())
        numbers.setstate(generator)
        first += 1
    for step in range(first, LAST_STEP + 1):
        x = numbers.gauss(0, 1)
        error = weight * x - 3 * x + numbers.gauss(0, 0.1)
        weight -= 0.1 * error * x
        time.sleep(given.step_seconds)
        progress.told(step, error * error)
        if step % SAVE_EVERY_STEPS == 0:
            save(given.folder, step, pickle.dumps((step, weight, numbers.getstate(), PADDING)))


if __name__ == "__main__":
    main()
