"""A state checkpoint of version 1, as it was written once, is read for ever."""

import gzip
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saving import blank, index_of

from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.state.index.outline import INDEX_NAME
from ckptstore.state.read.stored import StoredState
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.transfer import Transfer

GOLDEN = Path(__file__).parents[1] / "golden" / "state-v1"
NAME = "state-rank=00000-00.distcp"


@pytest.fixture
def golden(tmp_path):
    for name in (INDEX_NAME, ".metadata"):
        shutil.copy(GOLDEN / name, tmp_path / name)
    (tmp_path / NAME).write_bytes(gzip.decompress((GOLDEN / f"{NAME}.gz").read_bytes()))
    return tmp_path


EXPECTED = {
    "w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "tied": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "half": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    "zero_d": torch.tensor(7),
    "empty": torch.empty(0, 2),
    "large": torch.arange(131_073).remainder(7),
}


def test_ckptstore_reads_it(golden):
    transfer = Transfer(LocalStorage(golden, durable=False), config=TransferConfig(), retry=RetryConfig())
    index = index_of((golden / INDEX_NAME).read_bytes())
    stored = StoredState(index, transfer.read, "", rank=0, world_size=1)
    saved = stored.saved()
    assert saved.values == {
        "epoch": 3,
        "nested": {"betas": (0.9, 0.999), "name": "golden"},
        "inf": float("-inf"),
        "history": [float(number) for number in range(1001)],
    }
    assert saved.aliases in ({"tied": "w"}, {"w": "tied"})
    loaded = blank(EXPECTED)
    stored.fill({key: (tensor, key) for key, tensor in loaded.items()})
    assert all(torch.equal(loaded[key], EXPECTED[key]) for key in EXPECTED)
    transfer.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_torch_reads_it(golden):
    state = {**blank(EXPECTED), "epoch": 0, "nested": {"betas": None, "name": ""}}
    dcp.load(state, checkpoint_id=golden, no_dist=True)
    assert all(torch.equal(state[key], EXPECTED[key]) for key in EXPECTED)
    assert (state["epoch"], state["nested"]) == (3, {"betas": (0.9, 0.999), "name": "golden"})
