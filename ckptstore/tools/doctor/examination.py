"""Examine a place: try everything that a store will need there.

Probes are written below "probe/", under a random name, and removed again. Checkpoints are not touched.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from ckptstore.config import StoreConfig
from ckptstore.errors import (
    AccessDenied,
    CheckpointDamaged,
    CkptstoreError,
    FileMissing,
    StorageError,
    StorageUnavailable,
    all_errors,
)
from ckptstore.format.layout import CHECKPOINT_PREFIX, PROBE_PREFIX
from ckptstore.node_cache.place import filesystem_of, is_network, open_place
from ckptstore.opening import open_store
from ckptstore.storage.base import MAY_NOT_LIST, Bucket, Disk, Storage, WritesParts
from ckptstore.storage.open import choose_engine, open_storage
from ckptstore.storage.probe import has_exclusive_create
from ckptstore.storage.uri import parse_uri
from ckptstore.tools.doctor.finding import IN_MEMORY, Finding, finding_of
from ckptstore.tools.doctor.of_node import examine_fast
from ckptstore.tools.doctor.of_store import examine_checkpoints, examine_log, examine_ray_list

_BULK_BYTES = 8 << 20
_MAX_SKEW_SECONDS = 30.0
_KEEP = ("versioning", "soft delete", "object lock")
_LIFECYCLE = {
    "s3": """aws s3api put-bucket-lifecycle-configuration --bucket BUCKET --lifecycle-configuration '{"Rules": [{"ID": \
"unfinished-uploads", "Status": "Enabled", "Filter": {"Prefix": ""}, "AbortIncompleteMultipartUpload": \
{"DaysAfterInitiation": 7}}]}'""",
    "gs": """gcloud storage buckets update gs://BUCKET --lifecycle-file=FILE, with {"rule": [{"action": {"type": \
