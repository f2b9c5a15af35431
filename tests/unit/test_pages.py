"""The frame of pages: what lies in it never becomes markup, and a browser is told to run its script alone."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from typing import Any

import pytest

from ckptstore.tools.pages.shell import html_page, json_in_html
from ckptstore.tools.report.page import page

NASTY = "</script><!-- <script> & \u2028\u2029 \udc80 \x00 ]]> $body ${document}"


def document(*, live: bool = False, **more: Any) -> dict[str, Any]:
    return {"version": 1, "created_at": 0.0, "command": "", "live": live, "stores": [{"uri": NASTY}], **more}


def policy_of(text: str) -> dict[str, str]:
    (rules,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    return dict(rule.split(" ", 1) for rule in rules.split("; "))


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_json_in_a_page_is_the_same_value_and_ends_nothing() -> None:
    value = {NASTY: [NASTY, 1.5, None, {"a": NASTY}]}
    text = json_in_html(value)
    assert json.loads(text) == value
    assert not re.search("[<>&\u2028\u2029]", text)
    assert text.isascii()


def test_a_float_that_json_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_in_html({"loss": float("nan")})


def test_the_policy_allows_the_own_script_and_style_alone() -> None:
    text = page(document())
    rules = policy_of(text)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    *_, script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert rules["default-src"] == "'none'"
    assert rules["style-src"] == hashed(style)
    assert rules["script-src"] == hashed(script)
    assert "connect-src" not in rules
    assert policy_of(page(document(live=True)))["connect-src"] == "'self'"
    assert text.count("<script") == 2


def test_no_text_of_a_document_is_markup() -> None:
    text = page(document())
    text.encode()
    assert text.count("</script>") == 2
    assert html.escape("</script><!-- <script> &") in re.findall("<title>(.*)</title>", text)[0]
    (embedded,) = re.findall(r'<script type="application/json" id="document">(.*?)</script>', text, re.DOTALL)
    assert json.loads(embedded) == document()


def test_what_stands_for_itself_in_a_template_is_left_alone() -> None:
    assert "$title" in html_page(title="a", body="<p>$title</p>", document=None)
