"""The specification of the format shows objects as they are: its examples are golden files, no field is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ckptstore.errors import UnsupportedVersion
from ckptstore.format.record import Record, sealed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/format-v1.md").read_text()
GOLDEN = {path: json.loads(path.read_text()) for path in (ROOT / "tests/golden").rglob("*-v1/*.json")}
EXAMPLES = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]


def test_every_example_is_a_golden_file() -> None:
    assert len(EXAMPLES) == 3
    for example in EXAMPLES:
        assert example in GOLDEN.values()


def tables() -> set[str]:
    """Every name in the first column of a table."""
    rows = re.findall(r"^\| (.+?) \|", PAGE, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row)}


def fields(value: object) -> set[str]:
    """Every field name in an object, but for names that users chose."""
    if isinstance(value, list):
        return {name for item in value for name in fields(item)}
    if not isinstance(value, dict):
        return set()
    chosen = {"metrics", "metadata", "reasons", "bases", "later", "versions", "casts"}
    return set(value) | {name for key, item in value.items() if key not in chosen for name in fields(item)}


@pytest.mark.parametrize("path", sorted(GOLDEN), ids=lambda path: path.stem)
def test_every_field_is_described(path: Path) -> None:
    described = tables() | {"trash", "numbers", "removed_by", "annotated_by", "wholes"}
    assert fields(GOLDEN[path]) - {"later"} <= described


def test_every_kind_of_record_is_described_and_no_other_is_read() -> None:
    kinds = set(re.findall(r"`(\w+)`", PAGE.partition("what the record changes:")[2].partition(".")[0]))
    for path, value in GOLDEN.items():
        if "kind" in value and "number" in value:
            kinds.discard(value["kind"])
            with pytest.raises(UnsupportedVersion):
                Record.decode(sealed(json.dumps({**value, "kind": f"no-{path.stem}"}).encode()), value["number"])
    assert kinds == set()


def test_links_inside_the_page_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors
