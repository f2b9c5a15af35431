"""Every reader of JSON that the package has, each with a valid file that was really written.

The rules are those of docs/reference/format-v1.md, in the words of `hostile_json`.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
import uuid
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from hostile_json import Reader
from json_saved import Saved, in_memory

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    CheckpointDamaged,
    FileMissing,
    InvalidInput,
    InvalidName,
    InvalidSource,
    InvalidState,
    StorageFull,
    UnsupportedVersion,
    from_wire,
)
from ckptstore.extensions.exchange import appearing, safetensors
from ckptstore.extensions.exchange.from_files import _safetensors_files
from ckptstore.extensions.exchange.intake import Intake
from ckptstore.extensions.exchange.safetensors import INDEX_NAME as WEIGHTS_INDEX
from ckptstore.extensions.exchange.salvage import _bases_of
from ckptstore.extensions.exchange.to_safetensors import ExportProgress
from ckptstore.extensions.history.cursor import Cursor
from ckptstore.extensions.publication.local import LocalModel
from ckptstore.extensions.publication.wire import Index
from ckptstore.extensions.publication.work import STATE_NAME, State
from ckptstore.extensions.tier.certificate import Certificate
from ckptstore.format.changes import Noop
from ckptstore.format.digest import STRUCTURES, Digest
from ckptstore.format.encoding import dump_json, load_json, parse_json
from ckptstore.format.layout import USER_METADATA_NAME, Attempt, lease_key
from ckptstore.format.manifest import Manifest, Receipt, sha256_of
from ckptstore.format.record import Record, _state_to_json, sealed
from ckptstore.group import meeting
from ckptstore.group.message import Message
from ckptstore.integrations.ray.pointer import Pointer
from ckptstore.integrations.ray.ray_snapshot import parse_snapshot
from ckptstore.integrations.torch_checkpointing.committed import Committed
from ckptstore.integrations.torch_checkpointing.drafts import Draft, checked_file
from ckptstore.integrations.torch_checkpointing.paths import BLOCKS_NAME
from ckptstore.integrations.trackers.reference import Reference
from ckptstore.log.identity import StoreIdentity
from ckptstore.log.reader import Hint
from ckptstore.node_cache.place import boot_id
from ckptstore.state.index.outline import Outline, encode_table
from ckptstore.state.index.tensor_index import _values
from ckptstore.state.live.values import Decoder, Encoder, decode_metadata, encode_metadata
from ckptstore.state.write.incremental import Kept
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.tools.run.folders import Folder
from ckptstore.tools.run.folders.found import Home, home_of
from ckptstore.transfer.opened import open_place
from ckptstore.upkeep import leases

Rules = Mapping[str, str]

_STEP, _NUMBER, _COUNT, _ORDER = "..9999999999", "1..9999999999", f"..{2**63 - 1}", f"..{10**18}"
_SECONDS = "..999999999"


def _below(path: str, rules: Rules) -> Rules:
    return {f"{path}.{at}" if at else path: words for at, words in rules.items()}


THINNED = {"": "optional", "dropped": "repeats", "dropped.*": "text"}
RECORD = {
    "number": "fixed",
    "previous": "text",
    "write_id": "text",
    "state.resume_from": "null like:1",
    "state.pinned": "optional empty",
    **_below("state.trash", {"": "optional", "numbers": "set", "removed_by": "sequence"}),
    **_below("state.annotated", {"": "optional", "numbers": "set", "annotated_by": "sequence"}),
    **_below("state.thinned", {"": "optional", "wholes": "sequence"}),
    **_below("state.bases", {"": "optional empty map keys:number", "*": "set"}),
    "state.save_number": "optional",
    **_below("state.void", {"": "optional empty", "*": "whole", "*.*": _ORDER}),
}
ENTRY = {
    "step": _STEP,
    "epoch": "1..",
    "world_size": "1..",
    **_below("metrics", {"": "map empty", "*": "number"}),
    "bases": "sequence",
    "own_bytes": "optional",
    "committed_at": "optional",
    "save_number": "optional",
    **_below("thinned", THINNED),
}
BY = {"epoch": "null like:1"}
COMMIT = {**_below("checkpoint", ENTRY), "replaces": "sequence", "drops": "sequence"}
CHANGES: Mapping[str, Rules] = {
    "claim": {"start_token": "text some", "world_size": "1..", "above_epoch": "optional"},
    "checkpoint": {**COMMIT, **_below("reasons", {"": "map empty keys:number", "*": "text"})},
    "thin": COMMIT,
    "remove": {
        **BY,
        "trash": "sequence",
        "drop": "sequence",
        "reason": "text",
        "unpins": "optional",
        **_below("voids", {"": "optional whole", "*": _ORDER}),
    },
    "pin": {**BY, "numbers": "sequence"},
    "unpin": {**BY, "numbers": "sequence"},
    "restore": {**BY, "numbers": "sequence"},
    "resumed": {"source": "null whole", "attempt": "empty", "source.*": _ORDER, "next_save": f"1{_ORDER}"},
    "annotate": {**BY, **_below("metrics", {"": "map", "*": "number"})},
    "noop": {},
}
RECEIPT = {"name": "name", "digest": "null", "original_name": "optional name", "attempt": "optional"}
MANIFEST = {
    "store_id": "text",
    "step": _STEP,
    "attempt": "text",
    "world_size": "1..",
    **_below("metrics", {"": "map empty", "*": "number"}),
    "metadata": "any",
    "files": "empty",
    **_below("files.*", RECEIPT),
    **_below("directories", {"": "empty", "*": "name"}),
    **_below("thinned", THINNED),
    **dict.fromkeys(("casts", "timings", "provenance"), "optional any"),
}
_SPREAD = {**dict.fromkeys(("minimum", "median", "maximum"), _SECONDS), "slowest": "repeats", "slowest.*": _COUNT}
_PHASES = ("agree", "stage", "upload", "wait", "commit")
_COUNTS = dict.fromkeys(("size_bytes", "requests", "retries"), _COUNT)
TIMINGS = {
    "seconds": _SECONDS,
    "phases": "empty",
    **{at: words for phase in _PHASES for at, words in _below(f"phases.{phase}", {"": "optional", **_SPREAD}).items()},
    **_below("stalled", _SPREAD),
    **_COUNTS,
    **_below("ranks.*", {**_COUNTS, "rank": _COUNT, "node": "node", "stalled_seconds": _SECONDS}),
    **_below("ranks.*.seconds", {"": "empty", **dict.fromkeys(_PHASES, f"optional {_SECONDS}")}),
}
PROVENANCE = {
    "": "empty",
    "commit": "optional text",
    "is_dirty": "optional",
    **_below("argv", {"": "optional empty repeats", "*": "text"}),
    **_below("versions", {"": "optional empty map", "*": "text"}),
    "num_hosts": "optional 1..",
}
CERTIFICATE = {
    **dict.fromkeys(("store_id", "epoch", "step", "attempt", "manifest_sha256"), "fixed"),
    "save_number": f"1{_ORDER}",
    "claim.number": _NUMBER,
    **_below("holders", {"": "map keys:node", "*": "set"}),
}
OUTLINE = {
    "num_prefixes": f"1..{2**31 - 1}",
    "parts": "empty repeats",
    "parts.*": "whole",
    "parts.*.0": f"1..{2**62 - 1}",
    **_below("tied", {"": "map empty", "*": "anytext"}),
    "own": "map empty",
    "common": "empty repeats",
    "spans": "empty repeats",
}
_PART = {"": "repeats", "*": "anytext like:1", "*.0": "like:1"}
TABLE = {
    "": "bare",
    "layouts": "empty repeats",
    "layouts.*.cuts.*": "whole",
    "layouts.*.cuts.*.0": "-1..0",
    "layouts.*.cuts.*.1": "1..",
    "layouts.*.mesh.shape.*": "1..",
    "tensors": "empty",
    "tensors.*": "whole",
    "tensors.*.0": "anytext",
    "tensors.*.2": "empty repeats",
    "modules": "optional empty repeats",
    "modules.*.0": "anytext",
    "modules.*.1": "any",
    "modules.*.2": "empty repeats",
    "live": "optional empty map keys:dtype",
    "live.*": "empty repeats",
    "paths": "optional empty repeats",
    "paths.*": "repeats",
    "paths.*.*": 'anytext like:1 like:"" like:[null] like:[1.5]',
}
KEPT = {
    "files": "empty repeats",
    **_below("files.*", {"name": "name", "original_name": "optional name", "slab_bytes": _COUNT}),
    "files.*.chunks": "empty repeats",
    "files.*.chunks.*": "whole",
    "files.*.chunks.*.0": "anytext",
    "files.*.chunks.*.1": "empty repeats",
    "files.*.chunks.*.2": "empty repeats",
    "files.*.chunks.*.5": "text",
    "files.*.chunks.*.6": "base64",
    "files.*.slab_digests": "base64",
}
INDEX = {"": "bare", "metadata": "optional any", "weight_map": "map empty", "weight_map.*": "name"}
HEADER = {
    "": "map empty",
    **_below("__metadata__", {"": "map empty optional", "*": "text"}),
}
HEADER_ENTRY = {"dtype": "anytext", "shape": "empty repeats", "shape.*": f"..{2**56 - 1}"}
PULLED = {
    "": "bare",
    "version": "",
    "identity": "anytext",
    "metadata": "any",
    **_below("digests", {"": "map empty", "*": "whole", "*.*": "anytext"}),
    **_below("files", {"": "map empty", "*": "empty repeats"}),
    **_below("config_files", {"": "empty repeats", "*": "anytext"}),
    **_below("checks", {"": "map empty", "*": "anytext"}),
    "boot": "anytext",
}
MESSAGE = {
    **dict.fromkeys(("version", "size", "crc"), "fixed"),
    "tag": "anytext",
    "by": "anytext",
    "error": "optional any",
    "step": "optional",
    "after_failure": "optional",
    **_below("missed", {"": "optional empty repeats"}),
    **_below("behind", {"": "optional empty repeats"}),
    **_below("lanes", {"": "optional empty repeats", "*": "anytext"}),
}
POINTER = {
    "about": "optional any",
    "root": "text some",
    "step": _STEP,
    "number": "null like:1 1..",
    "attempt": "optional text",
    "error": "optional text",
}
HOME = {
    "beside": "map empty",
    "beside.*": "empty",
    **_below(
        "beside.*",
        {"text": "optional text", "data": "optional base64", "link": "optional name", "copy": "optional name"},
    ),
    "fingerprint": "text",
    "shape": "text",
    "name": "name",
    "written_at": "optional",
    "path": "optional any",
    "step": "optional like:1",
}
SNAPSHOT = {
    "": "bare",
    "checkpoint_results": "empty repeats",
    "checkpoint_results.*.checkpoint_dir_name": "anytext",
    "checkpoint_results.*.metrics": "any",
    "latest_checkpoint_result": "any optional",
}
REFERENCE = {
    "uri": "optional any",
    **dict.fromkeys(("store", "attempt", "manifest_sha256"), "text some"),
    **_below("metrics", {"": "map empty", "*": "number"}),
}


def readers(saved: Saved) -> dict[str, Reader]:
    """Return them by name."""
    parts = (_of_log, _of_manifests, _of_messages, _of_states, _of_publications, _of_notes)
    return {name: reader for part in parts for name, reader in part(saved).items()}


# The log, and what lies beside it


def _of_log(saved: Saved) -> dict[str, Reader]:
    noop = Record.following(saved.log[-1], Noop(), write_id="0" * 32, created_at=1.5)
    chosen = {_form(record): record for record in [*saved.log, saved.copied[0], noop]}
    richest = max(saved.log, key=lambda record: len(record.encoded_state))
    found = {}
    for (kind, *_), record in [*chosen.items(), (_form(richest), richest)]:
        part = "" if record is richest else "change"
        found[f"record {kind} {record.number}{part and ', its change'}"] = Reader(
            data=_record_text(record),
            read=partial(_read_record, record.number),
            write=_record_text,
            rules={**RECORD, **_below("change", CHANGES[kind])},
            part=part,
            calls="format.record:Record.decode",
        )
    return {
        **found,
        "store.json": Reader(
            data=saved.identity,
            read=StoreIdentity.decode,
            write=StoreIdentity.encode,
            rules={"store_id": "text some", "kept_by": "text"},
            calls="log.identity:StoreIdentity.decode",
        ),
        "latest.json": Reader(
            data=saved.hint,
            read=Hint.decode,
            write=Hint.encode,
            rules={"latest": "optional"},
            calls="log.reader:Hint.decode",
        ),
        "cursor": Reader(
            data=saved.cursor,
            read=partial(Cursor.decode, file="cursor"),
            write=Cursor.encode,
            rules={"store_id": "text", "number": _STEP, "begun": _STEP},
            calls="extensions.history.cursor:Cursor.decode",
        ),
        **{
            f"pointer {number}": Reader(
                data=data,
                read=Pointer.decode,
                write=Pointer.encode,
                rules=POINTER,
                calls="integrations.ray.pointer:Pointer.decode",
            )
            for number, data in enumerate(saved.pointers)
        },
        "reference": Reader(
            data=saved.reference,
            read=Reference.decode,
            write=lambda found: found.encode().encode(),
            rules=REFERENCE,
            errors=(CheckpointDamaged, UnsupportedVersion, InvalidInput),
            calls="integrations.trackers.reference:Reference.decode",
        ),
        "lease": Reader(
            data=saved.lease,
            read=partial(_read_lease, saved.root),
            write=None,
            errors=(),
            calls="upkeep.leases:_is_dead upkeep.leases:_unchanged",
        ),
    }


def _form(record: Record) -> tuple[str, ...]:
    value = json.loads(record.encode())
    return (value["kind"], *sorted(value["change"]), *sorted(value["change"].get("checkpoint", ())))


def _record_text(record: Record) -> bytes:
    """The record without its digest, as it would be written from what was read."""
    again = replace(record, stored=None, encoded_state=_state_to_json(record.state)).encode()
    return b"{" + again[again.index(b",") + 1 :]


def _read_record(number: int, data: bytes) -> Record:
    """Its digest would stop every change, so it is made to fit."""
    record = Record.decode(sealed(data), number)
    _ = record.state
    return record


def _read_lease(root: Path, data: bytes) -> object:
    """As a lease of long ago, and as what an earlier look has noted of leases."""
    storage = LocalStorage(root / "leased")
    for key in (lease_key(7, "reader"), f"leases/looks-{boot_id()}.json"):
        storage.overwrite(key, data)
        os.utime(storage.local_path(key), (1, 1))
    return leases.look(storage, now_seconds=time.time())


# Manifests, certificates


def _of_manifests(saved: Saved) -> dict[str, Reader]:
    manifest = partial(
        Reader, read=Manifest.decode, write=Manifest.encode, rules=MANIFEST, calls="format.manifest:Manifest.decode"
    )
    said, outer = json.loads(saved.thinned), json.loads(saved.certificate)
    certificate = partial(
        Reader, errors=(CheckpointDamaged, UnsupportedVersion), calls="extensions.tier.certificate:Certificate.decode"
    )
    inner, inside = outer["certificate"], outer["manifest"]
    own_sha256 = json.loads(inner)["manifest_sha256"]
    return {
        "manifest": manifest(data=saved.manifest),
        "manifest thinned": manifest(data=saved.thinned, part="thinned"),
        "manifest of ranks": manifest(data=saved.of_ranks),
        **{
            name: Reader(
                data=dump_json(field),
                read=partial(_read_beside, said, name),
                write=lambda found: dump_json(found.to_json()),
                rules=rules,
                errors=(),
            )
            for name, field, rules in (
                ("timings", said["timings"], TIMINGS),
                ("provenance", {**said["provenance"], "commit": "8c15528", "is_dirty": True}, PROVENANCE),
            )
        },
        "user-metadata.json": Reader(
            data=saved.user_metadata,
            read=lambda data: Checkpoint(in_memory(USER_METADATA_NAME, data)[0]).get_metadata(),
            write=dump_json,
            rules={"": "free"},
            calls="checkpoint:Checkpoint.get_metadata",
        ),
        "fast.json": certificate(
            data=saved.certificate, read=Certificate.decode, write=lambda found: replace(found, stored=None).encode()
        ),
        "certificate": certificate(
            data=inner.encode(),
            read=lambda data: _read_certificate(data, inside.encode()),
            write=lambda found: json.loads(replace(found, stored=None).encode())["certificate"].encode(),
            rules=CERTIFICATE,
        ),
        "manifest of a certificate": certificate(
            data=inside.encode(),
            read=lambda data: _read_certificate(inner.replace(own_sha256, sha256_of(_text(data))).encode(), data),
            write=lambda found: found.manifest.encode(),
            rules={**MANIFEST, "files.*.digest": "", "files.*.rank": "..0"},
            part="files",
        ),
    }


def _read_beside(manifest: Mapping[str, Any], name: str, data: bytes) -> Any:
    """A field of a manifest that refuses no checkpoint, whatever it is."""
    try:
        load_json(data, file="")
    except CheckpointDamaged:
        return None
    text = dump_json({**manifest, name: None}).replace(
        f'"{name}":null'.encode(), f'"{name}":{data.decode("utf-8-sig")}'.encode()
    )
    found = Manifest.decode(text)
    assert [receipt.to_json() for receipt in found.files] == manifest["files"]
    return getattr(found, name)


def _read_certificate(inner: bytes, manifest: bytes) -> Certificate:
    """Its digests would stop every change, so they are made to fit."""
    outer = {"version": 1, "certificate": inner, "sha256": sha256_of(_text(inner)), "manifest": manifest}
    return Certificate.decode(json.dumps(outer, default=lambda data: data.decode(errors="replace")).encode())


def _text(data: bytes) -> bytes:
    return data.decode(errors="replace").encode()


# Messages between ranks


def _of_messages(_: Saved) -> dict[str, Reader]:
    error = StorageFull("no room", rank=1, step=3, file="a", hint="Make room", ranks=(1,)).to_wire()
    head: dict[str, Any] = {"tag": "save", "rank": 1, "world_size": 2, "by": "host-1", "payload": b'{"a":1}\nb'}
    answer = Message(**head, step=3, after_failure=True, missed=(1, 2), behind=(3,), lanes=("a", "drain"))
    said = meeting.pack([{"a": b"xy"}, 1, [b"", None]])
    return {
        **{
            f"message {number}": Reader(
                data=message.encode().partition(b"\n")[0],
                read=lambda data: Message.decode(data + b"\n" + head["payload"]),
                write=lambda found: found.encode().partition(b"\n")[0],
                rules=MESSAGE,
                errors=(UnsupportedVersion,),
                calls="group.message:Message.decode",
            )
            for number, message in enumerate([answer, Message(**head, error=error)])
        },
        "value of a meeting": Reader(
            data=said.partition(b"\n")[0],
            read=lambda data: [meeting.unpack(data + b"\nxy")],
            write=lambda found: meeting.pack(*found).partition(b"\n")[0],
            rules={"": "free bare"},
            errors=(ValueError,),
            calls="group.meeting:unpack",
        ),
        "error": Reader(
            data=json.dumps(error).encode(),
            read=lambda data: from_wire({**load_json(data, file="error")}),
            write=lambda found: json.dumps(found.to_wire()).encode(),
            rules={"": "free bare"},
            errors=(CheckpointDamaged, TypeError),
        ),
    }


# States


def _of_states(saved: Saved) -> dict[str, Reader]:
    head, table = _texts(saved.outline)
    return {
        "outline": Reader(
            data=head,
            read=lambda data: _forged(data, table),
            write=lambda found: _texts(found)[0],
            rules={**OUTLINE, **_spans(saved.outline)},
            calls="state.index.outline:Outline.decode",
        ),
        "table of an outline": Reader(
            data=table,
            read=lambda data: _forged(head, data),
            write=lambda found: _texts(
                replace(found, table=encode_table(found.tensors, found.layouts, found.modules, found.paths))
            )[1],
            rules=TABLE,
            calls="state.index.outline:Outline._table",
        ),
        "digests": Reader(
            data=saved.kept,
            read=partial(Kept.decode, attempt="step-0000000001-e0001-0123abcd", file="digests"),
            write=Kept.encode,
            rules=KEPT,
            calls="state.write.incremental:Kept.decode",
        ),
        **{
            name: Reader(
                data=json.dumps(_encoded(values)).encode(),
                read=_read_values,
                write=lambda found: json.dumps(_encoded(found)).encode(),
                rules={"": "free bare"},
                errors=(CheckpointDamaged, InvalidState),
                calls="state.index.tensor_index:_values",
            )
            for name, values in (("plain values", VALUES), ("packed values", PACKED))
        },
        "notes of modules": Reader(
            data=encode_metadata({"": {"version": 1}, "a": {"version": 2, "x": (1, torch.ones(2))}}, "m").encode(),
            read=_read_notes,
            write=lambda found: encode_metadata(found, "m").encode(),
            rules={"": "free bare"},
            errors=(CheckpointDamaged, InvalidState),
        ),
    }


VALUES: dict[str, Any] = {
    "plain": [1, 2.5, "x", None, True, {"a": [1]}, 10**30, float("nan"), 1 + 2j],
    "more": [(1, 2), {2, 3}, frozenset("a"), slice(1, 2), range(3), ..., b"abc", bytearray(b"x"), {1: 2}],
    "kinds": [OrderedDict(a=1), Counter("aab"), defaultdict(int, a=1), numpy.float32(1), numpy.arange(3)],
    "times": [date(2026, 1, 1), time_of_day(1, 2), datetime(2026, 1, 2, 3, 4, 5, 6), timedelta(1)],
    "torch": [torch.float32, torch.device("cpu"), torch.Size([1, 2])],
}
PACKED = {"packed": [(number, str(number % 7), None, 0.5, b"x", {"a": True}) for number in range(150)]}


_held: dict[str, Any] = {}
"""What is kept beside encoded values, as tensors."""


def _encoded(values: Mapping[str, Any]) -> dict[str, Any]:
    def keep(item: Any) -> str:
        data = numpy.asarray(item).tobytes()
        _held[key := sha256_of(data)] = numpy.asarray(item)
        return key

    encoder = Encoder(keep)
    return {key: encoder.encode(value, path=key) for key, value in values.items()}


def _read_values(data: bytes) -> dict[str, Any]:
    decoder = Decoder(_held.__getitem__)
    return {key: decoder.decode(value, path=key) for key, value in _values(data)}


def _read_notes(data: bytes) -> Any:
    try:
        return decode_metadata(parse_json(data), path="m")
    except ValueError as error:
        raise CheckpointDamaged(str(error)) from None


def _spans(outline: Outline) -> Rules:
    found, most = {}, len(outline.tensors) - 1
    for number, span in enumerate(outline.spans):
        found |= {f"spans.{number}": "whole", f"spans.{number}.1": f"..{span.last}", f"spans.{number}.2": f"..{most}"}
        found |= {f"spans.{number}.0": f"..{outline.world_size - 1}"}
    return found


def _texts(outline: Outline) -> tuple[bytes, bytes]:
    data = outline.encode()
    head_bytes = struct.unpack_from("<Q", data, 16)[0]
    return zlib.decompress(data[40 : 32 + head_bytes]), zlib.decompress(outline.table[8:])


def _forged(*texts: bytes) -> Outline:
    deflated = [len(text).to_bytes(8, "little") + zlib.compress(text, 1) for text in texts]
    data = struct.pack("<IQQ", 1, *map(len, deflated)) + b"".join(deflated)
    digest = Digest.of(data, algorithm=STRUCTURES).value.to_bytes(4, "little")
    outline = Outline.decode(b"CKPTTIXO" + digest + data)
    _ = outline.tensors
    return outline


# Publications


def _of_publications(saved: Saved) -> dict[str, Reader]:
    found = {}
    for number, (index, weights) in enumerate(zip(saved.indexes, saved.weights, strict=True)):
        found[f"index {number}"] = Reader(
            data=index,
            read=lambda data: Index.decode(data, "index"),
            write=Index.encode,
            rules=INDEX,
            calls="extensions.publication.wire:Index.decode",
        )
        end = 8 + int.from_bytes(weights[:8], "little")
        found[f"header {number}"] = Reader(
            data=weights[8:end].rstrip(),
            read=partial(_read_header, len(weights) - end),
            write=_header_text,
            rules={**HEADER, **_places(json.loads(weights[8:end]), len(weights) - end)},
            calls="extensions.exchange.safetensors:parse_header",
        )
    return {
        **found,
        "pulled": Reader(
            data=saved.pulled,
            read=lambda data: State.read(_holding(saved.root / "read", STATE_NAME, data), needs_index=False),
            write=lambda found: json.dumps(found.encode()).encode(),
            rules=PULLED,
            errors=(),
            calls="extensions.publication.work:State.read",
        ),
        "journal": Reader(
            data=saved.journal,
            read=partial(_read_journal, saved.root),
            write=None,
            errors=(),
            calls="extensions.publication.local:LocalModel._go_on extensions.publication.work:Spooled.read",
            most=60,
        ),
        "index to import": Reader(
            data=saved.indexes[0],
            read=partial(_read_import, saved.root),
            write=lambda found: json.dumps({"weight_map": found}, sort_keys=True).encode(),
            rules={**INDEX, "weight_map": "map empty"},
            errors=(InvalidSource, InvalidName, FileMissing),
            calls="extensions.exchange.from_files:_safetensors_files",
            most=300,
        ),
        "index to salvage": Reader(
            data=saved.indexes[1],
            read=lambda data: _bases_of(Attempt.of(_attempt_in(saved)), *in_memory(WEIGHTS_INDEX, data)) or None,
            write=None,
            errors=(),
            calls="extensions.exchange.salvage:_bases_of",
            most=300,
        ),
    }


def _attempt_in(saved: Saved) -> str:
    return str(json.loads(saved.indexes[1])["metadata"]["attempt"])


def _holding(directory: Path, name: str, data: bytes) -> Path:
    """A directory with a file in it."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(data)
    return directory


