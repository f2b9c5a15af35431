"""Histories of jobs that save on the disks of their nodes: crashes, lost nodes, zombies, a bucket that is away.

The log and all decisions are the real ones; nodes are dictionaries. A truth that is kept beside them, in plain sets,
says which saves were whole and which were left behind.
"""

from __future__ import annotations

import random
import uuid
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore.config import RetryConfig
from ckptstore.errors import StoreFenced
from ckptstore.fast.candidates import FastCandidate, Merged, NodeSighting, merge
from ckptstore.fast.certificate import Certificate, held_by
from ckptstore.fast.upkeep.sweep import SweepView, sweep
from ckptstore.format.changes import CheckpointEntry, Claim, Commit, Resumed
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Manifest, Receipt, sha256_of
from ckptstore.format.order import SaveOrder
from ckptstore.format.record import Record
from ckptstore.log import Log
from ckptstore.storage.memory import MemoryStorage
from ckptstore.upkeep.retain import roll_back

STORE_ID = "5f0c3a9e4b7d41d8a2c6e1f09b83d754"
NODES = ["a", "b", "c"]
RANKS = 2
KEEP = 2


class Away(Exception):
    """The bucket does not answer."""


class Killed(Exception):
    """The job is no more."""


@dataclass
class Directory:
    """Of one attempt on one node."""

    sizes: dict[str, int] = field(default_factory=dict)
    certificate: Certificate | None = None


@dataclass
class Truth:
    """What really became of a save."""

    order: SaveOrder
    is_certified: bool = False
    was_whole: bool = False
    """When the first certificate was written."""


@dataclass
class Cluster:
    """The nodes, the bucket and the jobs, dead or alive."""

    chance: random.Random
    log: Log = field(
        default_factory=lambda: Log(MemoryStorage(f"memory://{uuid.uuid4().hex}"), retry=RetryConfig(retry_attempts=1))
    )
    nodes: dict[str, dict[str, Directory]] = field(default_factory=lambda: {node: {} for node in NODES})
    truth: dict[str, Truth] = field(default_factory=dict)
    left: list[tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=list)
    """What was left behind: everything between two places of the order."""
    foreign: set[str] = field(default_factory=set)
    """Attempts of a copy of the store, which has its id."""
    jobs: list[SimulatedJob] = field(default_factory=list)
    is_away: bool = False
    seen: Counter[str] = field(default_factory=Counter)

    def ask(self) -> Log:
        """The log, where the bucket answers."""
        if self.is_away:
            raise Away
        return self.log

    def committed(self) -> list[Record]:
        newest = self.log.newest()
        return self.log.records([*newest.state.live, *newest.state.trash]) if newest else []

    def claims(self) -> dict[int, Record]:
        newest = self.log.newest()
        every = self.log.records(range(1, newest.number + 1)) if newest else []
        return {record.number: record for record in every}

    def merged(self, nodes: list[str]) -> Merged:
        """What a job finds on these nodes."""
        sightings, certificates = [], {}
        for node in nodes:
            for name, found in self.nodes[node].items():
                sha256 = found.certificate.sha256 if found.certificate else ""
                if found.certificate:
                    certificates[sha256] = found.certificate
                sightings.append(NodeSighting(node=node, attempt=name, sha256=sha256, sizes=dict(found.sizes)))
        newest = self.log.newest()
        assert newest is not None
        claims = self.claims()
        return merge(sightings, certificates, newest, self.committed(), claims, store_id=STORE_ID)

    def is_left(self, order: SaveOrder) -> bool:
        return any(low < order < high for low, high in self.left)

    def best_fast(self, nodes: list[str]) -> SaveOrder | None:
        """The newest save that is certified and whole on these nodes and was not left behind, by the truth alone."""
        trashed = {record.entry.attempt for record in self.committed()} - self.live()
        found = []
        for name, truth in self.truth.items():
            certified = any(name in self.nodes[node] and self.nodes[node][name].certificate for node in nodes)
            whole = all(
                any(name in self.nodes[node] and f"{rank}.pt" in self.nodes[node][name].sizes for node in nodes)
                for rank in range(RANKS)
            )
            if certified and whole and not self.is_left(truth.order) and name not in trashed:
                found.append(truth.order)
        return max(found, default=None)

    def live(self) -> set[str]:
        newest = self.log.newest()
        return {record.entry.attempt for record in self.log.records(newest.state.live)} if newest else set()


