"""Weights & Biases: record each committed checkpoint as a reference artifact of the run, and open it again from there.

The artifact holds no byte of the checkpoint: its metadata say where it lies and what it is, and one entry refers to the
manifest. W&B sends its records by itself, later if it is offline. It is loaded on first use.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptstore.boundary import boundary, bounded
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.format.layout import MANIFEST_NAME
from ckptstore.integrations.trackers import Reference, choose
from ckptstore.retention import Mode
from ckptstore.storage.uri import parse_uri

__all__ = ["WandbTracker", "checkpoint_of", "reference_of", "references"]

logger = logging.getLogger("ckptstore.trackers")

Run = Any
"""A run of W&B, from `wandb.init` or `wandb.Api().run`, its name "entity/project/id", or an offline run's directory."""

ARTIFACT_TYPE = "model"
KEY = "ckptstore_reference"
"""The key of the reference, as JSON, in the metadata of an artifact."""
LOCAL_NAME = "ckptstore-references.jsonl"
"""The file of references in the directory of a run, one per line. W&B cannot read back an offline run's artifacts."""

_REFERENCE_NAME = "reference.json"
_MAX_NAME_LENGTH = 128
_MAX_SHOWN_METRICS = 100
_REFERABLE = ("", "s3", "gs")
"""Schemes that W&B can follow. It warns of every other one, each time."""


@bounded
class WandbTracker:
    """Reports checkpoints to a W&B run, for `ckptstore.integrations.trackers.follow`.

    `run` is the run, or a function that returns it when the first checkpoint is committed; None is `wandb.run` as it is
    now. The run stays open; finish it after the store is closed.

    Each checkpoint becomes a version of the artifact "checkpoints-<run id>" of the type "model", with the alias
    "step-N". Its metadata have URI, step, number, digest and metrics. The summary of the run names the last one. The
    history of the run is left alone: there the training loop counts the steps.

    Every rank may create one, also without a run: only rank 0 reports checkpoints.
    """

    def __init__(self, run: Run | Callable[[], Run] | None = None) -> None:
        import wandb

        self._source = wandb.run if run is None else run
        self._run: Any = None
        self._logged: set[str] = set()

    def log(self, reference: Reference) -> None:
        """See `Tracker.log`."""
        import wandb

        run, text = self._opened(), reference.encode()
        if run.disabled or text in self._logged:
            return
        known = run.summary.get("ckptstore/number") if run.summary.get("ckptstore/store") == reference.store else None
        is_last = known is None or reference.number > known  # an older one may be told of later
        name = "checkpoints-" + re.sub(r"[^\w.-]", "_", run.id)[: _MAX_NAME_LENGTH - len("checkpoints-")]
        with _refusals():
            artifact = wandb.Artifact(name, type=ARTIFACT_TYPE, metadata=_metadata(reference))
            with artifact.new_file(_REFERENCE_NAME, mode="w", encoding="utf-8") as file:
                file.write(text)
            _refer(artifact, reference)
            run.log_artifact(artifact, aliases=["latest", f"step-{reference.step}"])
            if is_last:
                shown = ("step", "uri", "manifest_sha256", "store", "number")
                run.summary.update({f"ckptstore/{name}": getattr(reference, name) for name in shown})
        _write_down(_directory_of(run), text)
        self._logged.add(text)

    def close(self) -> None:
        """See `Tracker.close`."""

    def __str__(self) -> str:
        return f"W&B run {self._run.id}" if self._run is not None else "W&B"

    def _opened(self) -> Any:
        if self._run is None:
            run = self._source() if callable(self._source) else self._source
            if run is None:
                raise InvalidInput(
                    "there was no run when the tracker was made", hint="Call wandb.init before, or give run="
                )
            if not callable(getattr(run, "log_artifact", None)) or not hasattr(run, "summary"):
                raise InvalidInput(f"run is a {type(run).__name__}, it is what wandb.init returns")
            self._run = run
        return self._run


@boundary
def references(run: Run) -> list[Reference]:
    """Return all checkpoints reported to a W&B run, in the order of their commits, whether they still exist or not.

    An offline run, or its directory, is read from this disk; any other one from the server of W&B, which has the
    records sent so far. Raises InvalidInput when there is no such run.
    """
    directory = _local_directory(run)
    if directory is not None:
        path = directory / LOCAL_NAME
        texts = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    else:
        with _refusals():
            artifacts = [item for item in _stored(run).logged_artifacts() if item.type == ARTIFACT_TYPE]
            texts = [item.metadata[KEY] for item in artifacts if isinstance(item.metadata.get(KEY), str)]
    found = [Reference.decode(text) for text in dict.fromkeys(texts)]
    return sorted(found, key=lambda item: (item.store, item.number))


