"""From URIs to storages, and what of a URI is shown."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.storage.open import choose_engine, open_storage
from ckptstore.storage.uri import redact


def test_one_memory_name_is_one_place() -> None:
    open_storage("memory://open-test").write("below/a", [memoryview(b"x")])
    assert open_storage("memory://open-test").read("below/a") == b"x"
    assert open_storage("memory://open-test/below").read("a") == b"x"
    assert [file.key for file in open_storage("memory://open-test/below").list("")] == ["a"]
    assert list(open_storage("memory://open-test2").list("")) == []


def test_local_uris_are_one_place(tmp_path: Path) -> None:
    root = tmp_path / "a b"
    open_storage(root).write("f", [memoryview(b"x")])
    for uri in (
        str(root),
        f"file://{root}",
        os.path.relpath(root),
        f"/{root}",
        f"{root}/",
        f"{root}/./",
        f"{root}/c/..",
    ):
        assert open_storage(uri).read("f") == b"x", uri
    storage = open_storage(root)
    assert open_storage(storage.uri).read("f") == b"x"


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("memory://", "no memory storage"),
        ("file://elsewhere/path", "not a path of this machine"),
        ("file://localhost/path", "not a path of this machine"),
        ("file:///a%20b", '"%"'),
        ("file:///a#b", '"#"'),
        ("file:///a/", "ends in a slash"),
        ("file:///a/../b", "part '.' or '..'"),
        ("file:/a", "lost a slash"),
        ("", "no URI and no path"),
        ("a\0b", "no URI and no path"),
        (" s3://bucket/run", "path with a URI in it"),
        ("/data/s3://bucket/run", "path with a URI in it"),
        ("S3://bucket/run", "capital letters"),
        ("s3://bucket/run/", "ends in a slash"),
        ("s3://bucket/", "ends in a slash"),
        ("s3://bucket//run", "empty part"),
        ("s3://bucket/a/../run", "part '.' or '..'"),
        ("s3://bucket/a\\run", "backslash"),
        ("s3://bucket/a\nrun", "control character"),
        ("s3://bucket/run?versionId=1", '"\\?"'),
        ("s3://host:9000/bucket/run", "a port"),
        ("s3://key:secret@bucket/run", "a secret"),
        ("s3://user@bucket/run", "a user"),
        ("s3://buck%20et/run", "not the name of a bucket"),
        ("s3:///run", "no bucket"),
        ("az://container@elsewhere.example/x", "storage account"),
        ("az://container@account/x", "storage account"),
        ("abfs://container@Account.dfs.core.windows.net/x", "storage account"),
        ("memory://name/", "ends in a slash"),
        ("memory:///name", "no memory storage"),
        ("sftp://user@host/x", "a user"),
        ("sftp://host:22/x", "a port"),
        ("local:///tmp/x", "path of this machine"),
        ("ftp://HOST/x", "capital letters"),
        ("simplecache::s3://bucket/a", "path with a URI in it"),
        ("file://", "not a path of this machine"),
        ("s3:/bucket/run", "lost a slash"),
        (Path("s3://bucket/run"), "lost a slash"),
        ("nosuch://x", "nosuch"),
    ],
)
def test_uris_that_cannot_be_opened(uri: str | Path, text: str) -> None:
    with pytest.raises(InvalidInput, match=text) as caught:
        open_storage(uri)
    assert "secret@" not in str(caught.value)


def test_an_unknown_scheme_names_those_that_are_known() -> None:
    with pytest.raises(InvalidInput, match=r"memory://.*s3://.*az://"):
        open_storage("nosuch://x")
    for uri in ("nosuch://user:secret@x", "nosuch://user:secret@x?token=secret", "nosuch://x?token=secret"):
        with pytest.raises(InvalidInput) as caught:
            open_storage(uri)
        assert "secret@" not in str(caught.value)
        assert "=secret" not in str(caught.value)


def test_a_package_of_no_extra_that_is_missing_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ckptstore.storage.fsspec.clouds", None)
    with pytest.raises(InvalidInput, match="package that fsspec needs"):
        open_storage("ftp://host/run")


def test_engines_and_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="engine"):
        open_storage(tmp_path, engine="native")
    with pytest.raises(InvalidInput, match="storage_options"):
        open_storage("memory://x", storage_options={"key": "value"})
    with pytest.raises(InvalidInput, match="must be"):
        open_storage("s3://bucket", engine="boto3")
    with pytest.raises(InvalidInput, match="native does not know"):
        choose_engine("ftp://host/x", engine="native")
    assert choose_engine("ftp://host/x").engine == "fsspec"
    assert choose_engine("s3://bucket", engine="native").reason == "it was asked for"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("/a@b/c?d#e", "/a@b/c?d#e"),
        ("memory://a@b/c?d", "memory://a@b/c?d"),
        ("file:///a@b/c?d", "file:///a@b/c?d"),
        ("s3://bucket/a@b/c", "s3://bucket/a@b/c"),
        ("s3://key:secret@bucket/a?versionId=x#y", "s3://bucket/a"),
        ("s3://key:sec/ret@bucket/a", "s3://bucket/a"),
        ("s3://key:sec/r:e/t@bucket", "s3://bucket"),
        ("http://host:9000/a@b", "http://host:9000/a@b"),
        ("sftp://user@host:22/a", "sftp://host:22/a"),
        ("abfs://container@account.dfs.core.windows.net/a?sig=1", "abfs://container@account.dfs.core.windows.net/a"),
        ("abfs://user:secret@account/a", "abfs://account/a"),
        ("simplecache::s3://key:secret@bucket/a", "simplecache::s3://bucket/a"),
        ("zip://a::s3://key:secret@bucket/a", "zip://a::s3://bucket/a"),
    ],
)
def test_what_is_shown_of_a_uri(uri: str, shown: str) -> None:
    assert redact(uri) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    ("uri", "name", "value"),
    [("s3://b", "use_sll", False), ("s3://b", "version_aware", True), ("gs://b", "requester_pays", True)],
)
def test_an_option_that_is_not_obeyed_is_refused_whatever_its_value(uri: str, name: str, value: bool) -> None:
    with pytest.raises(InvalidInput, match=f"storage_options\\['{name}'\\] cannot be used"):
        open_storage(uri, storage_options={name: value})


def test_an_option_that_is_off_is_no_reason_to_refuse() -> None:
    open_storage("s3://b", storage_options={"version_aware": False, "session": None}).close()


def test_a_token_with_a_slash_is_a_file_and_is_never_sent() -> None:
    storage = open_storage("gs://b", storage_options={"token": "/nowhere/credentials"})
    with pytest.raises(CkptstoreError, match=r"credentials|DefaultCredentialsError"):
        storage.stat("a")
