"""What is called finished is always the whole of what a writer wrote: any order of file events, looks and crashes."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import IO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore.tools.run.folders.candidate import MarkerReader, Rules, Sight, fingerprint
from ckptstore.tools.run.folders.finished import Finisher
from ckptstore.tools.run.folders.open_files import open_files
from ckptstore.tools.run.folders.shapes import candidates_in
from ckptstore.tools.run.folders.snapshot import FolderSnapshot, take

QUIET_SECONDS = 10.0
RULES = Rules(patterns=("mine_*", "quiet_*.bin"), marker=None, quiet_seconds=QUIET_SECONDS)
MARKED = Rules(patterns=("mine_*",), marker="DONE", quiet_seconds=QUIET_SECONDS)


def zipped(step: int, text: str, key: str = "global_step") -> bytes:
    """Bytes in the form of torch.save."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), pickle.dumps({key: step, "text": text}, protocol=2))
    return buffer.getvalue()


def tensors(text: str) -> bytes:
    """Bytes in the form of safetensors."""
    data = text.encode()
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


@dataclass
class World:
    """A folder, the clock of its disk, and what the job of the moment has open."""

    folder: Path
    now_seconds: float = 1000.0
    opened: list[IO[bytes]] = field(default_factory=list)
    ready: set[tuple[str, int]] = field(default_factory=set)
    """The barriers that a rank has reached."""

    def stamp(self, path: Path) -> None:
        self.now_seconds += 0.1
        os.utime(path, ns=(0, int(self.now_seconds * 1e9)))

    def write(self, name: str, data: bytes, *, temporary: str = "") -> Iterator[None]:
        """Write a file in two pieces, an event after each system call; under another name first if one is given."""
        path = self.folder / (temporary or name)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb", buffering=0)
        self.opened.append(file)
        self.stamp(path)
        yield
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            file.write(piece)
            self.stamp(path)
            yield
        file.close()
        self.opened.remove(file)
        yield
        if temporary:
            path.rename(self.folder / name)
            yield

    def barrier(self, name: str, rank: int, world_size: int) -> Iterator[None]:
        self.ready.add((name, rank))
        while not all((name, other) in self.ready for other in range(world_size)):
            yield

    def crash(self) -> None:
        for file in self.opened:
            file.close()
        self.opened, self.ready = [], set()


Program = Callable[[World, int, int, int, str], Iterator[None]]
"""What one rank writes: of the world, the rank, how many ranks there are, the step and a text of its own."""


def trainer(world: World, rank: int, world_size: int, step: int, text: str) -> Iterator[None]:
    top = f"checkpoint-{step}"
    if rank == 0:
        yield from world.write(f"{top}/config.json", text.encode())
        yield from world.write(f"{top}/model.safetensors", tensors(text), temporary=f"{top}/.tmp123")
        yield from world.write(f"{top}/optimizer.pt", zipped(step, text))
    rng = "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"
    yield from world.write(f"{top}/{rng}", zipped(step, "rng"))
    if rank == 0:
        yield from world.write(f"{top}/trainer_state.json", json.dumps({"global_step": step, "text": text}).encode())


def deepspeed(world: World, rank: int, world_size: int, step: int, text: str) -> Iterator[None]:
    """ZeRO: rank 0 names the tag when its own files are there, and the others may be behind."""
    top = f"global_step{step}"
    if rank == 0:
        yield from world.write(f"{top}/mp_rank_00_model_states.pt", zipped(step, text))
    name = f"{top}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    yield from world.write(name, zipped(step, f"{rank}{text if rank == 0 else ''}"))
    if rank == 0:
        yield from world.write("latest", top.encode())


def megatron(world: World, rank: int, world_size: int, step: int, text: str) -> Iterator[None]:
    yield from world.write(f"iter_{step:07}/__{rank}_0.distcp", f"{rank}{text}".encode())
    yield from world.barrier(f"files{step}{text}", rank, world_size)
    if rank == 0:
        yield from world.write("latest_checkpointed_iteration.txt", str(step).encode())
    yield from world.barrier(f"told{step}{text}", rank, world_size)


def titan(world: World, rank: int, world_size: int, step: int, text: str) -> Iterator[None]:
    top = f"step-{step}"
    yield from world.write(f"{top}/__{rank}_0.distcp", f"{rank}{text}".encode())
    yield from world.barrier(f"files{step}{text}", rank, world_size)
    if rank == 0:
        yield from world.write(f"{top}/.metadata", text.encode(), temporary=f"{top}/.metadata.tmp")


def lightning(world: World, rank: int, world_size: int, step: int, text: str) -> Iterator[None]:
    """Moved from another file system: written under its own name."""
    if rank == 0:
        yield from world.write(f"checkpoints/epoch=0-step={step}.ckpt", zipped(step, text))


def marked(world: World, rank: int, world_size: int, step: int, text: str) -> Iterator[None]:
    yield from world.write(f"mine_{step}/part{rank}", f"{rank}{text}".encode())
    yield from world.barrier(f"files{step}{text}", rank, world_size)
    if rank == 0:
        yield from world.write(f"mine_{step}/DONE", text.encode())


def silent(world: World, rank: int, world_size: int, step: int, text: str) -> Iterator[None]:
    """No marker: it never pauses for as long as the quiet time."""
    yield from world.write(f"mine_{step}/part{rank}", f"{rank}{text}".encode())
    yield from world.write(f"mine_{step}/more{rank}", f"{rank}{text}".encode())


