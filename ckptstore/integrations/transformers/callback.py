"""The callback: after Trainer has written a checkpoint, every rank stores its share of the files."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from transformers import TrainerCallback

from ckptstore.catalogue import job_of
from ckptstore.errors import CkptstoreError, InvalidInput, InvalidSource, from_wire, to_wire
from ckptstore.extensions.exchange.replacing import replace_directory
from ckptstore.integrations.lazy_store import LazyStore, StoreSource, reports_to_ray
from ckptstore.integrations.transformers.shares import is_written_as, link, newest_written, seen_in
from ckptstore.saving.directory_shard import directory_of
from ckptstore.store import CheckpointStore, settle_saves, start_shard
from ckptstore.tools.run.folders.division import Seen, divide

if TYPE_CHECKING:
    from ckptstore.checkpoint import Checkpoint

logger = logging.getLogger("ckptstore.transformers")

T = TypeVar("T")

_OWN = "_ckptstore-"
"""The beginning of the names of our directories in `output_dir`: Trainer pushes none that begins with an underscore to
the Hub."""


class CheckpointStoreCallback(TrainerCallback):  # type: ignore[misc] # transformers is Any to the type checker
    """Stores each checkpoint of a Hugging Face `Trainer` from the place where Trainer wrote it; nothing is copied.

    Trainer decides when to save (`save_strategy`, `save_steps`) and how many directories stay on its own disk
    (`save_total_limit`). The store's retention decides which stay in the store. Each file is stored once, by a rank
    that sees it.

    `trainer.train(resume_from_checkpoint=callback.resume())` goes on from the newest checkpoint of the store, on nodes
    that have never seen it too, and starts from scratch where the store is empty.

    Args:
        store: an open store; or a URI, or a function such as `ckptstore.ray.store`: then each process opens its own.
        asynchronous: go on training while the files are stored. Until then they have a second name in `output_dir`,
            which needs a disk with hard links. At most one save of the store is in flight. The next one waits for it,
            also one that you make without Trainer.
        max_failures: how many asynchronous saves in a row may fail before the next one raises the last one's error.
        save_options: keywords of `save_directory`, such as `{"link": True}`.
        open_keywords: those of `open_store`, for a URI, or of the function. With `fast`, or an open store that has a
            fast tier, a save is complete when the files are on the disks of the nodes.

    The metrics of a checkpoint are the last that Trainer logged of each name. Those of an evaluation ("eval_...") count
    only when it was at the step that is saved. An error of a save is raised in the training loop, the same on all
    ranks. An asynchronous one is raised by the next save or at the end of training.
    """

    def __init__(
        self,
        store: StoreSource,
        *,
        asynchronous: bool = False,
        max_failures: int = 0,
        save_options: Mapping[str, Any] | None = None,
        **open_keywords: Any,
    ) -> None:
        if max_failures and not asynchronous:
            raise InvalidInput(
                f"max_failures={max_failures} is for asynchronous saves: all others raise their error at once",
                hint="Give asynchronous=True, or leave it out",
            )
        self._lazy_store = LazyStore(store, open_keywords)
        self._asynchronous = asynchronous
        self._max_failures = max_failures
        self._save_options = {"suffix": "never", **(save_options or {})}
        self._saves_in: CheckpointStore | None = None
        """The store of this training's saves in the background."""
        self._resumed_directory = ExitStack()
        self._began_at, self._stored_step = 0.0, 0
        self.resumed: Checkpoint | None = None
        """The last result of `resume`."""

    @property
    def store(self) -> CheckpointStore:
        """The store; opened if it is not open."""
        return self._lazy_store.get()

    def resume(self) -> str | None:
        """Claim the store and return the newest whole checkpoint as a directory; None in an empty store. Collective.

        Call it after `TrainingArguments` have been made: they connect the processes. The directory may be read until
        the end of training or `close`. On a disk it is the checkpoint itself; elsewhere each node downloads it once.
        """
        self._resumed_directory.close()
        self.resumed = checkpoint = self.store.resume()
        if checkpoint is None:
            return None
        if checkpoint.kind != "directory":
            raise InvalidInput(f"Step {checkpoint.step} of {self.store.uri} is not a Trainer's: it holds tensor state")
        try:
            paths = _exchanged(lambda: str(self._resumed_directory.enter_context(checkpoint.as_directory())))
        except CkptstoreError:
            self._resumed_directory.close()
            raise
        return paths[_rank()]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse options that exclude each other, and bring the best checkpoint for `load_best_model_at_end`."""
        if self._asynchronous and reports_to_ray(self.store):
            raise InvalidInput(
                "Ray takes reports from the training thread alone, and asynchronous saves of files end on another one",
                hint="Give asynchronous=False, or a store that does not report to Ray",
            )
        if args.local_process_index == 0:  # of a process that was killed; no rank saves before all have begun
            for left in Path(args.output_dir).glob(f"{_OWN}*"):
                shutil.rmtree(left, ignore_errors=True)
        if _rank() == 0 and state.global_step == 0 and (step := newest_written(Path(args.output_dir))) > 0:
            logger.warning(
                "training begins anew, though %s has a checkpoint of step %d: to go on from that one, give its path as "
                "resume_from_checkpoint this once",
                *(args.output_dir, step),
            )
        if _rank() == 0 and state.global_step != getattr(self.resumed, "step", None):
            self._warn_of_newer(state.global_step)
        self._began_at, self._stored_step = time.time(), state.global_step
        best_step = getattr(state, "best_global_step", None)
        if self.resumed is not None and args.load_best_model_at_end and best_step:
            self._bring_best(args, state, best_step)

    def _warn_of_newer(self, step: int) -> None:
        """Warn of a training that goes on from less than the store has: no `resume_from_checkpoint`, True, a path."""
        try:
            latest = self.store.latest()
        except CkptstoreError as error:
            logger.warning("whether the store has a newer checkpoint cannot be read: %s", error)
            return
        if latest is not None and latest.step > step:
            logger.warning(
                "training %s, though %s has step %d: trainer.train(resume_from_checkpoint=callback.resume()) goes on "
                "from that one",
                *(f"goes on from step {step}" if step else "begins anew", self.store.uri, latest.step),
            )

    def _bring_best(self, args: Any, state: Any, step: int) -> None:
        """Put the best checkpoint where Trainer will look for it at the end, on each node that does not have it.
        Collective."""
        path = Path(args.output_dir) / f"checkpoint-{step}"
        partial_path = path.with_name(f"{_OWN}best-{_rank():05d}")

        def bring(has_turn: bool) -> bool:
            if not has_turn:
                return True
            best = next((checkpoint for checkpoint in self._known() if checkpoint.step == step), None)
            if best is None or (path.is_dir() and is_written_as(path, best)):
                return path.is_dir()
            shutil.rmtree(partial_path, ignore_errors=True)
            best.to_directory(partial_path)
            if path.is_dir():
                logger.warning("%s is not what the store has of that step, which takes its place", path)
            old = replace_directory(partial_path, path, aside=partial_path.with_name(f"{partial_path.name}-old"))
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)
            return True

        has_best = _exchanged(lambda: bring(_rank() == 0))
        if all(has_best):  # rank 0's disk may be that of all
            has_best = _exchanged(lambda: bring(args.local_process_index == 0))
        if all(has_best):
            state.best_model_checkpoint = str(path)
            return
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None  # else nothing would be better
        if _rank() == 0:
            logger.warning(
                "the best checkpoint, step %d, is not in %s any more, so load_best_model_at_end takes the best of this "
                "run; keep it with KeepBest(1, metric=%r)",
                step,
                self.store.uri,
                args.metric_for_best_model,
            )

    def _known(self) -> Iterator[Checkpoint]:
        """Yield the checkpoints of this run that can be read here, first the one that it goes on from."""
        if self.resumed is not None:
            yield self.resumed
        yield from self.store
        if job_of(self.store).tier is not None:
            yield from (entry.checkpoint for entry in self.store.entries(fast=True) if not entry.is_durable)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the checkpoint that all ranks have just written."""
        self._store_written(args, state, state.global_step)

    def _store_written(self, args: Any, state: Any, step: int) -> None:
        directory = Path(args.output_dir) / f"checkpoint-{step}"
        links = Path(args.output_dir) / f"{_OWN}upload-{_rank():05d}"
        path, unlink = self._share(directory, links, step), partial(shutil.rmtree, links, ignore_errors=True)
        metrics, self._stored_step = metrics_of(state, step), step
        if reports_to_ray(self.store):
            metrics["step"] = step  # as Ray's own callback has it
        options = {"metrics": metrics, "metadata": {"epoch": state.epoch}, **self._save_options}
        if self._asynchronous:
            self._saves_in = self.store
            start_shard(self.store, lambda job: directory_of(job, step, path, **options), ended=unlink)
            return
        try:
            self.store.save_directory(step, path, **options)
        finally:
            unlink()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the checkpoint of `enable_jit_checkpoint`, of which Trainer says nothing; wait for the save in flight,
        and close the store if this callback opened it."""
        if getattr(args, "enable_jit_checkpoint", False):
            step = max(_exchanged(lambda: newest_written(Path(args.output_dir), after_seconds=self._began_at)))
            if self._stored_step < step <= state.global_step:
                self._store_written(args, state, step)
        self.close()

    def close(self) -> None:
        """Wait for the save in flight, release the directory of `resume`, and close a store opened by this callback.

        Raises the error of the last asynchronous save, unless that was raised already.
        """
        store, self._saves_in = self._saves_in, None
        try:
            if store is not None:
                settle_saves(store)
        finally:
            self._resumed_directory.close()
            self._lazy_store.close()

    def _share(self, directory: Path, links: Path, step: int) -> Path | None:
        """Return a directory with the files that this rank stores; None if it has none. Collective."""

        def look() -> Seen:
            if self._asynchronous:  # the save in flight has the second names, and the store stores one at a time
                settle_saves(self.store, max_failures=self._max_failures)
            return seen_in(directory)

        seen = _exchanged(look)
        if not any(seen):
            raise InvalidSource(
                f"No rank has files in {directory}",
                step=step,
                hint="Trainer wrote elsewhere, or save_total_limit removed it: empty its output_dir",
            )
        shares = divide(seen)
        own = shares[_rank()]
        if not self._asynchronous and all(
            share in (set(), set(files)) for share, files in zip(shares, seen, strict=True)
        ):
            return directory if own else None
        _exchanged(lambda: link(directory, own, links))
        return links if own else None


def metrics_of(state: Any, step: int) -> dict[str, float]:
    """Return the last number of each name in Trainer's log; of an evaluation only those of this step."""
    found: dict[str, float] = {}
    for entry in state.log_history:
        for name, value in entry.items():
            if name == "step" or not isinstance(value, int | float):
                continue
            if not name.startswith("eval_") or entry.get("step") == step:
                found[name] = float(value)
    return found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _exchanged(work: Callable[[], T]) -> list[T]:
    """Return the result of `work` from every rank, once all have finished it. Collective.

    The error of any rank is raised on all, so that none is left waiting.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [work()]
    dist.barrier()
    try:
        part: tuple[bool, Any] = (True, work())
    except Exception as error:  # of whatever kind: the other ranks wait for an answer
        part = (False, to_wire(error, rank=dist.get_rank()))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    failed = next((value for is_good, value in parts if not is_good), None)
    if failed is not None:
        raise from_wire(failed)
    return [value for _, value in parts]
