"""The simulation can fail: each of these mistakes is planted, and must be found within some seeds."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.simulation import Action, Actor, Plan, Simulation, Trouble, draw
from kit.simulation.network import Network
from kit.simulation.plan import draw_following, draw_vanishing
from kit.simulation.virtual import storages
from seed_items import broken_rule

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptstoreError, StorageError
from ckptstore.extensions.exchange import copying
from ckptstore.extensions.history import follow
from ckptstore.format import changes
from ckptstore.integrations.ray.kept_by_ray import ray_keeps
from ckptstore.job import Job
from ckptstore.loading import restoring, story
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.log import Log
from ckptstore.log.reader import LogReader
from ckptstore.saving import transaction
from ckptstore.saving.commit import decide as decide_in_commit
from ckptstore.store import CheckpointStore
from ckptstore.upkeep import garbage

pytestmark = pytest.mark.slow

MOST_SEEDS = 40
Plant = Callable[[pytest.MonkeyPatch], None]
Make = Callable[[int], Plan]

SAVES = tuple(Action("directory", step=step) for step in (10, 20, 30))


def any_plan(**given: Any) -> Make:
    return lambda seed: draw(seed, **given)


def the_log_does_not_answer(seed: int) -> Plan:
    trouble = Trouble("outage", "job1.0", at_call=35, seconds=30.0, what="answers log/")
    return Plan(seed, rank_timeout_seconds=12.0, actors=(Actor("job1", SAVES, ranks=2),), troubles=(trouble,))


def the_log_is_away_at_a_commit(seed: int) -> Plan:
    trouble = Trouble("outage", "job1.0", at_call=20 + seed % 20, seconds=900.0, what="lost log/")
    return Plan(seed, rank_timeout_seconds=12.0, retry_attempts=4, actors=(Actor("job1", SAVES),), troubles=(trouble,))


def two_jobs_at_once(seed: int) -> Plan:
    return Plan(seed, storage="disk", actors=(Actor("job1", SAVES), Actor("job2", SAVES)))


def two_jobs_name_their_uploads_alike(seed: int) -> Plan:
    uploads = tuple(Action("report", step=step, option=f"{step}") for step in range(8))
    return Plan(seed, board="ray", keeper="ray", actors=(Actor("job1", uploads), Actor("job2", uploads)))


def garbage_is_collected_beside_saves(seed: int) -> Plan:
    """Four ranks have to meet: so a save lasts longer than a collection takes from its listing to its deletions."""
    collections = tuple(Action("gc", after_seconds=0.5) for _ in range(12))
    admin = Actor("admin", collections, ranks=0, begins="when saved")
    return Plan(seed, actors=(Actor("job1", SAVES, ranks=4), admin))


def one_restores_what_a_job_prunes(seed: int) -> Plan:
    saves = tuple(Action("directory", step=step, after_seconds=0.1) for step in range(8))
    restores = tuple(Action("restore", after_seconds=0.05) for _ in range(30))
    actors = (Actor("job1", saves), Actor("admin", restores, ranks=0))
    return Plan(seed, policy="latest 1", grace_seconds=0.0, actors=actors)


def somebody_rolls_back_and_breaks_rules(seed: int) -> Plan:
    job = Actor("job1", tuple(Action("directory", step=step, after_seconds=0.5) for step in range(6)))
    commands = tuple(Action(kind, after_seconds=0.3) for kind in ("pin", "break a rule", "roll back") * 4)
    admin = Actor("admin", commands, ranks=0, begins="when saved")
    return Plan(seed, policy="latest 2", actors=(job, admin))


def the_hint_is_torn_before_a_look(seed: int) -> Plan:
    looks = Action("tear the hint"), Action("latest"), Action("tear the hint"), Action("latest")
    return Plan(seed, actors=(Actor("job1", SAVES), Actor("reader", looks, ranks=0, begins="after job1")))


def somebody_copies_a_checkpoint(seed: int) -> Plan:
    reader = Actor("reader", (Action("copy to a directory"),), ranks=0, begins="after job1")
    return Plan(seed, actors=(Actor("job1", SAVES), reader))


def somebody_copies_the_store(seed: int) -> Plan:
    return Plan(seed, actors=(Actor("job1", SAVES), Actor("admin", (Action("cp"),), ranks=0, begins="after job1")))


def saves_that_refer_to_each_other(seed: int) -> Plan:
    saves = tuple(Action("state", step=step, option="reference") for step in (10, 20, 30))
    return Plan(seed, contents="state", actors=(Actor("job1", saves),))


def a_file_is_gone_before_a_restart(seed: int) -> Plan:
    """A file of the newest checkpoint, while its job still looks at what it has saved."""
    looks = (Action("load"),) * 6
    actors = (Actor("job1", (*SAVES, *looks)), Actor("job2", (Action("resume"),), begins="after job1"))
    trouble = Trouble("damage", "job1.0", 40 + seed % 20, what="gone")
    return Plan(seed, storage="disk", actors=actors, troubles=(trouble,))


def a_restart_is_lied_to(seed: int) -> Plan:
    actors = (Actor("job1", SAVES), Actor("job2", (Action("resume"),), begins="after job1"))
    return Plan(seed, actors=actors, lie_rate=0.2)


def the_second_look_goes_the_same_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Network, "doubted", lambda self: None)


def nobody_looks_whether_the_store_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Log, "check_there", lambda self: None)
    patch.setattr(Job, "check_latest_there", lambda self, newest: None)


def a_rank_whose_save_failed_cleans_up(patch: pytest.MonkeyPatch) -> None:
    real = CheckpointStore.save_directory

    def save(self: Any, step: int, *arguments: Any, **keywords: Any) -> Checkpoint:
        try:
            return real(self, step, *arguments, **keywords)
        except CkptstoreError:
            storage = self._job.storage
            found = [file.key for file in storage.list(f"checkpoints/step-{step:010d}")]
            storage.delete(found)
            raise

    patch.setattr(CheckpointStore, "save_directory", save)


def a_create_without_an_answer_counts_as_failed(patch: pytest.MonkeyPatch) -> None:
    def settle(self: Any, storage: Any, record: Any, newest: Any, failure: StorageError, refused: bool) -> None:
        failure.committed = False
        raise failure

    patch.setattr(Log, "_settle", settle)
    patch.setattr("ckptstore.storage.retry._create", lambda storage, key, data: storage.inner.create(key, data))


def retention_forgets_what_is_pinned(patch: pytest.MonkeyPatch) -> None:
    def decide(policy: Any, candidates: Any, *, protected: Any) -> Any:
        return decide_in_commit(policy, candidates, protected={max(protected): "the latest"})

    patch.setattr("ckptstore.saving.commit.decide", decide)


def retention_drops_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ckptstore.saving.commit.decide", lambda *_, **__: [])


def a_prune_deletes_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ckptstore.upkeep.prune._remove", lambda *_, **__: [])


def a_copy_leaves_the_oldest_out(patch: pytest.MonkeyPatch) -> None:
    real = copying._needed
    patch.setattr(copying, "_needed", lambda job, newest: real(job, newest)[-1:])


def a_record_forgets_what_its_checkpoint_refers_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ckptstore.saving.commit._bases", lambda *_: ())


def what_is_unknown_counts_as_committed(patch: pytest.MonkeyPatch) -> None:
    def unknown(record: Any, error: CkptstoreError) -> CkptstoreError:
        error.committed = True
        return error

    patch.setattr("ckptstore.log.writer._unknown", unknown)


def garbage_is_what_no_record_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(garbage, "_why_left", lambda *_, **__: None)


def a_restore_does_not_look_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restoring, "_in_trash", lambda log, newest, step, number: log.records([number])[0])
    patch.setattr(changes, "_check_in_trash", lambda state, numbers: None)


def what_is_removed_may_be_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(changes, "_check_unpinned", lambda *_: None)


def a_restore_forgets_the_pin(patch: pytest.MonkeyPatch) -> None:
    real = changes._restore
    patch.setattr(changes, "_restore", lambda state, number, change: real(state, number, replace(change, pin=False)))


def a_roll_back_voids_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(changes, "with_void", lambda voids, _: tuple(voids))


def the_hint_is_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogReader, "_gallop", lambda self, known: known)


def create_replaces_what_is_there(patch: pytest.MonkeyPatch) -> None:
    def create(self: Any, key: str, data: bytes) -> bool:
        self.space.put(key, bytes(data), is_durable=True)
        return True

    patch.setattr(storages._Creates, "create", create)


def nobody_looks_whether_a_checkpoint_is_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointFiles, "check_complete", lambda self, manifest: None)


def a_disk_is_not_made_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(storages._Disk, "persist", lambda self, keys: None)


class Opened:
    """A descriptor that stays open for as long as this does."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.descriptor)


