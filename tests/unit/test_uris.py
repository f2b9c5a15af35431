"""Different names are different places: two URIs that are accepted lead to one place only where they are one URI."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import ckptstore
from ckptstore.errors import InvalidInput
from ckptstore.storage.cloud.azure import AzureFiles
from ckptstore.storage.cloud.gcs import GcsFiles
from ckptstore.storage.memory import _spaces
from ckptstore.storage.open import open_storage
from ckptstore.storage.uri import Location, local_path, parse_uri
from ckptstore.testing.s3_server import S3Server, s3_server

# fmt: off
_PARTS = (
    "exp", "EXP", "#1", "#2", "?a", "%20", "%2F", "%", " ", "é", "e\u0301",
    ".", "..", "\\", "/", "//", "@3", ":", "+", "~",
)
# fmt: on
NAMES = st.one_of(
    st.lists(st.sampled_from(_PARTS), min_size=1, max_size=5).map("".join),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=12),
)
SCHEMES = ("s3", "s3a", "S3", "gs", "gcs", "az", "abfs", "memory", "file", "sftp")


def location_of(uri: str) -> Location | None:
    try:
        return parse_uri(uri)
    except InvalidInput:
        return None


@given(st.sampled_from(SCHEMES), NAMES)
@example("s3", "exp#1")
@example("s3", "a%20b")
def test_a_uri_is_taken_character_by_character_or_refused(scheme: str, name: str) -> None:
    location = location_of(f"{scheme}://bucket/{name}")
    if location is not None:
        assert scheme != "S3"
        assert scheme != "file"  # there "bucket" would be a host
        assert (location.container, location.prefix) == ("bucket", name)
        assert parse_uri(location.uri) == location


HOSTS = st.text("aB1.-_$@:#%?é", min_size=1, max_size=4)


@given(st.sampled_from(("s3", "memory", "abfs", "sftp")), HOSTS, HOSTS)
def test_authorities_do_not_fall_together(scheme: str, one: str, other: str) -> None:
    first, second = location_of(f"{scheme}://{one}"), location_of(f"{scheme}://{other}")
    assert one == other or first is None or first != second


@given(NAMES, NAMES)
def test_what_two_spaces_in_memory_hold_is_apart(one: str, other: str) -> None:
    space = f"names-{uuid.uuid4().hex}"
    accepted = [name for name in {one, other} if location_of(f"memory://{space}/{name}")]
    for name in accepted:
        open_storage(f"memory://{space}/{name}").write("x", [memoryview(name.encode())])
    assert (
        {key: file.data for key, file in _spaces[space].files.items()}
        == {f"{name}/x": name.encode() for name in accepted}
        if accepted
        else space not in _spaces
    )


@given(name=NAMES)
def test_a_path_is_what_the_system_takes_it_for(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    root = tmp_path_factory.mktemp("names")
    try:
        storage = open_storage(f"{root}/{name}")
    except InvalidInput:
        assert "\0" in name or "://" in name
        return
    if ".." not in name.split("/"):
        storage.write("x", [memoryview(b"1")])
        assert Path(f"{root}/{name}/x").read_bytes() == b"1"
        assert open_storage(storage.uri).read("x") == b"1"


def test_two_dots_lead_where_a_link_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far" / "inner")
    open_storage(f"{tmp_path}/near/link/../run").write("x", [memoryview(b"1")])
    assert (tmp_path / "far" / "run" / "x").read_bytes() == b"1"
    monkeypatch.chdir(tmp_path / "near")
    assert open_storage("link/../run").read("x") == b"1"
    assert open_storage("../far/run").read("x") == b"1"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server(buckets=["test"]) as started:
        yield started


ALIKE = ("exp#1", "exp#2", "exp", "a b", "a%20b", "a+b", "a%2Fb", "a/b", "é", "e\u0301", "run@3", "~:x")


def test_s3_has_each_name_at_one_key(server: S3Server) -> None:
    options, objects = server.storage_options, server.objects.buckets["test"]
    for name in ALIKE:
        storage = open_storage(f"s3://test/alike/{name}", storage_options=options)
        storage.write("x", [memoryview(name.encode())])
    assert {key for key in objects if key.startswith("alike/")} == {f"alike/{name}/x" for name in ALIKE}
    for name in ALIKE:
        storage = open_storage(f"s3://test/alike/{name}", storage_options=options)
        assert storage.read("x") == name.encode()
        assert "x" in [file.key for file in storage.list("")]


@given(NAMES)
def test_google_and_azure_are_asked_for_the_very_name(name: str) -> None:
    from azure.storage.blob import ContainerClient

    google, azure = location_of(f"gs://bucket/{name}"), location_of(f"az://bucket/{name}")
    assume(google is not None)
    assert google is not None
    assert azure is not None
    opened_as = (open_storage, ("", {}))
    files: Any = GcsFiles(google, {}, opened_as)
    assert unquote(files.object("x").rpartition("/o/")[2]) == f"{name}/x"
    client = ContainerClient("https://account.blob.core.windows.net", "bucket")
    blobs = AzureFiles(azure, {}, opened_as)
    blobs._client = client
    assert unquote(blobs.blob("x").url) == f"https://account.blob.core.windows.net/bucket/{name}/x"


def test_runs_whose_names_differ_behind_a_mark_do_not_meet(server: S3Server, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("of one")
    options = server.storage_options
    with ckptstore.open_store("s3://test/run#1", storage_options=options) as store:
        checkpoint = store.save_directory(1, tmp_path)
    with ckptstore.open_store("s3://test/run#2", storage_options=options) as store:
        assert store.resume() is None
    assert ckptstore.Checkpoint.from_uri(checkpoint.uri, storage_options=options).step == 1


@pytest.mark.parametrize("rest", ["", "/name", "/name/path"])
def test_an_access_point_is_named_by_its_alias(rest: str) -> None:
    with pytest.raises(InvalidInput, match="alias"):
        parse_uri(f"s3://arn:aws:s3:eu-west-1:123456789012:accesspoint{rest}")


@pytest.mark.parametrize("uri", ["s3://bucket/out", "memory://out", "gs://bucket/out"])
def test_what_lies_on_this_machine_is_not_made_of_a_uri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("a")
    with ckptstore.open_store("memory://local-names") as store:
        checkpoint = store.save_directory(1, tmp_path, exists="replace")
        with pytest.raises(InvalidInput, match="of this machine"):
            checkpoint.to_directory(uri)
    with pytest.raises(InvalidInput, match="The place is"):
        local_path(uri, "The place")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
