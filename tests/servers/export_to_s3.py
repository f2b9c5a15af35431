"""What the processes of the export tests run: an export to a bucket, alone or as the ranks of a group."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from ckptstore import Checkpoint, StorageGroup
from ckptstore.errors import CkptstoreError
from ckptstore.interchange import export


def export_as_rank(source: str, uri: str, shard_size_bytes: int, options: dict[str, Any], kill: int | None) -> Any:
    """Export with all ranks of this job; what each of them wrote or raised. Rank `kill` dies after its first file."""
    from ckptstore.extensions.exchange.to_safetensors import ExportProgress

    rank, wrote = int(os.environ["RANK"]), list[str]()
    done = ExportProgress.done

    def marked(self: Any, name: str, size_bytes: int) -> None:
        done(self, name, size_bytes)
        wrote.append(name)
        if rank == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    ExportProgress.done = marked  # type: ignore[method-assign]
    group = StorageGroup(rank=rank, world_size=int(os.environ["WORLD_SIZE"]), start_token=f"export-{kill}")
    os.environ["CKPTSTORE_RANK_TIMEOUT_SECONDS"] = "4"
    asked: dict[str, Any] = {"to": "safetensors", "shard_size_bytes": shard_size_bytes, "storage_options": options}
    try:
        report = export(Checkpoint.from_uri(source), uri, group=group, **asked)
    except CkptstoreError as error:
        return wrote, type(error).__name__
    return wrote, report.files


def main(source: str, uri: str, options: str, shard_size_bytes: str, warm: str = "") -> None:
    """Export. With the key of a `warm` tensor that is exported first, for what is loaded on first use; then print by
    how many bytes the export raised the peak of memory."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "state"))
    from export_worker import status_bytes

    checkpoint = Checkpoint.from_uri(source)
    asked: dict[str, Any] = {"to": "safetensors", "storage_options": json.loads(options)}
    if warm:
        export(checkpoint, f"{uri}-warm", include=warm, **asked)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = status_bytes("VmRSS")
    export(checkpoint, uri, shard_size_bytes=int(shard_size_bytes), **asked)
    print(status_bytes("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
