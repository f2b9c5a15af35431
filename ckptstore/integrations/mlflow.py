"""MLflow: record each committed checkpoint as an external LoggedModel of the run, and open a run's checkpoints again.

A LoggedModel is MLflow 3's word for a checkpoint: a run lists its models with their steps, they can be searched and
sorted by their metrics, and "external" says that the bytes lie elsewhere. MLflow is loaded on first use.
"""

from __future__ import annotations

import logging
import math
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ckptstore.boundary import boundary, bounded
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.format.encoding import shortened
from ckptstore.integrations.trackers import Reference, choose
from ckptstore.retention import Mode

__all__ = ["MlflowTracker", "checkpoint_of", "references"]

logger = logging.getLogger("ckptstore.trackers")

Run = Any
"""A run of MLflow: its id, or the object that `mlflow.start_run` returns."""

MODEL_TYPE = "checkpoint"
TAG = "ckptstore.reference"
"""The reference as JSON. A longer one continues in tags with the suffixes ".1", ".2"."""

_PARAMS = ("uri", "step", "number", "manifest_sha256", "size_bytes", "world_size")
"""Shown to people, who search by it. A reference is read from the tag alone."""
_IS_EXTERNAL = {"mlflow.model.isExternal": "true"}
_MAX_TAG_LENGTH = 5000
_MAX_NAME_LENGTH = 250
_MAX_METRICS_PER_REQUEST = 500
_PAGE_LENGTH = 100
_FOR_GOOD = (
    "BAD_REQUEST",
    "ENDPOINT_NOT_FOUND",
    "INVALID_PARAMETER_VALUE",
    "NOT_IMPLEMENTED",
    "RESOURCE_DOES_NOT_EXIST",
)
"""MLflow's error codes of requests that will never succeed. All others may pass."""


