"""The page of a report in a real browser: it shows what the document says, and every part can be worked with."""

from __future__ import annotations

import http.server
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from documents import BEGIN, MARKUP, checkpoint, document, hostile, large, store, trained, with_fast_tier
from reading import DRAWN, Reader
from selenium.webdriver.common.keys import Keys

from ckptstore import open_store
from ckptstore.tools.report.page import page

pytestmark = pytest.mark.slow

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/report-schema.json").read_text())

GENEROUS_MILLISECONDS = 30_000
"""Only what hangs takes longer; how long it took is printed."""


def find(value: dict[str, Any], number: int) -> dict[str, Any]:
    return next(one for one in value["checkpoints"] if one["number"] == number)


def opened(reader: Reader, number: int) -> str:
    """The details of a checkpoint."""
    reader.one(f'[data-key="open/{number}"]').click()
    return reader.text(".details")


def test_the_documents_of_these_tests_are_as_those_of_stores() -> None:
    value = json.loads(json.dumps(document(trained(), with_fast_tier(), hostile(), large(300, 1000), store([]))))
    jsonschema.Draft202012Validator(SCHEMA).validate(value)


def test_the_page_shows_what_the_document_says(reader: Reader) -> None:
    value = trained()
    reader.show(page(document(value)))
    newest_first = value["checkpoints"][::-1]
    assert [cell.split()[-1] for cell in reader.column("Step")] == [str(one["step"]) for one in newest_first]
    assert reader.column("Number") == [str(one["number"]) for one in newest_first]
    assert reader.column("Status") == [one["status"] for one in newest_first]
    shown = [float(cell) if cell[-1].isdigit() else cell for cell in reader.column("loss")]
    for cell, one in zip(shown, newest_first, strict=True):
        loss = one["metrics"]["loss"]
        assert cell == (loss if isinstance(loss, str) else pytest.approx(loss, rel=1e-3))
    cards = reader.texts(".card b")
    assert cards[0] == "step 5500"
    assert cards[1:3] == ["11 checkpoints", "4 checkpoints"]
    details = opened(reader, 26)
    assert repr(newest_first[0]["metrics"]["loss"]) in details
    assert f"{newest_first[0]['size_bytes']} bytes" in details
    assert "rank 2 (late)" in details
    assert "2 (late)" in reader.text(".details .save table")
    assert reader.errors() == []
    assert reader.requests() == []


def test_a_hostile_store_is_shown_literally_and_runs_nothing(reader: Reader) -> None:
    value = hostile()
    reader.show(page(document(value, trained())))
    assert reader.text('[aria-selected="true"]') == MARKUP
    assert MARKUP in opened(reader, 7)
    assert MARKUP in reader.texts(".charts h3")
    assert {"__proto__", "constructor", "toString"} <= set(reader.texts(".charts h3"))
    for number in (6, 7):
        reader.one(f'[data-key="choose/{number}"]').click()
    assert reader.text("#tensor-changes") == "Tensors: 8 equal."
    assert MARKUP in reader.texts("#metric-changes td:first-child")
    assert set(reader.column("Change", table="#log-body > div:last-of-type table")) == {MARKUP}
    assert set(reader.column("Why", table="#fast-body table")) == {MARKUP}
    assert reader.column("Attempt", table="#fast-body > div:last-of-type table") == [MARKUP]
    reader.one('[data-key="group/constructor."]').click()
    assert reader.column("Name", table="#tensors-body table") == ["prototype"]
    reader.one(".chart").click()
    assert reader.run("return document.title").startswith("ckptstore: ")
    assert reader.run("return document.querySelectorAll('img, iframe, object, [onerror]').length") == 0
    assert reader.run("return document.scripts.length") == 2
    assert reader.errors() == []
    assert reader.requests() == []


