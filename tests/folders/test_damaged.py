"""Whatever a file of a folder holds, the readers of folders say something of that file, and nothing to the others."""

from __future__ import annotations

import io
import logging
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ckptstore import open_store
from ckptstore.tools.cli import main
from ckptstore.tools.run.committer import Committer
from ckptstore.tools.run.folders import Folder, JobSeen, Rules, newest_first, restore_folder
from ckptstore.tools.run.folders.whole import checksums, ends, number_in
from tests.folders.test_finished_property import tensors, zipped

pytestmark = pytest.mark.slow

DEEP = 100_000
HEAD_BYTES = 64


def deflated(step: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"step": step, "text": "x" * 900}, protocol=2))
    return buffer.getvalue()


def array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(6).reshape(2, 3))
    return buffer.getvalue()


def hdf5(version: int) -> bytes:
    """The superblock of a version, and bytes up to the end that it names."""
    sizes, at = (bytes([version, 0, 0, 0, 0, 8, 8]), 40 + 4 * version) if version < 2 else (bytes([version, 8, 8]), 28)
    return ((b"\x89HDF\r\n\x1a\n" + sizes).ljust(at, b"\0") + (100).to_bytes(8, "little")).ljust(100, b"d")


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + bytes(4)


def numbers(value: str) -> list[bytes]:
    """JSON with a value of a wrong type or size in every place that is read."""
    return [
        *(header(b'{"a":{"data_offsets":%b}}' % text) for text in (value.encode(), f"[0,{value}]".encode())),
        header(f'{{"a":{value}}}'.encode()),
        header(f'{{"a":{{"dtype":"F32","shape":[1],"data_offsets":[0,{value}]}}}}'.encode()),
    ]


WRONG = ["null", "true", '"4"', "[]", "{}", "-1", "1e999", "NaN", "9" * 400, "9" * 5000, '"\\ud800"', "[" * DEEP]
FILES: dict[str, list[bytes]] = {
    "a.pt": [zipped(3, "x" * 40), zipped(3, "x" * 40, key="step"), deflated(7)],
    "a.safetensors": [tensors("text")],
    "a.npy": [array()],
    "a.h5": [hdf5(0), hdf5(1), hdf5(2)],
    "a.json": [b'{"global_step": 7, "log_history": [{"step": 7, "loss": 1.0}]}'],
}
WHOLE: dict[str, list[bytes]] = {
    "a.safetensors": [item for value in WRONG for item in numbers(value)],
    "a.json": [value.encode(errors="replace") for value in WRONG],
    "a.npy": [
        array().replace(b"(2, 3)", text)
        for text in (b"'2, 3'", b"(None)", b"(-2,3)", b"(2,3j)", b"((,3)", b"9" * 6, b"(" * 6)
    ],
    "a.pt": [zipped(number, "x") for number in (-1, 10**10, 10**400, 2**63)],
}


def mutated(data: bytes) -> Iterator[bytes]:
    """Every truncation of the head and of the end, and each of its bytes as several others."""
    places = sorted({*range(min(HEAD_BYTES, len(data))), *range(max(0, len(data) - HEAD_BYTES), len(data))})
    for at in places:
        yield data[:at]
        for byte in {0, 0xFF, data[at] ^ 1, ord("9")} - {data[at]}:
            yield data[:at] + bytes([byte]) + data[at + 1 :]


def damaged() -> Iterator[tuple[str, bytes]]:
    for name, whole in FILES.items():
        for data in whole:
            for other in mutated(data):
                yield name, other
    for name, others in WHOLE.items():
        for data in others:
            yield name, data


def test_no_file_makes_a_reader_raise(tmp_path: Path) -> None:
    shown = 0
    for name, data in damaged():
        path = tmp_path / name
        path.write_bytes(data)
        try:
            why, is_whole = ends(path)
            assert not (why and is_whole)
            shown += is_whole
            step = number_in(path, "global_step")
            assert step is None or 0 <= step < 10**10
            checksums(path)
        except BaseException as error:
            error.add_note(f"{name} {data[:300]!r}")
            raise
    assert shown, "some of them are whole all the same"


def test_what_is_whole_is_known_to_be(tmp_path: Path) -> None:
    for name, whole in FILES.items():
        for data in whole:
            (tmp_path / name).write_bytes(data)
            assert ends(tmp_path / name) == (None, True), name
            (tmp_path / name).write_bytes(data[:-1])
            assert not ends(tmp_path / name)[1], name


