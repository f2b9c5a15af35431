"""Configuration: frozen, keyword-only values. The environment is read here and nowhere else.

A value is taken from the call, else from the environment (`CKPTSTORE_<FIELD>`, for instance
`CKPTSTORE_MEMORY_BUDGET_BYTES`), else it is the default below. A variable that looks like a setting and is none is
named in a warning.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from ckptstore.errors import InvalidInput
from ckptstore.format.digest import ALGORITHMS, DEFAULT

logger = logging.getLogger(__name__)

_PREFIX = "CKPTSTORE_"
_OTHERS = re.compile(
    r"TRACEBACKS|COMPLETE|VERSION|DIRECTORY|BENCH(_ROUNDS)?|(LIGHTNING|FOLLOW|TEST)_.*|(.*_)?(SERVICE|PORT)(_.*)?"
)
"""The names of variables that others read, and of those that Kubernetes sets for a service of our name."""
_warned_of: set[str] = set()
_KINDS: Mapping[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
"""The classes that a value may have, by the type of its field."""


def shows_full_tracebacks() -> bool:
    """Return True if `CKPTSTORE_TRACEBACKS=full` asks for the frames inside ckptstore in the tracebacks of its
    errors."""
    return os.environ.get("CKPTSTORE_TRACEBACKS") == "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Config:
    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **options: Any) -> Self:
        """Return the values of the call, completed from the environment. A None counts as left out."""
        if environ is None:
            environ = os.environ
            _warn_of_unknown(environ)
        values = {name: value for name, value in options.items() if value is not None}
        found = {}
        for variable, (name, kind) in cls._variables().items():
            text = environ.get(variable)
            if name not in values and text:
                found[name] = variable
                values[name] = _parse(name, text, kind)
        try:
            return cls(**values)
        except InvalidInput as error:
            variable = found.get(error.message.split(" ", 1)[0], "")
            if not variable:
                raise
            raise InvalidInput(f"{variable} in the environment: {error.message}", hint=error.hint) from None

    @classmethod
    def _variables(cls) -> dict[str, tuple[str, str]]:
        """Return the field and its type for each variable that sets one."""
        plain = (item for item in fields(cls) if not str(item.type).endswith("Config"))
        return {f"{_PREFIX}{item.name.upper()}": (item.name, str(item.type)) for item in plain}

    def __post_init__(self) -> None:
        for item in fields(self):
            kinds, value = _KINDS.get(str(item.type)), getattr(self, item.name)
            if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
                raise InvalidInput(f"{item.name} is {value!r}, it must be of the type {item.type}")
        self._check()

    def _check(self) -> None:
        """Raise InvalidInput for a value of the right type that cannot be used."""

    def _check_positive(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} is {getattr(self, name)!r}, it must be above 0")


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    """Warn once of each variable that has our prefix and is read by nobody."""
    unknown = {name for name in environ if name.startswith(_PREFIX)} - _warned_of
    settings = {name for kind in _Config.__subclasses__() for name in kind._variables()} if unknown else set()
    for name in (name.removeprefix(_PREFIX) for name in sorted(unknown - settings)):
        if not _OTHERS.fullmatch(name):
            from difflib import get_close_matches  # only a mistake needs it

            close = get_close_matches(name, sorted(known.removeprefix(_PREFIX) for known in settings), 1)
            hint = f"; is it to be {_PREFIX}{close[0]}?" if close else ""
            logger.warning("%s%s in the environment is no setting, so it is ignored%s", _PREFIX, name, hint)
    _warned_of.update(unknown)


def _parse(name: str, text: str, kind: str) -> Any:
    try:
        if kind == "bool":
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        if kind == "Path":
            return Path(os.path.abspath(os.path.expanduser(text)))  # as the root of a store is read
        if kind == "str":
            return text
        return int(text) if kind == "int" else float(text)
    except (ValueError, KeyError):
        raise InvalidInput(f"CKPTSTORE_{name.upper()}={text!r} is not a {kind}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferConfig(_Config):
    """Limits and ways of moving bytes."""

    num_threads: int = field(default_factory=lambda: min(16, 2 * (os.cpu_count() or 1)))
    """Files or parts in flight at once on a disk or in memory, in one process, and those that are read and hashed at
    once on their way to a server."""
    num_requests: int = 16
    """Requests in flight at once to a server, in one process; fewer while it throttles."""
    memory_budget_bytes: int = 512 << 20
    """The most memory that buffers of a transfer take, in one process."""
    part_bytes: int = 32 << 20
    """The most bytes of one part of a file that goes to a server, and so of one request, unless there would be too many
    parts. Less than 5 MiB is refused by S3."""
    durable: bool = True
    """Make everything on a disk durable before a checkpoint is committed."""
    direct_io: bool = True
    """Write large durable files past the page cache, on ext4 and XFS."""
    digest: str = DEFAULT
    """The algorithm of the digests of what is written. Files with digests by any other are read as well."""

    check_copies: str = "sample"
    """Compare a part of what `save_async` has copied with the tensors before it returns: a "sample" of a few
    elements, which costs below 1 % of the copy, or "all"."""

    def _check(self) -> None:
        self._check_positive("num_threads", "num_requests", "memory_budget_bytes")
        if self.part_bytes < 5 << 20:
            raise InvalidInput(f"part_bytes is {self.part_bytes!r}, it must be at least {5 << 20}, the least of S3")
        if self.check_copies not in ("sample", "all"):
            raise InvalidInput(f"check_copies is {self.check_copies!r}, it is 'sample' or 'all'")
        if self.digest not in ALGORITHMS:
            raise InvalidInput(f"digest is {self.digest!r}, it is one of: {', '.join(ALGORITHMS)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryConfig(_Config):
    """Limits on the tries of a request to a storage."""

    retry_attempts: int = 25
    """The most tries, the first one counted; enough for a minute of throttling. 1 switches retries off."""
    retry_deadline_seconds: float = 200.0
    """No new try begins later than this after the first one."""
    retry_wait_initial_seconds: float = 0.1
    """The longest wait before the second try; it doubles from try to try, with full jitter."""
    retry_wait_max_seconds: float = 20.0
    """The longest wait before any try."""

    def _check(self) -> None:
        self._check_positive(
            "retry_attempts", "retry_deadline_seconds", "retry_wait_initial_seconds", "retry_wait_max_seconds"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig(_Config):
    """The node cache."""

    cache_dir: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / f"ckptstore-{os.getuid()}")
    """A directory on a disk of this node, of this user alone."""
    cache_budget_bytes: int = 0
    """The most bytes of finished copies that nobody reads; 0 means half of what the disk has free."""
    cache_idle_seconds: float = 3600.0
    """The time that a finished copy stays after its last reader."""
    cache_wait_seconds: float = 1800.0
    """The longest wait of a process for another one's download before it downloads for itself."""

    def _check(self) -> None:
        self._check_positive("cache_idle_seconds", "cache_wait_seconds")
        if self.cache_budget_bytes < 0:
            raise InvalidInput(f"cache_budget_bytes is {self.cache_budget_bytes!r}, it must be at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerConfig(_Config):
    """Nodes that read the same checkpoints from one server, and give each other what they have read."""

    peers: str = ""
    """host:port of every node, with commas, or one DNS name of all of them, name:port; empty for none."""
    peers_token: str = field(default="", repr=False)
    """A secret that all of them have, of at least 16 characters; set it in the environment."""
    peers_cache_bytes: int = 1 << 30
    """The memory for what a node has read for all."""
    peers_timeout_seconds: float = 10.0
    """The longest silence of a node; after it the storage is read, and that node is not asked for a while."""
    peers_linger_seconds: float = 60.0
    """The longest time for which a store that is closed goes on serving nodes that still ask."""

    def _check(self) -> None:
        self._check_positive("peers_cache_bytes", "peers_timeout_seconds")
        if not self.peers_linger_seconds >= 0:
            raise InvalidInput(f"peers_linger_seconds is {self.peers_linger_seconds!r}, it must be at least 0")
        if self.peers and len(self.peers_token) < 16:
            raise InvalidInput(
                f"peers_token has {len(self.peers_token)} characters, with peers it must have 16 or more",
                hint="Set CKPTSTORE_PEERS_TOKEN to the same secret on all nodes, such as that of openssl rand -hex 32",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig(_Config):
    """The rules of one store."""

    grace_seconds: float = 3600.0
    """The time that a checkpoint dropped by retention stays in the trash, by the storage's clock."""
    rank_timeout_seconds: float = 280.0
    """The longest time without a sign of life of a rank. One that hangs is found out after twice that: before the
    watchdog of NCCL, which ends a job whose ranks wait for each other for 600 s."""
    single_writer: bool = False
    """Promise that no second job ever writes, for a storage that cannot create-if-absent."""
    num_prefixes: int = 1
    """Over how many directories the ranks of a state checkpoint spread their files, for storages that limit the
    requests per second for each prefix. 1 puts all files side by side."""
    compare_every: int = 16
    """Every how many saves of a state the ranks compare what they are to have alike (under DDP, as a DTensor's
    Replicate, marked as replicated). The first save of a store, and any of a new structure, always does."""
    provenance: bool = True
    """Write into each manifest where its state comes from: the commit of the program, its command line without secrets,
    the versions of its packages, and the number of hosts."""
    transfer: TransferConfig = field(default_factory=TransferConfig.from_env)
    retry: RetryConfig = field(default_factory=RetryConfig.from_env)
    cache: CacheConfig = field(default_factory=CacheConfig.from_env)
    peer: PeerConfig = field(default_factory=PeerConfig.from_env)

    def _check(self) -> None:
        self._check_positive("rank_timeout_seconds", "num_prefixes", "compare_every")
        if not self.grace_seconds >= 0:
            raise InvalidInput(f"grace_seconds is {self.grace_seconds!r}, it must be at least 0")
