"""Shared reads: one rank reads what every rank wants, and broadcasts it to the others.

Nothing else is shared: a range that only some ranks want is read by each of those.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from ckptstore.errors import InvalidInput
from ckptstore.group import Group
from ckptstore.runtime.beat import beat
from ckptstore.state.read.read_plan import Read, Step, grouped, run_steps
from ckptstore.transfer import RangeRead

_PIECE_BYTES = 32 << 20
"""The most that one broadcast sends."""

Place = tuple[str, int, int]


class SharedSteps:
    """Runs the steps of all ranks together. Collective: every rank must call it equally often."""

    def __init__(self, group: Group) -> None:
        """Raise InvalidInput when the ranks have no process group to broadcast in."""
        self._group = group
        self._process_group: Any = getattr(group, "process_group", None)
        if self._process_group is None and group.world_size > 1:
            raise InvalidInput(
                'read_once="job" sends bytes from rank to rank, and the group of this store has no process group',
                hint='Initialise torch.distributed, or use read_once="node"',
            )

    def __call__(self, steps: Iterable[Step], read: Read, buffer_bytes: int) -> None:
        if self._group.world_size == 1:
            run_steps(list(steps), read, buffer_bytes)
            return
        own, common = self._wanted_by_all(steps)
        by_place: dict[Place, list[Step]] = {}
        for step in own:
            by_place.setdefault(_place(step), []).append(step)
        for wave in grouped(common, itemgetter(2), buffer_bytes):
            self._share(wave, by_place, read)
        taken = set(common)

        with self._group.meeting("read the rest"):
            run_steps((step for step in own if _place(step) not in taken), read, buffer_bytes)

    def _wanted_by_all(self, steps: Iterable[Step]) -> tuple[list[Step], list[Place]]:
        """Return the steps of this rank, and the places that every rank reads."""
        with self._group.meeting("ranges") as meeting:
            own = list(steps)
            wanted = meeting.gather(_packed({_place(step) for step in own}))
            common = meeting.tell(lambda: _packed(set.intersection(*map(_unpacked, wanted))))
        return own, sorted(_unpacked(common))

    def _share(self, wave: Sequence[Place], by_place: Mapping[Place, Sequence[Step]], read: Read) -> None:
        """Read this rank's share of a wave. When all ranks have read theirs, broadcast everything to all."""
        owners = _owners(wave, self._group.world_size)
        with self._group.meeting("read shares"):
            held = [by_place[place][0].range_read() for place in wave]
            read([item for (item, _), owner in zip(held, owners, strict=True) if owner == self._group.rank])
        failure: Exception | None = None
        with self._group.meeting("share"):  # so that a rank that dies is named
            for place, (item, buffer), owner in zip(wave, held, owners, strict=True):
                self._broadcast(item.views, owner)
                try:
                    _finish(by_place[place], item, buffer)
                except Exception as error:  # after the last broadcast, for which all others wait
                    failure = failure or error
            if failure is not None:
                raise failure

    def _broadcast(self, views: Sequence[memoryview], owner: int) -> None:
        """Send what lies in these views of the owner to those of all others, whose borders may be other ones."""
        source = dist.get_global_rank(self._process_group, owner)
        for start in range(0, sum(map(len, views)), _PIECE_BYTES):
            parts = _between(views, start, start + _PIECE_BYTES)
            piece = parts[0] if len(parts) == 1 else memoryview(bytearray().join(parts))
            dist.broadcast(torch.frombuffer(piece, dtype=torch.uint8), source, group=self._process_group)
            beat()
            if len(parts) > 1 and owner != self._group.rank:
                _fill(parts, [piece])


def _finish(steps: Sequence[Step], item: RangeRead, buffer: Any) -> None:
    """Finish the first step with what was read for it, and the others, which want the same bytes, with copies."""
    first, *others = steps
    for other in others:
        copied, memory = other.range_read()
        _fill(copied.views, item.views)
        other.finish(memory)
    first.finish(buffer)


def _between(views: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return the parts of views, which follow each other, from one byte of them all to another."""
    found, at = list[memoryview](), 0
    for view in views:
        if part := view[max(0, start - at) : max(0, stop - at)]:
            found.append(part)
        at += len(view)
    return found


def _fill(views: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """Copy bytes from views to others of the same size together."""
    at = 0
    for view in views:
        done = 0
        for part in _between(sources, at, at + len(view)):
            view[done : done + len(part)] = part
            done += len(part)
        at += len(view)


def _place(step: Step) -> Place:
    return step.key, step.offset, step.size_bytes


def _packed(places: set[Place]) -> bytes:
    return zlib.compress(json.dumps(sorted(places)).encode(), 1)


def _unpacked(data: bytes) -> set[Place]:
    return {(key, offset, size_bytes) for key, offset, size_bytes in json.loads(zlib.decompress(data))}


def _owners(wave: Sequence[Place], world_size: int) -> list[int]:
    """Return the reader of each place, so that all read about the same number of bytes; the same on every rank."""
    loads = [0] * world_size
    owners = [0] * len(wave)
    for index in sorted(range(len(wave)), key=lambda index: -wave[index][2]):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += wave[index][2]
    return owners