@bounded
class MlflowTracker:
    """Reports checkpoints to an MLflow run, for `ckptstore.integrations.trackers.follow`.

    Args:
        run: a run's id, the run itself, or a function that returns either when the first checkpoint is committed.
            None is the run that is active in this thread now. The run stays open.
        tracking_uri: of the server; None for the one that MLflow is set to now.

    Each checkpoint becomes a LoggedModel "step-N" of the type "checkpoint": its parameters say where it lies, its
    metrics are those of the save, at its step. Metrics that are not finite are recorded in the run alone, because
    MLflow would turn them into other numbers on the model. A name that MLflow refuses is changed, with a warning.

    Every rank may create one, also without a run: only rank 0 reports checkpoints.
    """

    def __init__(self, run: Run | Callable[[], Run] | None = None, *, tracking_uri: str | None = None) -> None:
        import mlflow

        self._run = mlflow.active_run() if run is None else run
        self._tracking_uri = tracking_uri or mlflow.get_tracking_uri()
        self._client: Any = None
        self._run_id = "" if callable(self._run) or self._run is None else run_id_of(self._run)
        self._experiment_id = ""
        self._warned_names: set[str] = set()

    def log(self, reference: Reference) -> None:
        """See `Tracker.log`."""
        with _refusals():
            self._connect()
            known = self._find(reference)
            if known is None or str(known.status) != "READY":
                self._write(reference, known)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._client = None

    def __str__(self) -> str:
        return f"MLflow run {self._run_id}" if self._run_id else "MLflow"

    def _connect(self) -> None:
        if self._client is not None:
            return
        if not self._run_id:
            run = self._run() if callable(self._run) else self._run
            if run is None:
                raise InvalidInput(
                    "there was no active run when the tracker was made", hint="Start one before, or give run="
                )
            self._run_id = run_id_of(run)
        client = _client(self._tracking_uri)
        info = client.get_run(self._run_id).info
        if info.lifecycle_stage == "deleted":
            raise InvalidInput("the run was deleted", hint="Restore it, or give another one")
        self._experiment_id, self._client = info.experiment_id, client

    def _find(self, reference: Reference) -> Any:
        """Find the model of that reference, from an earlier try; None if there is none."""
        condition = f"params.manifest_sha256 = '{reference.manifest_sha256}' AND params.number = '{reference.number}'"
        found = _models(self._client, self._experiment_id, self._run_id, condition)
        return next((model for model in found if _decoded(model) == reference.encode()), None)

    def _write(self, reference: Reference, known: Any) -> None:
        """Create the model, its metrics and its place in the run; mark it as ready last."""
        from mlflow.entities import LoggedModelOutput, Metric

        client, step = self._client, reference.step
        model = known or client.create_logged_model(
            self._experiment_id,
            name=f"step-{step}",
            source_run_id=self._run_id,
            params={name: str(getattr(reference, name)) for name in _PARAMS},
            tags={**_IS_EXTERNAL, **_tags(reference.encode())},
            model_type=MODEL_TYPE,
        )
        at_ms = max(0, int(reference.created_at * 1000))
        metrics = []
        for name, value in self._named(reference.metrics):
            model_id = model.model_id if math.isfinite(value) else None
            metrics.append(Metric(name, value, at_ms, step, model_id=model_id, run_id=self._run_id))
        for start in range(0, len(metrics), _MAX_METRICS_PER_REQUEST):
            part = metrics[start : start + _MAX_METRICS_PER_REQUEST]
            client.log_batch(self._run_id, metrics=part, synchronous=True)
        outputs = client.get_run(self._run_id).outputs if known else None
        if not any(item.model_id == model.model_id for item in (outputs.model_outputs if outputs else ())):
            client.log_outputs(self._run_id, [LoggedModelOutput(model.model_id, step)])
        client.finalize_logged_model(model.model_id, "READY")

    def _named(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        """Yield the metrics under names that MLflow accepts. The second of two with one name is left out."""
        taken = {name for name in metrics if metric_name(name) == name}
        for name, value in metrics.items():
            usable = metric_name(name)
            if usable == name:
                yield name, value
                continue
            is_free = usable not in taken
            if name not in self._warned_names:
                what = "becomes %r" if is_free else "is left out, for there is %r"
                text = f"the metric %r has a name that MLflow refuses; in %s it {what}"
                logger.warning(text, shortened(name), self, shortened(usable))
                self._warned_names.add(name)
            if is_free:
                taken.add(usable)
                yield usable, value


@boundary
def references(run: Run, *, tracking_uri: str | None = None) -> list[Reference]:
    """Return all checkpoints reported to an MLflow run, in the order of their commits, whether they still exist or not.

    Raises InvalidInput when there is no such run.
    """
    with _refusals():
        client, run_id = _client(tracking_uri), run_id_of(run)
        models = _models(client, client.get_run(run_id).info.experiment_id, run_id)
        decoded = [Reference.decode(text) for text in map(_decoded, models) if text]
    return sorted(decoded, key=lambda item: (item.store, item.number))


@boundary
def checkpoint_of(
    run: Run,
    step: int | None = None,
    *,
    best: str | None = None,
    mode: Mode | None = None,
    store: str | None = None,
    tracking_uri: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    group: object = None,
) -> Checkpoint:
    """Return a checkpoint reported to an MLflow run: the last one, that of a step, or the best by a metric.

    Args:
        run: the run's id, or the run.
        step: of a step that was committed several times, the last commit counts.
        best: the name of a metric, as passed to the save; `mode` is "min" or "max", and may be omitted if the name
            implies it, such as "eval_loss".
        store: the root of the store, for a run with checkpoints of several.
        tracking_uri: of the server; None for the one that MLflow is set to.
        storage_options, group: as for `open_store`. MLflow has no credentials of the store.

    It is found by its number and the digest of its manifest, so it is the one that the run has seen. Raises
    CheckpointGone when the run has no such checkpoint or the store does not have it any more, StoreMissing,
    AccessDenied, InvalidMetric, and InvalidInput where another store lies in its place. For a store that was moved, see
    `Reference.open`.
    """
    found = references(run, tracking_uri=tracking_uri)
    chosen = choose(found, run=f"MLflow run {run_id_of(run)}", step=step, best=best, mode=mode, store=store)
    return chosen.open(storage_options=storage_options, group=group)


def run_id_of(run: Run) -> str:
    """Return the id of a run. Raises InvalidInput for anything else."""
    run_id = getattr(getattr(run, "info", None), "run_id", run)
    if not isinstance(run_id, str) or not re.fullmatch(r"[A-Za-z0-9][\w-]{0,255}", run_id):
        raise InvalidInput(f"run is {run!r}, it is the id of an MLflow run, or the run")
    return run_id


def metric_name(name: str) -> str:
    """Return MLflow's name for a metric: with "_" for refused characters, cut off at 250 characters."""
    name = re.sub(r"[^/\w.\-: ]", "_", name)[:_MAX_NAME_LENGTH]
    if posixpath.normpath(name) != name or name.startswith("/"):
        name = name.replace("/", "_")
    return re.sub(r"^\.\.|^\.$", lambda dots: "_" * len(dots[0]), name)


def _tags(text: str) -> dict[str, str]:
    parts = [text[start : start + _MAX_TAG_LENGTH] for start in range(0, len(text), _MAX_TAG_LENGTH)]
    return {f"{TAG}.{index}" if index else TAG: part for index, part in enumerate(parts)}


def _decoded(model: Any) -> str:
    """Return the text of the reference in a model; "" if it has none."""
    parts: list[str] = []
    while (part := model.tags.get(f"{TAG}.{len(parts)}" if parts else TAG)) is not None:
        parts.append(part)
    return "".join(parts)


def _client(tracking_uri: str | None) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri)


def _models(client: Any, experiment_id: str, run_id: str, condition: str = "") -> Sequence[Any]:
    """Return the checkpoints among the models of a run, all pages of them."""
    wanted = f"source_run_id = '{run_id}' AND model_type = '{MODEL_TYPE}'" + (f" AND {condition}" if condition else "")
    found: list[Any] = []
    page_token = None
    while True:
        page = client.search_logged_models([experiment_id], wanted, max_results=_PAGE_LENGTH, page_token=page_token)
        found += page
        page_token = page.token
        if not page_token:
            return found


@contextmanager
def _refusals() -> Iterator[None]:
    """Translate permanent refusals of MLflow into InvalidInput."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except CkptstoreError:
        raise
    except MlflowException as error:
        if error.error_code not in _FOR_GOOD:
            raise
        hint = "It needs a server of MLflow 3 or later" if error.error_code == "ENDPOINT_NOT_FOUND" else None
        raise InvalidInput(f"MLflow refuses it: {error.message}", hint=hint) from error
