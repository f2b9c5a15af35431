"""Find the checkpoints of all shapes in a folder."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from glob import escape

from ckptstore.errors import InvalidName
from ckptstore.format.layout import check_name, check_user_name
from ckptstore.tools.run.folders.candidate import MAX_BESIDE_BYTES, Beside, Prospect, Sight, last_number, outdated
from ckptstore.tools.run.folders.shape import Shape, known_shapes
from ckptstore.tools.run.folders.snapshot import LEADS_OUT, Sign
from ckptstore.tools.run.folders.whole import json_in

_WEIGHTS = re.compile(
    r".*\.(pt|pth|bin|ckpt|safetensors|distcp|pth\.tar|keras|h5|hdf5|npz|npy|pkl|pickle|joblib|ubj|msgpack|onnx|nemo)"
)
"""Names of files that may hold weights, for what has no shape."""


def candidates_in(sight: Sight) -> tuple[list[Prospect], tuple[str, ...]]:
    """Return all candidates that are in sight, and what may be a checkpoint and has no shape."""
    claimed: set[str] = set()
    found: list[Prospect] = []

    def claim(new: Iterator[Prospect]) -> None:
        for candidate in new:
            found.append(_with_files_of_the_caller(sight, candidate))
            claimed.add(candidate.name)
            copies = [other for other, it in candidate.beside.items() if it.copy is not None]
            claimed.update(_next_to(candidate.name, other) for other in copies)
            if not candidate.is_directory:
                claimed.update(candidate.path_of(file) for file in candidate.files)

    claim(_patterns(sight, claimed))
    names = [name for name, sign in sight.snapshot.files.items() if sign.link is None or sign.fault == LEADS_OUT]
    known = [name for name in names if _known_file().fullmatch(name)] if names else []
    for shapes, fitting in ((sight.rules.shapes, names), (known_shapes(), known)):
        for shape in shapes:
            if shape.directory is not None:
                claim(_directories(shape, sight, claimed))
            else:
                claim(_files(shape, sight, fitting, claimed))
    return found, _of_no_shape(sight, claimed)


@cache
def _known_file() -> re.Pattern[str]:
    """Return an expression for the files of all known shapes: most names of a folder fit none."""
    files = [re.sub(r"\(\?P<\w+>", "(?:", shape.file) for shape in known_shapes() if shape.file is not None]
    return re.compile(f"(?:.*/)?(?:{'|'.join(files)})")


def _within(name: str, claimed: set[str]) -> bool:
    """Return True if a name, or a directory above it, is claimed."""
    parts = name.split("/")
    return any("/".join(parts[:end]) in claimed for end in range(1, len(parts) + 1))


def _any(pattern: str, names: Iterator[str] | Sequence[str] | Mapping[str, Sign]) -> bool:
    return any(re.match(pattern, name) for name in names)


def _directories(shape: Shape, sight: Sight, claimed: set[str]) -> Iterator[Prospect]:
    """Yield the directories of a shape, the outer ones first."""
    path = re.compile(f"(?:.*/)?(?:{shape.directory})")
    for name in sorted(sight.snapshot.directories):
        match = path.fullmatch(name)
        if match is None or _within(name, claimed):
            continue
        files = sight.snapshot.below(name)
        if not _is_of(shape, files) or not _has_neighbour(shape, sight, name):
            continue
        yield _directory(shape, sight, name, files, _step_of(shape, match, sight, name))


def _is_of(shape: Shape, files: Mapping[str, Sign]) -> bool:
    if shape.has_not is not None and _any(shape.has_not, files):
        return False
    if shape.has is None:
        return bool(files)
    return _any(shape.has, files) or (bool(shape.begins_with) and set(shape.begins_with).issuperset(files))


def _has_neighbour(shape: Shape, sight: Sight, name: str) -> bool:
    return shape.if_beside is None or _next_to(name, shape.if_beside) in sight.snapshot.files


def _next_to(name: str, other: str) -> str:
    """Return the path of a file beside a name."""
    parent = name.rpartition("/")[0]
    return f"{parent}/{other}" if parent else other


def _step_of(shape: Shape, match: re.Match[str] | None, sight: Sight, name: str) -> int | None:
    own = name.rpartition("/")[2]
    for source in shape.step:
        kind, _, text = source.partition(":")
        if kind == "key":
            step = sight.number(name, text)
        elif kind == "name":
            found = re.search(text, own)
            step = int(found[1]) if found and (found[1] or "").isdecimal() else None
        else:
            step = last_number(own)
        if step is not None:
            return step
    groups = match.groupdict() if match else {}
    texts = (text for group, text in groups.items() if group.startswith("step") and text is not None)
    return next((int(text) for text in texts if text.isdecimal()), None)


def _directory(shape: Shape, sight: Sight, name: str, files: Mapping[str, Sign], step: int | None) -> Prospect:
    own = name.rpartition("/")[2]
    beside, leads, says_exactly = _links_to(sight, name), None, False
    before = files
    if shape.before_marker is not None:
        before = {file: sign for file, sign in files.items() if re.match(shape.before_marker, file)}
    if shape.marker is not None and (text := _no_marker(shape, sight, name, files, step)):
        leads = text
    elif shape.marker is not None:
        leads = outdated(shape.marker, files.get(shape.marker), before)
        # A marker of rank 0 alone never comes to other nodes.
        says_exactly = shape.marker in files or not (sight.has_leader or shape.tells_all)
    if shape.tracker is not None:
        named = (sight.text(_next_to(name, shape.tracker)) or "").strip()
        says_exactly = named == own if shape.tracker_has == "name" else named == str(step)
        leads = outdated(shape.tracker, sight.snapshot.files.get(_next_to(name, shape.tracker)), before)
        if sight.has_leader and not says_exactly and not _is_behind(shape, named, step):
            leads = _no_tracker(shape, files, before)
        beside[shape.tracker] = Beside(text=own if shape.tracker_has == "name" else str(step))
    if shape.begun is not None and re.fullmatch(shape.begun, own):
        leads = "it has the name of one that is being written or removed"
    lacks = leads or _lacking_ranks(shape, sight, files) or _lacking_shards(sight, name, files)
    lacks = lacks or (_lacking_parts(shape, files) if sight.has_leader else None)
    return Prospect(
        name=name,
        shape=shape.name,
        step=step,
        is_directory=True,
        files=files,
        beside={**beside, **_small(shape, sight, name, step)},
        lacks=lacks or sight.ends_among({file: f"{name}/{file}" for file in files})[0],
        is_certain=says_exactly and _is_certain(shape, sight, files),
        tells_all=shape.tells_all and says_exactly,
        metrics_place=shape.metrics,
        is_rewritten=shape.is_rewritten,
    )


def _is_certain(shape: Shape, sight: Sight, files: Mapping[str, Sign]) -> bool:
    """Return True if a marker or tracker that names this one shows that all ranks of this node have written."""
    if shape.tells_all:
        return sight.has_leader or shape.tracker is None
    if sight.ranks is None:
        return False
    if shape.counted_by_rank is not None:
        count = sum(re.match(shape.counted_by_rank, file) is not None for file in files)
        return count > 0 if len(sight.ranks) > 1 else count <= 1
    numbered = {int(match[1]) for file in files if (match := re.match(shape.ranked_by or "$^", file))}
    return numbered <= sight.ranks


def _no_marker(shape: Shape, sight: Sight, name: str, files: Mapping[str, Sign], step: int | None) -> str | None:
    """Return a fault of the marker, which only the node of rank 0 has for certain."""
    if not sight.has_leader or shape.marker is None:
        return None
    if shape.marker not in files:
        return None if shape.marker_if and not _any(shape.marker_if, files) else f"{shape.marker} is not there yet"
    if shape.marker_key is None:
        return None
    written = json_in(sight.text(f"{name}/{shape.marker}"))
    if written is None:
        return f"{shape.marker} is not whole yet"
    if not isinstance(written, dict) or written.get(shape.marker_key) != step:
        return f"{shape.marker} is of another step"
    return None


def _is_behind(shape: Shape, named: str, step: int | None) -> bool:
    """Return True if the tracker names a later one."""
    newest = last_number(named) if shape.tracker_has == "name" or named.isdecimal() else None
    return newest is not None and step is not None and step < newest


def _no_tracker(shape: Shape, files: Mapping[str, Sign], before: Mapping[str, Sign]) -> str | None:
    """Return a fault of one that the tracker does not name; None if its own files may show its end."""
    found = [next((file for file in files if _fits_any(file, globs)), None) for globs in shape.untracked]
    if not found or found[0] is None or None in found:
        return f"{shape.tracker} does not name it yet"
    return outdated(found[0], files[found[0]], before)


def _fits_any(file: str, globs: str) -> bool:
    return any(fnmatchcase(file, glob) for glob in globs.split(" | "))


def _lacking_parts(shape: Shape, files: Mapping[str, Sign]) -> str | None:
    """Return what belongs to the files that are there, and is not."""
    for pattern, _, globs in (text.partition(" => ") for text in shape.needs):
        found = (re.fullmatch(pattern, file) for file in files)
        first = {escape(match[1] or "") if match.re.groups else "" for match in found if match}
        for wanted in sorted(globs.replace(r"\1", part) for part in first):
            if not any(sign.size_bytes and _fits_any(file, wanted) for file, sign in files.items()):
                return f"{wanted.replace(' | ', ' or ')} is not there yet"
    return None


def _lacking_ranks(shape: Shape, sight: Sight, files: Mapping[str, Sign]) -> str | None:
    if shape.counted_by_rank is not None:
        count = sum(re.match(shape.counted_by_rank, file) is not None for file in files)
        if count and sight.ranks is not None and count < len(sight.ranks):
            return f"{count} of {len(sight.ranks)} ranks have written their optimizer state"
    if shape.each_rank is None:
        return None
    if not _any(shape.ranked_if or "", files):
        return None if sight.has_leader else "no rank of this node has written yet"
    for rank in sorted(sight.ranks or {0}):
        of_rank = [shape.each_rank.replace("{rank}", str(rank))]
        of_rank += [shape.one_rank] if rank == 0 and shape.one_rank else []
        if not set(of_rank) & set(files):
            return f"{min(of_rank)} is not there yet"
    return None


def _lacking_shards(sight: Sight, name: str, files: Mapping[str, Sign]) -> str | None:
    """Return the first file that an index of a Hugging Face model names, and that is not there."""
    for index in (file for file in files if file.endswith((".safetensors.index.json", ".bin.index.json"))):
        written = json_in(sight.text(f"{name}/{index}"))
        try:
            shards = {check_name(shard) for shard in written["weight_map"].values()}
        except (KeyError, TypeError, AttributeError, InvalidName):
            return f"{index} is not whole yet"
        above = index.rpartition("/")[0]
        missing = sorted(shard for shard in shards if (f"{above}/{shard}" if above else shard) not in files)
        if missing:
            return f"{missing[0]} is not there yet"
    return None


def _links_to(sight: Sight, name: str) -> dict[str, Beside]:
    """Return the links beside a name that lead to it."""
    own = name.rpartition("/")[2]
    others = sight.snapshot.beside(name).items()
    links = {file: sign.link.rstrip("/").rpartition("/")[2] for file, sign in others if sign.link is not None}
    return {file: Beside(link=own) for file, target in links.items() if target == own and not _unnameable(file)}


def _unnameable(file: str) -> str:
    """Return the reason why a file beside a checkpoint cannot come along under its name, "" if it can."""
    try:
        check_user_name(file)
    except InvalidName as error:
        return f"cannot be stored: {error.message}"
    return ""


def _small(shape: Shape, sight: Sight, name: str, step: int | None) -> dict[str, Beside]:
    """Return the small files beside a checkpoint that come along: those of the shape, and the caller's."""
    found = {}
    for file in _fitting(sight, name, (*shape.beside, *sight.rules.beside), step):
        data = None if _why_left_out(sight, name, file) else sight.data(_next_to(name, file))
        if data is not None:
            found[file] = _stored(data)
    return found


