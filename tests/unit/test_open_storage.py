"""From URIs to storages, and what of a URI is shown."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from ckptstore.errors import InvalidInput
from ckptstore.storage.open import choose_engine, open_storage, redact, scheme_of


def test_one_memory_name_is_one_place() -> None:
    open_storage("memory://open-test").write("below/a", [memoryview(b"x")])
    assert open_storage("memory://open-test/").read("below/a") == b"x"
    assert open_storage("memory://open-test/below").read("a") == b"x"
    assert [file.key for file in open_storage("memory://open-test/below").list("")] == ["a"]
    assert list(open_storage("memory://open-test2").list("")) == []


def test_local_uris_are_one_place(tmp_path: Path) -> None:
    root = tmp_path / "a b%20c"
    open_storage(root).write("f", [memoryview(b"x")])
    for uri in (str(root), root.as_uri(), f"file://localhost{root.as_uri()[7:]}", os.path.relpath(root)):
        assert open_storage(uri).read("f") == b"x", uri
    storage = open_storage(root)
    assert open_storage(storage.uri).read("f") == b"x"


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("memory://", "no memory storage"),
        ("file://elsewhere/path", "not a path of this machine"),
        ("file://", "not a path of this machine"),
        ("s3:/bucket/run", "lost a slash"),
        (Path("s3://bucket/run"), "lost a slash"),
        ("nosuch://x", "nosuch"),
    ],
)
def test_uris_that_cannot_be_opened(uri: str | Path, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        open_storage(uri)


def test_an_unknown_scheme_names_those_that_are_known() -> None:
    with pytest.raises(InvalidInput, match=r"memory://.*s3://.*az://"):
        open_storage("nosuch://user:secret@x")
    with pytest.raises(InvalidInput) as caught:
        open_storage("nosuch://user:secret@x?token=secret")
    assert "secret" not in str(caught.value)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ckptstore.storage.remote", None)
    with pytest.raises(InvalidInput, match=r"pip install \"ckptstore\[gcs\]\""):
        open_storage("gs://bucket/run", engine="fsspec")
    with pytest.raises(InvalidInput, match="package that fsspec needs"):
        open_storage("ftp://host/run")


def test_obstore_is_used_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    choice = choose_engine("s3://bucket")
    assert (choice.engine, "ckptstore[fast]" in choice.reason) == ("fsspec", True)
    with pytest.raises(InvalidInput, match="obstore is not installed"):
        choose_engine("s3://bucket", engine="obstore")


def test_engines_and_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="engine"):
        open_storage(tmp_path, engine="fsspec")
    with pytest.raises(InvalidInput, match="storage_options"):
        open_storage("memory://x", storage_options={"key": "value"})
    with pytest.raises(InvalidInput, match="must be"):
        open_storage("s3://bucket", engine="boto3")
    with pytest.raises(InvalidInput, match="obstore does not know"):
        choose_engine("ftp://host/x", engine="obstore")
    assert choose_engine("ftp://host/x").engine == "fsspec"
    assert choose_engine("s3://bucket", engine="fsspec").reason == "it was asked for"


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


def test_schemes() -> None:
    assert [scheme_of(uri) for uri in ("/a", "a:b", "S3://x", "simplecache::s3://x", "a/b://c")] == [
        "", "", "s3", "simplecache::s3", "",
    ]  # fmt: skip
