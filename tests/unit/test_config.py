"""Configuration: what is given wins, then the environment, then the default; bad values are named."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

import ckptstore
from ckptstore.config import CacheConfig, RetryConfig, StoreConfig, TransferConfig
from ckptstore.errors import InvalidInput

CLASSES = (TransferConfig, RetryConfig, CacheConfig, StoreConfig)


def test_what_is_given_wins_over_the_environment_and_that_over_the_default() -> None:
    environ = {"CKPTSTORE_RETRY_ATTEMPTS": "3", "CKPTSTORE_RETRY_DEADLINE_SECONDS": "4.5"}
    config = RetryConfig.from_env(environ, retry_attempts=7, retry_wait_max_seconds=None)
    assert (config.retry_attempts, config.retry_deadline_seconds, config.retry_wait_max_seconds) == (7, 4.5, 20.0)


def test_every_kind_of_value_is_read_from_the_environment() -> None:
    environ = {
        "CKPTSTORE_NUM_THREADS": "3",
        "CKPTSTORE_DURABLE": "false",
        "CKPTSTORE_CACHE_DIR": "/var/cache/mine",
        "CKPTSTORE_CACHE_IDLE_SECONDS": "1.5",
        "CKPTSTORE_SINGLE_WRITER": "1",
    }
    transfer, cache = TransferConfig.from_env(environ), CacheConfig.from_env(environ)
    assert (transfer.num_threads, transfer.durable) == (3, False)
    assert (cache.cache_dir, cache.cache_idle_seconds) == (Path("/var/cache/mine"), 1.5)
    assert StoreConfig.from_env(environ).single_writer is True
    for text, path in (("~/cache", Path.home() / "cache"), ("here", Path.cwd() / "here")):
        assert CacheConfig.from_env({"CKPTSTORE_CACHE_DIR": text}).cache_dir == path


def test_an_empty_variable_counts_as_not_set() -> None:
    assert RetryConfig.from_env({"CKPTSTORE_RETRY_ATTEMPTS": ""}) == RetryConfig()


def test_a_variable_that_nobody_reads_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("ckptstore.config._warned_of", set())
    meant = {"RETRY_ATEMPTS": "RETRY_ATTEMPTS", "RANK_TIMEOUT": "RANK_TIMEOUT_SECONDS", "PEER": "PEERS", "MINE": None}
    others = ["SERVICE_HOST", "PORT_80_TCP_ADDR", "PEERS_SERVICE_PORT"]  # of Kubernetes
    others += ["TRACEBACKS", "LIGHTNING_KEEP", "NUM_THREADS", "PEERS_TOKEN"]
    for name in [*meant, *others]:
        monkeypatch.setenv(f"CKPTSTORE_{name}", "2")
    for _ in range(2):
        ckptstore.open_store(tmp_path / "store", group="solo").close()
    said = [record.getMessage() for record in caplog.records]
    for name, setting in meant.items():
        (one,) = (text for text in said if text.startswith(f"CKPTSTORE_{name} in the environment is no setting"))
        assert one.endswith(f"is it to be CKPTSTORE_{setting}?" if setting else "so it is ignored")
    assert len(said) == len(meant)


@pytest.mark.parametrize(
    ("name", "text"),
    [("NUM_THREADS", "many"), ("NUM_THREADS", "1.5"), ("DURABLE", "perhaps"), ("MEMORY_BUDGET_BYTES", "1 GiB")],
)
def test_a_variable_that_cannot_be_read_is_named(name: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=f"CKPTSTORE_{name}='{text}'"):
        TransferConfig.from_env({f"CKPTSTORE_{name}": text})


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (TransferConfig, "num_threads", 0),
        (TransferConfig, "memory_budget_bytes", -1),
        (RetryConfig, "retry_attempts", 0),
        (RetryConfig, "retry_deadline_seconds", 0.0),
        (CacheConfig, "cache_idle_seconds", float("nan")),
        (CacheConfig, "cache_wait_seconds", -3.0),
        (StoreConfig, "grace_seconds", -0.5),
        (StoreConfig, "grace_seconds", float("nan")),
        (StoreConfig, "rank_timeout_seconds", 0),
        (StoreConfig, "rank_timeout_seconds", "30"),
        (StoreConfig, "grace_seconds", True),
        (StoreConfig, "num_prefixes", 1.5),
        (StoreConfig, "single_writer", "false"),
        (TransferConfig, "memory_budget_bytes", "512MB"),
        (TransferConfig, "digest", 3),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_refused_by_name(cls: type, name: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=name):
        cls(**{name: value})


@pytest.mark.parametrize("cls", CLASSES)
def test_values_are_frozen_and_keyword_only(cls: type) -> None:
    config = cls()
    with pytest.raises(FrozenInstanceError):
        setattr(config, fields(config)[0].name, 1)
    with pytest.raises(TypeError):
        cls(1)


@pytest.mark.parametrize("cls", CLASSES)
def test_units_are_in_the_names(cls: type) -> None:
    for item in fields(cls):
        if item.type == "float":
            assert item.name.endswith("_seconds")
        if item.type == "int":
            assert item.name.endswith(("_bytes", "_attempts", "_threads", "_requests", "_prefixes", "_every"))


def test_the_default_cache_belongs_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTSTORE_CACHE_DIR")
    monkeypatch.setattr("os.getuid", lambda: 4711)
    assert CacheConfig.from_env().cache_dir.name == "ckptstore-4711"
