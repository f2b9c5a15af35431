"""Every decoder of stored or received bytes, with valid samples of what it reads: what the mutations are tried on.

    python tests/outside/decoders.py --count 100000      all of them; a table, and every seed that went wrong
    python tests/outside/decoders.py --target hint --first 4711 --count 1

A decoding must end in a value or a `CkptstoreError`, take below a second of processor time, add less than 256 MiB, and
run nothing that the bytes bring along. It is measured in this process: start one for it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from mutations import mutated

from ckptstore.checkpoint import Checkpoint
from ckptstore.config import StoreConfig
from ckptstore.errors import CheckpointDamaged, CkptstoreError, StorageFull, from_wire
from ckptstore.extensions.history.cursor import Cursor
from ckptstore.extensions.tier.certificate import Certificate
from ckptstore.format.digest import Digest
from ckptstore.format.encoding import load_json
from ckptstore.format.layout import USER_METADATA_NAME, Attempt, check_name, parse_lease_key, parse_record_key
from ckptstore.format.manifest import Manifest, sha256_of
from ckptstore.format.record import Record, sealed
from ckptstore.group.message import Message, first_error
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.log.identity import StoreIdentity
from ckptstore.log.reader import Hint
from ckptstore.storage.memory import MemoryStorage
from ckptstore.transfer import RangeRead, Transfer

GOLDEN = Path(__file__).parents[1] / "golden"
MOST_SECONDS = 1.0
MOST_BYTES = 256 << 20
_FORBIDDEN = (
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.remove", "os.rename", "os.mkdir", "os.kill"),
    *("subprocess.Popen", "exec", "compile", "socket.connect", "shutil.rmtree", "ctypes.dlopen"),
)


@dataclass(frozen=True)
class Target:
    """One decoder: its samples, what it does with bytes, and its share of all mutations."""

    samples: Sequence[bytes]
    decode: Callable[[bytes], object]
    share: int = 10


@dataclass
class Found:
    """What mutations of one target came to."""

    num_tried: int = 0
    num_refused: int = 0
    slowest_seconds: float = 0.0
    peak_bytes: int = 0
    problems: list[str] = field(default_factory=list)


class TooLong(BaseException):
    """A decoding took its second."""


def records() -> list[bytes]:
    names = [*(f"{number:010d}" for number in range(1, 14)), "annotated"]
    return [(GOLDEN / "log-v1" / f"{name}.json").read_bytes() for name in names]


def decode_record(data: bytes) -> object:
    """Its digest would stop every mutation, so it is made to fit: somebody may mean harm."""
    number = 4
    try:
        number = int(json.loads(data)["number"])
    except Exception:  # whatever is odd about it, the decoder has to say so
        """It is read as number 4."""
    if not 0 < number < 10**10:  # a key has no room for others
        number = 4
    record = Record.decode(sealed(data), number)
    return record.state.latest, record.sha256, record.encode()


def decode_hint(data: bytes) -> object:
    hint = Hint.decode(data)
    return hint and (hint.newest.state.latest, hint.latest)


def decode_manifest(data: bytes) -> object:
    manifest = Manifest.decode(data)
    return manifest.size_bytes, manifest.by_name, manifest.made_whole(), manifest.references, manifest.encode()


def certificates() -> list[bytes]:
    """As it is stored; and what it says and its manifest, to be wrapped after they were mutated."""
    data = (GOLDEN / "fast-v1" / "fast.json").read_bytes()
    outer = json.loads(data)
    return [data, f"{outer['certificate']}\n{outer['manifest']}".encode()]


def decode_certificate(data: bytes) -> object:
    """Its digests would stop nearly every mutation, so they are made to fit: somebody may mean harm."""
    text, found, manifest = data.decode(errors="replace").partition("\n")
    if found:
        with contextlib.suppress(RecursionError, ValueError, TypeError):
            inner = json.loads(text)
            inner["manifest_sha256"] = sha256_of(manifest.encode())
            text = json.dumps(inner)
        outer = {"version": 1, "certificate": text, "sha256": sha256_of(text.encode()), "manifest": manifest}
        data = json.dumps(outer).encode()
    certificate = Certificate.decode(data)
    return certificate.encode(), certificate.order, certificate.by_rank, certificate.ranks_in({}), certificate.attempt


def decode_cursor(data: bytes) -> object:
    return Cursor.decode(data, file="cursor").encode()


def decode_identity(data: bytes) -> object:
    return StoreIdentity.decode(data).encode()


def messages() -> list[bytes]:
    head = {"tag": "save", "rank": 1, "world_size": 2, "by": "host-1"}
    error = StorageFull("no room", rank=1, step=3, file="a", hint="Make room", ranks=(1,)).to_wire()
    return [
        Message(**head, payload=b'{"step": 1}\npayload').encode(),  # type: ignore[arg-type]
        Message(**head, error=error).encode(),  # type: ignore[arg-type]
    ]


def decode_message(data: bytes) -> object:
    message = Message.decode(data)
    if message is None:
        return None
    error = first_error({0: Message(tag="save", rank=0, world_size=2, by="me"), 1: message})
    return message.payload, error and str(from_wire(error))


def decode_wire(data: bytes) -> object:
    wire = load_json(data, file="wire")
    if not isinstance(wire, dict):
        raise CheckpointDamaged("no object")
    return str(from_wire(wire))


def keys() -> list[bytes]:
    texts = ["leases/0000000042-host-12-ab.json", "log/0000000007.json", "step-0000012000-e0007-3f9a1c2e", "a/b.pt"]
    return [text.encode() for text in texts]


def decode_key(data: bytes) -> object:
    text = data.decode("utf-8", "surrogateescape")
    found = parse_lease_key(text), parse_record_key(text), Attempt.parse(text)
    attempt = found[2]
    assert attempt is None or str(attempt) == text, f"{text!r} is taken for {attempt}"
    return found, check_name(text)


def decode_metadata_of_user(data: bytes) -> object:
    storage = MemoryStorage(f"memory://{uuid.uuid4().hex}")
    storage.write(USER_METADATA_NAME, [memoryview(data)])
    config = StoreConfig()
    transfer = Transfer(storage, config=config.transfer, retry=config.retry)
    files = CheckpointFiles(storage=storage, transfer=transfer, config=config)
    return Checkpoint(files).get_metadata()


def decode_pointer(data: bytes) -> object:
    from ckptstore.integrations.ray.pointer import Pointer

    return Pointer.decode(data).encode()


def pointers() -> list[bytes]:
    from ckptstore.integrations.ray.pointer import Pointer

    attempt = "step-0000000003-e0001-0123abcd"
    return [
        Pointer(root="s3://b/run", step=3, number=7, attempt=attempt).encode(),
        Pointer(root="../store", step=3, number=None, error="it failed").encode(),
    ]


def pure_targets() -> dict[str, Target]:
    """Those that need neither torch nor numpy."""
    golden = GOLDEN / "manifest-v1"
    hints = [(GOLDEN / "log-v1" / "latest.json").read_bytes()]
    newest = [Record.decode(data, number) for number, data in enumerate(records(), 1)]
    hints += [Hint(record, None).encode() for record in newest]
    return {
        "record": Target([*records(), (GOLDEN / "log-v1" / "packed.json").read_bytes()], decode_record, 30),
        "hint": Target(hints, decode_hint, 20),
        "manifest": Target([path.read_bytes() for path in golden.iterdir()], decode_manifest, 20),
        "certificate": Target(certificates(), decode_certificate, 10),
        "identity": Target([(GOLDEN / "log-v1" / "store.json").read_bytes()], decode_identity, 5),
        "cursor": Target([(GOLDEN / "log-v1" / "cursor.json").read_bytes()], decode_cursor, 5),
        "message": Target(messages(), decode_message, 10),
        "wire": Target([data.partition(b"\n")[0] for data in _wires()], decode_wire, 5),
        "key": Target(keys(), decode_key, 5),
        "user": Target([b'{"a":[1,{"b":null}],"c":"x"}'], decode_metadata_of_user, 2),
        "pointer": Target(pointers(), decode_pointer, 5),
    }


def _wires() -> list[bytes]:
    errors = [StorageFull("no room", rank=1, step=3, ranks=(1,)), CheckpointDamaged("bad", committed=None, file="x")]
    return [json.dumps(error.to_wire()).encode() for error in errors]


def state_targets() -> dict[str, Target]:
    """Those of states."""
    with tempfile.TemporaryDirectory() as name:
        directory, stock = Path(name) / "store", Path(name) / "stock"
        files = _saved_state(directory)
        stock_files = files | _stock_state(stock)
    golden = (GOLDEN / "state-v1" / "tensors.index").read_bytes()
    indexes = [golden, files["tensors.index"]]
    kept = [data for key, data in files.items() if key.startswith("digests-")]
    return {
        "index": Target(indexes, _decode_index, 10),
        "part": Target(_parts(indexes), _decode_part, 40),
        "outline": Target(_outlines(), _decode_outline, 20),
        "kept": Target(kept, _decode_kept, 10),
        "values": Target(_value_texts(), _decode_values, 20),
        "metadata": Target(
            [files[".metadata"], *[stock_files[".metadata"]] * 3, *_attacks()],
            _decode_stock(stock_files, ".metadata"),
            60,
        ),
        "distcp": Target(_stock_data(stock_files), _decode_stock(stock_files, _STOCK_DATA), 60),
        "frame": Target(_frames(), _decode_frame, 10),
        "safetensors": Target(_safetensors(), _decode_safetensors, 5),
    }


def _saved_state(root: Path) -> dict[str, bytes]:
    import torch

    from ckptstore import open_store

    state = {
        "model": {"weight": torch.arange(600_000, dtype=torch.float32).reshape(600, 1000), "bias": torch.ones(7)},
        "empty": torch.zeros(0, 3),
        "values": {"a": 1, "b": [1.5, "x", None], "é": (1, 2), "bytes": b"x" * 70_000, "ints": list(range(2000))},
    }
    with open_store(root) as store:
        store.save(1, state, incremental=True)
        path = Path(store.save(2, state, incremental=True).uri.removeprefix("file://"))
        return {file.name: file.read_bytes() for file in path.iterdir()}


def _stock_state(root: Path) -> dict[str, bytes]:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {
        "w": torch.arange(40_000, dtype=torch.float32).reshape(200, 200),
        "small": torch.ones(3, dtype=torch.int64),
        "n": 5,
        "nested": {"text": "x", "list": [torch.zeros(2), 1]},
        "optimizer": {"state": {"w": {"step": torch.ones(())}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
    }
    dcp.save(state, checkpoint_id=str(root), no_dist=True)
    return {file.name: file.read_bytes() for file in root.iterdir()}


def _decode_index(data: bytes) -> object:
    from ckptstore.loading.index_read import IndexReader
    from ckptstore.state.index.outline import INDEX_NAME

    return _looked_at(IndexReader(_reading({INDEX_NAME: data}), "", {INDEX_NAME: len(data)}.get).whole())


def _looked_at(index: Any) -> object:
    index.check_complete()
    found = [index.chunks(fqn, 0) for fqn in index.tensors]
    index.check_files(dict.fromkeys(index.files, 1 << 40))
    values = index.common_values(), index.own_values(0), index.value_ranks()
    return found, values, index.aliases


def _outlines() -> list[bytes]:
    """Without header and digest, so that what is behind these has to find what is wrong."""
    from ckptstore.state.index.outline import Outline, PartFile, Span, encode_table
    from ckptstore.state.index.part import Tensor
    from ckptstore.state.tensors.boxes import Cut
    from ckptstore.state.tensors.layouts import Mesh, MeshLayout

    meshes = Mesh((2, 2), (0, 1, 2, 3)), Mesh((3,), (3, 0, 2))
    layouts = MeshLayout(meshes[0], (Cut(-1), Cut(0))), MeshLayout(meshes[1], (Cut(1, 2),))
    tensors = [
        Tensor("a", "float32", (5, 3), layout=1),
        Tensor("b", "int8", (4, 700), layout=2),
        Tensor("c", "float32", (5, 3), layout=1),
    ]
    rest = {"tied": {"c": "a"}, "own": {"b": 2, "value": 0}, "common": (0,), "spans": (Span(1, 0, 2), Span(3, 1, 1))}
    parts = tuple(PartFile(100 + rank, Digest("crc32c", rank)) for rank in range(4))
    table = encode_table(tensors, layouts)
    outlines = Outline(parts, table, **rest, num_prefixes=16), Outline(parts, encode_table([]), is_packed=True)
    return [outline.encode()[_OUTLINE_AT:] for outline in outlines]


_OUTLINE_AT = 12


def _decode_outline(data: bytes) -> object:
    from ckptstore.state.index.outline import Outline
    from ckptstore.state.tensors.boxes import whole

    outline = Outline.decode(b"".join([b"CKPTTIXO", Digest.of(data).value.to_bytes(4, "little"), data]))
    held = [outline.holders(tensor.key, 0, whole(tensor.shape)) for tensor in outline.tensors]
    return held, [outline.place(rank) for rank in range(min(9, outline.world_size))]


def _parts(indexes: Sequence[bytes]) -> list[bytes]:
    from ckptstore.state.index.outline import Outline

    found = []
    for data in indexes:
        outline = Outline.decode(data)
        behind = data[len(data) - outline.packed_bytes :]
        found += [behind[outline.place(rank)[1] :][: part.size_bytes] for rank, part in enumerate(outline.parts)]
    return found


def _decode_part(data: bytes) -> object:
    """A part whose digest is right, so that its decoder has to find what is wrong."""
    from ckptstore.state.index.part import Part
    from ckptstore.state.index.tensor_index import TensorIndex

    return _looked_at(TensorIndex([Part.decode(data, rank=0, file="f")]))


def _decode_kept(data: bytes) -> object:
    from ckptstore.state.write.incremental import Kept

    kept = Kept.decode(data, attempt="step-0000000001-e0001-0123abcd", file="digests")
    return kept.still_good(
        {(c.key, c.box): c.digest for f in kept.files for c in f.chunks}, algorithm="crc32c"
    ), kept.encode()


def _value_texts() -> list[bytes]:
    import datetime
    from collections import Counter, OrderedDict, defaultdict

    import numpy
    import torch

    from ckptstore.state.live.values import Encoder

    values: dict[str, Any] = {
        "plain": [1, 2.5, "x", None, True, {"a": [1]}],
        "tagged": (1, {2, 3}, frozenset("a"), slice(1, 2), 1 + 2j, range(3), ..., 10**30, float("nan")),
        "dicts": [{1: 2}, OrderedDict(a=1), Counter("aab"), defaultdict(int, a=1)],
        "packed": [
            {n: (n, str(n % 7), None, n % 2 == 0, n / 3, b"x", [10**30]) for n in range(200)},
            Counter(range(1100)),
        ],
        "bytes": [b"abc", bytearray(b"x"), io.BytesIO(b"x"), b"y" * 70_000, list(range(2000)), [0.5] * 2000],
        "times": [
            datetime.date(2026, 1, 1),
            datetime.time(1, 2),
            datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
            datetime.timedelta(1),
        ],
        "arrays": [numpy.float32(1), numpy.arange(6).reshape(2, 3), numpy.array(["a", "bc"])],
        "torch": [torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.ones(2)],
    }
    encoder = Encoder(lambda tensor: "key")
    texts = [json.dumps({key: encoder.encode(value, path=key)}) for key, value in values.items()]
    attack = Encoder(lambda tensor: "key", allow_pickle=True).encode(_Attack(), path="a")
    return [text.encode() for text in (*texts, json.dumps({"pickle": attack}))]


def _decode_values(data: bytes) -> object:
    import numpy

    from ckptstore.state.index.tensor_index import _values
    from ckptstore.state.live.values import Decoder, references

    found = dict(_values(data))
    list(references(found))
    decoder = Decoder(lambda key: numpy.zeros(3, numpy.uint8))
    for key, value in found.items():
        decoder.decode(value, path=key)
    return found


class _Attack:
    """What a pickle can do to who reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("true",)