"AbortIncompleteMultipartUpload"}, "condition": {"age": 7}}]} in FILE""",
    "az": "Azure drops blocks that were not committed after 7 days by itself",
}
_FAMILIES = {"abfs": "az"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All findings, in the order of the checks."""

    uri: str
    engine: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if nothing failed; there may be warnings."""
        return not any(finding.status == "failed" for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """The exit code of the first error, 0 without one."""
        for finding in self.findings:
            if finding.status == "failed":
                return all_errors().get(finding.code, StorageError).exit_code
        return 0


@dataclass(slots=True)
class _Place:
    storage: Storage
    config: StoreConfig
    scheme: str
    uri: str
    storage_options: Mapping[str, Any] | None
    engine: str | None
    prefix: str = field(default_factory=lambda: f"{PROBE_PREFIX}doctor-{uuid.uuid4().hex}/")
    used: list[str] = field(default_factory=list)
    is_writable: bool = True
    num_unavailable: int = 0
    """The number of checks that did not reach the storage, with all retries."""

    @property
    def is_away(self) -> bool:
        """True if nothing can be learnt from the storage any more."""
        return self.num_unavailable >= 2

    def key(self, name: str) -> str:
        """Return a key for a probe, to be removed in the end."""
        self.used.append(self.prefix + name)
        return self.used[-1]

    @property
    def is_local(self) -> bool:
        """True on a disk and in memory, where no service keeps or charges anything."""
        return isinstance(self.storage, Disk) or self.scheme == "memory"


def examine(
    uri: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    engine: str | None = None,
    config: StoreConfig | None = None,
    fast_directory: str | None = None,
) -> Examination:
    """Try everything that a store at `uri` would need. Nothing is raised for what fails there: it is a finding.

    Moves about 50 MiB. With a directory for fast checkpoints of this node that is looked at too. Raises InvalidInput
    for a URI, option or engine that cannot be used.
    """
    choice = choose_engine(uri, storage_options=storage_options, engine=engine)
    open_store(uri, storage_options=storage_options, engine=engine, group="solo").close()  # it refuses a checkpoint
    config = config or StoreConfig.from_env()
    findings = [Finding("ok", f"{choice.engine}: {choice.reason}", name="engine")]
    with closing(open_storage(uri, storage_options=storage_options, engine=engine)) as storage:
        if resolved := ", ".join(f"{name}: {value}" for name, value in storage.resolved().items()):
            findings.append(Finding("ok", resolved, name="configuration"))
        scheme = parse_uri(uri).scheme
        place = _Place(storage, config, _FAMILIES.get(scheme, scheme), uri, storage_options, engine)
        made = _missing_directories(storage)
        try:
            findings += [_run(check, place) for check in _CHECKS]
            if not place.is_away:
                found = finding_of("list of Ray Train", lambda: examine_ray_list(storage, storage_options, engine))
                findings += [found] if found.detail else []
            if fast_directory is not None:
                findings += examine_fast(fast_directory, storage, config)
        finally:
            removal = finding_of("probes", lambda: _clean_up(place, made))
        return Examination(uri=storage.uri, engine=choice.engine, findings=(*findings, removal))


def _run(check: _Check, place: _Place) -> Finding:
    if check.needs_writes and not place.is_writable:
        return Finding("unknown", "nothing can be written there", name=check.name)
    if check.local and place.is_local:
        return Finding("ok", check.local, name=check.name)
    if place.is_away and check.run is not _cache:  # each try would take as long as its retries
        return Finding("unknown", "the storage cannot be reached", name=check.name)
    found = finding_of(check.name, lambda: check.run(place))
    place.num_unavailable += found.code == StorageUnavailable.code
    return found


def _put(place: _Place) -> str:
    try:
        place.storage.write(place.key("small"), [memoryview(b"ckptstore")])
    except (CkptstoreError, OSError):
        place.is_writable = False
        raise
    return "a small file was written"


def _get(place: _Place) -> str:
    if place.is_writable and place.storage.read(f"{place.prefix}small") != b"ckptstore":
        raise CheckpointDamaged("What was written reads differently")
    try:
        place.storage.read(f"{place.prefix}absent")
    except FileMissing:
        return "what was written reads the same" if place.is_writable else "a file that is not there is told as such"
    except AccessDenied as error:
        if error.hint not in (None, MAY_NOT_LIST):
            raise
        hint = "Give the permission to list the bucket: without it a file that is not there is refused, not missing"
        raise AccessDenied(error.message, hint=hint) from error
    raise StorageError("A file that nobody wrote is there")


def _list(place: _Place) -> str:
    found = {file.key for file in place.storage.list(place.prefix)}
    if place.is_writable and f"{place.prefix}small" not in found:
        raise StorageError("A file that was written is not in the listing", hint="Listings have to be up to date")
    return "a listing shows what was written" if place.is_writable else "it answers"


def _delete(place: _Place) -> str:
    key = place.key("deleted")
    place.storage.write(key, [memoryview(b"x")])
    place.storage.delete([key])
    with suppress(FileMissing):
        place.storage.stat(key)
        raise StorageError("A file was deleted without an error, and is still there", hint="Prune would free nothing")
    return "a file was deleted"


def _create(place: _Place) -> Finding | str:
    if has_exclusive_create(place.storage):
        return "of eight creates of one key, one won"
    return Finding(
        "warning",
        "two jobs could commit at once without either noticing",
        "Open the store with single_writer=True, and never run two jobs on it",
    )


def _multipart(place: _Place) -> str:
    storage = place.storage
    if not isinstance(storage, WritesParts):
        return "files are written in one call"
    key, size_bytes = place.key("parts"), storage.part_bytes(1) + 1
    part = memoryview(bytearray(size_bytes - 1))
    writer = storage.open_parts(key, size_bytes)
    try:
        writer.write_part(0, [part])
        writer.write_part(len(part), [memoryview(b"x")])
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    if storage.stat(key).size_bytes != size_bytes:
        raise CheckpointDamaged("A file that was written in parts has another size")
    return f"parts of {(size_bytes - 1) >> 20} MiB"


def _clock(place: _Place) -> Finding | str:
    key, before = place.key("clock"), time.time()
    place.storage.write(key, [memoryview(b"x")])
    after, modified = time.time(), place.storage.stat(key).modified_seconds
    skew = max(before - modified - 1, modified - after, 0.0)  # some clocks show whole seconds
    if skew <= _MAX_SKEW_SECONDS:
        return f"the storage's clock is off by {skew:.0f} s at most"
    return Finding(
        "warning",
        f"the storage's clock and this machine's differ by {skew:.0f} s",
        "Correct the clock; S3 refuses requests from 15 minutes on. Grace periods go by the storage's clock",
    )


def _throughput(place: _Place) -> str:
    key, sent = place.key("bulk"), os.urandom(_BULK_BYTES)
    began = time.monotonic()
    place.storage.write(key, [memoryview(sent)])
    place.storage.persist([key])
    wrote = time.monotonic()
    found = bytearray(_BULK_BYTES)
    place.storage.read_into(key, 0, [memoryview(found)])
    up, down = wrote - began, time.monotonic() - wrote
    if found != sent:
        raise CheckpointDamaged("What was written reads differently")
    rates = [_BULK_BYTES / max(seconds, 1e-6) / (1 << 20) for seconds in (up, down)]
    return f"one request at a time: {rates[0]:.0f} MiB/s up, {rates[1]:.0f} MiB/s down"


def _leftovers(place: _Place) -> Finding | str:
    storage = place.storage
    if not isinstance(storage, Bucket):
        return "none can be left here"
    found = len(storage.unfinished(CHECKPOINT_PREFIX))
    if found:
        hint = f"`ckptstore gc` removes them; for good: {_LIFECYCLE.get(place.scheme, 'set a lifecycle rule')}"
        return Finding("warning", f"{found}, which cost money; or saves under way", hint)
    return "none"


def _rules(place: _Place) -> Mapping[str, str]:
    return place.storage.rules() if isinstance(place.storage, Bucket) else {}


def _checksum(place: _Place) -> Finding | str:
    sent = _rules(place).get("upload checksum")
    if sent is None:
        return Finding("unknown", "not known")
    if sent:
        return f"{sent} goes with each body"
    hint = "Remove request_checksum_calculation=when_required: damage on the way is then found by a load alone"
    return Finding("warning", "none is sent", hint)


def _lifecycle(place: _Place) -> Finding | str:
    hint = _LIFECYCLE.get(place.scheme, "")
    rule = _rules(place).get("unfinished uploads")
    if rule is None:
        return Finding("unknown", "not known", hint)
    if rule:
        return f"unfinished uploads: {rule}"
    return Finding("warning", "unfinished uploads stay for ever", hint)


def _deletion(place: _Place) -> Finding | str:
    rules = {rule: text for rule, text in _rules(place).items() if rule in _KEEP}
    kept = {rule: text for rule, text in rules.items() if text}
    if kept:
        detail = "; ".join(f"{rule}: {text}" for rule, text in kept.items())
        hint = "Prune frees nothing until the bucket drops what it keeps; switch it off, or let old versions expire"
        return Finding("warning", detail, hint)
    if not rules:
        hint = "Look for versioning, soft delete and object locks: with them prune frees nothing"
        return Finding("unknown", "not known", hint)
    return f"all of it; there is no {', no '.join(rules)}"


def _cache(place: _Place) -> Finding | str:
    cache = open_place(place.config.cache.cache_dir)
    kind = filesystem_of(cache.root)
    detail = f"{cache.root} on {kind or 'a file system that has no name'}, locks {_work(cache.locks_work)}"
    if cache.locks_work and not is_network(kind):
        return detail
    hint = "Set CKPTSTORE_CACHE_DIR to a directory on a disk of this node"
    return Finding("warning", detail, hint)


def _work(works: bool) -> str:
    return "work" if works else "do not work: every process downloads for itself"


def _durability(place: _Place) -> Finding | str:
    storage = place.storage
    if place.scheme == "memory":
        return Finding("warning", "in memory: lost when the process ends")
    if not isinstance(storage, Disk):
        return "durable when the storage has answered"
    kind = filesystem_of(Path(os.path.realpath(storage.local_path(""))))
    if kind in IN_MEMORY:
        return Finding("warning", f"{kind}: lost when the machine restarts")
    shared = "; other nodes may see it" if is_network(kind) else "; this node alone sees it"
    return f"{kind or 'a file system that has no name'}{shared}"


def _missing_directories(storage: Storage) -> list[Path]:
    """Return the directories of a root on a disk that do not exist yet, the deepest first: probes will make them."""
    if not isinstance(storage, Disk):
        return []
    root = storage.local_path("")
    return list(takewhile(lambda path: not os.path.lexists(path), (root, *root.parents)))


def _clean_up(place: _Place, made: Sequence[Path]) -> Finding | str:
    """Remove all probes, and the directories made for them; warn where the storage refuses."""
    storage = place.storage
    try:
        if place.is_writable:
            storage.delete(place.used)
        storage.remove_directories(PROBE_PREFIX.rstrip("/"))
        for directory in made:
            with suppress(OSError):
                directory.rmdir()
    except CkptstoreError as error:
        hint = f"Remove what lies below {place.prefix}"
        return Finding("warning", f"they could not be removed: {error.message}", hint)
    return "removed"


class _Check(NamedTuple):
    name: str
    run: Callable[[_Place], Finding | str]
    needs_writes: bool = False
    local: str = ""
    """The finding on a disk and in memory, where it need not be run."""


_CHECKS = (
    _Check("put", _put),
    _Check("get", _get),
    _Check("list", _list),
    _Check("delete", _delete, needs_writes=True),
    _Check("conditional create", _create, needs_writes=True),
    _Check("multipart", _multipart, needs_writes=True),
    _Check("clock", _clock, needs_writes=True),
    _Check("throughput", _throughput, needs_writes=True),
    _Check("unfinished uploads", _leftovers),
    _Check("upload checksum", _checksum, local="not needed here: `ckptstore verify` compares digests"),
    _Check("lifecycle", _lifecycle, local="not needed here"),
    _Check("what deleting frees", _deletion, local="all of it, at once"),
    _Check("durability", _durability),
    _Check("node cache", _cache),
    _Check("log", lambda place: examine_log(place.storage)),
    _Check("checkpoints", lambda place: examine_checkpoints(place.uri, place.storage_options, place.engine)),
)
