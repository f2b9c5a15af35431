"""Retention: which checkpoints stay live, and why. Pure.

A policy looks at the whole list and says for every checkpoint whether it is kept and why; what `|` joins keeps what any
of the two keeps, and `&` puts a budget on it. What a policy drops goes to the trash in the same log record as the
commit that made it superfluous. The latest checkpoint, pinned ones and the resume source are kept whatever the policy
says. Times are those that the storage gave to the records, never those of a rank's clock.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal, NamedTuple

from ckptstore.errors import InvalidInput, InvalidMetric
from ckptstore.runtime.shown import read_duration, read_size

Mode = Literal["min", "max"]
Missing = Literal["error", "worst"]
"""The treatment of a save without a metric that retention needs."""

_WORDS: dict[Mode, frozenset[str]] = {
    "min": frozenset({"loss", "error", "err", "perplexity", "ppl", "nll", "mse", "rmse", "mae", "wer", "cer"}),
    "max": frozenset({"accuracy", "acc", "f1", "auc", "auroc", "bleu", "iou", "precision", "recall", "psnr", "reward"}),
}
"""Words in the names of metrics that tell which way is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The facts of one checkpoint that a policy may look at."""

    number: int
    """The record number: a higher one was committed later."""
    step: int
    committed_at: float
    """Seconds since the epoch by the clock of the storage. Not a number for a policy that compares no times."""
    metrics: Mapping[str, float]
    holds: Mapping[int, int] = field(default_factory=dict)
    """The bytes that stay in the store as long as it does, by the number of the checkpoint that has the files: its own,
    and those of each one to whose files it refers."""
    whole: int | None = None
    """The number of the checkpoint of which it is the thinned one, and whose place in the order of commits it has."""
    dropped: tuple[str, ...] = ()
    """The patterns of the keys that it lacks."""
    left_share: float | None = None
    """The share of its bytes that thinning has left; None if it is whole."""
    can_thin: bool = False
    """True if retention can drop keys from it, as far as this process knows."""

    @property
    def place(self) -> int:
        """The place in the order of commits."""
        return self.number if self.whole is None else self.whole


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on one checkpoint."""

    number: int
    step: int
    keep: bool
    reason: str
    drops: tuple[str, ...] = ()
    """The patterns of the keys that go, where it stays thinned."""


class Stay(NamedTuple):
    """The reason to keep a checkpoint, and the patterns of the keys that it need not have."""

    reason: str
    drops: tuple[str, ...] = ()


class Policy:
    """A rule that keeps some checkpoints. Subclasses define `kept`; a policy holds no state and reads no clock."""

    def kept(self, candidates: Sequence[Candidate]) -> Mapping[int, str]:
        """Return the numbers to keep, with the reason; `candidates` are in the order of their commits."""
        raise NotImplementedError

    def thinned(self, candidates: Sequence[Candidate]) -> Mapping[int, Stay]:
        """Return the numbers to keep without some keys, unless another rule keeps them whole."""
        return {}

    def thins(self) -> tuple[str, ...]:
        """Return the patterns of all keys that it may drop from checkpoints that it keeps."""
        return ()

    def split(
        self, candidates: Sequence[Candidate], protected: Mapping[int, str]
    ) -> tuple[Mapping[int, Stay], Mapping[int, str]]:
        """Return what is kept beside what is `protected`, and what goes only because of a budget, with reasons."""
        whole = {number: Stay(reason) for number, reason in self.kept(candidates).items()}
        return {**self.thinned(candidates), **whole}, {}

    def required_metrics(self) -> frozenset[str]:
        """Return the metrics that every checkpoint should have."""
        return frozenset()

    def compares_times(self) -> bool:
        """Return True if it looks at `committed_at`: that costs a request for every checkpoint, once per process."""
        return True

    def __or__(self, other: Policy) -> Policy:
        if KeepWithin in map(type, (self, other)):
            raise InvalidInput(
                "KeepWithin limits what other rules keep, and | would add what it keeps to that",
                hint='Write (KeepLatest(3) | KeepEvery(steps=1000)) & KeepWithin("2TB")',
            )
        return KeepAny((*_members(self), *_members(other)))

    def __and__(self, other: Policy) -> KeepWithin:
        if not isinstance(other, KeepWithin) or not isinstance(other.policy, KeepAll):
            raise InvalidInput(f"& puts a budget on a policy, and {other!r} is none", hint="Join policies with |")
        return KeepWithin(other.budget, self)


