"""The benchmark for GPUs: its rehearsal on the CPU, what it refuses, and that a save of wrong bytes is noticed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked_ranks
import pytest
import torch
from made import bench, report, valid

from ckptstore.errors import InvalidInput
from ckptstore.tools.bench import machine
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.text import markdown
from ckptstore.tools.bench.peers.base import Contender, Wait
from ckptstore.tools.bench.peers.device import watch_locked
from ckptstore.tools.bench.training import SHAPES, Steps, shape_within
from ckptstore.tools.bench.turns import Contest
from ckptstore.tools.bench.workloads import GPU_TABLES

ABSENT = {"fastsafetensors", "fastsafetensors, GDS"}
"""The only rows without figures: not installed, or with CUDA alone."""


@pytest.mark.timeout(600)
@pytest.mark.long
def test_the_rehearsal_has_figures_or_a_reason_in_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.tools.bench.run.run_ranks", forked_ranks.run_ranks)  # torch is imported once
    told, place = tmp_path / "told.json", tmp_path / "place"
    options = ["--device", "cpu", "--size", "16MiB", "--shape", "tensors", "--tensor-size", "1MiB", "--repeat", 1]
    shown = bench("gpu", "--no-durable", *options, "--to", place, "--json", told).output
    value = valid(json.loads(told.read_text()))
    assert [one["name"] for one in value["workloads"]] == [*GPU_TABLES, *(f"{name}-2-ranks" for name in GPU_TABLES)]
    for workload in value["workloads"]:
        found = {one["name"]: one for one in workload["outcomes"]}
        for name, one in found.items():
            if one["status"] == "skipped":
                assert name in ABSENT
                assert "is not installed" in one["reason"] or "needs CUDA" in one["reason"]
            else:
                assert one["status"] == "measured", one["reason"]
                assert one["samples"][0]["total_seconds"] > 0
                assert one["ratio"] > 0
        if "steps" in workload["name"]:
            assert all(one["facts"]["steps_per_second_alone"] > 0 for one in found.values())
        if "first" in workload["name"]:
            facts = found["ckptstore"]["facts"]
            assert facts["resident_bytes"] > facts["resident_bytes_after_close"], "a store gives its memory back"
    rows = [line for line in shown.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + sum(len(workload["outcomes"]) for workload in value["workloads"])
    assert "A rehearsal with tensors of the CPU" in shown
    assert not place.exists()


def test_without_a_gpu_the_command_says_how_to_rehearse() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    output = bench("gpu", "--size", "1MiB", code=InvalidInput.exit_code).output
    assert "finds no GPU here" in output
    assert "--device cpu" in output


class Staged(Contender):
    """Copies the state when it is asked to be ready with that."""

    name, family = "staged", "staged"
    staging_seconds = 0.02
    num_asked = 1
    """How often it lets itself be asked."""

    def save(self, place: str) -> Wait | None:
        self._left, self._has_copied = self.num_asked, threading.Event()
        return self._has_copied.wait

    def staged(self) -> None:
        self._left -= 1
        if self._left == 0:
            time.sleep(self.staging_seconds)
            self._copied = {name: tensor.clone() for name, tensor in self.case.local.items()}
            self._has_copied.set()

    def load(self, place: str) -> None:
        for name, tensor in self.case.local_target.items():
            tensor.copy_(self._copied[name])


class Late(Staged):
    """A step has changed the state before it is copied."""

    name, num_asked = "late", 2


def a_case(tmp_path: Path) -> Case:
    return Case(place=Place(uri=str(tmp_path)), rank=0, world_size=1, durable=False, size_bytes=1)


def test_a_save_that_holds_what_came_after_its_call_has_failed(tmp_path: Path) -> None:
    contest = Steps(a_case(tmp_path), "save", figure="total_seconds", tell=lambda *_: None)
    in_time, late = contest.run([Staged, Late], repeat=2)
    assert (in_time.status, len(in_time.samples)) == ("measured", 2), in_time.reason
    assert in_time.facts["steps_per_second"] > 0
    assert in_time.samples[0].retries is None, "a peer does not tell"
    assert late.status == "failed"
    assert "is not what was there at the call" in (late.reason or "")


def test_a_stall_lasts_until_the_state_may_change(tmp_path: Path) -> None:
    case = a_case(tmp_path)
    case.make_state("tensors", 1 << 10)
    (outcome,) = Contest(case, "save", figure="blocked_seconds", tell=lambda *_: None).run([Staged], repeat=1)
    assert outcome.samples[0].blocked_seconds >= Staged.staging_seconds


def test_the_model_fits_into_the_size() -> None:
    assert shape_within(0, 4) is SHAPES["tiny"]
    assert shape_within(2 << 30, 2) is SHAPES["300m"]
    assert shape_within(1 << 40, 2) is SHAPES["7b"]


def test_memory_is_locked_until_it_is_unlocked() -> None:
    def answer(code: int) -> Callable[..., int]:
        return lambda *_: code

    works = SimpleNamespace(cudaHostRegister=answer(0), cudaHostUnregister=answer(0))
    sizes_bytes = watch_locked(works)
    works.cudaHostRegister(1 << 20, 100, 1)
    works.cudaHostRegister(2 << 20, 10, 1)
    assert sum(sizes_bytes.values()) == 110
    works.cudaHostUnregister(1 << 20)
    assert sum(sizes_bytes.values()) == 10
    refuses = SimpleNamespace(cudaHostRegister=answer(2), cudaHostUnregister=answer(0))
    sizes_bytes = watch_locked(refuses)
    assert refuses.cudaHostRegister(1 << 20, 100, 1) == 2
    assert sizes_bytes == {}


def test_gpus_and_driver_are_those_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    line = "NVIDIA H100 80GB HBM3, 570.86.15, 81559 MiB, 5, 16"
    command.write_text(f"#!/bin/sh\necho '{line}'\necho '{line}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = machine.gpus()
    assert found["gpus"] == ["NVIDIA H100 80GB HBM3, 81559 MiB, PCIe 5 x16"] * 2
    assert found["driver"] == "570.86.15"
    command.write_text("#!/bin/sh\nexit 9\n")
    if not torch.cuda.is_available():
        assert machine.gpus()["gpus"] == []
    assert "unknown: " in machine.gpus()["driver"]


def test_the_table_has_a_row_for_each_contender_and_reasons_in_one_line() -> None:
    text = markdown(report(ours=(1.0, 3.0, 2.0), peer=(4.0,), limit=(1.0,)))
    rows: list[list[Any]] = [
        line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| Save a state")
    ]
    assert [row[2:4] for row in rows] == [
        ["ckptstore", "2.0000"],
        ["DCP FileSystemWriter", "4.0000"],
        ["raw disk", "1.0000"],
        ["<b>broken</b>", "failed: rank 1: no <luck>"],
    ]
    assert rows[0][4:9] == ["1.0000 - 3.0000", "0.54", "4.00", "1.00", "0.50"]
    assert rows[1][7:9] == ["2.00", "0.25"]
    assert "- `ckptstore bench save`, 2027-01-15" in text
    assert "- versions: torch 2.13.0" in text
