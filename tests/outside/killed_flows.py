"""What the sweep kills: `python killed_flows.py MODULE…` imports the modules, and forks a process for each line that
asks for one. To import torch takes ten times as long as what the process then does.

A line is a JSON object: the arguments of `main`, variables of the environment, the file for what is printed, the file
for the status, and what the tracer wants, if there is to be one. A process opens everything first; then it stops
itself, if it is traced, until its tracer is there.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from system_calls import as_shell, trace

from ckptstore import FastTier, KeepEvery, KeepLatest, StorageGroup, open_store
from ckptstore.errors import CkptstoreError
from ckptstore.store import CheckpointStore

STEP = 2
LARGE = 400_000


def ready() -> None:
    """All that takes long is done: the tracer may come, and the ranks begin at once."""
    if os.environ["TRACED"] == "yes":
        os.kill(os.getpid(), signal.SIGSTOP)
    meeting = Path(os.environ["MEETING"])
    (meeting / os.environ["RANK"]).touch()
    while len(list(meeting.iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.005)


def opened(root: str, rank: int, world_size: int, token: str, fast: FastTier | None = None) -> CheckpointStore:
    group = StorageGroup(rank, world_size, token) if world_size > 1 else None
    return open_store(
        root,
        fast=fast,
        group=group,
        retention=KeepLatest(1),
        grace_seconds=0,
        rank_timeout_seconds=float(os.environ["RANK_TIMEOUT_SECONDS"]),
    )


def state_of(step: int, rank: int) -> dict[str, Any]:
    """A small state with a tensor of its own on each rank, a shared one, and plain values."""
    import torch

    return {
        "own": torch.full((LARGE,), float(step * 10 + rank)),
        "shared": torch.arange(1000, dtype=torch.float32) + step,
        "values": {"step": step, "rank": rank, "name": "é"},
    }


def save_directory(store: CheckpointStore, rank: int, given: str) -> None:
    ready()
    store.save_directory(STEP, Path(given) / f"rank{rank}")


def save(store: CheckpointStore, rank: int, given: str) -> None:
    state = state_of(STEP, rank)
    ready()
    store.save(STEP, state)


def save_async(store: CheckpointStore, rank: int) -> None:
    state = state_of(STEP, rank)
    ready()
    store.save_async(STEP, state).result()


def on_node(disks: str, rank: int) -> FastTier:
    """Each rank is a node, with a directory for its disk."""
    return FastTier(Path(disks) / f"node{rank}", node=f"node{rank}", copies=2, drain=KeepEvery(steps=1000))


def fast_save(store: CheckpointStore, rank: int) -> None:
    """To the disks of two nodes; the first of a job is brought into the store."""
    ready()
    store.resume(state_of(0, rank))
    store.save(STEP, state_of(STEP, rank))
    store.drain()


def fast_resume(store: CheckpointStore, rank: int) -> None:
    state = state_of(0, rank)
    ready()
    store.resume(state)


def import_file(store: CheckpointStore, given: str) -> None:
    from ckptstore.extensions.exchange.importing import import_state

    ready()
    import_state(Path(given) / "state.pt", store, STEP, kind="torch")


def copy(root: str, target: str) -> None:
    from ckptstore.extensions.exchange.copying import copy_store
    from ckptstore.transfer.opened import open_place

    with open_store(root) as store:
        place = open_place(target)
        ready()
        copy_store(store, place)
        place.close()


def run(root: str, folder: str) -> None:
    """The agent, with a shell script for a trainer."""
    from ckptstore.tools.cli import main as command

    options = [
        "--store",
        root,
        "--folder",
        folder,
        "--pattern",
        "checkpoint-*",
        "--marker",
        "DONE",
        "--interval",
        "0.1",
    ]
    ready()
    script = str(Path(__file__).with_name("trainer.sh"))
    status = command(["run", *options, "--", "sh", script, folder], standalone_mode=False)
    if status:
        raise SystemExit(status)


def cached(directory: str) -> None:
    """A checkpoint without paths of its own, as a directory on this node."""
    from ckptstore import Checkpoint

    path = Path(directory)
    options = {"path": str(path.parent), "target_protocol": "file"}
    checkpoint = Checkpoint.from_uri(f"dir://{path.name}", storage_options=options)
    ready()
    with checkpoint.as_directory() as path:
        assert sum(file.is_file() for file in path.rglob("*")) == len(checkpoint.files) + 1


def main(flow: str, rank: int, world_size: int, token: str, root: str, given: str) -> None:
    if flow == "cp":
        return copy(root, given)
    if flow == "node_cache":
        return cached(given)
    if flow == "run":
        return run(root, given)
    store = opened(root, rank, world_size, token, on_node(given, rank) if flow.startswith("fast_") else None)
    if flow in ("fast_save", "fast_node"):
        fast_save(store, rank)
    elif flow == "fast_resume":
        fast_resume(store, rank)
    elif flow == "save_directory":
        save_directory(store, rank, given)
    elif flow == "save":
        save(store, rank, given)
    elif flow == "save_async":
        save_async(store, rank)
    elif flow == "import":
        import_file(store, given)
    elif flow == "prune":
        ready()
        store.prune()
    elif flow == "gc":
        ready()
        store.collect_garbage(claim=True)
    store.close()
    return None


def told(arguments: list[Any]) -> None:
    """Run a flow; the last line that it prints says how it ended."""
    try:
        main(*arguments)
    except CkptstoreError as error:
        print(f"{type(error).__name__} committed={error.committed}: {error}")
    else:
        print("done")


def become(asked: dict[str, Any]) -> None:
    """Fork the process that is asked for, and write its status when it has ended.

    It returns in that process too, so that the interpreter ends as it always does.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with open(os.devnull) as nothing, open(asked["output"], "wb") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(asked["environment"])
    if (pid := os.fork()) == 0:
        return told(asked["arguments"])
    status = as_shell(os.waitpid(pid, 0)[1]) if asked["traced"] is None else trace(pid, **asked["traced"])
    ended = Path(asked["status"])
    ended.with_suffix(".new").write_text(str(status))
    ended.with_suffix(".new").rename(ended)
    return None


def serve(modules: list[str]) -> None:
    """Begin a process for each line of the standard input."""
    for name in modules:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads cannot be forked"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        if os.fork() == 0:
            return become(json.loads(line))
    return None


if __name__ == "__main__":
    serve(sys.argv[1:])
