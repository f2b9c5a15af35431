"""List the peers of each table, and the reasons for the missing ones. The page on method is generated from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.text import settings_text
from ckptstore.tools.bench.peers.base import Contender
from ckptstore.tools.bench.peers.registry import FAMILIES, TABLES

DISK, S3 = Place(uri="/disk/bench"), Place(uri="s3://bucket/bench")
_BOTH, _DISK_ALONE = {"disk": DISK, "S3": S3}, {"disk": DISK}
PLACES: Mapping[str, Mapping[str, Place]] = {
    name: _DISK_ALONE if name.startswith("tier-") else _BOTH for name in TABLES if not name.startswith("gpu-")
}
"""Every table, and the places where it can be measured; without those of a GPU, whose peers load or stage for one."""

_STANDING = {kind.family for name in PLACES for kind in TABLES[name].contenders}
NAMES_OF_PEERS = tuple(name for name in FAMILIES if name in _STANDING)
"""The names for `--peers` of those in any table."""

_MANY = 2
_COPIES = ("cp", "pyarrow", "fsspec")
_SAVERS = ("dcp", "s3torchconnector", "torch_checkpointing", "torch", "safetensors", "lightning", "orbax")

_STATE_TABLE = {
    **dict.fromkeys(_COPIES, "it copies files, and what is saved or loaded here are tensors in memory"),
    "transformers": "its Trainer saves with torch.save and safetensors, so their rows are its rows",
}
_FILE_TABLE = {
    **dict.fromkeys(_SAVERS, "it saves tensors, and here files are given"),
    "transformers": "it copies no directories",
}
_BACKGROUND_TABLE = {
    **dict.fromkeys(_COPIES, _STATE_TABLE["cp"]),
    **dict.fromkeys(("torch", "safetensors", "transformers"), "it has no background"),
    "s3torchconnector": "`dcp.async_save` has its writer on S3, so the row of dcp is its row",
}

HOLES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("save", "load", "ranks", "tier-resume"), _STATE_TABLE),
    **dict.fromkeys(("async", "tier-save"), _BACKGROUND_TABLE),
    "directory": _FILE_TABLE,
    "node-cache": {**_FILE_TABLE, "cp": "it reads paths, and here the files come from a storage"},
    "tier-steps": {
        **_BACKGROUND_TABLE,
        **dict.fromkeys(("torch_checkpointing", "orbax"), "it does not write to S3"),
    },
    "ls": {
        **dict.fromkeys((*_COPIES, *_SAVERS[:-1]), "it has no list of checkpoints"),
        "lightning": "it looks for the newest of the file names in a directory when it starts, not as a function",
        "ray": "its controller keeps the list in memory, and in a file that is read when the run is restored",
    },
}
"""By table and name of a peer: why none of its contenders is in that table."""

ABSENT: Mapping[str, str] = {
    "NVRx": "its saves in the background, its state dict and its reads from another rank call CUDA (0.4.1); on CPUs "
    "only a save in the foreground would run",
    "ML Flashpoint": "it needs Python 3.12, and keeps checkpoints in the memory of pairs of nodes: nothing is durable",
    "TorchSnapshot": "its last release is of 2022",
    "Run:ai Model Streamer, fastsafetensors": "they load files of safetensors, and save nothing; not tried yet",
}
"""Other systems that are in no table, and why."""


def case_of(place: Place, ranks: int) -> Case:
    """Return a case without tensors, for questions about contenders."""
    return Case(place=place, rank=0, world_size=ranks, durable=True, bucket=S3)


def hole(table: str, place: Place, family: str) -> str | None:
    """Return why no contender of a family takes part in a table there; None when one does."""
    kinds = [kind for kind in TABLES[table].contenders if kind.role == "peer" and kind.family == family]
    reasons = [kind.unfit(case_of(place, _MANY)) for kind in kinds]
    if None in reasons:
        return None
    return "; ".join(dict.fromkeys(filter(None, reasons))) or HOLES[table][family]


def matrix() -> tuple[list[str], list[list[str]], list[str]]:
    """Return headers, a row for each of the peers, and the reasons by the letters in the holes."""
    columns = [(table, name, place) for table, places in PLACES.items() for name, place in places.items()]
    headers = ["`--peers`", *(f"{table}, {name}" for table, name, _ in columns)]
    letters: dict[str, str] = {}
    rows = []
    for family in NAMES_OF_PEERS:
        row = [family]
        for table, _, place in columns:
            reason = hole(table, place, family)
            row.append(letters.setdefault(reason, chr(ord("a") + len(letters))) if reason else "yes")
        rows.append(row)
    return headers, rows, [f"{letter}: {reason}." for reason, letter in letters.items()]


def settings_rows() -> Iterator[list[str]]:
    """Yield each peer's name, its name for `--peers`, the settings that are tried, and its checks."""
    actions: dict[type[Contender], set[str]] = {}
    for name in PLACES:
        for kind in TABLES[name].contenders:
            # Those of the fast tier are the same ones in other places, and those of "ls" move no bytes.
            if kind.role == "peer" and name != "ls" and not name.startswith("tier-"):
                actions.setdefault(kind, set()).add(TABLES[name].action)
    for kind, found in actions.items():
        tried = [text for action in sorted(found, reverse=True) for text in _tried(kind, action)]
        yield [kind.name, kind.family, "; ".join(dict.fromkeys(tried)) or "none", kind.checks]


def _tried(kind: type[Contender], action: str) -> Iterator[str]:
    for place in _BOTH.values():
        for ranks in (1, _MANY):
            case = case_of(place, ranks)
            if kind.unfit(case) is None:
                yield from filter(None, map(settings_text, kind.sweep(case, action)))
