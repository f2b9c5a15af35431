"""The manager that torchtitan's Trainer builds from its config: it schedules saves and loads in a store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any, Literal

import torch
from torchtitan.components.checkpointer.base import BaseCheckpointManager, ModelWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.observability import structured_logger
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import FileMissing, InvalidInput
from ckptstore.extensions.tier.tier import FastTier
from ckptstore.integrations.tier_settings import FAST_SETTINGS, tier_of
from ckptstore.integrations.torchtitan.flat import (
    DATALOADER,
    MODEL,
    RANDOM,
    FlatStates,
    LayoutRandomNumbers,
    Lazily,
    Value,
    in_dtype,
)
from ckptstore.integrations.torchtitan.hugging_face import export_weights, load_weights
from ckptstore.integrations.torchtitan.places import Contents, ResumeOrder, as_metadata, checkpoint_uri
from ckptstore.integrations.torchtitan.together import on_all_ranks, on_leader, rank_of
from ckptstore.opening import open_store
from ckptstore.retention import KeepAll, KeepLatest
from ckptstore.saving.background import PendingSave
from ckptstore.state.read.stored import Choice
from ckptstore.storage.uri import redact
from ckptstore.store import load_in_order, settle_saves

_SHOWN = 5
_PER_RANK: dict[str, Choice] = {"train_state.*": "first", f"{RANDOM}.*": "skip"}
"""Ranks may count tokens differently, and torchtitan goes on with one of the numbers. Random numbers are a rank's."""


