"""The shapes of checkpoints that frameworks write, and how each of them shows that a checkpoint is finished.

Each shape is a function from a look at a folder to the candidates in it. What an earlier shape has claimed is not
offered to a later one: inside a Trainer's checkpoint lie folders of DeepSpeed and of torch's DCP.

The order of writes was read from the sources of transformers 5.23, lightning 2.6, deepspeed 0.19, Megatron-LM and
torch 2.13.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase

from ckptstore.tools.run.folders.candidate import Beside, Prospect, Sight, last_number, outdated
from ckptstore.tools.run.folders.snapshot import Sign

Shape = Callable[[Sight, frozenset[str]], Iterator[Prospect]]
"""Looks at a sight, without the directories and files that are claimed already."""

TRAINER_STATE = "trainer_state.json"
TRAINER_NAME = re.compile(r"(?:.*/)?checkpoint-(\d+)")
_TRAINER_FILES = re.compile(
    r"(model|pytorch_model|optimizer|adapter_model|rng_state|scheduler|trainer_state|global_step)"
)
_FIRST_FILES = frozenset({"config.json", "generation_config.json"})
"""Files that a Trainer may have written, and nothing else yet, when it was ended."""
_RESUMABLE = re.compile(r"(optimizer|scheduler\.pt|rng_state|global_step\d|pytorch_model_fsdp)")
_BEFORE_STATE = re.compile(
    r"(config\.json|(model|pytorch_model|adapter_model)[^/]*\.(safetensors|bin)|training_args\.bin|optimizer|scheduler\.pt"
    r"|rng_state\.pth|global_step\d|pytorch_model_fsdp)"
)
"""Files that are there before trainer_state.json is written. What callbacks add comes after it."""
_NUMBERED_RNG = re.compile(r"rng_state_(\d+)\.pth")
_LAST_CKPT = re.compile(r"last(-v\d+)?\.ckpt")
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp")


def directories(sight: Sight, claimed: frozenset[str], name: re.Pattern[str]) -> Iterator[str]:
    """Yield the directories of that name which nothing has claimed, the shorter names first."""
    for directory in sorted(sight.snapshot.directories):
        if name.fullmatch(directory) and not within(directory, claimed):
            yield directory


def within(name: str, claimed: frozenset[str]) -> bool:
    """Return True if a name, or a directory above it, is claimed."""
    parts = name.split("/")
    return any("/".join(parts[:end]) in claimed for end in range(1, len(parts) + 1))


def torn_in(sight: Sight, directory: str, files: Mapping[str, Sign]) -> str | None:
    """Return the first file of a directory without its end, in words."""
    return sight.torn_among({file: f"{directory}/{file}" for file in files})


def transformers(sight: Sight, claimed: frozenset[str]) -> Iterator[Prospect]:
    """Find `checkpoint-N` of Hugging Face's Trainer, and of what is built on it: TRL, Axolotl.

    Rank 0 writes trainer_state.json last of its own files. Every rank writes its rng_state last, and no barrier stands
    between it and trainer_state.json: both must be there.
    """
    for name in directories(sight, claimed, TRAINER_NAME):
        files = sight.snapshot.below(name)
        if not any(_TRAINER_FILES.match(file) for file in files) and not _FIRST_FILES.issuperset(files):
            continue
        step = int(name.rpartition("-")[2])
        numbered = {int(match[1]) for file in files if (match := _NUMBERED_RNG.fullmatch(file))}
        yield Prospect(
            name=name,
            shape="transformers",
            step=step,
            is_directory=True,
            files=files,
            lacks=_trainer_lacks(sight, name, files, step) or torn_in(sight, name, files),
            is_certain=sight.ranks is not None and numbered <= sight.ranks,
        )


def _trainer_lacks(sight: Sight, name: str, files: Mapping[str, Sign], step: int) -> str | None:
    if sight.has_leader and (lacks := _no_trainer_state(sight.text(f"{name}/{TRAINER_STATE}"), step)):
        return lacks
    if any(_RESUMABLE.match(file) for file in files):
        for rank in sorted(sight.ranks or {0}):
            of_rank = {f"rng_state_{rank}.pth"} | ({"rng_state.pth"} if rank == 0 else set())
            if not of_rank & set(files):
                return f"{min(of_rank)} is not there yet"
    elif not sight.has_leader:
        return "no rank of this node has written yet"
    before = {file: sign for file, sign in files.items() if _BEFORE_STATE.match(file)}
    if lacks := outdated(TRAINER_STATE, files.get(TRAINER_STATE), before):
        return lacks
    for index in (file for file in files if file.endswith(".index.json")):
        if lacks := _lacking_shard(sight.text(f"{name}/{index}"), index, files):
            return lacks
    return None


def _no_trainer_state(text: str | None, step: int) -> str | None:
    if text is None:
        return f"{TRAINER_STATE} is not there yet"
    try:
        written = json.loads(text)
    except ValueError:
        return f"{TRAINER_STATE} is not whole yet"
    if not isinstance(written, dict) or written.get("global_step") != step:
        return f"{TRAINER_STATE} is of another step"
    return None


def _lacking_shard(text: str | None, index: str, files: Mapping[str, Sign]) -> str | None:
    try:
        shards = set(json.loads(text or "")["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{index} is not whole yet"
    above = index.rpartition("/")[0]
    missing = sorted(shard for shard in shards if (f"{above}/{shard}" if above else shard) not in files)
    return f"{missing[0]} is not there yet" if missing else None


def lightning(sight: Sight, claimed: frozenset[str]) -> Iterator[Prospect]:
    """Find `*.ckpt` of Lightning: a file that rank 0 writes elsewhere and moves into place, or a directory of all
    ranks.

    A move from another file system is a copy, so a file is there before it is whole. Its end shows that it is.
    """
    for directory in directories(sight, claimed, re.compile(r".*\.ckpt")):
        files = sight.snapshot.below(directory)
        step = _step_in_name(directory)
        lacks = None if step is not None else "its name has no step"
        lacks = lacks or (None if files else "it is empty") or torn_in(sight, directory, files)
        yield Prospect(
            name=directory,
            shape="lightning",
            step=step,
            is_directory=True,
            files=files,
            lacks=lacks,
            beside=_links_to(sight, directory),
            is_certain=False,
        )
        claimed |= {directory}
    files_here = [name for name in sight.snapshot.files if name.endswith(".ckpt") and not within(name, claimed)]
    for parent in sorted({name.rpartition("/")[0] for name in files_here}):
        yield from _lightning_files(sight, parent, [name for name in files_here if name.rpartition("/")[0] == parent])


def _lightning_files(sight: Sight, parent: str, names: list[str]) -> Iterator[Prospect]:
    """Yield the candidates of one directory. A `last.ckpt` of the same step as another file belongs to that one."""
    real = {name: sign for name in names if (sign := sight.snapshot.files[name]).link is None}
    steps = {name: _step_of(sight, name) for name in real}
    lasts = {name for name in real if _LAST_CKPT.fullmatch(name.rpartition("/")[2])}
    named = {steps[name] for name in real if name not in lasts}
    newest = max((step for step in named if step is not None), default=None)
    of_lasts = [steps[name] for name in lasts]
    last_is_behind = any(step is None or (newest is not None and step < newest) for step in of_lasts)
    for name in sorted(real):
        if name in lasts and steps[name] in named:
            continue
        members = {name} | {last for last in lasts if steps[last] == steps[name] and steps[name] is not None}
        files = {member.rpartition("/")[2]: real[member] for member in sorted(members)}
        lacks = sight.torn_among({file: f"{parent}/{file}" if parent else file for file in files})
        yield Prospect(
            name=name,
            shape="lightning",
            step=steps[name],
            is_directory=False,
            files=files,
            lacks=lacks or (None if steps[name] is not None else "it has no global_step"),
            beside=_links_to(sight, name),
            is_certain=not (last_is_behind and steps[name] == newest),
        )


def _step_of(sight: Sight, name: str) -> int | None:
    within_file = sight.number(name, "global_step")
    return within_file if within_file is not None else _step_in_name(name)


def _step_in_name(name: str) -> int | None:
    found = re.search(r"step=(\d+)", name.rpartition("/")[2])
    return int(found[1]) if found else None


def _links_to(sight: Sight, name: str) -> dict[str, Beside]:
    parent, _, own = name.rpartition("/")
    prefix = f"{parent}/" if parent else ""
    return {
        other[len(prefix) :]: Beside(link=own)
        for other, sign in sight.snapshot.files.items()
        if sign.link is not None and other.rpartition("/")[0] == parent and sign.link.rpartition("/")[2] == own
    }


def patterns(sight: Sight, claimed: frozenset[str]) -> Iterator[Prospect]:
    """Find what the caller's patterns fit, directories and files."""
    marker = sight.rules.marker
    for name in sorted({*sight.snapshot.directories, *sight.snapshot.files}):
        if within(name, claimed) or not any(_fits(name, pattern) for pattern in sight.rules.patterns):
            continue
        is_directory = name in sight.snapshot.directories
        if not is_directory and marker is not None and name.endswith(marker):
            continue
        own = name.rpartition("/")[2]
        files = sight.snapshot.below(name) if is_directory else {own: sight.snapshot.files[name]}
        beside: dict[str, Beside] = {}
        lacks = None if files else "it is empty"
        if marker is not None and not lacks:
            path = f"{name}/{marker}" if is_directory else name + marker
            if path not in sight.snapshot.files:
                lacks = f"{marker} is not there yet"
            else:
                lacks = outdated(marker, sight.snapshot.files[path], files)
            if not lacks and not is_directory:
                beside[own + marker] = Beside(text=sight.text(path) or "")
        step = last_number(own)
        yield Prospect(
            name=name,
            shape="pattern",
            step=step,
            is_directory=is_directory,
            files=files,
            beside=beside,
            lacks=lacks
            or ("its name has no number" if step is None else None)
            or _torn(sight, name, is_directory, files),
            is_certain=marker is not None,
        )
        claimed |= {name}


def _torn(sight: Sight, name: str, is_directory: bool, files: Mapping[str, Sign]) -> str | None:
    return torn_in(sight, name, files) if is_directory else sight.torn_among({name: name})


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def of_no_shape(sight: Sight, claimed: frozenset[str]) -> tuple[str, ...]:
    """Find what looks like a checkpoint, a name with a number that holds weights, and has no shape."""
    found = set()
    for name in sight.snapshot.files:
        if name.endswith(_WEIGHTS) and not within(name, claimed):
            top = next((part for part in _with_parents(name) if last_number(part.rpartition("/")[2]) is not None), None)
            if top is not None:
                found.add(top)
    return tuple(sorted(found))


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split("/")
    return ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
