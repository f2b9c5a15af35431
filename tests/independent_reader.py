"""Reads stores of format version 1, from docs/reference/format-v1.md alone: nothing of ckptstore is imported.

python tests/independent_reader.py PATH        # what the latest checkpoint of a store on a disk holds"""

import base64
import hashlib
import json
import math
import struct
import sys
import zlib
from itertools import accumulate, islice
from pathlib import Path

import google_crc32c
import numpy as np
import xxhash

BLOCK = 1 << 20
SIZES = [1, 1, 1, 2, 4, 8, 2, 4, 8, 2, 2, 4, 8, 4, 8, 16, 1, 1, 1, 1, 1, 1]
WORDS = """bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex32 complex64
complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"""
NAMES = WORDS.split()


def crc(data):
    return google_crc32c.value(bytes(data))


def fits(data, digest):
    """Whether bytes have a digest, given as text."""
    return digest in (f"crc32c:{crc(data):08x}", f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}")


def need(holds, otherwise):
    if not holds:
        raise ValueError(otherwise)


def numbers(text):
    """A set or sequence of numbers as text."""
    if text.startswith("z"):
        data, found, last, number, shift = zlib.decompress(base64.b64decode(text[1:])), [], 0, 0, 0
        for byte in data:
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                last += number >> 1 if number % 2 == 0 else -(number + 1 >> 1)
                found.append(last)
                number = shift = 0
        return found
    found = []
    for item in text.split():
        span, _, step = item.partition("/")
        single, _, times = span.partition("*")
        first, _, last = single.partition("-")
        if times:
            found += [int(first)] * int(times)
        elif last:
            sign = 1 if int(last) >= int(first) else -1
            found += range(int(first), int(last) + sign, sign * int(step or 1))
        else:
            found.append(int(first))
    return found


def read_log(directory):
    """The records, the chain checked, and for each what is live, worked out anew from the changes."""
    records, live, pinned, trash, previous, places = [], set(), set(), {}, "", {}
    for number, path in enumerate(sorted(Path(directory).glob("[0-9]*.json")), 1):
        data = path.read_bytes()
        head, _, body = data.partition(b",")
        need(head == b'{"body_sha256":"%s"' % hashlib.sha256(body).hexdigest().encode(), f"{path} is damaged")
        record = json.loads(data)
        need(record["version"] == 1 and record["number"] == number, f"{path} is another record")
        need(record["previous"] == previous, f"{path} does not follow the record before")
        previous, change, state = hashlib.sha256(data).hexdigest(), record["change"], record["state"]
        gone = set()
        if record["kind"] == "checkpoint":
            live.add(number)
            kept = set(numbers(state.get("pinned", "")))
            gone = set(numbers(change["drops"])) | set(numbers(change["replaces"])) - kept
        elif record["kind"] == "remove":
            gone = set(numbers(change["trash"]))
            need(change.get("unpins") or not gone & pinned, f"{path} removes what is pinned")
        elif record["kind"] == "thin":
            whole = change["thins"]
            need(change["checkpoint"]["thinned"]["dropped"], f"{path} does not say what was dropped")
            live, gone, places[number] = live | {number}, {whole}, places.get(whole, whole)
        elif record["kind"] == "restore":
            back = set(numbers(change["numbers"]))
            taken = {places.get(key, key) for key in back}
            gone, live = {key for key in live if places.get(key, key) in taken}, live | back
        kept = {key: by for key, by in trash.items() if key not in live | set(numbers(change.get("drop", "")))}
        live, trash = live - gone, kept | dict.fromkeys(gone, number)
        held = state.get("trash", {"numbers": "", "removed_by": ""})
        need(set(numbers(state["live"])) == live, f"{path} has other live checkpoints than its changes give")
        need(dict(zip(numbers(held["numbers"]), numbers(held["removed_by"]), strict=True)) == trash, f"{path}: trash")
        places = {key: whole for key, whole in places.items() if key in live or key in trash}
        thinned = state.get("thinned", {"numbers": "", "wholes": ""})
        pairs = zip(numbers(thinned["numbers"]), numbers(thinned["wholes"]), strict=True)
        need(dict(pairs) == places, f"{path} has other thinned checkpoints than its changes give")
        pinned = set(numbers(state.get("pinned", "")))
        records.append(record)
    return records


def latest(state):
    """The number of the latest checkpoint: the highest live one that is not thinned."""
    thinned = numbers(state.get("thinned", {"numbers": ""})["numbers"])
    return max(set(numbers(state["live"])) - set(thinned))


