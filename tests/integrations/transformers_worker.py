"""Real Hugging Face Trainers on a tiny GPT with random weights, for processes started by the tests."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ckptstore import CheckpointStore, FastTier, open_store
from ckptstore.errors import CkptstoreError, StorageFull
from ckptstore.events import Event, ResumeForgotten, listening
from ckptstore.integrations.transformers import CheckpointStoreCallback
from ckptstore.retention import KeepBest, KeepEvery, KeepLatest
from ckptstore.testing import Call, with_faults

warnings.simplefilter("ignore")
torch.set_num_threads(1)


QUIET: dict[str, Any] = {"use_cpu": True, "per_device_train_batch_size": 4, "logging_steps": 1, "seed": 5}
QUIET |= {"report_to": [], "disable_tqdm": True}


def texts(seed: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Token sequences that follow a rule."""
    numbers = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 32, (count,), generator=numbers)
    rows = [(start + torch.arange(12) * (1 + start % 3)) % 32 for start in starts]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


class Notes(TrainerCallback):
    """The loss of each step, and the end of a process at one."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at
        self.losses: dict[int, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(
    root: Any,
    output_dir: str,
    *,
    seed: int = 0,
    kill_at: int | None = None,
    arguments: dict[str, Any] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    resume: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """One Trainer from where the store is to its end, or to the step where it is killed. Has dropout."""
    if isinstance(root, str):
        options.setdefault("retention", KeepBest(2, metric="eval_loss", mode="min") | KeepLatest(2))
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    chosen: dict[str, Any] = {"output_dir": output_dir, "max_steps": 12, "learning_rate": 5e-3, "save_total_limit": 1}
    chosen |= {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, **QUIET, **(arguments or {})}
    callback = CheckpointStoreCallback(root, **options)
    notes = Notes(kill_at)
    trainer = Trainer(
        model,
        TrainingArguments(**chosen),
        train_dataset=texts(1, 40),
        eval_dataset=texts(2, 8),
        callbacks=[*callbacks, callback, notes],
    )
    trainer.train(resume_from_checkpoint=callback.resume() if resume else None)
    with closing(callback.store) as store:
        return {
            "losses": notes.losses,
            "resumed": callback.resumed.step if callback.resumed else None,
            "was_durable": bool(callback.resumed and callback.resumed.is_durable),
            "live": {checkpoint.step: checkpoint.metrics.get("eval_loss") for checkpoint in store},
            "files": {
                checkpoint.step: {receipt.name: receipt.rank for receipt in checkpoint.files} for checkpoint in store
            },
            "metrics": store.latest().metrics,  # type: ignore[union-attr]
            "verified": all(checkpoint.verify().ok for checkpoint in store),
            "left": sorted(os.listdir(output_dir)),
        }


def whole_then_killed(root: str, options: dict[str, Any], kill_at: int, tier: dict[str, Any] | None = None) -> None:
    """An uninterrupted run, whose result goes to a file, then one that is killed."""
    result = fit(f"{root}/whole", f"{root}/whole-out", **options)
    torch.save(result, f"{root}/whole-{os.environ['RANK']}.pt")
    fit(f"{root}/killed", f"{root}/killed-out", **options, **on_node(root, tier), kill_at=kill_at)


def resumed(
    root: str, options: dict[str, Any], tier: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The uninterrupted run's result, and that of a run with other initial weights, and another disk, that resumes."""
    whole = torch.load(f"{root}/whole-{os.environ['RANK']}.pt", weights_only=False)
    return whole, fit(f"{root}/killed", f"{root}/resumed-out", **options, **on_node(root, tier), seed=7)


def on_node(root: str, tier: dict[str, Any] | None) -> dict[str, Any]:
    """With a tier: each process is a node of its own, which has a disk and a cache."""
    if tier is None:
        return {}
    node = f"node{os.environ['RANK']}"
    os.environ["CKPTSTORE_CACHE_DIR"] = f"{root}/cache-{node}"
    return {"fast": FastTier(f"{root}/{node}", node=node, **tier)}