def test_a_fast_tier_is_shown_beside_the_store(reader: Reader) -> None:
    reader.show(page(document(with_fast_tier())))
    assert reader.texts(".card b")[:3] == ["step 5500", "step 5600", "saved"]
    table = "#fast-body .table:nth-of-type(1) table, #fast-body table"
    assert reader.column("Step", table=table) == ["5650", "5600", "5500", "5250", "5700"]
    states = ["2 files missing", "on nodes alone", "in the store", "the store has a newer one", "unfinished"]
    assert reader.column("State", table=table) == states
    assert reader.column("From", table="#fast-body > div:last-of-type table") == ["nothing", "nodes", "store"]
    assert "on this node, not in the store" in reader.text("#fast-body .key")
    assert "on this node, not in the store" in reader.text("#curves-body .key")
    reader.show(page(document(trained())))
    assert not reader.one("#fast").is_displayed()
    assert not reader.one("#to-fast").is_displayed()
    assert reader.errors() == []


@pytest.mark.parametrize("value", [document(), document(store([])), document(store([checkpoint(2, 5, metrics={})]))])
def test_little_is_shown_as_well(reader: Reader, value: dict[str, Any]) -> None:
    reader.show(page(value))
    assert reader.errors() == []
    if value["stores"]:
        assert reader.text("#curves-body") == "No checkpoint has metrics."


def test_every_column_sorts_both_ways(reader: Reader) -> None:
    value = trained()
    reader.show(page(document(value)))
    assert len(reader.all("#checkpoints-body th[aria-sort]")) == len(reader.all("#checkpoints-body th")) > 0
    for name, key in (("Step", "step"), ("Number", "number"), ("Size", "size_bytes"), ("Saved (UTC)", "created_at")):
        for order in ("ascending", "descending"):
            head = f"//table[caption='Checkpoints']//th[button[starts-with(., '{name}')]]"
            reader.driver.find_element("xpath", f"{head}/button").click()
            assert reader.driver.find_element("xpath", head).get_attribute("aria-sort") == order
            wanted = sorted(value["checkpoints"], key=lambda one: (one[key], one["number"]), reverse=order[0] == "d")
            if key == "step":  # equal ones stay in the order of the log, whichever way one sorts
                assert [int(cell.split()[-1]) for cell in reader.column("Step")] == [one["step"] for one in wanted]
            else:
                assert reader.column("Number") == [str(one["number"]) for one in wanted]
    reader.one('[data-key="checkpoints/sort/metric/loss"]').click()
    assert reader.column("loss")[-2:] == ["Infinity", "NaN"]
    reader.one('[data-key="checkpoints/sort/metric/loss"]').click()
    assert (reader.column("loss")[0], reader.column("loss")[-1]) == ("Infinity", "NaN")


def test_the_table_filters_by_text_and_status(reader: Reader) -> None:
    value = trained()
    reader.show(page(document(value)))
    reader.one("#filter").send_keys("RECORD 20")
    assert reader.column("Number") == ["16", "14", "13", "12", "9"]  # the last one was removed by record 14: step 2000
    assert reader.text("#count") == "5 of 24"
    reader.one("#filter").send_keys(Keys.CONTROL + "a", Keys.BACKSPACE)
    for status, number in (("pinned", 6), ("best", 25), ("resumed", 15)):
        reader.one(f'#status option[value="{status}"]').click()
        assert reader.column("Number") == [str(number)]
    reader.one("#filter").send_keys("nothing like it")
    assert reader.column("Number") == []
    assert reader.text("#count") == "0 of 24"


def test_what_changed_between_two(reader: Reader) -> None:
    value = trained()
    reader.show(page(document(value)))
    for number in (24, 25, 26):  # the first gives way to the third
        reader.one(f'[data-key="choose/{number}"]').click()
    before, after = find(value, 25), find(value, 26)
    assert "From step 5250 (number 25) to step 5500 (number 26)" in reader.text("#compare-body")
    rows = [row.split("\t") for row in reader.texts("#metric-changes tbody tr")]
    for name, was, now, by in rows:
        assert float(was) == pytest.approx(before["metrics"][name], rel=1e-3)
        assert float(now) == pytest.approx(after["metrics"][name], rel=1e-3)
        assert float(by) == pytest.approx(after["metrics"][name] - before["metrics"][name], rel=1e-2)
    assert len(rows) == 2
    equal = len(value["layouts"][0]["keys"]) - 3
    assert reader.text("#tensor-changes") == f"Tensors: 1 changed, 2 not known, 1 added, {equal} equal."
    keys = value["layouts"][0]["keys"]
    changes = dict(zip(reader.column("Tensor", table="#compare-body .rows table"), ["?"] * 4, strict=True))
    assert set(changes) == {*keys[:3], "model.head.bias"}
    reader.one('[data-key="choose/26"]').click()
    reader.one('[data-key="choose/24"]').click()
    assert "does not have the tensors of step 5000" in reader.text("#compare-body")