def _attacks() -> list[bytes]:
    """Pickles that run something, and one that changes torch."""
    return [
        pickle.dumps(_Attack(), protocol=2),
        b'cbuiltins\neval\n(S\'__import__("os").system("true")\'\ntR.',
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(}S'__init__'\nNsb.",
        b"ctorch\nload\n(S'/etc/passwd'\ntR.",
        b"cpathlib\nPosixPath\n(S'/etc'\ntR.",
    ]


def _reading(files: dict[str, bytes]) -> Callable[[Sequence[RangeRead]], None]:
    """A reader of these files that compares no digests: they would stop nearly every mutation."""

    def read(ranges: Sequence[RangeRead]) -> None:
        for item in ranges:
            at = item.offset
            for view in item.views:
                found = files[item.key][at : at + len(view)]
                if len(found) != len(view):
                    raise CheckpointDamaged(f"{item.key} ends early")
                view[:] = found
                at += len(view)

    return read


_STOCK_DATA = "__0_0.distcp"
_CUT = slice(9_000, 165_000)
"""Elements of the large tensor: mutations shall meet what is around them."""


def _stock_data(files: dict[str, bytes]) -> list[bytes]:
    data = files[_STOCK_DATA]
    return [data[: _CUT.start] + data[_CUT.stop :]]


