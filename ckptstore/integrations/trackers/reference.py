"""A reference to a checkpoint, as a tracker stores it, the way back to the checkpoint, and the choice among several."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ckptstore.boundary import bounded
from ckptstore.checkpoint import Checkpoint, files_behind
from ckptstore.errors import AccessDenied, CheckpointGone, InvalidInput, StoreMissing
from ckptstore.events import CheckpointCommitted
from ckptstore.format.changes import Commit
from ckptstore.format.encoding import as_number, as_object, as_text, check_seconds, dump_json, load_object
from ckptstore.format.entry import check_metrics
from ckptstore.format.layout import CHECKPOINT_PREFIX
from ckptstore.format.record import Record
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.log import Log
from ckptstore.log.identity import read_identity
from ckptstore.retention import Candidate, Mode, check_metric_exists, ranked
from ckptstore.transfer.opened import OpenedPlace, open_place

_VERSION = 1


@bounded
@dataclass(frozen=True, kw_only=True)
class Reference:
    """One committed checkpoint, as a tracker stores it: no bytes of it, and no secrets."""

    store: str
    """The root of the store, without secrets."""
    step: int
    number: int
    """The number of the record that committed it. Of two references to one step the higher one was committed later."""
    attempt: str
    """The name of its directory below `checkpoints/`."""
    manifest_sha256: str
    """The record's digest of the manifest. The manifest has the digest of every file, so this stands for every byte."""
    size_bytes: int
    world_size: int
    created_at: float
    """Seconds since the epoch by the clock of the job's rank 0."""
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    """As they were saved, NaN and infinities included."""

    @staticmethod
    def of_event(event: CheckpointCommitted) -> Reference:
        """Create the reference to a checkpoint that was just committed."""
        return Reference(**{item.name: getattr(event, item.name) for item in fields(Reference)})

    @staticmethod
    def to(checkpoint: Checkpoint) -> Reference:
        """Create the reference to a checkpoint of a store, such as one that a tracker missed.

        Raises InvalidInput for a checkpoint directory outside of a store: no log says what it is.
        """
        files = files_behind(checkpoint)
        if files.is_on_nodes:
            raise InvalidInput(
                f"Step {checkpoint.step} was found on the disks of nodes, and a reference names what the store has",
                hint="Take it from the store once it is there: what `durable()` of its save returns, or store[step]",
            )
        if files.record is None:
            raise InvalidInput(f"{checkpoint.uri} lies outside of a store", hint="Take it from an open store")
        entry = files.record.entry
        return Reference(
            store=files.storage.uri,
            step=entry.step,
            number=files.record.number,
            attempt=entry.attempt,
            manifest_sha256=entry.manifest_sha256,
            size_bytes=entry.size_bytes,
            world_size=entry.world_size,
            created_at=entry.created_at,
            metrics=dict(entry.metrics),
        )

    @property
    def uri(self) -> str:
        """Location of the files, without secrets; `Checkpoint.from_uri` opens it."""
        return f"{self.store.rstrip('/')}/{CHECKPOINT_PREFIX}{self.attempt}"

    @property
    def target(self) -> str:
        """STORE@STEP, as the command line accepts it."""
        return f"{self.store}@{self.step}"

    def encode(self) -> str:
        """Return the reference as JSON text. `decode` returns an equal reference for it."""
        return dump_json({"version": _VERSION, "uri": self.uri, **asdict(self)}, what="reference").decode()

    @staticmethod
    def decode(text: str | bytes) -> Reference:
        """Read the result of `encode`. Fields of later versions are left out.

        Raises CheckpointDamaged for text that is no JSON object, InvalidInput for one without a reference.
        """
        value = load_object(text.encode(errors="surrogatepass") if isinstance(text, str) else text, file="reference")
        try:
            found: dict[str, Any] = {name: as_text(value.get(name)) for name in ("store", "attempt", "manifest_sha256")}
            found |= {name: as_number(value.get(name)) for name in ("step", "number", "size_bytes", "world_size")}
            created_at, metrics = check_seconds(value.get("created_at")), as_object(value.get("metrics"))
            check_metrics(metrics)
            metrics = {name: float(number) for name, number in metrics.items()}
            if "" in found.values():
                raise ValueError("it does not say to which")
        except (ValueError, OverflowError) as error:
            hint = "ckptstore's trackers write them"
            raise InvalidInput(f"This is no reference to a checkpoint: {error}", hint=hint) from None
        return Reference(**found, created_at=created_at, metrics=metrics)

    def open(
        self,
        *,
        at: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        group: object = None,
    ) -> Checkpoint:
        """Open the checkpoint. It is looked up by its number and its digest, so it is this one and no other; or what is
        left of it, if it was thinned since.

        Args:
            at: the place of the store, if it was moved or copied with `ckptstore cp`.
            storage_options: credentials and the like, as for `open_store`; a reference has none.
            group: which ranks load a state together, as for `open_store`.

        Raises StoreMissing where there is no store, AccessDenied without credentials. Raises CheckpointGone, which
        names the live checkpoints, when the checkpoint is in the trash or was deleted. Raises InvalidInput when its
        number is that of another checkpoint: another store lies there, or a copy that does not have this one.
        """
        place = open_place(self.store if at is None else at, storage_options=storage_options)
        try:
            record = self._find(place)
        except AccessDenied as error:
            place.close()
            raise AccessDenied(
                f"Step {self.step} of {place.storage.uri} cannot be looked up: {error.message}",
                file=error.file,
                hint="A reference has no credentials: give storage_options, or set them in the environment",
            ) from error
        except BaseException:
            place.close()
            raise
        files = CheckpointFiles.at(place, prefix=record.entry.prefix, record=record, given_group=group)
        return Checkpoint(files)

    def _find(self, place: OpenedPlace) -> Record:
        uri, log = place.storage.uri, Log(place.storage)
        newest = log.newest() if read_identity(place.storage) is not None else None
        if newest is None:
            hint = "If it was moved, give its place: Reference.open(at=...)"
            raise StoreMissing(f"Step {self.step} is looked for at {uri}, and there is no store", hint=hint)
        live = newest.state.live
        number = newest.state.live_at(self.number)
        if number is not None and self._is_in(log.records([self.number])[0]):
            return log.annotated(log.records([number]), newest)[0]
        records = log.records(live)
        copies = [record for record in records if self._is_in(record)]
        if copies:
            return log.annotated(copies, newest)[-1]
        found_record = log.records([self.number])[0] if self.number <= newest.number else None
        if found_record is None or not self._is_in(found_record):
            raise InvalidInput(
                f"Step {self.step} of the tracker is not in {uri}: record {self.number} "
                + ("is not there" if found_record is None else "commits another checkpoint"),
                step=self.step,
                hint="Another store lies there, or a copy without it. Give its place: Reference.open(at=...)",
            )
        shown = ", ".join(str(record.entry.step) for record in records[-10:]) or "none"
        if self.number in newest.state.trash:
            raise CheckpointGone(
                f"Step {self.step} of {uri} is in the trash; live ones: {shown}",
                step=self.step,
                hint=f"Bring it back: ckptstore restore {uri}@{self.step} --number {self.number}",
            )
        raise CheckpointGone(f"Step {self.step} of {uri} was deleted; live ones: {shown}", step=self.step)

    def _is_in(self, record: Record) -> bool:
        return isinstance(record.change, Commit) and record.entry.manifest_sha256 == self.manifest_sha256


