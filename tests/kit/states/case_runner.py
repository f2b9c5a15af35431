"""Run one case: the same program twice, once with ckptstore and once with torch.save, and compare them."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any

import torch

from ckptstore.catalogue import job_of
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptstoreError, InvalidState
from ckptstore.interchange import export
from ckptstore.opening import open_store
from ckptstore.state.index.key_paths import key_of
from ckptstore.store import CheckpointStore
from ckptstore.testing.oracle import (
    difference,
    frozen,
    give_back,
    gives_other_sizes,
    holds,
    keep,
    kept_in,
    observed,
    without_wrappers,
)
from kit.states.module_makers import NEEDS_GROUP
from kit.states.program import Program
from kit.states.refusals import explanation
from kit.states.state_case import StateCase, draw

_numbers = count()
_HEAVY_TIMES, _HEAVY_BYTES = 8, 300_000
"""A checkpoint may have that many times the bytes of torch.save's file, and that many more."""


@dataclass(frozen=True, slots=True)
class StateOutcome:
    """The outcome of a case.

    `kind` is "same", "refused" (as documented), "torch cannot" (load it either) or "no program" (torch itself does not
    build or run it); for a fault it names the fault and the maker involved, in words that do not change from seed to
    seed. `detail` is for people: the reason of a refusal, or all about a fault.
    """

    case: StateCase
    kind: str
    detail: str = ""

    @property
    def ok(self) -> bool:
        """True if ckptstore did what torch does, or refused as documented."""
        return self.kind in ("same", "refused", "torch cannot", "no program")


class _Fault(Exception):
    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind)
        self.kind, self.detail = kind, detail


class _Done(Exception):
    """Raised when the case has ended early as it may."""


def run(case: StateCase | int) -> StateOutcome:
    """Run a case, or the one of a seed, and return its outcome. Leaves nothing behind.

    torch.distributed is initialised for the cases that need it, in a world of one, unless it already is. A case of
    several ranks is run by all of them at once, which have initialised it.
    """
    case = draw(case) if isinstance(case, int) else case
    with _quiet(), group_of(case), _place(case) as uri:
        try:
            with open_store(uri, group="solo" if case.num_ranks == 1 else None, durable=False) as store:
                try:
                    _Run(case, store).run()
                finally:
                    if case.storage == "memory":
                        _empty(store)
        except _Fault as fault:
            return StateOutcome(case, fault.kind, fault.detail)
        except _Done as done:
            return StateOutcome(case, *done.args)
        except CkptstoreError as error:
            return StateOutcome(case, f"close: {type(error).__name__}", str(error))
    return StateOutcome(case, "same")


