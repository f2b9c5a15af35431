"""Agents as real processes, ended with their test; and a server."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, Start

from ckptstore.testing.s3_server import s3_server


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start an agent: `start("run", store, folder, "--steps...", trainer=[...])`."""
    agents: list[Agent] = []

    def start(
        store: object, folder: object, *options: object, trainer: list[object] | None = None, **keywords: Any
    ) -> Agent:
        events = tmp_path / f"events-{len(agents)}.json"
        common = ["--interval", "0.1", "--events", events, *options]
        if trainer is None:
            words = ["watch-folder", folder, store, *common]
        else:
            given = [] if folder is None else ["--folder", folder]
            words = ["run", "--store", store, *given, *common, "--", *trainer]
        agents.append(Agent([str(word) for word in words], events=events, **keywords))
        return agents[-1]

    yield start
    for agent in agents:
        if agent.process.poll() is None:
            agent.process.send_signal(signal.SIGKILL)
            agent.process.wait()


@pytest.fixture
def s3_env() -> Iterator[Any]:
    """A server, and the environment for it."""
    with s3_server(buckets=["test"]) as server:
        env = {"AWS_ENDPOINT_URL": server.endpoint_url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        yield server, {**env, "AWS_REGION": "us-east-1", "CKPTSTORE_RETRY_ATTEMPTS": "3"}