def test_tensors_of_another_dtype_shape_or_place(reader: Reader) -> None:
    value = store([checkpoint(2, 1), checkpoint(3, 2)], dtype_names=["float32", "bfloat16"])
    old = {"keys": ["a", "b", "c", "d"], "dtypes": [0, 0, 0, 0], "shapes": [[2], [2], [2], []], "size_bytes": [8] * 4}
    new = {"keys": ["d", "c", "b"], "dtypes": [0, 1, 0], "shapes": [[], [2], [2, 1]], "size_bytes": [8, 4, 8]}
    value["layouts"] = [old, new]
    value["trees"] = {"2": {"layout": 0, "digests": None}, "3": {"layout": 1, "digests": ["x", "y", "z"]}}
    reader.show(page(document(value)))
    for number in (2, 3):
        reader.one(f'[data-key="choose/{number}"]').click()
    table = "#compare-body .rows table"
    found = dict(zip(reader.column("Tensor", table=table), reader.column("Change", table=table), strict=True))
    assert found == {"a": "removed", "b": "dtype or shape", "c": "dtype or shape", "d": "not known"}
    assert reader.column("Is", table=table)[1:3] == ["float32 [2, 1]", "bfloat16 [2]"]


def test_the_tree_of_tensors_adds_up_and_is_walked_by_keyboard(reader: Reader) -> None:
    value = trained()
    reader.show(page(document(value)))
    layout = value["layouts"][1]
    whole = dict(zip(layout["keys"], layout["size_bytes"], strict=True))
    reader.run("document.querySelector('#tensors-body .area').focus()")
    reader.press(Keys.ENTER)  # into model
    reader.press(Keys.ENTER)  # into its largest part
    path = "".join(reader.texts("#tensors-body .path button")[1:])
    assert path == "modelblocks"
    names = reader.column("Name", table="#tensors-body table")
    assert sorted(names) == [f"{index}." for index in range(6)]
    sizes = [one.get_attribute("title") for one in reader.all("#tensors-body tbody td:nth-child(4) span")]
    for name, size in zip(names, sizes, strict=True):
        assert size == f"{sum(at for key, at in whole.items() if key.startswith(f'model.blocks.{name}'))} bytes"
    area = "(one) => one.offsetWidth * one.offsetHeight"
    areas = reader.run(f"return [...document.querySelectorAll('.area')].map({area})")
    assert max(areas) < 1.15 * min(areas)  # six blocks of one size
    reader.press(Keys.ARROW_RIGHT)
    told = reader.run("return document.activeElement.getAttribute('aria-label')")
    assert told.startswith("1. · bfloat16, float32 5 tensors")
    reader.press(Keys.BACKSPACE)
    assert reader.texts("#tensors-body .path button")[1:] == ["model"]
    assert reader.errors() == []


def test_all_of_it_can_be_done_by_keyboard(reader: Reader) -> None:
    """From the top by Tab alone: every stop can be seen, none is a trap, and a checkpoint is opened and compared."""
    value = trained()
    value["checkpoints"] = value["checkpoints"][-3:]
    reader.show(page(document(value)))
    seen: list[str] = []
    for _ in range(100):
        reader.press(Keys.TAB)
        script = """const one = document.activeElement;
        if (one === document.body) return null;
        const style = getComputedStyle(one);
        const isVisible = one.matches(":focus-visible") && style.outlineStyle !== "none";
        return [one.dataset.key ?? one.dataset.scroll ?? one.tagName, isVisible]"""
        stop = reader.run(script)
        if stop is None:
            break
        key, is_visible = stop
        assert is_visible, f"{key} has the focus and does not show it"
        seen.append(key)
        if key == "chart/loss":
            reader.press(Keys.HOME, Keys.ARROW_RIGHT)
            told = reader.text('[data-key="chart/loss"] .tip').splitlines()
            assert told[:2] == ["step 5000 · number 24 · live", "loss: 0.5289"]
        if key == "open/26":
            reader.press(Keys.ENTER)
            assert reader.run("return document.activeElement.dataset.key") == "open/26"
        if key in ("choose/26", "choose/25"):
            reader.press(Keys.SPACE)
    assert stop is None, "the walk does not end"
    for wanted in ("theme", "filter", "status", "chart/loss", "copy/26/pin", "checkpoints/sort/step", "area/model."):
        assert wanted in seen
    assert len(seen) == len(set(seen) - {"A"}) + seen.count("A")
    assert reader.text("#tensor-changes").startswith("Tensors: 1 changed")


