"""Tell the demo with a fast tier: a node is lost with its disk, and the job resumes from its partner's copy."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptstore import open_store
from ckptstore.testing.s3_server import Fault, S3Server, s3_server
from ckptstore.tools.demo.digits import write_digits
from ckptstore.tools.demo.launch import Ended, RunningJob, run_job
from ckptstore.tools.demo.telling import DemoFailed, command, head, require_success, say, shout
from ckptstore.tools.demo.tier_page import Timeline, page

WORKER = "ckptstore.tools.demo.tier_worker"
STEPS_PER_EPOCH = 8
"""Batches of 160 in 1,437 digits."""
STEP_SECONDS = 0.3
"""The least duration of a step. A model that needs several nodes takes longer."""
UPLOAD_STEPS = 3
"""Training steps during one upload of a file: the bucket is that slow on a machine of any speed."""
FIRST_UPLOAD_SECONDS = 1.0
"""The upload time until that is known."""
STORE = "s3://bucket/run"
UPLOADS = "^PUT /bucket/run/checkpoints/.*/state-rank"
NODES = ("node-a", "node-b", "node-c")


@dataclass
class JobLog:
    """The lines of rank 0, of all jobs in turn; they come on a thread."""

    timeline: Timeline
    bucket: Fault
    """Delays the bucket's uploads."""
    lose_at: int | None = None
    """The step that must be complete on the nodes when one of them is lost."""
    lost_ranks: range = range(0)
    job: RunningJob = field(default_factory=RunningJob)
    loss_at: dict[int, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    """The losses of the whole training, from the job that ended it."""
    resumed: dict[str, Any] | None = None
    health: dict[str, dict[str, Any]] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def line(self, text: str) -> None:
        """Take a line of any rank. A line without JSON is not part of the story, and is printed as it is."""
        with self._lock:
            try:
                fact = json.loads(text)
                what, at = fact.pop("what"), fact.pop("at")
            except (ValueError, TypeError, KeyError, AttributeError):
                say(text)
            else:
                self._take(what, at, fact)

    def _take(self, what: str, at: float, fact: dict[str, Any]) -> None:
        timeline = self.timeline
        if what == "started":
            timeline.jobs.append(at)
        elif what == "resumed":
            self.resumed, timeline.resumed_at = fact, at
        elif what == "step":
            self.loss_at[fact["step"]] = fact["loss"]
        elif what == "fast":
            self._fast(at, fact)
        elif what == "durable":
            timeline.durable.append((at, fact["step"]))
        elif what in ("trained", "drained"):
            self.health[what], timeline.ended_at = fact["health"], at
        elif what == "losses":
            self.losses = fact["losses"]
        elif what == "trouble":
            self.trouble.append(fact["text"])
            say(fact["text"])

    def _fast(self, at: float, fact: dict[str, Any]) -> None:
        timeline, step = self.timeline, fact["step"]
        if timeline.fast and timeline.fast[-1][0] > timeline.jobs[-1]:
            self.bucket.seconds = max(FIRST_UPLOAD_SECONDS, UPLOAD_STEPS * (at - timeline.fast[-1][0]))
        timeline.fast.append((at, step))
        bucket = f"step {timeline.durable[-1][1]}" if timeline.durable else "nothing yet"
        where = f"on {fact['num_nodes']} nodes after {fact['seconds']:.2f} s"
        say(f"step {step:2}  loss {self.loss_at[step]:.4f}  complete {where}  the bucket has {bucket}")
        if step == self.lose_at:
            self.lose_at, timeline.lost_at = None, time.time()
            self.job.kill(self.lost_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierScene:
    """The directories of nodes, a bucket, and the training."""

    directory: Path
    server: S3Server
    num_ranks: int
    width: int
    epochs: int

    @property
    def num_steps(self) -> int:
        """The steps of the whole training."""
        return self.epochs * STEPS_PER_EPOCH

    @property
    def digits(self) -> Path:
        """The file with the training digits."""
        return self.directory / "digits.npz"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a client finds the bucket."""
        return {
            "AWS_ENDPOINT_URL": self.server.endpoint_url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def new_log(self) -> JobLog:
        """Return an empty log for the first job."""
        bucket = Fault(action="delay", match=UPLOADS, times=None, seconds=FIRST_UPLOAD_SECONDS)
        return JobLog(Timeline(nodes=NODES, num_steps=self.num_steps), bucket)

    def train(self, log: JobLog, *nodes: str) -> Ended:
        """Run a job on these nodes; without nodes it saves nothing."""
        log.job = RunningJob()
        arguments = ["--width", str(self.width), "--epochs", str(self.epochs), "--digits", str(self.digits)]
        if nodes:
            arguments += ["--store", STORE, "--step-seconds", str(STEP_SECONDS)]
            arguments += ["--disks", *(str(self.directory / node) for node in nodes)]
        return run_job(
            self.num_ranks, arguments, tell=log.line, module=WORKER, environment=self.environment, job=log.job
        )

    def durable_step(self) -> int | None:
        """Return the newest step in the bucket."""
        with open_store(STORE, storage_options=self.server.storage_options) as store:
            latest = store.latest()
        return None if latest is None else latest.step


def tell(*, num_ranks: int, width: int, epochs: int, html: Path | None = None) -> None:
    """Run the demo and print it; `html` is a file for its timeline. Nothing else is left.

    Raises DemoFailed when anything deviates.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptstore-demo-")))
        server = stack.enter_context(s3_server(buckets=["bucket"]))
        scene = TierScene(directory=directory, server=server, num_ranks=num_ranks, width=width, epochs=epochs)
        write_digits(scene.digits)
        shout(
            f"ResNet-18 of width {width} on 1,437 handwritten digits: FSDP2, {num_ranks} processes on 2 nodes, AdamW,"
        )
        shout("a checkpoint after every step. It is complete when both nodes have a copy of every file.")
        shout(f"A slow bucket gets what it can take. The disks of the nodes: {directory}")
        timeline = _play(scene)
    if html is not None:
        html.write_text(page(timeline), encoding="utf-8")
        say(f"the timeline is in {html}")
    shout(f"\nThe demo took {time.monotonic() - started:.0f} s; the job ended as if nothing had happened.")


def _play(scene: TierScene) -> Timeline:
    head("1. Without interruption, nothing saved")
    whole = scene.new_log()
    require_success(scene.train(whole))
    say(f"{len(whole.losses)} steps, and the loss goes from {whole.losses[0]:.4f} to {whole.losses[-1]:.4f}")

    half = scene.num_steps // 2
    head(f"2. On node-a and node-b; when step {half} is complete on both, node-b is lost with its disk")
    log = scene.new_log()
    log.lose_at, log.lost_ranks = half, range(scene.num_ranks // 2, scene.num_ranks)
    scene.server.faults.add(log.bucket)
    _lose_a_node(scene, log)

    head("3. The job starts again on node-a and node-c, which is empty")
    require_success(scene.train(log, "node-a", "node-c"))
    _check_resumed(log, whole)

    head("4. The bucket catches up")
    _check_caught_up(scene, log)
    return log.timeline


def _lose_a_node(scene: TierScene, log: JobLog) -> None:
    """Train until a node is lost, and show what is left."""
    timeline = log.timeline
    ended = scene.train(log, "node-a", "node-b")
    if ended.failed_rank not in log.lost_ranks or ended.signal != signal.SIGKILL:
        raise DemoFailed(f"the ranks of node-b were to die by SIGKILL, and rank {ended.failed_rank} ended first")
    shutil.rmtree(scene.directory / "node-b")
    ranks = " and ".join(map(str, log.lost_ranks))
    say(f"node-b is lost: SIGKILL for rank {ranks}, its disk removed; a launcher ends the other ranks")
    durable = scene.durable_step()
    timeline.fast_at_loss, timeline.durable_at_loss = timeline.fast[-1][1], durable or 0
    bucket = "nothing yet" if durable is None else f"step {durable}"
    say(f"the newest on the nodes is step {timeline.fast_at_loss}; the bucket has {bucket}")
    if timeline.repeated <= 0:
        raise DemoFailed("the bucket was to be behind the nodes")
    command("fast", "ls", str(scene.directory / "node-a"), "--store", STORE, environment=scene.environment)


def _check_resumed(log: JobLog, whole: JobLog) -> None:
    timeline, resumed = log.timeline, log.resumed
    newest, durable = timeline.fast_at_loss, timeline.durable_at_loss
    if resumed is None or resumed["step"] < newest or resumed["number"] is not None:
        raise DemoFailed(f"the job went on from {resumed}, and was to take step {newest} from node-a")
    timeline.fast_at_loss = resumed["step"]  # a save may be complete though its job did not live to say so
    say(f"it went on from step {resumed['step']}: node-a has its own files, and its copy of those of node-b")
    bucket = f"step {durable}" if durable else "the beginning"
    say(f"without the fast tier: from {bucket}, and {timeline.repeated} steps would have been trained again")
    if log.losses != whole.losses:
        raise DemoFailed("the losses are not those of the run without interruption")
    say(f"all {len(log.losses)} losses are equal, bit for bit, to those without interruption")


def _check_caught_up(scene: TierScene, log: JobLog) -> None:
    before, after = log.health["trained"], log.health["drained"]
    say(f"after the last step: {_health_line(before)}")
    say(f"after store.drain(): {_health_line(after)}")
    if log.trouble:
        raise DemoFailed(f"nothing else was to go wrong: {log.trouble[0]}")
    last = scene.num_steps
    if after["durable_step"] != last or after["not_durable_seconds"] is not None or scene.durable_step() != last:
        raise DemoFailed(f"the bucket was to have step {last}: {after}")
    command("ls", STORE, environment=scene.environment)


def _health_line(health: dict[str, Any]) -> str:
    """Format the result of `store.health()`."""
    behind = health["not_durable_seconds"]
    shown = "the bucket lacks nothing" if behind is None else f"the bucket has lacked some for {behind:.1f} s"
    return f"fast_step {health['fast_step']}  durable_step {health['durable_step']}  {shown}"