def a_reader_keeps_files_open(patch: pytest.MonkeyPatch) -> None:
    kept: list[Opened] = []
    real = story.download_files

    def download(files: Any, manifest: Any, chosen: Any, path: Any, **keywords: Any) -> None:
        real(files, manifest, chosen, path, **keywords)
        kept.extend(Opened(path / item.name) for item in chosen)

    patch.setattr(story, "download_files", download)


def a_follower_deletes_where_ray_keeps(patch: pytest.MonkeyPatch) -> None:
    real = transaction.save

    def save(group: Any, publisher: Any, shard: Any, request: Any) -> Any:
        try:
            return real(group, publisher, shard, request)
        except CkptstoreError:
            storage = publisher.run.storage
            storage.delete([file.key for file in storage.list(f"{publisher.directory}-")])
            raise

    patch.setattr(transaction, "save", save)


def a_name_that_looks_free_is_taken_where_ray_keeps(patch: pytest.MonkeyPatch) -> None:
    real = ray_keeps.RayPublisher.begin

    def begin(self: Any, *arguments: Any) -> Any:
        begun = real(self, *arguments)
        is_taken = any(True for _ in self.run.storage.list(f"{self.directory}/"))
        return begun if is_taken else {**begun, "directory": self.directory}

    patch.setattr(ray_keeps.RayPublisher, "begin", begin)