@pytest.mark.slow
def test_what_a_chart_marks_and_where_it_leads(reader: Reader) -> None:
    reader.show(page(document(trained())))
    for kind in [
        "nan",
        "infinite",
        "torn",
        "flight",
        "best",
        "pinned",
        "resumed",
        "latest",
        "trash",
        "deleted",
        "live",
    ]:
        assert reader.all(f'[data-key="chart/loss"] .mark-{kind}'), f"no mark for {kind}"
    key = reader.texts('#curves-body [aria-label="Legend"] li')
    assert {"not a number", "infinite", "attempt without a commit", "a job claimed the store"} <= set(key)
    assert [one.text for one in reader.all('[data-key="chart/loss"] text.rule')] == ["job 1", "job 2"]
    reader.one("#filter").send_keys("nothing like it")
    reader.run("document.querySelector('[data-key=\"chart/loss\"]').focus()")
    reader.press(Keys.HOME, Keys.ENTER)
    assert reader.run("return document.activeElement.dataset.key") == "open/2"
    assert reader.column("Number")[-1] == "2"
    assert "Step 250, number 2" in reader.text(".details")


def test_a_line_is_copied_or_selected(reader: Reader) -> None:
    reader.show(page(document(trained())))
    opened(reader, 26)
    reader.one('[data-key="copy/26/pin"]').click()
    told = reader.until(lambda: reader.text(".details .copies [role=status]"))
    assert told in ("copied", "selected: copy it with Ctrl+C")
    reader.run("navigator.clipboard.writeText = () => Promise.reject(new Error()); document.execCommand = () => false")
    reader.one('[data-key="copy/26/cp"]').click()
    reader.until(lambda: reader.run("return getSelection().toString()") == "ckptstore cp runs/first@26 /mnt/backup")


@pytest.mark.parametrize("value", [trained(), hostile()], ids=["trained", "hostile"])
def test_a_phone_scrolls_no_page_sideways(reader: Reader, value: dict[str, Any]) -> None:
    reader.show(page(document(value)), width=360, height=740)
    assert reader.overflow() == 0
    opened(reader, value["checkpoints"][-1]["number"])
    assert reader.overflow() == 0
    assert reader.run("return document.querySelector('.details').offsetWidth") < 360


def test_dark_and_light_by_the_system_and_by_the_switch(reader: Reader) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    reader.show(page(document(trained())), dark=True)
    assert reader.run(background) == "rgb(20, 24, 28)"
    reader.one("#theme").click()
    assert reader.text("#theme") == "theme: light"
    assert reader.run(background) == "rgb(255, 255, 255)"
    reader.one("#theme").click()

    def remembers() -> bool:  # a browser stores the choice when it finds time
        reader.show(page(document(trained())))
        return bool(reader.run(background) == "rgb(20, 24, 28)")

    reader.until(remembers)
    reader.one("#theme").click()
    assert (reader.text("#theme"), reader.run(background)) == ("theme: auto", "rgb(255, 255, 255)")


