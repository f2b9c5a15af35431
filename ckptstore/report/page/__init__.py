"""The page of a report: one HTML file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any


def page(document: Mapping[str, Any]) -> str:
    """The whole file. Every text of the document is escaped."""
    text = escape(json.dumps(document, ensure_ascii=False, indent=1))
    return f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>ckptstore</title><pre>{text}</pre></html>\n'
