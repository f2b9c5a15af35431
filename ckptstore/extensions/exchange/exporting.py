"""The export story: write a state checkpoint, wherever it lies, as files that other tools read.

Nothing is held whole: tensors pass through buffers of at most 128 MiB, and every block that is read is checked. The
files appear in their directory at once, when all of them are complete. In an object store the files by which readers
find the others come last.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptstore.boundary import boundary
from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.errors import InvalidInput, InvalidState
from ckptstore.extensions.exchange.places import ExportPlace
from ckptstore.extensions.exchange.safetensors_file import check_shard_size, lay_out
from ckptstore.extensions.exchange.selection import KINDS, Kind, Selection, select
from ckptstore.extensions.exchange.to_dcp import write_dcp
from ckptstore.extensions.exchange.to_safetensors import OneCheckpoint, write_safetensors
from ckptstore.extensions.exchange.to_torch import build_tree, write_torch
from ckptstore.extensions.exchange.training_form import training_form, warn_of_training_form
from ckptstore.format.layout import DCP_METADATA_NAME
from ckptstore.group.base import Group
from ckptstore.group.find import SOLO, find_group
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.loading.load_state import is_stock, open_alone
from ckptstore.loading.nesting import paths_of
from ckptstore.state.index.key_paths import KeyPaths
from ckptstore.state.live.patterns import fitting
from ckptstore.state.read.stored import StoredState
from ckptstore.transfer.executor import Executor, InProcess

SHARD_SIZE_BYTES = 5_000_000_000
"""The default size of a safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """The result of an export."""

    kind: Kind
    uri: str
    """Location of the files: a path, or the URI that was passed."""
    path: Path | None
    """Local path of the files, None if they are remote."""
    files: tuple[str, ...]
    """Names of the files."""
    num_tensors: int
    """Number of tensors by name; tied ones count once each."""
    size_bytes: int
    """Bytes of all tensors; tied ones count once."""
    notices: tuple[str, ...]
    """For people: what the files leave out, or hold in another form."""


@boundary
def export(
    checkpoint: Checkpoint,
    directory: str | os.PathLike[str],
    *,
    to: Kind,
    include: str | Sequence[str] | None = None,
    strip_prefix: str = "",
    shard_size_bytes: int = SHARD_SIZE_BYTES,
    overwrite: bool = False,
    beside: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
    group: object = SOLO,
) -> ExportReport:
    """Write a state checkpoint to a new directory in a format of other tools; every byte is checked on the way.

    "safetensors" makes what Hugging Face libraries read: `model.safetensors`, or numbered files of at most
    `shard_size_bytes` and an index. Tied weights are stored once. "torch" makes `state.pt`, the nested state for
    `torch.load(weights_only=True)`. "dcp" makes a directory for stock DCP. Where ranks differ, the lowest rank's value
    is taken.

    A killed export to "safetensors" goes on where it ended when it is called again: complete files are not written
    again. A target with part of another export is refused without `overwrite`.

    Args:
        directory: where the files go, a path or a URI; new or empty, or with `overwrite` one that holds nothing but
            exported files. A path is replaced as a whole, so it is no mount and not the current directory. Safetensors
            are written to a URI as they are read; other formats pass through the temporary directory. The files that
            lead a reader (an index, `config.json`, `.metadata`) are written to a URI last.
        include: only keys that fit a pattern ("model.*") or one of several.
        strip_prefix: what to remove from the front of keys ("model."), so that names are the model's own.
        beside: a directory whose files are copied to the export, weights apart: the config and the tokenizer of a
            model, so that `from_pretrained` loads it.
        executor: where the files of "safetensors" are written; all its processes have to see `directory`.
        storage_options: for the storage of a `directory` that is a URI.
        group: which ranks share the files of "safetensors", as for `open_store`: None in all processes of a
            torch.distributed job makes the export collective. By default this process works alone.

    Raises InvalidInput and InvalidState before anything is written, CheckpointDamaged (nothing is left then), and
    errors of writing the files, the same on all ranks.
    """
    if to not in KINDS:
        raise InvalidInput(f"to is {to!r}, it is one of {', '.join(KINDS)}")
    check_shard_size(shard_size_bytes)
    place = ExportPlace(
        target=os.fspath(directory), beside_from=beside, overwrite=overwrite, storage_options=storage_options
    )
    files = files_behind(checkpoint)
    ranks = find_group(group, storage=files.storage, config=files.config)
    try:
        with files.held():
            return _export(files, place, to, include, strip_prefix, shard_size_bytes, ranks, executor)
    finally:
        if ranks is not group:
            ranks.close()


