"""Which rank stores which file of a Hugging Face checkpoint, and the second names that keep files for an upload."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from ckptstore import KeepLatest, open_store
from ckptstore.errors import InvalidInput, InvalidSource
from ckptstore.integrations.lazy_store import LazyStore
from ckptstore.integrations.transformers.shares import link, seen_in
from ckptstore.tools.run.folders.division import divide


def test_one_rank_has_all() -> None:
    assert divide([{"a": (1, 10), "b": (1, 20)}]) == [{"a", "b"}]


def test_ranks_that_see_the_same_divide_it_by_bytes() -> None:
    seen = {"model": (1, 100), "optimizer": (2, 90), "state": (3, 5), "config": (3, 1)}
    assert divide([seen, seen]) == [{"model"}, {"optimizer", "state", "config"}]


def test_a_file_is_stored_by_a_rank_that_sees_it() -> None:
    shares = divide([{"model": (1, 100), "rng_0": (1, 5)}, {"rng_1": (1, 5)}, {}])
    assert shares == [{"model", "rng_0"}, {"rng_1"}, set()]


def test_of_two_versions_of_a_name_the_newer_one_is_stored() -> None:
    shares = divide([{"model": (1, 100)}, {"model": (2, 80)}])
    assert shares == [set(), {"model"}]


def test_the_files_of_a_directory_are_seen_with_time_and_size(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"123")
    os.utime(tmp_path / "a" / "b" / "file", ns=(5, 7))
    assert seen_in(tmp_path) == {"a/b/file": (7, 3)}
    assert seen_in(tmp_path / "missing") == {}


def test_links_outlive_the_names_that_they_were_made_from(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-3"
    (source / "global_step3").mkdir(parents=True)
    (source / "global_step3" / "shard").write_bytes(b"shard")
    (source / "model").write_bytes(b"model")
    (source / "other").write_bytes(b"other")
    links = tmp_path / ".links"
    link(source, {"global_step3/shard", "model"}, links)
    assert os.stat(links / "model").st_ino == os.stat(source / "model").st_ino
    shutil.rmtree(source)
    assert seen_in(links).keys() == {"global_step3/shard", "model"}


def test_a_disk_without_links_is_told(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-3"
    source.mkdir()
    links = tmp_path / ".links"
    with pytest.raises(InvalidSource, match=r"model cannot get a second name.*output_dir"):
        link(source, {"model"}, links)
    assert not links.exists()


def test_a_store_that_was_given_open_stays_open(tmp_path: Path) -> None:
    given = LazyStore(tmp_path / "store", {"grace_seconds": 60})
    store = given.get()
    assert given.get() is store
    again = LazyStore(store, {})
    assert again.get() is store
    again.close()
    store.save(1, {"n": 1})
    given.close()
    assert given.get() is not store
    given.close()


def test_keywords_are_for_a_uri_or_a_function_that_has_them(tmp_path: Path) -> None:
    given = LazyStore(partial(open_store, tmp_path), {"retention": KeepLatest(2)})
    assert given.get().retention == KeepLatest(2)
    with pytest.raises(InvalidInput, match="grace_seconds: only a URI, or a function with these keywords"):
        LazyStore(lambda: given.get(), {"grace_seconds": 60})
    with pytest.raises(InvalidInput, match="retention: only a URI"):
        LazyStore(given.get(), {"retention": KeepLatest(2)})
    given.close()
    with pytest.raises(InvalidInput, match="store is a int"):
        LazyStore(3, {})  # type: ignore[arg-type]
