"""Find committed checkpoints by their names, and their files with the digests of all blocks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ckptstore.errors import CheckpointDamaged, FileMissing
from ckptstore.format.encoding import load_object
from ckptstore.format.manifest import Manifest, Receipt
from ckptstore.format.record import Record
from ckptstore.integrations.torch_checkpointing.drafts import checked_file
from ckptstore.integrations.torch_checkpointing.paths import BLOCKS_NAME, METADATA_KEY
from ckptstore.integrations.torch_checkpointing.streams import CheckedFile
from ckptstore.job import Job
from ckptstore.loading.checkpoint_files import CheckpointFiles, files_of

logger = logging.getLogger("ckptstore")


@dataclass(frozen=True)
class Committed:
    """A live checkpoint that was saved through torch_checkpointing."""

    record: Record
    name: str
    files: CheckpointFiles
    manifest: Manifest

    @cached_property
    def names(self) -> frozenset[str]:
        """Its files, as torch_checkpointing wrote them."""
        return frozenset(self.manifest.by_name) - {BLOCKS_NAME}

    @cached_property
    def directories(self) -> frozenset[str]:
        """Its directories, with "" for its own."""
        found = {"", *self.manifest.directories}
        for name in (*self.names, *self.manifest.directories):
            found |= {name[:at] for at, char in enumerate(name) if char == "/"}
        return frozenset(found)

    @cached_property
    def _blocks(self) -> dict[str, str]:
        receipt = self.manifest.by_name.get(BLOCKS_NAME)
        if receipt is None:
            raise CheckpointDamaged(f"{self.name} has no {BLOCKS_NAME}", step=self.record.entry.step, file=BLOCKS_NAME)
        blocks = load_object(self.files.read_file(receipt), file=BLOCKS_NAME).get("files")
        return blocks if isinstance(blocks, dict) else {}

    def size_bytes(self, file: str) -> int:
        """Return the size of one file. Raises FileMissing."""
        return self._receipted(file).size_bytes

    def checked(self, file: str) -> CheckedFile:
        """Return one file, with the digests of its blocks. Raises FileMissing, CheckpointDamaged."""
        return checked_file(self.files.prefix, self._receipted(file), self._blocks.get(file))

    def _receipted(self, file: str) -> Receipt:
        if file not in self.names:
            raise FileMissing(f"{self.name} has no file {file}", file=file)
        return self.manifest.by_name[file]


class Shelf:
    """The live checkpoints, by name. Manifests are read once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._known: dict[int, Committed | None] = {}
        self._lock = threading.Lock()

    def live(self) -> Iterator[Committed]:
        """Yield the live checkpoints that were saved through torch_checkpointing. Leave out, with a warning, any whose
        manifest is damaged: nobody knows its name."""
        for record in self._records():
            try:
                found = self._opened(record)
            except CheckpointDamaged as error:
                logger.warning("a checkpoint is left out of the listing: %s", error)
                continue
            if found is not None:
                yield found

    def of_step(self, step: int) -> Record | None:
        """Return the live record of a step, of whatever kind."""
        return next((record for record in self._records() if record.entry.step == step), None)

    def find(self, name: str, step: int) -> Committed | None:
        """Return the live checkpoint with that name, None if there is none."""
        records = [record for record in self._records() if record.entry.step == step]
        return next((found for record in records if (found := self._opened(record)) and found.name == name), None)

    def _records(self) -> list[Record]:
        newest = self._job.log.newest()
        return self._job.log.records(newest.state.live) if newest else []

    def _opened(self, record: Record) -> Committed | None:
        with self._lock:
            if record.number not in self._known:
                files = files_of(self._job, record)
                manifest, _ = files.read_manifest()
                field = manifest.metadata.get(METADATA_KEY)
                name = field.get("name") if isinstance(field, dict) else None
                self._known[record.number] = Committed(record, name, files, manifest) if name else None
            return self._known[record.number]