def _read_header(tensors_bytes: int, data: bytes) -> safetensors.Header:
    whole = len(data).to_bytes(8, "little") + data
    found = safetensors.parse_header(whole, "file", size_bytes=len(whole) + tensors_bytes)
    places = {name: place._replace(offset=place.offset - len(whole)) for name, place in found.tensors.items()}
    return replace(found, tensors=places)


def _places(header: Mapping[str, Any], tensors_bytes: int) -> Rules:
    found = {}
    for name in header.keys() - {safetensors.METADATA}:
        first, last = header[name]["data_offsets"]
        place = {"data_offsets": "whole", "data_offsets.0": f"..{last}", "data_offsets.1": f"{first}..{tensors_bytes}"}
        found |= _below(name, {**HEADER_ENTRY, **place})
    return found


def _header_text(header: safetensors.Header) -> bytes:
    fields: dict[str, Any] = {safetensors.METADATA: dict(header.metadata)} if header.metadata else {}
    for name, (dtype, shape, offset, size_bytes) in sorted(header.tensors.items()):
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size_bytes]}
    return json.dumps(fields).encode()


def _read_journal(root: Path, data: bytes) -> None:
    shutil.rmtree(root / "model", ignore_errors=True)
    shutil.copytree(root / "pulled", root / "model")
    model = LocalModel(root / "model")
    model.prepare()
    (model.aside / "journal.json").write_bytes(data)
    model.recover()