def _decode_stock(files: dict[str, bytes], name: str) -> Callable[[bytes], object]:
    def decode(data: bytes) -> object:
        from ckptstore.extensions.exchange.from_files import read_dcp
        from ckptstore.extensions.exchange.intake import Intake

        if name == _STOCK_DATA:
            data = data[: _CUT.start] + files[name][_CUT] + data[_CUT.start :]
        given = {**files, name: data}
        sizes = {key: len(content) for key, content in given.items()}
        flat = read_dcp(given[".metadata"], _reading(given), sizes, Intake())
        return [entry.tensor.sum() for entry in flat.tensors.values()], flat.values

    return decode


def _frames() -> list[bytes]:
    import torch

    from ckptstore.state.tensors import frames

    plain = frames.template(torch.float32, (3, 4))
    return [plain.header + bytes(plain.payload_bytes) + plain.trailer, frames.value_frame(torch.ones(2, 2))]


def _decode_frame(data: bytes) -> object:
    from ckptstore.state.tensors import frames
    from ckptstore.state.tensors.boxes import Box
    from ckptstore.stock.stock_pickles import is_contiguous_frame

    tail = data[-2048:]
    offset, size_bytes, _ = frames.payload_range(tail, len(data), file="x")
    is_contiguous_frame(data[:4096], Box((0, 0), (3, 4)), "float32")
    return frames.payload_offset(data[offset : offset + 30], offset, file="x"), size_bytes


