"""The storage contract on Ceph's radosgw, with both engines: a real store, run on demand (`make test-ceph`)."""

from __future__ import annotations

from typing import Any

import pytest
from test_contract_s3 import S3Contract

from ckptstore.storage.open import open_storage
from ckptstore.storage.probe import has_exclusive_create

pytestmark = pytest.mark.ceph


class OnCeph:
    @pytest.fixture
    def server_options(self, ceph: Any) -> dict[str, Any]:
        return dict(ceph.storage_options)


class TestObstoreOnCeph(OnCeph, S3Contract):
    engine = "obstore"


class TestFsspecOnCeph(OnCeph, S3Contract):
    engine = "fsspec"


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_it_has_create_if_absent(ceph: Any, engine: str) -> None:
    storage = open_storage("s3://test/probe", storage_options=ceph.storage_options, engine=engine)
    assert has_exclusive_create(storage)
    storage.close()