class _Run:
    """One case being run. `ours` is loaded and saved by ckptstore, `theirs` by torch."""

    def __init__(self, case: StateCase, store: CheckpointStore) -> None:
        self._case = case
        self._store = store
        self._flags = frozenset(case.flags)
        self._committed = 0
        """The number of checkpoints in the store."""

    def run(self) -> None:
        """Save, load, step; raises _Fault or _Done."""
        case = self._case
        ours, theirs = self._twice(self._flags, salt=0)
        self._live(ours, theirs, case.life[:1])
        incremental = case.save.startswith("incremental")
        if incremental:
            with self._on_all_ranks():
                self._save(ours, theirs, step=0)
        self._live(ours, theirs, case.life[1:])
        with self._on_all_ranks():
            kept, names = self._save(ours, theirs, step=1, last=True), ours.optimizer_names()
        if case.into == "running":
            self._live(ours, theirs, case.later)
        else:
            flags = self._flags ^ ({case.change} if case.change else set())
            saved = self._twice(self._flags, salt=0)[0] if case.tensors else ours
            ours, theirs = self._twice(flags, salt=1)
            for program in (ours, theirs):
                with self._on_device():
                    program.use_targets(saved)
        with self._on_all_ranks():
            self._load(ours, theirs, kept, names)
        with self._on_all_ranks():
            self._compare("load", ours, theirs)
        self._live(ours, theirs, ("step",), phase="step after the load")
        self._compare("step after the load", ours, theirs)

    @contextmanager
    def _on_all_ranks(self) -> Iterator[None]:
        """End a case on all ranks if it ends on one: the others would wait for that one."""
        import torch.distributed as dist

        ended: _Fault | _Done | None = None
        try:
            yield
        except (_Fault, _Done) as error:
            ended = error
        if self._case.num_ranks > 1:
            own = None if ended is None else "fault" if isinstance(ended, _Fault) else str(ended.args[0])
            kinds: list[Any] = [None] * self._case.num_ranks
            dist.all_gather_object(kinds, own)
            if ended is None and any(kinds):
                ended = _Done("no program" if "no program" in kinds else "same")
        if ended is not None:
            raise ended

    def _on_device(self) -> Any:
        return torch.device(self._case.device) if self._case.device else nullcontext()

    def _twice(self, flags: frozenset[str], *, salt: int) -> tuple[Program, Program]:
        with self._on_all_ranks(), self._on_device():
            try:
                return Program(self._case, flags, salt=salt), Program(self._case, flags, salt=salt)
            except Exception as error:  # torch rejects some combinations of parts
                raise _Done("no program") from error

    def _live(self, ours: Program, theirs: Program, events: tuple[str, ...], *, phase: str = "") -> None:
        for event in events:
            with self._on_all_ranks():
                try:
                    theirs.do(event)
                except Exception as error:
                    raise _Done("no program") from error
            with self._on_all_ranks():
                try:
                    ours.do(event)
                except Exception as error:
                    raise _Fault(f"{phase or event}: raises {type(error).__name__}", repr(error)) from error

    def _save(self, ours: Program, theirs: Program, *, step: int, last: bool = False) -> bytes:
        case = self._case
        with self._on_all_ranks():
            try:
                kept = keep(theirs.state)
            except Exception as error:  # FSDP1, for instance, of a module that leaves weights out
                raise _Done("no program") from error
        before = self._stored()
        kinds: dict[str, Any] = {
            "incremental": "reference" if case.seed % 2 else True,
            "stock_readable": case.stock_readable,
        }
        if not case.save.startswith("incremental"):
            del kinds["incremental"]
        elif kinds["incremental"] == "reference":  # files where stock readers do not look
            kinds["stock_readable"] = False
        try:
            if case.save.endswith("async"):
                pending = self._store.save_async(step, ours.state, **kinds)
                try:
                    self._live(ours, theirs, (case.meanwhile,) if last and case.meanwhile else ())
                finally:
                    pending.result()
            else:
                self._store.save(step, ours.state, **kinds)
        except (_Fault, _Done):
            raise
        except Exception as error:
            if self._stored() != before:
                raise _Fault("refused save leaves a checkpoint", str(error)) from error
            self._explain("save", error)
        self._committed += 1
        self._compare("save", ours, theirs)
        newest: Any = self._store.latest()
        if problems := newest.verify().problems:
            raise _Fault(f"save: a file is {problems[0].fault}", str(problems[0]))
        written = sum(receipt.size_bytes for receipt in newest.files)
        whole = sum(tensor.nbytes for tensor in ours.all_tensors())  # of an expanded tensor torch.save keeps one row
        if written > _HEAVY_TIMES * max(len(kept), whole) + _HEAVY_BYTES:
            raise _Fault("save: far more bytes than torch.save", f"{written} bytes, torch.save {len(kept)}")
        if last and case.num_ranks == 1:
            self._read(newest, kept)
        return kept

    def _read(self, newest: Checkpoint, data: bytes) -> None:
        """Compare `to_dict` and an export for torch, which need no state to load into, with what torch.save kept."""
        try:
            reads = {"to_dict": (newest.to_dict(), ()), "export": _exported(newest)}
        except InvalidState:  # of a tensor that only an object of its class can take
            return
        for (how, (found, notices)), (path, item) in product(reads.items(), kept_in(data).items()):
            if any(notice.startswith((f"{key_of(path)} is left out", f"{key_of(path)}.")) for notice in notices):
                continue
            at: Any = found
            for part in path:
                if not isinstance(at, list) and part not in at:
                    raise _Fault(f"{how}: a place is missing", f"{path} of {found.keys()}")
                at = at[part]
            if isinstance(item, dict) and "param_groups" in item:
                continue  # names of parameters for numbers
            if what := difference(without_wrappers(at), without_wrappers(item), path, marks=False):
                raise _Fault(f"{how}: {self._place(what)} {self._words(what.partition(': ')[2])}", what)

    def _stored(self) -> list[int | None]:
        return [checkpoint.number for checkpoint in self._store]

    def _load(self, ours: Program, theirs: Program, kept: bytes, names: list[list[str]]) -> None:
        case, saved = self._case, kept_in(kept)
        before = frozen(observed(ours.state))
        renamed = (names, theirs.optimizer_names()) if case.change else None
        refusal: str | None
        try:
            give_back(theirs.state, saved, strict=case.strict, names=renamed)
            refusal = holds(theirs.state, saved, is_upgraded=case.change == "upgraded")
        except Exception as error:
            refusal = f"torch refuses: {type(error).__name__}: {error}"
        # torch loads a flat parameter's state by position, whatever parameters it is of. Adagrad alone has some before
        # its first step, so that nothing refuses what is of another parameter.
        is_by_position = case.wrapper == "fsdp1 flat" and case.optimizer == "adagrad" and bool(case.change)
        if gives_other_sizes(theirs.state) or is_by_position:
            raise _Done("no program")
        try:
            with _context(case.context):
                self._store.load(ours.state, strict=case.strict)
        except Exception as error:
            changed = difference(observed(ours.state), before)
            if changed:
                raise _Fault(f"load: refused, and changes the state: {self._words(str(error))}", changed) from error
            if refusal is not None and isinstance(error, CkptstoreError):
                if not any(re.search(rf"\b{re.escape(key)}\b", str(error)) for key in ours.state):
                    raise _Fault("load: refused without a key", str(error)) from error
                raise _Done("torch cannot") from None
            self._explain("load", error)
        if refusal is not None:
            why = case.target if refusal.startswith("raw") else case.change or "share"
            raise _Fault(f"load: loads what one memory cannot hold ({why})", refusal)

    def _explain(self, phase: str, error: Exception) -> None:
        if not isinstance(error, CkptstoreError):
            where = _raised_at(error)
            raise _Fault(f"{phase}: raises {type(error).__name__} at {where}", f"{error!r}") from error
        explained = explanation(self._case, phase, error)
        if explained is None:
            head = f"{phase}: {type(error).__name__} {self._words(str(error))}"
            raise _Fault(head, str(error)) from error
        raise _Done("refused", explained.reason)

    def _compare(self, phase: str, ours: Program, theirs: Program) -> None:
        found = difference(observed(ours.state), observed(theirs.state))
        if found:
            what = found.partition(": ")[2]
            raise _Fault(f"{phase}: {self._place(found)} {self._words(what)}", found)

    def _place(self, found: str) -> str:
        """Return the maker of a place in the state."""
        for key, name in zip("ab", self._case.modules, strict=False):
            if re.match(rf"\('{key}',|{key}\b", found):
                inner = re.search(r"\b(left|right|head|top|pre|post)\b", found)
                return f"layer beside the module {name}" if inner else f"module {name}"
        if "optimizer" in found[:14]:
            part = re.search(r"param_groups|state", found)
            return f"optimizer {self._case.optimizer}'s {part.group() if part else 'entries'}"
        named = re.search(r"(?:raw|values).*?\d ([\w,\- ]+)", found)
        return named.group(1) if named else re.split(r"[.:']", found.lstrip("('"))[0]

    def _words(self, text: str) -> str:
        """Return a message without keys and numbers."""
        for name, makers in (("raw", self._case.tensors), ("values", self._case.values)):
            for at, maker in enumerate(makers):
                text = text.replace(f"{name}.{at} {maker}", f"<{maker}>")
        text = re.sub(r"\b(a|b|optimizer)(\.[\w.\-]+)+", r"KEY", text)
        text = re.sub(r"(KEY(, | and )?)+", "KEYS ", " ".join(text.split()))
        return re.sub(r"-?\d+(\.\d+)?(e-\d+)?", "N", text)[:110]


