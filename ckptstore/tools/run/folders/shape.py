"""The shapes of checkpoints that projects write: entries of a table, `shapes.toml`.

The order of writes was read from the sources of transformers 5.23, accelerate 1.15, lightning 2.6, deepspeed 0.19,
Megatron-LM, torch 2.13, verl 0.9.1, and SkyRL, NeMo-RL, prime-rl and slime of August 2026.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ckptstore.errors import InvalidInput

_TABLE = Path(__file__).with_name("shapes.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One entry of the table. Names are regular expressions."""

    name: str
    project: str
    """The projects that write it, for people."""
    write: str = ""
    """The folder to give, for people."""
    tested: str = ""
    """The versions of the project that were run under the agent, for people; empty if none was."""
    resume: str = ""
    """The way in which the project goes on from it, for people."""
    directory: str | None = None
    """The last parts of the path of a directory; the group `step` has the step."""
    file: str | None = None
    """The same of a file."""
    has: str | None = None
    """Some file in the directory begins like this."""
    has_not: str | None = None
    """None does."""
    begins_with: tuple[str, ...] = ()
    """The names of files that a directory may have alone when it has just been begun."""
    if_beside: str | None = None
    """The name of a file that must lie beside it."""
    step: tuple[str, ...] = ()
    """The places of the step, the first that has one counts: "name:REGEX", "key:KEY" in a file of torch.save,
    "last number" of the name. Empty: the group `step`. If none has one, the store counts."""
    is_rewritten: bool = False
    """True if one name gets one state after the other, so that each of them is a checkpoint."""
    marker: str | None = None
    """The file in the directory, or beside the file, that is written last."""
    marker_key: str | None = None
    """The key of the marker, a JSON object, whose value is the step."""
    marker_if: str | None = None
    """The marker is missing only where a file begins like this."""
    before_marker: str | None = None
    """The files that are there before the marker or the tracker is written; None: all."""
    tracker: str | None = None
    """The file beside it that leads to the newest one."""
    tracker_has: Literal["name", "step"] = "name"
    untracked: tuple[str, ...] = ()
    """Globs, "A | B" for either. A directory with a file for each of them is finished after the quiet time though the
    tracker does not name it; the first is the file that is written last."""
    needs: tuple[str, ...] = ()
    """The files that belong together on the node of rank 0, as "REGEX => GLOB | GLOB": where one fits the expression,
    another that fits a glob must be there too, and not be empty. `\\1` in a glob is the expression's first group."""
    begun: str | None = None
    """The names of a directory that it has only while it is written or removed."""
    tells_all: bool = False
    """True if the marker or tracker is written after all ranks of all nodes have written."""
    each_rank: str | None = None
    """The file that each rank writes last, with "{rank}"."""
    one_rank: str | None = None
    """The name of that of rank 0, where there is one rank."""
    ranked_if: str | None = None
    """Ranks write such files if a file begins like this."""
    ranked_by: str | None = None
    """The same files with the rank as a group."""
    counted_by_rank: str | None = None
    """The files of which each rank writes one, under names that do not have its number."""
    duplicates: str | None = None
    """Files that may be copies of the newest one, by the step in them."""
    together: str | None = None
    """Files beside it that belong to it; with a group `step` those of the same step."""
    same: tuple[str, ...] = ()
    """The names of files beside it that may be other names or copies of it."""
    beside: tuple[str, ...] = ()
    """The names of small files beside it that come along."""
    metrics: Literal["trainer_state", "name"] | None = None
    is_taken_by_name: bool = False
    """True if the project takes the newest by its name alone, whole or not."""

    @staticmethod
    def of(entry: Mapping[str, Any], *, file: str) -> Shape:
        """Read an entry. Raises InvalidInput."""
        known = {item.name for item in fields(Shape)}
        name = str(entry.get("name") or "?")
        unknown = sorted(set(entry) - known)
        if unknown or not entry.get("name") or (entry.get("directory") is None) == (entry.get("file") is None):
            why = f"there is no field {unknown[0]}" if unknown else "it needs a name, and either directory or file"
            raise InvalidInput(f"The shape {name} of {file} cannot be read: {why}")
        values: dict[str, Any] = {"project": "", **entry}
        for field_name, value in values.items():
            values[field_name] = tuple(value) if isinstance(value, list) else value
            texts = values[field_name] if isinstance(value, list) else ()
            if type(values[field_name]) not in _TYPES[field_name] or not all(isinstance(text, str) for text in texts):
                raise InvalidInput(f"The shape {name} of {file} has a {field_name} of another type: {value!r}")
        for field_name, text, group in _expressions(values):
            try:
                found = re.compile(f"(?:{text})")
            except re.error as error:
                raise InvalidInput(f"The shape {name} of {file} has a bad {field_name}: {error}") from None
            if (group == "one" and found.groups != 1) or (group == "step" and "step" not in found.groupindex):
                wanted = "one pair of brackets, around the step" if group == "one" else "the group (?P<step>…)"
                raise InvalidInput(f"The {field_name} of the shape {name} of {file} needs {wanted}: {text!r}")
        half = [text for text in values.get("needs", ()) if not text.partition(" => ")[2]]
        if half:
            raise InvalidInput(f"The shape {name} of {file} needs {half[0]!r}, which is not of the form REGEX => GLOB")
        unknown_places = [text for text in values.get("step", ()) if not text.startswith(("name:", "key:"))]
        if set(unknown_places) - {"last number"}:
            raise InvalidInput(f"The shape {name} of {file} has its step in {unknown_places[0]!r}, which is no place")
        return Shape(**values)


_REGULAR = (
    "directory",
    "file",
    "has",
    "has_not",
    "marker_if",
    "before_marker",
    "ranked_if",
    "counted_by_rank",
    "begun",
    "duplicates",
    "together",
)
_TYPES: Mapping[str, tuple[type, ...]] = {
    item.name: (bool,) if item.type == "bool" else (tuple,) if str(item.type).startswith("tuple") else (str,)
    for item in fields(Shape)
}


def _expressions(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the regular expressions of an entry: the field, the text, and the groups that it needs."""
    for name in _REGULAR:
        if name in values:
            yield name, values[name], ""
    if "ranked_by" in values:
        yield "ranked_by", values["ranked_by"], "one"
    for text in values.get("needs", ()):
        yield "needs", text.partition(" => ")[0], ""
    for text in values.get("step", ()):
        if text.startswith("name:"):
            yield "step", text.removeprefix("name:"), "one"


def read_shapes(path: Path) -> tuple[Shape, ...]:
    """Read a table of shapes. Raises InvalidInput."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"The shapes of {path} cannot be read: {error}") from None
    entries = table.get("shape")
    if set(table) != {"shape"} or not isinstance(entries, list) or not all(isinstance(it, dict) for it in entries):
        raise InvalidInput(f"{path} is no table of shapes", hint="It has one [[shape]] after the other, and no more")
    return tuple(Shape.of(entry, file=path.name) for entry in entries)


@cache
def known_shapes() -> tuple[Shape, ...]:
    """Return the shapes that are known by name, in the order of their turns."""
    return read_shapes(_TABLE)


def shape_named(name: str) -> Shape | None:
    """Return the first known shape with a name; None for one of the user's, or a pattern."""
    return next((shape for shape in known_shapes() if shape.name == name), None)
