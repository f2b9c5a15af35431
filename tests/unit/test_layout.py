"""Names and keys: what is legal everywhere, what collides somewhere, and what every key stands for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import InvalidName
from ckptstore.format import layout
from ckptstore.format.layout import Attempt, check_collisions, check_name, check_user_name, folded, ranked_name

PART_CHARACTERS = st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\")
PART = st.text(PART_CHARACTERS, min_size=1, max_size=20).filter(lambda part: part not in (".", ".."))
NAME = st.lists(PART, min_size=1, max_size=4).map("/".join)
RANK = st.integers(0, 99_999)


@given(st.integers(0, layout.MAX_STEP), st.integers(0, 10**6), st.integers(0, 2**32 - 1))
def test_an_attempt_is_read_back_from_its_directory(step: int, epoch: int, suffix: int) -> None:
    attempt = Attempt(step, epoch, f"{suffix:08x}")
    assert Attempt.parse(str(attempt)) == attempt
    assert attempt.key("a/b.pt") == f"checkpoints/{attempt}/a/b.pt"


@pytest.mark.parametrize(
    "directory",
    [
        "",
        "step-1-e0001-00000000",
        "step-0000000001-e0001-0000000",
        "step-0000000001-e0001-0000000G",
        "step-0000000001-e0001-00000000/",
        "step-0000000001-e001-00000000",
        "xstep-0000000001-e0001-00000000",
        "step-0000000001-e0001-00000000\n",
    ],
)
def test_other_directory_names_are_not_ours(directory: str) -> None:
    assert Attempt.parse(directory) is None


def test_attempts_of_one_step_sort_by_epoch() -> None:
    assert Attempt(3, 9, "ffffffff") < Attempt(3, 10, "00000000") < Attempt(4, 1, "00000000")


@given(st.integers(1, 10**10 - 1))
def test_a_record_and_a_lease_are_read_back_from_their_keys(number: int) -> None:
    assert layout.parse_record_key(layout.record_key(number)) == number
    assert layout.parse_lease_key(layout.lease_key(number, "node-7.1234")) == number


@pytest.mark.parametrize("key", ["log/1.json", "log/0000000001.json.tmp", "log/", "logs/0000000001.json", "x/log/1"])
def test_other_keys_are_no_records(key: str) -> None:
    assert layout.parse_record_key(key) is None


@given(NAME)
def test_a_plain_relative_name_is_legal(name: str) -> None:
    assert check_name(name) == name


HOSTILE = {
    "empty": "",
    "absolute": "/etc/passwd",
    "parent": "a/../../b",
    "parent first": "../a",
    "only parent": "..",
    "dot part": "a/./b",
    "empty part": "a//b",
    "trailing slash": "a/",
    "NUL": "a\0b",
    "newline": "a\nb",
    "delete": "a\x7fb",
    "C1 control": "a\x85b",
    "backslash": "a\\b",
    "lone surrogate": "a\udc80",
    "too long": "a/" * 512 + "b",
    "long part": "a" * 256,
    "long part in bytes": "é" * 128,
}


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_name_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(InvalidName, match=r"cannot be stored: (it|a part)"):
        check_name(name)


@given(st.text(max_size=60))
def test_a_legal_name_never_leaves_its_directory(name: str) -> None:
    try:
        check_name(name)
    except InvalidName:
        return
    assert not name.startswith("/")
    assert {"", ".", ".."}.isdisjoint(name.split("/"))
    assert "\0" not in name
    assert len(name.encode()) <= layout.MAX_NAME_BYTES


@pytest.mark.parametrize("name", ["ckptstore.json", "CKPTSTORE.JSON", "user-metadata.json"])
def test_the_names_of_the_format_are_reserved_for_it(name: str) -> None:
    with pytest.raises(InvalidName, match="reserved"):
        check_user_name(name)
    assert check_user_name(f"sub/{name}")


@pytest.mark.parametrize(
    ("name", "ranked"),
    [
        ("model.pt", "model-rank=00003.pt"),
        ("a/model.pt", "a/model-rank=00003.pt"),
        ("a.b/model", "a.b/model-rank=00003"),
        ("model.tar.gz", "model.tar-rank=00003.gz"),
        (".hidden", ".hidden-rank=00003"),
        ("a/.hidden", "a/.hidden-rank=00003"),
    ],
)
def test_the_rank_goes_before_the_extension(name: str, ranked: str) -> None:
    assert ranked_name(name, 3) == ranked


@given(NAME, RANK, RANK)
def test_the_names_of_two_ranks_differ_and_stay_in_their_directory(name: str, first: int, second: int) -> None:
    assert (ranked_name(name, first) == ranked_name(name, second)) == (first == second)
    assert ranked_name(name, first).rpartition("/")[0] == name.rpartition("/")[0]


@given(st.text(max_size=30))
def test_folding_twice_changes_nothing_more(name: str) -> None:
    if name.isascii():
        assert folded(folded(name)) == folded(name) == name.lower()


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["a", "a"], "given twice"),
        (["Model.pt", "model.pt"], "differ only by case"),
        (["caf\u00e9", "cafe\u0301"], "differ only by case or Unicode form"),
        (["a", "a/b"], "also the directory"),
        (["A", "b", "a/b/c"], "also the directory"),
        (["a/b/c", "a/B"], "also the directory"),
    ],
)
def test_a_collision_anywhere_is_refused(names: list[str], reason: str) -> None:
    for order in (names, names[::-1]):
        with pytest.raises(InvalidName, match=reason):
            check_collisions(order)


@given(st.lists(st.text("abc", min_size=1, max_size=3), unique=True))
def test_names_of_one_directory_do_not_collide(names: list[str]) -> None:
    check_collisions(names)
    check_collisions(f"d{index}/x" for index, _ in enumerate(names))
