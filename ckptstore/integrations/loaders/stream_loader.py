"""A loader over streams, which are read in order: its position is one number for each stream."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from ckptstore.errors import InvalidInput, StateMismatch
from ckptstore.integrations.loaders.counting import CountingLoader, check_options

logger = logging.getLogger("ckptstore")

FINISHED = "finished"
"""The position behind the last sample of a stream."""
Position = int | str
"""The number of samples of a stream that the loop was given, or FINISHED."""

_OWN = {
    "sampler": "streams are read in order",
    "batch_sampler": "streams are read in order",
    "generator": "give it a seed",
    "persistent_workers": "workers start with the position of each pass",
}


class StreamLoader(CountingLoader):
    """torch's DataLoader over streams, such as files or shards of WebDataset, which any number of ranks can resume.

    Each rank, and each of its workers, reads streams of its own, one after the other. The state of a rank is the number
    of samples of each of its streams that its loop was given. All ranks save theirs. The ranks that go on, be they more
    or fewer, share the streams that are not finished, each from its position on: in an epoch each sample comes exactly
    once.

    Ranks reach the ends of their streams at different times. When the first one has no batch left, end the epoch on
    all: `break`, and `set_epoch(loader.epoch + 1)` on the others; a sample that is left then is not trained on in that
    epoch. A save in which some ranks have ended the epoch, and begun nothing of the next, can be resumed by any
    number; one in which ranks are in different epochs only by as many.
    """

    def __init__(
        self,
        streams: Sequence[str],
        read: Callable[[str, int], Iterable[Any]],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        """Make a loader that begins epoch 0.

        Args:
            streams: their names, the same on all ranks, in any order; at least as many as ranks.
            read: gives the samples of a stream from a number on, in an order that never changes: sample n is the same
                one each time. It runs in the workers, so it can be pickled where workers are spawned.
            batch_size: the samples of one batch, which may be of several streams.
            shuffle: deal the streams out in a new order in each epoch; the order in a stream is that of `read`.
            seed: the same on all ranks.
            rank: of this process among those that have samples of their own: its data-parallel rank, where tensor or
                pipeline parallelism has others. Left out, it is the one of torch.distributed.
            world_size: the number of those ranks.
            options: those of torch's DataLoader, such as `num_workers` and `drop_last`. With `drop_last` what is left
                out is not counted, until the epoch ends.

        Raises InvalidInput for streams that are not names, come twice or are fewer than the ranks, and for options that
        decide the order.
        """
        check_options(options, _OWN)
        super().__init__(batch_size, seed=seed, rank=rank, world_size=world_size)
        if isinstance(streams, str) or not all(isinstance(name, str) for name in streams):
            raise InvalidInput("streams is a list of names, which are text")
        self._streams, self._read, self.shuffle = sorted(streams), read, bool(shuffle)
        twice = [name for name, following in zip(self._streams, self._streams[1:], strict=False) if name == following]
        if twice:
            raise InvalidInput(f"the stream {twice[0]!r} comes twice")
        if len(self._streams) < self.world_size:
            raise InvalidInput(
                f"{len(self._streams)} streams cannot be divided among {self.world_size} ranks",
                hint="Cut the data into more streams, or use MapLoader, which divides samples",
            )
        collate = _Counted(options.pop("collate_fn", None) or default_collate)
        self._options = {**options, "collate_fn": collate, "generator": self._generator}
        self._digest = hashlib.sha256("\n".join(self._streams).encode()).hexdigest()[:16]
        self._worker_count = options.get("num_workers", 0) or 1
        self._positions: dict[str, Position] = {}
        self._turn = 0
        self._begin(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, how far each stream of this rank was given to the loop, and what decides who has which."""
        names = {"streams": self._digest, "shuffle": self.shuffle, "seed": self.seed}
        place = {"rank": self.rank, "world_size": self.world_size}
        return {"epoch": self.epoch, "positions": dict(self._positions), "turn": self._turn, **names, **place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to this rank's position of the same number of ranks. Raises StateMismatch for another place or other
        streams."""
        self._check_state(state)
        place = state["rank"], state["world_size"]
        if place != (self.rank, self.world_size):
            raise StateMismatch(
                f"it was saved by rank {place[0]} of {place[1]}, and is rank {self.rank} of {self.world_size} now",
                hint="load_rank_states takes the states of all ranks, and divides them anew",
            )
        self._loaded(state)
        self._positions, self._turn = dict(state["positions"]), state.get("turn", 0)

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go to what is left by the states of all ranks that saved, of which this rank takes its share. Raises
        StateMismatch if a stream is in none of them, and if they are in different epochs, but for ranks that have
        ended the epoch and begun nothing of the next."""
        for state in states:
            self._check_state(state)
        epoch = min(state["epoch"] for state in states)
        under_way = [state for state in states if state["epoch"] == epoch]
        ended = [state for state in states if state["epoch"] == epoch + 1 and not any(state["positions"].values())]
        if len(under_way) + len(ended) < len(states):
            epochs = sorted({state["epoch"] for state in states})
            raise StateMismatch(
                f"the {len(states)} ranks that saved were in the epochs {', '.join(map(str, epochs))}",
                hint="Resume on as many ranks as saved, and end epochs on all of them together; or take another "
                'checkpoint; or begin an epoch anew with per_rank= "skip" for its key',
            )
        found: dict[str, Position] = dict.fromkeys(self._streams, FINISHED) if ended else {}
        for state in under_way:
            found |= state["positions"]
        lost = [name for name in self._streams if name not in found]
        if lost:
            raise StateMismatch(
                f"no rank that saved had the stream {lost[0]!r}, nor {len(lost) - 1} more",
                hint='Begin the epoch anew with per_rank= "skip" for its key',
            )
        self._loaded(under_way[0])
        self._deal(found)
        if self._positions and all(position == FINISHED for position in self._positions.values()):
            logger.warning(
                "rank %d of %d has no stream left in epoch %d: fewer are unfinished than there are ranks. End the "
                "epoch on all ranks",
                *(self.rank, self.world_size, self.epoch),
            )

    def _fixed(self) -> tuple[str, ...]:
        return ("streams", "shuffle", "seed")

    def _place(self) -> int:
        return sum(position for position in self._positions.values() if isinstance(position, int))

    def _has_more(self) -> bool:
        return any(position != FINISHED for position in self._positions.values())

    def _begin(self, epoch: int) -> None:
        self.epoch, self._turn = epoch, 0
        self._deal(dict.fromkeys(self._streams, 0))

    def _deal(self, positions: Mapping[str, Position]) -> None:
        """Take this rank's share of all streams: of those that are not finished, and of the others, to save them."""
        names = self._streams
        if self.shuffle:
            order = torch.randperm(len(names), generator=torch.Generator().manual_seed(self.seed + self.epoch))
            names = [names[index] for index in order.tolist()]
        left = [name for name in names if positions[name] != FINISHED]
        done = [name for name in names if positions[name] == FINISHED]
        mine = [*left[self.rank :: self.world_size], *done[self.rank :: self.world_size]]
        self._positions = {name: positions[name] for name in mine}

    def _batches(self) -> Iterator[Any]:
        streams = _Streams([*self._positions.items()], self._turn, self._read)
        yield from DataLoader(streams, batch_size=self.batch_size, **self._options)

    def _counted(self, batch: Any) -> Any:
        positions, collated = batch
        self._positions.update(positions)
        # Workers give batches in turn: that the next one is not the first goes into the state.
        self._turn = ([*self._positions].index(next(iter(positions))) + 1) % self._worker_count
        return collated


class _Streams(IterableDataset[tuple[dict[str, Position], Any]]):
    """The samples of streams, each with the positions behind it. Workers share the streams, those that are finished
    too: each has the same ones throughout an epoch. The one with the first turn begins."""

    def __init__(
        self, streams: Sequence[tuple[str, Position]], turn: int, read: Callable[[str, int], Iterable[Any]]
    ) -> None:
        self._streams, self._turn, self._read = streams, turn, read

    def __iter__(self) -> Iterator[tuple[dict[str, Position], Any]]:
        worker = get_worker_info()
        number, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        held: tuple[str, int, Any] | None = None  # read one sample ahead: the last one says that its stream is finished
        finished: dict[str, Position] = {}
        for name, start in self._streams[(number + self._turn) % step :: step]:
            if not isinstance(start, int):
                continue
            for count, sample in enumerate(self._read(name, start), start + 1):
                if held is not None:
                    yield {held[0]: held[1], **finished}, held[2]
                    finished = {}
                held = name, count, sample
            finished[name] = FINISHED  # one without samples too
        if held is not None:
            yield {held[0]: held[1], **finished}, held[2]


class _Counted:
    """Collate samples, and keep how far they lead in their streams: what comes out of the loader says what it counts
    as, however far workers are ahead."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[tuple[dict[str, Position], Any]]) -> tuple[dict[str, Position], Any]:
        positions = {name: position for behind, _ in samples for name, position in behind.items()}
        return positions, self._collate([sample for _, sample in samples])
