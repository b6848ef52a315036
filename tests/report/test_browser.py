"""The page in headless Chromium: sorting, folding, finding, reading a moment; no error, nothing asked of the network.

The page drives itself: a script at its end clicks and writes what it saw, and Chromium prints the document. So nothing
but the browser is needed; where there is none, these tests are skipped.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from recoup.report.html import format_html
from tests.report.helpers import small_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)"),
]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--virtual-time-budget=4000",
]
CATCH = "<script>window.seen = []; addEventListener('error', (e) => seen.push(e.message));"
CATCH += "addEventListener('securitypolicyviolation', (e) => seen.push('blocked ' + e.blockedURI));</script>"
DRIVE = """
<script>
const visible = () => [...document.querySelectorAll("#tree tbody tr")].filter((r) => !r.hidden)
  .map((r) => r.cells[0].textContent.trim().split(" ")[0]);
const head = (key) => document.querySelector(`#tree th[data-key=${key}]`);
const saw = {};
saw.start = visible();
head("freed").querySelector("button").click();
saw.sort = [head("freed").getAttribute("aria-sort"), visible()];
saw.freed = [...document.querySelectorAll("#tree tbody tr")].filter((r) => +r.dataset.d === 1)
  .map((r) => +r.cells[4].dataset.v);
head("freed").querySelector("button").click();
saw.up = head("freed").getAttribute("aria-sort");
head("freed").querySelector("button").click();
saw.unsorted = [head("freed").getAttribute("aria-sort"), visible()];
document.getElementById("fold").click();
saw.folded = visible();
const turn = [...document.querySelectorAll("#tree .turn")][1];
const before = turn.getAttribute("aria-expanded");
turn.click();
saw.turned = [before, turn.getAttribute("aria-expanded"), visible()];
document.getElementById("unfold").click();
saw.all = visible().length;
const find = document.getElementById("find");
find.value = "gelu"; find.dispatchEvent(new Event("input"));
saw.found = visible();
find.value = ""; find.dispatchEvent(new Event("input"));
saw.again = visible().length;
const figure = document.querySelector(".chart"), slider = figure.querySelector("input");
saw.peak = figure.querySelector("output").textContent;
slider.value = 0; slider.dispatchEvent(new Event("input"));
saw.first = [figure.querySelector("output").textContent, slider.getAttribute("aria-valuetext")];
const svg = [...figure.querySelectorAll("svg")].find((s) => s.getBoundingClientRect().width > 0);
const place = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", { clientX: place.left + place.width / 2, clientY: place.top }));
saw.hover = figure.querySelector("output").textContent;
saw.cursor = svg.querySelector(".cursor").getAttribute("visibility");
saw.wide = svg.classList.contains("wide");
saw.overflow = document.documentElement.scrollWidth > innerWidth;
const tell = () => {
  saw.errors = seen;
  saw.resources = performance.getEntriesByType("resource").map((e) => e.name);
  const pre = document.createElement("pre");
  pre.id = "saw"; pre.textContent = JSON.stringify(saw);
  document.body.append(pre);
};
addEventListener("load", () => setTimeout(tell, 200));  // what was blocked is told by an event of its own, later
</script>
"""


def drive(tmp_path: Path, *, width: int, extra: str = "") -> tuple[dict[str, Any], dict[str, Any], str]:
    """Returns what the page saw, Chromium's network log, and its own log."""
    assert CHROMIUM is not None
    page = format_html(small_report()[0])
    page = (
        page.replace("<head>", f"<head>{CATCH}", 1)
        .replace("</body>", f"{DRIVE}</body>")
        .replace("<main>", f"<main>{extra}", 1)
    )
    path, log = tmp_path / "page.html", tmp_path / "net.json"
    path.write_text(page)
    command = [CHROMIUM, *FLAGS, f"--window-size={width},900", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", f"--log-net-log={log}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="saw">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return json.loads(html.unescape(found[1])), json.loads(log.read_text()), done.stderr


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], str]:
    return drive(tmp_path_factory.mktemp("chromium"), width=1400)


def test_sorting_orders_siblings_and_comes_back(seen: Any) -> None:
    saw = seen[0]
    assert saw["sort"][0] == "descending"
    assert saw["freed"] == sorted(saw["freed"], reverse=True) and len(set(saw["freed"])) > 1
    assert saw["sort"][1] != saw["start"] and sorted(saw["sort"][1]) == sorted(saw["start"])
    assert saw["up"] == "ascending"
    assert saw["unsorted"] == [None, saw["start"]]


def test_folding_hides_and_shows_what_is_below(seen: Any) -> None:
    saw = seen[0]
    assert saw["folded"] == ["(model)", "0", "1", "2", "3", "head"]
    assert saw["turned"][:2] == ["false", "true"]
    assert saw["turned"][2] == ["(model)", "0", "norm", "up", "act", "drop", "down", "1", "2", "3", "head"]
    assert saw["all"] == saw["again"] == 4 * 6 + 2
    assert saw["found"] == ["(model)", "0", "act", "1", "act", "2", "act", "3", "act"]


def test_a_moment_can_be_read_by_slider_and_pointer(seen: Any) -> None:
    saw = seen[0]
    report, _, _ = small_report()
    assert report.plain is not None
    shown = re.search(r": (\d+) KiB predicted", saw["peak"])
    assert shown and int(shown[1]) == pytest.approx(report.plain.peak_bytes / 1024, abs=len(report.plain.series))
    assert saw["first"][0].startswith("0 us, forward") and saw["first"][0] == saw["first"][1]
    assert saw["hover"] not in (saw["peak"], saw["first"][0]) and saw["cursor"] == "visible"
    assert saw["wide"] and not saw["overflow"]


def test_no_error_and_no_request(seen: Any) -> None:
    saw, log, stderr = seen
    assert saw["errors"] == [] and saw["resources"] == []
    assert "CONSOLE" not in stderr
    # The browser's own requests (its clock, its updates) have no origin; the page's have one.
    asked = [e["params"] for e in log["events"] if "url" in e.get("params", {})]
    assert not [p["url"] for p in asked if p.get("initiator", "not an origin") != "not an origin"]


def test_the_page_forbids_itself_the_network(tmp_path: Path) -> None:
    saw, _, _ = drive(tmp_path, width=1400, extra='<img src="http://example.invalid/pixel.png" alt="">')
    assert saw["errors"] == ["blocked http://example.invalid/pixel.png"]


def test_a_narrow_page_does_not_overflow(tmp_path: Path) -> None:
    saw, _, _ = drive(tmp_path, width=500)  # headless Chromium makes no narrower window
    assert not saw["wide"] and not saw["overflow"] and saw["errors"] == []
