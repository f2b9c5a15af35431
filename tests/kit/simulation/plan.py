"""Draw the events of one run from its seed, before it begins: jobs, their actions, and their troubles.

Plain data, so that it can be printed, read back, and shrunk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from ckptstore.retention import KeepAll, KeepBest, KeepEvery, KeepLatest, KeepSince, Policy

POLICIES: Mapping[str, Policy] = {
    "all": KeepAll(),
    "latest 1": KeepLatest(1),
    "latest 2": KeepLatest(2),
    "latest 2 or best": KeepLatest(2) | KeepBest(1, "loss"),
    "every 20 or latest": KeepEvery(steps=20) | KeepLatest(1),
    "since": KeepSince(5_000.0),
}
KEPT_SINCE_SECONDS = 5_000.0


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a process. All ranks of a job do the same actions in the same order."""

    kind: str
    step: int = 0
    after_seconds: float = 0.0
    """The time for which the process is busy with something else before."""
    size_bytes: int = 100
    option: str = ""


@dataclass(frozen=True, slots=True)
class Actor:
    """A job of several ranks, or a process on its own."""

    name: str
    actions: tuple[Action, ...]
    ranks: int = 1
    """0 for a process that is not a job."""
    begins: str = "at once"
    """"at once", "when saved": when there is a checkpoint, or "after NAME": when that one has ended or hangs."""
    after_seconds: float = 0.0
    goes_on: bool = True
    """True if it does its next action when one has failed."""
    clock_ahead_seconds: float = 0.0
    nodes: tuple[str, ...] = ()
    """By rank its node, for jobs with a fast tier."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault of the run."""

    kind: str
    """"kill", "stop", "outage", "damage", "power"; "vanish": files with the prefixes of `what` are lost, or the
    "newest" record, or everything that an "older" copy lacks; "away": no request of anybody is answered; on disks of
    nodes "node kill", "node lost", "node full", "node damage", "node deaf", which nobody reaches, or "node mute", which
    reaches nobody, counted by the requests to those.
    """
    who: str = ""
    at_call: int = 0
    """The request of that process at which it happens."""
    seconds: float = 0.0
    what: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """All of one run."""

    seed: int
    storage: str = "objects"
    board: str = "storage"
    """"storage", "torch", or "ray": through the storage, with a token broadcast by Ray's workers."""
    keeper: str = "ckptstore"
    """"ckptstore" or "ray", which has a directory for each checkpoint and no log."""
    contents: str = "directory"
    """The contents of jobs' saves: "directory", "state", or "mixed"."""
    policy: str = "all"
    grace_seconds: float = 3600.0
    rank_timeout_seconds: float = 60.0
    retry_attempts: int = 4
    error_rate: float = 0.0
    late_rate: float = 0.0
    slow_rate: float = 0.0
    lie_rate: float = 0.0
    """Probability that a process begins to read other bytes of checkpoint files, until it takes another way."""
    slow_who: str = ""
    """The beginning of the names of processes that wait long for answers."""
    actors: tuple[Actor, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    fast_copies: int = 0
    """Copies of each file on disks of nodes; 0 for jobs without a fast tier."""
    without: tuple[str, ...] = ()
    """Requests without a fault although the seed says so."""

    def chance(self, *where: object) -> float:
        """Return a number from 0 to 1 that follows from the seed and a place, independent of all other events."""
        text = f"{self.seed}/{'/'.join(map(str, where))}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest()) / (1 << 48)

    def to_json(self) -> str:
        """Return the plan as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan from text."""
        value = json.loads(text)
        actors = tuple(
            Actor(
                **{
                    **actor,
                    "actions": tuple(Action(**action) for action in actor["actions"]),
                    "nodes": tuple(actor["nodes"]),
                }
            )
            for actor in value.pop("actors")
        )
        troubles = tuple(Trouble(**trouble) for trouble in value.pop("troubles"))
        return Plan(**{**value, "without": tuple(value.pop("without"))}, actors=actors, troubles=troubles)


RAY_KEEPS_RATE = 0.125
CUT_OFF_RATE = 0.15
LYING_RATE = 0.25
VANISH_RATE = 0.03
COMMANDS_RATE = 0.08
FOLLOWING_RATE = 0.05
THEMES = ("any",) * 10 + ("copying", "copying", "reading", "reading", "idle", "damage", "flaky")
"""The subjects of a run's other processes and troubles. Rare ones would coincide by chance too seldom."""


def draw(seed: int, *, num_jobs: int | None = None, **fixed: Any) -> Plan:
    """Draw the plan of a seed; `fixed` overrides fields, and `num_jobs` the number of jobs."""
    if not fixed and num_jobs is None:
        if Plan(seed).chance("vanish") < VANISH_RATE:
            return draw_vanishing(seed)
        if Plan(seed).chance("commands") < COMMANDS_RATE:
            return draw_commands(seed)
        if Plan(seed).chance("following") < FOLLOWING_RATE:
            return draw_following(seed)
    rng = Random(f"plan {seed}")
    storage = rng.choice(["objects", "objects", "disk", "disk", "plain objects"])
    calm = rng.random()
    plan = Plan(
        seed=seed,
        storage=storage,
        board=rng.choice(["storage"] * 5 + ["torch"]),
        contents=rng.choice(["directory"] * 6 + ["state", "mixed"]),
        policy=rng.choice([*POLICIES]),
        grace_seconds=rng.choice([0.0, 0.0, 60.0, 3600.0]),
        rank_timeout_seconds=rng.choice([6.0, 12.0, 24.0]),
        retry_attempts=rng.choice([2, 4, 25]),
        error_rate=0.0 if calm < 0.35 else rng.choice([0.002, 0.01, 0.05]),
        late_rate=rng.choice([0.0, 0.3]) if storage == "objects" else 0.0,
        slow_rate=rng.choice([0.0, 0.0, 0.02]),
    )
    theme = rng.choice(THEMES)
    plan = _themed(rng, replace(plan, **fixed), theme)
    jobs = _jobs(rng, plan, theme, num_jobs or rng.choice([1, 1, 2, 3]))
    others = _others(rng, plan) if theme == "any" else _others_for(rng, plan, theme)
    others = [_restoring(plan, actor) for actor in others]
    troubles = [] if calm < 0.2 or theme in ("copying", "idle") else _troubles(rng, plan, jobs)
    if theme == "damage":
        troubles += [_damage(rng, jobs) for _ in range(2)]
    if theme == "flaky":
        what = f"flaky {rng.choice(['log/', 'log/', 'checkpoints/', ''])}"
        at_call = rng.randrange(20, 60)
        troubles = [Trouble("outage", f"{jobs[0].name}.0", at_call=at_call, seconds=600.0, what=what)]
    if theme == "any" and plan.chance("cut off") < CUT_OFF_RATE:
        troubles += _cut_off(plan, jobs)
    plan = replace(plan, actors=(*jobs, *others), troubles=tuple(troubles))
    if "lie_rate" not in fixed and plan.storage != "disk" and plan.chance("lies") < LYING_RATE:
        plan = replace(plan, lie_rate=0.05)
    if "board" not in fixed and plan.board == "storage" and plan.chance("board") < 0.2:
        plan = replace(plan, board="ray")
    if "keeper" not in fixed and plan.chance("keeper") < RAY_KEEPS_RATE:
        plan = replace(plan, keeper="ray")
    return _kept_by_ray(plan) if plan.keeper == "ray" else plan


def draw_vanishing(seed: int) -> Plan:
    """Draw a job that loses its store, or a part of it: the saves that begin later fail."""
    rng = Random(f"vanishing {seed}")
    storage = rng.choice(["objects", "disk"])
    saves = tuple(Action("directory", step=10 * number, after_seconds=2.0 * rng.random()) for number in range(1, 9))
    what = rng.choice(["log/ checkpoints/ store.json latest.json", "log/", "checkpoints/", "newest", "older"])
    job = Actor("job1", saves, ranks=rng.choice([1, 2, 3]))
    trouble = Trouble("vanish", "job1.0", at_call=rng.randrange(10, 150), what=what)
    board = rng.choice(["storage", "torch"])
    return Plan(seed, storage=storage, board=board, rank_timeout_seconds=12.0, actors=(job,), troubles=(trouble,))


def draw_commands(seed: int) -> Plan:
    """Jobs that save at short intervals, while people at the command line change what is kept."""
    rng = Random(f"commands {seed}")
    jobs = []
    for index in range(2):
        steps = [rng.choice([10 * number, 10 * number, 10]) for number in range(1, 7)]
        saves = tuple(Action("directory", step=step, after_seconds=0.5 * rng.random()) for step in steps)
        begins = "at once" if index == 0 else rng.choice(["when saved", "after job1"])
        jobs.append(Actor(f"job{index + 1}", saves, ranks=rng.choice([1, 1, 2]), begins=begins))
    admins = []
    for index in range(2):
        kinds = [rng.choice(_CHANGES) for _ in range(15)]
        commands = tuple(Action(kind, after_seconds=0.5 * rng.random()) for kind in kinds)
        admins.append(Actor(f"admin{index + 1}", commands, ranks=0, begins="when saved"))
    return Plan(
        seed,
        storage=rng.choice(["objects", "disk"]),
        policy=rng.choice(["all", "latest 1", "latest 2"]),
        grace_seconds=rng.choice([0.0, 60.0]),
        rank_timeout_seconds=12.0,
        error_rate=rng.choice([0.0, 0.01, 0.05]),
        late_rate=rng.choice([0.0, 0.3]),
        actors=(*jobs, *admins),
    )


def draw_thinning(seed: int) -> Plan:
    """Jobs that save states, while people thin and restore them, some of whom are killed."""
    plan, rng = draw_commands(seed), Random(f"thinning {seed}")

    def changed(action: Action) -> Action:
        if action.kind == "directory":
            return replace(action, kind="state", after_seconds=2.0 * action.after_seconds)
        return replace(action, kind="thin") if rng.random() < 0.6 else action

    actors = tuple(replace(actor, actions=tuple(map(changed, actor.actions))) for actor in plan.actors)
    kills = [Trouble("kill", who="admin1", at_call=rng.randrange(1, 200))] if rng.random() < 0.5 else []
    policy = rng.choice(["all", "latest 2"])
    return replace(plan, storage="disk", contents="state", policy=policy, actors=actors, troubles=tuple(kills))


def draw_following(seed: int) -> Plan:
    """Jobs that save while people change what is kept, and followers with one cursor, each of which begins when the one
    before has died or was done."""
    rng = Random(f"following {seed}")
    plan = (draw_commands if rng.random() < 0.7 else draw_thinning)(seed)
    followers = []
    for index in range(4):
        starts = tuple(
            Action("follow", step=rng.choice([0, 1, 2, 3]), after_seconds=rng.random(), option="evaluation")
            for _ in range(rng.choice([1, 2, 3]))
        )
        begins = f"after follower{index}" if index else rng.choice(["at once", "when saved"])
        followers.append(Actor(f"follower{index + 1}", starts, ranks=0, begins=begins))
    kills = [Trouble("kill", one.name, at_call=rng.randrange(1, 80)) for one in followers[:3] if rng.random() < 0.7]
    late = Action("prune", after_seconds=1200.0)
    actors = [replace(one, actions=(*one.actions, late)) if one.name == "admin2" else one for one in plan.actors]
    troubles = (*plan.troubles, *kills)
    return replace(plan, late_rate=0.0, actors=(*actors, *followers), troubles=troubles)


def _cut_off(plan: Plan, jobs: list[Actor]) -> list[Trouble]:
    """Draw a rank, not the leader, that gets no replies for a while, though its messages may arrive."""
    job = next((job for job in jobs if job.ranks > 1), None)
    if job is None:
        return []
    rank = 1 + int(plan.chance("cut off", "rank") * (job.ranks - 1))
    at_call = 4 + int(plan.chance("cut off", "call") * 40)
    what = "answers group/" if plan.chance("cut off", "what") < 0.6 else "lost group/"
    return [Trouble("outage", f"{job.name}.{rank}", at_call=at_call, seconds=200.0, what=what)]


def _kept_by_ray(plan: Plan) -> Plan:
    """Return the same jobs alone, with a report to Ray for each save.

    Half of the jobs name their directories, as uploads are named: one name for all, or one for each two, which other
    jobs have too. No log refuses late ones.
    """
    jobs = []
    has_one_name = plan.chance("one name") < 0.5
    for actor in plan.actors:
        if actor.ranks:
            is_named = plan.chance("named", actor.name) < 0.5
            saves = [action for action in actor.actions if action.kind in ("directory", "state", "async")]
            reports = [
                replace(
                    action,
                    kind="report",
                    after_seconds=min(action.after_seconds, 100.0),
                    option=("latest" if has_one_name else f"{number // 2}") if is_named else "",
                )
                for number, action in enumerate(saves)
            ]
            jobs.append(replace(actor, actions=(*reports, Action("close"))))
    troubles = [
        replace(trouble, what=trouble.what.replace("log/", "checkpoint_").replace("checkpoints/", "checkpoint_"))
        for trouble in plan.troubles
    ]
    return replace(plan, board="ray", actors=tuple(jobs), troubles=tuple(troubles))


def _themed(rng: Random, plan: Plan, theme: str) -> Plan:
    """Adapt the plan to a theme."""
    shared = plan.storage if plan.storage != "plain objects" else "objects"
    if theme == "copying":
        return replace(plan, storage=shared, policy="all", error_rate=min(plan.error_rate, 0.01))
    if theme == "reading":
        policy = rng.choice(["latest 1", "latest 2"])
        return replace(
            plan, storage=shared, policy=policy, grace_seconds=0.0, error_rate=0.0, slow_rate=0.3, slow_who=theme
        )
    if theme == "idle":
        return replace(plan, storage=shared, error_rate=0.0, slow_rate=0.0)
    if theme == "damage":
        return replace(plan, contents=rng.choice(["state", "state", "directory"]), policy="all")
    if theme == "flaky":
        storage = "objects" if plan.storage == "disk" else plan.storage  # nothing is retried on a disk
        return replace(plan, storage=storage, error_rate=0.0, slow_rate=0.0, retry_attempts=25)
    return plan


def _damage(rng: Random, jobs: list[Actor]) -> Trouble:
    job = rng.choice(jobs)
    who = f"{job.name}.{rng.randrange(job.ranks)}"
    return Trouble("damage", who, at_call=rng.randrange(40, 200), what=rng.choice(["gone", "gone", "flipped", "short"]))


def _jobs(rng: Random, plan: Plan, theme: str, num_jobs: int) -> list[Actor]:
    jobs = []
    step = 0
    for index in range(num_jobs):
        actions = [Action("resume", after_seconds=rng.random())] if index or rng.random() < 0.3 else []
        for _ in range(6 if theme == "reading" else rng.choice([1, 2, 3, 4])):
            step += rng.choice([10, 10, 10, 0])
            actions.append(_save(rng, plan, step, theme))
            if rng.random() < (0.5 if theme == "idle" else 0.1):
                actions.append(Action("idle", after_seconds=rng.choice([100.0, 4000.0, 8000.0])))
            if rng.random() < 0.1:
                actions.append(Action("load", after_seconds=rng.random()))
        if rng.random() < 0.9:
            actions.append(Action("close"))
            if rng.random() < 0.1:
                actions.append(_save(rng, plan, step + 5, theme))
        is_concurrent = plan.storage != "plain objects" and rng.random() < 0.4
        jobs.append(
            Actor(
                name=f"job{index + 1}",
                actions=tuple(actions),
                ranks=rng.choice([1, 2, 2, 2, 3]),
                begins="at once" if index == 0 or is_concurrent else f"after job{index}",
                after_seconds=rng.choice([0.0, 1.0, 30.0]) if index else 0.0,
                goes_on=rng.random() < 0.8,
                clock_ahead_seconds=rng.choice([0.0, 0.0, 0.0, 0.0, -3e7, 3e7]),
            )
        )
    return jobs


def _save(rng: Random, plan: Plan, step: int, theme: str) -> Action:
    kinds = {"directory": ["directory"], "state": ["state", "async", "async"], "mixed": ["directory", "state", "async"]}
    kind = rng.choice(kinds[plan.contents])
    options = ["", "", "", "error"] if kind == "directory" else ["", "incremental", "reference", "skip"]
    return Action(
        kind,
        step=step,
        after_seconds=(1.0 if theme == "reading" else rng.choice([0.0, 0.1, 10.0, 1000.0])) * rng.random(),
        size_bytes=rng.choice([10, 100, 600]),
        option=rng.choice(options),
    )


_READS = ("latest", "directory on this node", "copy to a directory", "verify", "list")
_FOR_THEMES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "copying": (("cp",), ("gc of the copy",), ("cp", "gc of the copy")),
    "reading": (_READS[1:3], _READS[1:3], ("prune", "retain", "clean the cache")),
    "idle": (("gc",), ("gc --claim", "gc", "prune")),
    "damage": (_READS,),
    "flaky": (_READS,),
}
"""For each theme the processes on their own, and their choices of actions."""


