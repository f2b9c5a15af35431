"""Options of the writer and the reader that a save would otherwise leave unheeded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptstore import Checkpoint, InvalidInput, open_store
from ckptstore.dcp import StoreReader, StoreWriter, translated

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage")


def test_transforms_of_streams_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="_extensions would transform"):
        StoreWriter(tmp_path / "a", _extensions=[object()])
    with pytest.raises(InvalidInput, match="_extension_registry would transform"):
        StoreReader(tmp_path / "a", _extension_registry=object())
    StoreWriter(tmp_path / "a", _extensions=())


def test_files_are_spread_over_prefixes_as_by_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"t": torch.arange(9.0), "n": 3}
    with open_store(tmp_path / "store", num_prefixes=20) as store:
        dcp.save(state, storage_writer=StoreWriter(store.dcp_target(), step=1), no_dist=True)
        in_store = store[1].uri
    monkeypatch.setenv("CKPTSTORE_NUM_PREFIXES", "20")
    alone = tmp_path / "alone"
    (alone / "00").mkdir(parents=True)
    (alone / "00/state-rank=00000-00-0a1b2c3d.distcp").write_bytes(b"left by a save that failed")
    with translated():
        dcp.save(state, storage_writer=StoreWriter(alone), no_dist=True)
    for checkpoint in (Checkpoint.from_uri(in_store), Checkpoint.from_uri(alone)):
        (name,) = (file.name for file in checkpoint.files if file.name.endswith(".distcp"))
        assert re.fullmatch(r"00/state-rank=00000-00(-[0-9a-f]{8})?\.distcp", name)
        assert checkpoint.verify().ok
        for reader in (StoreReader(checkpoint.uri), dcp.FileSystemReader(checkpoint.uri)):
            loaded: dict[str, Any] = {"t": torch.zeros(9), "n": 0}
            dcp.load(loaded, storage_reader=reader, no_dist=True)
            assert torch.equal(loaded["t"], state["t"])
            assert loaded["n"] == 3
