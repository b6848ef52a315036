"""The page: self-contained, small, and what it says is what the report holds."""

from __future__ import annotations

import dataclasses
import html.parser
import re

import pytest

from recoup.analysis.timeline import CATEGORIES
from recoup.ir.report import Report
from recoup.report.html import CATEGORY_NAMES, format_html
from recoup.units import format_bytes
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
    assert found.headings[0] == "h1" and set(found.headings[1:]) == {"h2"}


def test_figures_on_the_page_are_the_reports() -> None:
    report, _, _ = small_report()
    page = format_html(report)
    assert report.evidence is not None and report.plan is not None
    for size in (report.evidence.peak_bytes, report.plan.predicted.peak_bytes, report.plan.budget_bytes):
        assert format_bytes(size) in page
    assert "bit-equal" in page
    assert page.count("<tr data-d=") == len(report.rows)
    for unit in ("memory (", "extra time (%)", "peak of the step (", "time in the step, predicted ("):
        assert unit in page


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
    assert len(report.rows) == 80 * 6 + 2  # a block is six calls; the model, its head
    assert len(page.encode()) < 1_000_000
