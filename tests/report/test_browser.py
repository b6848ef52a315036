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
head("fall").querySelector("button").click();
saw.sort = [head("fall").getAttribute("aria-sort"), visible()];
saw.fall = [...document.querySelectorAll("#tree tbody tr")].filter((r) => +r.dataset.d === 1)
  .map((r) => +r.cells[6].dataset.v);
head("fall").querySelector("button").click();
saw.up = head("fall").getAttribute("aria-sort");
head("fall").querySelector("button").click();
saw.unsorted = [head("fall").getAttribute("aria-sort"), visible()];
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
document.querySelector('svg.wide a[href="#plan-1"]').dispatchEvent(new MouseEvent("click", { bubbles: true }));
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
const tell = async () => {
  saw.plan = [...document.querySelectorAll(".point")].map((p) => p.open);
  document.querySelectorAll("details").forEach((d) => { d.open = true; });
  if (window.axe) saw.axe = (await axe.run()).violations.map((v) => [v.id, v.nodes[0].html, v.nodes[0].failureSummary]);
  saw.errors = seen;
  saw.resources = performance.getEntriesByType("resource").map((e) => e.name);
  const pre = document.createElement("pre");
  pre.id = "saw"; pre.textContent = JSON.stringify(saw);
  document.body.append(pre);
};
addEventListener("load", () => setTimeout(tell, 200));  // what was blocked is told by an event of its own, later
</script>
"""


def _axe() -> str:
    """Returns axe-core as a script, "" where `make axe` has not fetched it."""
    path = Path(__file__).parents[2] / "build" / "package" / "axe.min.js"
    if not path.exists():
        return ""
    source = path.read_text().replace("</script>", "<\\/script>")
    return f"<script>{source}</script>"


def drive(
    tmp_path: Path, *, width: int, extra: str = "", is_dark: bool = False
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Returns what the page saw, Chromium's network log, and its own log."""
    assert CHROMIUM is not None
    page = format_html(small_report()[0])
    page = (
        page.replace("<head>", f"<head>{CATCH}", 1)
        .replace("</body>", f"{_axe()}{DRIVE}</body>")
        .replace("<main>", f"<main>{extra}", 1)
    )
    path, log = tmp_path / "page.html", tmp_path / "net.json"
    path.write_text(page)
    command = [CHROMIUM, *FLAGS, f"--window-size={width},900", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--blink-settings=preferredColorScheme=0"] if is_dark else []
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
    assert saw["fall"] == sorted(saw["fall"], reverse=True) and len(set(saw["fall"])) > 1
    assert saw["sort"][1] != saw["start"] and sorted(saw["sort"][1]) == sorted(saw["start"])
    assert saw["up"] == "ascending"
    assert saw["unsorted"] == [None, saw["start"]]


def test_folding_hides_and_shows_what_is_below(seen: Any) -> None:
    saw = seen[0]
    assert saw["folded"] == ["(model)", *(f"layers.{i}" for i in range(4)), "head", "(outside)"]
    assert saw["turned"][:2] == ["false", "true"]
    assert saw["turned"][2] == [
        "(model)",
        *("layers.0", *(f"layers.0.{name}" for name in ("norm", "up", "act", "drop", "down"))),
        *("layers.1", "layers.2", "layers.3", "head", "(outside)"),
    ]
    assert saw["all"] == saw["again"] == 4 * 6 + 3
    assert saw["found"] == ["(model)", *(path for i in range(4) for path in (f"layers.{i}", f"layers.{i}.act"))]


def test_a_moment_can_be_read_by_slider_and_pointer(seen: Any) -> None:
    saw = seen[0]
    report, _, _ = small_report()
    assert report.plain is not None
    shown = re.search(r": (\d+) KiB predicted", saw["peak"])
    assert shown and int(shown[1]) == pytest.approx(report.plain.peak_bytes / 1024, abs=len(report.plain.series))
    assert saw["first"][0].startswith("0 us, forward") and saw["first"][0] == saw["first"][1]
    assert saw["hover"] not in (saw["peak"], saw["first"][0]) and saw["cursor"] == "visible"
    assert saw["wide"] and not saw["overflow"]


def test_a_point_of_the_curve_opens_its_plan(seen: Any) -> None:
    assert seen[0]["plan"][:3] == [False, True, False]


@pytest.mark.skipif(not _axe(), reason="axe-core is not here (make axe)")
@pytest.mark.parametrize("width", [1400, 500])
@pytest.mark.parametrize("is_dark", [False, True])
def test_axe_finds_nothing(tmp_path: Path, width: int, is_dark: bool) -> None:
    saw, _, _ = drive(tmp_path, width=width, is_dark=is_dark)
    assert saw["axe"] == []


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