def _safetensors() -> list[bytes]:
    from ckptstore.extensions.exchange.safetensors_file import SafetensorsEntry, header

    entries = [SafetensorsEntry("a", "float32", (2, 3)), SafetensorsEntry("b", "int8", (5,))]
    return [header(entries, {"format": "pt"}) + bytes(29), header([], {})]


def _decode_safetensors(data: bytes) -> object:
    from ckptstore.extensions.exchange.safetensors_file import read_header

    with open(memory := os.memfd_create("safetensors"), "wb") as file:
        file.write(data)
        file.flush()
        return read_header(Path(f"/proc/self/fd/{memory}"))


def attempt(target: Target, seed: str, found: Found) -> None:
    """One mutation, decoded."""
    data = mutated(target.samples, seed)
    found.num_tried += 1
    started = time.process_time()
    _watching[0] = True
    signal.setitimer(signal.ITIMER_PROF, 2 * MOST_SECONDS)
    try:
        target.decode(data)
    except CkptstoreError as error:
        found.num_refused += 1
        if len(str(error)) > 20_000:
            found.problems.append(f"{seed}: an error of {len(str(error))} characters")
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        found.problems.append(f"{seed}: {type(error).__name__}: {str(error)[:200]} ({last.filename}:{last.lineno})")
    finally:
        _watching[0] = False
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - started
    found.slowest_seconds = max(found.slowest_seconds, seconds)
    if seconds > MOST_SECONDS:
        found.problems.append(f"{seed}: {seconds:.1f} seconds")