@dataclass
class SimulatedJob:
    """One start of a job, on two nodes. It may be fenced and not know it."""

    cluster: Cluster
    nodes: list[str]
    copies: int
    claim: Record
    epoch: int
    source: str = ""
    has_resumed: bool = False
    num_saves: int = 0
    is_busy: bool = False

    @staticmethod
    def start(cluster: Cluster) -> SimulatedJob:
        chance = cluster.chance
        claim = cluster.ask().append(lambda _: Claim("token", RANKS))
        assert claim is not None
        nodes = chance.sample(NODES, 2)
        job = SimulatedJob(cluster, nodes, chance.choice([1, 2]), claim, claim.state.epoch)
        cluster.jobs.append(job)
        return job

    def resume(self) -> None:
        """List, choose, and write down from what; others go on meanwhile."""
        cluster, best = self.cluster, self.cluster.best_fast(self.nodes)
        candidates = list(cluster.merged(self.nodes).candidates)
        self.check_newest(candidates, best)
        while candidates and cluster.chance.random() < 0.2:  # damage that a load finds
            candidates.pop(0)
        source = candidates[0] if candidates else None
        self.check_source(source)
        if cluster.chance.random() < 0.3:
            _act_of_another(cluster)
        change = Resumed(self.epoch, source.order if source else None, source.attempt if source else "")
        cluster.ask().append(lambda _: change)
        cluster.left.append((source.order if source else (0, 0), (self.epoch, 1)))
        self.source, self.has_resumed = source.attempt if source else "", True
        cluster.seen["resumed fast" if source and not source.is_durable else "resumed"] += 1

    def check_newest(self, candidates: list[FastCandidate], best: SaveOrder | None) -> None:
        """The newest that is whole here and was not left behind comes first, unless one in the store is newer."""
        found = candidates[0].order if candidates else None
        durable = max((candidate.order for candidate in candidates if candidate.is_durable), default=None)
        assert found == max((order for order in (best, durable) if order), default=None)

    def check_source(self, source: FastCandidate | None) -> None:
        if source is None or source.is_durable:
            return
        truth = self.cluster.truth[source.attempt]
        assert truth.is_certified
        assert truth.was_whole
        assert not self.cluster.is_left(truth.order), "what was left behind came back"
        assert source.holders.keys() == set(range(RANKS))
        for rank, nodes in source.holders.items():
            assert set(nodes) <= set(self.nodes)
            assert all(f"{rank}.pt" in self.cluster.nodes[node][source.attempt].sizes for node in nodes)

    def save(self) -> None:
        """Each rank stores its file on its node and, with two copies, on the other one; then the certificates."""
        cluster, chance = self.cluster, self.cluster.chance
        self.num_saves += 1
        attempt = Attempt(self.num_saves, self.epoch, f"{chance.randrange(16**8):08x}")
        name, order = str(attempt), SaveOrder(self.epoch, self.num_saves)
        cluster.truth[name] = truth = Truth(order)
        places = [(rank, self.nodes[(rank + copy) % 2]) for copy in range(self.copies) for rank in range(RANKS)]
        for rank, node in places:
            if chance.random() < 0.04:
                raise Killed
            cluster.nodes[node].setdefault(name, Directory()).sizes[f"{rank}.pt"] = rank + 1
        certificate = certificate_of(attempt, order, self.claim, places)
        if chance.random() < 0.3:
            _act_of_another(cluster)
        for node in chance.sample(self.nodes, 2):
            if chance.random() < 0.06 or name not in cluster.nodes[node]:
                raise Killed
            if not truth.is_certified:
                truth.was_whole = all(name in cluster.nodes[other] for _, other in places)
                assert truth.was_whole or cluster.is_left(order), "a certificate of what is not there"
            truth.is_certified = True
            cluster.nodes[node][name].certificate = certificate
            cluster.seen["certified"] += 1

    def drain(self) -> None:
        """The newest of its own goes to the store, if a newer one has not been faster."""
        cluster = self.cluster
        own = [
            found.certificate
            for name, found in cluster.nodes[self.nodes[0]].items()
            if found.certificate and found.certificate.order.epoch == self.epoch and name not in cluster.foreign
        ]
        newest = cluster.ask().newest()
        assert newest is not None
        if newest.state.epoch != self.epoch:
            raise StoreFenced("a later job has claimed the store")
        if own and (last := max(own, key=lambda each: each.order)).save_number > newest.state.save_number:
            cluster.log.append(lambda _: Commit(entry_of(last)))
            cluster.seen["drained"] += 1

    def sweep(self) -> None:
        """What may go on one node goes, and changes nothing for a resume on all of them."""
        cluster, node = self.cluster, self.cluster.chance.choice(self.nodes)
        newest = cluster.ask().newest()
        assert newest is not None
        before = cluster.merged(NODES).candidates
        kept = {self.source, *(candidate.attempt for candidate in cluster.merged(NODES).candidates[:KEEP])}
        view = SweepView(
            newest=newest,
            committed=cluster.committed(),
            claims=cluster.claims(),
            store_id=STORE_ID,
            epoch=self.epoch,
            has_resumed=self.has_resumed,
            kept=kept,
        )
        here = cluster.nodes[node]
        found = {attempt: each.certificate for name, each in here.items() if (attempt := Attempt.parse(name))}
        for deletion in sweep(found, view, keep=KEEP):
            self.check_deletion(deletion.attempt, here)
            del here[str(deletion.attempt)]
            cluster.seen["deleted"] += 1
        assert cluster.merged(NODES).candidates[:KEEP] == before[:KEEP]

    def check_deletion(self, attempt: Attempt, here: dict[str, Directory]) -> None:
        cluster, name = self.cluster, str(attempt)
        newest = cluster.log.newest()
        assert newest is not None
        assert newest.state.epoch == self.epoch, "a job that was fenced deletes"
        assert name not in cluster.foreign
        if here[name].certificate is None:
            assert attempt.epoch < self.epoch, "a save of this epoch may still go on"
            assert name != self.source
            return
        order = cluster.truth[name].order
        newer = [
            other
            for other, found in here.items()
            if found.certificate
            and other not in cluster.foreign
            and cluster.truth[other].order > order
            and not cluster.is_left(cluster.truth[other].order)
        ]
        is_durable = name in {record.entry.attempt for record in cluster.committed()}
        assert is_durable or cluster.is_left(order) or newer, "what nobody else has is gone"


