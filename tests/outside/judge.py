"""Training scripts judged by ckpt-chaos, which ends a run at each of its changes to files, and resumes it.

    python tests/outside/judge.py                            every target, with a table in Markdown
    python tests/outside/judge.py --only loop --most 10      ten crash points of one target

The scripts know nothing of it. It counts what Python and the writers of torch and safetensors open, rename and remove
below the directory of a run, in one process, and ends that process at each of these events, with `torn` once more with
the file cut in half. A verdict is PASS where the resumed run ends with the same weights to the bit.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ckpt_chaos.runner import rejudge

JUDGED = Path(__file__).parent / "judged"
STEP = r"resumed from step (\d+)"
_TRAINER_IS_JUDGED = ("env", "CKPT_CHAOS_ARMED=1")
"""ckpt-chaos ends the first process that has not this variable, and sets it for those that it starts."""


@dataclass(frozen=True)
class Target:
    """A training, and what its end is compared by."""

    name: str
    command: tuple[str, ...]
    checkpoints: str = ""
    """The pattern of directories that are checkpoints, one whole one of which a resume must take. Those of a store have
    new names in each run."""
    compared: tuple[str, ...] = ("--result-file", "{out}/final.pt")
    ranks: int = 1


def _script(name: str, *more: str) -> tuple[str, ...]:
    return (sys.executable, str(JUDGED / f"{name}.py"), "{out}", *more)


def _under_run(name: str, *, agent: bool) -> tuple[str, ...]:
    """A stock trainer behind `ckptstore run`."""
    before, unset = ((), ()) if agent else (_TRAINER_IS_JUDGED, ("env", "-u", "CKPT_CHAOS_ARMED"))
    run = (sys.executable, "-m", "ckptstore.tools.cli", "run", "--store", "{out}/store", "--folder", "{out}/folder")
    return (*before, *run, "--interval", "0.2", "--", *unset, *_script(name, "--stock"))


_DEMO = ("-m", "ckptstore.tools.demo.train", "--store", "{out}/store", "--width", "4", "--epochs", "2")
_DIGEST = ("--result-cmd", shlex.join([sys.executable, str(JUDGED / "digest.py"), "{out}/store"]))
TARGETS = (
    Target("loop: torch's DCP", _script("loop", "--stock"), "{out}/checkpoint-*"),
    Target("loop: ckptstore", _script("loop")),
    Target("demo, two ranks: ckptstore", (sys.executable, *_DEMO), compared=_DIGEST, ranks=2),
    Target("Lightning: its own", _script("lightning_fit", "--stock"), "{out}/folder/ck-*"),
    Target("Lightning: ckptstore's callback", _script("lightning_fit")),
    Target("Lightning behind ckptstore run", _under_run("lightning_fit", agent=False), "{out}/folder/ck-*"),
    Target("Lightning behind it, the agent ended", _under_run("lightning_fit", agent=True), "{out}/folder/ck-*"),
    Target("Hugging Face: its own", _script("hf_trainer", "--stock"), "{out}/folder/checkpoint-*"),
    Target("Hugging Face: ckptstore's callback", _script("hf_trainer")),
    Target("Hugging Face behind ckptstore run", _under_run("hf_trainer", agent=False), "{out}/folder/checkpoint-*"),
    Target(
        "Hugging Face behind it, the agent ended", _under_run("hf_trainer", agent=True), "{out}/folder/checkpoint-*"
    ),
)


def judge(target: Target, work: Path, *, most: int, jobs: int) -> str:
    """Run all crash points of a target in a directory; what was printed."""
    options = ["--work", str(work), "--max-points", str(most), "--jobs", str(jobs), "--timeout", "300"]
    options += ["--step-regex", STEP, *target.compared, "--ranks", str(target.ranks)]
    if target.checkpoints:
        options += ["--checkpoint-glob", target.checkpoints]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # thousands of processes import torch
    command = [sys.executable, "-m", "ckpt_chaos", "run", *options, "--", *target.command]
    ended = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not list(work.glob("pt_*/result.json")):
        raise RuntimeError(f"{target.name} was not judged:\n{ended.stdout}")
    return ended.stdout


def verdicts(work: Path) -> Counter[str]:
    """How often each verdict was given to the runs in a directory."""
    return Counter(row.verdict for row in rejudge(work))


def table(works: dict[str, Path]) -> str:
    """The verdicts by target, in Markdown."""
    runs = [f"{name}={work}" for name, work in works.items()]
    command = [sys.executable, "-m", "ckpt_chaos", "scoreboard", *runs]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="targets that have this in their names")
    parser.add_argument("--most", type=int, default=1000, help="crash points of a target, evenly spread")
    parser.add_argument("--jobs", type=int, default=2, help="at once")
    parser.add_argument("--keep", type=Path, help="where to leave all runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckptstore-judged-") as where:
        root, works = given.keep or Path(where), {}
        for number, target in enumerate(TARGETS):
            if given.only and not any(word in target.name for word in given.only):
                continue
            works[target.name] = root / f"{number:02}"
            print(f"--- {target.name}", judge(target, works[target.name], most=given.most, jobs=given.jobs), sep="\n")
        print(table(works))


if __name__ == "__main__":
    main()
