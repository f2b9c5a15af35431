"""Writers of folders as trainers for reinforcement learning write them: which file comes when, what is renamed, when
the tracker is written, what of an older checkpoint is deleted.

The orders were read from the sources of verl 0.9.1, and of SkyRL, NeMo-RL, prime-rl and slime of August 2026.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ckptstore.tools.run.folders import Rules
from tests.folders.test_finished_property import tensors, zipped
from tests.folders.writers import Kind, World

Saves = Callable[[World, int], Iterator[None]]
RANKS = 2
VERL_TRACKER, SKYRL_TRACKER = "latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt"
PATIENT = Rules(quiet_seconds=1e9)


class Writing:
    """The files of a checkpoint that is being written; the model learns of the state that is whole."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.files = world, name, dict[str, bytes]()
        world.whole_now.pop(name, None)

    def put(self, file: str, data: bytes | None = None, *, is_last: bool = False) -> Iterator[None]:
        """Write one file of it, with pauses. From the last one on an agent may take the checkpoint."""
        if data is None:
            text = "".join(self.world.random.choices("abc", k=self.world.random.randint(1, 300)))
            data = tensors(text) if file.endswith(".safetensors") else zipped(1, text)
        self.files[f"{self.name}/{file}"] = data
        if is_last:
            self.may_be_whole()
        path = self.world.folder / self.name / file
        if file.endswith((".pt", ".safetensors")):
            yield from self.world.write(path, data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.with_name(f"{path.name}.tmp") if path.name in (".metadata", "ckpt_contents.json") else path
        with target.open("wb", buffering=0) as opened:
            yield
            opened.write(data)
        yield
        target.rename(path)
        yield

    def may_be_whole(self, name: str = "") -> None:
        """Note that from now on an agent may take it as it is."""
        files = {f"{name or self.name}{file.removeprefix(self.name)}": data for file, data in self.files.items()}
        self.world.wholes.setdefault(name or self.name, []).append(files)

    def must_be_whole(self, name: str = "") -> None:
        """Note that everything that shows its end is there."""
        self.world.whole_now[name or self.name] = self.world.wholes[name or self.name][-1]
        self.world.saved.append(name or self.name)


def name_it(world: World, tracker: str, step: int) -> Iterator[None]:
    """Write a tracker as `open(..., "w")` does: it is empty first."""
    with (world.folder / tracker).open("w") as file:
        yield
        file.write(str(step))
    yield


def delete(world: World, name: str, *parts: str) -> Iterator[None]:
    """Delete an older checkpoint, or parts of it alone, file by file."""
    world.whole_now.pop(name, None)
    world.saved.remove(name)
    for above in [world.folder / name / part for part in parts] or [world.folder / name]:
        for path in sorted((it for it in above.rglob("*") if it.is_file()), reverse=True):
            path.unlink()
            yield
        shutil.rmtree(above, ignore_errors=True)
        yield


def fsdp(writing: Writing, part: str) -> Iterator[None]:
    for rank in range(RANKS):
        for what in ("model", "optim", "extra_state"):
            yield from writing.put(f"{part}{what}_world_size_{RANKS}_rank_{rank}.pt")
    yield from writing.put(f"{part}huggingface/config.json", b"{}")
    yield from writing.put(f"{part}fsdp_config.json", b"{}")


def distributed(writing: Writing, where: str, *, is_last: bool = False) -> Iterator[None]:
    """Write what Megatron's dist_checkpointing writes into a directory, in its order."""
    for rank in range(RANKS):
        yield from writing.put(f"{where}__{rank}_0.distcp", b"shard" * (rank + 1))
    yield from writing.put(f"{where}.metadata", b"m")
    yield from writing.put(f"{where}metadata.json", b"{}", is_last=is_last)


def megatron(writing: Writing, part: str, *, is_last: bool = False) -> Iterator[None]:
    """Write the three directories of verl's Megatron backend, with the list that comes last."""
    for what in ("model", "optimizer", "extra"):
        yield from distributed(writing, f"{part}{what}/dist_ckpt/")
    yield from writing.put(f"{part}ckpt_contents.json", b"{}", is_last=is_last)


def verl_fsdp(world: World, step: int, *, parts: Sequence[str], keep: int, is_named: bool = True) -> Iterator[None]:
    """FSDP and VeOmni; `checkpoint.async_save` of the actor has no effect there but that nothing is named."""
    writing = Writing(world, f"global_step_{step}")
    for part in parts:
        old = [it for it in world.saved if (world.folder / it / part).exists()]
        if keep > 1 and len(old) >= keep:
            yield from delete(world, old[0], part)
        yield from fsdp(writing, part)
        if keep == 1 and old:
            world.saved += old[:1] if part != parts[-1] else []  # the critic of the same one goes later
            yield from delete(world, old[0], part)
    yield from writing.put("data.pt", is_last=True)
    if is_named:
        yield from name_it(world, VERL_TRACKER, step)
    writing.must_be_whole()


def verl_megatron(world: World, step: int, *, parts: Sequence[str]) -> Iterator[None]:
    writing = Writing(world, f"global_step_{step}")
    for part in parts:
        yield from writing.put(f"{part}transformer_config.json", b"{}")
        yield from megatron(writing, part)
    yield from writing.put("data.pt")
    writing.may_be_whole()
    yield from name_it(world, VERL_TRACKER, step)
    writing.must_be_whole()


def verl_megatron_late(world: World, step: int, *, parts: Sequence[str], named_first: bool) -> Iterator[None]:
    """Asynchronous: the shards come after the driver is through. Each part names the step when its own are written;
    the fully asynchronous trainer names it before."""
    writing = Writing(world, f"global_step_{step}")
    for part in parts:
        yield from writing.put(f"{part}transformer_config.json", b"{}")
    yield from writing.put("data.pt")
    if named_first:
        yield from name_it(world, VERL_TRACKER, step)
    for part in parts:
        yield from megatron(writing, part, is_last=part == parts[-1])
        yield from name_it(world, VERL_TRACKER, step)
    writing.must_be_whole()


def verl_sft(world: World, step: int) -> Iterator[None]:
    writing = Writing(world, f"global_step_{step}")
    if len(world.saved) == 2:
        yield from delete(world, world.saved[0])
    yield from fsdp(writing, "")
    yield from writing.put("data_0.pt")
    writing.may_be_whole()
    partial_name = world.folder / f"{VERL_TRACKER}.tmp"
    partial_name.write_text(str(step))
    yield
    partial_name.rename(world.folder / VERL_TRACKER)
    yield
    writing.must_be_whole()


def skyrl(world: World, step: int, *, is_late: bool = False, is_fully_async: bool = False) -> Iterator[None]:
    """`is_late`: Megatron with `async_dist_ckpt_save`, which names a step before its shards are written."""
    writing = Writing(world, f"global_step_{step}")
    if is_late:
        yield from writing.put("policy/common.pt")
        yield from writing.put("policy/huggingface/config.json", b"{}")
    else:
        yield from fsdp(writing, "policy/")
    yield from writing.put("data.pt")
    yield from writing.put("trainer_state.pt")
    if not is_late and not is_fully_async:
        writing.may_be_whole()
    yield from name_it(world, SKYRL_TRACKER, step)
    while len(world.saved) > 1:
        yield from delete(world, world.saved[0])
    if is_late:
        yield from distributed(writing, "policy/", is_last=True)
    if is_fully_async:
        yield from writing.put("fully_async_state.pt", is_last=True)
    writing.must_be_whole()


def nemo_rl(world: World, step: int, *, is_megatron: bool) -> Iterator[None]:
    """Written as tmp_step_N, then renamed."""
    writing = Writing(world, f"tmp_step_{step}")
    yield from writing.put("training_info.json", b'{"total_steps": %d}' % step)
    yield from writing.put("config.yaml", b"a: 1")
    if is_megatron:
        yield from distributed(writing, "policy/weights/iter_0000000/")
        yield from writing.put(f"policy/weights/{VERL_TRACKER}", b"0")
    else:
        yield from writing.put("policy/weights/model/model-00001-of-00001.safetensors")
        yield from distributed(writing, "policy/optimizer/optim/")
    yield from writing.put("train_dataloader.pt")
    name = f"step_{step}"
    writing.may_be_whole(name)
    (world.folder / writing.name).rename(world.folder / name)
    yield
    writing.must_be_whole(name)
    while len(world.saved) > 2:
        yield from delete(world, world.saved[0])


def prime_rl(world: World, step: int, *, is_sft: bool) -> Iterator[None]:
    """The trainer and the orchestrator write beside each other."""
    writing = Writing(world, f"step_{step}")

    def train(*, is_last: bool) -> Iterator[None]:
        if is_sft:
            yield from writing.put("trainer/dataloader/rank_0.pt")
        for rank in range(RANKS):
            yield from writing.put(f"trainer/__{rank}_0.distcp", b"shard" * (rank + 1))
        yield from writing.put("trainer/.metadata", b"m", is_last=is_last)

    def orchestrate(*, is_last: bool) -> Iterator[None]:
        yield from writing.put("orchestrator/progress.pt", is_last=is_last)

    writers = [train] if is_sft else world.random.sample([train, orchestrate], 2)
    for write in writers:
        yield from write(is_last=write is writers[-1])
    writing.must_be_whole()
    while len(world.saved) > 1:
        yield from delete(world, world.saved[0])


def slime(world: World, step: int) -> Iterator[None]:
    """Megatron-LM's folder, and the place in the data set beside it, which comes last."""
    writing = Writing(world, f"iter_{step:07}")
    yield from distributed(writing, "")
    writing.may_be_whole()
    yield from name_it(world, VERL_TRACKER, step)
    path = world.folder / f"rollout/global_dataset_state_dict_{step}.pt"
    yield from world.write(path, zipped(step, "offset"))
    writing.must_be_whole()


def _global(step: int) -> str:
    return f"global_step_{step}"


def _kind(save: Saves, name: Callable[[int], str] = _global, rules: Rules = PATIENT) -> Kind:
    return Kind(name, is_directory=True, save=save, rules=rules)


BOTH = ("actor/", "critic/")
SLIME_RULES = Rules(quiet_seconds=1e9, beside=("rollout/global_dataset_state_dict_{step}.pt",))
RL_KINDS = {
    "verl": _kind(partial(verl_fsdp, parts=("actor/",), keep=2)),
    "verl, one kept": _kind(partial(verl_fsdp, parts=BOTH, keep=1)),
    "verl, async_save without Megatron": replace(
        _kind(partial(verl_fsdp, parts=BOTH, keep=2, is_named=False), rules=Rules(quiet_seconds=1e-9)), is_sure=False
    ),
    "verl, Megatron": _kind(partial(verl_megatron, parts=BOTH)),
    "verl, Megatron, asynchronous": _kind(partial(verl_megatron_late, parts=BOTH, named_first=False)),
    "verl, Megatron, fully asynchronous": _kind(partial(verl_megatron_late, parts=("actor/",), named_first=True)),
    "verl, SFT": _kind(verl_sft),
    "skyrl": _kind(skyrl),
    "skyrl, Megatron, asynchronous": _kind(partial(skyrl, is_late=True)),
    "skyrl, fully asynchronous": _kind(
        partial(skyrl, is_fully_async=True), rules=Rules(quiet_seconds=1e9, marker="fully_async_state.pt")
    ),
    "nemo-rl, Megatron": _kind(partial(nemo_rl, is_megatron=True), lambda step: f"step_{step}"),
    "nemo-rl": _kind(partial(nemo_rl, is_megatron=False), lambda step: f"step_{step}"),
    "prime-rl": _kind(partial(prime_rl, is_sft=False), lambda step: f"step_{step}"),
    "prime-rl, SFT": _kind(partial(prime_rl, is_sft=True), lambda step: f"step_{step}"),
    "slime": _kind(slime, lambda step: f"iter_{step:07}", SLIME_RULES),
}
"""The trainers, by name."""
