"""Strangers' programs, by kind: exact after `fit`, or refused with nothing touched, as docs/hazards.md says of each."""

from __future__ import annotations

from collections import Counter

import pytest
from bench.hazards import OUTPUT
from bench.programs.all import PROGRAMS
from bench.programs.more_models import Forces
from bench.programs.program import Mlp, Program, Training, outcome, rows, square, stack

import recoup
from tests.thorough import cases

LAST_OF_KIND = list({program.kind: program for program in PROGRAMS}.values())


def test_each_kind_has_the_program_it_is_named_for_and_two_more() -> None:
    counts = Counter(program.kind for program in PROGRAMS)
    assert len(counts) >= 26
    assert min(counts.values()) >= 3
    assert len({(program.kind, program.name) for program in PROGRAMS}) == len(PROGRAMS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", cases(PROGRAMS, LAST_OF_KIND), ids=lambda p: f"{p.kind}: {p.name}")
def test_it_trains_as_if_fit_had_not_been_called(program: Program) -> None:
    became = outcome(program)
    assert became.startswith(("exact", "refused")), became
    wanted = f"| {program.kind.replace('_', ' ')} | {program.name} | {became.partition(':')[0]}"
    assert wanted in OUTPUT.read_text(), "docs/hazards.md is old: run `make hazards`"


def test_damage_would_be_seen() -> None:
    def forget_a_bit(training: Training, fitted: object) -> None:
        if fitted is not None:
            training.model[0].up.weight.data[0, 0] += 1e-3

    harmed = Program(kind="state", name="a weight that `fit` has changed", make=stack(Mlp), between=forget_a_bit)
    assert outcome(harmed).startswith("damaged")


@pytest.mark.slow
def test_the_minimum_that_a_measured_overrun_names_works() -> None:
    """A step whose generator states or inner graphs are not predicted: `minimum_bytes` is of what was measured."""
    model, batch = stack(Forces)(), (rows(),)
    with pytest.raises(recoup.InfeasibleBudget) as caught:
        recoup.fit(model, batch, loss=square, budget="30%", timed=False)
    budget = caught.value.minimum_bytes
    try:
        fitted = recoup.fit(model, batch, loss=square, budget=budget, timed=False)
    except recoup.InfeasibleBudget as error:
        assert error.minimum_bytes > budget, "the same minimum again"
        assert "measured" in str(error)
        fitted = recoup.fit(model, batch, loss=square, budget=error.minimum_bytes, timed=False)
    assert fitted.evidence.ok
