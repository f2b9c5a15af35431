"""Verify a checkpoint against its manifest, every byte or a sample."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal

from ckptstore.errors import CheckpointDamaged, CheckpointGone, InvalidInput, InvalidName
from ckptstore.format.layout import MANIFEST_NAME, PART_NAME, UNLISTED_NAMES
from ckptstore.format.manifest import Receipt
from ckptstore.loading.checkpoint_files import CheckpointFiles
from ckptstore.transfer import Checked
from ckptstore.transfer.executor import Executor, InProcess

Fault = Literal["missing", "truncated", "longer", "flipped", "swapped", "extra", "manifest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One difference between a file and the manifest."""

    file: str
    fault: Fault
    rank: int | None
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.file}: {self.fault}, expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of a verification."""

    step: int | None
    num_files: int
    """The number of files whose existence and size were checked."""
    num_read: int
    """The number of files of which every byte was read."""
    read_bytes: int
    num_without_digest: int
    """The number of files that were linked without being read: only their size can be checked."""
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems

    def raise_if_damaged(self) -> None:
        """Raise CheckpointDamaged if there are problems; the message lists the first 20."""
        if self.problems:
            first = self.problems[0]
            text = "; ".join(str(problem) for problem in self.problems[:20])
            more = f" and {len(self.problems) - 20} more" if len(self.problems) > 20 else ""
            raise CheckpointDamaged(f"{text}{more}", step=self.step, rank=first.rank, file=first.file)


def verify(
    files: CheckpointFiles,
    *,
    sample: float | str | None = None,
    executor: Executor | None = None,
) -> VerifyReport:
    """Check the existence and size of every file, and the digests of all files or of a random sample.

    Of a fast checkpoint on the disk of this node, the files that this node has are checked. `sample` is a share of the
    files, such as 0.05 or "5%"; at least one file is read. The report names missing, truncated, flipped, swapped and
    extra files, with the expected and the found value. Raises CheckpointGone if there is no manifest; InvalidInput for
    a directory that torch's DCP wrote on its own, or a copy without its manifest.
    """
    share = parse_sample(sample)
    with files.held():
        return _verify(files, share, executor or InProcess())


def _verify(files: CheckpointFiles, share: float | None, executor: Executor) -> VerifyReport:
    try:
        manifest, _ = files.read_manifest()
    except (CheckpointDamaged, InvalidName) as error:
        problem = Problem(
            file=MANIFEST_NAME, fault="manifest", rank=None, expected="the committed one", found=str(error)
        )
        return VerifyReport(
            step=error.step, num_files=0, num_read=0, read_bytes=0, num_without_digest=0, problems=(problem,)
        )
    stored = files.stored_sizes(manifest)
    receipts = files.receipts_here(manifest)
    if MANIFEST_NAME not in stored and all(receipt.digest is None for receipt in manifest.files):
        hint = "Copy it with its manifest, or import it into a store"
        raise InvalidInput(f"{files.uri} has no manifest, and so no digests to check", hint=hint)
    if MANIFEST_NAME not in stored:
        raise CheckpointGone(f"Step {manifest.step} was removed while it was verified", step=manifest.step)
    problems = check_sizes(receipts, stored)
    bad = {problem.file for problem in problems}
    whole = [receipt for receipt in receipts if receipt.name not in bad and receipt.digest is not None]
    chosen = whole if share is None else random.sample(whole, min(len(whole), max(1, round(share * len(whole)))))
    problems += _digests(files, chosen, receipts, executor)
    return VerifyReport(
        step=manifest.step,
        num_files=len(receipts),
        num_read=len(chosen),
        read_bytes=sum(receipt.size_bytes for receipt in chosen),
        num_without_digest=sum(receipt.digest is None for receipt in receipts),
        problems=tuple(sorted(problems, key=lambda problem: problem.file)),
    )


def parse_sample(sample: float | str | None) -> float | None:
    """Parse a number or a text like "5%" to a share above 0 and up to 1; None means everything. Raises InvalidInput."""
    if sample is None:
        return None
    try:
        share = float(sample[:-1]) / 100 if isinstance(sample, str) and sample.endswith("%") else float(sample)
    except (ValueError, TypeError, OverflowError):
        share = -1.0
    if not 0 < share <= 1:
        raise InvalidInput(f"sample is {sample!r}, it is a share like 0.05 or '5%'")
    return share


def check_sizes(receipts: Sequence[Receipt], stored: Mapping[str, int]) -> list[Problem]:
    """Return the missing, truncated, longer and extra files of a listing, which has sizes by name."""
    extra = dict(stored)
    problems = []
    for receipt in receipts:
        found = extra.pop(receipt.name, None)
        if found == receipt.size_bytes:
            continue
        fault: Fault = "missing" if found is None else "truncated" if found < receipt.size_bytes else "longer"
        problems.append(
            Problem(
                file=receipt.name,
                fault=fault,
                rank=receipt.rank,
                expected=f"{receipt.size_bytes} bytes",
                found="nothing" if found is None else f"{found} bytes",
            )
        )
    problems.extend(
        Problem(file=name, fault="extra", rank=None, expected="nothing", found=f"{extra[name]} bytes")
        for name in extra.keys() - UNLISTED_NAMES
        if not PART_NAME.search(name)
    )
    return problems


def _digests(
    files: CheckpointFiles, chosen: Sequence[Receipt], receipts: Sequence[Receipt], executor: Executor
) -> list[Problem]:
    owners = {(receipt.size_bytes, receipt.digest): receipt.name for receipt in receipts}
    by_key = {files.key_of(receipt): receipt for receipt in chosen}
    problems = []
    shares = executor.run(partial(_check, files.alone()), chosen, size_bytes=lambda item: item.size_bytes)
    for checked in chain.from_iterable(shares):
        receipt = by_key[checked.wanted.key]
        if checked.digest == receipt.digest:
            continue
        other = None if checked.digest is None else owners.get((receipt.size_bytes, checked.digest))
        problems.append(
            Problem(
                file=receipt.name,
                fault="missing" if checked.digest is None else "swapped" if other else "flipped",
                rank=receipt.rank,
                expected=receipt.digest.shown if receipt.digest else "",
                found="nothing"
                if checked.digest is None
                else checked.digest.shown + (f", the bytes of {other}" if other else ""),
            )
        )
    return problems


def _check(files: CheckpointFiles, chosen: Sequence[Receipt]) -> list[Checked]:
    return files.transfer.check([files.wanted(receipt) for receipt in chosen])
