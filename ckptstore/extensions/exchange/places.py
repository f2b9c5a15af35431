"""The places of other tools' files: the source of an import, and the target of an export, which appears whole."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptstore.config import StoreConfig
from ckptstore.errors import FileMissing, InvalidInput, InvalidSource
from ckptstore.extensions.exchange.appearing import appearing, finish_others, put_export
from ckptstore.format.layout import DCP_METADATA_NAME, PART_NAME
from ckptstore.storage.disk.posix import check_replaceable, flush, translated
from ckptstore.storage.uri import local_path, parse_uri, redact
from ckptstore.transfer import Wanted
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.opened import OpenedPlace, open_place
from ckptstore.transfer.sources import FileSource

PROGRESS_FOLDER = ".ckptstore-export/"
"""The progress of an unfinished export. Loaders ignore it: they look for `*.safetensors` and named config files."""
_PARTS_BYTES = 64 << 20
"""The most memory for parts on their way to the target."""

_OWN_NAMES = re.compile(
    r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json|state\.pt"
    r"|(__0_0|state-rank=\d{5,}-\d{2,}(-[0-9a-f]{8})?)\.distcp|\.metadata"
)
"""Names of the files that exports make."""
_FILE_SUFFIXES = frozenset({".safetensors", ".pt", ".pth", ".bin", ".distcp"})
_WEIGHTS = (*_FILE_SUFFIXES, ".safetensors.index.json", ".bin.index.json", ".h5", ".msgpack", ".gguf", ".onnx")


@contextmanager
def opened_folder(uri: str, storage_options: Mapping[str, Any] | None) -> Iterator[OpenedPlace]:
    """Open the directory at a URI; it may be missing."""
    config = StoreConfig.from_env()
    moving = replace(config.transfer, durable=False)  # downloads are temporary
    place = open_place(uri, config=replace(config, transfer=moving), storage_options=storage_options)
    with closing(place):
        yield place


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

    A remote source is downloaded to a temporary directory. Raises FileMissing if nothing is found, InvalidSource for
    a directory with an unfinished export, which may be a mixture of two.
    """
    if not is_remote(uri):
        if storage_options:
            raise InvalidInput(f"storage_options mean nothing for {os.fspath(uri)!r}", hint="Leave them out")
        path = Path(local_path(uri, "The source"))
        with translated("Reading", path):
            if of_folder is not None and (path / PROGRESS_FOLDER).exists():
                raise _unfinished(uri)
        yield path
        return
    parent, _, name = os.fspath(uri).rpartition("/")
    with (
        tempfile.TemporaryDirectory(prefix="ckptstore-import-") as made,
        opened_folder(parent if of_folder is None else os.fspath(uri), storage_options) as folder,
    ):
        listed = {file.key: file.size_bytes for file in folder.storage.list(name if of_folder is None else "")}
        found = [key for key in listed if (key == name if of_folder is None else "/" not in key and of_folder(key))]
        if of_folder is not None and any(key.startswith(PROGRESS_FOLDER) for key in listed):
            raise _unfinished(uri)
        if not found:
            raise FileMissing(f"There is nothing to import at {redact(os.fspath(uri))}", file=name)
        into = Path(made) if of_folder is None else Path(made, name)
        folder.transfer.download([(Wanted(key, listed[key], None), into / key) for key in found])
        yield Path(made, name)


