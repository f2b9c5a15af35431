"""The options and the results of a benchmark: plain values, and the figures that follow from them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

VERSION = 1
GIB = 1 << 30
WORKLOADS = ("save", "load", "async", "directory", "node-cache", "tier", "ranks", "ls", "gpu")
OURS = "ckptstore"
S3_TEST = "s3-test"
S3_SINK = "s3-sink"
S3_SINK_TLS = "s3-sink-tls"
S3_SERVERS = (S3_TEST, S3_SINK, "s3-test-tls", S3_SINK_TLS)
"""The places that stand for a server of S3 in memory."""

_OF_THE_SLOWEST = ("blocked_seconds", "total_seconds", "peak_bytes")
"""The figures of a sample that are those of one rank; others are added up."""

Role = Literal["ckptstore", "peer", "limit"]
Status = Literal["measured", "skipped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The measurements that the caller requests; written into the report as they are, without secrets."""

    workloads: tuple[str, ...]
    to: str | None = None
    """A URI, one of `S3_SERVERS`, or None for a temporary directory."""
    size_bytes: int = 2 * GIB
    """Bytes of the whole state, over all ranks."""
    scale: float | None = None
    """A share of the preset's real size, in place of `size_bytes`."""
    ranks: int = 1
    shape: str = "llama-8b"
    tensor_bytes: int | None = None
    """Bytes of a tensor of the shape "tensors"; None is 16 MiB."""
    peers: tuple[str, ...] = ("all",)
    repeat: int = 5
    durable: bool = True
    drop_caches: bool = False
    pause_seconds: float = 0.0
    """Seconds without work before each timed turn, as between the saves of a training."""
    max_ranks: int = 16_384
    """The most ranks that are simulated."""
    latency_seconds: float | None = None
    """Latency of each request to the test server, or in a simulated commit; None is 0 for the first, 0.005 for the
    second, and 0.03 for the bucket of a fast tier.
    """
    bytes_per_second: float | None = None
    """Speed of the line to the test server, each way; None for no limit, and 200e6 for the bucket of a fast tier."""

    device: str | None = None
    """"cuda" or "cpu", for the workload "gpu"."""

    def wants(self, family: str) -> bool:
        """True if peers of that family take part."""
        return "all" in self.peers or family in self.peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One turn of one contender, over all ranks: the slowest rank's seconds, everybody's processor time."""

    blocked_seconds: float
    """Until the call returned and the state may change."""
    total_seconds: float
    """Until everything was stored or loaded."""
    cpu_seconds: float
    peak_bytes: int | None
    """The most memory of a rank in addition to its state; None if the system does not report it."""
    requests: int | None = None
    sent_bytes: int | None = None
    received_bytes: int | None = None
    retries: int | None = None

    @classmethod
    def over_ranks(cls, samples: Sequence[Sample]) -> Sample:
        """Combine the samples of all ranks."""
        found: dict[str, Any] = {}
        for name in (item.name for item in fields(cls)):
            known = [value for one in samples if (value := getattr(one, name)) is not None]
            joined = max if name in _OF_THE_SLOWEST else sum
            found[name] = joined(known) if known else None
        return cls(**found)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOutcome:
    """The result of one contender in one workload."""

    name: str
    family: str
    """Its name for `--peers`."""
    role: Role
    status: Status
    reason: str | None = None
    """The reason for skipping, or the failure."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    sweep: tuple[Mapping[str, Any], ...] = ()
    """Every tried setting, with its seconds or its failure."""
    samples: tuple[Sample, ...] = ()
    calls: Mapping[str, int] = field(default_factory=dict)
    """Calls of the storage by verb, over all ranks, in one more turn that was only watched; of ckptstore alone."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Other measurements of its turns, as medians of the first rank."""

    @classmethod
    def of(
        cls, name: str, samples: Iterable[Sample], *, role: Role = "ckptstore", family: str | None = None
    ) -> WorkloadOutcome:
        """Create the outcome of a contender that was measured outside of a contest."""
        return cls(name=name, family=family or role, role=role, status="measured", samples=tuple(samples))

    @classmethod
    def over_ranks(cls, outcomes: Sequence[WorkloadOutcome]) -> WorkloadOutcome:
        """Combine the outcomes of all ranks."""
        turns = zip(*(one.samples for one in outcomes), strict=True)
        return replace(outcomes[0], samples=tuple(Sample.over_ranks(turn) for turn in turns))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One workload with all its contenders. Ratios are those of `figure`."""

    name: str
    title: str
    size_bytes: int
    ranks: int
    figure: str = "total_seconds"
    facts: Mapping[str, Any] = field(default_factory=dict)
    timeline: tuple[Mapping[str, Any], ...] = ()
    """The spans of each rank, in one save."""
    outcomes: tuple[WorkloadOutcome, ...]

    @property
    def moved_bytes(self) -> int:
        """The bytes for rates; 0 where the seconds are those of steps, which move none."""
        return 0 if "steps" in self.name else self.size_bytes

    def all_measured(self) -> list[WorkloadOutcome]:
        """Return the contenders that were measured."""
        return [one for one in self.outcomes if one.status == "measured"]

    def measured(self, name: str) -> WorkloadOutcome | None:
        """Return the contender of that name, if it was measured."""
        return next((one for one in self.all_measured() if one.name == name), None)

    def figures(self, outcome: WorkloadOutcome) -> list[float]:
        """Return the samples that ratios are made of."""
        return [float(getattr(sample, self.figure)) for sample in outcome.samples]

    def median(self, outcome: WorkloadOutcome) -> float:
        """Return the median of the samples that ratios are made of."""
        return statistics.median(self.figures(outcome))

    def ratio(self, outcome: WorkloadOutcome | None) -> float | None:
        """Return its median over ckptstore's: above 1, ckptstore is faster."""
        ours = self.measured(OURS)
        if ours is None or outcome is None or outcome.status != "measured":
            return None
        return self.median(outcome) / max(1e-9, self.median(ours))

    def best(self, role: Role) -> WorkloadOutcome | None:
        """Return the fastest measured contender of a role."""
        return min((one for one in self.all_measured() if one.role == role), key=self.median, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return it as in the schema, with the figures that follow from the samples."""
        outcomes = [
            {**asdict(one), "summary": summary(one, self.moved_bytes), "ratio": rounded(self.ratio(one))}
            for one in self.outcomes
        ]
        return {**vars(self), "timeline": [*self.timeline], "outcomes": outcomes}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Workload:
        """Create it from the result of `to_json`."""
        outcomes = []
        for one in value["outcomes"]:
            plain = {name: item for name, item in one.items() if name not in ("summary", "ratio")}
            samples = tuple(Sample(**sample) for sample in one["samples"])
            outcomes.append(WorkloadOutcome(**{**plain, "samples": samples, "sweep": tuple(one["sweep"])}))
        plain = {item.name: value[item.name] for item in fields(cls)}
        return cls(**{**plain, "timeline": tuple(value["timeline"]), "outcomes": tuple(outcomes)})


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run."""

    created_at: float
    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    asked: Mapping[str, Any]
    workloads: tuple[Workload, ...]
    scaling: Mapping[str, Any] = field(default_factory=dict)
    """Curves and laws of growth, of the workload "ranks"."""

    def to_json(self) -> dict[str, Any]:
        """Return it as in the schema."""
        plain = {**vars(self), "workloads": [workload.to_json() for workload in self.workloads]}
        return {"version": VERSION, "kind": "ckptstore-bench", **plain}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Report:
        """Create it from the result of `to_json`."""
        plain = {item.name: value[item.name] for item in fields(cls)}
        return cls(**{**plain, "workloads": tuple(Workload.from_json(one) for one in value["workloads"])})


def summary(outcome: WorkloadOutcome, size_bytes: int) -> dict[str, Any] | None:
    """Return median, minimum and maximum of the samples, and the rates that follow; None without samples."""
    if not outcome.samples:
        return None
    names = ("blocked_seconds", "total_seconds", "cpu_seconds", "peak_bytes", "requests", "retries")
    found: dict[str, Any] = dict.fromkeys(names)
    for name in names:
        if values := [value for sample in outcome.samples if (value := getattr(sample, name)) is not None]:
            found[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    seconds, cpu = found["total_seconds"]["median"], found["cpu_seconds"]["median"]
    found["gigabytes_per_second"] = rounded(size_bytes / 1e9 / max(1e-9, seconds)) if size_bytes else None
    found["cpu_seconds_per_gib"] = rounded(cpu / (size_bytes / GIB)) if size_bytes else None
    return found


def rounded(value: float | None, digits: int = 4) -> float | None:
    """Round to so many significant digits; None stays None."""
    return None if value is None else float(f"{value:.{digits}g}")