_watching = [False]


def _watch(event: str, _arguments: tuple[Any, ...]) -> None:
    if _watching[0] and event in _FORBIDDEN:
        raise RuntimeError(f"decoding did {event}")


def _too_long(_number: int, _frame: FrameType | None) -> None:
    if _watching[0]:
        raise TooLong


def _status_bytes(name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) << 10


def _load_lazily_loaded() -> None:
    """What a decoding may load for the first time is no sign of an attack."""
    import codecs

    for name in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "ascii"):
        codecs.lookup(name)


def run(targets: dict[str, Target], count: int, first: int) -> dict[str, Found]:
    """Try `count` mutations of all targets together, each under a limit of memory."""
    _load_lazily_loaded()
    shares = sum(target.share for target in targets.values())
    results = {}
    for name, target in targets.items():
        for sample in target.samples:
            with contextlib.suppress(CkptstoreError):
                target.decode(sample)  # so that what is loaded lazily is there
        found = results[name] = Found()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status_bytes("VmRSS")
        limit = _status_bytes("VmSize") + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        for number in range(first, first + max(1, count * target.share // shares)):
            attempt(target, f"{name}-{number}", found)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        found.peak_bytes = _status_bytes("VmHWM") - before
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--target", action="append")
    parser.add_argument("--pure", action="store_true", help="only what needs no torch")
    given = parser.parse_args()
    targets = pure_targets()
    if not given.pure:
        targets |= state_targets()
    if given.target:
        targets = {name: targets[name] for name in given.target}
    signal.signal(signal.SIGPROF, _too_long)
    sys.addaudithook(_watch)
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, errors="backslashreplace", line_buffering=True)
    results = run(targets, given.count, given.first)
    print(f"{'decoder':12} {'tried':>8} {'refused':>8} {'slowest s':>10} {'peak MiB':>9} {'wrong':>6}")
    for name, found in results.items():
        line = f"{name:12} {found.num_tried:8} {found.num_refused:8} {found.slowest_seconds:10.3f}"
        print(f"{line} {found.peak_bytes >> 20:9} {len(found.problems):6}")
    for found in results.values():
        for problem in found.problems[:20]:
            print(problem)
    return int(any(found.problems for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
