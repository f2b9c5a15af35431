"""A loader over a dataset with a length, whose position is one number for all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ckptstore.errors import InvalidInput, StateMismatch
from ckptstore.integrations.loaders.counting import CountingLoader, check_options
from ckptstore.state.live.dataset_digest import digests_of, warn_of_other_data

_OWN = {
    "sampler": "it makes its own order; see shuffle and seed",
    "batch_sampler": "it makes its own batches; see batch_size and drop_last",
    "generator": "give it a seed",
    "in_order": "its position counts batches in their order, and would stand for others",
}


def rank_batches(size: int, start: int, batch_size: int, place: tuple[int, int], *, drop_last: bool) -> Iterator[range]:
    """Yield the batches of one rank, as positions in an order of `size` samples, from the position that all ranks have.

    `place` is the rank and the number of ranks, which get every n-th position. All ranks get equally many batches of
    the same sizes. Where the last samples do not suffice for that, positions go on behind the end, up to n - 1 of them.
    """
    rank, world_size = place
    step = batch_size * world_size
    for first in range(start, size, step):
        count = min(step, size - first)
        if count < step and drop_last:
            return
        yield range(first + rank, first + count + -count % world_size, world_size)


class MapLoader(CountingLoader):
    """torch's DataLoader over a dataset with a length, which any number of ranks can resume in the middle of an epoch.

    The state is the epoch and how many samples of it all ranks together have been given; it is the same on all ranks,
    and stored once. All ranks have to take equally many batches between two saves. The ranks that go on share what is
    left of the same order, also with another batch size. In an epoch each sample comes exactly once, whatever numbers
    of ranks it was trained on. But at its end up to n - 1 samples come twice, for n ranks at that time; or, with
    `drop_last`, those that do not fill a batch on all ranks are left out.

    The order of an epoch, and how it is dealt out, are those of torch's DistributedSampler with the same seed.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        """Make a loader that begins epoch 0.

        Args:
            dataset: has a length, and samples by number.
            batch_size: the samples of one batch on one rank.
            shuffle: a new order in each epoch, from the seed and the number of the epoch; else that of the dataset.
            seed: the same on all ranks.
            drop_last: leave out the last samples of an epoch if they do not fill a batch on all ranks.
            rank: of this process among those that have samples of their own: its data-parallel rank, where tensor or
                pipeline parallelism has others. Left out, it is the one of torch.distributed.
            world_size: the number of those ranks.
            options: those of torch's DataLoader, such as `num_workers`.

        Raises InvalidInput for a dataset without a length or samples, for one that gives no batch at all, and for
        options that decide the order.
        """
        check_options(options, _OWN)
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise InvalidInput(
                f"a {type(dataset).__name__} has no samples by number",
                hint="Use ckptstore.integrations.loaders.StreamLoader, if its parts can be read from a position on",
            )
        super().__init__(batch_size, seed=seed, rank=rank, world_size=world_size)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.dataset, self._size, self._consumed = dataset, len(dataset), 0
        self._digests = digests_of(dataset)
        if not len(self):
            raise InvalidInput(
                f"{self._size} samples make no batch of {batch_size} on {self.world_size} ranks",
                hint="Leave out drop_last, or make batches smaller" if self._size else "Give it a dataset with samples",
            )
        self._loader = DataLoader(dataset, batch_sampler=_Batches(self), generator=self._generator, **options)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this number of ranks."""
        return self._batches_of(self._size)

    def batches_left(self) -> int:
        """Return the number of batches that each rank has left in the epoch."""
        return self._batches_of(self._size - self._consumed)

    @property
    def sampler(self) -> _Epochs:
        """Return what trainers tell the number of the epoch, as they tell torch's DistributedSampler."""
        return _Epochs(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the samples of it that all ranks together were given, and what decides their order."""
        names = {"dataset_size": self._size, "shuffle": self.shuffle, "seed": self.seed}
        return {"epoch": self.epoch, "consumed": self._consumed, **names, "data": dict(self._digests)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position. Raises StateMismatch for one in data of another length or in another order. Warns of one in
        data with other samples, as far as the dataset holds them in memory."""
        self._check_state(state)
        warn_of_other_data(state.get("data", {}), self._digests)
        epoch, consumed = state["epoch"], state["consumed"]
        if type(epoch) is not int or type(consumed) is not int or epoch < 0 or not 0 <= consumed <= self._size:
            raise StateMismatch(f"{consumed!r} samples of epoch {epoch!r} are no position in {self._size} samples")
        self._loaded(state)
        self._consumed = consumed

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go to the position that all ranks of the save had. Raises StateMismatch if they were at different ones."""
        if any(_position(state) != _position(states[0]) for state in states):
            shown = sorted({f"{state.get('consumed')!r} of epoch {state.get('epoch')!r}" for state in states})
            raise StateMismatch(
                f"the {len(states)} ranks that saved were at different positions: {', '.join(shown)}",
                hint='Resume on as many ranks as saved; or, by per_rank= for its key, take one rank\'s with "first" '
                'or begin the epoch anew with "skip"',
            )
        self.load_state_dict(states[0])

    def _batches_of(self, samples: int) -> int:
        step = self.batch_size * self.world_size
        return samples // step if self.drop_last else -(-samples // step)

    def _fixed(self) -> tuple[str, ...]:
        return ("dataset_size", "shuffle", "seed")

    def _place(self) -> int:
        return self._consumed

    def _has_more(self) -> bool:
        return self.batches_left() > 0

    def _begin(self, epoch: int) -> None:
        self.epoch, self._consumed = epoch, 0

    def _batches(self) -> Iterator[Any]:
        yield from self._loader

    def _counted(self, batch: Any) -> Any:
        self._consumed = min(self._consumed + self.batch_size * self.world_size, self._size)
        return batch

    def left(self) -> Iterator[list[int]]:
        """Yield the numbers of the samples that this rank has left in the epoch, by batches."""
        order = None
        if self.shuffle:
            order = torch.randperm(self._size, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        place = self.rank, self.world_size
        for batch in rank_batches(self._size, self._consumed, self.batch_size, place, drop_last=self.drop_last):
            positions = [position % self._size for position in batch]
            yield positions if order is None else order[positions].tolist()


def _position(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all ranks have to have alike: not what their data sets hold, which may be drawn on each rank."""
    return {name: item for name, item in state.items() if name != "data"}


class _Epochs:
    """Takes a loader on to the epoch of a trainer, and never back: a position that was resumed is the loader's own."""

    def __init__(self, loader: MapLoader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a later epoch."""
        if epoch > self._loader.epoch:
            self._loader.set_epoch(epoch)


class _Batches:
    """The batches that a loader has left, as torch's DataLoader asks for them at the beginning of each pass."""

    def __init__(self, loader: MapLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.left()

    def __len__(self) -> int:
        return len(self._loader)
