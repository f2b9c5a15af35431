"""A trainer that writes checkpoints as Hugging Face's does, and takes no time for anything else.

Its "weights" are made of the step and of where the training began, so that a mixture would be seen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

SIZE_BYTES = 50_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--pause", type=float, default=0.3)
    parser.add_argument("--limit", type=int, default=99)
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--begin", type=int)
    parser.add_argument("--mark", type=int, default=0)
    parser.add_argument("--name", default="more.bin")
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--wait", type=Path, help="after the first step, until this is there")
    given = parser.parse_args()
    steps = _steps(given.folder)
    begin = given.begin if given.begin is not None else steps[-1] if steps else 0
    print(f"begins at {begin}", flush=True)
    for step in range(begin + 1, begin + given.steps + 1):
        directory = given.folder / f"checkpoint-{step}"
        directory.mkdir(exist_ok=True)
        for name in ("model.bin", given.name):
            (directory / name).write_bytes(bytes([step, given.mark]) * (SIZE_BYTES // 2))
        history = [{"step": step, "eval_loss": abs(step - 3) + 1.0}]
        (directory / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history}))
        for old in _steps(given.folder)[: -given.limit]:
            shutil.rmtree(given.folder / f"checkpoint-{old}")
        time.sleep(given.pause)
        while given.wait is not None and step == begin + 1 and not given.wait.exists():
            time.sleep(0.05)
    print(f"pid {os.getpid()} is through", flush=True)
    while given.stay:
        time.sleep(0.1)
    sys.exit(given.code)


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


if __name__ == "__main__":
    main()
