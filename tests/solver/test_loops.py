"""Which calls are a loop over time, and how it is cut into chunks."""

from __future__ import annotations

from recoup.solver.loops import StepLoop


def test_the_chunk_balances_states_and_tapes() -> None:
    loop = StepLoop(path="cell", num_calls=400, state_bytes=100, tape_bytes=400, share=0.9)
    assert loop.chunk(400) == 10
    peaks = {k: 400 / k * 100 + k * 400 for k in range(1, 401)}
    assert min(peaks, key=peaks.__getitem__) == loop.chunk(400)
    assert loop.chunk(1) == 1
    decision = loop.decision(100)
    assert (decision.chunk, decision.calls) == (5, 100)
    assert loop.decision(400).calls is None


def test_when_the_loop_dominates_step() -> None:
    for num_calls, share, is_most in ((400, 0.9, True), (400, 0.2, False), (20, 0.9, False)):
        loop = StepLoop(path="cell", num_calls=num_calls, state_bytes=1, tape_bytes=1, share=share)
        assert loop.dominates_step is is_most
