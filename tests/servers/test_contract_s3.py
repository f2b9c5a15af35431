"""The storage contract on S3: the project's own server, with TLS too, and moto's."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ckptstore.storage.base import (
    Bucket,
    CopiesFrom,
    CopiesInside,
    CreatesExclusively,
    WritesParts,
)
from ckptstore.storage.open import open_storage
from ckptstore.testing import StorageContract
from ckptstore.testing.s3_server import S3Server

numbers = itertools.count()


class S3Contract(StorageContract):
    """Raw access goes through boto3."""

    powers = (CreatesExclusively, WritesParts, CopiesFrom, CopiesInside, Bucket)
    secrets = ("testsecret",)
    engine: ClassVar[str] = "native"

    @pytest.fixture
    def storage(self, server_options: dict[str, Any]) -> Any:
        import boto3

        self.prefix = f"run {next(numbers)}/x"
        names = {"aws_access_key_id": server_options["key"], "aws_secret_access_key": server_options["secret"]}
        where = {"endpoint_url": server_options["endpoint_url"], **server_options["client_kwargs"]}
        self.raw = boto3.client("s3", **where, **names)
        storage = open_storage(f"s3://test/{self.prefix}", storage_options=server_options, engine=self.engine)
        yield storage
        storage.delete([file.key for file in storage.list("") if file.size_bytes > 1 << 20])
        storage.close()
        self.raw.close()

    def raw_write(self, key: str, data: bytes) -> None:
        self.raw.put_object(Bucket="test", Key=f"{self.prefix}/{key}", Body=data)

    def raw_read(self, key: str) -> bytes:
        answer = self.raw.get_object(Bucket="test", Key=f"{self.prefix}/{key}")
        with answer["Body"] as body:
            return bytes(body.read())


class OnOwnServer:
    @pytest.fixture
    def server_options(self, fast_s3: S3Server) -> dict[str, Any]:
        return fast_s3.storage_options


class TestOnOwnServer(OnOwnServer, S3Contract):
    """Without TLS."""


class OverTls:
    @pytest.fixture
    def server_options(self, tls_s3: S3Server, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        return tls_s3.storage_options


@pytest.mark.slow
class TestOverTls(OverTls, S3Contract):
    """Which OpenSSL does in memory."""


def left_out(reason: str) -> Any:
    """A test that is skipped, in the place of an inherited one. A mark on that one would hold for every server."""

    @pytest.mark.skip(reason=reason)
    def test(self: Any) -> None:
        """Never run."""

    return test


class OnMoto:
    """moto looks whether a key is there and then creates it. The race is tested on the servers that have none."""

    test_of_many_creators_one_wins_and_nobody_sees_a_part = left_out("two creates may both win on moto: no lock")
    test_of_several_processes_one_wins = left_out("two creates may both win on moto: no lock")
    test_threads_do_not_disturb_each_other = left_out(
        "moto answers 500 to a listing while keys come and go: a race of its own"
    )

    @pytest.fixture
    def server_options(self, moto: Any) -> dict[str, Any]:
        return dict(moto.storage_options)


@pytest.mark.long
class TestOnMoto(OnMoto, S3Contract):
    """Another S3."""
