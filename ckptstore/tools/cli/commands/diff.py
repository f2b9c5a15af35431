"""`ckptstore diff`: how two checkpoints differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from ckptstore.checkpoint import Checkpoint
from ckptstore.runtime.extras import not_installed
from ckptstore.runtime.shown import printable, show_size
from ckptstore.tools.cli.kinds import TARGET
from ckptstore.tools.cli.options import as_json, options_by_place, storage_option
from ckptstore.tools.cli.output import checkpoint_json, echo_table, print_json, provenance_texts
from ckptstore.tools.cli.targets import opened_checkpoint, parse_target

if TYPE_CHECKING:
    from ckptstore.extensions.exchange.comparing import TensorDifference
    from ckptstore.loading.tensor_view import StoredTensor


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same in both; None where it is missing."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDifference:
    """One file that is not the same in both, or may not be."""

    name: str
    change: str
    a_bytes: int | None
    b_bytes: int | None


@click.command()
@click.argument("a", type=TARGET)
@click.argument("b", type=TARGET)
@click.option("--values", is_flag=True, help="Read the tensors, and print the largest difference of each.")
@storage_option
@as_json
def command(a: str, b: str, values: bool, storage_options: dict[str, Any], as_json: bool) -> None:
    """Compare two checkpoints: metrics, metadata, files, tensors.

    A and B are TARGETs of one store or of two. A delta is B minus A. The programs that saved them are compared too.
    Files and tensors are compared by size and digest. What has no digests, or digests by different algorithms, is
    "unknown". Tensors below 1 MiB share their digests with others, so they may be read. A larger tensor is "unknown"
    also if it was divided differently among the ranks; --values reads it.
    """
    of_a, of_b = options_by_place(storage_options, parse_target(a).uri, parse_target(b).uri)
    with opened_checkpoint(a, of_a) as first, opened_checkpoint(b, of_b) as second:
        files = file_differences(first, second)
        metrics = differences(first.metrics, second.metrics)
        metadata = differences(flat(first.metadata), flat(second.metadata))
        provenance = differences(provenance_texts(first), provenance_texts(second))
        num_equal = len(first.files) - sum(item.a_bytes is not None for item in files)
        tensors, num_equal_tensors, not_compared = compared_tensors(first, second, values=values)
        if as_json:
            print_json(
                a=checkpoint_json(first),
                b=checkpoint_json(second),
                num_equal_files=num_equal,
                files=[asdict(item) for item in files],
                tensors=None if not_compared else [_tensor_json(item) for item in tensors],
                num_equal_tensors=num_equal_tensors,
                metrics=[asdict(item) for item in metrics],
                metadata=[asdict(item) for item in metadata],
                provenance=[asdict(item) for item in provenance],
            )
            return
        _echo_header(first, second)
        _echo_values("metric", metrics)
        _echo_values("metadata", metadata)
        _echo_values("provenance", provenance)
        if files:
            echo_table(("file", "change", "a", "b", "b - a"), [_file_row(item) for item in files])
        num_unknown = sum(item.change == "unknown" for item in files)
        unknown = f"{num_unknown} unknown, " if num_unknown else ""
        click.echo(f"files: {len(files) - num_unknown} differ, {unknown}{num_equal} equal")
        _echo_tensors(tensors, num_equal_tensors, not_compared, values=values)


def file_differences(first: Checkpoint, second: Checkpoint) -> list[FileDifference]:
    """Return the files that are in one only, differ in size or digest, or may differ, by name."""
    ours, theirs = ({file.name: file for file in checkpoint.files} for checkpoint in (first, second))
    found = []
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            change = "removed" if one else "added"
        elif one.size_bytes != other.size_bytes:
            change = "changed"
        elif one.digest is None or other.digest is None or one.digest.algorithm != other.digest.algorithm:
            change = "unknown"
        elif one.digest != other.digest:
            change = "changed"
        else:
            continue
        found.append(
            FileDifference(
                name=name,
                change=change,
                a_bytes=one.size_bytes if one else None,
                b_bytes=other.size_bytes if other else None,
            )
        )
    return found


def compared_tensors(first: Checkpoint, second: Checkpoint, *, values: bool) -> tuple[list[TensorDifference], int, str]:
    """Return the tensors that differ, how many are equal, and why they are not compared; "" when they are."""
    for name, checkpoint in (("a", first), ("b", second)):
        if checkpoint.kind != "state":
            return [], 0, f"{name} is a directory of files"
    try:
        from ckptstore.extensions.exchange.comparing import tensor_differences

        return *tensor_differences(first, second, values=values), ""
    except ModuleNotFoundError as error:
        missing = not_installed(error)
        if missing is None or values:
            raise
        return [], 0, str(missing)


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Return the items that the two mappings do not share; two NaN are equal."""
    names = sorted(first.keys() | second.keys())
    pairs = [Difference(name, first.get(name), second.get(name)) for name in names]
    return [item for item in pairs if repr(item.a) != repr(item.b)]


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping with paths for keys: {"a": {"b": 1}} is {"a.b": 1}."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            found |= flat(item, f"{prefix}{name}.")
        else:
            found[prefix + name] = item
    return found