def read_part(data):
    """One rank's part of a tensor index."""
    magic, version, rank, t, c, f, s, d, flags = struct.unpack_from("<8s8I", data)
    need(magic == b"CKPTTIX1" and version == 1 and flags < 512, "this is no part of an index that this reader knows")
    lengths, (n,), at = struct.unpack_from("<8Q", data, 40), struct.unpack_from("<Q", data, 104), 112

    def column(kind, count):
        nonlocal at
        found = np.frombuffer(data, kind, count, at)
        at += found.nbytes
        return found.tolist()

    offsets, slab_offsets, slab_sizes = column("<u8", c), column("<u8", s), column("<u8", s)
    pool, digest_bytes = column("<u8" if flags & 1 else "<u4", n), 16 if flags >= 256 else 4
    blocks = iter([data[at + i * digest_bytes : at + (i + 1) * digest_bytes][::-1].hex() for i in range(d)])
    at += d * digest_bytes
    chunk_tensor, chunk_box, shape_at = column("<u4", c), column("<u4", c), column("<u4", t)
    per_file, slab_files = column("<u4", f), column("<u4", s)
    dtypes, dims, tensor_flags = column("u1", t), column("u1", t), column("u1", t)
    texts = []
    for size in lengths[::2]:
        texts.append(zlib.decompress(data[at : at + size]))
        at += size
    need([len(text) for text in texts] == list(lengths[1::2]), "a text has another size")
    need(at == len(data), "a part has another size")
    keys, files = (text.decode("utf-8", "surrogatepass").split("\0") for text in texts[:2])
    tensors, chunks, regions = {}, [], set()
    for row in range(t):
        shape = pool[shape_at[row] + dims[row] : shape_at[row] + 2 * dims[row]]
        tensors[keys[row]] = NAMES[dtypes[row]], tuple(shape), tensor_flags[row]
    file_of = [file for file, count in enumerate(per_file) for _ in range(count)]
    for file, offset, row, box in zip(file_of, offsets, chunk_tensor, chunk_box, strict=True):
        place = pool[box : box + dims[row]], pool[box + dims[row] : box + 2 * dims[row]]
        size = math.prod(place[1]) * SIZES[dtypes[row]]
        chunks.append((keys[row], files[file], offset, size, place))
        regions |= {(file, offset, size)} if size >= BLOCK else set()
    regions |= set(zip(slab_files, slab_offsets, slab_sizes, strict=True))
    digests = []
    for file, offset, size in sorted(regions):
        count = -(-size // BLOCK)
        kind = "xxh3-128:" if flags >= 256 else "crc32c:"
        digests.append((files[file], offset, size, [kind + digest for digest in islice(blocks, count)]))
    need(not list(blocks), "more digests than blocks")
    return rank, tensors, chunks, digests, *(json.loads(text or b"{}") for text in texts[2:])


def read_index(data, read):
    """The parts of an index, packed into its file or read each by the name of its file."""
    magic, outline_crc, version, head_bytes, table_bytes = struct.unpack_from("<8sIIQQ", data)
    need(magic == b"CKPTTIXO" and version == 1, "this is no index")
    at = 32 + head_bytes + table_bytes
    need(crc(data[12:at]) == outline_crc, "the outline is damaged")
    outline = json.loads(zlib.decompress(data[40 : 32 + head_bytes]))
    digits = len(f"{outline['num_prefixes'] - 1:x}")
    parts = []
    for rank, (size, digest) in enumerate(outline["parts"]):
        spread = f"{rank % outline['num_prefixes']:0{digits}x}"[::-1] + "/" if outline["num_prefixes"] > 1 else ""
        packed = outline["packed"]
        part = data[at : at + size] if packed else read(f"{spread}tensors-rank={rank:05d}.index")
        at += size if packed else 0
        need(len(part) == size and fits(part, digest), f"the part of rank {rank} is damaged")
        parts.append(read_part(part))
        need(parts[-1][0] == rank, "a part is in another's place")
    need(at == len(data), "the index has another size")
    return parts


def read_modules(data):
    """The notes of modules, as stored, by the key and the name of the module; of all ranks, the lowest rank's."""
    head_bytes, table_bytes = struct.unpack_from("<QQ", data, 16)
    table, found = json.loads(zlib.decompress(data[40 + head_bytes : 32 + head_bytes + table_bytes])), {}
    for key, (pairs, *_), *_ in table.get("modules", []):
        for note, names in pairs:
            for name in names:
                found.setdefault((key, name), note)
    return found


def read_state(read):
    """Tensors as {key: (dtype, shape, bytes)} and plain values as stored, `read` giving a file by its name. What ranks
    have of their own is under (key, rank). Every digest is checked."""
    parts = read_index(read("tensors.index"), read)
    files = {name: read(name) for name in sorted({chunk[1] for part in parts for chunk in part[2]})}
    tensors, values, filled = {}, {}, {}
    for rank, held, chunks, digests, common, own in parts:
        for name, offset, size, blocks in digests:
            for number, digest in enumerate(blocks):
                stop = min(size, (number + 1) * BLOCK)
                block = files[name][offset + number * BLOCK : offset + stop]
                need(fits(block, digest) and len(block) == stop - number * BLOCK, f"block {number}, {name} is damaged")
        names = {key: (key, rank) if flags & 1 else key for key, (_, _, flags) in held.items()}
        for key, (dtype, shape, _) in held.items():
            item = np.zeros((*shape, SIZES[NAMES.index(dtype)]), np.uint8)
            known = tensors.setdefault(names[key], (dtype, shape, item))
            need(known[:2] == (dtype, shape), f"ranks disagree on {key}")
        for key, name, offset, size, (offsets, sizes) in chunks:
            _, shape, whole = tensors[names[key]]
            box = tuple(slice(at, at + count) for at, count in zip(offsets, sizes, strict=True))
            part = np.frombuffer(files[name], np.uint8, size, offset).reshape((*sizes, whole.shape[-1]))
            covered = filled.setdefault(names[key], np.zeros(shape, np.uint8))
            need(not covered[box].any(), f"chunks of {key} overlap")
            whole[box], covered[box] = part, 1
        values.update(common)
        values.update({(key, rank): value for key, value in own.items()})
    for key, (_, shape, _) in tensors.items():
        need(not math.prod(shape) or filled.get(key, np.zeros(1)).all(), f"{key} has a hole")
    return {key: (dtype, shape, item.tobytes()) for key, (dtype, shape, item) in tensors.items()}, values


def unpacked(levels, data):
    """The value of a content of kind `packed`, whose bytes are given."""
    at, found, below = 0, [], []

    def take(kind, count):
        nonlocal at
        part = np.frombuffer(data, kind, count, at)
        at += part.nbytes
        return part.tolist()

    def texts(kind, count, distinct, index, width, size):
        places = take(f"<u{index}", count) if index else range(count)
        ends, whole = [0, *accumulate(take(f"<u{width}", distinct))], bytes(take("u1", size))
        whole = whole if kind == "bytes" else whole.decode("utf-8", "surrogatepass")
        return [whole[ends[place] : ends[place + 1]] for place in places]

    def column(kind, count, *form):
        if kind == "none":
            return [None] * count
        if kind in ("bool", "float"):
            return list(map(bool, take("u1", count))) if kind == "bool" else take("<f8", count)
        if kind == "int":
            return take(f"<i{form[0]}", count) if form[0] else [int(x, 16) for x in texts(kind, count, *form[1:])]
        return texts(kind, count, *form) if kind in ("str", "bytes") else take(f"<u{form[0]}", count)

    for level in levels:
        count = sum(described[1] for described in level)
        codes = take("u1", count) if len(level) > 1 or level[0][0] == "none" else [0] * count
        found.append((codes, [(described[0], column(*described)) for described in level]))
    need(at == len(data), "a packed value has another size")
    for codes, columns in reversed(found):
        items, filled = iter(below), []
        for kind, held in columns:
            if kind == "dict":
                keys = iter(list(islice(items, sum(held))))
                made = [dict(zip(islice(keys, size), islice(items, size), strict=True)) for size in held]
            else:
                make = {"list": list, "tuple": tuple}.get(kind)
                made = [make(islice(items, size)) for size in held] if make else held
            filled.append(iter(made))
        below = [next(filled[code]) for code in codes]
        need(next(items, need) is need, "a level has another number of items")
    return below[0]


def read_checkpoint(root, record):
    """A checkpoint of kind `state` by its record, every file against its digest."""
    entry, places = record["change"]["checkpoint"], Path(root) / "checkpoints"
    data = (places / entry["attempt"] / "ckptstore.json").read_bytes()
    need(hashlib.sha256(data).hexdigest() == entry["manifest_sha256"], "the manifest is another one")
    listed = {file["name"]: file for file in json.loads(data)["files"]}

    def read(name):
        file = listed[name]
        content = (places / file.get("attempt", entry["attempt"]) / name).read_bytes()
        need(len(content) == file["size_bytes"] and fits(content, file["digest"]), f"{name} is damaged")
        return content

    for name in listed:
        read(name)
    return read_state(read)


if __name__ == "__main__":
    log = read_log(Path(sys.argv[1]) / "log")
    found, plain = read_checkpoint(sys.argv[1], log[latest(log[-1]["state"]) - 1])
    for key, (dtype, shape, content) in sorted(found.items(), key=str):
        print(key, dtype, list(shape), hashlib.sha256(content).hexdigest()[:16])
    print(json.dumps({str(key): value for key, value in plain.items()}, indent=1))
