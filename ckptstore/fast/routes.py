"""Who sends which files to whom before a resume: nodes get what their ranks need and they lack. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Route:
    """Files that one node sends to another."""

    sender: str
    receiver: str
    names: tuple[str, ...]
    """In ascending order."""


@dataclass(frozen=True, slots=True)
class Routes:
    """All that has to be sent before the ranks can load."""

    routes: tuple[Route, ...]
    missing: Mapping[str, tuple[str, ...]]
    """What a node needs and no node has, by the name of the node: it comes from the store, or from nowhere."""


def plan_routes(
    needed: Mapping[str, Collection[str]], held: Mapping[str, Collection[str]], sizes: Mapping[str, int]
) -> Routes:
    """Decide who sends what, the same everywhere: `needed` and `held` are names of files by node, `sizes` in bytes.

    The largest files are dealt first, each to the holder that has the fewest bytes to send so far. So the slowest
    sender has at most one file more than its share where all nodes hold all files.
    """
    holders: dict[str, list[str]] = {}
    for node in sorted(held):
        for name in held[node]:
            holders.setdefault(name, []).append(node)
    wanted = [(name, node) for node in sorted(needed) for name in sorted(set(needed[node]) - set(held.get(node, ())))]
    sent_bytes = dict.fromkeys(held, 0)
    parts: dict[tuple[str, str], list[str]] = {}
    missing: dict[str, list[str]] = {}
    for name, node in sorted(wanted, key=lambda item: (-sizes[item[0]], item)):
        if name not in holders:
            missing.setdefault(node, []).append(name)
            continue
        sender = min(holders[name], key=lambda holder: (sent_bytes[holder], holder))
        sent_bytes[sender] += sizes[name]
        parts.setdefault((sender, node), []).append(name)
    return Routes(
        tuple(Route(sender, receiver, tuple(sorted(names))) for (sender, receiver), names in sorted(parts.items())),
        {node: tuple(sorted(names)) for node, names in sorted(missing.items())},
    )
