"""Names are agreed before any byte moves: the rules on collisions, suffixes and shared files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import InvalidInput, InvalidName, InvalidSource
from ckptstore.format.naming import Naming, Offer, agree


def offers(*names: list[str], suffix: str = "auto") -> list[Offer]:
    return [Offer(suffix, found) for found in names]  # type: ignore[arg-type]


def stored(agreement: Naming, offered: list[Offer]) -> list[list[str | None]]:
    return [[*map(agreement.stored(offer.names, rank).get, offer.names)] for rank, offer in enumerate(offered)]


def test_a_name_of_one_rank_stays_and_one_of_several_gets_the_rank() -> None:
    offered = offers(["model.pt", "config.json"], ["model.pt", "a/optim"])
    assert stored(agree(offered), offered) == [
        ["model-rank=00000.pt", "config.json"],
        ["model-rank=00001.pt", "a/optim"],
    ]


def test_always_and_never() -> None:
    offered = offers(["a.pt"], ["b.pt"], suffix="always")
    assert stored(agree(offered), offered) == [["a-rank=00000.pt"], ["b-rank=00001.pt"]]
    with pytest.raises(InvalidName, match="'x'") as caught:
        agree(offers(["x"], ["y"], ["x"], suffix="never"))
    assert caught.value.ranks == (0, 2)
    with pytest.raises(InvalidInput):
        agree(offers(["x"], suffix="sometimes"))


def test_shared_files_are_stored_once_by_the_lowest_rank_that_has_them() -> None:
    same = {"config.json": [2, "ab" * 32]}
    offered = [
        Offer("auto", ["m"], shared={}),
        Offer("auto", ["config.json", "m"], shared=same),
        Offer("auto", ["config.json"], shared=same),
    ]
    agreement = Naming.from_json(agree(offered).to_json())
    assert stored(agreement, offered) == [["m-rank=00000"], ["config.json", "m-rank=00001"], [None]]
    differs = Offer("auto", ["config.json"], shared={"config.json": [2, "cd" * 32]})
    with pytest.raises(InvalidSource, match=r"rank 1 .* rank 3") as caught:
        agree([*offered, differs])
    assert caught.value.file == "config.json"


@pytest.mark.parametrize(
    "names",
    [
        (["Model.pt"], ["model.pt"]),
        (["caf\u00e9"], ["cafe\u0301"]),
        (["a"], ["a/b"]),
        (["m.pt", "m-rank=00001.pt"], ["m.pt"]),
        (["x" * 252], ["x" * 252]),
    ],
)
def test_collisions_are_found_after_naming(names: tuple[list[str], list[str]]) -> None:
    with pytest.raises(InvalidName):
        agree(offers(*names))


def test_empty_directories_may_meet_other_ranks_files() -> None:
    offered = [Offer("auto", ["logs/a"], []), Offer("auto", [], ["logs", "empty"])]
    assert agree(offered).directories == ("empty", "logs")
    with pytest.raises(InvalidName):
        agree([Offer("auto", ["logs"], []), Offer("auto", [], ["logs"])])


names = st.lists(st.sampled_from(["a", "b.pt", "c/d.bin", "c/e", "f.tar.gz", ".hidden"]), unique=True)


@given(st.lists(names, min_size=1, max_size=5), st.sampled_from(["auto", "always"]))
def test_every_file_of_every_rank_gets_a_name_of_its_own(found: list[list[str]], suffix: str) -> None:
    offered = offers(*found, suffix=suffix)
    agreement = agree([Offer.from_json(offer.to_json()) for offer in offered])
    everything = [name for rank in stored(agreement, offered) for name in rank]
    assert len(set(everything)) == len(everything) == sum(map(len, found))
    assert None not in everything
