"""The turns of a contest: all contenders in each round, and not always the same one after the same one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.measure import Meter
from ckptstore.tools.bench.peers.base import Contender, make_durable
from ckptstore.tools.bench.peers.directories import RawDownload
from ckptstore.tools.bench.peers.own import Ckptstore
from ckptstore.tools.bench.turns import Contest

pytestmark = pytest.mark.slow

NAMES = ("a", "b", "c")


def contender(name: str) -> type[Contender]:
    return type(name, (Contender,), {"name": name, "family": name, "save": lambda self, place: None})


def turns(path: Path, *, repeat: int) -> list[str]:
    told: list[str] = []
    case = Case(place=Place(uri=str(path)), rank=0, world_size=1, durable=False)
    contest = Contest(case, "save", figure="total_seconds", tell=lambda text, _total: told.append(text))
    outcomes = contest.run([contender(name) for name in NAMES], repeat=repeat)
    assert [(one.name, len(one.samples), one.reason) for one in outcomes] == [(name, repeat, None) for name in NAMES]
    return told[len(NAMES) :]


def test_each_round_has_an_order_of_its_own_the_same_in_every_process(tmp_path: Path) -> None:
    told = turns(tmp_path, repeat=8)
    rounds = [tuple(told[start : start + len(NAMES)]) for start in range(0, len(told), len(NAMES))]
    assert all(sorted(one) == [*NAMES] for one in rounds)
    assert {one[0] for one in rounds} == {*NAMES}
    assert turns(tmp_path, repeat=8) == told


def test_a_contender_that_loads_nothing_has_failed_though_another_one_loaded_before(tmp_path: Path) -> None:
    ways = {"save": lambda self, place: Path(place).mkdir(), "load": lambda self, place: None}
    lazy = type("Lazy", (Contender,), {"name": "lazy", "family": "lazy", **ways})
    case = Case(place=Place(uri=str(tmp_path)), rank=0, world_size=1, durable=False)
    case.make_state("tensors", 1 << 10)
    case.make_target()
    contest = Contest(case, "load", figure="total_seconds", tell=lambda *_: None)
    good, bad = contest.run([Ckptstore, lazy], repeat=2)
    assert (good.status, len(good.samples)) == ("measured", 2), good.reason
    assert bad.status == "failed"
    assert "what was loaded differs" in (bad.reason or "")


_BURNS = """
import subprocess, sys
sys.stdin.readline()
burn = "import time\\nwhile time.process_time() < 0.3: pass"
subprocess.run([sys.executable, "-c", burn])
print("done", flush=True)
sys.stdin.readline()
"""


def test_processor_time_is_that_of_all_descendants() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _BURNS], text=True, **pipes) as child:  # type: ignore[call-overload]
        with Meter() as meter:
            child.stdin.write("go\n")
            child.stdin.flush()
            assert child.stdout.readline() == "done\n"
        child.stdin.close()
    assert meter.cpu_seconds > 0.2, "the system counts in ticks"


def test_everything_below_a_directory_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new/inner/deeper").mkdir(parents=True)
    (tmp_path / "new/inner/deeper/file").write_text("x")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    make_durable(tmp_path / "new")
    names = ("", "new", "new/inner", "new/inner/deeper", "new/inner/deeper/file")
    assert sorted(synced) == [str(tmp_path / name) for name in names]
    synced.clear()
    make_durable(tmp_path / "new/inner/deeper/file")
    assert sorted(synced) == [str(tmp_path / name) for name in names[3:]]


def test_what_the_limit_of_a_download_made_is_removed_after_the_clock_has_stopped(tmp_path: Path) -> None:
    files = tmp_path / "source"
    files.mkdir()
    (files / "a.bin").write_bytes(b"x" * 100)
    place = Place(uri=str(tmp_path / "place"))
    limit = RawDownload(Case(place=place, rank=0, world_size=1, durable=False, files=files))
    limit.prepare(place.uri)
    limit.save(place.uri)
    limit.load(place.uri)
    assert (tmp_path / "source-copied/a.bin").read_bytes() == b"x" * 100
    assert limit.wrong() is None
    assert not (tmp_path / "source-copied").exists()
    limit.close()