def _others_for(rng: Random, plan: Plan, theme: str) -> list[Actor]:
    others = []
    for index, kinds in enumerate(_FOR_THEMES[theme]):
        longest = {"idle": 6000.0, "copying": 0.5, "reading": 0.5}.get(theme, 5.0)
        actions = [
            Action(rng.choice(kinds), after_seconds=longest * rng.random(), option=rng.choice(["", "long"]))
            for _ in range(rng.choice([2, 4, 6]))
        ]
        begins = {"copying": "after job1", "reading": "when saved"}.get(theme, "at once")
        others.append(Actor(f"{theme}{index + 1}", tuple(actions), ranks=0, begins=begins, after_seconds=rng.random()))
    return others


RESTORE_RATE = 0.25
HARM_RATE = 0.2
_HARMS = ("break a rule", "tear the hint")
REMOVE_RATE = 0.2
THIN_RATE = 0.25
_REMOVALS = ("remove", "remove", "remove", "remove all")
ANNOTATE_RATE = 0.15
_CHANGES = (
    "pin",
    "unpin",
    "annotate",
    "roll back",
    "restore",
    "restore",
    "prune",
    "retain",
    "break a rule",
    "tear the hint",
)
_COMMANDS = ("pin", "unpin", "roll back", "prune", "retain", "gc", "gc", "gc --claim", "cp", "cp", "gc of the copy")


