"""Segments of a forward: what their plans take, held to small problems by hand."""

from __future__ import annotations

from recoup.solver.held import Op
from recoup.solver.held_problem import HeldProblem
from recoup.solver.segment_labels import LabelMaker
from recoup.solver.segments import SegmentSolver


def test_what_is_held_and_alive_in_a_variable_of_the_code_counts_once() -> None:
    """Value 0 is held to rebuild value 1 from, and in a variable of the code until op 3, which takes 60 bytes."""
    problem = HeldProblem(
        ops=(
            Op(inputs=(), outputs=(0,), seconds=1.0, can_rerun=False),
            Op(inputs=(0,), outputs=(1,), seconds=1.0),
            Op(inputs=(1,), outputs=(2,), seconds=1.0),
            Op(inputs=(2,), outputs=(3,), seconds=1.0),
        ),
        value_bytes=(10, 50, 1, 1),
        saves=((), (0, 1), (), (2,)),
        places=(0, 2),
        saved_bytes=(60, 1),
        forward_bytes=(60, 70),
        backward_bytes=(65, 40),
        gradient_bytes=(0, 0),
        fixed_bytes=0,
        bare_bytes=(10, 60, 61, 71),
        released=(3, 2, 3, 3),
    )
    choice = SegmentSolver(problem).solve(75)
    assert choice is not None
    assert choice.extra_seconds == 1.0
    assert choice.peak_bytes == 71  # value 0, value 2 and the 60, there once each


def test_what_a_segment_leaves_to_the_one_before_is_charged_to_the_next_that_needs_it() -> None:
    """A ReLU's result is saved by the product after it, which begins a segment; a sum two segments on reads it, too."""
    problem = HeldProblem(
        ops=(
            Op(inputs=(), outputs=(0,), seconds=1.0),
            Op(inputs=(0,), outputs=(1,), seconds=9.0),
            Op(inputs=(0, 1), outputs=(2,), seconds=1.0),
        ),
        value_bytes=(100, 1, 50),
        saves=((), (0,), (2,)),
        self_saved=frozenset({0}),
        places=(0, 1, 2),
        saved_bytes=(100, 0, 50),
        forward_bytes=(100, 101, 151),
        backward_bytes=(100, 101, 151),
        gradient_bytes=(0, 0, 0),
        fixed_bytes=0,
    )
    again = next(label for label in LabelMaker(problem).labels(2, 3) if label.seconds == 1.0)
    assert again.held == (0, 1)
    assert again.shared_bytes == (100, 100)  # whether the segment before begins with the ReLU or with the product


def test_the_leanest_of_few_bytes_is_found() -> None:
    """Between 52 bytes, which do not do, and 53 there is nothing to try."""
    problem = HeldProblem(
        ops=(
            Op(inputs=(), outputs=(0,), seconds=1.0),
            Op(inputs=(0,), outputs=(1,), seconds=1.0),
        ),
        value_bytes=(20, 30),
        saves=((), (0, 1)),
        places=(0, 1),
        saved_bytes=(0, 50),
        forward_bytes=(20, 50),
        backward_bytes=(53, 53),
        gradient_bytes=(0, 0),
        fixed_bytes=0,
    )
    leanest = SegmentSolver(problem).leanest()
    assert leanest is not None and leanest.peak_bytes == 53