@boundary
def checkpoint_of(
    run: Run,
    step: int | None = None,
    *,
    best: str | None = None,
    mode: Mode | None = None,
    store: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    group: object = None,
) -> Checkpoint:
    """Return a checkpoint reported to a W&B run: the last one, that of a step, or the best by a metric.

    Args:
        run: the run, its name "entity/project/id", the directory of an offline run, or an artifact of a checkpoint, as
            `run.use_artifact` returns it: then it is that checkpoint.
        step: of a step that was committed several times, the last commit counts.
        best: the name of a metric, as passed to the save; `mode` is "min" or "max", and may be omitted if the name
            implies it, such as "eval_loss".
        store: the root of the store, for a run with checkpoints of several.
        storage_options, group: as for `open_store`. W&B has no credentials of the store.

    It is found by its number and the digest of its manifest, so it is the one that the run has seen. Raises
    CheckpointGone when the run has no such checkpoint or the store does not have it any more, StoreMissing,
    AccessDenied, InvalidMetric, and InvalidInput where another store lies in its place. For a store that was moved, see
    `Reference.open`.
    """
    if _is_artifact(run):
        if any(item is not None for item in (step, best, mode, store)):
            hint = "Leave out step, best, mode and store, or give the run"
            raise InvalidInput("An artifact is one checkpoint", hint=hint)
        chosen = reference_of(run)
    else:
        name = run if isinstance(run, str | os.PathLike) else getattr(run, "id", run)
        chosen = choose(references(run), run=f"W&B run {name}", step=step, best=best, mode=mode, store=store)
    return chosen.open(storage_options=storage_options, group=group)


@boundary
def reference_of(artifact: Any) -> Reference:
    """Return the reference in an artifact. Raises InvalidInput for an artifact of something else."""
    text = dict(getattr(artifact, "metadata", None) or {}).get(KEY)
    if not isinstance(text, str):
        name = getattr(artifact, "name", type(artifact).__name__)
        raise InvalidInput(f"The artifact {name!r} is no checkpoint of ckptstore")
    return Reference.decode(text)


def _metadata(reference: Reference) -> dict[str, Any]:
    """Return the fields that people see and search by; a reference is read from its own field alone."""
    names = ("uri", "store", "step", "number", "manifest_sha256", "size_bytes", "world_size", "created_at")
    # W&B accepts no infinities.
    shown = {name: value for name, value in reference.metrics.items() if math.isfinite(value)}
    metrics = dict(list(shown.items())[:_MAX_SHOWN_METRICS])
    return {**{name: getattr(reference, name) for name in names}, "metrics": metrics, KEY: reference.encode()}


def _refer(artifact: Any, reference: Reference) -> None:
    """Add a reference to the manifest, if W&B knows the scheme and the manifest exists."""
    location = parse_uri(reference.uri)
    if location.scheme not in _REFERABLE:
        return
    uri = f"{location.uri if location.scheme else Path(location.uri).as_uri()}/{MANIFEST_NAME}"
    try:
        artifact.add_reference(uri, name=MANIFEST_NAME, checksum=False)
    except Exception as error:  # deleted meanwhile, or that cloud's SDK is missing: the metadata suffice
        logger.debug("W&B has no entry for %s: %s", uri, error)


def _directory_of(run: Any) -> Path:
    """Return the directory of a run of this process, for files of its own."""
    return Path(run.dir).parent


def _write_down(directory: Path, text: str) -> None:
    path = directory / LOCAL_NAME
    if path.exists() and text in path.read_text(encoding="utf-8").splitlines():
        return
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def _local_directory(run: Run) -> Path | None:
    """Return the directory of an offline run; None for one that the server has."""
    if isinstance(run, str | os.PathLike):
        path = Path(run)
        if not any(path.glob("run-*.wandb")):
            if isinstance(run, os.PathLike) or path.is_dir():
                raise InvalidInput(
                    f"{path} is not the directory of an offline run", hint="Such as wandb/offline-run-..."
                )
            return None
        return path
    return _directory_of(run) if getattr(run, "offline", False) else None


def _stored(run: Run) -> Any:
    """Return the run from the server."""
    if callable(getattr(run, "logged_artifacts", None)):
        return run
    name = run if isinstance(run, str) else getattr(run, "path", None)
    if not isinstance(name, str) or not re.fullmatch(r"[^/\s]+(/[^/\s]+){0,2}", name):
        raise InvalidInput(
            f'run is {run!r}, it is a run of W&B, "entity/project/id", or the directory of an offline run'
        )
    import wandb

    return wandb.Api().run(name)


def _is_artifact(run: Any) -> bool:
    if isinstance(run, str | os.PathLike):
        return False
    import wandb

    return isinstance(run, wandb.Artifact)


@contextmanager
def _refusals() -> Iterator[None]:
    """Translate permanent refusals of W&B into InvalidInput: a finished or unknown run, no key."""
    import wandb

    try:
        yield
    except CkptstoreError:
        raise
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError, ValueError) as error:
        raise InvalidInput(f"W&B refuses it: {error}") from error
