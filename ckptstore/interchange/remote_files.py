"""Download files of other tools from an object store, or send them to one, by `Transfer`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.errors import FileMissing, InvalidInput
from ckptstore.storage.uri import local_path, parse_uri, redact
from ckptstore.transfer import Wanted
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.opened import OpenedPlace, open_place
from ckptstore.transfer.sources import FileSource


@contextmanager
def opened_folder(uri: str, storage_options: Mapping[str, Any] | None) -> Iterator[OpenedPlace]:
    """Open the directory at a URI; it may be missing."""
    config = StoreConfig.from_env()
    moving = replace(config.transfer, durable=False)  # downloads are temporary
    place = open_place(uri, config=replace(config, transfer=moving), storage_options=storage_options)
    with closing(place):
        yield place


def send(directory: Path, names: Sequence[str], folder: OpenedPlace) -> None:
    """Upload files of a local directory under the same names, in this order, and remove them locally."""
    for name in names:
        folder.transfer.upload([PlannedFile(name, FileSource.of(directory / name))])
        (directory / name).unlink()


def is_remote(uri: str | os.PathLike[str]) -> bool:
    """True if a URI does not name a local path."""
    return bool(parse_uri(uri).scheme)


@contextmanager
def on_this_machine(
    uri: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    *,
    of_folder: Callable[[str], bool] | None = None,
) -> Iterator[Path]:
    """Yield the file at a URI as a local path. With `of_folder`, yield a directory of the files at the top of the URI
    whose names `of_folder` accepts.

    A remote source is downloaded to a temporary directory. Raises FileMissing if nothing is found.
    """
    if not is_remote(uri):
        if storage_options:
            raise InvalidInput(f"storage_options mean nothing for {os.fspath(uri)!r}", hint="Leave them out")
        yield Path(local_path(uri, "The source"))
        return
    parent, _, name = os.fspath(uri).rpartition("/")
    with (
        tempfile.TemporaryDirectory(prefix="ckptstore-import-") as made,
        opened_folder(parent if of_folder is None else os.fspath(uri), storage_options) as folder,
    ):
        listed = {file.key: file.size_bytes for file in folder.storage.list(name if of_folder is None else "")}
        found = [key for key in listed if (key == name if of_folder is None else "/" not in key and of_folder(key))]
        if not found:
            raise FileMissing(f"There is nothing to import at {redact(os.fspath(uri))}", file=name)
        into = Path(made) if of_folder is None else Path(made, name)
        folder.transfer.download([(Wanted(key, listed[key], None), into / key) for key in found])
        yield Path(made, name)