def _echo_header(first: Checkpoint, second: Checkpoint) -> None:
    rows = [
        (name, str(checkpoint.step), show_size(checkpoint.size_bytes), checkpoint.uri)
        for name, checkpoint in (("a", first), ("b", second))
    ]
    echo_table(("", "step", "size", "uri"), rows)
    for name, checkpoint in (("a", first), ("b", second)):
        if checkpoint.thinned is not None:
            click.echo(printable(f"{name} {checkpoint.thinned}"))
    click.echo()


def _echo_values(what: str, found: Sequence[Difference]) -> None:
    if found:
        rows = []
        for item in found:
            delta = _text(item.b - item.a) if _is_number(item.a) and _is_number(item.b) else ""
            rows.append((item.name, _text(item.a), _text(item.b), delta))
        echo_table((what, "a", "b", "b - a"), rows)
        click.echo()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _file_row(item: FileDifference) -> tuple[str, str, str, str, str]:
    delta = ""
    if item.a_bytes is not None and item.b_bytes is not None and item.a_bytes != item.b_bytes:
        more = item.b_bytes - item.a_bytes
        delta = f"{'-' if more < 0 else ''}{show_size(abs(more))}"
    return (item.name, item.change, _size(item.a_bytes), _size(item.b_bytes), delta)


def _echo_tensors(found: Sequence[TensorDifference], num_equal: int, not_compared: str, *, values: bool) -> None:
    if not_compared:
        click.echo(f"tensors are not compared: {not_compared}")
        return
    if found:
        click.echo()
        headers = ("tensor", "change", "dtype and shape", *(("largest difference",) if values else ()))
        rows = [
            (
                item.key,
                item.change,
                " -> ".join(dict.fromkeys(_shape(tensor) for tensor in (item.a, item.b) if tensor)),
                *(("" if item.largest is None else f"{item.largest:.7g}",) if values else ()),
            )
            for item in found
        ]
        echo_table(headers, rows)
    counts = Counter(item.change for item in found)
    parts = [f"{counts[change]} {change}" for change in counts]
    click.echo(f"tensors: {', '.join([*parts, f'{num_equal} equal'])}")
    if counts["unknown"]:
        click.echo("--values reads the unknown ones")


def _shape(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


def _tensor_json(item: TensorDifference) -> dict[str, Any]:
    return {
        "key": item.key,
        "change": item.change,
        "a_dtype": item.a and item.a.dtype,
        "a_shape": item.a and list(item.a.shape),
        "b_dtype": item.b and item.b.dtype,
        "b_shape": item.b and list(item.b.shape),
        "largest_difference": item.largest,
    }


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else show_size(size_bytes)


def _text(value: Any) -> str:
    text = "" if value is None else f"{value:.7g}" if isinstance(value, float) else printable(str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
