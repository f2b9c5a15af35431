"""A finished checkpoint of a folder, and what a store keeps of where it lay."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ckptstore.errors import CheckpointDamaged
from ckptstore.format.encoding import as_number, as_text, check_seconds
from ckptstore.format.layout import check_user_name
from ckptstore.tools.run.folders.candidate import Beside, MarkerReader, Prospect, fingerprint, text_of
from ckptstore.tools.run.folders.whole import json_in

METADATA_KEY = "folder"
TRAINER_STATE = "trainer_state.json"
_NAMED_NUMBER = re.compile(r"([A-Za-z][\w./]*)=(-?\d+(?:\.\d+)?(?:e-?\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Prospect):
    """A finished checkpoint of a folder. One that `tells_all` is finished on the other nodes too."""

    metrics: Mapping[str, float]
    fingerprint: str
    """The same text for as long as nothing of it changes."""

    @property
    def written_at_seconds(self) -> float:
        """See `written_at_ns`."""
        return self.written_at_ns / 1e9

    def metadata(self, folder: Path) -> dict[str, Any]:
        """Return the metadata that a restore needs, for `save_directory(metadata=...)`."""
        beside = {
            name: {kind: text for kind, text in asdict(it).items() if text is not None}
            for name, it in self.beside.items()
        }
        fields = {"name": self.name, "shape": self.shape, "is_directory": self.is_directory, "beside": beside}
        fields |= {"fingerprint": self.fingerprint}
        with suppress(ValueError):  # a file may have any time, and a folder any name
            fields["written_at"] = check_seconds(self.written_at_seconds)
        with suppress(UnicodeEncodeError):
            fields["path"] = str(folder).encode().decode()
        fields["step"] = self.step if self.is_exact else None
        return {METADATA_KEY: fields}


@dataclass(frozen=True, slots=True)
class Home:
    """The place of a checkpoint of a store in its folder."""

    name: str
    shape: str
    is_directory: bool
    beside: Mapping[str, Beside]
    fingerprint: str
    written_at_seconds: float | None
    """The time of the last change of its files, since the epoch by the clock of their file system; None if unknown."""
    step: int | None
    """The step that its name or a file said for certain: the store may have counted on. None if nothing said it."""
    folder: Path | None
    """The folder in which it lay, None if unknown."""

    @property
    def parent(self) -> str:
        """The directory that it lay in, "" for the folder itself."""
        return self.name.rpartition("/")[0]


def folder_of(metadata: Mapping[str, Any]) -> Path | None:
    """Return the folder in which a checkpoint lay, by its metadata; None if they do not say it."""
    fields = metadata.get(METADATA_KEY)
    path = fields.get("path") if isinstance(fields, dict) else None
    return Path(path) if isinstance(path, str) and path.startswith("/") else None


def found_of(candidate: Prospect, contents: MarkerReader, metrics_file: str | None) -> Found:
    """Make a `Found` of a candidate that is finished."""
    known: dict[str, Any] = {item.name: getattr(candidate, item.name) for item in fields(candidate)}
    known["is_exact"] = candidate.is_exact and candidate.step is not None
    metrics = _metrics(candidate, contents, metrics_file)
    return Found(**known, metrics=metrics, fingerprint=fingerprint(candidate))


def home_of(metadata: Mapping[str, Any], *, step: int) -> Home | None:
    """Read the place from the metadata of a checkpoint; None for one that came from no folder. Raises
    CheckpointDamaged."""
    fields = metadata.get(METADATA_KEY)
    if fields is None:
        return None
    try:
        beside = {check_user_name(name): _neighbour(it) for name, it in fields["beside"].items()}
        own_step = fields.get("step", step)
        home = Home(
            name=check_user_name(fields["name"]),
            shape=as_text(fields["shape"]),
            is_directory=fields["is_directory"],
            beside=beside,
            fingerprint=as_text(fields["fingerprint"]),
            written_at_seconds=check_seconds(fields["written_at"]) if "written_at" in fields else None,
            step=None if own_step is None else as_number(own_step),
            folder=folder_of(metadata),
        )
        if type(home.is_directory) is not bool:
            raise TypeError
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointDamaged(
            f"The metadata of step {step} do not tell where it lay in its folder", step=step, hint="See `show`"
        ) from error
    return home


def _neighbour(fields: Mapping[str, Any]) -> Beside:
    texts = {kind: as_text(fields[kind]) for kind in ("text", "data", "link", "copy") if fields.get(kind) is not None}
    b64decode(texts.get("data", ""), validate=True)
    for target in (texts[kind] for kind in ("link", "copy") if kind in texts):
        check_user_name(target)
    return Beside(**texts)


def _metrics(candidate: Prospect, contents: MarkerReader, metrics_file: str | None) -> dict[str, float]:
    """Return the metrics of the file that the caller names, else what the framework has written down."""
    if metrics_file is not None:
        return _numbers(_loaded(candidate, contents, metrics_file))
    if candidate.metrics_place == "trainer_state":
        return _logged(_loaded(candidate, contents, TRAINER_STATE), candidate.step)
    if candidate.metrics_place == "name":
        named = _NAMED_NUMBER.findall(re.sub(r"\.[A-Za-z]\w*$", "", candidate.name.rpartition("/")[2]))
        return {name: float(number) for name, number in named if name not in ("epoch", "step")}
    return {}


def _loaded(candidate: Prospect, contents: MarkerReader, file: str) -> Any:
    sign = candidate.files.get(file)
    text = None if sign is None else contents.read(candidate.path_of(file), sign, text_of)
    return json_in(text)


def _logged(state: Any, step: int | None) -> dict[str, float]:
    """Return the metrics that Trainer logged at this step; the last word on each counts."""
    metrics: dict[str, float] = {}
    history = state.get("log_history") if isinstance(state, dict) else None
    for entry in history if isinstance(history, list) else ():
        if isinstance(entry, dict) and entry.get("step") == step:
            metrics |= _numbers(entry)
    return {name: value for name, value in metrics.items() if name != "step"}


def _numbers(fields: Any) -> dict[str, float]:
    items = fields.items() if isinstance(fields, dict) else ()
    return {
        name: float(value)
        for name, value in items
        if _is_name(name) and isinstance(value, int | float) and not isinstance(value, bool) and _is_float(value)
    }


def _is_name(name: str) -> bool:
    """Return True if a store can keep a number under this name: JSON can name what no file can."""
    return name != "$t" and name.isprintable()


def _is_float(value: float) -> bool:
    try:
        float(value)
    except OverflowError:  # JSON has integers of any length
        return False
    return True
