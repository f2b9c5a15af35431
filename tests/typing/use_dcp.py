"""The classes for torch's DCP, with the types of their results. Checkers read this; nobody runs it."""

from typing import Any, assert_type

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ckptstore
from ckptstore import CheckpointStore
from ckptstore.dcp import StoreReader, StoreWriter, translated


def use_dcp(store: CheckpointStore, state: dict[str, Any]) -> None:
    writer = StoreWriter(store.dcp_target(metrics={"loss": 0.3}), step=3)
    reader = ckptstore.dcp.StoreReader("exports/final", per_rank="first")
    assert_type(writer, StoreWriter)
    assert_type(writer.save_id, str)
    assert_type(reader, StoreReader)
    assert_type(reader.load_id, str)
    with translated():
        save(state, storage_writer=writer)
        load(state, storage_reader=reader)