def _with_files_of_the_caller(sight: Sight, candidate: Prospect) -> Prospect:
    """Return a candidate that is not whole before the files are there that the caller says it has."""
    if candidate.lacks is not None or not sight.has_leader:
        return candidate
    marker, lacks = sight.rules.marker, None
    if marker is not None and not sight.rules.patterns:
        path = f"{candidate.name}/{marker}" if candidate.is_directory else candidate.name + marker
        lacks = None if path in sight.snapshot.files else f"{marker} is not there yet"
    for glob in sight.rules.beside:
        if "{step}" in glob and not any(_fitting(sight, candidate.name, (glob,), candidate.step)):
            lacks = f"{_of_step(glob, candidate.step)} is not there yet"
    return replace(candidate, lacks=lacks)


def _stored(data: bytes) -> Beside:
    try:
        return Beside(text=data.decode())
    except UnicodeDecodeError:
        return Beside(data=b64encode(data).decode())


def _of_step(glob: str, step: int | None) -> str:
    return glob.replace("{step}", "?" if step is None else str(step))


def _fitting(sight: Sight, name: str, globs: Sequence[str], step: int | None) -> Iterator[str]:
    """Yield the files beside a name, or in directories beside it, that fit one of these, but for links and for itself.
    Where no step is known none fits a glob with one."""
    for glob in globs:
        if "{step}" in glob and step is None:
            continue
        above, _, wanted = _of_step(glob, step).rpartition("/")
        prefix = f"{above}/" if above else ""
        for file, sign in sight.snapshot.beside(_next_to(name, f"{prefix}x")).items():
            if (above or file != name.rpartition("/")[2]) and sign.link is None and fnmatchcase(file, wanted):
                yield prefix + file


