"""The table at the end of a benchmark run."""

from __future__ import annotations

import statistics
from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print, for each benchmark, ckptstore's median beside every peer's, and the facts that were counted."""
    session = getattr(config, "_benchmarksession", None)
    if session is None or not session.benchmarks:
        return
    write = terminalreporter.write_line
    write("")
    write("seconds are medians; a ratio above 1 means that ckptstore is faster")
    for item in session.benchmarks:
        facts = dict(item.extra_info)
        peers, ratios = facts.pop("peer_seconds", {}), facts.pop("ratios", {})
        size_bytes = facts.pop("size_bytes", 0)
        speed = f"  {size_bytes / item.stats.median / 1e9:.2f} GB/s" if size_bytes else ""
        write(f"{item.name}: {item.stats.median:.4f} s{speed}")
        for name, samples in peers.items():
            median = statistics.median(samples)
            spread = f"{min(samples):.4f}-{max(samples):.4f}"
            write(f"    {name:36} {median:.4f} s ({spread})  ratio {ratios[name]:.2f}")
        for name, value in facts.items():
            write(f"    {name}: {value}")