@dataclass(frozen=True, slots=True)
class KeepAny(Policy):
    """Keep what any of several policies keeps. `|` makes it."""

    members: tuple[Policy, ...]

    def kept(self, candidates: Sequence[Candidate]) -> Mapping[int, str]:
        reasons: dict[int, list[str]] = {}
        for member in self.members:
            for number, reason in member.kept(candidates).items():
                reasons.setdefault(number, []).append(reason)
        return {number: "; ".join(found) for number, found in reasons.items()}

    def thinned(self, candidates: Sequence[Candidate]) -> Mapping[int, Stay]:
        found: dict[int, Stay] = {}
        for member in self.members:
            for number, (reason, drops) in member.thinned(candidates).items():
                before = found.get(number, Stay("", drops))
                both = tuple(pattern for pattern in before.drops if pattern in drops)
                found[number] = Stay("; ".join(filter(None, (before.reason, reason))), both)
        return found

    def thins(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(pattern for member in self.members for pattern in member.thins()))

    def required_metrics(self) -> frozenset[str]:
        return frozenset().union(*(member.required_metrics() for member in self.members))

    def compares_times(self) -> bool:
        return any(member.compares_times() for member in self.members)


def _members(policy: Policy) -> tuple[Policy, ...]:
    return policy.members if isinstance(policy, KeepAny) else (policy,)