class CkptstoreCheckpointManager(BaseCheckpointManager):  # type: ignore[misc] # torchtitan is Any to the type checker
    """Keeps the checkpoints of torchtitan's Trainer in the store at `checkpoint.folder`, on a disk or in any cloud.

    In a config it replaces torchtitan's own manager:
    `checkpoint=CkptstoreCheckpointManager.Config(enable=True, folder="s3://bucket/run")`. All options of torchtitan's
    managers keep their meaning; `Config` has the new ones. A checkpoint becomes visible whole or not at all, so nothing
    half-written is ever loaded or counted.

    A job that finds checkpoints in its store goes on from the newest one that verifies, in any parallel layout and
    number of ranks, and the options for an initial load are ignored. A checkpoint of the model alone, as the last step
    leaves one, does not count: the newest whole one before it is taken. From a seed (step 0) the model is taken.

    Keys are those of torchtitan's DCP manager, so its `initial_load_path` takes a checkpoint directory of the store,
    and this one's takes a `step-N` directory of theirs, a store, or STORE@STEP.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc] # as above
        """torchtitan's options, and these."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        """"disabled": training waits for each save; the others: a thread stores a copy. Both asynchronous modes are
        the same: copies go through pinned memory wherever there is an accelerator. The last save is waited for.
        """

        hf_folder: str = ""
        """Target of the safetensors of `last_save_in_hf`, as `step-N` below it: a path below the dump folder or a URI.
        By default the folder's name with "-hf".
        """

        fast: str | None = None
        """A directory on a disk of each node. A save is complete there, and comes into the store behind the training:
        see `ckptstore.FastTier`, whose other fields are the next options.
        """

        fast_copies: int | None = None
        """The number of nodes that hold each file, 1 or 2."""

        fast_keep: int | None = None
        """The number of checkpoints that stay on a node."""

        fast_drain: list[str] | None = None
        """The checkpoints that come into the store, as rules such as every=1000; as many as it can take by default."""

        fast_drain_bytes_per_second: float | None = None
        """The most bytes per second that a node sends for that."""

        fast_interface: str | None = None
        """The network interface by which the other nodes reach this one."""

        fast_node: str | None = None
        """The name of this node."""

        def tier(self) -> FastTier | None:
            """Return the tier of the options that begin with `fast`. Raises InvalidInput."""
            return tier_of({name: getattr(self, name) for name in FAST_SETTINGS}, shown="checkpoint.{}".format)

        def __post_init__(self) -> None:
            self.async_mode = self.async_mode.lower()  # type: ignore[assignment] # checked in the next line
            if self.async_mode not in ("disabled", "async", "async_with_pinned_mem"):
                raise ValueError(f"Invalid async_mode: {self.async_mode}")
            if self.hf_folder and not self.last_save_in_hf:
                raise ValueError("hf_folder is where last_save_in_hf puts its files, and that is False.")
            self.tier()
            shared: Any = self
            if shared.initial_load_path is not None:
                shared.initial_load_path = shared.initial_load_path.strip()
            BaseCheckpointManager.Config(**_without_limits_of_dcp(shared))  # checks the options that all managers share

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: PendingSave | None = None
        if not self.enable:
            return
        if (config.last_save_in_hf or config.initial_load_in_hf) and sd_adapter is None:
            raise InvalidInput(
                "last_save_in_hf and initial_load_in_hf need the model's sd_adapter, and this model has none"
            )
        unknown = set(config.exclude_from_loading) - {*states, "optimizer", DATALOADER, "lr_scheduler", RANDOM}
        if unknown:
            raise InvalidInput(f"exclude_from_loading names {min(unknown)}, which is no part of this training")
        self.config = config
        self.folder = filesystem.join(base_folder, config.folder)
        self.hf_folder = filesystem.join(base_folder, config.hf_folder or f"{config.folder.rstrip('/')}-hf")
        if f"{self.hf_folder}/".startswith(f"{self.folder.rstrip('/')}/"):
            raise InvalidInput(
                f"hf_folder {self.hf_folder} is inside of the store at {self.folder}, where only its own files may lie"
            )
        self.sd_adapter = sd_adapter
        self.states = states
        self.states |= {
            MODEL: ModelWrapper(model_parts),
            "optimizer": optimizers,
            DATALOADER: dataloader,
            "lr_scheduler": lr_schedulers,
            RANDOM: LayoutRandomNumbers(model_parts, getattr(states.get("train_state"), "parallel_dims", None)),
        }
        keep, tier = config.keep_latest_k, config.tier()
        if tier is not None and config.load_only:
            logger.warning("load_only claims nothing, so what lies on the disks of nodes alone is not looked at.")
        self.store = open_store(self.folder, retention=KeepLatest(keep) if keep else KeepAll(), fast=tier)
        logger.info(f"Checkpoints are loaded from and saved to the store at {self.store.uri}.")

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.config.load_only:
            return False
        is_first = curr_step == 1 and self.config.enable_first_step_checkpoint
        return last_step or is_first or curr_step % self.config.interval == 0

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save the step if it is due; True if it is. Collective.

        In an asynchronous mode it returns once the state is copied. The error of a save is raised on all ranks, that of
        an asynchronous one by the next save, `maybe_wait_for_saving` or `close`.
        """
        if not self._should_save(curr_step, last_step):
            return False
        with structured_logger.log_trace_span("checkpoint_save"):
            structured_logger.add_step_tag("checkpoint_save")
            self.save_future = None  # the store waits for it, and raises its error on all ranks
            if last_step and self.config.last_save_model_only:
                self._save_model(curr_step)
            elif last_step or self.config.async_mode == "disabled":
                self._store_now(curr_step, FlatStates(self.states), "all", last_step=last_step)
            else:
                self.save_future = self.store.save_async(
                    curr_step, FlatStates(self.states).entries, metadata=as_metadata("all")
                )
        return True

    def _save_model(self, step: int) -> None:
        config = self.config
        contents = in_dtype(self.states[MODEL].state_dict(), TORCH_DTYPE_MAP[config.export_dtype])
        if not config.last_save_in_hf:
            self._store_now(step, FlatStates({MODEL: Value(contents)}), "model", last_step=True)
            return
        named = FlatStates({MODEL: Value(self.sd_adapter.to_hf(contents))})
        checkpoint = self._store_now(step, named, "hugging_face", last_step=True)
        directory = filesystem.join(self.hf_folder, f"step-{step}")
        export_weights(self.store, checkpoint, directory, beside=self.sd_adapter.hf_assets_path)

    def _store_now(self, step: int, flat: FlatStates, contents: Contents, *, last_step: bool) -> Checkpoint:
        checkpoint = self.store.save(step, flat.entries, metadata=as_metadata(contents))
        if last_step and not checkpoint.is_durable:
            checkpoint = self.store.drain() or checkpoint
        logger.info(f"Saved step {step} to {checkpoint.uri}.")
        return checkpoint

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Resume from the store, or from a step of it, or else carry out the initial load; True if anything was loaded.

        Collective. Raises FileMissing, which names the existing steps, for a missing `step`, StateMismatch for a
        checkpoint that does not fit, NoUsableCheckpoint when there are some and none can be used.
        """
        with structured_logger.log_trace_span("checkpoint_load"):
            if step != -1:
                checkpoint = self._resume(ResumeOrder(self.store, step), model_only=step == 0)
                if checkpoint is None:
                    steps = ", ".join(str(each.step) for each in self.store) or "none"
                    raise FileMissing(
                        f"--checkpoint.load_step={step} not found in {self.store.uri}, which has {steps}",
                        hint="Name one of these, or leave it out for the newest",
                    )
            else:
                checkpoint = self._resume(ResumeOrder(self.store)) or self._resume(
                    ResumeOrder(self.store, 0), model_only=True
                )
            if checkpoint is None:
                return self._load_initially()
            logger.info(f"Loaded step {checkpoint.step} from {checkpoint.uri}.")
            return True

    def _resume(self, wanted: ResumeOrder, *, model_only: bool = False) -> Checkpoint | None:
        claim = not self.config.load_only
        if not (claim and self.config.fast) and not on_leader(
            self.store, "look for a checkpoint", lambda: bool(wanted(()))
        ):
            return None  # nothing is claimed then
        flat = Lazily(lambda: self._flat(model_only=model_only))
        found = load_in_order(self.store, flat, wanted, claim=claim, per_rank=_PER_RANK)
        if found is not None:
            self._hand_back(flat.made, found)
        return found

    def _hand_back(self, flat: FlatStates, checkpoint: Checkpoint) -> None:
        """Load the entries into the objects; warn on rank 0 of keys that no rank has loaded, such as layers that the
        model lacks, which torchtitan's managers ignore silently. Collective."""
        store, rank = self.store, rank_of(self.store)
        on_all_ranks(store, "hand back", flat.hand_back)
        mine = sorted(flat.entries)  # ranks with the same keys, as all are without a pipeline, send them once
        digests = on_all_ranks(store, "digests of keys", sha256(json.dumps(mine).encode()).hexdigest)
        is_first = digests.index(digests[rank]) == rank
        parts = on_all_ranks(store, "keys", lambda: mine if is_first else [])

        def warn() -> None:
            held = {key for part in parts for key in part}
            excluded = tuple(f"{name}." for name in self.states.keys() - flat.names)
            stored = checkpoint.keys()
            unplaced = [key for key in stored if key not in held and not key.startswith(excluded)]
            if unplaced:
                shown = ", ".join(unplaced[:_SHOWN]) + (", ..." if len(unplaced) > _SHOWN else "")
                logger.warning(f"{len(unplaced)} keys of {checkpoint.uri} have no place in this training: {shown}")

        on_leader(store, "look at what is left", warn)

    def _load_initially(self) -> bool:
        config = self.config
        source = config.initial_load_path
        if config.initial_load_in_hf:
            source = source or self.sd_adapter.hf_assets_path or ""
            load_weights(
                self.store,
                self.states[MODEL],
                self.sd_adapter,
                source,
                is_quantized=config.initial_load_in_hf_quantized,
            )
        elif source:

            def look() -> tuple[str, bool]:
                keys = Checkpoint.from_uri(uri := checkpoint_uri(source)).keys()
                return uri, any(key.startswith(f"{RANDOM}.") for key in keys)

            uri, has_random = on_leader(self.store, "initial load", look)
            checkpoint = Checkpoint.from_uri(uri)
            flat = self._flat(model_only=config.initial_load_model_only, without=() if has_random else (RANDOM,))
            report = checkpoint.load(flat.entries, dtype="state", per_rank=_PER_RANK)
            if report.cast:
                shown = ", ".join(f"{key} from {how}" for key, how in [*report.cast.items()][:_SHOWN])
                logger.warning(f"{len(report.cast)} tensors of {redact(source)} were cast: {shown}")
            self._hand_back(flat, checkpoint)
        else:
            logger.info("There is no checkpoint to load: this is a fresh start.")
            return False
        logger.info(f"Began from {redact(source)}.")
        return True

    def _flat(self, *, model_only: bool, without: Sequence[str] = ()) -> FlatStates:
        excluded = set(self.states) - {MODEL} if model_only else {*self.config.exclude_from_loading, *without}
        return FlatStates({name: item for name, item in self.states.items() if name not in excluded})

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: a save returns once its copy is made."""

    def _wait_for_saving(self) -> None:
        self.save_future = None
        settle_saves(self.store)

    def _close(self) -> None:
        """Wait for the save in flight, and raise its error unless that was raised already."""
        if hasattr(self, "store"):
            self.store.close()


def _without_limits_of_dcp(config: Any) -> dict[str, Any]:
    """Return the options that torchtitan's managers share, without the limits of DCP alone."""
    # DCP cannot write safetensors to the cloud. It needs two checkpoints, since it deletes one before the next exists.
    options = {field.name: getattr(config, field.name) for field in fields(BaseCheckpointManager.Config)}
    if filesystem.is_remote(config.folder):
        options["folder"] = "checkpoint"
    if config.initial_load_path and filesystem.is_remote(config.initial_load_path):
        options["initial_load_path"] = "/"
    if config.keep_latest_k == 1:
        options["keep_latest_k"] = 0
    return options
