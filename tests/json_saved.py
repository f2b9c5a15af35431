"""Valid files of JSON of every kind, written as users have them written: by saves, publications, exports."""

from __future__ import annotations

import json
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from meshes import distributed, mesh_for, outlined
from thread_ranks import run_threads
from torch.distributed.tensor import Replicate, Shard

import ckptstore
from ckptstore.checkpoint import Checkpoint
from ckptstore.config import StoreConfig
from ckptstore.extensions.exchange.appearing import appearing
from ckptstore.extensions.exchange.copying import copy_store
from ckptstore.extensions.exchange.safetensors import INDEX_NAME as WEIGHTS_INDEX
from ckptstore.extensions.publication.wire import Index
from ckptstore.extensions.publication.work import STATE_NAME, Spooled
from ckptstore.format.digest import Digest
from ckptstore.format.layout import MANIFEST_NAME, USER_METADATA_NAME, Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.format.record import Record
from ckptstore.integrations.ray.pointer import Pointer
from ckptstore.integrations.torch_checkpointing.drafts import Draft
from ckptstore.integrations.trackers.reference import Reference
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.retention import KeepLatest
from ckptstore.state.index.outline import INDEX_NAME, Outline
from ckptstore.storage.memory import MemoryStorage
from ckptstore.tools.run.folders import Folder, JobSeen, Rules
from ckptstore.transfer import Transfer
from ckptstore.transfer.opened import open_place


