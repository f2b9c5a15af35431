"""The storage contract by the generic engine: s3fs, gcsfs and adlfs themselves, on the servers of the other engines."""

from __future__ import annotations

from test_contract_azure import AzureContract
from test_contract_gcs import GcsContract
from test_contract_s3 import OnOwnServer, S3Contract

from ckptstore.storage.base import CreatesExclusively, Doubts

POWERS = (CreatesExclusively, Doubts)


class TestS3fsOnOwnServer(OnOwnServer, S3Contract):
    engine = "fsspec"
    powers = POWERS


class TestAdlfsOnAzurite(AzureContract):
    engine = "fsspec"
    powers = POWERS


class TestGcsfsOnFakeGcs(GcsContract):
    engine = "fsspec"
    powers = POWERS
