"""What a report says, held to the schema, and the stores that the tests look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from ckptstore import CheckpointStore
from ckptstore.tools.report.document import Document
from ckptstore.tools.report.gather import Sighting

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/report-schema.json").read_text())


def checked(value: Any) -> Any:
    """A document, held to the schema, as it is after a journey as JSON."""
    value = json.loads(json.dumps(value, allow_nan=False))
    jsonschema.Draft202012Validator(SCHEMA).validate(value)
    return value


def look(store: CheckpointStore, **options: Any) -> Any:
    """What a report says of a store that is open here."""
    seen = Sighting(store, **options).look()
    document = Document(created_at=1.0, command="test", live=False, stores=(seen,))
    return checked(document.to_json())["stores"][0]


def files(directory: Path, size_bytes: int = 3000) -> Path:
    """A directory to save."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.pt").write_bytes(bytes(size_bytes))
    return directory


def everything(root: Path) -> list[tuple[str, int, int]]:
    """All that a store has on a disk, so that a change would show."""
    found = [(str(path), path.stat()) for path in sorted(root.rglob("*"))]
    return [(name, stat.st_mtime_ns, stat.st_size) for name, stat in found]
