"""Tell the demo inside Ray Train: a worker is killed, Ray restarts the run, and the best checkpoint reads digits."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore.tools.demo.digits import write_digits
from ckptstore.tools.demo.picture import Shown, draw
from ckptstore.tools.demo.ray_worker import BATCH_SIZE, TOP_K, Reader, train
from ckptstore.tools.demo.resnet import load_digits
from ckptstore.tools.demo.telling import DemoFailed, head, invite, require_empty, say, shout
from ckptstore.tools.demo.train import Progress

_OBJECT_STORE_BYTES = 100 << 20
_MAX_FAILURES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RayScene:
    """One run of Ray Train."""

    name: str
    title: str
    sharded: bool
    storage_path: str
    num_ranks: int
    width: int
    epochs: int
    digits: Path
    """File of `write_digits`."""
    log: Path
    """File to which rank 0 writes its lines."""

    @property
    def kill_step(self) -> int:
        """The step in whose upload a worker dies, in the middle of the run."""
        return self.epochs // 2 + 1


def tell(root: str | None, *, num_ranks: int, width: int, epochs: int, picture: Path) -> None:
    """Run the demo on a Ray of its own, print it and draw it. Raises DemoFailed when anything deviates."""
    started = time.monotonic()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptstore-demo-")))
        place = (root or tempfile.mkdtemp(prefix="ckptstore-demo-runs-")).rstrip("/")
        if root is not None:
            require_empty(root)
        shout(f"ResNet-18 of width {width} on 1,437 handwritten digits, in Ray Train: {num_ranks} workers,")
        shout(f"{epochs} epochs, AdamW, a checkpoint from all of them after each. Runs: {place}")
        digits = directory / "digits.npz"
        write_digits(digits)
        stack.enter_context(_own_ray(num_cpus=num_ranks + 2))
        runs = []
        for name, title, sharded in (
            ("ddp", "DDP: every worker holds the whole model", False),
            ("fsdp", "FSDP2: every worker holds a part of every tensor", True),
        ):
            scene = RayScene(
                name=name,
                title=title,
                sharded=sharded,
                storage_path=place if "://" in place else os.path.abspath(place),
                num_ranks=num_ranks,
                width=width,
                epochs=epochs,
                digits=digits,
                log=directory / f"{name}.txt",
            )
            runs.append(_play(scene))
    draw(runs, picture)
    shout(f"\nThe demo took {time.monotonic() - started:.0f} s. Losses, kept checkpoints and digits: {picture}")
    invite(("ls", place), place=place)


@contextmanager
def _own_ray(*, num_cpus: int) -> Iterator[None]:
    """Run Ray on this machine during the context. CPUs are logical: there may be more than the machine has."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


def _play(scene: RayScene) -> Shown:
    shout(f"\n{scene.title}")
    head(f"1. Training; the last worker gets SIGKILL in its upload of step {scene.kill_step}, and Ray recovers")
    with _following(scene.log):
        result = _fit(scene)
    _require_recovery(scene)

    head(f"2. What the store keeps: the {TOP_K} best by loss, the latest, and the one that the run resumed from")
    progress = Progress()
    latest = ckptstore.ray.resolve(result.checkpoint)
    latest.load({"progress": progress}, include="progress.*", per_rank="skip")
    if len(progress.losses) != scene.epochs * (1437 // BATCH_SIZE):
        raise DemoFailed(f"the loss curve has {len(progress.losses)} steps: the recovery lost or repeated some")
    kept = _show_kept(scene, progress)

    head("3. A Ray actor reads digits with the best one")
    best = result.get_best_checkpoint("eval_loss", "min")
    step, accuracy, read = _read(best, scene)
    expected = ckptstore.ray.resolve(best).metrics["eval_accuracy"]
    say(f"step {step}: {accuracy:.2%} of 360 digits that it was not trained on; at the save it was {expected:.2%}")
    if abs(accuracy - expected) > 0.01 or kept[step] != min(kept.values()):
        raise DemoFailed("what the actor has loaded is not the best of what was saved")
    digits = load_digits(scene.digits)[1]
    return Shown(
        title=scene.title,
        losses=progress.losses,
        eval_losses=progress.eval_losses,
        kept=kept,
        best_step=step,
        kill_step=scene.kill_step,
        images=digits.images.numpy(),
        labels=digits.labels.numpy(),
        read=read,
    )


def _fit(scene: RayScene) -> Any:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    return TorchTrainer(
        train,
        train_loop_config={
            "sharded": scene.sharded,
            "width": scene.width,
            "epochs": scene.epochs,
            "kill_step": scene.kill_step,
            "digits": str(scene.digits),
            "log": str(scene.log),
        },
        scaling_config=ScalingConfig(num_workers=scene.num_ranks),
        run_config=RunConfig(
            storage_path=scene.storage_path,
            name=scene.name,
            failure_config=FailureConfig(max_failures=_MAX_FAILURES),
            checkpoint_config=CheckpointConfig(
                num_to_keep=TOP_K, checkpoint_score_attribute="eval_loss", checkpoint_score_order="min"
            ),
        ),
    ).fit()


def _require_recovery(scene: RayScene) -> None:
    log = scene.log.read_text()
    if log.count("resumed from") != 1 or f"resumed from step {scene.kill_step - 1};" not in log:
        raise DemoFailed(f"the run was to resume once, from step {scene.kill_step - 1}")


def _show_kept(scene: RayScene, progress: Progress) -> dict[int, float]:
    """Return the evaluation losses of the store's checkpoints, after checking them against retention."""
    with ckptstore.open_store(f"{scene.storage_path}/{scene.name}/_ckptstore") as store:
        kept = {checkpoint.step: checkpoint.metrics["eval_loss"] for checkpoint in store}
    for step, loss in enumerate(progress.eval_losses, 1):
        say(f"step {step}  eval_loss {loss:.4f}{'  kept' if step in kept else ''}")
    ranked = sorted(range(1, scene.epochs + 1), key=lambda step: progress.eval_losses[step - 1])
    expected = {*ranked[:TOP_K], scene.epochs, scene.kill_step - 1}
    if set(kept) != expected:
        raise DemoFailed(f"the store has the steps {sorted(kept)}, and was to keep {sorted(expected)}")
    return kept


def _read(ray_checkpoint: Any, scene: RayScene) -> tuple[int, float, Any]:
    """Let an actor, another process, read the held-out digits; return its step, accuracy and readings."""
    import ray

    digits = load_digits(scene.digits)[1]
    reader: Any = ray.remote(num_cpus=1)(Reader).remote(ray_checkpoint, scene.width)
    step, read = ray.get(reader.read.remote(digits.images.numpy()))
    ray.kill(reader)
    return step, float((read == digits.labels.numpy()).mean()), read


@contextmanager
def _following(path: Path) -> Iterator[None]:
    """Print each line that is appended to a file during the context."""
    path.touch()
    over = threading.Event()

    def follow() -> None:
        with path.open() as lines:
            while True:
                ends = over.is_set()
                for line in lines:
                    say(line.rstrip())
                if ends:
                    return
                over.wait(0.1)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
