"""A board in an actor of Ray, for the workers of a run that have no process group: their messages cost the storage
nothing.

The worker that comes first makes the actor. It ends with that worker, and Ray ends all workers of a start together.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ckptstore.errors import RankTimeout
from ckptstore.group import BoardGroup
from ckptstore.group.life import LEFT
from ckptstore.integrations.ray.context import Worker

_LAST_SIGN = 1 << 62

_opened: Counter[str] = Counter()
"""How often this process has joined a group of a name: all ranks join in the same order."""
_actors: dict[str, Any] = {}
_lock = threading.Lock()


def open_ray_group(
    worker: Worker, name: str, *, rank_timeout_seconds: float, ranks: Sequence[int] | None = None
) -> BoardGroup:
    """The group of this worker with `ranks`, all of them by default, which join it under the same name as often."""
    ranks = range(worker.world_size) if ranks is None else ranks
    start = start_token()
    with _lock:
        _opened[name] += 1
        joined = f"{start}/{name}/{_opened[name]}"
    return BoardGroup(
        RayBoard(start, prefix=joined, world_size=len(ranks), timeout_seconds=rank_timeout_seconds),
        rank=ranks.index(worker.rank),
        world_size=len(ranks),
        rank_timeout_seconds=rank_timeout_seconds,
        start_token=hashlib.sha256(joined.encode()).hexdigest()[:32],
        node=worker.node_id,
    )


def _actor_of(start: str) -> Any:
    """The actor of a start. It ends with the last handle in the process that made it, so each process keeps its own."""
    import ray

    with _lock:
        if start not in _actors:
            actor: Any = ray.remote(num_cpus=0)(MessageActor)
            options = {"name": f"ckptstore-{start}", "get_if_exists": True, "scheduling_strategy": "DEFAULT"}
            _actors[start] = actor.options(**options).remote()
        return _actors[start]


def start_token() -> str:
    """Equal on all workers, new for every start of them: they share one actor of Ray's that is made with them."""
    from ray.train.v2._internal.execution.context import get_train_context

    context: Any = get_train_context()
    return str(context.get_synchronization_actor()._actor_id.hex())


class MessageActor:
    """What lies on the boards of one start of the workers. Ray calls one method at a time."""

    def __init__(self) -> None:
        self._messages: dict[str, bytes] = {}
        self._signs: Counter[str] = Counter()

    def post(self, key: str, data: bytes) -> bytes | None:
        """See `Board.post`."""
        there = self._messages.setdefault(key, data)
        return None if there == data else there

    def fetch(self, keys: Sequence[str]) -> dict[str, bytes]:
        """See `Board.fetch`."""
        return {key: self._messages[key] for key in keys if key in self._messages}

    def remove(self, keys: Sequence[str]) -> None:
        """See `Board.remove`."""
        for key in keys:
            self._messages.pop(key, None)
            self._signs.pop(key, None)

    def give_sign(self, key: str, last: bool) -> None:
        """See `Board.give_sign`."""
        self._signs[key] += _LAST_SIGN if last else 1

    def signs(self, keys: Sequence[str]) -> dict[str, int]:
        """How often each key was given a sign; without those never given."""
        return {key: self._signs[key] for key in keys if key in self._signs}


class RayBoard:
    """A `Board` below one prefix of the actor of a start."""

    hint = (
        "Look for its process and its log. Collective calls are made by every worker; one that reads alone gives "
        "group='solo'"
    )
    shortest_poll_seconds = 0.005
    fan_in: int | None = None

    def __init__(self, start: str, *, prefix: str, world_size: int, timeout_seconds: float) -> None:
        self.longest_poll_seconds = max(0.25, world_size / 1024)  # all ranks together: some 1,000 requests a second
        self._prefix = f"{prefix}/"
        self._timeout_seconds = timeout_seconds
        self._actor = _actor_of(start)

    def post(self, key: str, data: bytes) -> bytes | None:
        """See `Board.post`."""
        there: bytes | None = self._asked("post", self._prefix + key, data)
        return there

    def fetch(self, keys: Sequence[str]) -> dict[str, bytes]:
        """See `Board.fetch`."""
        return self._short(self._asked("fetch", self._long(keys)))

    def hasty(self) -> RayBoard:
        """See `Board.hasty`. Nothing is tried twice here."""
        return self

    def remove(self, keys: Sequence[str]) -> None:
        """See `Board.remove`."""
        if keys:
            self._actor.remove.remote(self._long(keys))

    def give_sign(self, key: str, *, last: bool = False) -> None:
        """See `Board.give_sign`."""
        self._asked("give_sign", self._prefix + key, last)

    def signs(self, keys: Sequence[str]) -> Mapping[str, Hashable]:
        """See `Board.signs`."""
        counts = self._short(self._asked("signs", self._long(keys)))
        return {key: LEFT if count >= _LAST_SIGN else count for key, count in counts.items()}

    def close(self, *, emptied: bool) -> None:
        """See `Board.close`. The actor serves the other groups of this start."""

    def _long(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]

    def _short(self, found: Mapping[str, Any]) -> dict[str, Any]:
        return {key.removeprefix(self._prefix): value for key, value in found.items()}

    def _asked(self, method: str, *arguments: Any) -> Any:
        import ray

        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=self._timeout_seconds)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise RankTimeout(
                f"The actor with the messages of the workers is not reached any more: {type(error).__name__}",
                committed=None,
                hint="It ends with the worker that made it: look at the logs of the workers and of Ray",
            ) from error
