"""A state to S3 and back, against DCP through s3fs and through s3torchconnector; and what latency costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from s3_contest import LATENCY_SECONDS, ROOT, Server, contest, serving
from s3_peers import (
    Body,
    load_with_connector,
    load_with_fsspec,
    missing_peers,
    raw_puts,
    save_with_connector,
    save_with_fsspec,
)
from states import assert_equal, empty_like, even_state, size_of
from told import CLOCK
from versus import FULL

from ckptstore import CheckpointStore, open_store

MIB = 1 << 20
TOTAL_BYTES = (1 << 30) if FULL else (32 << 20)
CONNECTOR = not missing_peers("s3torchconnector")

pytestmark = pytest.mark.benchmark(timer=CLOCK)


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")  # s3torchconnector takes none from its caller
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")


@pytest.fixture
def server(credentials: None) -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def sink(credentials: None) -> Iterator[Server]:
    """A server that takes everything and keeps nothing."""
    with serving(keeps_bodies=False) as server:
        yield server


class Saves:
    """Each save goes to a place where nothing is. A job opens its store once: that is not timed."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.stores: dict[str, CheckpointStore] = {}

    def clear(self) -> None:
        self.close()
        self.server.clear()
        for engine in ("obstore", "fsspec"):
            uri, options = f"{ROOT}/{engine}", self.server.storage_options
            self.stores[engine] = open_store(uri, storage_options=options, engine=engine)
            self.stores[engine].save(0, {"epoch": 0})

    def close(self) -> None:
        while self.stores:
            self.stores.popitem()[1].close()


def test_save(benchmark: Any, sink: Server) -> None:
    """That what was saved can be loaded is seen below."""
    torch.manual_seed(0)
    state, saves = even_state(TOTAL_BYTES), Saves(sink)
    bodies: dict[str, Body] = {
        "ckptstore": lambda: saves.stores["obstore"].save(1, state),
        "ckptstore, fsspec": lambda: saves.stores["fsspec"].save(1, state),
        "DCP, s3fs": partial(save_with_fsspec, state, f"{ROOT}/dcp", sink),
    }
    bodies["raw, tensors over plain sockets"] = partial(raw_puts, state, "bench/root/raw", sink)
    for threads in (1, 4) if CONNECTOR else ():
        save = partial(save_with_connector, state, f"{ROOT}/connector", sink, num_threads=threads)
        bodies[f"DCP, s3torchconnector, {threads} threads"] = save
    contest(
        benchmark,
        bodies,
        size_bytes=size_of(state),
        prepare=saves.clear,
        left_out=missing_peers("s3torchconnector"),
    )
    saves.close()


@pytest.mark.parametrize("tensor_bytes", [16 * MIB, MIB], ids=["16MiB", "1MiB"])
def test_load(benchmark: Any, server: Server, tensor_bytes: int) -> None:
    torch.manual_seed(0)
    state = even_state(TOTAL_BYTES if tensor_bytes > MIB else TOTAL_BYTES // 4, tensor_bytes)
    target = empty_like(state)
    options = {"storage_options": server.storage_options}
    save_with_fsspec(state, f"{ROOT}/dcp", server)
    with (
        open_store(f"{ROOT}/store", **options, engine="obstore") as store,
        open_store(f"{ROOT}/store", **options, engine="fsspec") as other,
    ):
        store.save(1, state)
        bodies: dict[str, Body] = {
            "ckptstore": lambda: store.load(target),
            "ckptstore, fsspec": lambda: other.load(target),
            "DCP, s3fs": partial(load_with_fsspec, target, f"{ROOT}/dcp", server),
        }
        for by_ranges in (False, True) if CONNECTOR else ():
            how = "by ranges" if by_ranges else "sequential"
            load = partial(load_with_connector, target, f"{ROOT}/dcp", server, by_ranges=by_ranges)
            bodies[f"DCP, s3torchconnector, {how}"] = load
        contest(benchmark, bodies, size_bytes=size_of(state), left_out=missing_peers("s3torchconnector"))
        for tensor in target.values():
            tensor.zero_()
        store.load(target)
    assert_equal(target, state)


def late_and_not(server: Server, body: Body) -> dict[str, Body]:
    """The peer is ckptstore itself without the latency: a ratio of 0.8 means that 0.8 of the throughput is left."""
    return {f"ckptstore, {LATENCY_SECONDS} s more for each request": server.late(body), "ckptstore without": body}


@pytest.mark.parametrize("times", [1, 4])
def test_latency_of_save(benchmark: Any, sink: Server, times: int) -> None:
    """Nine requests of a save wait for each other, whatever its size."""
    torch.manual_seed(0)
    state, saves = even_state(TOTAL_BYTES * times), Saves(sink)
    bodies = late_and_not(sink, lambda: saves.stores["obstore"].save(1, state))
    contest(benchmark, bodies, size_bytes=size_of(state), prepare=saves.clear)
    saves.close()


def test_latency_of_load(benchmark: Any, server: Server) -> None:
    torch.manual_seed(0)
    state = even_state(TOTAL_BYTES)
    target = empty_like(state)
    with open_store(f"{ROOT}/store", storage_options=server.storage_options, engine="obstore") as store:
        store.save(1, state)
        contest(benchmark, late_and_not(server, lambda: store.load(target)), size_bytes=size_of(state))
    assert_equal(target, state)
