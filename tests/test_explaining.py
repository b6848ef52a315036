"""Why a plan is what it is, and what other budgets would cost: figures that simulation confirms."""

from __future__ import annotations

import pytest

import recoup
from recoup.cost.model import FlopsCost

from .models import make


@pytest.fixture(scope="module")
def curve() -> recoup.Frontier:
    model, batch, loss = make("stack")
    return recoup.frontier(model, batch, loss=loss, cost=FlopsCost(), num_points=5)


@pytest.mark.slow
def test_each_choice_is_worth_what_its_absence_costs(curve: recoup.Frontier) -> None:
    low, high = curve.points[0].peak_bytes, curve.points[-1].peak_bytes
    explanation = curve.explain((low + high) // 2)
    assert explanation.prices
    assert any(p.freed_saved_bytes > 0 for p in explanation.prices)
    rates = [p.bytes_per_second for p in explanation.prices]
    assert rates == sorted(rates, reverse=True)
    assert explanation.tensors and explanation.phase
    text = str(explanation)
    assert "freed at peak" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_budgets_beside_it(curve: recoup.Frontier) -> None:
    low, high = curve.points[0].peak_bytes, curve.points[-1].peak_bytes
    explanation = curve.explain(low)
    assert explanation.less is None  # nothing is smaller than the smallest
    assert explanation.more is not None
    assert explanation.more.to_bytes <= low + explanation.step_bytes
    assert explanation.more.seconds <= 0
    plain = curve.explain(high)
    assert plain.prices == ()
    assert plain.more is None
    assert plain.less is not None
    assert plain.less.seconds >= 0
    with_room = curve.explain(100 * high)
    assert with_room.less is not None
    assert with_room.less.to_bytes <= high - with_room.step_bytes, "not the same plan again"


def test_what_more_bytes_buy_and_what_freeing_some_costs(curve: recoup.Frontier) -> None:
    low, high = curve.points[0].peak_bytes, curve.points[-1].peak_bytes
    trade = curve.buys(low, high - low)
    assert trade.from_bytes <= low and trade.to_bytes == high
    assert trade.seconds < 0
    assert trade.to_does == ("nothing is changed",)
    wanted = (high - low) // 2
    assert curve.free(wanted).predicted.peak_bytes <= high - wanted
    with pytest.raises(recoup.InfeasibleBudget):
        curve.free(high - low // 2)


def test_explain_by_itself() -> None:
    model, batch, loss = make("stack")
    explanation = recoup.explain(model, batch, budget="80%", loss=loss, cost=FlopsCost())
    assert explanation.peak_bytes > 0
    assert explanation.to_json()["prices"] is not None
