"""What `watch` says of a look, for people."""

from __future__ import annotations

from ckptstore.runtime.shown import show_duration, show_size, show_speed
from ckptstore.tools.cli.output import show_metrics
from ckptstore.tools.watching.look import SeenAttempt, SeenCommit, SeenOnNode, SeenSigns


def attempt_facts(attempt: SeenAttempt, *, silent_seconds: float | None = None) -> list[str]:
    """How far an attempt is, in short pieces. `silent_seconds` is for a look that was some time ago."""
    seconds = attempt.silent_seconds if silent_seconds is None else silent_seconds
    expected_bytes, size = attempt.expected_bytes, show_size(attempt.size_bytes)
    if expected_bytes is not None and attempt.status == "writing":
        size += f" of about {show_size(expected_bytes)} (as step {attempt.expected_as_step})"
    facts = [size, "1 file" if attempt.num_files == 1 else f"{attempt.num_files} files"]
    if attempt.num_uploads:
        facts.append("1 upload begun" if attempt.num_uploads == 1 else f"{attempt.num_uploads} uploads begun")
    if attempt.status == "silent":
        return [f"no sign of life for {show_duration(seconds)}", *facts]
    if attempt.status == "committing":
        return ["all is stored, the commit comes next", *facts]
    if attempt.bytes_per_second is not None:
        facts.append(show_speed(attempt.bytes_per_second, 1.0))
    if attempt.left_seconds is not None:
        facts.append(f"about {show_duration(attempt.left_seconds)} left")
    return facts


def commit_facts(commit: SeenCommit) -> list[str]:
    """What a checkpoint is, in short pieces."""
    facts = [f"number {commit.number}", show_size(commit.size_bytes)]
    facts.append("1 rank" if commit.world_size == 1 else f"{commit.world_size} ranks")
    return [*facts, show_metrics(commit.metrics)] if commit.metrics else facts


def age_words(commit: SeenCommit, *, now: float) -> str:
    """How long ago it was committed, by the clock of its leader."""
    return f"{show_duration(max(0.0, now - commit.created_at))} ago"


def node_words(seen: SeenOnNode, *, now: float) -> str:
    """What this node has, and since when the store lacks something of it."""
    if seen.step is None or seen.created_at is None:
        return "no fast checkpoint"
    words = f"step {seen.step}, {show_duration(max(0.0, now - seen.created_at))} ago"
    if seen.not_durable_since is None:
        return f"{words}, and the store is not behind"
    return f"{words}; the store has been behind for {show_duration(max(0.0, now - seen.not_durable_since))}"


def sign_words(signs: SeenSigns, *, later_seconds: float = 0.0) -> str:
    """When the ranks last gave a sign of life."""
    ranks = "1 rank" if signs.num_ranks == 1 else f"{signs.num_ranks} ranks"
    words = f"{ranks}, last {show_duration(signs.last_seconds + later_seconds)} ago"
    if signs.num_ranks > 1:
        words += f", rank {signs.oldest_rank} {show_duration(signs.oldest_seconds + later_seconds)} ago"
    return words