def best_on_a_new_disk(root: str, retention: Any) -> tuple[list[str], bool]:
    """Stop after two checkpoints of which the first is the best, lose the disk, and train to the end with a rate of 0.
    Return the directories that are left, and if the model is that of the first checkpoint."""
    arguments = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    options = {"retention": retention, "missing": "worst"}
    fit(f"{root}/store", f"{root}/first", arguments={**arguments, "max_steps": 6}, **options)
    with open_store(f"{root}/store", group="solo") as store:
        had = store.entries()[0].checkpoint
        with had.as_directory() as path:
            first = GPT2LMHeadModel.from_pretrained(Path(path)).state_dict() if had.step == 3 else {}
    if dist.is_initialized():
        dist.barrier()
    if os.environ.get("RANK", "0") == "0":
        shutil.rmtree(f"{root}/first")
    if dist.is_initialized():
        dist.barrier()
    kept: list[Any] = []
    found = fit(f"{root}/store", f"{root}/second", arguments=arguments, callbacks=[KeepModel(kept)], seed=7, **options)
    last = kept[0].state_dict()
    return found["left"], bool(first) and all(torch.equal(last[name], tensor) for name, tensor in first.items())


class KeepModel(TrainerCallback):
    """Hands out the model of the end."""

    def __init__(self, kept: list[Any]) -> None:
        self.kept = kept

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.kept.append(model)


def on_disks_of_their_own(root: str, options: dict[str, Any]) -> dict[str, Any]:
    """Each process with an output directory that no other sees, as on nodes without a shared disk."""
    rank = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"
    return fit(f"{root}/store", f"{root}/disk-{rank}", **options, arguments={"save_on_each_node": True})


def weights_of(root: str) -> dict[str, float]:
    """The sum of each tensor of the latest checkpoint, as transformers reads its directory."""
    with open_store(root) as store:
        checkpoint: Any = store.latest()
        with checkpoint.as_directory() as path:
            model = GPT2LMHeadModel.from_pretrained(Path(path))
    return {name: tensor.sum().item() for name, tensor in model.state_dict().items()}


