"""Records: the numbered objects of the log, one change each and the state after it (format-v1, "The log"). Pure.

The size of a state: live numbers are written as arithmetic runs of about 12 characters, so a history without
retention, or with a regular one, stays far below 4 KiB however long it is. An irregular set of numbers is bounded only
by its entropy: it is packed, at half a character a number for gaps of 18 to 22, at 1.7 for gaps of 1 to 200, so that
2,400 to 8,000 checkpoints can be live within 4 KiB. The trash costs the same again, until its grace period is over.
Nothing breaks above that; the records are larger.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

from ckptstore.errors import CheckpointDamaged, CkptstoreError, InvalidInput, UnsupportedVersion
from ckptstore.format.changes import (
    EMPTY,
    Annotate,
    Change,
    Claim,
    Commit,
    Noop,
    Pin,
    Remove,
    Restore,
    Resumed,
    StoreState,
    Unpin,
    apply,
)
from ckptstore.format.encoding import (
    FORMAT_VERSION,
    as_list,
    as_number,
    as_object,
    as_text,
    check_seconds,
    dump_json,
    load_object,
    shortened,
)
from ckptstore.format.entry import CheckpointEntry, Thinning
from ckptstore.format.layout import MAX_NUMBER, record_key
from ckptstore.format.manifest import sha256_of
from ckptstore.format.order import MAX_VOIDS, SaveOrder, Void, with_void
from ckptstore.format.ranges import MAX_LISTED, Numbers, decode_sequence, encode_sequence

_KINDS: Mapping[str, type[Change]] = {
    "claim": Claim,
    "checkpoint": Commit,
    "thin": Commit,
    "remove": Remove,
    "pin": Pin,
    "unpin": Unpin,
    "restore": Restore,
    "resumed": Resumed,
    "annotate": Annotate,
    "noop": Noop,
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record of the log. Immutable; `following` makes a new one, `decode` reads one."""

    number: int
    """The number, from 1, without gaps. It is in the name of the object and in the object."""
    change: Change
    previous: str
    """The SHA-256 of the exact bytes of the record before, hexadecimal; "" for the first."""
    write_id: str
    """A random text, new for every record that is built, by which a writer that reads it back recognises its own."""
    created_at: float
    """Seconds since the epoch by the writer's clock; for people, never for decisions."""
    encoded_state: Mapping[str, Any]
    """The state as the record has it. Decoded on the first use of `state`: a listing needs one state, not all."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that this version does not know; kept."""
    stored: bytes | None = field(default=None, repr=False, compare=False)
    """The exact bytes that it was read from; None for a new record."""
    annotated: Mapping[str, float] = field(default_factory=dict, compare=False)
    """The metrics that later records add to the checkpoint, as `LogReader.annotated` has found them. No part of the
    record."""

    @staticmethod
    def following(newest: Record | None, change: Change, *, write_id: str, created_at: float) -> Record:
        """Return the record that makes `change` after `newest`, or as the first one. Raises the errors of `apply`, and
        InvalidInput for a new checkpoint in a directory of another epoch.
        """
        # Garbage collection could take such a directory for dead. Copies of stores by earlier releases have them, so
        # `apply` allows them.
        if isinstance(change, Commit) and change.thins is None and change.begun_in != change.entry.epoch:
            raise InvalidInput(f"{change.entry.attempt} was not begun in the writer epoch {change.entry.epoch}")
        number = newest.number + 1 if newest else 1
        state = apply(newest.state if newest else EMPTY, number, change)
        record = Record(
            number=number,
            change=change,
            previous=newest.sha256 if newest else "",
            write_id=write_id,
            created_at=created_at,
            encoded_state=_state_to_json(state),
        )
        record.__dict__["state"] = state
        return record

    @cached_property
    def state(self) -> StoreState:
        """The state of the store after this record. Raises CheckpointDamaged if the record has no valid one."""
        try:
            return _state_from_json(self.encoded_state, limit=self.number)
        except _NOT_A_RECORD as error:
            _damaged(self.number, error)

    @cached_property
    def entry(self) -> CheckpointEntry:
        """The checkpoint that this record committed, with the metrics of `annotated`. Raises CheckpointDamaged if it is
        a record of another kind."""
        if not isinstance(self.change, Commit):
            raise CheckpointDamaged(f"{record_key(self.number)} commits no checkpoint", file=record_key(self.number))
        entry = self.change.entry
        return replace(entry, metrics={**entry.metrics, **self.annotated}) if self.annotated else entry

    @property
    def place(self) -> int:
        """The place of the checkpoint that this record committed in the order of commits: its number, or that of the
        whole one if it is thinned."""
        if not isinstance(self.change, Commit) or self.change.thins is None:
            return self.number
        return self.state.place(self.number)

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the exact bytes, hexadecimal; the next record has it as `previous`."""
        return sha256_of(self.encode())

    def encode(self) -> bytes:
        """Return the record as bytes: those it was read from, if it was read."""
        return self._encoded if self.stored is None else self.stored

    @cached_property
    def _encoded(self) -> bytes:
        kind = next(name for name, cls in _KINDS.items() if isinstance(self.change, cls))
        if isinstance(self.change, Commit) and self.change.thins is not None:
            kind = "thin"
        text = dump_json(
            {
                **self.extra,
                "version": FORMAT_VERSION,
                "number": self.number,
                "kind": kind,
                "change": _change_to_json(self.change),
                "previous": self.previous,
                "write_id": self.write_id,
                "created_at": self.created_at,
                "state": dict(self.encoded_state),
            },
            what="record",
        )
        return sealed(text)

    def to_wire(self) -> list[Any]:
        """Return values from which `from_wire` makes the record in another process, `annotated` included."""
        return [self.number, self.encode(), dict(self.annotated)]

    @staticmethod
    def from_wire(value: Sequence[Any]) -> Record:
        """Return the record of `to_wire`."""
        number, data, annotated = value
        record = Record.decode(data, number)
        return replace(record, annotated=annotated) if annotated else record

    @staticmethod
    def decode(data: bytes, number: int) -> Record:
        """Read the record with that number, and check it; its state is checked on first use.

        Raises CheckpointDamaged if it is torn or not that record, UnsupportedVersion if it is from a newer version or
        carries a change that this version does not know.
        """
        seal = _SEAL.match(data)
        if seal is None or sha256_of(data[seal.end() :]) != seal[1].decode():
            if data.startswith(b'{"change":'):  # the first field, until records had a digest
                _damaged(number, ValueError("a development version before format version 1 wrote it"))
            _damaged(number, ValueError("its bytes are not those that were written"))
        value = load_object(data, file=record_key(number))
        try:
            value.pop("version")
            value.pop(_SEAL_FIELD)
            if as_number(value.pop("number")) != number or not 1 <= number <= MAX_NUMBER:
                raise ValueError("it carries another number")
            kind, encoded_state = as_text(value.pop("kind")), value.pop("state")
            if kind not in _KINDS:
                raise UnsupportedVersion(
                    f"{record_key(number)} is of the kind {shortened(kind)!r}, which this ckptstore does not know",
                    file=record_key(number),
                    hint="Upgrade ckptstore to use this store",
                )
            return Record(
                number=number,
                change=_change_from_json(kind, value.pop("change"), limit=number),
                previous=as_text(value.pop("previous")),
                write_id=as_text(value.pop("write_id")),
                created_at=check_seconds(value.pop("created_at")),
                encoded_state=as_object(encoded_state),
                extra=value,
                stored=bytes(data),
            )
        except UnsupportedVersion:
            raise
        except _NOT_A_RECORD as error:
            _damaged(number, error)


_SEAL_FIELD = "body_sha256"
_SEAL = re.compile(rb'\{"body_sha256":"([0-9a-f]{64})",')


def sealed(text: bytes) -> bytes:
    """Return the text of a JSON object as a record: its first field is the SHA-256 of all bytes behind it."""
    body = text[1:]
    return b'{"%s":"%s",%s' % (_SEAL_FIELD.encode(), sha256_of(body).encode(), body)


_NOT_A_RECORD = (KeyError, TypeError, ValueError, AttributeError, CkptstoreError)


def _damaged(number: int, error: Exception) -> NoReturn:
    file = record_key(number)
    text = error.message if isinstance(error, InvalidInput) else repr(error)
    raise CheckpointDamaged(f"{file} is not a record of the log: {shortened(text)}", file=file) from None


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _change_to_json(change: Change) -> dict[str, Any]:
    match change:
        case Claim():
            above = {"above_epoch": change.above_epoch} if change.above_epoch else {}
            return {"start_token": change.start_token, "world_size": change.world_size, **above}
        case Commit(thins=int()):
            return {"checkpoint": _entry_to_json(change.entry), "thins": change.thins}
        case Commit():
            return {
                "checkpoint": _entry_to_json(change.entry),
                "replaces": encode_sequence(change.replaces),
                "drops": encode_sequence(change.drops),
                "reasons": {str(number): reason for number, reason in change.reasons.items()},
            }
        case Remove():
            return {
                **({} if change.voids is None else {"voids": change.voids.to_json()}),
                **({"unpins": True} if change.unpins else {}),
                "trash": encode_sequence(change.trash),
                "drop": encode_sequence(change.drop),
                "epoch": change.epoch,
                "reason": change.reason,
            }
        case Pin() | Unpin():
            return {"numbers": encode_sequence(change.numbers), "epoch": change.epoch}
        case Restore():
            return {"numbers": encode_sequence(change.numbers), "pin": change.pin, "epoch": change.epoch}
        case Resumed():
            source = None if change.source is None else list(change.source)
            return {"epoch": change.epoch, "source": source, "attempt": change.attempt, "next_save": change.next_save}
        case Annotate():
            return {"number": change.number, "metrics": dict(change.metrics), "epoch": change.epoch}
        case Noop():
            return {}


def _change_from_json(kind: str, value: dict[str, Any], *, limit: int) -> Change:
    def numbers(name: str) -> tuple[int, ...]:
        return tuple(decode_sequence(value[name], limit=limit))

    match kind:
        case "claim":
            above_epoch = as_number(value.get("above_epoch", 0))
            return Claim(as_text(value["start_token"]), as_number(value["world_size"]), above_epoch)
        case "checkpoint":
            reasons = {_number(text, limit): as_text(reason) for text, reason in value["reasons"].items()}
            return Commit(_entry_from_json(value["checkpoint"], limit), numbers("replaces"), numbers("drops"), reasons)
        case "thin":
            return Commit(_entry_from_json(value["checkpoint"], limit), thins=as_number(value["thins"]))
        case "remove":
            voids = None if value.get("voids") is None else Void.from_json(value["voids"])
            return Remove(
                numbers("trash"),
                numbers("drop"),
                _optional(value["epoch"]),
                as_text(value["reason"]),
                voids,
                _boolean(value.get("unpins", False)),
            )
        case "pin":
            return Pin(numbers("numbers"), _optional(value["epoch"]))
        case "unpin":
            return Unpin(numbers("numbers"), _optional(value["epoch"]))
        case "restore":
            return Restore(numbers("numbers"), _boolean(value["pin"]), _optional(value["epoch"]))
        case "resumed":
            source = None if value["source"] is None else SaveOrder.of(*value["source"])
            until = SaveOrder.of(value["epoch"], as_number(value["next_save"], 1))
            return Resumed(until.epoch, source, as_text(value["attempt"]), until.save_number)
        case "annotate":
            place, metrics = _number(str(as_number(value["number"])), limit), as_object(value["metrics"])
            return Annotate(place, metrics, _optional(value["epoch"]))
        case _:
            return Noop()


def _number(text: str, limit: int) -> int:
    (number,) = decode_sequence(text, limit=limit)
    return number


def _optional(value: Any) -> int | None:
    return None if value is None else as_number(value)


def _entry_to_json(entry: CheckpointEntry) -> dict[str, Any]:
    copied = {} if entry.committed_at is None else {"committed_at": entry.committed_at}
    counted = {"save_number": entry.save_number} if entry.save_number else {}
    shared = {} if entry.own_bytes is None else {"own_bytes": entry.own_bytes}
    thinned = {} if entry.thinned is None else {"thinned": entry.thinned.to_json()}
    return {
        **copied,
        **counted,
        **shared,
        **thinned,
        "step": entry.step,
        "epoch": entry.epoch,
        "attempt": entry.attempt,
        "manifest_sha256": entry.manifest_sha256,
        "kind": entry.kind,
        "world_size": entry.world_size,
        "size_bytes": entry.size_bytes,
        "num_files": entry.num_files,
        "created_at": entry.created_at,
        "metrics": dict(entry.metrics),
        "bases": encode_sequence(entry.bases),
    }


def _entry_from_json(value: dict[str, Any], limit: int) -> CheckpointEntry:
    return CheckpointEntry(
        **{name: as_number(value[name]) for name in ("step", "epoch", "world_size", "size_bytes", "num_files")},
        save_number=as_number(value.get("save_number", 0)),
        own_bytes=_optional(value.get("own_bytes")),
        attempt=as_text(value["attempt"]),
        manifest_sha256=value["manifest_sha256"],
        kind=value["kind"],
        created_at=check_seconds(value["created_at"]),
        metrics=as_object(value["metrics"]),
        bases=tuple(decode_sequence(value["bases"], limit=limit)),
        committed_at=None if value.get("committed_at") is None else check_seconds(value["committed_at"]),
        thinned=None if value.get("thinned") is None else Thinning.from_json(value["thinned"]),
    )


_PAIRS = {"trash": "removed_by", "annotated": "annotated_by", "thinned": "wholes"}
"""The fields of a state that lead from numbers to others, each with the name of the column of these."""


def _state_to_json(state: StoreState) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        **state.extra,
        "epoch": state.epoch,
        "resume_from": state.resume_from,
        "live": state.live.encode(),
    }
    if state.save_number:
        encoded["save_number"] = state.save_number
    if state.void:
        encoded["void"] = [void.to_json() for void in state.void]
    if state.pinned:
        encoded["pinned"] = state.pinned.encode()
    for name, others in _PAIRS.items():
        if held := getattr(state, name):
            numbers = sorted(held)
            columns = {"numbers": numbers, others: [held[number] for number in numbers]}
            encoded[name] = {column: encode_sequence(values) for column, values in columns.items()}
    if state.bases:
        encoded["bases"] = {str(base): users.encode() for base, users in state.bases.items()}
    return encoded


def _state_from_json(encoded: Mapping[str, Any], *, limit: int) -> StoreState:
    value = dict(encoded)
    live = Numbers.decode(value.pop("live"), limit=limit)
    pinned = Numbers.decode(value.pop("pinned", ""), limit=limit)
    if len(pinned) > MAX_LISTED:
        raise ValueError(f"more than {MAX_LISTED} checkpoints are pinned")
    pairs = {name: _pairs(value, name, others, limit=limit) for name, others in _PAIRS.items()}
    trash, thinned = pairs["trash"], pairs["thinned"]
    if not pinned <= live or not live.isdisjoint(trash):  # in this order: those that are live may be very many
        raise ValueError("its state contradicts itself")
    if any(whole >= number for number, whole in thinned.items()):
        raise ValueError("thinned checkpoints stand for later ones")
    if not all(number in live or number in trash for number in thinned):
        raise ValueError("a thinned checkpoint is neither live nor in the trash")
    taken = [whole for number, whole in thinned.items() if number in live]
    if len(taken) > len(set(taken)) or any(whole in live for whole in taken):
        raise ValueError("two live checkpoints have one place")
    bases = value.pop("bases", {})
    return StoreState(
        **pairs,
        save_number=as_number(value.pop("save_number", 0)),
        void=_voids(value.pop("void", [])),
        epoch=as_number(value.pop("epoch")),
        resume_from=_optional(value.pop("resume_from")),
        live=live,
        pinned=pinned,
        bases={_number(base, limit): Numbers.decode(users, limit=limit) for base, users in bases.items()},
        extra=value,
    )


def _pairs(value: dict[str, Any], name: str, others: str, *, limit: int) -> dict[int, int]:
    columns = value.pop(name, {"numbers": "", others: ""})
    numbers = Numbers.decode(columns["numbers"], limit=limit)
    if len(numbers) > MAX_LISTED:
        raise ValueError(f"{name} has more than {MAX_LISTED} checkpoints")
    return dict(zip(numbers, decode_sequence(columns[others], limit=limit), strict=True))


def _voids(value: Any) -> tuple[Void, ...]:
    voids = tuple(map(Void.from_json, as_list(value)))
    if len(voids) > MAX_VOIDS or (voids and with_void(voids[1:], voids[0]) != voids):
        raise ValueError("what is void is not in order, or there is too much of it")
    return voids
