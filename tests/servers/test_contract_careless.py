"""The storage contract on gcp-storage-emulator, which takes the condition of a create and ignores it: all but that
holds, and a store there finds it out before it writes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from test_contract_gcs import GcsContract
from test_contract_s3 import left_out

import ckptstore
from ckptstore import open_store
from ckptstore.config import StoreConfig
from ckptstore.errors import InvalidInput
from ckptstore.extensions.exchange.copying import copy_all
from ckptstore.storage.open import open_storage
from ckptstore.testing.s3.objects import S3Error
from ckptstore.testing.s3_server import S3Server
from ckptstore.transfer.opened import open_place

pytestmark = pytest.mark.slow

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
class TestOnCarelessServer(OnCarelessServer):
    """Its requests are those to the server that is not careless."""


@pytest.mark.parametrize("engine", ["native", "fsspec"])
def test_a_store_asks_for_a_promise(careless_gcs: Any, tmp_path: Path, engine: str) -> None:
    options = careless_gcs.storage_options
    with (
        open_store("gs://test/careless/alone", storage_options=options, engine=engine) as store,
        pytest.raises(InvalidInput, match="create") as caught,
    ):
        store.save_directory(1, tmp_path)
    assert "single_writer=True" in str(caught.value.hint)
    with closing(open_storage("gs://test/careless/alone", storage_options=options, engine=engine)) as storage:
        assert not list(storage.list("log/"))


CHANGES: dict[str, Callable[[ckptstore.CheckpointStore], object]] = {
    "annotate": lambda store: store.annotate(1, {"loss": 0.5}),
    "pin": lambda store: store.pin(1),
    "remove": lambda store: store.remove(1),
    "restore": lambda store: store.restore(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whoever_writes_without_the_promise_is_refused(careless_gcs: Any, name: str) -> None:
    uri = f"gs://test/careless/{name}"
    place: dict[str, Any] = {"storage_options": careless_gcs.storage_options, "group": "solo"}
    with open_store(uri, single_writer=True, **place) as store:
        store.save(1, {"a": 1})
        store.save(2, {"a": 2})
        if name == "restore":
            store.remove(1)
        before = {file.key: file.version for file in store._job.storage.list("")}
        with open_store(uri, **place) as other, pytest.raises(InvalidInput, match="create"):
            CHANGES[name](other)
        assert {file.key: file.version for file in store._job.storage.list("")} == before
        CHANGES[name](store)


def test_a_copy_without_the_promise_is_refused(careless_gcs: Any) -> None:
    options = careless_gcs.storage_options
    uri = "gs://test/careless/copy"
    place = open_place(uri, config=StoreConfig(), storage_options=options)
    with closing(place), pytest.raises(InvalidInput, match="create"):
        copy_all([], "0" * 32, place, executor=None, above=0)
    with closing(open_storage(uri, storage_options=options)) as storage:
        assert list(storage.list("")) == []


def test_a_server_is_tried_once_and_not_for_a_single_writer(fast_s3: S3Server) -> None:
    place: dict[str, Any] = {"storage_options": fast_s3.storage_options, "group": "solo"}
    with open_store("s3://test/tried", **place) as store:
        store.save(1, {"a": 1})
        assert tries(fast_s3) == 9
        store.annotate(1, {"loss": 0.5})
    with open_store("s3://test/tried", single_writer=True, **place) as store:
        store.annotate(1, {"loss": 0.4})
    assert tries(fast_s3) == 9
    with open_store("s3://test/tried", **place) as store:
        store.annotate(1, {"loss": 0.3})
        store.pin(1)
    assert tries(fast_s3) == 18


def tries(server: S3Server) -> int:
    return sum(request.method == "PUT" and "/tried/probe/" in request.path for request in server.log)


@pytest.mark.parametrize("engine", ["native", "fsspec"])
def test_a_store_on_a_server_that_refuses_the_condition(
    fast_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """As Backblaze B2 does."""
    service = fast_s3._shared.service
    put = service._put

    def refuse(request: Any) -> Any:
        if "if-none-match" in request.headers:
            raise S3Error(501, "NotImplemented")
        return put(request)

    monkeypatch.setattr(service, "_put", refuse)
    place: dict[str, Any] = {"storage_options": fast_s3.storage_options, "engine": engine, "group": "solo"}
    with open_store("s3://test/refuses", **place) as store, pytest.raises(InvalidInput, match="create") as caught:
        store.save(1, {"a": 1})
    assert "single_writer=True" in str(caught.value.hint)
    assert not fast_s3.objects.buckets["test"]
    with open_store("s3://test/refuses", single_writer=True, **place) as store:
        store.save(1, {"a": 1})
    with open_store("s3://test/refuses", single_writer=True, **place) as store:
        store.annotate(1, {"loss": 0.5})
        assert store.resume({"a": 0}).step == 1
        store.save(2, {"a": 2})
        assert [found.step for found in store] == [1, 2]
