"""Writers of folders by seed, an agent beside them, and a model that knows which states were ever whole.

A writer is a program of small steps; between two of them the agent looks, commits, dies or starts again. What it
commits is compared with the model, byte by byte.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckptstore import CheckpointStore, open_store
from ckptstore.events import CheckpointCommitted, listening
from ckptstore.tools.run.committer import Committer
from ckptstore.tools.run.folders import Folder, JobSeen, Rules
from tests.folders.test_finished_property import tensors, zipped

Files = dict[str, bytes]


@dataclass(frozen=True)
class Kind:
    """How one project writes."""

    name: Callable[[int], str]
    """The name of the checkpoint of a step."""
    is_directory: bool = False
    marker: str = ""
    """The file of a directory that is written last."""
    pattern: str = ""
    is_rewritten: bool = False
    save: Callable[[World, int], Iterator[None]] | None = None
    """Writes the checkpoint of a step, and deletes older ones, in the order of its trainer; None: see `World.save`."""
    rules: Rules | None = None
    is_sure: bool = True
    """False if nothing but time shows that one is finished: an agent that comes later leaves it."""


KINDS = {
    "lightning": Kind(lambda step: f"epoch=0-step={step}.ckpt"),
    "timm": Kind(lambda step: f"checkpoint-{step}.pth.tar"),
    "detectron": Kind(lambda step: f"model_{step:07}.pth"),
    "trainer": Kind(lambda step: f"checkpoint-{step}", is_directory=True, marker="trainer_state.json"),
    "marked": Kind(lambda step: f"mine_{step}", is_directory=True, marker="DONE", pattern="mine_*"),
    "guessed": Kind(lambda step: f"w{step}-of-9.safetensors", pattern="w*.safetensors"),
    "useless number": Kind(lambda step: f"run{step}-{'abcdefgh'[step % 8]}-7.pt", pattern="run*.pt"),
    "nanogpt": Kind(lambda step: "ckpt.pt", is_rewritten=True),
    "last": Kind(lambda step: "last.safetensors", pattern="last.*", is_rewritten=True),
}


def known_kinds() -> dict[str, Kind]:
    """All kinds; those of trainers for reinforcement learning have a module of their own."""
    from tests.folders.rl_writers import RL_KINDS

    return {**KINDS, **RL_KINDS}


@dataclass
class World:
    """A folder with a writer and an agent."""

    place: Path
    seed: int
    commits: list[int] = field(default_factory=list)
    """The steps in the order of their commits."""
    wholes: dict[str, list[Files]] = field(default_factory=dict)
    """Every state of each name that was ever whole, the oldest first."""
    whole_now: dict[str, Files] = field(default_factory=dict)
    """What is whole in the folder now."""
    bad: set[str] = field(default_factory=set)
    kind_name: str = ""
    """One of `known_kinds`; "" for one of `KINDS` by the seed."""
    saved: list[str] = field(default_factory=list)
    """What the writer of the moment remembers to have saved, the oldest first."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.kind_name = self.kind_name or self.random.choice(sorted(KINDS))
        self.kind = known_kinds()[self.kind_name]
        self.folder = self.place / "out"
        self.store = self.place / "store"
        self.folder.mkdir()
        self.opened: CheckpointStore | None = None
        self.committer: Committer | None = None
        self.is_alive = True

    @property
    def rules(self) -> Rules:
        kind = self.kind
        if kind.rules is not None:
            return kind.rules
        patterns = (kind.pattern,) if kind.pattern else ()
        return Rules(patterns=patterns, marker=kind.marker if kind.pattern and kind.marker else None, quiet_seconds=1e9)

    def job(self) -> JobSeen:
        return JobSeen(frozenset(), is_started=True, is_alive=self.is_alive)

    def start_agent(self) -> None:
        self.stop_agent()
        self.opened = open_store(self.store, durable=False, group="solo")
        self.opened.resume()
        folder = Folder(self.folder, self.rules)
        self.committer = Committer(store=self.opened, folder=folder, job=self.job, interval_seconds=0.01, began_at=0.0)

    def stop_agent(self) -> None:
        if self.opened is not None:
            self.opened.close()
        self.opened = self.committer = None

    def round(self) -> None:
        """Have the agent look, and commit what is finished."""
        if self.committer is None:
            self.start_agent()
        assert self.committer is not None
        with listening(lambda event: self.commits.append(event.step), CheckpointCommitted):
            self.committer._round()

    # The writer

    def data(self, step: int) -> bytes:
        text = "".join(self.random.choices("abc", k=self.random.randint(1, 400)))
        return tensors(text) if self.kind.name(step).endswith(".safetensors") else zipped(step, text)

    def write(self, path: Path, data: bytes) -> Iterator[None]:
        """Write one file in one of the ways that programs have."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name == "DONE":  # half of a file without a format cannot be told from a whole one
            path.write_bytes(data)
            yield
            return
        how = self.random.choice(["direct", "renamed", "closed between"])
        if self.random.random() < 0.3 and path.exists():
            path.unlink()
        target = path.with_name(f".{path.name}.tmp") if how == "renamed" else path
        half = len(data) // 2
        with target.open("wb", buffering=0) as file:
            yield
            file.write(data[:half])
            yield
            if how != "closed between":
                file.write(data[half:])
        if how == "closed between":
            yield
            with target.open("ab", buffering=0) as file:
                file.write(data[half:])
        if how == "renamed":
            yield
            target.replace(path)
        yield

    def save(self, step: int) -> Iterator[None]:
        if self.kind.save is not None:
            yield from self.kind.save(self, step)
            return
        name = self.kind.name(step)
        self.whole_now.pop(name, None)
        files: Files = {}
        if not self.kind.is_directory:
            files[name] = self.data(step)
            yield from self.write_whole(name, files)
        else:
            if (self.folder / name).exists() and self.random.random() < 0.5:
                shutil.rmtree(self.folder / name)
            names = ["model.safetensors", "optimizer.pt", "rng_state.pth"]
            for file in names[: self.random.randint(1, 3)] if self.kind_name == "marked" else names:
                files[f"{name}/{file}"] = (
                    tensors(f"{step}") if file.endswith(".safetensors") else zipped(step, "x" * step)
                )
                yield from self.write(self.folder / name / file, files[f"{name}/{file}"])
            last = b'{"global_step": %d}' % step
            files[f"{name}/{self.kind.marker}"] = last
            for file in os.listdir(self.folder / name):
                if f"{name}/{file}" not in files:  # of an earlier state of the same name
                    (self.folder / name / file).unlink()
            yield from self.write_whole(name, files, only=f"{name}/{self.kind.marker}")
        if self.kind_name == "detectron":
            (self.folder / "last_checkpoint").write_text(name)

    def write_whole(self, name: str, files: Files, only: str = "") -> Iterator[None]:
        """Write the last file; the model knows from now on that this state may be seen whole."""
        self.wholes.setdefault(name, []).append(files)
        yield from self.write(self.folder / (only or name), files[only or name])
        self.whole_now[name] = files

    def spoil(self, step: int) -> None:
        """Put something into the folder that can never be stored."""
        name = self.kind.name(1000 + step)
        if self.kind.is_rewritten or self.kind.save is not None or (self.folder / name).exists():
            return
        self.bad.add(name)
        what = self.random.choice(["pipe", "link", "name"])
        inside = self.folder / name if self.kind.is_directory else self.folder
        inside.mkdir(exist_ok=True)
        if self.kind.is_directory:
            (inside / self.kind.marker).write_bytes(b'{"global_step": %d}' % (1000 + step))
            (inside / "rng_state.pth").write_bytes(zipped(1, ""))
            target = inside / ("a\nb" if what == "name" else "optimizer.pt")
        else:
            target = inside / name
        if what == "pipe":
            os.mkfifo(target)
        elif what == "link":
            (self.place / "elsewhere").write_bytes(b"secret")
            target.symlink_to(self.place / "elsewhere")
        elif self.kind.is_directory:
            target.touch()
        else:
            self.bad.discard(name)

    def rotate(self) -> None:
        """Delete the oldest, as `save_total_limit` does."""
        if self.kind.save is not None:
            return
        for name in sorted(self.whole_now, key=lambda it: list(self.wholes).index(it))[:-2]:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            del self.whole_now[name]

    # The end

    def check(self) -> None:
        """Compare the store with the model."""
        with open_store(self.store, durable=False, group="solo") as store:
            found: dict[str, list[int]] = {}
            for checkpoint in store:
                name = checkpoint.metadata["folder"]["name"]
                with checkpoint.as_directory() as directory:
                    prefix = f"{name}/" if self.kind.is_directory else ""
                    files = {prefix + file.name: (directory / file.name).read_bytes() for file in checkpoint.files}
                assert name in self.wholes, f"{name} was never whole"
                assert files in self.wholes[name], f"step {checkpoint.step}: {name} was never like this"
                found.setdefault(name, []).append(self.wholes[name].index(files))
            for name, files in self.whole_now.items():
                is_there = self.wholes[name].index(files) in found.get(name, [])
                assert is_there or not self.kind.is_sure, f"{name} is whole, and not in the store"
            for states in found.values():
                assert states == sorted(states), "they were committed out of order"
                assert self.kind.is_rewritten or len(states) == 1
            replaced = {entry.step for entry in store.trash()}
            assert replaced <= set(self.commits)
            assert not replaced or not self.kind.is_rewritten, "a state of a file was replaced"
            assert not self.bad & set(found)
        assert [name for name in os.listdir(self.folder) if "ckptstore" in name] == []


def play(place: Path, seed: int, kind_name: str = "") -> World:
    """Let a writer and an agent live beside each other; the writer may die, and both may start again."""
    world, step = World(place, seed, kind_name=kind_name), 0
    for _life in range(world.random.randint(1, 3)):
        world.is_alive = True
        world.saved = []
        world.start_agent()
        for _ in range(world.random.randint(1, 4)):
            step += 1
            if not _goes_on(world, step):
                break
        world.is_alive = False
        _rounds(world, 3)
    _rounds(world, 3)
    world.stop_agent()
    return world


def _rounds(world: World, count: int) -> None:
    for _ in range(count):
        world.round()


def _goes_on(world: World, step: int) -> bool:
    """Write one checkpoint, with an agent that looks now and then. Return False if the writer died."""
    chance = world.random
    if chance.random() < 0.15:
        world.spoil(step)
    for _ in world.save(step):
        if chance.random() < 0.4:
            world.round()
        if chance.random() < 0.03:
            world.stop_agent()
        if chance.random() < (0.02 if world.kind.save is None else 0.004):  # theirs have many more pauses
            return False
    if world.kind.is_rewritten or chance.random() < 0.7:
        _rounds(world, 2)
    if chance.random() < 0.3 and not world.kind.is_rewritten:
        _rounds(world, 2)
        world.rotate()
    return True
