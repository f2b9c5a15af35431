"""The class Checkpoint: one committed step, or a checkpoint directory on its own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptstore.boundary import bounded
from ckptstore.errors import (
    CheckpointDamaged,
    CheckpointGone,
    CkptstoreError,
    FileMissing,
    InvalidInput,
    InvalidMetadata,
)
from ckptstore.format.encoding import dump_json, load_json
from ckptstore.format.entry import CheckpointEntry, Thinning
from ckptstore.format.layout import STORE_KEY, USER_METADATA_NAME
from ckptstore.format.manifest import Manifest, Receipt
from ckptstore.format.record import Record
from ckptstore.format.timings import Timings
from ckptstore.group import SOLO, find_group, has_torch_group
from ckptstore.storage.open import open_storage
from ckptstore.storage.uri import redact
from ckptstore.transfer.opened import open_place

if TYPE_CHECKING:
    from ckptstore.format.provenance import Provenance
    from ckptstore.loading.checkpoint_files import CheckpointFiles
    from ckptstore.loading.load_report import Dtype, LoadCheck, LoadReport, ReadOnce
    from ckptstore.loading.tensor_view import StoredTensors
    from ckptstore.loading.verify import VerifyReport
    from ckptstore.state.read.stored import PerRank
    from ckptstore.transfer.executor import Executor


@bounded
class Checkpoint:
    """One checkpoint, immutable but for its user metadata.

    A store returns them; `from_uri` opens one that lies on its own. Two objects are equal if they stand for the same
    bytes. All methods are per process; only `load` is collective.

    It can be pickled and sent to another process, which opens it on first use, with the credentials of its own
    environment: `storage_options` do not travel. It loads with the ranks of torch.distributed in that process, or
    alone if there are none.
    """

    _elsewhere: tuple[str, str, list[Any] | None] | None = None
    """The URI, prefix and record of a checkpoint that came from another process, to open it on first use."""
    _load_report: LoadReport | None = None

    def __init__(self, files: CheckpointFiles, *, load_report: LoadReport | None = None) -> None:
        self._files = files
        self._load_report = load_report

    @classmethod
    def from_uri(
        cls, uri: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, group: object = None
    ) -> Checkpoint:
        """Open a checkpoint directory that lies on its own, wherever it was copied to.

        `group` names the ranks that load a state together, as for `open_store`; "solo" is this process alone.

        Raises CheckpointGone if there is no manifest. Raises CheckpointDamaged unless every file in the manifest exists
        with its size: a copy made by other tools may be incomplete. Raises InvalidInput for a store and for STORE@STEP,
        and says how to open those.
        """
        from ckptstore.loading.checkpoint_files import CheckpointFiles

        place = open_place(uri, storage_options=storage_options)
        files = CheckpointFiles.at(place, given_group=group)
        checkpoint = cls(files)
        try:
            manifest = checkpoint._manifest
        except CheckpointGone:
            _refuse_stores(os.fspath(uri), storage_options)
            raise
        files.check_complete(manifest)
        return checkpoint

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open a local directory as `from_uri` does."""
        return cls.from_uri(path)

    @cached_property
    def _files(self) -> CheckpointFiles:
        assert self._elsewhere is not None  # otherwise `__init__` has set the files
        from ckptstore.loading.checkpoint_files import CheckpointFiles

        uri, prefix, wire = self._elsewhere
        record = None if wire is None else Record.from_wire(wire)
        return CheckpointFiles.at(open_place(uri), prefix=prefix, record=record)

    def __reduce__(self) -> tuple[Any, ...]:
        files = self._files
        files.check_can_be_sent()
        if files.storage.uri.startswith("memory://"):
            raise InvalidInput(f"{self.uri} lives in the memory of this process, and cannot be sent to another one")
        record = None if files.record is None else files.record.to_wire()
        return _arrived, (files.storage.uri, files.prefix, record)

    @cached_property
    def _manifest(self) -> Manifest:
        return self._files.read_manifest()[0]

    @property
    def _facts(self) -> CheckpointEntry | Manifest:
        """Those of the record, so that no manifest is read; without a record, those of the manifest."""
        record = self._files.record
        return record.entry if record else self._manifest

    @property
    def step(self) -> int:
        """The step that was saved."""
        return self._facts.step

    @property
    def number(self) -> int | None:
        """The number of the record that committed the checkpoint; None outside of a store."""
        return self._files.record.number if self._files.record else None

    @property
    def is_durable(self) -> bool:
        """True if the checkpoint is in the store. While it is on the disks of nodes only, each use reads the log."""
        return self._files.is_durable

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the save, and those that `CheckpointStore.annotate` had added when the checkpoint was looked
        up; including NaN and infinities."""
        return dict(self._facts.metrics)

    @property
    def created_at(self) -> float:
        """The time of the commit, in seconds since the epoch by the leader's clock."""
        return self._facts.created_at

    @property
    def world_size(self) -> int:
        """The number of ranks that saved the checkpoint."""
        return self._facts.world_size

    @property
    def size_bytes(self) -> int:
        """The bytes of all its files."""
        return self._facts.size_bytes

    @property
    def kind(self) -> str:
        """ "directory" for files of the caller's own, "state" for tensor state."""
        return self._facts.kind

    @property
    def thinned(self) -> Thinning | None:
        """The keys that were dropped from it after its save, the time, and its size before; None if it is whole."""
        return self._facts.thinned

    @property
    def timings(self) -> Timings | None:
        """The duration of each phase of the save, on which ranks; None if the save did not keep them."""
        return self._manifest.timings

    @property
    def provenance(self) -> Provenance | None:
        """The program that saved it: its commit, command line, packages and hosts; None if the save kept none."""
        return self._manifest.provenance

    @property
    def files(self) -> tuple[Receipt, ...]:
        """All files, each with its stored name, size, digest, the rank that wrote it and the name on that rank."""
        return self._manifest.files

    @cached_property
    def tensors(self) -> StoredTensors:
        """The tensors by key: dtype, shape, bytes, ranks and files. Reads the index on first use, and no tensor."""
        from ckptstore.loading.tensor_view import StoredTensors

        return StoredTensors(self._files)

    def keys(self) -> list[str]:
        """Return the keys of all tensors and plain values of the state, sorted. Raises InvalidInput without a state."""
        return self.tensors.all_keys()

    @property
    def load_report(self) -> LoadReport | None:
        """The report of the store's `load` or `resume` that returned this object; None if it loaded nothing."""
        return self._load_report

    @property
    def uri(self) -> str:
        """The place of the checkpoint, without secrets."""
        return self._files.uri

    @property
    def metadata(self) -> dict[str, Any]:
        """The user's metadata, as of the save or as set since; see `get_metadata`."""
        return self.get_metadata()

    def get_metadata(self) -> dict[str, Any]:
        """Read and return the user's metadata, as of the save or as set since."""
        key = self._files.prefix + USER_METADATA_NAME
        try:
            value = load_json(self._files.storage.read(key), file=key)
        except FileMissing:
            return dict(self._manifest.metadata)
        if not isinstance(value, dict):
            raise CheckpointDamaged(f"{key} holds a {type(value).__name__}, not the user's metadata", file=key)
        return value

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the user's metadata by a mapping that JSON can hold.

        It lies in a file of its own, outside of the manifest and of `verify`; of two writers at once the last wins.
        Raises InvalidMetadata.
        """
        if not isinstance(metadata, Mapping):
            raise InvalidMetadata(f"metadata is a {type(metadata).__name__}, not a mapping")
        data = dump_json(dict(metadata))
        files = self._files
        if files.record is not None and not any(True for _ in files.storage.list(files.prefix)):
            raise CheckpointGone(f"Step {self.step} was removed", step=self.step)
        files.write_user_metadata(data)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Set some fields of the user's metadata and keep the others."""
        if not isinstance(metadata, Mapping):
            raise InvalidMetadata(f"metadata is a {type(metadata).__name__}, not a mapping")
        self.set_metadata({**self.get_metadata(), **metadata})

    def as_directory(self) -> AbstractContextManager[Path]:
        """Provide the checkpoint as a read-only directory on this node while the context lasts.

        On a disk it is the real path. Otherwise it is a copy that all processes of this node share: it is downloaded
        once, every byte is checked, and it appears as a whole. Raises CheckpointGone, CheckpointDamaged, StorageFull.
        """
        from ckptstore.loading.story import open_directory

        return open_directory(self._files)

    def to_directory(self, path: str | os.PathLike[str] | None = None, include: str | None = None) -> Path:
        """Copy the files to a new or empty directory of your own, check every byte, and return its path.

        Without a path, each call makes a copy in the temporary directory, which is removed when this process ends; a
        kill leaves it. `as_directory` shares one copy between the processes of a node.

        `include` is a pattern ("model*") for the stored name or the name that the rank used.
        """
        from ckptstore.loading.story import copy_directory, copy_until_exit

        if path is None:
            return copy_until_exit(self._files, include=include)
        return copy_directory(self._files, path, include=include)

    def to_dict(
        self,
        *,
        include: str | Sequence[str] | None = None,
        per_rank: PerRank = "error",
    ) -> dict[str, Any]:
        """Return the nested state that was saved, without a state to load into. Every block that is read is checked.

        Tensors are whole, on the CPU, however ranks had divided them; tied ones are one object. Modules, optimizers and
        other objects are their state dicts, an optimizer's with the names of its parameters in place of numbers. A
        tuple that held objects is a list. No code that a checkpoint names is run.

        Args:
            include: only keys that fit a pattern ("model.*") or one of several; each must fit something.
            per_rank: what to do with values that differed between ranks, unless one rank saved: raise an "error", take
                the lowest rank's ("first"), or "skip" them. A mapping chooses by pattern, as in `load`.

        Raises InvalidInput for a checkpoint without a state; StateMismatch for values that differed; InvalidState for
        pickles, and for tensors that only a live object of their class can take; CheckpointDamaged. Each names the
        keys.
        """
        from ckptstore.loading.as_dict import state_as_dict

        return state_as_dict(self._files.alone(), include=include, per_rank=per_rank)

    def load(
        self,
        state: Mapping[str, Any],
        *,
        include: str | Sequence[str] | None = None,
        strict: bool = True,
        device: Any = None,
        dtype: Dtype = "same",
        read_once: ReadOnce = "rank",
        per_rank: PerRank = "error",
        allow_pickle: bool = False,
    ) -> LoadReport:
        """Load a state that was saved by `CheckpointStore.save`, in place, on any number of ranks.

        Collective over the ranks of the store, or of torch.distributed for a checkpoint that lies on its own. Only the
        bytes that this rank needs are read, straight into its tensors, and every block of them is checked. The
        keywords are those of `CheckpointStore.load`. Raises StateMismatch, with all keys that do not fit, before any
        tensor is changed. After CheckpointDamaged the state may hold anything.
        """
        from ckptstore.loading.load_state import LoadOptions, load_state

        options = LoadOptions(
            include=include,
            strict=strict,
            device=device,
            dtype=dtype,
            read_once=read_once,
            per_rank=per_rank,
            allow_pickle=allow_pickle,
        )
        if self._files.job is not None:
            return load_state(self._files.job.group, self._files, state, options)
        ranks = self._files.given_group
        if ranks is None and self._elsewhere is not None and not has_torch_group():
            ranks = SOLO  # a worker of a data loader has the environment of its rank, but cannot reach the others
        group = find_group(ranks, storage=self._files.storage, config=self._files.config)
        try:
            return load_state(group, self._files, state, options)
        finally:
            group.close()

    def check_load(
        self,
        state: Mapping[str, Any],
        *,
        include: str | Sequence[str] | None = None,
        strict: bool = True,
        dtype: Dtype = "same",
        per_rank: PerRank = "first",
        allow_pickle: bool = False,
    ) -> LoadCheck:
        """Return whether `load` with these keywords would succeed, and what it would leave out, cast or miss.

        Reads the manifest, the index and plain values, but no tensor of the model. The state may be on the meta device,
        and is not changed. Not collective: this process looks at the whole checkpoint, as one on the same number of
        ranks would. Raises InvalidInput for a pattern that fits nothing and for a checkpoint without a state,
        InvalidState for a state that nothing can be loaded into.
        """
        from ckptstore.loading.check_load import check_load
        from ckptstore.loading.load_state import LoadOptions

        options = LoadOptions(
            include=include, strict=strict, dtype=dtype, per_rank=per_rank, allow_pickle=allow_pickle, device="meta"
        )
        return check_load(self._files, state, options)

    def per_rank(self, key: str) -> list[Any]:
        """Return the plain value of `key` of every rank that had one of its own, in the order of ranks.

        The list has one value if all ranks had the same, and is empty if there is no such value. Raises InvalidInput
        for a checkpoint without a state.
        """
        from ckptstore.loading.load_state import values_of_ranks

        return values_of_ranks(self._files, key)

    def verify(self, sample: float | str | None = None, *, executor: Executor | None = None) -> VerifyReport:
        """Check every byte against its digest, or a random share of the files ("5%"); see `VerifyReport`.

        `executor` reads the files; None reads them in this process.
        """
        from ckptstore.loading.verify import verify

        return verify(self._files, sample=sample, executor=executor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and (self.uri, self.number) == (other.uri, other.number)

    def __hash__(self) -> int:
        return hash((self.uri, self.number))

    def _repr_html_(self) -> str:
        fields = {"number": self.number, "kind": self.kind, "ranks": self.world_size, "bytes": f"{self.size_bytes:,}"}
        from ckptstore.runtime.notebook import html_table

        return html_table(self.uri, {"step": self.step, **fields, **self.metrics}.items())

    def __repr__(self) -> str:
        number = "" if self.number is None else f", number={self.number}"
        return f"Checkpoint(step={self.step}{number}, uri={self.uri!r})"


def files_behind(checkpoint: Checkpoint) -> CheckpointFiles:
    """Return the files of a checkpoint, for use inside ckptstore."""
    return checkpoint._files


def _arrived(uri: str, prefix: str, record: list[Any] | None) -> Checkpoint:
    """Return a checkpoint of another process, of which neither credentials nor anything open have travelled."""
    checkpoint = Checkpoint.__new__(Checkpoint)
    checkpoint._elsewhere = uri, prefix, record
    return checkpoint


def _refuse_stores(uri: str, storage_options: Mapping[str, Any] | None) -> None:
    """Raise InvalidInput if the URI names a store, or a step as STORE@STEP, which only the command line accepts."""
    if _is_store(uri, storage_options):
        raise InvalidInput(f"{redact(uri)} is a store", hint=f"Write open_store({redact(uri)!r}).latest(), or [step]")
    match = re.fullmatch(r"(.+)@(\d+|latest)", uri)
    if match is not None and _is_store(match[1], storage_options):
        opened = f"open_store({redact(match[1])!r})" + (".latest()" if match[2] == "latest" else f"[{match[2]}]")
        raise InvalidInput(f"{redact(uri)} is how the command line names a checkpoint", hint=f"Write {opened}")


def _is_store(uri: str, storage_options: Mapping[str, Any] | None) -> bool:
    try:
        with closing(open_storage(uri, storage_options=storage_options)) as storage:
            return any(file.key == STORE_KEY for file in storage.list(STORE_KEY))
    except CkptstoreError:  # no store can be read at this URI
        return False
