"""Who takes part in which workload."""

from __future__ import annotations

from ckptstore.bench.gpu.device_peers import (
    DefaultStaged,
    DefaultStagedProcess,
    FastSafetensors,
    FastSafetensorsDirect,
    PinnedCopy,
    RawToDevice,
    SafetensorsToDevice,
)
from ckptstore.bench.gpu.first_saves import FirstDefaultStaged, FirstSave, FirstSaveResumed, FirstSaveWarmed
from ckptstore.bench.peers.base import Contender
from ckptstore.bench.peers.dcp import AsyncDcp, AsyncDcpProcess, Dcp, DcpFsspec, DcpS3
from ckptstore.bench.peers.directories import CopyRecursively, RayPersist
from ckptstore.bench.peers.files import Lightning, Orbax, Safetensors, TorchSave
from ckptstore.bench.peers.limits import Memcpy, PlainSockets, RawDisk, RawDiskLoad, RawRequests
from ckptstore.bench.peers.node import OneDownload, RawDownload, RayAsDirectory
from ckptstore.bench.peers.own import (
    AsyncCkptstore,
    AsyncCkptstoreProcess,
    Ckptstore,
    DirectoryCkptstore,
    LinkedCkptstore,
)
from ckptstore.bench.peers.tier import (
    CappedDrain,
    FromBucket,
    FromDisk,
    FromEmptyNodes,
    FromOwnNode,
    FromPartner,
    NoDrain,
    NoTier,
    OneCopy,
    ToDisk,
    TwoCopies,
)
from ckptstore.bench.peers.tier_limits import BothCopies, Loopback, RawNode
from ckptstore.bench.peers.torch_checkpointing import AsyncTorchCheckpointing, TorchCheckpointing

_STATES: tuple[type[Contender], ...] = (
    Dcp,
    DcpFsspec,
    DcpS3,
    TorchCheckpointing,
    TorchSave,
    Safetensors,
    Lightning,
    Orbax,
)

CONTENDERS: dict[str, tuple[type[Contender], ...]] = {
    "save": (Ckptstore, *_STATES, RawDisk, RawRequests, PlainSockets),
    "load": (Ckptstore, *_STATES, RawDiskLoad, RawRequests),
    "async": (AsyncCkptstore, AsyncCkptstoreProcess, AsyncDcp, AsyncDcpProcess, AsyncTorchCheckpointing, Memcpy),
    "directory": (DirectoryCkptstore, LinkedCkptstore, RayPersist, CopyRecursively, RawDisk, RawRequests),
    "node-cache": (OneDownload, RayAsDirectory, RawDownload),
    "tier-save": (OneCopy, TwoCopies, NoTier, ToDisk, AsyncDcp, RawNode, BothCopies, Loopback, Memcpy),
    "tier-resume": (FromOwnNode, FromPartner, FromEmptyNodes, FromDisk, FromBucket, RawDiskLoad),
    "tier-steps": (CappedDrain, NoDrain),
    "ranks": (Ckptstore, Dcp, DcpFsspec, DcpS3, RawDisk, RawRequests),
    "gpu-stall": (AsyncCkptstore, AsyncCkptstoreProcess, DefaultStaged, DefaultStagedProcess, PinnedCopy),
    "gpu-steps": (AsyncCkptstore, AsyncCkptstoreProcess, DefaultStaged, DefaultStagedProcess),
    "gpu-first": (FirstSave, FirstSaveWarmed, FirstSaveResumed, FirstDefaultStaged, PinnedCopy),
    "gpu-load": (Ckptstore, Dcp, SafetensorsToDevice, FastSafetensors, FastSafetensorsDirect, RawToDevice),
}
"""In the order of the tables. What begins with "tier-" or "gpu-" are the contests of the workload of that name."""

FAMILIES = tuple(dict.fromkeys(one.family for found in CONTENDERS.values() for one in found if one.role == "peer"))
"""What `--peers` knows."""