def _exported(checkpoint: Checkpoint) -> tuple[Any, Sequence[str]]:
    """Return what torch.load reads of an export, and the notices of its report."""
    with tempfile.TemporaryDirectory(prefix="ckptstore-states-") as directory:
        report = export(checkpoint, directory, to="torch")
        return torch.load(f"{directory}/state.pt", weights_only=True), report.notices


def _raised_at(error: BaseException) -> str:
    """Return the last place in ckptstore that an error passed: a module and a function."""
    trace, found = error.__traceback__, "torch"
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__"))
        if name.startswith("ckptstore.") and not name.startswith("ckptstore.testing"):
            found = f"{name.rpartition('.')[2]}.{trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    return found


def _context(name: str) -> Any:
    if name == "inference_mode":
        return torch.inference_mode()
    if name == "no_grad":
        return torch.no_grad()
    if name == "default float64":
        return default_dtype(torch.float64)
    return torch.device("meta") if name == "default meta" else nullcontext()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave torch's random numbers as they were, and suppress warnings of torch and those of a load."""
    logger = logging.getLogger("ckptstore")
    level = logger.level
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


@contextmanager
def group_of(case: StateCase) -> Iterator[None]:
    """Initialise torch.distributed in a world of one, if the case needs it and it is not initialised yet."""
    import torch.distributed as dist

    if not NEEDS_GROUP & {case.wrapper, case.optimizer} or dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _place(case: StateCase) -> Iterator[str]:
    """Create a place for one store: in memory, or a temporary directory, in /dev/shm if the system has that."""
    if case.num_ranks > 1:
        with _shared_place() as uri:
            yield uri
        return
    if case.storage == "memory":
        yield f"memory://states-{os.getpid()}-{next(_numbers)}"
        return
    shared = Path("/dev/shm")
    directory = tempfile.mkdtemp(prefix="ckptstore-states-", dir=shared if shared.is_dir() else None)
    try:
        yield f"{directory}/store"
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _shared_place() -> Iterator[str]:
    """Yield rank 0's place on all ranks."""
    import torch.distributed as dist

    place: Any
    with _place(StateCase(0)) if dist.get_rank() == 0 else nullcontext() as place:
        found = [place]
        dist.broadcast_object_list(found)
        yield str(found[0])
        dist.barrier()


def _empty(store: CheckpointStore) -> None:
    storage = job_of(store).storage
    storage.delete([file.key for file in storage.list("")])
