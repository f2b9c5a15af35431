"""A board in the key-value store of torch.distributed, for ranks that have initialised it.

No collective of the training's process group is used once the group is open, so it works beside NCCL and on any
thread. The store takes at most 8 MiB in one value: larger messages are cut into parts.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from ckptstore.errors import GroupMissing, InvalidInput, RankTimeout
from ckptstore.group.base import LEADER, new_start_token
from ckptstore.group.board_group import EVERY_RANK, BoardGroup
from ckptstore.group.caller import Caller
from ckptstore.group.life import LEFT, Pace
from ckptstore.runtime.torch_private import cloned, default_store, uncounted_group

logger = logging.getLogger("ckptstore.group")

T = TypeVar("T")

_INLINE_BYTES = 1 << 20
_PART_BYTES = 4 << 20
_PLAIN, _CUT = b"=", b"/"
_FETCHED_AT_ONCE = 64
_POSTS_KEY = "posts"
_LAST_SIGN = 1 << 40
_LEAST_GLOO_SECONDS = 60.0
_CONNECT_SECONDS = 10.0
"""The longest time that a second connection to the store may take."""
_DRAWN_KEY, _ADMITTED_KEY = "drawn", "admitted"


class TorchGroup(BoardGroup):
    """The ranks of a process group. `process_group` is a separate gloo group of the same ranks."""

    process_group: Any = None
    notice: Notice | None = None
    """The place where this rank has announced the address of the store that it serves; None if it serves none."""

    def close(self) -> None:
        """See `Group.close`."""
        super().close()
        if self.notice is not None:
            try:
                self.notice.withdraw()
            except Exception as error:  # another library's
                logger.debug("the address of a group stays: %s", error)
        process_group, self.process_group = self.process_group, None
        if process_group is not None and dist.is_initialized():
            try:
                dist.destroy_process_group(process_group)
            except (RuntimeError, ValueError, AssertionError) as error:
                logger.debug("the gloo group stays: %s", error)


def open_torch_group(process_group: Any = None, *, rank_timeout_seconds: float, node: str | None = None) -> TorchGroup:
    """Open a group over a process group, or over all ranks. Collective among its members only.

    Raises GroupMissing if torch.distributed has no key-value store on this rank or no gloo group can be made;
    InvalidInput if this process is not a member.
    """
    if dist.get_rank(process_group) < 0:
        raise InvalidInput("This process is not a member of the process group that was given as group")
    store = default_store()
    if store is None:
        raise GroupMissing(
            f"torch.distributed with the back-end {dist.get_backend(process_group)!r} has no key-value store",
            hint="Give group=StorageGroup(rank, world_size, start_token)",
        )
    board = _board(process_group, store, timeout_seconds=rank_timeout_seconds)
    group = TorchGroup(
        board,
        rank=dist.get_rank(process_group),
        world_size=dist.get_world_size(process_group),
        rank_timeout_seconds=rank_timeout_seconds,
        node=node,
    )
    return agree_on_start(group, board, lambda: _gloo_group(group, process_group))


def agree_on_start(
    group: TorchGroup, board: TorchBoard, make_process_group: Callable[[], Any] = lambda: None
) -> TorchGroup:
    """Return the group once it has the start token of its leader, and a process group. Close it on failure.

    Collective.
    """
    try:
        with board.admission(leads=group.rank == LEADER), group.meeting("open the group") as meeting:
            group.token = meeting.tell(new_start_token)
        group.process_group = make_process_group()
    except BaseException:
        group.close()
        raise
    return group


class Notice(Protocol):
    """The place where the ranks of a group learn the address of their leader, which serves their key-value store."""

    host: str
    """The host of this process."""
    hint: str
    """The advice for the case that a rank gives no sign of life."""

    def announce(self, address: str) -> object:
        """Leader: post the address."""

    def look(self) -> str | None:
        """Return the address; None if it is not posted yet."""

    def withdraw(self) -> object:
        """Leader: remove the address."""


def open_served_group(
    notice: Notice, *, rank: int, world_size: int, start_token: str, rank_timeout_seconds: float, node: str | None
) -> TorchGroup:
    """Open a group of ranks that have no process group, at a key-value store that the leader serves.

    The leader waits for nobody, the others wait for its address. Raises GroupMissing if the leader cannot serve, or a
    rank does not reach it; RankTimeout if it does not announce an address.
    """
    host, timeout = notice.host, timedelta(seconds=rank_timeout_seconds)
    try:
        if rank == LEADER:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
            notice.announce(f"{host} {store.port}")
        else:
            address = _from_leader(notice.look, timeout_seconds=rank_timeout_seconds, hint=notice.hint)
            host, port = address.rsplit(" ", 1)
            store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
    except RuntimeError as error:  # torch's errors are RuntimeErrors
        raise GroupMissing(
            f"Rank {rank} cannot meet the others at {host}: {error}",
            hint="Call torch.distributed.init_process_group first, or give group=StorageGroup(rank, world_size, "
            "start_token)",
        ) from error
    board = TorchBoard(
        store, prefix="ckptstore", world_size=world_size, timeout_seconds=rank_timeout_seconds, server_ranks=(LEADER,)
    )
    board.hint = notice.hint
    group = TorchGroup(
        board,
        rank=rank,
        world_size=world_size,
        rank_timeout_seconds=rank_timeout_seconds,
        start_token=start_token,
        node=node,
    )
    group.notice = notice if rank == LEADER else None
    return group


def _from_leader(look: Callable[[], str | None], *, timeout_seconds: float, hint: str) -> str:
    """Return what the leader posts, once `look` finds it. Raises RankTimeout."""
    pace, until = Pace(shortest_seconds=0.005, longest_seconds=0.25), time.monotonic() + timeout_seconds
    while (found := look()) is None:
        if time.monotonic() > until:
            raise RankTimeout(
                f"Rank {LEADER} gave no sign of life for {timeout_seconds:g} s in 'open the group'",
                ranks=(LEADER,),
                hint=hint,
            )
        time.sleep(pace.seconds())
        pace.look()
    return found


def _board(process_group: Any, store: Any, *, timeout_seconds: float) -> TorchBoard:
    over: Any = process_group or dist.group.WORLD
    has_leader_zero = dist.get_process_group_ranks(process_group)[LEADER] == 0
    return TorchBoard(
        store,
        prefix=f"ckptstore/{over.group_name}",
        world_size=dist.get_world_size(process_group),
        timeout_seconds=timeout_seconds,
        server_ranks=(LEADER,) if has_leader_zero else (),
        removes=dist.get_rank(process_group) == LEADER,
    )


def _gloo_group(group: TorchGroup, process_group: Any) -> Any:
    """Make a gloo group of the same ranks; an error on one of them is raised on all."""
    with group.meeting("make a gloo group") as meeting:
        number = meeting.tell(lambda: secrets.randbits(60))
        try:
            with uncounted_group(number):  # a counted one meets at the addresses that dead processes left in the store
                return dist.new_group(
                    dist.get_process_group_ranks(process_group),
                    timeout=timedelta(seconds=max(group.rank_timeout_seconds, _LEAST_GLOO_SECONDS)),
                    backend="gloo",
                    use_local_synchronization=process_group is not None,  # the others do not call this
                )
        except Exception as error:
            raise GroupMissing(
                f"No gloo group could be made on {group.node}: {type(error).__name__}: {error}",
                hint="GLOO_SOCKET_IFNAME names the network interface; or give group=StorageGroup(rank, world_size, "
                "start_token)",
            ) from error


def _admit(lobby: Any, token: str) -> None:
    """Post the token for each number that was drawn since the last time."""
    drawn = lobby.add(_DRAWN_KEY, 0)
    num_new = drawn - lobby.add(_ADMITTED_KEY, 0)
    for number in range(drawn - num_new, drawn):
        lobby.set(str(number + 1), token.encode())
    if num_new:
        lobby.add(_ADMITTED_KEY, num_new)


def _admitted(lobby: Any, number: str) -> str | None:
    """Return the token that was posted for a number, and remove it; None if there is none yet."""
    if not lobby.check([number]):
        return None
    (token,) = lobby.multi_get([number])
    lobby.delete_key(number)
    return str(token.decode())


class TorchBoard:
    """A `Board` below one prefix of a key-value store of torch."""

    hint = "Look for its process and its log"
    shortest_poll_seconds = 0.001

    def __init__(
        self,
        store: Any,
        *,
        prefix: str,
        world_size: int,
        timeout_seconds: float,
        server_ranks: tuple[int, ...],
        removes: bool = True,
    ) -> None:
        """`server_ranks` are the ranks that are lost if the store can no longer be reached. With `removes`, this
        process removes messages, and has to remember the parts of large ones."""
        self._removes = removes
        self.longest_poll_seconds = max(0.1, world_size / 4096)  # all ranks together: some 4,000 requests a second
        self._server_ranks = server_ranks
        self._timeout_seconds = timeout_seconds
        self._is_closed = False
        self._connecting = threading.Lock()
        self._clone: Any = lambda: dist.PrefixStore(prefix, cloned(store))  # type: ignore[attr-defined]
        self._caller = Caller(timeout_seconds=timeout_seconds)
        self._store: Any = self._request(self._clone)
        self._scanned: dict[str, int] = {}
        self._parts: dict[str, list[str]] = {}
        self._admit: Callable[[], None] | None = None
        """Leader: tells the ranks that wait to be admitted the token; None once all are."""

    @contextmanager
    def admission(self, *, leads: bool) -> Iterator[None]:
        """Go on below a token that the leader makes, and let the others know it while the context lasts. Collective.

        The store may hold keys of processes that have died: torchrun keeps one store for all attempts. So each of the
        others draws a number that nobody had before. What the leader posts for that number is for this process.
        """
        lobby = self._store
        if leads:
            token = new_start_token()
            self._admit = partial(_admit, lobby, token)
        else:
            number = str(self._request(lambda: lobby.add(_DRAWN_KEY, 1)))
            token = _from_leader(
                lambda: self._request(lambda: _admitted(lobby, number)),
                timeout_seconds=self._timeout_seconds,
                hint=f"{EVERY_RANK}. {self.hint}",
            )
        clone = self._clone
        self._clone = lambda: dist.PrefixStore(token, clone())  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(token, lobby)  # type: ignore[attr-defined]
        yield
        self._admit = None

    def post(self, key: str, data: bytes) -> bytes | None:
        value = self._cut(key, data)
        there = self._request(lambda: self._store.compare_set(key, "", value))
        if there != value:
            return self._whole(key, there)
        self._request(lambda: self._store.add(_POSTS_KEY, 1))
        return None

    def _cut(self, key: str, data: bytes) -> bytes:
        if len(data) <= _INLINE_BYTES:
            return _PLAIN + data
        name = f"{key}.{hashlib.sha256(data).hexdigest()[:16]}"
        parts = [f"{name}.{start}" for start in range(0, len(data), _PART_BYTES)]
        for index, part in enumerate(parts):
            piece = data[index * _PART_BYTES : (index + 1) * _PART_BYTES]
            self._request(lambda part=part, piece=piece: self._store.set(part, piece))  # type: ignore[misc]
        self._remember(key, parts)
        return _CUT + "\n".join(parts).encode()

    def _whole(self, key: str, value: bytes) -> bytes:
        if value[:1] == _PLAIN:
            return value[1:]
        parts = value[1:].decode().split("\n")
        self._remember(key, parts)
        return b"".join(self._get(parts))

    def _remember(self, key: str, parts: list[str]) -> None:
        if self._removes:
            self._parts[key] = parts

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of existing keys; for a missing one, the store would wait."""
        return self._request(lambda: self._store.multi_get(list(keys)))

    def fetch(self, keys: Sequence[str]) -> dict[str, bytes]:
        if self._admit is not None:
            self._request(self._admit)
        there = self._present(list(keys))
        found: dict[str, bytes] = {}
        for start in range(0, len(there), _FETCHED_AT_ONCE):
            some = there[start : start + _FETCHED_AT_ONCE]
            found.update({key: self._whole(key, value) for key, value in zip(some, self._get(some), strict=True)})
        return found

    def _present(self, keys: list[str]) -> list[str]:
        """Return the existing ones of the keys, in at most two requests if nothing was posted since the last call."""
        if not keys or self._request(lambda: self._store.check(keys)):
            return keys
        if len(keys) == 1:
            return []
        scope = keys[0].rpartition(".")[0]
        num_posts = self._request(lambda: self._store.add(_POSTS_KEY, 0))
        if self._scanned.get(scope) == num_posts:
            return []
        there = self._request(lambda: [key for key in keys if self._store.check([key])])
        self._scanned = {scope: num_posts}
        return there

    def give_sign(self, key: str, *, last: bool = False) -> None:
        self._request(lambda: self._store.add(key, _LAST_SIGN if last else 1))

    def signs(self, keys: Sequence[str]) -> Mapping[str, Hashable]:
        counts = self._request(lambda: {key: self._store.add(key, 0) for key in keys})
        return {key: LEFT if count >= _LAST_SIGN else count for key, count in counts.items() if count}

    def remove(self, keys: Sequence[str]) -> None:
        doomed = [name for key in keys for name in (key, *self._parts.pop(key, ()))]

        def delete() -> None:
            for name in doomed:
                self._store.delete_key(name)

        self._caller.later(delete)

    def close(self, *, emptied: bool) -> None:
        self._is_closed = True
        if emptied:
            self._caller.later(lambda: self._store.delete_key(_POSTS_KEY))
        self._caller.close()
        self._store = self._clone = None  # the server of a leader ends with the last of them, and needs no collection

    def _request(self, request: Callable[[], T]) -> T:
        try:
            self._connect_again()
            return self._caller.call(request)
        except (RuntimeError, TimeoutError) as error:  # torch's errors are RuntimeErrors
            self._caller.give_up(str(error).partition("\n")[0] or type(error).__name__)
            raise RankTimeout(
                f"The key-value store of torch.distributed is not reached any more: {self._caller.given_up}",
                ranks=self._server_ranks,
                committed=None,
                hint="It is served by the process with rank 0 of the job, or by torchrun on its node: look there",
            ) from error

    def _connect_again(self) -> None:
        """Connect again after a failed request: the connection is broken, but the server may still run."""
        with self._connecting:
            if self._caller.given_up is None or self._is_closed:
                return
            caller = Caller(timeout_seconds=min(self._timeout_seconds, _CONNECT_SECONDS))
            try:
                self._store = caller.call(self._clone)
            except (RuntimeError, TimeoutError):
                caller.give_up("it is not reached")
                raise
            caller.give_up("it has connected")
            self._caller = Caller(timeout_seconds=self._timeout_seconds)
