"""Create-if-absent is found by racing, not by the name of a server."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.errors import AccessDenied
from ckptstore.storage.open import open_storage
from ckptstore.storage.probe import has_exclusive_create
from ckptstore.testing.s3_server import Fault, S3Server


@pytest.mark.parametrize(
    ("server", "scheme", "engine"),
    [
        ("fast_s3", "s3", "native"),
        ("fast_s3", "s3", "fsspec"),
        ("fake_gcs", "gs", "fsspec"),
        ("azurite", "az", "fsspec"),
        ("fake_gcs", "gs", "native"),
        ("azurite", "az", "native"),
        pytest.param("ceph", "s3", "native", marks=pytest.mark.ceph),
        pytest.param("ceph", "s3", "fsspec", marks=pytest.mark.ceph),
    ],
)
def test_real_stores_have_it(request: pytest.FixtureRequest, server: str, scheme: str, engine: str) -> None:
    options = request.getfixturevalue(server).storage_options
    storage = open_storage(f"{scheme}://test/probe", storage_options=options, engine=engine)
    assert has_exclusive_create(storage)
    assert list(storage.list("")) == []
    storage.close()


def test_a_server_that_ignores_the_condition_is_found_out(careless_gcs: Any) -> None:
    storage = open_storage("gs://test/probe", storage_options=careless_gcs.storage_options)
    assert not has_exclusive_create(storage)
    assert list(storage.list("")) == []
    storage.close()


def test_other_urls_do_not_have_it(tmp_path: Any) -> None:
    assert not has_exclusive_create(
        open_storage("dir://probe", storage_options={"path": str(tmp_path), "target_protocol": "file"})
    )


def test_a_refusal_is_no_answer(fast_s3: S3Server) -> None:
    storage = open_storage("s3://test/probe", storage_options=fast_s3.storage_options)
    fast_s3.faults.add(Fault(action="status", match="^PUT /test/probe/", times=None, status=403, code="AccessDenied"))
    try:
        with pytest.raises(AccessDenied):
            has_exclusive_create(storage)
    finally:
        fast_s3.faults.clear()
        storage.close()
