"""Tell the story of the demo: train, die in the middle of an upload, resume, end with the same loss curve."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ckptstore import open_store
from ckptstore.format.layout import CHECKPOINT_PREFIX, MANIFEST_NAME, parse_record_key
from ckptstore.storage.open import open_storage
from ckptstore.tools.demo.digits import write_digits
from ckptstore.tools.demo.launch import Ended, run_job
from ckptstore.tools.demo.telling import DemoFailed, command, head, invite, require_empty, require_success, say, shout

TOLERANCE = 1e-6
"""The largest relative difference between two losses that count as the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One way to train, and the place of its stores."""

    title: str
    root: str
    num_ranks: int
    arguments: tuple[str, ...]
    epochs: int
    directory: Path
    """For the reports of rank 0."""

    @property
    def store(self) -> str:
        """The store that survives a crash."""
        return f"{self.root}/crashed"


def tell(root: str | None, *, num_ranks: int, width: int, epochs: int, html: Path | None = None) -> None:
    """Run the demo and print it; `html` is a file for the page of both stores, as they are before anything is removed.

    Raises DemoFailed when anything deviates.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptstore-demo-")))
        place = (root or tempfile.mkdtemp(prefix="ckptstore-demo-stores-")).rstrip("/")
        if root is not None:
            require_empty(root)
        shout(f"ResNet-18 of width {width} on 1,437 handwritten digits: {num_ranks} processes,")
        shout(f"{epochs} epochs, AdamW, a checkpoint from all ranks after each. Stores: {place}")
        digits = directory / "digits.npz"
        write_digits(digits)
        scenes = []
        for name, title, flags in (
            ("ddp", "DDP: every rank holds the whole model", ()),
            ("sharded", "FSDP2: every rank holds a part of every tensor", ("--sharded",)),
        ):
            scene = Scene(
                title=title,
                root=f"{place}/{name}",
                num_ranks=num_ranks,
                arguments=("--width", str(width), "--epochs", str(epochs), "--digits", str(digits), *flags),
                epochs=epochs,
                directory=Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptstore-demo-"))),
            )
            _play(scene)
            scenes.append(scene)
        shout("\nBoth stores")
        if html is not None:
            head("5. What a person sees")
            command("report", *(scene.store for scene in scenes), "--html", str(html))
        for scene in scenes:
            head(f"{'5' if html is None else '6'}. What is left of {scene.store}")
            _clean(scene)
    seconds = time.monotonic() - started
    shout(f"\nThe demo took {seconds:.0f} s; both jobs ended as if nothing had happened.")
    stores = [scene.store for scene in scenes]
    invite(
        ("ls", place),
        ("show", f"{stores[0]}@latest", "--timings"),
        ("diff", f"{stores[0]}@latest", f"{stores[1]}@latest"),
        ("report", *stores, "--html", "demo.html"),
        place=place,
    )


def _play(scene: Scene) -> None:
    shout(f"\n{scene.title}")

    head("1. Without interruption")
    require_success(_train(scene, f"{scene.root}/reference", report="reference"))

    kill_rank, kill_step = scene.num_ranks - 1, scene.epochs
    head(f"2. Again, and rank {kill_rank} gets SIGKILL in the middle of its upload of step {kill_step}")
    ended = _train(scene, scene.store, "--kill-rank", str(kill_rank), "--kill-step", str(kill_step), report="killed")
    if (ended.failed_rank, ended.signal) != (kill_rank, signal.SIGKILL):
        raise DemoFailed(f"rank {kill_rank} was to die by SIGKILL, and rank {ended.failed_rank} ended first")
    say(f"rank {kill_rank} died by SIGKILL; the other ranks were ended, as a launcher does")
    _show_torn(scene, kill_step)

    head("3. The job starts again")
    require_success(_train(scene, scene.store, report="resumed"))
    _compare(scene)

    other = scene.num_ranks - 1 or 2
    head(f"4. One more epoch, on {other} rank{'s' if other > 1 else ''}")
    require_success(_train(scene, scene.store, "--epochs", str(scene.epochs + 1), report="other", num_ranks=other))


def _clean(scene: Scene) -> None:
    for arguments in (
        ("ls", scene.store),
        ("gc", scene.store),
        ("prune", "--grace", "0", scene.store),
        ("verify", "--all", scene.store),
    ):
        command(*arguments)


def _train(scene: Scene, store: str, *arguments: str, report: str, num_ranks: int | None = None) -> Ended:
    path = scene.directory / f"{report}.json"
    all_arguments = ("--store", store, "--report", str(path), *scene.arguments, *arguments)
    return run_job(num_ranks or scene.num_ranks, all_arguments, tell=say)


def _show_torn(scene: Scene, kill_step: int) -> None:
    """Print what the crash left, and show that no reader sees it."""
    storage = open_storage(scene.store)
    sizes: Counter[str] = Counter()
    complete, num_records = set(), 0
    for file in storage.list(""):
        num_records += parse_record_key(file.key) is not None
        if file.key.startswith(CHECKPOINT_PREFIX):
            attempt, _, name = file.key.removeprefix(CHECKPOINT_PREFIX).partition("/")
            sizes[attempt] += file.size_bytes
            complete |= {attempt} if name == MANIFEST_NAME else set()
    storage.close()
    for attempt in sorted(sizes.keys() - complete):
        say(f"left behind: {attempt} with {sizes[attempt]:,} bytes, no manifest, and none of {num_records} log records")
    with open_store(scene.store) as store:
        steps = [checkpoint.step for checkpoint in store]
        latest = store.latest()
    if latest is None or latest.step != kill_step - 1 or kill_step in steps:
        raise DemoFailed(f"after the crash the store shows the steps {steps}, and step {kill_step} was torn")
    say(f"the torn attempt is invisible: the store holds the steps {steps}, the latest is {latest.step}")


def _compare(scene: Scene) -> None:
    reference, resumed = (
        json.loads((scene.directory / f"{name}.json").read_text()) for name in ("reference", "resumed")
    )
    if len(reference) != len(resumed):
        raise DemoFailed(f"{len(resumed)} losses after the resume, {len(reference)} without interruption")
    worst = max(abs(a - b) / abs(a) for a, b in zip(reference, resumed, strict=True))
    say(f"the loss curve has {len(reference)} steps, from {reference[0]:.4f} to {reference[-1]:.4f};")
    say(f"it differs from the one without interruption by {worst:.1e} at most ({TOLERANCE:.0e} is allowed)")
    if not worst <= TOLERANCE:
        raise DemoFailed("the loss curve after the resume is another one")
