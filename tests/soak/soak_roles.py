"""The processes of the soak: `python soak_roles.py ROLE LEDGER ROOT OPTIONS ARGUMENTS...`, each until it gets SIGTERM.

A ledger has one line for each checkpoint that a job was told is committed. A role that sees a broken promise prints a
line that begins with VIOLATION and goes on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckptstore import KeepLatest, StorageGroup, open_store
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CheckpointGone, CkptstoreError, StorageError, StoreFenced
from ckptstore.store import CheckpointStore

RANK_TIMEOUT_SECONDS = 15.0
GRACE_SECONDS = 5.0
STATE_NUMBERS = 300_000
WARM_TURNS = 8
stopping = threading.Event()


def opened(root: str, options: dict[str, Any], **more: Any) -> CheckpointStore:
    if "://" in root:
        more["storage_options"] = options
    return open_store(root, grace_seconds=GRACE_SECONDS, rank_timeout_seconds=RANK_TIMEOUT_SECONDS, **more)


def violation(text: str) -> None:
    print(f"VIOLATION {os.getpid()} {text}", flush=True)


def contents(step: int, rank: int) -> dict[str, bytes]:
    return {"model.pt": b"%08d-%02d-" % (step, rank) * 20_000, f"small{rank}": b"%d" % step}


def write(directory: Path, files: dict[str, bytes]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return directory


def promised(ledger: Path) -> int:
    """The highest number of a checkpoint that somebody was told is committed."""
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    return max((int(line.split()[0]) for line in lines if line.count(" ") == 1), default=0)


def promise(ledger: Path, number: int, step: int) -> None:
    with open(ledger, "ab", buffering=0) as file:
        file.write(b"%d %d\n" % (number, step))


def turns(ledger: Path, pause_seconds: float) -> Iterator[None]:
    """Until the end. After some turns this process has loaded what it needs: from then on it may not grow."""
    done = 0
    while not stopping.wait(pause_seconds):
        yield
        done += 1
        if done == WARM_TURNS:
            (ledger.parent / f"warm-{os.getpid()}").touch()


def job(ledger: Path, root: str, options: dict[str, Any], rank: str, token: str) -> None:
    """One rank of a job of two: resumes, and saves until it is fenced, stopped, or killed."""
    number, group = int(rank), StorageGroup(int(rank), 2, token)
    with TemporaryDirectory() as source, opened(root, options, group=group, retention=KeepLatest(3)) as store:
        resumed = store.resume()
        step = resumed.step if resumed else 0
        for _ in turns(ledger, 0.05):
            step += 1
            saved = store.save_directory(step, write(Path(source), contents(step, number)))
            assert saved.number is not None
            if number == 0:
                promise(ledger, saved.number, step)


def reader(ledger: Path, root: str, options: dict[str, Any]) -> None:
    """The latest checkpoint is never older than what was promised before, and reads back whole."""
    with opened(root, options) as store:
        for _ in turns(ledger, 0.2):
            least = promised(ledger)
            try:
                latest = store.latest()
                if latest is None:
                    if least:
                        violation(f"{root} is empty, and checkpoint {least} was committed")
                    continue
                if (latest.number or 0) < least:
                    violation(f"{root} has checkpoint {latest.number} as its latest, {least} was committed")
                with latest.as_directory() as path:
                    for rank in (0, 1):
                        name = f"model-rank={rank:05d}.pt"
                        if (path / name).read_bytes() != contents(latest.step, rank)["model.pt"]:
                            violation(f"{name} of step {latest.step} in {root} has other bytes")
                if not latest.verify().ok:
                    with opened(root, options) as again:
                        if latest in list(again):
                            violation(f"step {latest.step} in {root} does not verify and is live")
            except (CheckpointGone, FileNotFoundError):
                """Retention was faster."""
            except StorageError as error:
                print(f"reader: {error}", flush=True)


def janitor(ledger: Path, root: str, options: dict[str, Any], target: str) -> None:
    """Prunes, collects, and copies the store to another place."""
    from ckptstore.extensions.exchange.copying import copy_store
    from ckptstore.transfer.opened import open_place

    with opened(root, options) as store:
        for number, _ in enumerate(turns(ledger, 1.0)):
            try:
                store.prune()
                store.collect_garbage()
                if number % 5 == 4:
                    place = open_place(target)
                    try:
                        copy_store(store, place)
                    finally:
                        place.close()
                    with open_store(target) as copied:
                        bad = [entry.step for entry in copied if not entry.verify().ok]
                    if bad:
                        violation(f"the copy {target} of {root} has damaged steps {bad}")
                    with open_store(target) as copied:
                        for entry in copied.entries()[:-2]:
                            if not entry.is_resume_source:
                                _forget(copied, entry.checkpoint)
                        copied.prune()
            except CkptstoreError as error:
                print(f"janitor: {type(error).__name__}: {error}", flush=True)


def _forget(store: CheckpointStore, checkpoint: Checkpoint) -> None:
    from ckptstore.format.changes import Remove

    assert checkpoint.number is not None
    change = Remove(trash=(checkpoint.number,), reason="old copies")
    store._job.log.append(lambda _newest: change)


def trainer(ledger: Path, root: str, options: dict[str, Any]) -> None:
    """One process that saves a state in every way, and loads it, for as long as it is let."""
    import torch

    with opened(root, options, retention=KeepLatest(2)) as store:
        store.resume()
        for step, _ in enumerate(turns(ledger, 0.05), 1):
            state = {"w": torch.full((STATE_NUMBERS,), float(step)), "step": step}
            how = step % 4
            try:
                if how == 0:
                    saved = store.save(step, state, incremental=step % 8 == 0)
                else:
                    saved = store.save_async(step, state).result() or saved
            except StoreFenced:
                raise
            except CkptstoreError as error:
                print(f"trainer: {type(error).__name__}: {error}", flush=True)
                continue
            assert saved.number is not None
            promise(ledger, saved.number, saved.step)
            loaded = {"w": torch.zeros(STATE_NUMBERS), "step": 0}
            found = store.load(loaded)
            if found is None or loaded["step"] != step or not bool((loaded["w"] == step).all()):
                violation(f"{root} loads step {loaded['step']} after step {step} was committed")


def main(role: str, ledger: str, root: str, options: str, *more: str) -> None:
    signal.signal(signal.SIGTERM, lambda _number, _frame: stopping.set())
    random.seed(os.getpid())
    started = time.monotonic()
    try:
        ROLES[role](Path(ledger), root, json.loads(options), *more)
    except StoreFenced:
        print(f"{role} was fenced after {time.monotonic() - started:.1f} s", flush=True)
    except CkptstoreError as error:
        print(f"{role} ended: {type(error).__name__}: {error}", flush=True)


ROLES: dict[str, Any] = {"job": job, "reader": reader, "janitor": janitor, "trainer": trainer}

if __name__ == "__main__":
    main(*sys.argv[1:])