def certificate_of(attempt: Attempt, order: SaveOrder, claim: Record, places: list[tuple[int, str]]) -> Certificate:
    manifest = Manifest(
        store_id=STORE_ID,
        step=attempt.step,
        epoch=attempt.epoch,
        attempt=str(attempt),
        kind="state",
        world_size=RANKS,
        created_at=0.0,
        files=tuple(Receipt(f"{rank}.pt", rank + 1, 7, rank) for rank in range(RANKS)),
    )
    held = {node: sorted(rank for rank, other in places if other == node) for _, node in places}
    return Certificate(
        manifest_data=manifest.encode(),
        save_number=order.save_number,
        claim_number=claim.number,
        claim_sha256=claim.sha256,
        holders=held_by(held),
    )


def entry_of(certificate: Certificate) -> CheckpointEntry:
    manifest = certificate.manifest
    return CheckpointEntry(
        step=manifest.step,
        epoch=manifest.epoch,
        attempt=manifest.attempt,
        manifest_sha256=sha256_of(certificate.manifest_data),
        kind="state",
        world_size=RANKS,
        size_bytes=manifest.size_bytes,
        num_files=len(manifest.files),
        created_at=0.0,
        save_number=certificate.save_number,
    )


# What goes on


def _lose_node(cluster: Cluster) -> None:
    cluster.nodes[cluster.chance.choice(NODES)].clear()
    cluster.jobs = [job for job in cluster.jobs if cluster.chance.random() < 0.5]
    cluster.seen["node lost"] += 1


