"""Trainers that die, restart and fence each other, readers that lag, prunes, damage, lost answers: seeded, real code.

Whatever happens, a reader holds the exact bytes of one version, or none; and whoever waits or applies gets the version
or an error of ckptstore.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from weights_made import Weights, bytes_of, changed, read_model

import ckptstore
from ckptstore.errors import CkptstoreError, StorageUnavailable
from ckptstore.storage.open import open_storage
from ckptstore.testing import Call, wrap

pytestmark = pytest.mark.slow

URI = "memory://publication-simulation"
KINDS = (torch.float32, torch.int32)


class World:
    """All actors, and what they may hold."""

    def __init__(self, seed: int, path: Path) -> None:
        self.random = Random(seed)
        self.path = path
        self.fault_share = 0.0
        self.storage = open_storage(URI)
        self.storage.delete([file.key for file in self.storage.list("")])
        self.weights: Weights = {f"w{number}": torch.zeros(20 + number) for number in range(4)}
        self.trainers: list[Any] = []
        self.readers: dict[int, Any] = {}
        self.version = 0
        self.published: dict[int, list[Any]] = {}
        """All bytes that anybody tried to publish under a number."""
        self.seen: Counter[str] = Counter()

    def hook(self, call: Call) -> None:
        """Fail now and then, before a call has an effect or after."""
        if self.random.random() < self.fault_share:
            self.seen[f"fault {call.phase}"] += 1
            raise StorageUnavailable("A fault was injected")

    def step(self) -> None:
        """Let one actor do one thing."""
        self.fault_share = self.random.choice([0.0, 0.0, 0.0, 0.01, 0.05])
        action = self.random.choices(
            [self.publish, self.start_trainer, self.apply, self.start_reader, self.damage, self.prune, self.roll_back],
            [10, 1, 9, 1, 0.5, 1, 0.3],
        )[0]
        try:
            action()
            self.seen[action.__name__] += 1
        except (CkptstoreError, TimeoutError) as error:
            self.seen[f"{action.__name__} {type(error).__name__}"] += 1

    def start_trainer(self) -> None:
        """Begin again, perhaps beside the one before; what a dead one had on its way is lost."""
        options = {"anchor_every": self.random.choice([0, 1, 3, 8]), "keep": self.random.choice([1, 2])}
        opened = ckptstore.open_publication(URI, grace_seconds=0.001, **options)  # type: ignore[arg-type]
        self.trainers = [*self.trainers[-1:], opened]

    def publish(self) -> None:
        if not self.trainers:
            self.start_trainer()
        self.version += self.random.choice([1, 1, 1, 3])
        if self.random.random() < 0.9:
            self.weights = changed(self.weights, self.random)
        if self.random.random() < 0.03:
            self.weights = {**self.weights, f"w{self.random.randrange(9)}": torch.zeros(self.random.randrange(1, 9))}
        if self.random.random() < 0.03:  # as many bytes, which mean something else
            name = self.random.choice(sorted(self.weights))
            self.weights = {**self.weights, name: self.weights[name].view(self.random.choice(KINDS))}
        trainer = self.random.choice(self.trainers)
        if self.random.random() < 0.05:
            self.published.setdefault(1, []).append(bytes_of(self.weights))
            trainer.publish(1, self.weights)  # refused, unless nothing is live
        self.published.setdefault(self.version, []).append(bytes_of(self.weights))
        if self.random.random() < 0.7:
            trainer.publish(self.version, self.weights)
        else:
            trainer.publish_async(self.version, self.weights).result()

    def start_reader(self) -> None:
        """A reader, new or started again on its directory; sometimes its disk is another, empty one."""
        number = self.random.randrange(3)
        directory = self.path / f"reader-{number}"
        if self.random.random() < 0.3:
            shutil.rmtree(directory, ignore_errors=True)
        self.readers[number] = ckptstore.Subscription(URI, directory)

    def apply(self) -> None:
        if not self.readers:
            self.start_reader()
        _, reader = self.random.choice(sorted(self.readers.items()))
        if self.random.random() < 0.2:
            reader.wait(timeout_seconds=0.0)
        try:
            applied = reader.apply()
            self.seen["full" if applied.is_full else "deltas" if applied.num_deltas else "same"] += 1
            self.seen["notices"] += bool(applied.notices)
            assert self.check(reader.path) == applied.version
        finally:
            self.check(reader.path)

    def check(self, directory: Path) -> int | None:
        """Return the version that a directory holds; its bytes must be exactly those of one."""
        if not (directory / "model.safetensors.index.json").exists():
            return None
        version = json.loads((directory / ".ckptstore-pull.json").read_text())["version"]
        held = read_model(directory)
        assert held in self.published[version], f"a mixture at version {version}"
        return int(version)

    def damage(self) -> None:
        """Change or remove a file of a version."""
        keys = sorted(file.key for file in self.storage.list("checkpoints/"))
        if keys:
            key = self.random.choice(keys)
            data = bytearray(self.storage.read(key))
            if self.random.random() < 0.3 or not data:
                self.storage.delete([key])
            else:
                data[self.random.randrange(len(data))] ^= 1 + self.random.randrange(255)
                self.storage.write(key, [memoryview(data)])

    def prune(self) -> None:
        with ckptstore.open_store(URI, grace_seconds=0.001, group="solo") as store:
            store.prune()

    def roll_back(self) -> None:
        with ckptstore.open_store(URI, group="solo") as store:
            target = self.random.choice([entry.checkpoint.step for entry in store.entries()] or [0])
            store.roll_back(target)
            self.version = max(target, self.version - 3)  # a trainer may use numbers a second time


def calm(world: World, path: Path) -> None:
    """Let a new trainer and a new reader work without faults: whatever came before, each version arrives."""
    world.fault_share = 0.0
    trainer = ckptstore.open_publication(URI, grace_seconds=0.001, anchor_every=8, keep=2)
    reader = ckptstore.Subscription(URI, path / "calm")
    for number in range(world.version + 1, world.version + 4):
        world.weights = changed(world.weights, world.random)
        world.published.setdefault(number, []).append(bytes_of(world.weights))
        trainer.publish(number, world.weights)
        applied = reader.apply()
        assert world.check(reader.path) == applied.version == number
        world.seen["calm deltas"] += applied.num_deltas
    assert world.seen["calm deltas"] >= 2, world.seen


def simulate(seed: int, num_steps: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Run a world, and return what happened in it."""
    monkeypatch.setenv("CKPTSTORE_RETRY_ATTEMPTS", "2")
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_INITIAL_SECONDS", "0.0001")
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_MAX_SECONDS", "0.0001")
    world = World(seed, path)
    monkeypatch.setattr(
        "ckptstore.transfer.opened.open_storage", lambda uri, **options: wrap(open_storage(uri, **options), world.hook)
    )
    for _ in range(num_steps):
        world.step()
    calm(world, path)
    return world.seen


def test_a_short_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which faults it meets depends on the order of threads too."""
    seen = simulate(1, 120, tmp_path, monkeypatch)
    assert {"publish", "full", "calm deltas"} <= seen.keys(), seen


def test_long_histories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each of them meets depends on the order of threads too; all together meet everything."""
    seen: Counter[str] = Counter()
    for seed in range(2, 5):
        path = tmp_path / str(seed)
        path.mkdir()
        seen += simulate(seed, 500, path, monkeypatch)
    assert {"publish", "publish StoreFenced", "apply CheckpointDamaged", "full", "deltas", "same"} <= seen.keys(), seen


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first_seed", range(100, 200, 10))
def test_a_hundred_thousand_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_seed: int) -> None:
    """Many histories, since what a listing in memory takes grows with the log."""
    for seed in range(first_seed, first_seed + 10):
        path = tmp_path / str(seed)
        path.mkdir()
        simulate(seed, 1_000, path, monkeypatch)
