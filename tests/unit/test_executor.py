"""How files are dealt to shares, and that a job in this process is one share."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.transfer import Transfer, Wanted
from ckptstore.transfer.executor import InProcess, deal

SIZES = st.lists(st.integers(0, 1000), max_size=40)


@given(sizes=SIZES, num_shares=st.integers(1, 9))
def test_each_item_is_in_one_share_and_no_share_is_empty(sizes: list[int], num_shares: int) -> None:
    items = list(enumerate(sizes))
    shares = deal(items, lambda item: item[1], num_shares)
    assert sorted(item for share in shares for item in share) == items
    assert all(shares)
    assert len(shares) == min(num_shares, len(items))


@given(sizes=SIZES.filter(any), num_shares=st.integers(1, 9))
def test_the_largest_share_is_near_the_best(sizes: list[int], num_shares: int) -> None:
    shares = deal(sizes, lambda size: size, num_shares)
    no_division_is_better_than = max(max(sizes), sum(sizes) / len(shares))
    assert max(map(sum, shares)) <= sum(sizes) / len(shares) + max(sizes)
    assert max(map(sum, shares)) <= 2 * no_division_is_better_than


def test_here_there_is_one_share_and_none_of_nothing() -> None:
    run = InProcess().run
    assert run(list, [3, 1, 2], size_bytes=int) == [[3, 1, 2]]
    assert run(list, [], size_bytes=int) == []


def test_a_transfer_goes_to_another_process_as_its_storage_and_configuration(tmp_path: object) -> None:
    storage = LocalStorage(str(tmp_path), durable=False)
    storage.write("a", [memoryview(b"abc")])
    config, retry = TransferConfig(num_threads=3), RetryConfig(retry_attempts=2)
    copy = pickle.loads(pickle.dumps(Transfer(storage, config=config, retry=retry, rank=7)))
    assert copy.num_tasks == 3
    (checked,) = copy.check([Wanted("a", 3, None)])
    assert str(checked.digest) == "crc32c:364b3fb7"
    copy.close()
