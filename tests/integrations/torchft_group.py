"""One replica group of torchft, of one process, that trains with another one on the same store."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]

import ckptstore
from ckptstore.integrations.loaders import MapLoader

SAVE_EVERY = 3
BATCH_SIZE = 4


class Dealer:
    """Deals the samples of one long epoch to the groups of each step: the manager knows how many batches were trained
    on, by all groups together."""

    def __init__(self, manager: Any, samples: Any) -> None:
        self._manager, self._samples = manager, samples
        self._next: tuple[int, int, int] | None = None

    def batch(self) -> Any:
        """Return the batch of this group; call it between the start of a step's quorum and its end."""
        manager = self._manager
        number, count = manager.participating_rank() or 0, manager.num_participants()  # None: it does not count
        now = number, count, manager.batches_committed()
        if now != self._next:  # another group came or went, or a step was not committed
            loader = MapLoader(self._samples, BATCH_SIZE, rank=number, world_size=count)
            loader.load_state_dict({**loader.state_dict(), "consumed": now[2] * BATCH_SIZE})
            self._batches = iter(loader)
        self._next = number, count, now[2] + count
        return next(self._batches)


def main(group: str, directory: str, lighthouse: str) -> None:
    """Train to the step that a file says, and print what happens: a word, the step, and what belongs to it."""
    last = Path(f"{directory}-last")
    torch.set_num_threads(1)
    torch.manual_seed(int(group))  # the groups begin with other weights
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    net = torch.nn.Linear(4, 2)
    inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def take(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    seconds = timedelta(seconds=20)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=seconds),
        load_state_dict=take,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"group{group}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=own.port,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        timeout=seconds,
        quorum_timeout=seconds,
    )
    state = {"model": net, "optimizer": inner, "torchft": manager}
    try:
        with ckptstore.open_store(directory) as store:
            store.load(state)
    except ckptstore.StoreMissing:
        pass
    print("begins", manager.current_step(), flush=True)
    model, optimizer, saver = DistributedDataParallel(manager, net), Optimizer(manager, inner), None
    dealer = Dealer(manager, range(100_000))
    while not last.exists() or manager.current_step() < int(last.read_text()):
        optimizer.zero_grad()
        batch, before = dealer.batch(), manager.current_step()
        model(batch.float().view(-1, 1).expand(-1, 4) / 100_000).square().sum().backward()
        optimizer.step()
        step, number = manager.current_step(), manager.participating_rank()
        dealt = ",".join(map(str, batch.tolist())) if number is not None and step == before + 1 else "nothing"
        print("step", step, manager.num_participants(), number, repr(net.weight.sum().item()), dealt, flush=True)
        if number != 0 and saver is not None:
            saver = saver.close()
        if number == 0 and step % SAVE_EVERY == 0:
            saver = saver or ckptstore.open_store(directory)  # its first save shuts out the group that saved before
            saver.save(step, state)
            print("saved", step, flush=True)
        time.sleep(0.2)
    manager.shutdown(wait=False)
    os._exit(0)  # its threads do not end


if __name__ == "__main__":
    main(*sys.argv[1:])