def _read_import(root: Path, data: bytes) -> dict[str, str]:
    place = _holding(root / "imported", WEIGHTS_INDEX, data)
    for name in ("x", *(path.name for path in (root / "published/weight_v000001").glob("*.safetensors"))):
        (place / name).touch()
    found = _safetensors_files(place, Intake())
    return {name: path.name for path, names in found.items() for name in names}


# What a machine notes for itself


def _of_notes(saved: Saved) -> dict[str, Reader]:
    files, _ = in_memory("a", b"x")
    draft = Draft(files.storage, "a", "drafts/a", 0)
    blocks = {"version": 1, "block_bytes": 1 << 20, "files": {"b": json.loads(saved.draft)["blocks"]}}
    folder = Folder(saved.root / "trained")
    progress = ExportProgress(open_place(f"memory://{uuid.uuid4().hex}"), "plan")
    return {
        "note of an export": Reader(
            data=saved.note,
            read=lambda data: appearing._read(_holding(saved.root / "read", "note", data) / "note"),
            write=lambda found: json.dumps({"directory": found[0], "beside": sorted(found[1])}).encode(),
            rules={"directory": "text", "beside": "empty repeats", "beside.*": "anytext"},
            errors=(),
            calls="extensions.exchange.appearing:_read",
        ),
        "progress of an export": Reader(
            data=b'{"plan": "plan", "size_bytes": 1, "version": "x"}',
            read=partial(_read_progress, progress),
            write=None,
            errors=(),
            calls="extensions.exchange.to_safetensors:ExportProgress._read",
        ),
        "home in a folder": Reader(
            data=saved.home,
            read=lambda data: home_of({"folder": _loaded(data)}, step=1),
            write=_home_text,
            rules=HOME,
        ),
        "finished in a folder": Reader(
            data=saved.finished,
            read=lambda data: (_holding(folder.own, "read", data) and folder._read("read")) or None,
            write=lambda found: json.dumps(found).encode(),
            rules={"": "free bare"},
            errors=(),
            calls="tools.run.folders.whole:json_in",
        ),
        "draft": Reader(
            data=saved.draft,
            read=partial(_read_draft, draft),
            write=lambda found: json.dumps({"receipt": found[0].to_json(), "blocks": found[1]}).encode(),
            rules={**_below("receipt", RECEIPT), "receipt.size_bytes": "1..1048576", "blocks": "base64"},
            errors=(CheckpointDamaged, InvalidName, UnsupportedVersion),
            calls="integrations.torch_checkpointing.drafts:Draft.read",
        ),
        "digests of blocks": Reader(
            data=json.dumps(blocks).encode(),
            read=partial(_read_blocks, saved, json.loads(saved.draft)["receipt"]),
            write=lambda found: json.dumps({**blocks, "files": {"b": found}}).encode(),
            rules={"block_bytes": "any optional", "files": "map", "files.*": "base64"},
            calls="integrations.torch_checkpointing.committed:Committed._blocks",
        ),
        "snapshot of Ray": Reader(
            data=RAYS,
            read=_read_snapshot,
            write=lambda found: json.dumps(found).encode(),
            rules=SNAPSHOT,
            errors=(),
            calls="integrations.ray.ray_snapshot:parse_snapshot integrations.ray.ray_snapshot:_listed_in",
        ),
    }