def _why_left_out(sight: Sight, name: str, file: str) -> str:
    """Return the reason why a file beside a checkpoint cannot come along, "" if it can."""
    sign = sight.snapshot.files[_next_to(name, file)]
    if fault := _unnameable(file):
        return fault
    if sign.fault or sign.size_bytes > MAX_BESIDE_BYTES:
        return sign.fault or f"has {sign.size_bytes:,} bytes, and at most {MAX_BESIDE_BYTES:,} come along"
    return ""


def unlisted(sight: Sight, candidates: Sequence[Prospect]) -> dict[str, str]:
    """Return the directories that cannot be listed and belong to none of these, with the reasons: nobody knows what is
    in them."""
    names = {it.name for it in candidates}
    files = sight.snapshot.files.items()
    return {name: sign.fault for name, sign in files if sign.is_unlisted and not _within(name, names)}


def left_out(sight: Sight, candidates: Sequence[Prospect]) -> dict[str, str]:
    """Return what fits the caller's globs beside these candidates, and cannot come along, with the reasons."""
    globs, own = sight.rules.beside, {file for it in candidates if not it.is_directory for file in it.files}
    places = {(it.parent, it.step if "{step}" in "".join(globs) else None): it.name for it in candidates}
    return {
        _next_to(name, file): why
        for (_, step), name in sorted(places.items(), key=lambda place: place[1])
        for file in _fitting(sight, name, globs, step)
        if file not in own and (why := _why_left_out(sight, name, file))
    }