def _others(rng: Random, plan: Plan) -> list[Actor]:
    others = []
    for index in range(rng.choice([0, 1, 1, 2])):
        actions = [
            Action(
                rng.choice(_READS),
                after_seconds=rng.choice([0.1, 3.0, 30.0]) * rng.random(),
                option=rng.choice(["", "long"]),
            )
            for _ in range(rng.choice([1, 2, 3]))
        ]
        others.append(Actor(f"reader{index + 1}", tuple(actions), ranks=0, after_seconds=5.0 * rng.random()))
    if plan.storage != "plain objects":
        for index in range(rng.choice([0, 1, 1, 2])):
            actions = [
                Action(rng.choice(_COMMANDS), after_seconds=rng.choice([0.1, 3.0, 30.0, 4000.0]) * rng.random())
                for _ in range(rng.choice([1, 2, 3]))
            ]
            others.append(Actor(f"admin{index + 1}", tuple(actions), ranks=0, after_seconds=5.0 * rng.random()))
    return others


def _restoring(plan: Plan, actor: Actor) -> Actor:
    """Replace some commands of a process by a restore, by harm, by a removal, by an annotation, or by thinning."""

    def changed(index: int, action: Action) -> Action:
        if action.kind in _COMMANDS and plan.chance("restore", actor.name, index) < RESTORE_RATE:
            return replace(action, kind="restore")
        if action.kind in _COMMANDS and (harm := plan.chance("harm", actor.name, index)) < HARM_RATE:
            return replace(action, kind=_HARMS[int(harm / HARM_RATE * len(_HARMS))])
        if action.kind in _COMMANDS and (removal := plan.chance("remove", actor.name, index)) < REMOVE_RATE:
            return replace(action, kind=_REMOVALS[int(removal / REMOVE_RATE * len(_REMOVALS))])
        if action.kind in _COMMANDS and plan.chance("annotate", actor.name, index) < ANNOTATE_RATE:
            return replace(action, kind="annotate")
        if action.kind in _COMMANDS and plan.chance("thin", actor.name, index) < THIN_RATE:
            return replace(action, kind="thin")
        return action

    return replace(actor, actions=tuple(changed(index, action) for index, action in enumerate(actor.actions)))


def _troubles(rng: Random, plan: Plan, jobs: list[Actor]) -> list[Trouble]:
    found = []
    ranks = [f"{job.name}.{rank}" for job in jobs for rank in range(job.ranks)]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        kinds = ["kill", "kill", "stop", "outage", "outage", "outage", "damage"]
        kind = rng.choice([*kinds, "power"] if plan.storage == "disk" else kinds)
        if plan.storage == "plain objects" and kind == "stop":
            kind = "kill"
        what = ""
        if kind == "outage":
            which = rng.choice(["lost", "answer", "answer", "answers", "denied", "full"])
            what = f"{which} {rng.choice(['', 'group/', 'group/', 'log/', 'checkpoints/'])}"
        if kind == "damage":
            what = rng.choice(["gone", "flipped", "short"])
        found.append(
            Trouble(
                kind,
                who=rng.choice(ranks),
                at_call=int(rng.choice([30, 100, 250]) * rng.random()) + 1,
                seconds=rng.choice([1.0, 30.0, 200.0, 3600.0]),
                what=what,
            )
        )
    return found