def test_ten_thousand_checkpoints_and_a_hundred_thousand_tensors(
    reader: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    value = large(10_000, 100_000)
    text = page(document(value))
    reader.show(text)
    at = "return performance.getEntriesByName(arguments[0])[0].startTime"
    first, whole = reader.run(at, "first-contentful-paint"), reader.run(at, DRAWN)
    click = """const before = performance.now();
    document.querySelector('[data-key="checkpoints/sort/metric/loss"]').click();
    return performance.now() - before"""
    sort = reader.run(click)
    with capsys.disabled():
        told = f"{len(text) / 1e6:.1f} MB: first paint {first:.0f} ms, all drawn {whole:.0f} ms, sort {sort:.0f} ms"
        print(f"\n10,000 checkpoints and 100,000 tensors, {told}")
    assert max(first, whole, sort) < GENEROUS_MILLISECONDS
    least = sorted(one["metrics"]["loss"] for one in value["checkpoints"])[:50]
    assert [float(cell) for cell in reader.column("loss")] == pytest.approx(least, rel=1e-3)
    assert reader.text(".pager span") == "1–50 of 10,000"
    reader.one('[data-key="checkpoints/page/last page"]').click()
    assert len(reader.column("Number")) == 50
    assert "100,002 tensors" in reader.text("#tensors-body")
    assert reader.errors() == []


class Handler(http.server.BaseHTTPRequestHandler):
    """Gives out what the test says, as `ckptstore serve` does."""

    def do_GET(self) -> None:
        body = self.server.answers.get(self.path)  # type: ignore[attr-defined]
        self.send_response(200 if body else 503)
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/json")
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def answers() -> Iterator[tuple[str, dict[str, bytes]]]:
    """An address, and what is answered there."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found: dict[str, bytes] = {}
        server.answers = found  # type: ignore[attr-defined]
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.05))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/token/", found
        server.shutdown()
        thread.join()


def test_a_live_page_keeps_up_and_forgets_nothing(reader: Reader, answers: tuple[str, dict[str, bytes]]) -> None:
    address, found = answers
    value = document(trained(), live=True)
    found["/token/"] = page(value).encode()
    found["/token/document.json"] = json.dumps(value).encode()
    reader.look_at(address)
    for number in (25, 26):
        reader.one(f'[data-key="choose/{number}"]').click()
    reader.one('[data-key="checkpoints/sort/step"]').click()
    opened(reader, 6)
    reader.one("#filter").send_keys("p")
    one = checkpoint(27, 5750, epoch=2, created_at=BEGIN + 16_300, kept_because=["pinned"], is_pinned=True)
    value["stores"][0]["checkpoints"].append(one)
    found["/token/document.json"] = json.dumps(value).encode()
    reader.until(lambda: "27" in reader.column("Number"))
    assert reader.run("return document.activeElement.id") == "filter"
    assert reader.run("return [document.activeElement.value, document.activeElement.selectionStart]") == ["p", 1]
    assert reader.column("Number")[-1] == "27"
    assert "From step 5250 (number 25)" in reader.text("#compare-body")
    assert reader.all(".details")
    reader.press("in")
    assert reader.column("Number") == ["6", "27"]

    del found["/token/document.json"]
    reader.until(lambda: reader.one("#connection").is_displayed())
    assert "the server answers 503" in reader.text("#connection")
    found["/token/document.json"] = json.dumps(value).encode()
    reader.until(lambda: not reader.one("#connection").is_displayed())


def test_a_store_that_is_served_is_followed(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "w").write_bytes(bytes(1000))
    with open_store(tmp_path / "store", group="solo") as saved:
        saved.save_directory(1, tmp_path / "weights", metrics={"loss": 0.5})
        command = [sys.executable, "-m", "ckptstore.tools.cli", "serve", str(tmp_path / "store")]
        server: Any
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                address = server.stdout.readline().strip()
                reader.look_at(address)
                assert reader.column("loss") == ["0.5"]
                saved.save_directory(2, tmp_path / "weights", metrics={"loss": 0.25})
                reader.until(lambda: reader.column("loss") == ["0.25", "0.5"])
                assert reader.text(".card b") == "step 2"
                assert reader.errors() == []
                assert {one.rpartition("/")[0] + "/" for one in reader.requests()} == {address}
            finally:
                server.send_signal(signal.SIGINT)
                server.wait()
            reader.until(lambda: "The server is lost" in reader.text("#connection"))


def test_the_file_is_the_same_whatever_it_is_called(reader: Reader, tmp_path: Path) -> None:
    """As in a mail, where nobody knows what it is called or where it lies."""
    path = tmp_path / "a page #1 of ?.html"
    path.write_text(page(document(trained())), encoding="utf-8")
    reader.look_at(path)
    assert reader.text("#title") == "runs/first"
