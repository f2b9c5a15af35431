"""Trainer's save options and the store beside them, in the same training: what is left, what is best, what resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forked_ranks
import pytest

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs/how-to/transformers.md"
HEADERS = (
    "| options | retention | left by Trainer | in the store | best | Trainer resumes from | the store resumes from |"
)
LIMITED = "load_best_model_at_end, save_total_limit={}"
NAMES = (
    'save_strategy="no"',
    'save_strategy="steps", save_steps=2',
    'save_strategy="epoch"',
    'save_strategy="best"',
    "save_steps=0.25",
    "save_only_model",
    "save_total_limit=2",
    "load_best_model_at_end",
    LIMITED.format(2),
    "the same, and the last is the best",
    LIMITED.format(1),
)


def outcomes(root: str) -> Any:
    """Only the process that runs this loads transformers."""
    import transformers_contract

    return transformers_contract.outcomes(root), {
        name: one.retention for name, one in transformers_contract.SCENARIOS.items()
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, str]]:
    """All scenarios, in one process."""
    root = str(tmp_path_factory.mktemp("contract"))
    ((found, retention),) = forked_ranks.run_ranks(1, outcomes, root, modules=forked_ranks.TRANSFORMERS)
    return found, retention


@pytest.mark.parametrize("name", NAMES)
def test_the_store_has_what_trainer_leaves_and_resumes_like_it(ran: Any, name: str) -> None:
    one = ran[0][name]
    assert one["store_best"] == one["stock_best"]
    if name not in (LIMITED.format(1), "the same, and the last is the best"):
        assert one["store_steps"] == one["stock_steps"]
    if name != LIMITED.format(1):
        assert one["store_resumes"] == one["stock_resumes"]
        assert one["same_files"]
        from_stock, from_store = one["losses"]
        assert from_store == from_stock
    has_optimizer = "optimizer.pt" in one["names"]
    assert has_optimizer == (name not in ("save_only_model", 'save_strategy="no"'))


def test_where_they_differ_the_store_has_the_newest(ran: Any) -> None:
    one = ran[0][LIMITED.format(1)]
    assert (one["stock_steps"], one["store_steps"]) == ([4], [4, 8])
    assert (one["stock_resumes"], one["store_resumes"]) == (4, 8)
    one = ran[0]["the same, and the last is the best"]
    assert (one["stock_steps"], one["store_steps"]) == ([6, 8], [8])


def test_a_resume_on_a_new_disk_knows_the_best(ran: Any) -> None:
    bests = {name: one["best_after"] for name, one in ran[0].items() if one["stock_best"]}
    assert bests.pop("the same, and the last is the best") == 12
    assert set(bests.values()) == {4}


def test_the_page_says_so(ran: Any) -> None:
    found, retention = ran
    assert (*found,) == NAMES
    rows = [
        f"| {name if name.startswith('the same') else f'`{name}`'} "
        f"| {'latest and best' if '|' in retention[name] else f'`{retention[name]}`'} |"
        for name in NAMES
    ]
    lines = [HEADERS, "| --- | --- | --- | --- | --- | --- | --- |"]
    for row, one in zip(rows, found.values(), strict=True):
        cells = ("stock_steps", "store_steps", "stock_best", "stock_resumes", "store_resumes")
        lines.append(f"{row} {' | '.join(shown(one[cell]) for cell in cells)} |")
    table = "\n".join(lines)
    assert table in PAGE.read_text(), f"write this into {PAGE}:\n{table}"


def shown(value: Any) -> str:
    """Steps, a step, or none."""
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else "none" if value is None else str(value)