def _unfinished(uri: str | os.PathLike[str]) -> InvalidSource:
    return InvalidSource(f"{redact(os.fspath(uri))} has an export that is not complete", hint="Run that export again")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlace:
    """A directory that an export fills. It is empty, or holds only files that `overwrite` may replace."""

    target: str
    """A path or a URI."""
    beside_from: str | os.PathLike[str] | None
    """A directory whose files, except weights, are copied into the export under their names."""
    overwrite: bool
    storage_options: Mapping[str, Any] | None

    @property
    def beside(self) -> tuple[Path, ...]:
        """The files copied into the export: config, tokenizer and the like. Raises InvalidSource if there are none."""
        chosen = tuple(item for item, is_file in self._offered.items() if is_file)
        if self.beside_from is not None and not chosen:
            raise InvalidSource(
                f"{self.beside_from} has no files to put beside an export",
                hint="Give the directory of a model's config",
            )
        return chosen

    @property
    def notices(self) -> tuple[str, ...]:
        """For people: what is not copied, though it is neither hidden nor weights."""
        lacking = (item for item, is_file in self._offered.items() if not is_file)
        return tuple(f"{item} is left out, it is no file" for item in lacking)

    @property
    def _offered(self) -> dict[Path, bool]:
        """The items of the directory that may be copied, each with whether it is a file."""
        if self.beside_from is None:
            return {}
        path = Path(local_path(self.beside_from, "What is to lie beside an export"))
        with translated("Reading", path):
            found = {item: item.is_file() for item in sorted(path.iterdir())} if path.is_dir() else {}
        return {
            item: is_file for item, is_file in found.items() if not item.name.endswith(_WEIGHTS) and item.name[0] != "."
        }

    @property
    def path(self) -> Path | None:
        """The local directory, None if the target is remote."""
        return None if is_remote(self.target) else Path(local_path(self.target, "The directory of an export"))

    @property
    def uri(self) -> str:
        """The path or URI, for people."""
        return str(self.path or redact(self.target))

    @property
    def _aside(self) -> Path | None:
        """The local directory of the export until it is complete, None if the target is remote."""
        return self.path and self.path.parent / f".{self.path.name}.partial"

    def check(self, *, resumable: bool = False) -> None:
        """Raise InvalidInput unless the export may go there. A `resumable` export may continue an earlier one."""
        if Path(self.target).suffix in _FILE_SUFFIXES:
            raise InvalidInput(
                f"{self.uri} is named like a file", hint="An export makes a directory, and names its files"
            )
        path = self.path
        if path is None:
            with opened_folder(self.target, self.storage_options) as folder:
                present = sorted(folder.sizes_bytes())
        else:
            if self.storage_options:
                raise InvalidInput(f"storage_options mean nothing for {self.uri}", hint="Leave them out")
            with translated("Reading", path):
                check_replaceable(path)
                finish_others(path, is_own=_is_own)
                if path.exists() and not path.is_dir():
                    raise InvalidInput(f"{path} exists and is not a directory")
                present = sorted(item.name for item in path.iterdir()) if path.exists() else []
        if resumable and self._aside is not None:
            self._check_aside(self._aside)
        begun = {name for name in present if name.startswith(PROGRESS_FOLDER)}
        if present and not self.overwrite and not (resumable and begun):
            raise InvalidInput(f"{self.uri} exists and is not empty", hint="Give another directory, or overwrite it")
        own = {file.name for file in self.beside}
        others = [name for name in present if name not in begun]
        foreign = [name for name in others if "/" in name or not (_is_own(name) or name in own)]
        if foreign:
            hint = "Give another directory"
            raise InvalidInput(f"{self.uri} also holds {foreign[0]}, which no export wrote", hint=hint)

    def _check_aside(self, aside: Path) -> None:
        """Raise InvalidInput for a partial directory that no export has begun."""
        with translated("Reading", aside):
            held = sorted(item.name for item in aside.iterdir()) if aside.exists() else []
        if held and PROGRESS_FOLDER.rstrip("/") not in held:
            raise InvalidInput(
                f"{aside} holds {held[0]}, and no export has begun there",
                hint="Move it away, or give another directory",
            )

    @contextmanager
    def opened_target(self) -> Iterator[OpenedPlace]:
        """Open the directory where an export writes its files one by one: the URI, or the partial local directory."""
        config = StoreConfig.from_env()
        budget_bytes = min(config.transfer.memory_budget_bytes, _PARTS_BYTES)
        config = replace(config, transfer=replace(config.transfer, memory_budget_bytes=budget_bytes))
        uri = self._aside or self.target
        with closing(open_place(uri, config=config, storage_options=self.storage_options)) as place:
            yield place

    def publish(self, finish: Callable[[], None]) -> None:
        """Call `finish`, which removes the last traces of the way, and move the local directory into its place."""
        target, aside = self.path, self._aside
        if target is None or aside is None:
            finish()
            return
        with translated("Writing", target):
            mode = aside.stat().st_mode & 0o666
            # It was written read-only.
            for item in aside.iterdir():
                item.chmod(mode)
            put_export(aside, target, finish=finish, is_own=_is_own, copied=[file.name for file in self.beside])

    def remove_aside(self) -> None:
        """Remove the partial local directory."""
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Yield a local directory to fill. On exit it becomes the export, together with the files beside.

        After an error no local files remain.
        """
        names = [file.name for file in self.beside]
        with (
            translated("Writing", self.path or Path(tempfile.gettempdir())),
            self._sent() if self.path is None else appearing(self.path, is_own=_is_own, copied=names) as directory,
        ):
            yield directory
            for file in self.beside:
                shutil.copyfile(file, directory / file.name)
                flush(str(directory / file.name))

    @contextmanager
    def _sent(self) -> Iterator[Path]:
        """Yield a temporary directory, and send its files on exit."""
        with (
            tempfile.TemporaryDirectory(prefix="ckptstore-export-") as made,
            opened_folder(self.target, self.storage_options) as folder,
        ):
            before = sorted(folder.sizes_bytes())
            # Readers find the other files by these: removed first and written last, so that no reader finds a mixture.
            folder.storage.delete([name for name in before if leads(name)])
            yield Path(made)
            names = sorted((item.name for item in Path(made).iterdir()), key=lambda name: (leads(name), name))
            for name in names:
                folder.transfer.upload([PlannedFile(name, FileSource.of(Path(made, name)))])
                Path(made, name).unlink()
            folder.storage.delete([name for name in before if name not in names])


def leads(name: str) -> bool:
    """True if readers find the other files by this one, or cannot begin without it."""
    return name.endswith(".index.json") or name in (DCP_METADATA_NAME, "config.json")


def _is_own(name: str) -> bool:
    """True for the name of a file that an export makes, also of one on its way."""
    return bool(_OWN_NAMES.fullmatch(name) or PART_NAME.search(name))
