"""The storage contract on Azure Blob Storage, as Azurite plays it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from loopback import AZURE_KEY

from ckptstore.storage.base import CopiesFrom, CopiesInside, CreatesExclusively, WritesParts
from ckptstore.storage.open import open_storage
from ckptstore.testing import StorageContract

pytestmark = pytest.mark.slow

numbers = itertools.count()


class AzureContract(StorageContract):
    """Raw access goes through the SDK."""

    powers = (CreatesExclusively, WritesParts, CopiesFrom, CopiesInside)
    secrets = (AZURE_KEY,)
    num_deleted_files = 600  # in batches of at most 256; the server takes twenty seconds for two thousand
    engine: ClassVar[str] = "native"

    @pytest.fixture
    def storage(self, azurite: Any) -> Iterator[Any]:
        from azure.storage.blob import ContainerClient

        self.prefix = f"run {next(numbers)}/x"
        options = azurite.storage_options
        with ContainerClient.from_connection_string(options["connection_string"], "test") as self.raw:
            storage = open_storage(f"az://test/{self.prefix}", storage_options=options, engine=self.engine)
            yield storage
            storage.delete([file.key for file in storage.list("") if file.size_bytes > 1 << 20])
            storage.close()

    def raw_write(self, key: str, data: bytes) -> None:
        self.raw.upload_blob(f"{self.prefix}/{key}", data, overwrite=True)

    def raw_read(self, key: str) -> bytes:
        return bytes(self.raw.download_blob(f"{self.prefix}/{key}").readall())


class TestOnAzurite(AzureContract):
    def test_the_directories_of_a_hierarchical_namespace_are_no_files(self, storage: Any) -> None:
        """Accounts that have one list them so."""
        self.raw_write("a/file", b"x")
        self.raw.upload_blob(f"{self.prefix}/a", b"", metadata={"hdi_isfolder": "true"})
        assert [file.key for file in storage.list("")] == ["a/file"]
