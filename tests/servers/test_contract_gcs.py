"""The storage contract on Google Cloud Storage, as fake-gcs-server plays it."""

from __future__ import annotations

import itertools
import os
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import pytest
import requests
from hostile_front import Wire, options_behind

from ckptstore import open_store
from ckptstore.config import RetryConfig
from ckptstore.storage.base import Bucket, CopiesFrom, CopiesInside, CreatesExclusively, WritesParts
from ckptstore.storage.open import open_storage
from ckptstore.storage.retry import with_retries
from ckptstore.testing import StorageContract

pytestmark = pytest.mark.slow

numbers = itertools.count()


class GcsContract(StorageContract):
    """Raw access goes over the JSON API."""

    powers = (CreatesExclusively, WritesParts, CopiesFrom, CopiesInside, Bucket)
    leaves_unfinished = False
    engine: ClassVar[str] = "native"

    @pytest.fixture
    def storage(self, fake_gcs: Any) -> Any:
        self.url = fake_gcs.url
        self.prefix = f"run {next(numbers)}/x"
        storage = open_storage(f"gs://test/{self.prefix}", storage_options=fake_gcs.storage_options, engine=self.engine)
        yield storage
        large = with_retries(storage, RetryConfig())
        large.delete([file.key for file in large.list("") if file.size_bytes > 1 << 20])
        storage.close()

    def raw_write(self, key: str, data: bytes) -> None:
        params = {"uploadType": "media", "name": f"{self.prefix}/{key}"}
        requests.post(f"{self.url}/upload/storage/v1/b/test/o", params=params, data=data, timeout=30).raise_for_status()

    def raw_read(self, key: str) -> bytes:
        name = quote(f"{self.prefix}/{key}", safe="")
        answer = requests.get(f"{self.url}/storage/v1/b/test/o/{name}", params={"alt": "media"}, timeout=30)
        answer.raise_for_status()
        return answer.content


@pytest.mark.parametrize(("status", "times"), [(503, 1), (403, 1 << 30)])
def test_a_part_that_cannot_be_deleted_costs_no_save(
    fake_gcs: Any, tmp_path: Path, two_tries: None, status: int, times: int
) -> None:
    """A server in trouble deletes it when it is asked again; a bucket with a retention policy never does."""
    (tmp_path / "large").write_bytes(os.urandom(17 << 20))
    uri = f"gs://test/parts {next(numbers)}"

    def refuses(wire: Wire) -> bool:
        wire.drop()
        wire.line.sendall(f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode())
        return True

    with options_behind(fake_gcs) as (options, front):
        front.misbehave_on_wire(refuses, "DELETE", r"\.part-", times=times)
        with open_store(uri, storage_options=options, group="solo") as store:
            checkpoint = store.save_directory(1, tmp_path)
            assert front.done
            assert checkpoint.verify().ok
    with closing(open_storage(uri, storage_options=fake_gcs.storage_options)) as storage:
        assert any("/.part-" in file.key for file in storage.list("")) == (status == 403)
        storage.delete([file.key for file in storage.list("")])


class TestOnFakeGcs(GcsContract):
    """The JSON API of Google."""
