"""A pytest file that holds the gates against the user's own model; what `recoup gen-tests` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recoup.selective.trial import check_strategies

_TEXT = '''"""Activation checkpointing on {target}: memory, profile and gradients. Written by `recoup gen-tests`."""

import pytest

from recoup.selective.trial import Trials
from recoup.selective.validate import check_gradients, check_memory, check_profile
from recoup.targets.resolve import resolve_target

TARGET = {target!r}
SIZES = {sizes!r}
STRATEGIES = {strategies!r}


@pytest.fixture(scope="module")
def trials():
    target = resolve_target(TARGET, **SIZES)
    objective, batch = target.objective()
    return Trials(target.model, batch, objective=objective)


@pytest.fixture(scope="module")
def runs(trials):
    return {{strategy: trials.run(strategy) for strategy in STRATEGIES}}


def test_memory_is_at_least_30_percent_lower(runs):
    gate = check_memory(list(runs.values()))
    assert gate.ok, gate.text


def test_profile_adds_up_and_repeats(trials):
    for gate in check_profile(trials.report()):
        assert gate.ok, f"{{gate.name}}: {{gate.text}}"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_match_the_plain_model(trials, runs, strategy):
    gate = check_gradients(runs[strategy], trials.model)
    assert gate.ok, gate.text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_measured_peak_is_the_predicted_one(runs, strategy):
    evidence = runs[strategy].evidence
    assert abs(evidence.peak_bytes - evidence.predicted_peak_bytes) <= 0.05 * evidence.peak_bytes
'''


def generate_tests(target: str, *, sizes: Mapping[str, Any], strategies: Sequence[str]) -> str:
    """Returns the source of a pytest file.

    Args:
        target: a TARGET of the command line.
        sizes: keywords of `resolve_target` (batch, seq, image, dtype, device).
        strategies: what to try.

    Raises:
        UsageError: for a strategy that is not known.
    """
    check_strategies(strategies)
    return _TEXT.format(target=target, sizes=dict(sizes), strategies=list(strategies))
