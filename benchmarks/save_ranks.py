"""What each of several ranks does in the benchmarks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from peers import load_with_dcp, save_with_dcp
from raw import settle
from states import STATES, State, assert_equal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from ckptstore import CheckpointStore, open_store


@contextmanager
def process_group() -> Iterator[int]:
    """gloo over all ranks; yields this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def sharded(state: State) -> State:
    """Each tensor as a DTensor, split by rows over all ranks; only this rank's rows stay."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    size, rank = dist.get_world_size(), dist.get_rank()
    return {
        name: DTensor.from_local(state.pop(name).chunk(size)[rank].clone(), mesh, [Shard(0)], run_check=False)
        for name in list(state)
    }


def in_turns(
    bodies: dict[str, Callable[[], object]], root: Path, rounds: int, prepare: Callable[[], None]
) -> dict[str, list[float]]:
    """`timed`, each body in a directory with nothing but what `prepare` makes."""

    def begin() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            settle(root)
        dist.barrier()
        prepare()

    return timed(bodies, rounds, begin)


def timed(
    bodies: dict[str, Callable[[], object]], rounds: int, begin: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each body on this rank, round by round; all ranks begin together, after `begin`."""
    samples: dict[str, list[float]] = {name: [] for name in bodies}
    for number in range(rounds + (rounds > 1)):
        for name, body in bodies.items():
            begin()
            dist.barrier()
            started = time.perf_counter()
            body()
            if number or rounds == 1:
                samples[name].append(time.perf_counter() - started)
    return samples


def save_in_turns(directory: str, shape: str, rounds: int, durable: bool) -> dict[str, list[float]]:
    """Saves of a sharded state, ckptstore's and DCP's."""
    root = Path(directory)
    with process_group():
        state = sharded(STATES[shape]())

        opened: list[CheckpointStore] = []

        def prepare() -> None:
            while opened:
                opened.pop().close()
            opened.append(open_store(root / "store", durable=durable))
            opened[0].save(0, {"epoch": 0})

        def ours() -> None:
            opened[0].save(1, state)

        bodies: dict[str, Callable[[], object]] = {"ckptstore": ours}
        for threads in (1, 2, 4):
            bodies[f"DCP, {threads} threads"] = partial(
                save_with_dcp, state, root / "dcp", num_threads=threads, durable=durable, alone=False
            )
        found = in_turns(bodies, root, rounds, prepare)
        opened[0].close()
        return found


def load_in_turns(directory: str, shape: str, rounds: int) -> dict[str, list[float]]:
    """Loads of a sharded state into its own memory out of the page cache, ckptstore's and DCP's."""
    root = Path(directory)
    with process_group():
        state = sharded(STATES[shape]())
        with open_store(root / "store", durable=False) as store:
            store.save(1, state)
            save_with_dcp(state, root / "dcp", durable=False, alone=False)
            bodies: dict[str, Callable[[], object]] = {
                "ckptstore": lambda: store.load(state),
                "DCP": partial(load_with_dcp, state, root / "dcp", alone=False),
            }
            expected = {name: tensor.to_local().clone() for name, tensor in state.items()}
            samples = timed(bodies, rounds)
            for body in bodies.values():
                for tensor in state.values():
                    tensor.to_local().zero_()
                body()
                assert_equal({name: tensor.to_local() for name, tensor in state.items()}, expected)
            return samples


def of_slowest(of_ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The samples of all ranks as one: that of the slower rank."""
    return {name: [max(pair) for pair in zip(*(rank[name] for rank in of_ranks), strict=True)] for name in of_ranks[0]}


def save_replicated(directory: str, total_bytes: int) -> tuple[int, int]:
    """Save one tensor that DDP keeps equal on all ranks; payload bytes in this rank's files, ckptstore's and DCP's."""
    root = Path(directory)
    with process_group() as rank:
        rows = total_bytes // 4 // 1024
        model = torch.nn.utils.skip_init(torch.nn.Linear, 1024, rows, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        state = {"model": DistributedDataParallel(model, init_sync=False)}
        with open_store(root / "store", durable=False) as store:
            checkpoint = store.save(1, state)
            found = sum(file.size_bytes for file in checkpoint.files if file.rank == rank and "state-rank" in file.name)
        save_with_dcp({"weight": model.weight.detach()}, root / "dcp", durable=False, alone=False)
        dist.barrier()
        mine = sum(path.stat().st_size for path in (root / "dcp").glob(f"__{rank}_*.distcp"))
        dist.barrier()
        return found, mine