def whole_of(program: Program, world_size: int, step: int, text: str) -> dict[str, dict[str, bytes]]:
    """What the ranks leave when nothing disturbs them, by the name of the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        ranks = [program(world, rank, world_size, step, text) for rank in range(world_size)]
        while ranks:
            ranks = [rank for rank in ranks if next(rank, "over") != "over"]
        return contents_of(world.folder)


def contents_of(folder: Path) -> dict[str, dict[str, bytes]]:
    """All files by checkpoint: of the first part of their names, or their own name for a file below a directory."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.parent != folder:
            name = path.relative_to(folder).as_posix()
            top = name if name.endswith(".ckpt") else name.partition("/")[0]
            found.setdefault(top, {})[name] = path.read_bytes()
    return found


class Agent:
    """Looks as `Folder` does, by the clock of the world."""

    def __init__(self, world: World, rules: Rules, known: dict[str, str] | None) -> None:
        self.world, self.rules = world, rules
        self.contents = MarkerReader(world.folder)
        self.finisher = Finisher(QUIET_SECONDS, known)
        self.told: dict[str, str] = known or {}

    def look(self, world_size: int, *, job_lives: bool) -> set[str]:
        folder = self.world.folder
        opened = open_files(folder, take(folder).files).opened
        ranks = frozenset(range(world_size)) if world_size > 1 else frozenset[int]()
        seen = take(folder)  # the clock of its disk is the world's
        files = {name: replace(sign, ctime_ns=sign.mtime_ns) for name, sign in seen.files.items()}
        sight = Sight(FolderSnapshot(files, seen.directories), self.contents, self.rules, ranks)
        told = self.finisher.judge(
            candidates_in(sight)[0], open_files=opened, job_lives=job_lives, now_seconds=self.world.now_seconds
        )
        self.told = {it.name: fingerprint(it) for it in told.finished}
        return set(self.told)


class Story:
    """A job that may crash and begin again, under an agent that may end with it."""

    def __init__(self, world: World, program: Program, world_size: int, rules: Rules) -> None:
        self.world, self.program, self.world_size, self.rules = world, program, world_size, rules
        self.agent = Agent(world, rules, None)
        self.life, self.step = 0, 1
        self.wholes: list[dict[str, dict[str, bytes]]] = []
        """What each life would leave if nothing disturbed it."""
        self.ranks: list[Iterator[None]] = []
        self.paused_seconds = 0.0
        self.begin()

    def begin(self) -> None:
        text = "abcdefgh"[self.life % 8] * 9
        self.wholes.append(whole_of(self.program, self.world_size, self.step, text))
        self.ranks = [
            self.program(self.world, rank, self.world_size, self.step, text) for rank in range(self.world_size)
        ]

    def write(self, rank: int, count: int) -> None:
        self.paused_seconds = 0.0
        for _ in range(count):
            if next(self.ranks[rank % self.world_size], "over") == "over":
                break

    def look(self, wait: int) -> None:
        """After a pause; where nothing but a quiet time tells the end, it is shorter than that."""
        if self.program is not silent or self.paused_seconds + wait * 3.0 < QUIET_SECONDS:
            self.world.now_seconds += wait * 3.0
            self.paused_seconds += wait * 3.0
        self.check(job_lives=True)

    def crash(self, ends_agent: bool, next_step: bool) -> None:
        self.world.crash()
        self.check(job_lives=False)
        if ends_agent:
            self.agent = Agent(self.world, self.rules, self.agent.told)
        self.world.now_seconds += 100
        self.check(job_lives=False)
        self.check(job_lives=False)
        self.life, self.step = self.life + 1, self.step + next_step
        self.begin()

    def end(self) -> None:
        while self.ranks:
            self.ranks = [rank for rank in self.ranks if next(rank, "over") != "over"]
        for _ in range(3):
            found = self.check(job_lives=True)
            self.world.now_seconds += QUIET_SECONDS
        assert set(self.wholes[-1]) <= found

    def check(self, *, job_lives: bool) -> set[str]:
        found = self.agent.look(self.world_size, job_lives=job_lives)
        there = contents_of(self.world.folder)
        for name in found:
            assert any(there[name] == whole.get(name) for whole in self.wholes), f"{name} is not whole"
        return found


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 2), st.integers(1, 12)),
        st.tuples(st.just("look"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("crash"), st.booleans(), st.booleans()),
    ),
    max_size=40,
)


@pytest.mark.parametrize(
    ("program", "world_size", "rules"),
    [
        (trainer, 1, RULES),
        (trainer, 2, RULES),
        (deepspeed, 1, RULES),
        (deepspeed, 2, RULES),
        (megatron, 2, RULES),
        (titan, 2, RULES),
        (lightning, 1, RULES),
        (marked, 2, MARKED),
        (silent, 2, RULES),
    ],
)
@settings(max_examples=min(25, settings.default.max_examples), deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS)
def test_what_is_finished_is_whole(
    program: Program,
    world_size: int,
    rules: Rules,
    monkeypatch: pytest.MonkeyPatch,
    events: list[tuple[str, int, int]],
) -> None:
    # The writers are this process: to ask the others, and what it has mapped, would take most of the time.
    monkeypatch.setattr(import_module("ckptstore.tools.run.folders.open_files"), "pids", lambda: [os.getpid()])
    monkeypatch.setattr(import_module("ckptstore.tools.run.folders.open_files"), "_mappings", lambda *_: ())
    with tempfile.TemporaryDirectory() as folder:
        story = Story(World(Path(folder)), program, world_size, rules)
        for kind, first, second in events:
            if kind == "write":
                story.write(first, second)
            elif kind == "look":
                story.look(first)
            else:
                story.crash(bool(first), bool(second))
        story.end()