def damaged(root: str) -> list[str]:
    """What comes of a missing output directory of one rank, of a disk without links, and of a checkpoint of state."""
    found = []
    (Path(root) / "out").mkdir(parents=True)

    def refused(action: Any) -> None:
        try:
            action()
        except CkptstoreError as error:
            found.append(str(error))

    class Elsewhere(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            args.output_dir = f"{root}/nothing-here"

    class NoLinks(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            Path(args.output_dir, "_ckptstore-upload-00000").write_text("in the way")

    refused(lambda: fit(f"{root}/a", f"{root}/out", callbacks=[Elsewhere()]))
    refused(lambda: fit(f"{root}/b", f"{root}/out", callbacks=[NoLinks()], asynchronous=True))
    with open_store(f"{root}/c") as store:
        store.save(3, {"epoch": 1})
    refused(lambda: fit(f"{root}/c", f"{root}/out"))
    refused(lambda: fit(f"{root}/d", f"{root}/out", max_failures=1))
    return found


def saves_beside(root: str) -> tuple[list[int], list[str]]:
    """The steps in the order of their commits, and what was raised, when a user saves in the store of an asynchronous
    callback too: a state while the files of step 3 are stored, and one while those of step 6 fail on rank 1."""
    stores: list[CheckpointStore] = []
    overtaken, is_held, raised = threading.Event(), threading.Event(), list[str]()

    def hook(call: Call) -> None:
        if call.key.startswith("checkpoints/step-0000001003"):
            overtaken.set()
        if call.key.startswith("checkpoints/step-0000000003") and not is_held.is_set():
            is_held.set()
            overtaken.wait(1.0)  # a save that does not wait for this one takes less
        if call.key.startswith("checkpoints/step-0000000006") and os.environ["RANK"] == "1":
            raise StorageFull("no room")

    def opened() -> CheckpointStore:
        stores.append(with_faults(open_store(f"{root}/store", retention=KeepLatest(9)), hook))
        return stores[-1]

    class Beside(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (3, 6):
                try:
                    stores[-1].save(1000 + state.global_step, {"epoch": state.global_step})
                except CkptstoreError as error:
                    raised.append(f"{type(error).__name__} {error.step} {error.rank}")

    found = fit(opened, f"{root}/out", callbacks=[Beside()], arguments={"max_steps": 7}, asynchronous=True)
    return list(found["live"]), raised


def evaluated_seldom(root: str) -> dict[int, list[str]]:
    """The metrics of each checkpoint of a run that saves oftener than it evaluates."""
    fit(f"{root}/store", f"{root}/out", arguments={"eval_steps": 6}, retention=KeepLatest(9))
    with open_store(f"{root}/store") as store:
        return {checkpoint.step: sorted(checkpoint.metrics) for checkpoint in store}


def forgotten(root: str) -> tuple[list[tuple[int, int]], list[str]]:
    """What is heard of a second run that begins anew, and of one with another store beside files of the first."""
    heard: list[Event] = []
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckptstore.transformers").addHandler(handler)
    short = {"max_steps": 6, "eval_strategy": "no"}
    with listening(heard.append):
        for name in ("first", "second"):
            fit(f"{root}/store", f"{root}/{name}", arguments=short, resume=name == "first", retention=KeepLatest(2))
    told = [(event.step, event.latest_step) for event in heard if isinstance(event, ResumeForgotten)]
    more = {**short, "max_steps": 1, "save_total_limit": 9}
    fit(f"{root}/other", f"{root}/first", arguments=more, retention=KeepLatest(2))
    return told, logged


class AtStep(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.action()


def preempted(root: str) -> list[int]:
    """The steps in the store after Trainer has written a checkpoint on SIGTERM, by its own means."""
    from transformers import trainer_jit_checkpoint as jit

    managers: list[Any] = []
    setup = jit.CheckpointManager.setup_signal_handler
    jit.CheckpointManager.setup_signal_handler = lambda self: (managers.append(self), setup(self))
    request = AtStep(5, lambda: setattr(managers[0], "is_checkpoint_requested", True))
    arguments = {"save_steps": 4, "enable_jit_checkpoint": True, "eval_strategy": "no"}
    found = fit(f"{root}/store", f"{root}/out", arguments=arguments, callbacks=[request], retention=KeepLatest(9))
    return sorted(found["live"])


def pushed(root: str) -> list[str]:
    """The files that Trainer would push to the Hub while a save is in flight."""
    from huggingface_hub import HfApi

    found: list[str] = []

    def hook(call: Call) -> None:
        if call.key.startswith("checkpoints/step-0000000003") and not found:
            listed = HfApi()._prepare_upload_folder_additions(f"{root}/out", "", ignore_patterns=["_*", "checkpoint-*"])
            found[:] = [item.path_in_repo for item in listed] or ["none"]

    def opened() -> CheckpointStore:
        return with_faults(open_store(f"{root}/store", retention=KeepLatest(9)), hook)

    Path(f"{root}/out/_ckptstore-upload-00007").mkdir(parents=True)  # of a rank that was killed
    fit(opened, f"{root}/out", arguments={"max_steps": 4, "eval_strategy": "no"}, asynchronous=True)
    return [*found, *(name for name in os.listdir(f"{root}/out") if "ckptstore" in name)]


def best_of_a_resumed_run(root: str) -> dict[str, Any]:
    """The best step and its directory as a run begins that goes on: from nodes alone, with a torn directory of that
    step, and where nothing has it any more."""
    seen: dict[str, Any] = {}
    arguments = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    arguments |= {"max_steps": 6, "save_total_limit": None}

    class Look(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if name not in seen:
                path = Path(state.best_model_checkpoint or "none") / "model.safetensors"
                seen[name] = state.best_global_step, path.is_file() and path.stat().st_size > 1000

    for name, options in (
        ("fast", {"fast": FastTier(f"{root}/node", keep=2, drain=KeepEvery(steps=1000))}),
        ("torn", {"retention": KeepLatest(9)}),
        ("gone", {"retention": KeepLatest(1)}),
    ):
        callbacks = [AtStep(4, _stop)] if name == "fast" else []
        how = {"missing": "worst", **options}
        with suppress(KeyboardInterrupt):
            fit(f"{root}/{name}", f"{root}/{name}-1", arguments=arguments, callbacks=callbacks, **how)
        out = Path(f"{root}/{name}-2")
        if name == "torn":
            shutil.copytree(f"{root}/{name}-1/checkpoint-3", out / "checkpoint-3")
            (out / "checkpoint-3/model.safetensors").write_bytes(b"torn")
        more = {**arguments, "max_steps": 9}
        fit(f"{root}/{name}", str(out), arguments=more, callbacks=[Look()], **how)
    return seen


def _stop() -> None:
    raise KeyboardInterrupt