def _files(shape: Shape, sight: Sight, names: Sequence[str], claimed: set[str]) -> Iterator[Prospect]:
    """Yield the files of a shape among these names, each with what belongs to it."""
    path = re.compile(f"(?:.*/)?(?:{shape.file})")
    found: dict[str, dict[str, int | None]] = {}
    for name in names:
        match = path.fullmatch(name)
        if match is not None and not _within(name, claimed) and _has_neighbour(shape, sight, name):
            found.setdefault(name.rpartition("/")[0], {})[name] = _step_of(shape, match, sight, name)
    for parent in sorted(found):
        yield from _files_of(shape, sight, parent, found[parent])


def _files_of(shape: Shape, sight: Sight, parent: str, steps: Mapping[str, int | None]) -> Iterator[Prospect]:
    """Yield the candidates of one directory. A copy of the same step as another file belongs to that one."""
    whole = [name for name in steps if not sight.snapshot.files[name].fault]
    copies = {name for name in whole if shape.duplicates and re.fullmatch(shape.duplicates, name.rpartition("/")[2])}
    named = {step for name, step in steps.items() if name not in copies}
    newest = max((step for step in named if step is not None), default=None)
    copy_is_behind = any(steps[name] is None or (newest is not None and steps[name] < newest) for name in copies)  # type: ignore[operator]
    taken: set[str] = set()
    for name, step in sorted(steps.items()):
        if name in taken or (name in copies and step in named):
            continue
        own = name.rpartition("/")[2]
        same = [file for file in shape.same if file != own and sight.is_copy(name, _next_to(name, file))]
        second_names = {file: Beside(copy=own) for file in same}
        members = {name} | {copy for copy in copies if steps[copy] == step is not None}
        members -= {_next_to(name, other) for other in second_names}
        if shape.together is not None:
            others = sight.snapshot.beside(name)
            members |= {_next_to(name, other) for other in others if _is_together(shape.together, other, step)}
        if shape.marker is not None and (marker := _next_to(name, shape.marker)) in sight.snapshot.files:
            members.add(marker)
        taken |= members
        files = {member.rpartition("/")[2]: sight.snapshot.files[member] for member in sorted(members)}
        lacks, is_evident = sight.ends_among({file: f"{parent}/{file}" if parent else file for file in files})
        if shape.marker is not None:
            behind = outdated(shape.marker, files.get(shape.marker), files)
            lacks = lacks or (behind if shape.marker in files else f"{shape.marker} is not there yet")
        yield Prospect(
            name=name,
            shape=shape.name,
            step=step,
            is_directory=False,
            files=files,
            lacks=lacks,
            beside={
                **_links_to(sight, name),
                **second_names,
                **_tracker_of(shape, sight, name),
                **_small(shape, sight, name, step),
            },
            is_certain=is_evident and not (copy_is_behind and step == newest),
            metrics_place=shape.metrics,
            is_rewritten=shape.is_rewritten or step is None,
        )


