"""Groups of real processes, through torch.distributed and through a directory, and the log that processes write."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_ranks
from exchanging import exchange
from thread_ranks import in_threads

from ckptstore.config import StoreConfig
from ckptstore.errors import CkptstoreError, InvalidInput, RankTimeout, StorageFull
from ckptstore.group import Group, StorageGroup, check_shared, find_group
from ckptstore.runtime.beat import beat
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.testing import run_ranks

PATIENCE_SECONDS = 100.0
SHORT_SECONDS = 3.0
"""Long enough that a busy machine does not take a living process for dead."""
BIG_BYTES = 20 << 20


def joined(answers: list[bytes]) -> bytes:
    return b",".join(answers)


def error_of(function: Callable[[], Any]) -> tuple[type, tuple[int, ...], str] | Any:
    """What of an error all ranks must have alike; what was returned, if nothing was raised."""
    try:
        return function()
    except CkptstoreError as error:
        return type(error), error.ranks, str(error)


def scenes(group: Group) -> dict[str, Any]:
    """Everything that a group survives, as this rank saw it."""
    rank, seen = group.rank, {}

    def fail() -> bytes:
        if rank == 2:
            raise StorageFull(f"no space for rank {rank}", step=7)
        return b""

    seen["token"] = group.start_token
    seen["answers"] = [exchange(group, f"call {n}", lambda: b"%d" % rank, joined) for n in range(10)]
    seen["one fails"] = error_of(lambda: exchange(group, "one fails", fail, joined))
    seen["mismatch"] = error_of(lambda: exchange(group, "save" if rank < 3 else "load", bytes, joined))
    big = exchange(group, "big", lambda: bytes([rank]) * BIG_BYTES, lambda answers: b"".join(answers[1:3]))
    seen["big"] = hashlib.sha256(big).hexdigest()
    seen["lane"] = exchange(group.lane("background"), "lane", lambda: b"%d" % rank, joined)
    return seen


def check_scenes(seen: list[dict[str, Any]]) -> None:
    assert seen == [seen[0]] * 4
    scene = seen[0]
    assert scene["answers"] == [b"0,1,2,3"] * 10
    kind, ranks, text = scene["one fails"]
    assert (kind, ranks) == (StorageFull, (2,))
    assert "no space for rank 2 (step 7, rank 2)" in text
    kind, ranks, text = scene["mismatch"]
    assert (kind, ranks) == (InvalidInput, (0, 3))
    assert "rank 0 calls 'save', rank 3 'load'" in text
    assert scene["big"] == hashlib.sha256(b"\1" * BIG_BYTES + b"\2" * BIG_BYTES).hexdigest()
    assert scene["lane"] == b"0,1,2,3"


def deaths(group: Group, root: Path) -> list[Any]:
    """A slow rank lives; then rank 2 dies inside its work, then the leader."""

    def slow() -> bytes:
        until = time.monotonic() + (1.5 * SHORT_SECONDS if group.rank == 1 else 0)
        while time.monotonic() < until:
            beat()
            time.sleep(0.05)
        return b""

    def die(victim: int, *, after: Callable[[], bool]) -> Callable[[], bytes]:
        def work() -> bytes:
            while group.rank == victim:
                if after():
                    os.kill(os.getpid(), signal.SIGKILL)
                beat()
                time.sleep(0.05)
            return b""

        return work

    def others_know() -> bool:
        return all((root / f"rank {rank} knows").exists() for rank in (1, 3))

    ends = [
        error_of(lambda: exchange(group, "slow", slow, joined)),
        error_of(lambda: exchange(group, "rank 2 dies", die(2, after=lambda: True), joined)),
    ]
    (root / f"rank {group.rank} knows").touch()
    return [*ends, error_of(lambda: exchange(group, "the leader dies", die(0, after=others_know), joined))]


def check_deaths(seen: list[Any]) -> None:
    """What ranks 1 and 3 saw of the deaths of 2 and 0."""
    assert [seen[0], seen[2]] == [None, None]
    for slow, second, leader in (seen[1], seen[3]):
        assert slow == b",,,"
        assert second[:2] == (RankTimeout, (2,))
        assert "Rank 2 gave no sign of life for 3 s in 'rank 2 dies'" in second[2]
        assert leader[:2] == (RankTimeout, (0,))


def deaths_through_a_directory(root: Path) -> list[Any]:
    given = StorageGroup(int(os.environ["RANK"]), 4, "first-start")
    group = given.open(LocalStorage(root), rank_timeout_seconds=SHORT_SECONDS)
    return deaths(group, root)


def test_dead_ranks_are_named_through_a_directory(tmp_path: Path) -> None:
    check_deaths(run_ranks(4, deaths_through_a_directory, tmp_path / "store", expect_killed=[0, 2]))


def through_torch(root: Path) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    storage = LocalStorage(root)
    patient = StoreConfig(rank_timeout_seconds=PATIENCE_SECONDS)
    group = find_group(None, storage=storage, config=patient)
    check_shared(group, storage)
    seen: dict[str, Any] = scenes(group)
    seen["gloo sum"] = summed(1, over=group.process_group)
    seen["beside training"] = beside_training(group)
    seen["pair"] = in_a_pair(storage, patient)
    keys = [our_keys()]
    for leaving in (group.rank > 0, group.rank == 0):  # the leader last: on a busy machine it does not wait long enough
        dist.barrier()
        if leaving:
            group.close()
    dist.barrier()
    keys.append(our_keys())
    everybody: list[Any] = [None] * 4
    dist.all_gather_object(everybody, (seen, [len(some) for some in keys]))
    hasty = find_group(None, storage=storage, config=StoreConfig(rank_timeout_seconds=SHORT_SECONDS))
    ends = deaths(hasty, root)
    hasty.close()
    return everybody, ends


def test_ranks_meet_again_in_one_start_and_one_that_looks_alone_is_not_counted(tmp_path: Path) -> None:
    def run(rank: int) -> list[Any]:
        given, seen = StorageGroup(rank, 2, "first-start"), []
        for number in range(3):
            storage = LocalStorage(tmp_path)
            options: dict[str, Any] = {"rank_timeout_seconds": SHORT_SECONDS}
            if rank == number:
                given.open(storage, **options).close()
            group = given.open(storage, **options)
            seen.append(exchange(group, "call", lambda: b"%d" % rank, joined))
            group.close()
        return seen

    assert in_threads(2, run) == [[b"0,1"] * 3] * 2
    assert list((tmp_path / "group").iterdir()) == []


def attempt(port: int, ends: list[str]) -> Any:
    """Meet as the workers of one attempt of torchrun do, at the store of its agent; a rank may end before or after."""
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the back-end

    from ckptstore.group.torch_board import open_torch_group

    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
    dist.init_process_group("fake", store=store, rank=rank, world_size=2)  # gloo meets at dead addresses now and then
    if ends[rank] == "at once":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group = open_torch_group(rank_timeout_seconds=1 if "at once" in ends else PATIENCE_SECONDS)
        return exchange(group, "call", lambda: b"%d" % rank, joined), summed(1, over=group.process_group)
    except RankTimeout as error:
        return error.ranks
    finally:
        if ends[rank] == "without a word":
            os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_meet_again_where_dead_processes_left_their_keys() -> None:
    import torch.distributed as dist

    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(*ends: str) -> list[Any]:
        killed = [rank for rank, end in enumerate(ends) if end != "well"]
        return forked_ranks.run_ranks(2, attempt, agent.port, list(ends), expect_killed=killed)

    start("without a word", "without a word")
    assert start("at once", "well")[1] == (0,)
    assert start("well", "at once")[0] == (1,)
    assert start("well", "well") == [(b"0,1", 2)] * 2


def summed(value: float, over: Any = None) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor, group=over)
    return tensor.item()


def our_keys() -> list[str]:
    from ckptstore.runtime.torch_private import default_store

    keys = [key for key in default_store().list_keys() if "ckptstore/" in key]
    return [key for key in keys if not key.endswith(("/drawn", "/admitted"))]  # two counters that never go back


def beside_training(group: Group) -> list[bytes]:
    """Exchanges on a thread, while the main thread goes on with collectives of the training's own group."""
    trained = threading.Event()
    results: list[bytes] = []

    def work() -> bytes:
        assert trained.wait(PATIENCE_SECONDS)
        return b"%d" % group.rank

    def run() -> None:
        results.extend(exchange(group, f"background {n}", work, joined) for n in range(20))

    thread = threading.Thread(target=run)
    thread.start()
    num_sums, num_alive = 0, 4.0
    while num_alive:
        num_sums += 1
        if num_sums == 20:
            trained.set()
        num_alive = summed(thread.is_alive())
    return results


