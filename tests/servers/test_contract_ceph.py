"""The storage contract on Ceph's radosgw: a real store, run on demand (`make test-ceph`)."""

from __future__ import annotations

from typing import Any

import pytest
from test_contract_s3 import S3Contract

from ckptstore.errors import StorageError
from ckptstore.testing.storage_contract import ODD_NAMES

pytestmark = pytest.mark.ceph


class OnCeph:
    @pytest.mark.parametrize("name", ODD_NAMES[:-1], ids=range(len(ODD_NAMES) - 1))
    def test_odd_names(self, storage: Any, name: str) -> None:
        S3Contract.test_odd_names(self, storage, name)  # type: ignore[arg-type]

    def test_a_key_that_is_too_long_for_s3_is_an_error(self, storage: Any) -> None:
        """The whole key, with the store's prefix, has at most 1,024 bytes; moto and the project's server take more."""
        with pytest.raises(StorageError, match="InvalidObjectName") as caught:
            storage.write(ODD_NAMES[-1], [memoryview(b"x")])
        assert not caught.value.retryable

    @pytest.fixture
    def server_options(self, ceph: Any) -> dict[str, Any]:
        return dict(ceph.storage_options)


class TestOnCeph(OnCeph, S3Contract):
    """A real store."""
