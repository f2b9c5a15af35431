"""Load and export weights in Hugging Face's names and files, through torchtitan's adapter for each model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from torchtitan.tools.logging import logger

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.extensions.exchange.exporting import export
from ckptstore.extensions.exchange.places import is_remote, on_this_machine
from ckptstore.group.base import this_node
from ckptstore.integrations.torchtitan.together import on_all_ranks, on_leader, rank_of
from ckptstore.storage.uri import redact
from ckptstore.store import CheckpointStore


def load_weights(store: CheckpointStore, model: Any, adapter: Any, source: str, *, is_quantized: bool) -> None:
    """Fill a model from a directory of safetensors, a path or a URI. Collective.

    The adapter's own reader reads them, from this node: a remote directory is downloaded once to the temporary
    directory of each node, and removed afterwards.
    """
    with _on_this_node(store, source) as directory:
        named = adapter.to_hf(model.state_dict())
        load(named, storage_reader=adapter.get_hf_storage_reader(directory, is_quantized))
        model.load_state_dict(adapter.from_hf(named))


def export_weights(store: CheckpointStore, checkpoint: Checkpoint, directory: str, *, beside: str | None) -> None:
    """Write a checkpoint under Hugging Face's names as safetensors. Collective; rank 0 writes.

    `beside` is the directory of the model's config and tokenizer, which are copied too, if there is anything in it.
    """

    def work() -> None:
        has_files = beside and os.path.isdir(beside) and any(entry.is_file() for entry in os.scandir(beside))
        try:
            report = export(
                checkpoint, directory, to="safetensors", overwrite=True, beside=beside if has_files else None
            )
        except CkptstoreError as error:
            error.add_note(
                f"The checkpoint of step {checkpoint.step} is committed. To export it again: "
                f"ckptstore export {store.uri}@{checkpoint.step} DIRECTORY"
            )
            raise
        for notice in report.notices:
            logger.info(notice)
        logger.info(f"Exported {report.num_tensors} tensors to {report.uri}.")

    on_leader(store, "export to safetensors", work)


@contextmanager
def _on_this_node(store: CheckpointStore, source: str) -> Iterator[str]:
    """Yield the directory as a path of this node; its lowest rank downloads. Collective."""
    if not is_remote(source):
        if not os.path.isdir(source):
            raise InvalidInput(
                f"{source} is no directory to read Hugging Face weights from",
                hint="Set checkpoint.initial_load_path, or hf_assets_path",
            )
        yield source
        return
    with ExitStack() as downloaded:
        nodes = on_all_ranks(store, "nodes", this_node)
        is_first = nodes.index(this_node()) == rank_of(store)

        def download() -> str:
            if not is_first:
                return ""
            logger.info(f"Downloading Hugging Face weights from {redact(source)}.")
            return str(downloaded.enter_context(on_this_machine(source, None, of_folder=lambda name: True)))

        paths = on_all_ranks(store, "download weights", download)
        yield paths[nodes.index(this_node())]
        on_all_ranks(store, "weights are read", lambda: None)