def a_cursor_moves_before_the_work(patch: pytest.MonkeyPatch) -> None:
    def follow_early(self: Any, use: Callable[[Any], Any]) -> Any:
        while (record := self._wait_for_next()) is not None:
            with self._held(record) as is_present:
                self._move(record.place)
                if is_present:
                    yield use(record)

    patch.setattr(follow.Follower, "follow", follow_early)


def a_cursor_stays_where_it_began(patch: pytest.MonkeyPatch) -> None:
    real = follow.Follower._write_cursor
    patch.setattr(follow.Follower, "_write_cursor", lambda self: None if self._position else real(self))


def a_follower_holds_no_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(follow.leases, "hold", lambda *_, **__: nullcontext())


def a_follower_goes_on_with_the_newest_that_it_found(patch: pytest.MonkeyPatch) -> None:
    real = follow.Follower._pass_over
    patch.setattr(follow.Follower, "_pass_over", lambda self, missed, newest: real(self, [*self._found], newest))


FOLLOWS = "a state follows from the changes"
NOTHING_LOST = "nothing committed loses a byte"
NOT_COMMITTED = "committed=False never becomes visible"
CALLS_SUCCEED = "a call that nothing disturbs succeeds"


@pytest.mark.parametrize(
    ("plant", "make", "rules"),
    [
        (a_rank_whose_save_failed_cleans_up, any_plan(error_rate=0.02), {NOTHING_LOST}),
        (a_create_without_an_answer_counts_as_failed, the_log_does_not_answer, {NOT_COMMITTED, "a save commits once"}),
        (
            retention_forgets_what_is_pinned,
            any_plan(policy="latest 1"),
            {"what is pinned stays", "the resume source stays", CALLS_SUCCEED},
        ),
        (retention_drops_nothing, any_plan(policy="latest 1"), {"retention drops what its rule drops"}),
        (a_prune_deletes_nothing, any_plan(policy="latest 1"), {"a prune deletes what is due"}),
        (a_copy_leaves_the_oldest_out, somebody_copies_the_store, {"a copy has what is live"}),
        (
            a_record_forgets_what_its_checkpoint_refers_to,
            saves_that_refer_to_each_other,
            {"what is committed is whole"},
        ),
        (what_is_unknown_counts_as_committed, the_log_is_away_at_a_commit, {"committed=True is visible"}),
        (
            garbage_is_what_no_record_names,
            garbage_is_collected_beside_saves,
            {CALLS_SUCCEED, "what is committed is whole"},
        ),
        (a_restore_does_not_look_again, one_restores_what_a_job_prunes, {"what is deleted never comes back"}),
        (
            what_is_removed_may_be_kept,
            somebody_rolls_back_and_breaks_rules,
            {"what is pinned stays", "a change names what is there"},
        ),
        (a_restore_forgets_the_pin, one_restores_what_a_job_prunes, {FOLLOWS}),
        (a_roll_back_voids_nothing, somebody_rolls_back_and_breaks_rules, {FOLLOWS}),
        (the_hint_is_believed, the_hint_is_torn_before_a_look, {"latest is not older than the call"}),
        (create_replaces_what_is_there, two_jobs_at_once, {"a record never changes"}),
        (
            nobody_looks_whether_a_checkpoint_is_whole,
            a_file_is_gone_before_a_restart,
            {"a restart finds the newest"},
        ),
        (the_second_look_goes_the_same_way, a_restart_is_lied_to, {"a restart finds the newest"}),
        (nobody_looks_whether_the_store_is_there, draw_vanishing, {"a store that is gone takes no save"}),
        (a_reader_keeps_files_open, somebody_copies_a_checkpoint, {"no file descriptor is left"}),
        (
            a_follower_deletes_where_ray_keeps,
            any_plan(keeper="ray", error_rate=0.05),
            {NOTHING_LOST, "only the leader deletes what others wrote"},
        ),
        (
            a_name_that_looks_free_is_taken_where_ray_keeps,
            two_jobs_name_their_uploads_alike,
            {NOTHING_LOST, "what is committed is whole"},
        ),
        (a_cursor_moves_before_the_work, draw_following, {"each commit has its turn"}),
        (a_cursor_stays_where_it_began, draw_following, {"what is done comes no more"}),
        (
            a_follower_holds_no_lease,
            draw_following,
            {"what a follower works on stays", "nothing that is read loses a byte"},
        ),
        (a_follower_goes_on_with_the_newest_that_it_found, draw_following, {"what is live has its turn"}),
        (a_disk_is_not_made_durable, any_plan(storage="disk"), {"what is committed is durable"}),
    ],
)
def test_a_mistake_is_found(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, plant: Plant, make: Make, rules: set[str]
) -> None:
    plant(monkeypatch)
    assert any(broken_rule(simulation.run(make(seed))) in rules for seed in range(800_000, 800_000 + MOST_SEEDS))