def _roll_back(cluster: Cluster) -> None:
    newest = cluster.ask().newest()
    live = cluster.log.records(newest.state.live) if newest else []
    if len(live) > 1:
        target = cluster.chance.choice(live[:-1])
        cluster.log.append(lambda found: roll_back(found, target, epoch=None))
        cluster.left.append((target.entry.order, (newest.state.epoch + 1, 0)))  # type: ignore[union-attr]
        cluster.seen["rolled back"] += 1


def _find_a_copy(cluster: Cluster) -> None:
    """A job on a copy of the store, which has its id, has saved on the same node, in an epoch with the same number."""
    newest = cluster.log.newest()
    if newest is None:
        return
    epoch = newest.state.epoch + cluster.chance.choice([0, 0, 1])
    attempt = Attempt(999, epoch, f"{cluster.chance.randrange(16**8):08x}")
    claim = Record.following(None, Claim("copy", RANKS, above_epoch=epoch - 1), write_id="0", created_at=0.0)
    node = cluster.chance.choice(NODES)
    certificate = certificate_of(attempt, SaveOrder(epoch, 10**6), claim, [(0, node), (1, node)])
    cluster.nodes[node][str(attempt)] = Directory({"0.pt": 1, "1.pt": 2}, certificate)
    cluster.foreign.add(str(attempt))


def _turn_bucket(cluster: Cluster) -> None:
    cluster.is_away = not cluster.is_away


@dataclass
class _Turn:
    cluster: Cluster

    def job(self, job: SimulatedJob) -> None:
        """One thing that a job does. A job that hears that it was fenced may go on all the same."""
        chance, cluster = self.cluster.chance, self.cluster
        is_zombie = job.epoch != cluster.log.newest().state.epoch  # type: ignore[union-attr]
        job.is_busy = True
        try:
            if not job.has_resumed and not is_zombie:
                chance.choice([job.sweep, job.resume, job.resume])()
            else:
                chance.choice([job.save, job.save, job.save, job.drain, job.sweep])()
                cluster.seen["zombie saves"] += is_zombie
        except Killed:  # or a rank failed, and the caller goes on
            if chance.random() < 0.5:
                cluster.jobs = [other for other in cluster.jobs if other is not job]
            cluster.seen["killed"] += 1
        except StoreFenced:
            cluster.seen["fenced"] += 1
        except Away:
            cluster.seen["away"] += 1
        finally:
            job.is_busy = False


def _act_of_another(cluster: Cluster) -> None:
    others = [other for other in cluster.jobs[-2:] if not other.is_busy]
    if others:
        _Turn(cluster).job(cluster.chance.choice(others))


def run(chance: random.Random, *, num_actions: int = 60) -> Cluster:
    cluster = Cluster(chance)
    for _ in range(num_actions):
        what = chance.random()
        if what < 0.12 or not cluster.jobs:
            try:
                SimulatedJob.start(cluster)
            except Away:
                cluster.is_away = False
        elif what < 0.15:
            _lose_node(cluster)
        elif what < 0.18:
            _turn_bucket(cluster)
        elif what < 0.20:
            _find_a_copy(cluster)
        elif what < 0.22 and not cluster.is_away:
            _roll_back(cluster)
        else:
            _Turn(cluster).job(chance.choice(cluster.jobs[-2:]))
    assert cluster.log.verify_chain() == []
    return cluster


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_histories_that_shrink(chance: random.Random) -> None:
    run(chance)


def test_what_is_resumed_from_is_whole_and_newest_and_nothing_needed_is_deleted() -> None:
    seen: Counter[str] = Counter()
    for seed in range(120):
        seen += run(random.Random(seed)).seen
    expected = ["resumed fast", "resumed", "certified", "drained", "deleted", "node lost", "rolled back"]
    for name in [*expected, "zombie saves", "killed", "fenced", "away"]:
        assert seen[name] >= 20, (name, seen)
