"""Mutated records, hints, manifests, indexes, messages and identities: a value or a CkptstoreError, soon, in little
memory. The limits are those of a process of its own."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from mutations import mutated

from ckptstore.errors import CheckpointDamaged, CkptstoreError, RankFailed, from_wire
from ckptstore.format.layout import Attempt, parse_lease_key, parse_record_key
from ckptstore.format.record import Record, sealed
from ckptstore.group.message import Message
from ckptstore.log.reader import Hint

pytestmark = pytest.mark.slow

DECODERS = Path(__file__).parent / "decoders.py"
GOLDEN = Path(__file__).parents[1] / "golden"


def run(count: int, first: int) -> None:
    command = [sys.executable, str(DECODERS), "--count", str(count), "--first", str(first)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_some_mutations() -> None:
    run(6_000, first=0)


@pytest.mark.timeout(900)
def test_thirty_thousand_mutations() -> None:
    run(30_000, first=1_000_000)


def test_the_same_seed_makes_the_same_bytes_and_most_are_refused() -> None:
    samples = [path.read_bytes() for path in sorted((GOLDEN / "log-v1").glob("0*.json"))]
    seeds = [f"record-{number}" for number in range(200)]
    found = [mutated(samples, seed) for seed in seeds]
    assert found == [mutated(samples, seed) for seed in seeds]
    assert sum(data not in samples for data in found) > 150


def test_a_number_in_a_pickle_takes_no_memory() -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    from ckptstore.stock.stock_pickles import load_metadata

    data = pickle.dumps(Metadata({}, storage_data={}))
    data = data[:2] + pickle.NONE + pickle.LONG_BINPUT + (1 << 22).to_bytes(4, "little") + pickle.POP + data[2:]
    tracemalloc.start()
    try:
        assert load_metadata(data).state_dict_metadata == {}
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def record_with(number: int, **state: object) -> bytes:
    value = json.loads((GOLDEN / "log-v1" / "0000000001.json").read_bytes())
    value["number"] = number
    value["state"] |= state
    return sealed(json.dumps(value).encode())


@pytest.mark.parametrize(
    "state",
    [
        {"trash": {"numbers": "1-900000000", "removed_by": "5*900000000"}},
        {"live": "1-900000000", "pinned": "1-900000000"},
        {"live": "1-900000000", "trash": {"numbers": "900000001-900000003", "removed_by": "5*900000000"}},
    ],
)
def test_a_few_characters_that_stand_for_a_billion_numbers_are_refused(state: dict[str, object]) -> None:
    number = 999_999_999
    with pytest.raises(CheckpointDamaged, match=r"numbers|checkpoints"):
        Record.decode(record_with(number, **state), number).state  # noqa: B018 - it is decoded when it is asked for
    data = record_with(number, **state).decode()
    assert Hint.decode(json.dumps({"version": 1, "number": number, "newest": data}).encode()) is None


def test_a_state_is_as_quick_to_read_however_many_are_live() -> None:
    number = 999_999_999
    found = Record.decode(record_with(number, live="1-900000000", pinned="7", epoch=1), number)
    assert found.state.latest == 900_000_000


def test_an_error_shows_the_beginning_of_a_text_of_any_length() -> None:
    value = json.loads((GOLDEN / "log-v1" / "0000000001.json").read_bytes())
    with pytest.raises(CheckpointDamaged) as caught:
        Record.decode(sealed(json.dumps(value | {"write_id": ["x" * 10**6]}).encode()), 1)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "wire",
    [
        {},
        {"code": ["x"], "message": 5},
        {"code": "storage-full", "message": "m", "step": "1", "rank": True, "ranks": 3, "committed": "no", "file": []},
    ],
)
def test_an_error_that_came_damaged_claims_nothing(wire: dict[str, object]) -> None:
    error = from_wire(wire)
    assert isinstance(error, CkptstoreError)
    assert error.committed is None
    assert (error.step, error.rank, error.file, error.ranks) == (None, None, None, ())


def test_the_error_of_a_message_is_that_of_its_rank() -> None:
    good = Message(tag="save", rank=1, world_size=2, by="me", error={"message": "m", "code": "error"}).encode()
    message = Message.decode(good)
    assert message is not None
    assert message.error is not None
    assert type(from_wire(message.error)).code == "error"
    assert isinstance(from_wire({"code": "new"}), RankFailed)


def test_names_of_the_format_have_one_spelling() -> None:
    assert Attempt.parse("step-0000012000-e0007-3f9a1c2e") is not None
    assert Attempt.parse("step-0000012000-e12345-3f9a1c2e") is not None
    for name in ("step-٠٠٠٠٠١٢٠٠٠-e0007-3f9a1c2e", "step-0000012000-e00007-3f9a1c2e"):
        assert Attempt.parse(name) is None
    assert parse_record_key("log/٠٠٠٠٠١٢٠٠٠.json") is None
    assert parse_lease_key("leases/٠٠٠٠٠١٢٠٠٠-a.json") is None