def _export(
    files: CheckpointFiles,
    place: ExportPlace,
    to: Kind,
    include: str | Sequence[str] | None,
    strip_prefix: str,
    shard_size_bytes: int,
    group: Group,
    executor: Executor | None,
) -> ExportReport:
    if group.world_size > 1 and executor is not None:
        raise InvalidInput("An export is shared by ranks or by an engine", hint="Leave one of them out")
    executor = executor or InProcess()
    if to != "safetensors" and not (executor.is_local and group.world_size == 1):
        hint = 'Leave the engine or the group out, or export "safetensors"'
        raise InvalidInput(f'An export to "{to}" is one file, which one process writes', hint=hint)
    if to != "safetensors":  # whose leader alone looks at the place, and tells all ranks
        place.check()
    manifest, data = files.read_manifest()
    if is_stock(manifest):
        hint = "Import it into a store, and export that"
        raise InvalidInput(f"{files.uri} was written by torch's DCP, and has no digests to check", hint=hint)
    stored = open_alone(files)
    try:
        saved = stored.saved(fitting(include) if to != "safetensors" else lambda key: False)
    except InvalidState as error:
        raise InvalidState(error.message, hint="Leave it out: include takes patterns of keys") from None
    is_copy = to == "dcp" and include is None and not strip_prefix and DCP_METADATA_NAME in manifest.by_name
    paths = KeyPaths() if to == "safetensors" or is_copy else paths_of(files, manifest, stored)
    selection = select(saved, all_keys=stored.all_keys(), include=include, strip_prefix=strip_prefix, paths=paths)
    durable = files.config.transfer.durable
    notices = _notices_of_ranks(stored, selection)
    training = training_form(stored.whole_index(), {*selection.sources, *selection.sources.values()})
    warn_of_training_form(training if group.rank == 0 else ())
    notices += training
    names: Sequence[str]
    if to == "safetensors":
        layout = lay_out(stored, selection, shard_size_bytes=shard_size_bytes)
        index = stored.whole_index()  # else a key is lacking of which the lowest rank has a tensor, and another a value
        num_values = len(index.common_values().keys() | index.value_ranks().keys())
        notices += [f"{num_values} plain values are left out, safetensors holds tensors only"] if num_values else []
        notices += [f"{name} is tied to {kept}, and stored as that" for name, kept in layout.tied.items()]
        source = OneCheckpoint(files.alone())
        names = write_safetensors(source, layout, place, identity=data, group=group, executor=executor)
        size_bytes = layout.size_bytes
    elif to == "torch":
        tree = build_tree(stored, selection)
        notices += [
            f"{key} is left out, torch.load(weights_only=True) refuses it: {why}" for key, why in tree.left_out.items()
        ]
        with place.opened() as path:
            names = write_torch(stored, tree, path, durable=durable)
        size_bytes = tree.size_bytes
    elif is_copy:
        names = [name for name in manifest.by_name if name.endswith(".distcp") or name == DCP_METADATA_NAME]
        receipts = [manifest.by_name[name] for name in names]
        size_bytes = sum(receipt.size_bytes for receipt in receipts)
        with place.opened() as path, files.missing_is_damage():
            files.transfer.download([(files.wanted(receipt), path / receipt.name) for receipt in receipts])
    else:
        with place.opened() as path:
            names, size_bytes = write_dcp(stored, selection, path, durable=durable)
    return ExportReport(
        kind=to,
        uri=place.uri,
        path=place.path,
        files=(*names, *(file.name for file in place.beside if file.name not in names)),
        num_tensors=len(selection.sources),
        size_bytes=size_bytes,
        notices=(*notices, *place.notices),
    )


def _notices_of_ranks(stored: StoredState, selection: Selection) -> list[str]:
    """Report keys that differ between ranks."""
    if stored.index.world_size == 1:
        return []
    apart = [key for key in selection.values if key in stored.index.value_ranks()]
    apart += [key for key in selection.sources if stored.entry(selection.sources[key]).per_rank]
    return [f"{key} differs between ranks, the lowest rank's is taken" for key in sorted(apart)]