def in_a_pair(storage: LocalStorage, config: StoreConfig) -> Any:
    """A store of two of the four ranks: the others do not take part at all."""
    import torch.distributed as dist

    pair = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return error_of(lambda: find_group(pair, storage=storage, config=config))[0]
    group = find_group(pair, storage=storage, config=config)
    told = exchange(group, "pair", lambda: b"%d" % dist.get_rank(), joined)
    result = group.rank, group.world_size, told, summed(1, over=group.process_group)
    group.close()
    return result


def test_ranks_agree_through_torch_and_dead_ones_are_named(tmp_path: Path) -> None:
    ends = forked_ranks.run_ranks(4, through_torch, tmp_path / "store", expect_killed=[0, 2])
    everybody = ends[1][0]
    pairs = [seen.pop("pair") for seen, _ in everybody]
    check_scenes([seen for seen, _ in everybody])
    assert everybody[0][0]["gloo sum"] == 4
    assert everybody[0][0]["beside training"] == [b"0,1,2,3"] * 20
    assert pairs == [InvalidInput, (0, 2, b"1,3", 2), InvalidInput, (1, 2, b"1,3", 2)]
    for num_open, num_left in (keys for _, keys in everybody):
        assert 0 < num_open < 30  # the last call of each lane, signs of life and claims, not all of the calls
        assert num_left == 0
    check_deaths([end and end[1] for end in ends])
