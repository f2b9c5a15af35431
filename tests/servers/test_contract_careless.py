"""The storage contract on gcp-storage-emulator, which takes the condition of a create and ignores it: all but that
holds, and a store there finds it out before it writes."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from test_contract_gcs import GcsContract
from test_contract_s3 import left_out

import ckptstore
from ckptstore.errors import InvalidInput, StorageError
from ckptstore.storage.open import open_storage

numbers = itertools.count()
DEVIATIONS = {
    "test_create_changes_nothing_that_exists": "preconditions",
    "test_of_many_creators_one_wins_and_nobody_sees_a_part": "preconditions",
    "test_of_several_processes_one_wins": "preconditions",
    "test_a_version_stands_for_contents": "the generation that is asked for",
    "test_a_long_listing_is_complete": "page tokens",
    "test_a_file_that_ends_early_is_damaged": "ranges of empty objects",
}


class OnCarelessServer(GcsContract):
    """Without obstore: the emulator's answers lack the Last-Modified header that obstore insists on."""

    engine = "sdk"

    @pytest.fixture
    def storage(self, careless_gcs: Any) -> Any:
        self.url = careless_gcs.url
        self.prefix = f"careless {next(numbers)}/x"
        options = careless_gcs.storage_options
        storage = open_storage(f"gs://test/{self.prefix}", storage_options=options, engine=self.engine)
        yield storage
        storage.close()


for name, ignored in DEVIATIONS.items():
    setattr(OnCarelessServer, name, left_out(f"the emulator ignores {ignored}"))


@pytest.mark.long
class TestSdkOnCarelessServer(OnCarelessServer):
    """The second engine, whose requests are those that it makes to the server that is not careless."""


@pytest.mark.parametrize("engine", ["sdk", "fsspec"])
def test_a_store_asks_for_a_promise(careless_gcs: Any, tmp_path: Path, engine: str) -> None:
    options = careless_gcs.storage_options
    with (
        ckptstore.open_store("gs://test/careless/alone", storage_options=options, engine=engine) as store,
        pytest.raises(InvalidInput, match="create") as caught,
    ):
        store.save_directory(1, tmp_path)
    assert "single_writer=True" in str(caught.value.hint)
    with closing(open_storage("gs://test/careless/alone", storage_options=options, engine=engine)) as storage:
        assert not list(storage.list("log/"))


def test_an_answer_that_obstore_cannot_read_is_no_outage(careless_gcs: Any) -> None:
    with closing(open_storage("gs://test/careless/x", storage_options=careless_gcs.storage_options)) as storage:
        storage.write("there", [memoryview(b"x")])
        with pytest.raises(StorageError, match="does not understand the server") as caught:
            storage.read("there")
        assert not caught.value.retryable
        assert "sdk" in str(caught.value.hint)