def _is_together(pattern: str, file: str, step: int | None) -> bool:
    match = re.fullmatch(pattern, file)
    if match is None or "step" not in match.groupdict():
        return match is not None
    return step is not None and match["step"].isdecimal() and int(match["step"]) == step


def _tracker_of(shape: Shape, sight: Sight, name: str) -> dict[str, Beside]:
    """Return the tracker beside a file, with the path that it has, as it leads to this one: by now it may lead on."""
    text = sight.text(_next_to(name, shape.tracker)) if shape.tracker is not None else None
    if shape.tracker is None or text is None:
        return {}
    return {shape.tracker: Beside(text="".join(text.strip().rpartition("/")[:2]) + name.rpartition("/")[2])}


def _patterns(sight: Sight, claimed: set[str]) -> Iterator[Prospect]:
    """Yield what the caller's patterns fit, directories and files."""
    rules = sight.rules
    for name in sorted({*sight.snapshot.directories, *sight.snapshot.files}) if rules.patterns else ():
        own = name.rpartition("/")[2]
        pattern = next((it for it in rules.patterns if _fits(name, it)), None)
        if pattern is None or _within(name, claimed):
            continue
        is_directory, marker = name in sight.snapshot.directories, rules.marker
        if not is_directory and marker is not None and name.endswith(marker):
            continue
        if not is_directory and sight.snapshot.files[name].is_second_name:
            continue
        files = sight.snapshot.below(name) if is_directory else {own: sight.snapshot.files[name]}
        beside = _links_to(sight, name)
        lacks = None if files else "it is empty"
        if marker is not None and not lacks:
            path = f"{name}/{marker}" if is_directory else name + marker
            lacks = outdated(marker, sight.snapshot.files.get(path), files)
            if path not in sight.snapshot.files:
                lacks = f"{marker} is not there yet"
            elif not lacks and not is_directory:
                beside[own + marker] = Beside(text=sight.text(path) or "")
        step, is_exact = rules.step_of(name, pattern)
        if step is None and not is_directory:
            numbers = (sight.number(name, key) for key in _STEP_KEYS)
            step = next((number for number in numbers if number is not None), None)
            is_exact = False
        ends, is_evident = sight.ends_among({file: f"{name}/{file}" if is_directory else name for file in files})
        yield Prospect(
            name=name,
            shape="pattern",
            step=step,
            is_exact=is_exact,
            is_directory=is_directory,
            files=files,
            beside={**beside, **_small(_OWN, sight, name, step)},
            lacks=lacks or ends,
            is_certain=marker is not None or (is_evident and not is_directory),
            is_rewritten=last_number(own) is None and not is_exact,
        )


_OWN = Shape(name="pattern", project="")
_STEP_KEYS = ("global_step", "iter_num", "step", "epoch")
"""The keys of a file of torch.save that may have its step."""


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("/"), pattern.replace("{step}", "*").split("/")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _of_no_shape(sight: Sight, claimed: set[str]) -> tuple[str, ...]:
    """Return what may be a checkpoint, since it holds weights, and has no shape."""
    found = set()
    for name, sign in sight.snapshot.files.items():
        own = name.rpartition("/")[2]
        waited_for = [glob for glob in sight.rules.beside if "{step}" in glob]
        if any(_fits("/".join(name.split("/")[-glob.count("/") - 1 :]), glob) for glob in waited_for):
            continue
        if sign.link is None and _WEIGHTS.fullmatch(own) and not own.startswith(".") and not _within(name, claimed):
            parts = name.split("/")
            above = ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
            found.add(next((path for path in above if last_number(path.rpartition("/")[2]) is not None), name))
    return tuple(sorted(found))
