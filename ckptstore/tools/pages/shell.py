"""The frame of a page: one HTML file that needs no network, runs no script but its own, and works from a mail."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

_FRAME = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style></head><body>
$body
<script type="application/json" id="document">$document</script>
<script>$script</script>
</body></html>
""")
_NOT_IN_A_SCRIPT = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def html_page(
    *,
    title: str,
    body: str,
    document: Any,
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    connects: bool = False,
) -> str:
    """Return a whole page, with the shared theme and tools before `styles` and `scripts`.

    `title` is any text. `body` is HTML, and whoever wrote it has escaped what is in it. `document` is what JSON has;
    the scripts read it by `readDocument()`. A browser runs only these scripts and applies only these styles. With
    `connects` they may fetch from where the page came from, otherwise from nowhere.

    Raises:
        ValueError: The document has a float that JSON lacks.
    """
    style = "\n".join([shared("base.css"), *styles])
    script = "(() => {\n" + "\n".join(['"use strict";', shared("base.js"), *scripts]) + "\n})();"
    rules = {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": _hashed(style),
        "script-src": _hashed(script),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    if connects:
        rules["connect-src"] = "'self'"
    return _FRAME.substitute(
        policy="; ".join(f"{name} {value}" for name, value in rules.items()),
        title=escape(title.encode("utf-8", "replace").decode()),
        style=style,
        body=body,
        document=json_in_html(document),
        script=script,
    )


def json_in_html(value: Any) -> str:
    """Return a value as JSON that can stand in a script element: nothing in it ends the element or begins markup.

    Raises:
        ValueError: It has a float that JSON lacks.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":"), default=_plain).translate(_NOT_IN_A_SCRIPT)


def shared(name: str) -> str:
    """Return the text of a file of this room."""
    return (files("ckptstore.tools.pages") / name).read_text(encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a document has a {type(value).__name__}, which JSON lacks")


def _hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
