"""What the leader chooses to drain, and what one process keeps of what it was offered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptstore.errors import CheckpointDamaged, InvalidInput, StoreFenced
from ckptstore.extensions.tier.certificate import Certificate, held_by
from ckptstore.extensions.tier.drain.book import Book, Drain
from ckptstore.extensions.tier.nodes.fast_place import FastPlace
from ckptstore.extensions.tier.nodes.members import Members
from ckptstore.extensions.tier.nodes.node_disk import NodeDisk
from ckptstore.extensions.tier.tier import FastTier
from ckptstore.format.digest import Digest
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Manifest, Receipt

STORE_ID = "5f0c3a9e4b7d41d8a2c6e1f09b83d754"


def certificate(number: int) -> Certificate:
    manifest = Manifest(
        store_id=STORE_ID,
        step=number,
        epoch=1,
        attempt=str(Attempt(number, 1, f"{number:08x}")),
        kind="directory",
        world_size=1,
        created_at=1.5,
        files=(Receipt("a", 1, Digest("crc32c", 7), 0),),
    )
    return Certificate(manifest.encode(), number, 1, "ab" * 32, held_by({"a": [0]}))


@pytest.fixture
def book(tmp_path: Path) -> Book:
    disk = NodeDisk.open(tmp_path / "fast", STORE_ID, node="a")
    transfer: Any = None  # nothing moves here
    tier, members = FastTier(tmp_path / "fast"), Members(("a",), 0)
    return Book(
        FastPlace(
            tier=tier, disk=disk, transfer=transfer, members=members, claim_number=1, claim_sha256="ab" * 32, epoch=1
        )
    )


def offer(book: Book, number: int, *, is_active: bool = True) -> Drain:
    return book.offer(certificate(number), is_active=is_active)


def held(book: Book) -> list[int]:
    return sorted(int(name[5:15]) for name in book._place.in_use)


def test_what_was_told_is_not_dropped_before_the_leader_has_chosen(book: Book) -> None:
    first = offer(book, 1)
    assert book.told(0) == {"active": [1], "newest": 1, "sent": 0}
    second, third = offer(book, 2), offer(book, 3)  # while the others answer
    assert held(book) == [1, 3]
    assert book.hear({"go": 1, "wanted": 1}) is first
    assert first.certificate is not None
    assert second.certificate is None
    offer(book, 4)
    assert held(book) == [1, 4]
    assert third.certificate is None


def test_what_another_rank_wants_is_active_as_soon_as_it_is_offered(book: Book) -> None:
    first = offer(book, 1)
    book.told(0)
    assert book.hear({"go": 0, "wanted": 2}) is None
    assert not book.has_active()
    second = offer(book, 2, is_active=False)
    assert second.is_active
    assert held(book) == [2]
    assert not first.done()


def test_a_failure_is_that_of_what_gave_way_to_it(book: Book) -> None:
    first, second, due_not = offer(book, 1), offer(book, 2), offer(book, 3, is_active=False)
    book.fail([2], CheckpointDamaged("flipped"))
    assert type(first.error()) is type(second.error()) is CheckpointDamaged
    assert not due_not.done()
    assert held(book) == []
    assert book.want() is due_not
    assert held(book) == [3]


def test_nobody_waits_for_what_is_older_than_a_failure(book: Book) -> None:
    first, second, third = offer(book, 1, is_active=False), offer(book, 2, is_active=False), offer(book, 3)
    book.want(first)
    book.fail([3], CheckpointDamaged("flipped"))
    book.want(second)
    assert [type(drain.error()) for drain in (first, second, third)] == [CheckpointDamaged] * 3
    assert not book.has_active()
    fourth, _, sixth = offer(book, 4, is_active=False), offer(book, 5), offer(book, 6)
    book.fail([5], CheckpointDamaged("flipped"))
    assert not fourth.done(), "a newer one is on its way"
    assert sixth.is_active


def test_who_waits_for_one_that_gives_way_gets_the_newest(book: Book) -> None:
    first, second = offer(book, 1, is_active=False), offer(book, 2, is_active=False)
    book.want(first)
    assert (first.is_active, second.is_active) == (False, True)
    book.want(second)
    assert held(book) == [2]


def test_the_newest_is_told_though_it_has_ended(book: Book) -> None:
    """Who asks for it must hear why it is not in the store."""
    assert book.want() is None
    first = offer(book, 1)
    book.fail([1], CheckpointDamaged("flipped"))
    assert book.want() is first
    book.end(StoreFenced("a later job"))
    second = offer(book, 2)
    assert book.want() is second
    assert type(second.error()) is StoreFenced
    with pytest.raises(InvalidInput, match="after save 2"):
        offer(book, 2)
