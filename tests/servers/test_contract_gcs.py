"""The storage contract on Google Cloud Storage, as fake-gcs-server plays it."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar
from urllib.parse import quote

import pytest
import requests

from ckptstore.config import RetryConfig
from ckptstore.storage.base import Bucket, Configured, CopiesFrom, CopiesInside, CreatesExclusively, Doubts, WritesParts
from ckptstore.storage.open import open_storage
from ckptstore.storage.retried import with_retries
from ckptstore.testing import StorageContract

numbers = itertools.count()


class GcsContract(StorageContract):
    """Raw access goes over the JSON API."""

    powers = (CreatesExclusively, WritesParts, CopiesFrom, CopiesInside, Bucket, Configured, Doubts)
    leaves_unfinished = False
    engine: ClassVar[str]

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


class TestSdkOnFakeGcs(GcsContract):
    engine = "sdk"


@pytest.mark.slow
class TestObstoreOnFakeGcs(GcsContract):
    engine = "obstore"