RAYS = b"""{"checkpoint_results": [{"checkpoint_dir_name": "checkpoint_1", "metrics": {"a": 1}}],
"latest_checkpoint_result": {"checkpoint_dir_name": "checkpoint_1", "metrics": {}}}"""


def _loaded(data: bytes) -> Any:
    return load_json(data, file="manifest")


def _home_text(home: Home) -> bytes:
    beside = {
        name: {kind: text for kind, text in asdict(it).items() if text is not None} for name, it in home.beside.items()
    }
    fields = {"name": home.name, "shape": home.shape, "is_directory": home.is_directory, "beside": beside}
    fields |= {"fingerprint": home.fingerprint, "step": home.step}
    if home.written_at_seconds is not None:
        fields["written_at"] = home.written_at_seconds
    return dump_json(fields | ({} if home.folder is None else {"path": str(home.folder)}))


def _read_progress(progress: ExportProgress, data: bytes) -> object:
    storage = progress.place.storage
    for key in (".ckptstore-export/plan.json", ".ckptstore-export/a.json", "a"):
        storage.write(key, [memoryview(data)])
    return progress.is_begun(), progress.is_done("a")


def _read_draft(draft: Draft, data: bytes) -> tuple[Receipt, str]:
    draft.storage.write("drafts/a/f=b", [memoryview(data)])
    receipt, blocks = draft.read("b")
    checked_file("", receipt, blocks)
    return receipt, blocks


def _read_blocks(saved: Saved, receipt: Mapping[str, Any], data: bytes) -> str:
    files, blocks = in_memory(BLOCKS_NAME, data)
    manifest = replace(Manifest.decode(saved.manifest), files=(blocks, Receipt.from_json(receipt)))
    found = Committed(saved.log[1], "a", files, manifest)
    found.checked("b")
    return found._blocks["b"]


def _read_snapshot(data: bytes) -> Any:
    found = parse_snapshot(data)
    if found.fault:
        return None
    listed = [{"checkpoint_dir_name": item.directory, "metrics": item.metrics} for item in found.listed]
    latest = {"checkpoint_dir_name": found.latest, "metrics": {}} if found.latest else None
    return {"checkpoint_results": listed, "latest_checkpoint_result": latest}
