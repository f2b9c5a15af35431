"""The page of a report: one HTML file that draws the document which lies in it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from ckptstore.tools.pages.shell import html_page

_SCRIPTS = ("table", "chart", "curves", "save", "checkpoints", "tensors", "compare", "fast", "health", "page")


def page(document: Mapping[str, Any]) -> str:
    """Return the whole HTML file of a document, as `Document.to_json` gives it.

    The file needs no network and works from a disk or a mail. Its texts are never taken for markup, whatever a store
    says. With `live` the page also asks for `document.json` beside it every few seconds, and for nothing else.

    Raises:
        ValueError: The document has a float that JSON lacks.
    """
    place = files(__name__)
    stores = [str(store["uri"]) for store in document["stores"]]
    return html_page(
        title=f"ckptstore: {', '.join(stores)}",
        body=(place / "page.html").read_text(encoding="utf-8"),
        document=document,
        styles=[(place / "page.css").read_text(encoding="utf-8")],
        scripts=[(place / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS],
        connects=bool(document["live"]),
    )