@dataclass(frozen=True, slots=True)
class KeepAll(Policy):
    """Keep everything."""

    def kept(self, candidates: Sequence[Candidate]) -> Mapping[int, str]:
        return {candidate.number: "all are kept" for candidate in candidates}

    def compares_times(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class KeepLatest(Policy):
    """Keep the `n` that were committed last; the latest counts as one of them."""

    n: int

    def __post_init__(self) -> None:
        _check_count("KeepLatest", self.n)

    def kept(self, candidates: Sequence[Candidate]) -> Mapping[int, str]:
        return {candidate.number: f"one of the latest {self.n}" for candidate in candidates[-self.n :]}

    def compares_times(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class KeepBest(Policy):
    """Keep the `n` with the best value of `metric`; of equal ones the later is better.

    A NaN, an infinity and a missing metric are never among the best. `mode` may be left out where the name of the
    metric tells it, such as "eval_loss" or "accuracy".
    """

    n: int
    metric: str
    mode: Mode | None = None

    def __post_init__(self) -> None:
        _check_count("KeepBest", self.n)
        object.__setattr__(self, "mode", mode_of(self.metric, self.mode))

    def kept(self, candidates: Sequence[Candidate]) -> Mapping[int, str]:
        best = ranked(candidates, self.metric, self.mode)[: self.n]
        return {candidate.number: f"one of the best {self.n} by {self.metric} ({self.mode})" for candidate in best}

    def required_metrics(self) -> frozenset[str]:
        return frozenset({self.metric})

    def compares_times(self) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepEvery(Policy):
    """Keep the first checkpoint of every interval of `steps` steps, or of `seconds` seconds.

    With saves at multiples of `steps` these are exactly the multiples. Intervals start at step 0, or at the epoch, so
    what is kept once stays kept.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise InvalidInput("KeepEvery takes either steps or seconds")
        _check_positive("KeepEvery", "interval", self.steps if self.steps is not None else self.seconds)

    def kept(self, candidates: Sequence[Candidate]) -> Mapping[int, str]:
        first: dict[int, int] = {}
        for candidate in candidates:
            if self.steps is not None:
                interval = candidate.step // self.steps
            else:
                interval = int(candidate.committed_at // (self.seconds or 1))
            first.setdefault(interval, candidate.number)
        every = f"{self.steps} steps" if self.steps is not None else f"{self.seconds} seconds"
        return dict.fromkeys(first.values(), f"the first of its {every}")

    def compares_times(self) -> bool:
        return self.seconds is not None


@dataclass(frozen=True, slots=True)
class KeepSince(Policy):
    """Keep those that are at most `seconds` older than the newest one, so that a stopped job loses none."""

    seconds: float

    def __post_init__(self) -> None:
        _check_positive("KeepSince", "seconds", self.seconds)

    def kept(self, candidates: Sequence[Candidate]) -> Mapping[int, str]:
        if not candidates:
            return {}
        start = max(candidate.committed_at for candidate in candidates) - self.seconds
        recent = (candidate.number for candidate in candidates if candidate.committed_at >= start)
        return dict.fromkeys(recent, f"not older than {self.seconds} seconds")


@dataclass(frozen=True, slots=True)
class KeepWithin(Policy):
    """Keep the newest of what another policy keeps, as long as all that stays takes at most `budget`, such as "2TB".

    The latest, pinned ones and the resume source stay in any case, and are counted first. Then come the others that
    the policy keeps, the newest first; the first that does not fit goes, and so do all older ones. Files to which
    several checkpoints refer are counted once. The trash is not counted, nor are fast checkpoints. What `KeepWeights`
    is about to thin counts with the share that the last thinned one has left, and with nothing before there is one.

    `policy & KeepWithin("2TB")` sets the policy; without one, all are kept that fit.
    """

    budget: str | int
    """Bytes, or a text with a unit: "500GB", "1.5TiB"."""
    policy: Policy = field(default_factory=KeepAll)

    def __post_init__(self) -> None:
        _check_positive("KeepWithin", "budget", self.budget_bytes)

    @property
    def budget_bytes(self) -> float:
        """The budget in bytes."""
        return read_size(self.budget) if isinstance(self.budget, str) else self.budget

    def kept(self, candidates: Sequence[Candidate]) -> Mapping[int, str]:
        return {number: reason for number, (reason, drops) in self.split(candidates, {})[0].items() if not drops}

    def thinned(self, candidates: Sequence[Candidate]) -> Mapping[int, Stay]:
        return {number: found for number, found in self.split(candidates, {})[0].items() if found.drops}

    def thins(self) -> tuple[str, ...]:
        return self.policy.thins()

    def split(
        self, candidates: Sequence[Candidate], protected: Mapping[int, str]
    ) -> tuple[Mapping[int, Stay], Mapping[int, str]]:
        wanted, over = self.policy.split(candidates, protected)
        counted: dict[int, int] = {}
        for item in candidates:
            if item.number in protected:
                counted.update(item.holds)
        stays: dict[int, Stay] = {}
        share = next((item.left_share for item in reversed(candidates) if item.left_share is not None), 0.0)
        left = [item for item in reversed(candidates) if item.number in wanted and item.number not in protected]
        total_bytes, budget_bytes = sum(counted.values()), self.budget_bytes
        for place, item in enumerate(left):
            is_due = item.can_thin and not set(wanted[item.number].drops) <= set(item.dropped)
            holds = {item.number: int(share * item.holds.get(item.number, 0))} if is_due else item.holds
            total_bytes += sum(size_bytes - counted.get(holder, 0) for holder, size_bytes in holds.items())
            if total_bytes > budget_bytes:
                over = {
                    **over,
                    **dict.fromkeys([it.number for it in left[place:]], f"over the budget of {self.budget}"),
                }
                break
            counted.update(holds)
            stays[item.number] = wanted[item.number]
        return stays, over

    def required_metrics(self) -> frozenset[str]:
        return self.policy.required_metrics()

    def compares_times(self) -> bool:
        return self.policy.compares_times()


@dataclass(frozen=True, slots=True)
class KeepWeights(Policy):
    """Keep what another rule keeps, but without the optimizer, unless a further rule keeps it whole.

    `drop` is a pattern of keys, or several. What fits goes in the background, once the checkpoint is no longer the
    latest, nor pinned, nor what the job resumed from. Saves keep it in files of its own, so that these can be deleted.
    """

    rule: Policy
    drop: str | tuple[str, ...] = "optimizer*"

    def __post_init__(self) -> None:
        rule: Any = self.rule
        if not isinstance(rule, Policy) or rule.thins():
            raise InvalidInput(f"KeepWeights takes a rule that keeps checkpoints whole, not {self.rule!r}")
        if isinstance(self.rule, KeepWithin):
            raise InvalidInput(
                "KeepWeights takes a rule without a budget, which is for all that stays",
                hint='Write (KeepLatest(3) | KeepWeights(KeepEvery(steps=1000))) & KeepWithin("2TB")',
            )
        drop: Any = (self.drop,) if isinstance(self.drop, str) else self.drop
        if not isinstance(drop, Sequence) or not drop or not all(isinstance(one, str) and one for one in drop):
            raise InvalidInput(f"KeepWeights has drop={self.drop!r}, it must be one or several patterns of keys")
        object.__setattr__(self, "drop", tuple(drop))

    def kept(self, candidates: Sequence[Candidate]) -> Mapping[int, str]:
        return {}

    def thinned(self, candidates: Sequence[Candidate]) -> Mapping[int, Stay]:
        drops = self.thins()
        return {number: Stay(reason, drops) for number, reason in self.rule.kept(candidates).items()}

    def thins(self) -> tuple[str, ...]:
        return self.drop if isinstance(self.drop, tuple) else (self.drop,)

    def required_metrics(self) -> frozenset[str]:
        return self.rule.required_metrics()

    def compares_times(self) -> bool:
        return self.rule.compares_times()


def _words_of(metric: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", str(metric).lower()))


def mode_of(metric: str, mode: Mode | None) -> Mode:
    """Return the way in which a metric is better: `mode`, else as its name tells. Raises InvalidInput when its words
    tell nothing, or both."""
    if mode in ("min", "max"):
        return mode
    if mode is not None:
        raise InvalidInput(f"The mode for {metric!r} is {mode!r}, it is 'min' or 'max'")
    words = _words_of(metric)
    modes: list[Mode] = [way for way, known in _WORDS.items() if words & known]
    if len(modes) != 1:
        raise InvalidInput(
            f"The name of the metric {metric!r} does not tell whether less or more is better",
            hint='Say mode="min" or mode="max"',
        )
    return modes[0]


_HELD_OUT = frozenset({"eval", "val", "valid", "validation", "test"})


def judging_first(names: Iterable[str]) -> list[str]:
    """Return the names of metrics, first those by which a checkpoint is most likely judged: losses and the like, then
    what grows; of either those of data that is not trained on come first."""

    def place(name: str) -> tuple[bool, bool, bool]:
        words = _words_of(name)
        return not words & _WORDS["min"], not words & _WORDS["max"], not words & _HELD_OUT

    return sorted(names, key=place)


def check_metric_exists(candidates: Sequence[Candidate], metric: str) -> None:
    """Raise InvalidMetric, with those that exist, when none of some checkpoints has the metric."""
    names = {name for item in candidates for name in item.metrics}
    if candidates and metric not in names:
        from ckptstore.runtime.near import meant, nearest, shown

        raise InvalidMetric(
            f"No live checkpoint has the metric {metric!r}{meant(nearest(metric, names))} They have {shown(names)}"
        )


def ranked(candidates: Sequence[Candidate], metric: str, mode: Mode | None) -> list[Candidate]:
    """Return the candidates with a finite value of the metric, best first, later ones first among equals."""
    sign = 1.0 if mode_of(metric, mode) == "min" else -1.0
    finite = [item for item in candidates if _is_finite(item.metrics.get(metric, math.nan))]
    return sorted(finite, key=lambda item: (sign * item.metrics[metric], -item.place))


def _is_finite(value: float) -> bool:
    """Return True for a finite number. An integer beyond all floats, from a JSON file of other software, is an
    infinity."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def decide(policy: Policy, candidates: Sequence[Candidate], *, protected: Mapping[int, str]) -> list[Verdict]:
    """Return the verdict on every candidate, in the order of their commits.

    `protected` gives the numbers that stay whatever the policy says, with the reason.
    """
    ordered = sorted(candidates, key=lambda item: item.place)
    wanted, over = policy.split(ordered, protected)
    kept = {**wanted, **{number: Stay(reason) for number, reason in protected.items() if reason}}
    return [
        Verdict(item.number, item.step, True, *kept[item.number])
        if item.number in kept
        else Verdict(item.number, item.step, False, over.get(item.number, "no rule keeps it"))
        for item in ordered
    ]


def as_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as floats. Python, numpy and torch scalars are taken; raises InvalidMetric for anything else."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise InvalidMetric(f"metrics is a {type(metrics).__name__}, not a mapping of names to numbers")
    return {name: _as_float(name, value) for name, value in (metrics or {}).items()}


def _as_float(name: object, value: Any) -> float:
    if not isinstance(name, str) or not name:
        raise InvalidMetric(f"the metric name {name!r} is not text")
    item = getattr(value, "item", None)
    if callable(item) and not isinstance(value, numbers.Real):
        try:
            value = item()
        except (ValueError, RuntimeError, TypeError) as error:
            raise InvalidMetric(f"the metric {name!r} is not a single number: {error}") from None
    if not isinstance(value, numbers.Real):
        raise InvalidMetric(f"the metric {name!r} is {value!r}, not a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise InvalidMetric(f"the metric {name!r} is too large for a float: {error}") from None
    if isinstance(value, numbers.Integral) and int(value) != number:
        raise InvalidMetric(
            f"the metric {name!r} is {int(value)}, which no float has: it would be stored as {number:.0f}",
            hint="Give float(...) of it if that will do, or text in metadata",
        )
    return number


def check_required(policy: Policy, metrics: Mapping[str, float], *, missing: Missing) -> None:
    """Raise InvalidMetric when the policy ranks by a metric that is missing; missing="worst" allows it."""
    absent = sorted(policy.required_metrics() - metrics.keys())
    if absent and missing == "error":
        raise InvalidMetric(
            f"the metrics lack {', '.join(map(repr, absent))}, which retention ranks by",
            hint='Give it with every save, or open the store with missing="worst"',
        )


_BETWEEN_RULES = re.compile(r"[,\s]+(?=(?:weights:)?\w+=)")
"""Other commas and spaces belong to the name of a metric."""
RULES = "latest=3 best=2:eval_loss:min every=1000 since=2d weights:every=100 within=2TB"
"""One rule of each kind, as every message and help text spells them."""


def parse_policy(rules: str | Sequence[str]) -> Policy | None:
    """Return the policy that keeps what any of the rules keeps, None without rules. Raises InvalidInput.

    Rules are one text, such as "latest=3 best=2:eval_loss:min every=1000 since=2d" (with spaces or commas between
    them), or several such texts. `every` counts steps; "best=2:eval_loss" is enough where the metric's name tells
    which way is better. "weights:every=1000" keeps what "every=1000" does without the optimizer: `KeepWeights`.
    "within=2TB" is a budget for what the other rules keep.
    """
    texts = ([rules] if rules.strip() else []) if isinstance(rules, str) else rules
    policies = [_parse_rule(rule) for text in texts for rule in _BETWEEN_RULES.split(text.strip())]
    budgets = [policy for policy in policies if isinstance(policy, KeepWithin)]
    others = [policy for policy in policies if not isinstance(policy, KeepWithin)]
    if len(budgets) > 1:
        raise InvalidInput("There are several budgets", hint="Give within=... once")
    joined = reduce(lambda joined, policy: joined | policy, others) if others else None
    if not budgets:
        return joined
    return budgets[0] if joined is None else joined & budgets[0]


def _parse_rule(text: str) -> Policy:
    if text.startswith("weights:"):
        return KeepWeights(_parse_rule(text.removeprefix("weights:")))
    rule, _, value = text.partition("=")
    if rule == "since" and value:
        return KeepSince(read_duration(value))
    if rule == "within" and value:
        return KeepWithin(value)
    count, _, metric = value.partition(":")
    if count.isdecimal():
        if rule == "latest" and not metric:
            return KeepLatest(int(count))
        if rule == "every" and not metric:
            return KeepEvery(steps=int(count))
        if rule == "best" and metric:
            name, _, mode = metric.rpartition(":")
            if name and mode in ("min", "max"):
                return KeepBest(int(count), name, "min" if mode == "min" else "max")
            try:
                return KeepBest(int(count), metric)
            except InvalidInput as error:
                raise InvalidInput(error.message, hint=f"Write {text}:min or {text}:max") from None
    raise InvalidInput(f"{text!r} is no rule of what to keep", hint=f"Rules are like {RULES}")


def _check_count(policy: str, n: object) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise InvalidInput(f"{policy} has n={n!r}, it must be an integer of at least 1")


def _check_positive(policy: str, name: str, value: float | None) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise InvalidInput(f"{policy} has {name}={value!r}, it must be a number above 0")
