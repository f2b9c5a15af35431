"""An option that would have no effect is an error, which names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptstore import CheckpointStore, InvalidInput, open_store
from ckptstore.dcp import StoreReader, StoreWriter

STATE = {"w": torch.ones(2)}

CALLS: list[tuple[str, Callable[[CheckpointStore], object]]] = [
    ("include, dtype: a resume without a state", lambda store: store.resume(include="w", dtype="state")),
    ("strict: a resume without a state", lambda store: store.resume(strict=False)),
    ("stock_readable is 'no'", lambda store: store.save(1, STATE, stock_readable="no")),  # type: ignore[arg-type]
    ("stock_readable is 'no'", lambda store: store.warm_up(STATE, stock_readable="no")),  # type: ignore[arg-type]
    (
        "incremental='reference' leaves files",
        lambda store: store.save(1, STATE, incremental="reference", stock_readable=True),
    ),
    ("step=3 is for a place in a store", lambda store: StoreWriter("alone", step=3)),
    (
        "storage_options are for a URI",
        lambda store: StoreWriter(store.dcp_target(), step=3, storage_options={"key": "x"}),
    ),
    ("num_files is 0", lambda store: StoreWriter("alone", num_files=0)),
    ("split_plain_bytes is -1", lambda store: StoreWriter("alone", split_plain_bytes=-1)),
    ("per_rank is 'last'", lambda store: StoreReader("alone", per_rank="last")),  # type: ignore[arg-type]
    ("link=True makes hard links", lambda store: store.save_directory(1, None, link=True)),
]


@pytest.mark.parametrize(("message", "call"), CALLS)
def test_calls(message: str, call: Callable[[CheckpointStore], object]) -> None:
    with open_store("memory://ignored") as store, pytest.raises(InvalidInput, match=re.escape(message)):
        call(store)


def test_a_shared_name_that_no_rank_has_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text("{}")
    with open_store("memory://shared") as store:
        for step in (1, 2):
            store.save_directory(step, tmp_path, shared=["config.json", "confg.json"])
    assert caplog.text.count("no rank has a file of that name") == 1
    assert "shared=['confg.json']" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [("DIGEST", "md5"), ("NUM_PREFIXES", "-1"), ("CACHE_BUDGET_BYTES", "-5"), ("GRACE_SECONDS", "-1")],
)
def test_a_bad_value_in_the_environment_names_its_variable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(f"CKPTSTORE_{name}", value)
    with pytest.raises(InvalidInput, match=f"CKPTSTORE_{name} in the environment: {name.lower()} is "):
        open_store(tmp_path)
    monkeypatch.delenv(f"CKPTSTORE_{name}")
    with pytest.raises(InvalidInput, match=r"^rank_timeout_seconds is 0"):
        open_store(tmp_path, rank_timeout_seconds=0)
