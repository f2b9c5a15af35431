"""A store whose log says that it holds very many checkpoints, written at once. Their files are not there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from log_entries import entry

from ckptstore.format.changes import Change, Claim, Commit
from ckptstore.format.layout import HINT_KEY, record_key
from ckptstore.format.record import Record
from ckptstore.log.identity import read_or_create_identity
from ckptstore.log.reader import Hint
from ckptstore.storage.base import Storage


def records(num_checkpoints: int) -> Iterator[Record]:
    """A claim and so many commits, all of them live."""
    newest: Record | None = None
    for number in range(1, num_checkpoints + 2):
        state: dict[str, Any] = {"epoch": 1, "resume_from": None, "live": "" if number == 1 else f"2-{number}"}
        state["live"] = "2" if number == 2 else "2 3" if number == 3 else state["live"]
        newest = Record(
            number=number,
            change=_change(number),
            previous=newest.sha256 if newest else "",
            write_id=f"{number:032x}",
            created_at=1.7e9 + number,
            encoded_state=state,
        )
        yield newest


def _change(number: int) -> Change:
    if number == 1:
        return Claim("start", 8)
    step = number - 2
    size: dict[str, Any] = {"world_size": 8, "size_bytes": 10**9, "num_files": 16, "kind": "state"}
    metrics = {"loss": 1 / (1 + step), "accuracy": step / 1e5}
    return Commit(entry(step, **size, created_at=1.7e9 + number, metrics=metrics))


def fill(storage: Storage, num_checkpoints: int) -> None:
    """Write the store."""
    read_or_create_identity(storage)
    made = list(records(num_checkpoints))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda record: storage.write(record_key(record.number), [memoryview(record.encode())]), made))
    storage.write(HINT_KEY, [memoryview(Hint(made[-1], made[-1]).encode())])
