"""A day of use in ten minutes: `make soak SECONDS=600`, or `python tests/soak/soak.py --seconds 600`.

A disk and an S3 server in a process of its own; on each a store that two jobs of two ranks take from each other, with
ranks killed at random, a reader, and somebody who prunes, collects and copies; and on each a store with one long-lived
trainer. The server throttles, resets, loses answers and is slow. What every long-lived process has in memory,
descriptors and threads is measured, and shown at the end. Then all kills of `tests/outside/sweep.py` and the
deterministic simulation.

Ends with status 1 when a committed checkpoint is lost, one cannot be read, or something grew above its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen
from uuid import uuid4

import psutil
from soak_roles import RANK_TIMEOUT_SECONDS, opened, promised

HERE = Path(__file__).parent
SWEEP = HERE.parent / "outside" / "sweep.py"
BUCKET = "soak"
START_SECONDS = 300.0
WARM_SHARE = 0.25
"""The share of the samples in which a process may still grow: caches fill, threads start."""
MOST_GROWTH_BYTES = 48 << 20
MOST_MORE = 12
"""How many descriptors or threads more may be in use at the end; a save in flight has some."""
FAULTS = [
    {"action": "status", "times": None, "probability": 0.02},
    {"action": "reset", "times": None, "probability": 0.01},
    {"action": "lose_answer", "times": None, "probability": 0.005},
    {"action": "delay", "times": None, "probability": 0.02, "seconds": 0.3},
]


@dataclass
class Watched:
    """A long-lived process, and what it had from time to time."""

    name: str
    process: subprocess.Popen[bytes]
    is_bounded: bool = True
    """The server's memory is what is stored in it, and its log of requests."""
    samples: list[tuple[int, int, int]] = field(default_factory=list)
    """Bytes of memory, descriptors, threads."""

    def look(self, where: Path) -> None:
        """Take a sample, once the process has said that it is warm."""
        if self.is_bounded and not (where / f"warm-{self.process.pid}").exists():
            return
        try:
            seen = psutil.Process(self.process.pid)
            with seen.oneshot():
                self.samples.append((seen.memory_info().rss, seen.num_fds(), seen.num_threads()))
        except psutil.Error:
            """It has ended; that is found elsewhere."""

    def grown(self) -> list[tuple[float, float]]:
        """Of memory, descriptors and threads: the median soon after the start, and that at the end."""
        warm = self.samples[int(len(self.samples) * WARM_SHARE) :]
        share = max(1, len(warm) // 4)
        columns = list(zip(*warm, strict=True))
        return [(median(column[:share]), median(column[-share:])) for column in columns]

    def leaks(self) -> list[str]:
        """What grew above its bound."""
        if len(self.samples) < 10 or not self.is_bounded:
            return []
        bounds = (("bytes of memory", MOST_GROWTH_BYTES), ("descriptors", MOST_MORE), ("threads", MOST_MORE))
        return [
            f"{self.name} had {last - first:.0f} {what} more at the end"
            for (first, last), (what, most) in zip(self.grown(), bounds, strict=True)
            if last - first > most
        ]


@dataclass
class Place:
    """One store with the jobs that fight for it."""

    name: str
    root: str
    ledger: Path
    jobs: list[list[subprocess.Popen[bytes]]] = field(default_factory=list)


@dataclass
class Soak:
    """The whole of it."""

    where: Path
    seconds: float
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    watched: list[Watched] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    endpoint: str = ""

    @property
    def pause_seconds(self) -> float:
        """Between two looks at everything."""
        return min(1.0, self.seconds / 60)

    def run(self) -> list[str]:
        """Everything; what is wrong at the end."""
        self._start_server()
        try:
            self._start_roles()
            self._await_first_commits()
            self._live()
            self._stop()
            for place in self.places:
                self._check(place)
        finally:
            for process in [item.process for item in self.watched] + self._job_processes():
                process.kill()
                process.wait()
        self._read_output()
        return self.violations + [leak for item in self.watched for leak in item.leaks()]

    def table(self) -> str:
        """What was measured."""
        lines = [f"{'process':16} {'MiB':>13} {'MiB/h':>7} {'descriptors':>13} {'threads':>9}"]
        for item in self.watched:
            if len(item.samples) < 10:
                lines.append(f"{item.name:16} too few samples")
                continue
            (first, last), descriptors, threads = item.grown()
            hours = len(item.samples) * self.pause_seconds * (1 - WARM_SHARE) * 0.75 / 3600
            mebibytes = f"{first / 2**20:.0f} to {last / 2**20:.0f}"
            slope = (last - first) / 2**20 / hours
            line = f"{item.name:16} {mebibytes:>13} {slope:7.0f} {descriptors[0]:6.0f} to {descriptors[1]:.0f}"
            lines.append(f"{line:54} {threads[0]:4.0f} to {threads[1]:.0f}")
        return "\n".join([*lines, "", *(f"{what}: {count}" for what, count in sorted(self.counts.items()))])

    def _start_server(self) -> None:
        command = [sys.executable, "-m", "ckptstore.testing.s3_server", "--bucket", BUCKET]
        server = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.watched.append(Watched("server", server, is_bounded=False))
        assert server.stdout is not None
        with server.stdout as lines:
            self.endpoint = lines.readline().decode().strip()
        self.options = {"key": "test", "secret": "testsecret", "endpoint_url": self.endpoint}
        self.options["client_kwargs"] = {"region_name": "us-east-1"}

    def _start_roles(self) -> None:
        for kind, base in (("disk", str(self.where / "disk")), ("s3", f"s3://{BUCKET}/run")):
            place = Place(kind, f"{base}-shared", self.where / f"ledger-{kind}")
            self.places.append(place)
            alone = Place(f"{kind} alone", f"{base}-alone", self.where / f"ledger-{kind}-alone")
            self.places.append(alone)
            self._start_job(place)
            self._watch(f"{kind} reader", "reader", place)
            self._watch(f"{kind} janitor", "janitor", place, str(self.where / f"copy-{kind}"))
            self._watch(f"{kind} trainer", "trainer", alone)

    def _start(self, role: str, place: Place, *more: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CKPTSTORE_CACHE_DIR": str(self.where / "cache")}
        environment["CKPTSTORE_CACHE_IDLE_SECONDS"] = "5"
        command = [sys.executable, str(HERE / "soak_roles.py"), role, str(place.ledger), place.root]
        with open(self.where / f"output-{role}-{uuid4().hex[:8]}", "wb") as output:
            return subprocess.Popen(
                [*command, json.dumps(self.options), *more], env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def _watch(self, name: str, role: str, place: Place, *more: str) -> None:
        self.watched.append(Watched(name, self._start(role, place, *more)))

    def _start_job(self, place: Place) -> None:
        token = uuid4().hex
        place.jobs.append([self._start("job", place, str(rank), token) for rank in (0, 1)])
        self.counts[f"jobs on {place.name}"] += 1

    def _job_processes(self) -> list[subprocess.Popen[bytes]]:
        return [process for place in self.places for job in place.jobs for process in job]

    def _await_first_commits(self) -> None:
        """The time counts from when everybody is at work, however long this machine takes to start them."""
        deadline = time.monotonic() + START_SECONDS
        while not all(promised(place.ledger) for place in self.places):
            if time.monotonic() > deadline:
                self.violations.append(f"nothing was committed everywhere in {START_SECONDS:.0f} s")
                return
            time.sleep(0.1)

    def _live(self) -> None:
        """Take stores over, kill, have the server fail, and watch, until the time is over."""
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            time.sleep(self.pause_seconds)
            for item in self.watched:
                item.look(self.where)
            for place in self.places:
                if place.jobs:
                    self._disturb(place)
            if self.chance.random() < 0.2:
                faults = FAULTS if self.chance.random() < 0.6 else []
                self._control("faults", faults)
                self.counts["changes of the server's faults"] += 1

    def _disturb(self, place: Place) -> None:
        """Another job takes the store over, or a rank is killed, or a job that has ended is started anew."""
        place.jobs = [job for job in place.jobs if any(process.poll() is None for process in job)]
        dice = self.chance.random()
        if not place.jobs or dice < 0.05:
            self._start_job(place)
        elif dice < 0.1:
            self.chance.choice(self.chance.choice(place.jobs)).kill()
            self.counts[f"ranks killed on {place.name}"] += 1

    def _stop(self) -> None:
        self._control("faults", [])
        roles = self.watched[1:]
        for process in [item.process for item in roles] + self._job_processes():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 8 * RANK_TIMEOUT_SECONDS
        for item in roles:
            try:
                status = item.process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.violations.append(f"{item.name} does not end")
            else:
                if status:
                    self.violations.append(f"{item.name} ended with status {status}")
        for process in self._job_processes():
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.violations.append(f"a rank ({process.pid}) does not end")

    def _check(self, place: Place) -> None:
        """At rest: what was promised is there, all that is live verifies, and the log holds together."""
        least = promised(place.ledger)
        self.counts[f"commits on {place.name}"] = len(place.ledger.read_text().splitlines()) if least else 0
        with opened(place.root, self.options) as store:
            latest = store.latest()
            if least and (latest is None or (latest.number or 0) < least):
                self.violations.append(f"{place.root}: checkpoint {least} was committed, the latest is {latest}")
            self.violations += [
                f"{place.root}: step {checkpoint.step} does not verify"
                for checkpoint in store
                if not checkpoint.verify().ok
            ]
            self.violations += [f"{place.root}: {problem}" for problem in store._job.log.verify_chain()]
            store.collect_garbage(claim=True)

    def _read_output(self) -> None:
        for path in self.where.glob("output-*"):
            for line in path.read_text(errors="replace").splitlines():
                if line.startswith(("VIOLATION", "Traceback", "AssertionError")):
                    self.violations.append(f"{path.name}: {line}")
                elif line.startswith(("job was fenced", "job ended", "janitor:", "reader:", "trainer:")):
                    what = ":".join(line.split(":")[:2]) if line.startswith(("job ended", "janitor")) else line[:14]
                    self.counts[f"said {what[:50]}"] += 1

    def _control(self, what: str, value: object) -> None:
        request = Request(f"{self.endpoint}/_control/{what}", data=json.dumps(value).encode(), method="POST")
        with urlopen(request, timeout=60) as answer:
            answer.read()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument(
        "--seed", type=int, default=0, help="of what is killed and when; processes keep no step with it"
    )
    parser.add_argument("--only-use", action="store_true", help="without the sweep and the simulation")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="ckptstore-soak-") as where:
        soak = Soak(Path(where), given.seconds, random.Random(given.seed))
        wrong = soak.run()
        print(soak.table(), flush=True)
    for text in wrong:
        print(f"WRONG {text}", flush=True)
    failed = bool(wrong)
    if not given.only_use:
        failed |= bool(subprocess.run([sys.executable, str(SWEEP)], check=False).returncode)
        options = ["--seconds", str(int(given.seconds)), "--seed", str(given.seed)]
        command = [sys.executable, "-m", "kit.simulation", *options]
        failed |= bool(subprocess.run(command, cwd=HERE.parent, check=False).returncode)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
