"""Files of other tools that lie in an object store: brought to this machine, or sent from it, by `Transfer`."""

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
from ckptstore.transfer.opened import OpenedPlace, open_place
from ckptstore.transfer.planned import PlannedFile
from ckptstore.transfer.sources import FileSource


@contextmanager
def opened_folder(uri: str, storage_options: Mapping[str, Any] | None) -> Iterator[OpenedPlace]:
    """The directory at a URI; it need not be there."""
    config = StoreConfig.from_env()
    moving = replace(config.transfer, durable=False)  # what is downloaded is temporary
    place = open_place(uri, config=replace(config, transfer=moving), storage_options=storage_options)
    with closing(place):
        yield place


def send(directory: Path, names: Sequence[str], folder: OpenedPlace) -> None:
    """Write files of a directory of this machine under the same names, in this order of visibility, and remove them
    here."""
    for name in names:
        folder.transfer.upload([PlannedFile(name, FileSource.of(directory / name))])
        (directory / name).unlink()


def is_remote(uri: str | os.PathLike[str]) -> bool:
    """Whether a URI names another place than a path of this machine."""
    return bool(parse_uri(uri).scheme)


@contextmanager
def on_this_machine(
    uri: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    *,
    of_folder: Callable[[str], bool] | None = None,
) -> Iterator[Path]:
    """The file at a URI as a path of this machine, for as long as the context lasts. With `of_folder` it is a
    directory, of which the files at its top are wanted whose names `of_folder` accepts.

    What lies elsewhere is downloaded to the temporary directory. Raises FileMissing when there is nothing.
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
