"""Format numbers for people, sizes in binary units everywhere, and parse their durations."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckptstore.errors import InvalidInput

_UNITS_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION = re.compile(r"(-?\d+(?:\.\d+)?)\s*([a-z]*)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKMGTP])(i?))?B")
_PREFIXES = ("", "K", "M", "G", "T", "P")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def show_size(size_bytes: float) -> str:
    """Return bytes for people: "17.3 MiB"."""
    size, unit = float(size_bytes), UNITS[0]
    for unit in UNITS:
        if size < 1024 or unit == UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def show_speed(size_bytes: float, seconds: float) -> str:
    """Return a speed for people: "2.5 GiB/s"."""
    return f"{show_size(size_bytes / max(seconds, 1e-9))}/s"


def show_move(size_bytes: float, seconds: float) -> str:
    """Return the size, time and speed of a move for people: "5.0 GiB in 2.00 s (2.5 GiB/s)"."""
    return f"{show_size(size_bytes)} in {show_seconds(seconds)} ({show_speed(size_bytes, seconds)})"


def show_duration(seconds: float) -> str:
    """Return a duration for people: "59 min"."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def show_seconds(seconds: float) -> str:
    """Return a short duration for people: "0.84 s", "12.3 s", "3 min"."""
    if seconds >= 120:
        return show_duration(seconds)
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"


def read_duration(text: str) -> float:
    """Return the seconds of a duration, a plain number or one with a unit: "15m". Raises InvalidInput."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS_SECONDS:
        raise InvalidInput(f"{text!r} is no duration. Write seconds, or a unit: 90, 15m, 1h, 2d")
    return float(match[1]) * _UNITS_SECONDS[match[2]]


def read_size(text: str) -> float:
    """Return the bytes of a size with its unit, decimal or binary: "80GB", "1.5TiB".

    Raises InvalidInput, for "Gb" too: it means bits to some and bytes to others.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(f"{text!r} is not like 80GB, 1.5TB or 1.5TiB")
    factor: int = (1024 if match[3] else 1000) ** _PREFIXES.index((match[2] or "").upper())
    return float(match[1]) * factor


def printable(text: str) -> str:
    """Return the text with all unprintable characters escaped, as in "a\\x1b[2J", so that none controls a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def show_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message: "rank 3", "ranks 3 and 5", "ranks 0-7, 9 and 12-1023"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(parts) > 20:
        parts = [*parts[:20], f"{len(parts) - 20} more"]
    text = " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]
    return f"rank {text}" if len(set(ranks)) == 1 else f"ranks {text}"
