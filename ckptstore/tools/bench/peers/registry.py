"""The contenders of each workload."""

from __future__ import annotations

from ckptstore.tools.bench.gpu.device_peers import (
    DefaultStaged,
    DefaultStagedProcess,
    FastSafetensors,
    FastSafetensorsDirect,
    PinnedCopy,
    RawToDevice,
    SafetensorsToDevice,
)
from ckptstore.tools.bench.gpu.first_saves import FirstDefaultStaged, FirstSave, FirstSaveResumed, FirstSaveWarmed
from ckptstore.tools.bench.peers.base import Contender
from ckptstore.tools.bench.peers.dcp import AsyncDcp, AsyncDcpProcess, Dcp, DcpFsspec, DcpHuggingFace, DcpS3
from ckptstore.tools.bench.peers.directories import (
    CopyRecursively,
    FsspecCopy,
    PyarrowCopy,
    RayPersist,
    RayReport,
    RayReportAsync,
)
from ckptstore.tools.bench.peers.files import (
    AsyncLightning,
    Lightning,
    S3Checkpoint,
    Safetensors,
    SafetensorsFsspec,
    TorchSave,
    TorchSaveFsspec,
)
from ckptstore.tools.bench.peers.limits import (
    BothCopies,
    Loopback,
    Memcpy,
    PlainSockets,
    RawDisk,
    RawDiskLoad,
    RawNode,
    RawRequests,
)
from ckptstore.tools.bench.peers.node import FsspecDownload, OneDownload, PyarrowDownload, RawDownload, RayAsDirectory
from ckptstore.tools.bench.peers.orbax import AsyncOrbax, Orbax
from ckptstore.tools.bench.peers.own import (
    AsyncCkptstore,
    Ckptstore,
    DirectoryCkptstore,
    FirstSaveCkptstore,
    KeptCkptstore,
    LinkedCkptstore,
)
from ckptstore.tools.bench.peers.tier import (
    AsyncDcpProcessToBucket,
    AsyncDcpToBucket,
    AsyncLightningToBucket,
    BesideDcp,
    BesideLightning,
    BesideRay,
    CappedDrain,
    DcpFsspecFromBucket,
    DcpS3FromBucket,
    FromBucket,
    FromDisk,
    FromEmptyNodes,
    FromOwnNode,
    FromPartner,
    NoDrain,
    NoTier,
    OneCopy,
    RayReportToBucket,
    S3CheckpointFromBucket,
    ToDisk,
    TwoCopies,
)
from ckptstore.tools.bench.peers.torch_checkpointing import AsyncTorchCheckpointing, TorchCheckpointing
from ckptstore.tools.bench.workloads.finding import FINDERS

Kinds = tuple[type[Contender], ...]

_ON_DISK: Kinds = (Dcp, DcpHuggingFace, TorchCheckpointing, TorchSave, Safetensors, Lightning, RayReport, Orbax)
_STATES: Kinds = (
    *(Dcp, DcpHuggingFace, DcpFsspec, DcpS3, S3Checkpoint, TorchCheckpointing, TorchSave, TorchSaveFsspec),
    *(Safetensors, SafetensorsFsspec, Lightning, RayReport, Orbax),
)
_ASYNC: Kinds = (AsyncDcp, AsyncDcpProcess, AsyncTorchCheckpointing, AsyncLightning, RayReportAsync, AsyncOrbax)
_TO_BUCKET: Kinds = (AsyncDcpToBucket, AsyncDcpProcessToBucket, AsyncLightningToBucket, RayReportToBucket)
_OF_BUCKET: Kinds = (DcpFsspecFromBucket, DcpS3FromBucket, S3CheckpointFromBucket)

CONTENDERS: dict[str, Kinds] = {
    "save": (KeptCkptstore, FirstSaveCkptstore, *_STATES, RawDisk, RawRequests, PlainSockets),
    "load": (Ckptstore, *_STATES, RawDiskLoad, RawRequests),
    "async": (AsyncCkptstore, *_ASYNC, Memcpy),
    "directory": (
        *(DirectoryCkptstore, LinkedCkptstore, RayPersist, CopyRecursively, PyarrowCopy, FsspecCopy),
        *(RawDisk, RawRequests),
    ),
    "node-cache": (OneDownload, RayAsDirectory, PyarrowDownload, FsspecDownload, RawDownload),
    "tier-save": (
        OneCopy,
        TwoCopies,
        NoTier,
        ToDisk,
        *_ASYNC,
        *_TO_BUCKET,
        RawNode,
        BothCopies,
        Loopback,
        Memcpy,
    ),
    "tier-resume": (
        FromOwnNode,
        FromPartner,
        FromEmptyNodes,
        FromDisk,
        FromBucket,
        *_ON_DISK,
        *_OF_BUCKET,
        RawDiskLoad,
    ),
    "tier-steps": (CappedDrain, BesideDcp, BesideLightning, BesideRay, NoDrain),
    "ranks": (Ckptstore, *_STATES, RawDisk, RawRequests),
    "gpu-stall": (AsyncCkptstore, DefaultStaged, DefaultStagedProcess, PinnedCopy),
    "gpu-steps": (AsyncCkptstore, DefaultStaged, DefaultStagedProcess),
    "gpu-first": (FirstSave, FirstSaveWarmed, FirstSaveResumed, FirstDefaultStaged, PinnedCopy),
    "gpu-load": (Ckptstore, Dcp, SafetensorsToDevice, FastSafetensors, FastSafetensorsDirect, RawToDevice),
}
"""In the order of the tables. Contests that begin with "tier-" or "gpu-" belong to the workload of that name."""

_NAMED = [one.family for found in CONTENDERS.values() for one in found if one.role == "peer"]
FAMILIES = tuple(dict.fromkeys([*_NAMED, *(one.family for one in FINDERS)]))
"""The names for `--peers`."""
