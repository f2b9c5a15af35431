"""JSON made hostile in every place, and what a reader may make of it. Pure.

What is valid at a place follows from a valid file: the type that it has there, a number from 0 on, a text that is this
one. `Reader.rules` has what the format allows beside that, as words by the path of a place. A list has "*" in the place
of its numbers, unless a rule has one, and so has an object whose keys are names:

    any        any JSON                        text, anytext   any text; with half a pair of surrogates too
    null       null too                        name, node      the name of a file; of a node
    optional   may be left out, or be null     set, sequence   numbers as text
    map        an object whose keys are names  base64          bytes as text
    empty      may be empty                    number          any number: negative, NaN, an infinity
    some       a text, but not the empty one
    repeats    items may come twice            2..9, ..9, 2..  a number from 2 on, up to 9
    like:1     as if 1 were here               keys:node       names that are text of that kind
    whole      a list of just so many items    fixed           nothing else: what is left of it must not be read
    bare       NaN without a tag               free            any JSON in every place of the whole file
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ckptstore.errors import CheckpointDamaged, InvalidName, UnsupportedVersion

LATER = "later-field"
"""The name of a field that no version knows."""
_DEEP = 100_000
_MOST_CHARS = 2_000
"""The longest error that is of use to anybody."""
_RAW = "\0raw\0"
_Path = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A reader of JSON, and a valid file for it."""

    data: bytes
    read: Callable[[bytes], Any]
    """Returns what it has read; None where it says so that it cannot be read."""
    write: Callable[[Any], bytes] | None
    """Writes that again as JSON, always the same; None for what is only looked at, of which only the errors count."""
    rules: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[type[Exception], ...] = (CheckpointDamaged, InvalidName, UnsupportedVersion)
    """The ways in which it may refuse."""
    part: str = ""
    """The beginning of the places that are changed; "" for all, and the file as a whole."""
    calls: str = ""
    """The functions of the package in which it is parsed."""
    most: int = 10_000
    """The number of mutations that are worth their time in every run."""

    def words(self, at: str) -> list[str]:
        """Return the rule of a place."""
        return ["any"] if self.is_free else self.rules.get(at, "fixed" if at == "version" else "").split()

    @property
    def is_free(self) -> bool:
        """True if any JSON may be anywhere."""
        return "free" in self.rules.get("", "")

    @property
    def may_be_bare(self) -> bool:
        """True if NaN and infinities may be as Python writes them."""
        return "bare" in self.rules.get("", "")

    def below(self, at: str, name: str | int) -> str:
        """Return the path of an item of a list or an object, as rules have it."""
        own, every = (f"{at}.{one}" if at else str(one) for one in (name, "*"))
        words = self.words(at)
        is_field = "map" not in words if type(name) is str else "whole" in words and every not in self.rules
        return own if is_field or any(rule == own or rule.startswith(f"{own}.") for rule in self.rules) else every


class Verdict(Enum):
    """What a reader may do. It may always refuse, but for what it has to take."""

    REFUSED = "only refuse it"

    SAME = "take it as if nothing had been changed"
    OTHER = "take it for another value, which it writes and reads again"
    TAKEN = "not refuse it, and take it as if nothing had been changed"


@dataclass(frozen=True, slots=True)
class Mutation:
    """A changed file."""

    what: str
    data: bytes
    verdict: Verdict


