"""The page: self-contained, small, and what it says is what the report holds."""

from __future__ import annotations

import dataclasses
import html
import html.parser
import re

import pytest

from recoup.analysis.timeline import CATEGORIES
from recoup.ir.report import Report
from recoup.report.folded_rows import fold_rows
from recoup.report.html import CATEGORY_NAMES, format_html
from recoup.units import byte_unit, format_bytes
from tests.ir.test_schema import make_plan
from tests.report.helpers import deep_report, small_report

_VOID = {"meta", "link", "input", "br", "rect", "path", "circle"}


class _Checker(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "data") and value:
                self.links.append(value)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"


def html_text(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def check(page: str) -> _Checker:
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    return checker


def test_the_page_is_whole_and_refers_to_nothing_outside() -> None:
    report, _, _ = small_report()
    page = format_html(report)
    found = check(page)
    assert all(link.startswith(("#", "data:,")) for link in found.links)
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest", page)
    assert found.headings[0] == "h1" and found.headings[1] == "h2" and set(found.headings[1:]) == {"h2", "h3"}


def test_figures_on_the_page_are_the_reports() -> None:
    report, _, _ = small_report()
    page = format_html(report)
    assert report.evidence is not None and report.plan is not None
    unit = byte_unit(report.plan.predicted.plain_peak_bytes)
    for size in (report.evidence.peak_bytes, report.plan.predicted.peak_bytes, report.plan.budget_bytes):
        assert format_bytes(size, unit) in page
    cards = page[page.index('<dl class="cards">') : page.index("</dl>")]
    assert {name for name in ("KiB", "MiB", "GiB") if name in cards} == {unit[1]}
    assert f"memory ({unit[1]})" in page and f"peak of the step ({unit[1]})" in page
    assert "bit-equal" in page
    assert page.count("<tr data-d=") == len(fold_rows(report.rows))
    for unit in ("memory (", "extra time (%)", "peak of the step (", "time in the step, predicted ("):
        assert unit in page


def test_columns_of_the_page_add_up_to_the_fall_of_the_peak() -> None:
    report, _, _ = small_report()
    page = format_html(report)
    assert report.plain is not None and report.planned is not None
    fall = report.plain.peak_bytes - report.planned.peak_bytes
    assert fall > 0
    expected = [report.plain.peak_bytes, report.planned.peak_bytes, fall]
    table = page[page.index('<table class="plain" id="fall">') :].partition("</table>")[0]
    figures = [[int(v) for v in re.findall(r'data-v="(-?[0-9]+)"', row)] for row in table.split("<tr>")[2:]]
    assert figures[-1] == expected == [sum(column) for column in zip(*figures[:-1], strict=True)]
    rows = re.findall(r'<tr data-d="0".*?</tr>', page)
    columns = [[int(v) for v in re.findall(r'data-v="(-?[0-9]+)"', row)[2:5]] for row in rows]
    assert len(rows) == 2 and [sum(column) for column in zip(*columns, strict=True)] == expected


def test_rows_have_full_paths_and_equal_layers_are_one() -> None:
    report = deep_report(8)
    rows = fold_rows(report.rows)
    assert len(rows) < len(report.rows) / 2
    for name in ("plain_saved_bytes", "plain_peak_bytes", "peak_bytes", "forward_seconds"):
        for depth in (0, 1):
            total = sum(getattr(row, name) for row in report.rows if row.depth == depth)
            assert sum(getattr(row, name) for row in rows if row.depth == depth) == pytest.approx(total)
    counts = {row.path: row.count for row in rows}
    assert sum(row.count for row in rows) == len(report.rows)
    most = max(counts, key=lambda path: counts[path])
    assert counts[most] >= 6 and f"(x{counts[most]})" in format_html(report)
    assert all("." in row.path for row in rows if row.depth == 2)


def test_a_point_of_the_curve_leads_to_its_plan_and_the_device_has_a_line() -> None:
    report, _, _ = small_report()
    assert report.plain is not None
    page = format_html(dataclasses.replace(report, capacity_bytes=int(1.2 * report.plain.peak_bytes)))
    for number, point in enumerate((*report.frontier, *report.baselines)):
        assert page.count(f'<a href="#plan-{number}"') == 2  # for a page and for a phone
        shown = page[page.index(f'id="plan-{number}"') :].partition("</details>")[0]
        assert all(line in html_text(shown) for line in point.words)
    assert 'class="capacity"' in page and 'class="capacity"' not in format_html(report)


def test_a_failed_proof_is_said() -> None:
    report, _, _ = small_report()
    assert report.evidence is not None
    failed = dataclasses.replace(report.evidence, gradients_equal=False, max_gradient_error=0.25)
    page = format_html(dataclasses.replace(report, evidence=failed))
    assert "not as promised" in page and "largest relative error 2.50e-01" in page and ">NO<" in page


def test_estimates_and_measurements_share_no_colour() -> None:
    page = format_html(small_report()[0])
    style = page[page.index("<style>") : page.index("</style>")]
    for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]:
        colours = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block))
        predicted = [colours[c] for c in CATEGORIES] + [colours["accent"]]
        assert colours["ink"] not in predicted
        assert len(set(predicted[:-1])) == len(CATEGORIES)
    assert set(CATEGORY_NAMES) == set(CATEGORIES)


def test_a_plan_alone_and_an_empty_report_are_pages_too() -> None:
    page = format_html(Report(title="<b>odd & name</b>", plan=make_plan()))
    check(page)
    assert "recompute layers.0" in page and "&lt;b&gt;odd &amp; name&lt;/b&gt;" in page
    check(format_html(Report(title="nothing")))


@pytest.mark.slow
def test_eighty_layers_stay_under_a_megabyte() -> None:
    report = deep_report(80)
    page = format_html(report)
    check(page)
    assert len(report.rows) == 80 * 6 + 3  # a block is six calls; the model, its head, what is outside of both
    assert len(page.encode()) < 1_000_000
