"""What is being done is said in notebooks and to loggers, and text keeps to the terminal's width."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
import torch

import recoup
from recoup import progress
from recoup.cost.model import FlopsCost
from recoup.ir.profile import format_profile


def _profile() -> Any:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    return recoup.profile(model, torch.randn(32, 16), loss=lambda o, b: o.mean(), cost=FlopsCost())


class _Handle:
    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(data["text/plain"])


@pytest.mark.parametrize("shell", [types.SimpleNamespace(kernel=object()), types.SimpleNamespace(), None])
def test_a_notebook_shows_one_line_that_ends_empty(monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
    handle, ipython = _Handle(), types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    ipython.display = types.SimpleNamespace(display=lambda data, raw, display_id: handle)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    _profile()
    if getattr(shell, "kernel", None) is None:
        assert handle.shown == []
    else:
        assert handle.shown[0].startswith("recoup: capturing the step (") and handle.shown[-1] == ""


def test_the_logger_is_told_and_nothing_is_printed(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="recoup"):
        _profile()
    assert "capturing the step" in [record.getMessage() for record in caplog.records]
    assert capfd.readouterr() == ("", "")


def test_progress_says_which_search_of_how_many(caplog: pytest.LogCaptureFixture) -> None:
    model, x = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6))), torch.randn(64, 16)
    with caplog.at_level(logging.INFO, logger="recoup"):
        recoup.plan(model, x, loss=lambda o, b: o.square().mean(), budget="70%", cost=FlopsCost())
    said = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("search 1 of ") and "simulating a plan" in text for text in said)
    progress.advance("after")
    now = iter([0.0, 10.0, 20.0, 20.5]).__next__
    remaining = progress.Remaining(3, clock=now)
    outer = progress.Remaining(2)
    with progress.stage("a", 1, outer), progress.stage("b", 2, remaining), progress.listening(said.append):
        progress.advance("inside")
    assert said[-1] == "a 1 of 2: b 2 of 3, about 20 s left: inside"
    assert remaining.text(3, done=2) == "3 of 3, about 10 s left"
    assert remaining.text(3, done=3) == "3 of 3" and remaining.text(0, done=0) == "0 of 3"


def test_text_keeps_to_the_terminals_width(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6))), torch.randn(64, 16)
    plan = recoup.plan(model, x, loss=lambda o, b: o.square().mean(), budget="70%", cost=FlopsCost())
    seen = recoup.profile(model, x, loss=lambda o, b: o.square().mean(), cost=FlopsCost())
    for columns, most in (("60", 60), ("200", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        for text in (str(plan), format_profile(seen)):
            longest = max(map(len, text.splitlines()))
            assert most - 40 < longest <= most
