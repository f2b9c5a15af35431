"""The page of the DCP classes says what the cases say."""

from __future__ import annotations

from page import PAGE, rendered


def test_the_table_is_made_from_the_cases() -> None:
    text = PAGE.read_text()
    assert rendered(text) == text, "run tests/dcp/page.py"
    assert "| tensors that wrap others |" in text