class Bad:
    """A folder of damaged checkpoints of many shapes, and a whole one that is the newest of each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def write(self, name: str, data: bytes) -> None:
        """Write a file, a second after the one before."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.count += 1
        os.utime(path, (1_700_000_000 + self.count,) * 2)

    def patterned(self) -> None:
        number = 0
        for number, (name, data) in enumerate(some_damaged(), 1):
            self.write(f"mine_{number}/{name}", data)
            self.write(f"mine_{number}/done", b"1")
        self.write(f"mine_{number + 1}/a.pt", zipped(1, "x"))
        self.write(f"mine_{number + 1}/done", b"1")

    def single(self) -> None:
        for number, (name, data) in enumerate(some_damaged(), 1):
            self.write(f"one/epoch=0-step={number}.ckpt" if name == "a.pt" else f"one/w{number:03}{name[1:]}", data)
        self.write("one/epoch=0-step=900.ckpt", zipped(900, "x"))

    def trainers(self) -> None:
        """Trainer's: whatever may stand in the file that is written last, in an index and in the numbers."""
        texts = [*WRONG, *(f'{{"global_step": {value}}}' for value in WRONG)]
        texts += [f'{{"global_step": 7, "log_history": {value}, "best_model_checkpoint": {value}}}' for value in WRONG]
        texts += [
            f'{{"global_step": 7, "log_history": [{{"step": 7, "loss": {value}, "\\ud800": 1, "$t": 2}}]}}'
            for value in WRONG
        ]
        for number, text in enumerate(texts, 10):
            own = text.replace(": 7", f": {number}")
            self.write(f"hf/checkpoint-{number}/rng_state.pth", zipped(1, ""))
            self.write(f"hf/checkpoint-{number}/trainer_state.json", own.encode(errors="replace"))
        for number, value in enumerate(WRONG, 200):
            for index in (value, f'{{"weight_map": {value}}}', f'{{"weight_map": {{"a": {value}}}}}'):
                self.write(f"hf/checkpoint-{number}/rng_state.pth", zipped(1, ""))
                self.write(f"hf/checkpoint-{number}/model.safetensors.index.json", index.encode(errors="replace"))
                self.write(f"hf/checkpoint-{number}/trainer_state.json", b'{"global_step": %d}' % number)
        self.write("hf/checkpoint-900/rng_state.pth", zipped(1, ""))
        self.write("hf/checkpoint-900/trainer_state.json", b'{"global_step": 900}')

    def trackers(self) -> None:
        """Of DeepSpeed and Megatron: whatever a tracker may hold."""
        for number, value in enumerate(
            ["\u00b2", "9" * 5000, "\u0663", "-1", "", "\0", "global_step" + "9" * 5000, "a/b"]
        ):
            self.write(f"ds{number}/global_step4/mp_rank_00_model_states.pt", zipped(1, ""))
            self.write(f"ds{number}/latest", value.encode())
            self.write(f"meg{number}/iter_0000004/__0_0.distcp", b"a")
            self.write(f"meg{number}/latest_checkpointed_iteration.txt", value.encode())
        self.write("ds/global_step4/mp_rank_00_model_states.pt", zipped(1, ""))
        self.write("ds/latest", b"global_step4")

    def names(self) -> None:
        """Names that no UTF-8 has, beside and in a checkpoint, and times that no clock has."""
        self.write("odd_1/a.pt", zipped(1, "x"))
        self.write("odd_1/done", b"1")
        (self.folder / os.fsdecode(b"to-\xff")).symlink_to("odd_1")
        self.write(os.fsdecode(b"odd_\xff/a.pt"), zipped(1, "x"))
        self.write(os.fsdecode(b"beside/\xff.csv"), b"1")
        self.write("beside/epoch=0-step=1.ckpt", zipped(1, "x"))
        for number, seconds in enumerate((-5, 0, 2**33), 2):
            for file in ("a.pt", "done"):
                self.write(f"odd_{number}/{file}", zipped(1, "x"))
                os.utime(self.folder / f"odd_{number}/{file}", (seconds, seconds))


def some_damaged() -> Iterator[tuple[str, bytes]]:
    """A few of each format."""
    for name, whole in FILES.items():
        yield from ((name, other) for data in whole for other in list(mutated(data))[:: 5 * HEAD_BYTES // 3])
    for name, others in WHOLE.items():
        yield from ((name, data) for data in others)


@pytest.mark.parametrize(
    ("kind", "rules", "last"),
    [
        (Bad.patterned, Rules(patterns=("mine_{step}",), marker="done"), "mine_"),
        (Bad.single, Rules(patterns=("one/w*.*",), quiet_seconds=0.001), "one/epoch=0-step=900.ckpt"),
        (Bad.trainers, Rules(), "hf/checkpoint-900"),
        (Bad.trackers, Rules(), "ds/global_step4"),
        (Bad.names, Rules(patterns=("odd_*",), marker="done", beside=("*.csv",)), "odd_1"),
    ],
    ids=["patterned", "single", "trainers", "trackers", "names"],
)
def test_no_damaged_checkpoint_keeps_another_out(
    tmp_path: Path, kind: Callable[[Bad], None], rules: Rules, last: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "ckptstore")  # pytest cannot report every name
    out = tmp_path / "out"
    out.mkdir()
    kind(Bad(out))
    with open_store(tmp_path / "store", durable=False, group="solo") as store:
        store.resume()
        committer = Committer(
            store=store,
            folder=Folder(out, rules),
            job=lambda: JobSeen(frozenset()),
            interval_seconds=0.01,
            began_at=0.0,
        )
        for _ in range(8):
            assert not committer._round()
        outcome = committer.outcome()
        assert not outcome.left, (outcome.left, committer.failures.error)
        names = {item.metadata["folder"]["name"] for item in store}
        assert [name for name in names if name.startswith(last)], (names, outcome.passed, outcome.unfinished)
        shapes = committer.folder.look(JobSeen()).candidates
        told = {*names, *outcome.passed, *outcome.unfinished}
        assert {it.name for it in shapes} <= told
        # As the next start does, here and on a new machine.
        assert restore_folder(Folder(out, rules), newest_first(store)) is not None
        report = restore_folder(Folder(tmp_path / "new", rules), newest_first(store))
        assert report is not None
        assert report.skipped == ()
    words = [f"--pattern={it}" for it in rules.patterns] + ([f"--marker={rules.marker}"] if rules.marker else [])
    explained = CliRunner().invoke(main, ["run", "--dry-run", str(out), *words])
    assert explained.exit_code == 0, explained.exception
