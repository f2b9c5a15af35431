"""The shapes of what many ranks write together: DeepSpeed, Megatron, verl, SkyRL, torch's DCP."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckptstore.tools.run.folders.candidate import Beside, Prospect, Sight, last_number, outdated
from ckptstore.tools.run.folders.known_shapes import directories, torn_in, within
from ckptstore.tools.run.folders.snapshot import Sign

LATEST = "latest"
ITERATION = "latest_checkpointed_iteration.txt"
GLOBAL_STEP = "latest_ckpt_global_step.txt"
_DEEPSPEED_FILE = re.compile(r"(mp_rank_\d+|(?:bf16_)?zero_pp_rank_\d+|layer_\d+).*_states\.pt")
_OF_RANK_0 = re.compile(r"(mp_rank_00|(?:bf16_)?zero_pp_rank_0_mp_rank_00)_(model|optim)_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_\d+.*_optim_states\.pt")
_TRACKED_NAME = re.compile(r"(?:.*/)?(iter|global_step)_(\d+)")
_TITAN_NAME = re.compile(r"(?:.*/)?step-(\d+)")


def deepspeed(sight: Sight, claimed: frozenset[str]) -> Iterator[Prospect]:
    """Find a tag's directory of DeepSpeed, `global_stepN` as a rule, beside the file `latest` that names the newest.

    Rank 0 writes `latest` when its own files are there, before the others are known to be: with ZeRO each rank's
    optimizer file must be there too.
    """
    tags = sorted(
        directory
        for directory in sight.snapshot.directories
        if not within(directory, claimed)
        and any(_DEEPSPEED_FILE.fullmatch(file) for file in sight.snapshot.below(directory))
    )
    for name in tags:
        parent, _, tag = name.rpartition("/")
        files = sight.snapshot.below(name)
        tracker = f"{parent}/{LATEST}" if parent else LATEST
        of_leader = {file: sign for file, sign in files.items() if _OF_RANK_0.fullmatch(file)}
        step = last_number(tag)
        yield Prospect(
            name=name,
            shape="deepspeed",
            step=step,
            is_directory=True,
            files=files,
            beside={LATEST: Beside(text=tag)},
            lacks=("its name has no step" if step is None else None)
            or _untold(sight, _named(sight, tracker), tag, step)
            or outdated(LATEST, sight.snapshot.files.get(tracker), of_leader)
            or _lacking_ranks(sight, files)
            or torn_in(sight, name, files),
            is_certain=_named(sight, tracker) == tag
            and _tells_its_ranks(sight, sum(_OPTIMIZER.fullmatch(file) is not None for file in files)),
        )


def _named(sight: Sight, tracker: str) -> str:
    """Return what a tracker names, "" where it names nothing."""
    return (sight.text(tracker) or "").strip()


def _untold(sight: Sight, named: str, tag: str, step: int | None) -> str | None:
    """Return a fault if `latest` does not name a tag yet: neither it nor a newer one."""
    if not sight.has_leader:
        return None
    newest = last_number(named)
    if named == tag or (newest is not None and step is not None and step < newest):
        return None
    return f"{LATEST} does not name it yet"


def _tells_its_ranks(sight: Sight, optimizers: int) -> bool:
    """Return True if the files show that every rank of this node has written: one process has, or as many as there
    are."""
    if sight.ranks is None:
        return False
    return optimizers > 0 if len(sight.ranks) > 1 else optimizers <= 1


def _lacking_ranks(sight: Sight, files: Mapping[str, Sign]) -> str | None:
    optimizers = sum(_OPTIMIZER.fullmatch(file) is not None for file in files)
    if optimizers and sight.ranks is not None and optimizers < len(sight.ranks):
        return f"{optimizers} of {len(sight.ranks)} ranks have written their optimizer state"
    return None


def tracked(sight: Sight, claimed: frozenset[str]) -> Iterator[Prospect]:
    """Find `iter_N` of Megatron-LM, `global_step_N` of verl and SkyRL, with the tracker that names the newest.

    It is written after all ranks have written: what it names is whole, and so is all before it.
    """
    for name in directories(sight, claimed, _TRACKED_NAME):
        parent, _, own = name.rpartition("/")
        files = sight.snapshot.below(name)
        if not files:
            continue
        step = int(own.rpartition("_")[2])
        prefix = f"{parent}/" if parent else ""
        is_skyrl = own.startswith("global") and prefix + GLOBAL_STEP in sight.snapshot.files
        file = GLOBAL_STEP if is_skyrl else ITERATION
        named = _named(sight, prefix + file)
        lacks = outdated(file, sight.snapshot.files.get(prefix + file), files)
        if sight.has_leader and not (named.isdigit() and int(named) >= step):
            lacks = f"{file} does not name it yet"
        yield Prospect(
            name=name,
            shape="megatron" if own.startswith("iter") else "skyrl" if is_skyrl else "verl",
            step=step,
            is_directory=True,
            files=files,
            beside={file: Beside(text=str(step))},
            lacks=lacks or torn_in(sight, name, files),
            is_certain=sight.has_leader and named == str(step),
            tells_all=named == str(step),
        )


def dcp(sight: Sight, claimed: frozenset[str]) -> Iterator[Prospect]:
    """Find a directory of torch's DCP, among them `step-N` of torchtitan. `.metadata` is renamed into place at the
    end.

    A node without rank 0 gets no `.metadata`. torchtitan's last save may be a Hugging Face model instead.
    """
    holders = {
        name.rpartition("/")[0]
        for name in sight.snapshot.files
        if name.rpartition("/")[2] == ".metadata" or name.endswith((".distcp", ".safetensors"))
    }
    for name in sorted(holders - {""}):
        is_titan = _TITAN_NAME.fullmatch(name) is not None
        files = sight.snapshot.below(name)
        has_metadata, has_parts = ".metadata" in files, any(file.endswith(".distcp") for file in files)
        step = last_number(name.rpartition("/")[2])
        if within(name, claimed) or step is None or not (has_metadata or has_parts or is_titan):
            continue
        lacks = ".metadata is not there yet" if has_parts and not has_metadata and sight.has_leader else None
        lacks = lacks or outdated(".metadata", files.get(".metadata"), files)
        yield Prospect(
            name=name,
            shape="torchtitan" if is_titan else "dcp",
            step=step,
            is_directory=True,
            files=files,
            lacks=lacks or torn_in(sight, name, files),
            is_certain=has_metadata,
            tells_all=has_metadata,
        )
        claimed |= {name}
