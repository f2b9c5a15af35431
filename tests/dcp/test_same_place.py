"""A `checkpoint_id` beside a writer is the same place in any spelling that leads there, and no other one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptstore.dcp import StoreReader, StoreWriter, translated
from ckptstore.errors import InvalidInput

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage")


def test_every_spelling_of_a_directory_is_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    spellings = ["./real/{}", "real/{}/", str(tmp_path / "real/{}"), f"file://{tmp_path}/real/{{}}", "link/{}"]
    for number, spelling in enumerate(spellings):
        same = spelling.format(number)
        dcp.save({"a": torch.ones(2)}, storage_writer=StoreWriter(f"real/{number}"), checkpoint_id=same, no_dist=True)
        state = {"a": torch.zeros(2)}
        dcp.load(state, storage_reader=StoreReader(f"link/{number}"), checkpoint_id=same, no_dist=True)
        assert torch.equal(state["a"], torch.ones(2))
    with translated(), pytest.raises(InvalidInput, match="goes to real/9, checkpoint_id is real/8"):
        dcp.save({"a": torch.ones(2)}, storage_writer=StoreWriter("real/9"), checkpoint_id="real/8", no_dist=True)