TEXTS: dict[str, str] = {
    "": "text set sequence base64",
    "x": "text name node",
    "1": "text name node set sequence number",
    "-1": "text name node",
    "1.5": "text name node",
    "true": "text name node base64",
    "NaN": "text name node",
    "9-1": "text name node sequence",
    "3 3": "text name sequence",
    "1-1": "text name node",
    "1-4/2": "text name",
    "9999999998": "text name node",
    "1-9999999999": "text name node",
    "5*9999999999": "text name",
    "z": "text name node",
    "z!": "text name",
    "٣": "text name node",
    "\0": "text",
    "a\n": "text",
    "..": "text node",
    "../x": "text",
    "/x": "text",
    "a\\b": "text",
    "<b>": "text name",
    "a" * 4_000: "text base64",
    "\ud800": "",
    chr(0xDFFF): "",
}
"""Hostile texts, with the rules by which each is valid."""
_NUMBERS: list[Any] = [True, False, 0, -1, 1, 1.5, -0.0, -1.5, 2**31, 2**63, 2**64, 10**30, 10**4000]
_CONTAINERS: list[Any] = [[], {}, [[]], [None], {"": ""}, {"x": {}}]
_TAGS: list[Any] = [{"$t": "float", "v": "x"}, {"$t": "float", "v": 1}]
_FLOATS: list[Any] = [{"$t": "float", "v": name} for name in ("NaN", "Infinity", "-Infinity")]
_ODD: dict[str, Any] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf, "1e400": math.inf}
"""Numbers that JSON has not, or that no float holds."""
_BROKEN = ["1" * 5000, "tru", "'x'", "0x10", "01", "+1", ".5", "[1,]", '{"a":1,}', '"\t"', '"\\x"', ",", "1 1", "//\n1"]
_NESTED = ["[" * _DEEP + "]" * _DEEP, "[" * _DEEP, '{"a":' * _DEEP + "1" + "}" * _DEEP]
_BYTES = [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\0", b"\x1b"]
"""Bytes that are no text in UTF-8, or no character that JSON has bare."""


def some_mutations(reader: Reader) -> list[Mutation]:
    """Return those that are tried in every run: of items of one list two are changed."""
    found = list(mutations(reader, alike=2))
    return found if len(found) <= reader.most else random.Random(0).sample(found, reader.most)


def mutations(reader: Reader, *, alike: float = math.inf) -> Iterator[Mutation]:
    """Yield every change of one place, in `alike` of the places with one path, and of the file as a whole."""
    document = json.loads(reader.data)
    seen = Counter[str]()
    for path, at, value in _places(reader, document, (), ""):
        seen[at] += 1
        if not at.startswith(reader.part) or seen[at] > alike:
            continue
        words = reader.words(at)
        for new, verdict in _replacements(value, words):
            yield _changed(document, path, at, new, verdict)
        for text in (*_ODD, *(_NESTED if "any" in words and len(path) < 3 else ())):
            is_json = text == "1e400" or (text in _ODD and reader.may_be_bare)
            fits = Verdict.OTHER if text in _ODD and _may_be(_ODD[text], value, words) else Verdict.SAME
            yield _changed(document, path, at, _RAW, fits if is_json else Verdict.REFUSED, text)
        if _is_object(reader, value):
            yield from _of_object(reader, document, path, at, value)
    if not reader.part:
        yield from _of_file(reader, document)


def scrambled(reader: Reader, seed: int) -> Mutation:
    """Return the file with several places changed at once."""
    chance = random.Random(seed)
    document = json.loads(reader.data)
    for _ in range(chance.randint(2, 4)):
        places = [place for place in _places(reader, document, (), "") if place[1].startswith(reader.part)]
        # What is inside of a float that was put there is left: a tag that is not known is not written again.
        path, at, value = chance.choice([place for place in places if place[0][-1:] not in (("$t",), ("v",))])
        new, _ = chance.choice(list(_replacements(value, reader.words(at))))
        document = _put(document, path, new)
    return Mutation(f"seed {seed}", json.dumps(document).encode(), Verdict.OTHER)


def _places(reader: Reader, value: Any, path: _Path, at: str) -> Iterator[tuple[_Path, str, Any]]:
    """Yield every place with its path, the path that rules have, and what is there."""
    yield path, at, value
    if "any" in reader.words(at) and not reader.is_free:
        return
    items: Any = value.items() if _is_object(reader, value) else ()
    for name, item in enumerate(value) if isinstance(value, list) else items:
        yield from _places(reader, item, (*path, name), reader.below(at, name))


def _is_object(reader: Reader, value: Any) -> bool:
    """Return True for what is not one of the floats that JSON lacks."""
    return isinstance(value, dict) and (reader.is_free or "$t" not in value)


def _replacements(value: Any, words: Sequence[str]) -> Iterator[tuple[Any, Verdict]]:
    near: list[Any] = []
    if isinstance(value, str):
        near = [value[:-1], value + value[-1:], value.swapcase(), f" {value}", f"{value[:-2]}_{value[-1:]}"]
    elif isinstance(value, int | float) and -1e300 < value < 1e300:
        low, high = _range(words)
        near = [str(value), float(value), not value, value + 1, int(value), int(low) - 1]
        near += [int(high) + 1] if math.isfinite(high) else []
    elif isinstance(value, list) and value:
        near = [value[:-1], value * 2, value[:1] * (200 if isinstance(value[0], list | dict) else 10_000), value[:1]]
    # A tag that is not known is left as it is, and is not written again.
    tags = [] if {"any", "map"} & {*words} else _TAGS
    for new in itertools.chain([None], _NUMBERS, TEXTS, _CONTAINERS, tags, _FLOATS, near):
        if type(new) is not type(value) or new != value:
            wrong = Verdict.REFUSED if "fixed" in words else Verdict.SAME
            yield new, Verdict.OTHER if _may_be(new, value, words) else wrong


def _range(words: Sequence[str]) -> tuple[float, float]:
    for word in words:
        low, dots, high = word.partition("..")
        if dots:
            return int(low or 0), int(high) if high else math.inf
    return 0, math.inf


def _may_be(new: Any, old: Any, words: Sequence[str]) -> bool:
    """Return True if the format allows a value in the place of another one."""
    if "any" in words or "fixed" in words:
        return "any" in words
    if new is None:
        return not {"null", "optional"}.isdisjoint(words)
    if likes := [word[5:] for word in words if word.startswith("like:")]:
        rest = [word for word in words if not word.startswith("like:")]
        return any(_may_be(new, one, rest) for one in (old, *map(json.loads, likes)))
    if "map" in words:
        return isinstance(new, dict) and (bool(new) or "empty" in words)
    old, new = _as_float(old), _as_float(new)
    if isinstance(new, bool) or isinstance(old, bool):
        return type(new) is type(old)
    if isinstance(new, int | float):
        low, high = _range(words)
        is_of_type = isinstance(old, float) or (isinstance(old, int) and isinstance(new, int))
        return "number" in words or (is_of_type and low <= new <= high and new != math.inf)
    if isinstance(new, str):
        return isinstance(old, str) and _may_be_text(new, words)
    if isinstance(new, list):
        return isinstance(old, list) and (
            "empty" in words if not new else "repeats" in words or ("whole" not in words and new == old[: len(new)])
        )
    return isinstance(old, dict) and old.keys().isdisjoint(new) and "empty" in words


def _as_float(value: Any) -> Any:
    return _ODD.get(value["v"], value) if isinstance(value, dict) and value.get("$t") == "float" else value


def _may_be_text(new: str, words: Sequence[str]) -> bool:
    if not new and "some" in words:
        return False
    kinds = TEXTS.get(new, "text name node set sequence base64").split()  # the others are near to one that is valid
    return "anytext" in words or not {*kinds}.isdisjoint(words) or (not new and "empty" in words)


def _changed(document: Any, path: _Path, at: str, new: Any, verdict: Verdict, raw: str = "") -> Mutation:
    text = json.dumps(_put(document, path, new))
    if new is _RAW:
        text = text.replace(json.dumps(_RAW), raw)
    return Mutation(f"{at or 'all'} = {(raw or json.dumps(new))[:200]}", text.encode(), verdict)


def _put(value: Any, path: _Path, new: Any) -> Any:
    """Return the value with another one at a place."""
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = _put(value[path[0]], path[1:], new)
    return copied


def _of_object(reader: Reader, document: Any, path: _Path, at: str, value: dict[str, Any]) -> Iterator[Mutation]:
    """Yield the object without each of its fields, with one of them twice, and with a field more."""
    own = reader.words(at)
    for key, item in value.items():
        words = reader.words(reader.below(at, key))
        may_lack = "any" in own or "optional" in words or ("map" in own and (len(value) > 1 or "empty" in own))
        without = {name: other for name, other in value.items() if name != key}
        yield _changed(document, path, f"{at} without {key}", without, Verdict.OTHER if may_lack else Verdict.SAME)
        last = json.dumps({**without, key: item})[1:]
        for first in ("x", -1, None):
            raw = f"{{{json.dumps(key)}:{json.dumps(first)},{last}"
            yield _changed(document, path, f"{at} with {key} twice", _RAW, Verdict.SAME, raw)
    if "map" in own:
        kinds = [word[5:] for word in own if word.startswith("keys:")] or ["anytext"]
        item = next(iter(value.values()), 1)
        for name in TEXTS:
            verdict = Verdict.OTHER if _may_be_text(name, kinds) else Verdict.SAME
            yield _changed(document, path, f"{at} with {name[:20]!r}", {**value, name: item}, verdict)
    elif "any" not in own:
        for more in (None, [1, {"a": "é"}]):
            yield _changed(document, path, f"{at} with a later field", {**value, LATER: more}, Verdict.TAKEN)


def _of_file(reader: Reader, document: Any) -> Iterator[Mutation]:
    data, (*_, (path, at, _)) = reader.data, _places(reader, document, (), "")
    for text in (*_BROKEN, *_NESTED):
        yield _changed(document, path, at, _RAW, Verdict.REFUSED, text)
        yield Mutation(f"all is {text[:20]}", text.encode(), Verdict.REFUSED)
    cuts = range(len(data)) if len(data) < 400 else sorted(random.Random(len(data)).sample(range(len(data)), 400))
    wholes = [*(data[:cut] for cut in cuts), data * 2, data + b"x", b"x" + data, data[1:], data + b"\0", b"", b"null"]
    forms = [b"\xef\xbb\xbf" + data, *(data.decode().encode(form) for form in ("utf-16", "utf-32", "utf-16-le"))]
    for number, whole in enumerate(wholes + forms):
        verdict = Verdict.REFUSED if number < len(wholes) else Verdict.SAME
        yield Mutation(f"the whole file, change {number}, {len(whole)} bytes", whole, verdict)
    quoted = data.index(b'"') + 1
    for odd in _BYTES:  # in the name of a field, which may be one that can be left out
        yield Mutation(f"the whole file with {odd!r}", data[:quoted] + odd + data[quoted:], Verdict.OTHER)
    for form in ({"ensure_ascii": False}, {"separators": (" ,\t", "\r: ")}):
        yield Mutation(f"another layout, {form}", json.dumps(document, **form).encode(), Verdict.TAKEN)  # type: ignore[arg-type]


def faults_of(reader: Reader, changes: Iterable[Mutation]) -> list[str]:
    """Return what is wrong with what a reader makes of these mutations."""
    plain = reader.write(reader.read(reader.data)) if reader.write else b""
    found = ((mutation.what, _fault(reader, mutation, plain)) for mutation in changes)
    return [f"{what}: {fault}" for what, fault in found if fault is not None]


def _fault(reader: Reader, mutation: Mutation, plain: bytes) -> str | None:
    try:
        value = reader.read(mutation.data)
    except reader.errors as error:
        if len(str(error)) > _MOST_CHARS:
            return f"raises an error of {len(str(error))} characters"
        value = None
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error)[:200]}"
    if reader.write is None:
        return None
    if value is not None and mutation.verdict is Verdict.REFUSED:
        return "is taken"
    if value is None:
        return "is refused" if mutation.verdict is Verdict.TAKEN else None
    try:
        written = reader.write(value)
        again = reader.write(reader.read(written))
    except Exception as error:
        return f"is taken, and cannot be written and read again: {type(error).__name__}: {str(error)[:200]}"
    if again != written:
        return f"is taken, and is another value when it was written and read again: {written[:300]!r}"
    if mutation.verdict is Verdict.OTHER or _known(written) == _known(plain):
        return None
    return f"is taken for {written[:300]!r}"


def _known(data: bytes) -> str:
    """Return the fields of a file that this version knows, with the types that they have."""
    return json.dumps(_stripped(json.loads(data)), sort_keys=True)


def _stripped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stripped(item) for key, item in value.items() if key != LATER}
    return [_stripped(item) for item in value] if isinstance(value, list) else value
