"""Objects of a store that are deleted in the bucket while a job runs: its next save says so by name."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import StoreMissing
from ckptstore.interchange.salvage import salvage_store
from ckptstore.testing.s3_server import S3Server
from ckptstore.transfer.opened import open_place

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("engine", ["obstore", "sdk"])
@pytest.mark.parametrize(
    ("prefix", "text"),
    [
        ("", "log/0000000003.json is gone"),
        ("log/", "log/0000000003.json is gone"),
        ("checkpoints/step-0000000001", "ckptstore.json is gone, of the latest checkpoint"),
    ],
)
def test_the_next_save_fails_and_what_is_left_is_saved(
    fast_s3: S3Server, tmp_path: Path, engine: str, prefix: str, text: str
) -> None:
    uri, options = f"s3://test/vanished/{os.urandom(4).hex()}", fast_s3.storage_options
    with ckptstore.open_store(uri, storage_options=options, engine=engine) as store:
        store.save(0, {"a": 0})
        store.save(1, {"a": 1})
        with closing(open_place(uri, storage_options=options)) as place:
            place.storage.delete([file.key for file in place.storage.list(prefix)])
        for _ in range(2):
            with pytest.raises(StoreMissing, match=text):
                store.save(2, {"a": 2})
    if not prefix:
        return
    with closing(open_place(uri, storage_options=options)) as place, closing(open_place(tmp_path / "copy")) as target:
        report = salvage_store(place, target)
    assert set(report.steps) >= {0}
    assert (1 in report.steps) == (prefix == "log/")