def choose(
    references: Sequence[Reference],
    *,
    run: str,
    step: int | None = None,
    best: str | None = None,
    mode: Mode | None = None,
    store: str | None = None,
) -> Reference:
    """Choose a reference; the one committed last without `step` and `best`.

    Of a step that was committed several times the last commit counts. `best` is the name of a metric; `mode` as for
    `CheckpointStore.best`. `run` names the run in errors. `store` is the root of the store, for a run with references
    to several.

    Raises CheckpointGone when the run has no such reference, InvalidMetric when none has the metric, InvalidInput for
    contradicting arguments and for a run with several stores without `store`.
    """
    if step is not None and best is not None:
        raise InvalidInput(f"step={step!r} and best={best!r}: give one of them")
    if mode is not None and best is None:
        raise InvalidInput(f"mode={mode!r} needs a metric: best=...")
    stores = sorted({item.store for item in references})
    if store is not None:
        references = [item for item in references if item.store == store]
    elif len(stores) > 1:
        raise InvalidInput(f"{run} has checkpoints of {len(stores)} stores", hint=f"Give store=, of {stores[:5]}")
    if not references:
        of_store = f" of {store}" if store is not None else ""
        known = f"; it has those of {', '.join(stores[:5])}" if stores else ""
        raise CheckpointGone(f"{run} has no reference to a checkpoint{of_store}{known}")
    ordered = sorted(references, key=lambda item: item.number)
    if best is not None:
        candidates = [
            Candidate(number=item.number, step=item.step, committed_at=math.nan, metrics=item.metrics)
            for item in ordered
        ]
        check_metric_exists(candidates, best)
        order = ranked(candidates, best, mode)
        if not order:
            raise CheckpointGone(f"{run} has no checkpoint with a finite value of {best!r}")
        return next(item for item in ordered if item.number == order[0].number)
    found = ordered if step is None else [item for item in ordered if item.step == step]
    if not found:
        steps = ", ".join(str(item.step) for item in ordered[-10:])
        raise CheckpointGone(f"{run} has no reference to step {step}; it has {steps}", step=step)
    return found[-1]