class Saved:
    """The files, each as it was written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._one_rank()
        self._several_ranks()
        self._publication()
        self._notes()

    def _one_rank(self) -> None:
        """Write a log with every kind of change, and all that lies beside it."""
        root, one = self.root, {"model": torch.arange(200_000.0), "optimizer": {"m": torch.arange(300_000.0)}}
        fast = ckptstore.FastTier(str(root / "fast"))
        policy = ckptstore.KeepAll() | ckptstore.KeepWeights(ckptstore.KeepAll())
        with ckptstore.open_store(root / "store", fast=fast) as store:
            store.save(1, one, metrics={"loss": 0.5, "worst": float("inf")}, metadata={"a": [1, {"b": None}]})
            self.certificate = next((root / "fast").rglob("fast.json")).read_bytes()
            store.drain()
        with ckptstore.open_store(root / "store", fast=fast) as store:
            store.resume()
        with ckptstore.open_store(root / "store", retention=policy) as store:
            store.resume()
            store.save(2, one, metrics={"loss": 0.25}, incremental="reference")
            store.save(3, one, metrics={"loss": 1.5, "worst": float("nan")}, incremental="reference")
            self.manifest, self.kept = _beside(store[3], MANIFEST_NAME), _beside(store[2], "digests-rank=00000.json")
            self.reference = Reference.to(store[3]).encode().encode()
            store.pin(2)
            store.unpin(2)
            store.pin(2)
            store.annotate(2, {"accuracy": 0.5})
            store.thin(2, ["optimizer*"], force=True)
            self.thinned = _beside(store[2], MANIFEST_NAME)
            store.save_directory(4, _directory(root / "files"))
            store.save_directory(5, root / "files")
            store.roll_back(4)
            self.hint = (root / "store/latest.json").read_bytes()
            store.remove(3, force=True)
            store.restore(3)
            store.remove(3, force=True)
            store[4].set_metadata({"a": [1, {"b": None}], "c": "x"})
            self.user_metadata = _beside(store[4], USER_METADATA_NAME)
            self.pointers = [
                Pointer.to(store[4], root=str(root / "store")).encode(),
                Pointer(root="../store", step=3, number=None, error="it failed").encode(),
            ]
            list(store.follow(cursor="reader", timeout_seconds=0))
            self.cursor = (root / "store/cursors/reader.json").read_bytes()
            with store[4].as_directory():
                self.lease = next((root / "store/leases").iterdir()).read_bytes()
            with closing(open_place(str(root / "copy"))) as place:
                copy_store(store, place)
        with ckptstore.open_store(root / "store", retention=KeepLatest(1)) as store:
            store.resume()
            store.save_directory(6, root / "files")
        self.identity = (root / "store/store.json").read_bytes()
        self.log, self.copied = (
            [Record.decode(path.read_bytes(), number) for number, path in enumerate(sorted(place.iterdir()), 1)]
            for place in (root / "store/log", root / "copy/log")
        )

    def _several_ranks(self) -> None:
        def save(store: ckptstore.CheckpointStore, rank: int) -> None:
            store.save(1, _state(rank), dtype={"hybrid": "bfloat16"})
            store.save_directory(2, _directory(self.root / f"rank{rank}"))

        with outlined():
            told = run_threads(4, self.root / "ranks", save)
        assert told == [None] * 4, told
        with ckptstore.open_store(self.root / "ranks") as store:
            self.outline = Outline.decode(_beside(store[1], INDEX_NAME))
            self.of_ranks = _beside(store[2], MANIFEST_NAME)

    def _publication(self) -> None:
        root, weights = self.root, {"a.weight": torch.arange(400.0).reshape(20, 20), "b": torch.ones(3)}
        with (
            ckptstore.open_publication(root / "published") as publication,
            ckptstore.Subscription(root / "published", root / "pulled") as subscription,
        ):
            publication.publish(1, weights)
            subscription.apply()
            publication.publish(2, {**weights, "b": torch.zeros(3)})
        full, delta = (root / f"published/weight_v00000{version}" for version in (1, 2))
        self.indexes = [(place / WEIGHTS_INDEX).read_bytes() for place in (full, delta)]
        self.weights = [next(place.glob("*.safetensors")).read_bytes() for place in (full, delta)]
        self.pulled = (root / "pulled" / STATE_NAME).read_bytes()
        index = Index.decode(self.indexes[1], "index")
        Spooled(delta, 2, f"2-{index.metadata['attempt'][-8:]}", index, {}).write_facts()
        held = Index.decode((root / "pulled" / WEIGHTS_INDEX).read_bytes(), "index").files
        told = {"old_files": held, "weight_map": held, "total_bytes": 1612, "boot": ""}
        self.journal = json.dumps({"links": [str(delta)], "local": json.loads(self.pulled), **told}).encode()

    def _notes(self) -> None:
        """What this machine alone has."""
        with appearing(self.root / "exported", is_own=lambda _: True, copied=["b", "a"]):
            (note,) = self.root.glob(".exported.export-*")
            self.note = note.read_bytes()
        (self.root / "trained/mine_7").mkdir(parents=True)
        (self.root / "trained/mine_7/weights").write_bytes(b"x")
        (self.root / "trained/last").symlink_to("mine_7")
        (self.root / "trained/side.bin").write_bytes(b"\xff")
        folder = Folder(self.root / "trained", Rules(patterns=("mine_*",), beside=("side.bin",), quiet_seconds=1e-6))
        looks = [folder.look(JobSeen(frozenset(), is_started=True)) for _ in range(2)]
        (found,) = looks[1].finished
        self.home = json.dumps(found.metadata(self.root)["folder"]).encode()
        self.finished = (folder.own / "finished.json").read_bytes()
        files, _ = in_memory("a", b"x")
        draft = Draft(files.storage, "a", "group/a/drafts/a/0", 0)
        draft.store(files.transfer, Attempt(1, 1, "0123abcd"), "b", [memoryview(b"x" * 9)], rank=0)
        self.draft = files.storage.read("group/a/drafts/a/0/f=b")


def in_memory(name: str, data: bytes) -> tuple[CheckpointFiles, Receipt]:
    """A directory of a checkpoint with this file in it, and its receipt."""
    storage, config = MemoryStorage(f"memory://{uuid.uuid4().hex}"), StoreConfig()
    storage.write(name, [memoryview(data)])
    transfer = Transfer(storage, config=config.transfer, retry=config.retry)
    files = CheckpointFiles(storage=storage, transfer=transfer, config=config)
    return files, Receipt(name, len(data), Digest.of(data), 0)


def _directory(path: Path) -> Path:
    (path / "empty").mkdir(parents=True)
    (path / "a").mkdir()
    (path / "a/b").write_bytes(b"x")
    return path


def _beside(checkpoint: Checkpoint, name: str) -> bytes:
    return Path(checkpoint.uri.removeprefix("file://"), name).read_bytes()


def _state(rank: int) -> dict[str, Any]:
    line, grid = mesh_for(rank, [0, 1, 2, 3]), mesh_for(rank, [[0, 3], [2, 1]])
    model, tied = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.arange(9.0)
    model._version = rank % 2 + 1  # noted beside its entries, as modules do that have changed
    return {
        "rows": distributed(torch.arange(24.0), line, [Shard(0)]),
        "hybrid": distributed(torch.arange(24.0), grid, [Replicate(), Shard(0)]),
        "own": torch.full((3,), float(rank)),
        "model": model,
        "tied": [tied, tied],
        "optimizer": {"groups": [{"lr": 0.5}], 3: {"x": 1}},
        "position": {"at": rank},
    }
