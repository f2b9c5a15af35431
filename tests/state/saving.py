"""States that one process saves, what is stored of them, and the bytes of tensors."""

from __future__ import annotations

import json
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from ckptstore import Checkpoint, open_store
from ckptstore.checkpoint import files_behind
from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.loading.index_read import IndexReader
from ckptstore.loading.load_state import open_alone
from ckptstore.state.index.outline import INDEX_NAME
from ckptstore.storage.memory import MemoryStorage
from ckptstore.tools.cli import main
from ckptstore.transfer import Transfer


def save_plain(root: Path | str, tensors: dict[str, Any], values: dict[str, Any] | None = None, **options: Any) -> Any:
    """The checkpoint of tensors and values, in a new store."""
    with open_store(root, durable=False, group="solo") as store:
        return Checkpoint.from_uri(store.save(7, {**tensors, **(values or {})}, **options).uri)


def copied(source: Path | str, target: Path, *words: str) -> Any:
    """Copy a checkpoint or a store, and return what the command says of it."""
    done = CliRunner().invoke(main, ["cp", str(source), str(target), *words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def directory_of(checkpoint: Checkpoint) -> Path:
    return Path(checkpoint.uri.removeprefix("file://"))


def stored(checkpoint: Checkpoint) -> Any:
    """The stored state, with its index, as a process on its own reads it."""
    return open_alone(files_behind(checkpoint))


def index_of(data: bytes, digest: Any = None) -> Any:
    """The index that these bytes are, with all parts; `digest` is that of the file."""
    storage, retry = MemoryStorage(f"memory://{uuid.uuid4().hex}"), RetryConfig(retry_attempts=1)
    storage.write(INDEX_NAME, [memoryview(data)])
    with closing(Transfer(storage, config=TransferConfig(num_threads=1), retry=retry)) as transfer:
        return IndexReader(transfer.read, "", {INDEX_NAME: len(data)}.get, digest).whole()


def change_byte(path: Path, at: int | None = None) -> None:
    """Flip a bit of a file, in its middle unless a place is given."""
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 4
    path.write_bytes(data)


def blank(tensors: dict[str, Any]) -> dict[str, Any]:
    """Zeros of the same forms."""
    return {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in tensors.items()}


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, for comparing what has no equality (fp8) or has NaN."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
