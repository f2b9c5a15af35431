"""The page of a benchmark in a real browser: its bars and its timeline are to be seen, in the light and in the dark."""

from __future__ import annotations

import io

import pytest
from made import report
from PIL import Image
from reading import Reader

from ckptstore.tools.bench.figures.page import page

COLOURS = {
    False: ("#0b6e4f", "#4a6fa5", "#7a7a7a"),  # ckptstore, the peer, the limit
    True: ("#4fc69a", "#82a8e0", "#a9a9a9"),
}


def shares_of_colours(picture: bytes) -> dict[tuple[int, ...], float]:
    """How much of a picture has which colour."""
    with Image.open(io.BytesIO(picture)) as image:
        pixels = image.convert("RGB")
        counts = pixels.getcolors(maxcolors=1 << 24)
        return {colour: count / (pixels.width * pixels.height) for count, colour in counts}


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_bars_and_the_timeline_are_seen_and_fit_a_phone(reader: Reader, dark: bool) -> None:
    reader.show(page(report(ours=[1.0, 1.1], peer=[2.0, 2.1], limit=[0.6])), dark=dark)
    shares = shares_of_colours(reader.driver.get_screenshot_as_png())
    for colour in COLOURS[dark]:
        assert shares.get(tuple(bytes.fromhex(colour[1:])), 0) > 0.001, f"{colour} is hardly to be seen"
    assert {"rank 0", "rank 1 (late)"} <= {one.text for one in reader.all(".timeline text")}
    assert reader.errors() == []
    assert reader.requests() == []
    reader.resize(360, 740)
    assert reader.overflow() == 0
