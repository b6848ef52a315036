"""Minimum cuts, held values and waists, against brute force on small random graphs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

from recoup.solver.held import Evaluation, Op, Segment, cheapest, hull, trade_offs
from recoup.solver.min_cut import FlowNetwork
from recoup.solver.waists import crossing_bytes, waists


def _cut_by_brute_force(num_nodes: int, edges: list[tuple[int, int, int]]) -> int:
    """The least capacity from a set with node 0 to one with the last node."""
    inner = range(1, num_nodes - 1)
    sides = ({0, *chosen} for size in range(num_nodes - 1) for chosen in itertools.combinations(inner, size))
    return min(sum(c for a, b, c in edges if a in side and b not in side) for side in sides)


@pytest.mark.parametrize("seed", range(20))
def test_min_cut_is_the_least_of_all(seed: int) -> None:
    draw = random.Random(seed)
    num_nodes = draw.randint(2, 8)
    edges = [
        (a, b, draw.randint(0, 9)) for a in range(num_nodes) for b in range(num_nodes) if a != b and draw.random() < 0.5
    ]
    network = FlowNetwork(num_nodes)
    for edge in edges:
        network.add_edge(*edge)
    side = network.source_side(0, num_nodes - 1)
    assert side is not None and side[0] and not side[-1]
    assert sum(c for a, b, c in edges if side[a] and not side[b]) == _cut_by_brute_force(num_nodes, edges)


def test_a_cut_that_nobody_can_pay_is_none() -> None:
    network = FlowNetwork(3)
    network.add_edge(0, 1, math.inf)
    network.add_edge(1, 2, math.inf)
    assert network.source_side(0, 2) is None


def _segment(draw: random.Random) -> Segment:
    """Ops over two free values; some values cannot be held, some ops cannot run again."""
    num_ops = draw.randint(1, 7)
    ops: list[Op] = []
    made = 2
    for _ in range(num_ops):
        num_outputs = draw.choice((1, 1, 2))
        inputs = tuple(draw.sample(range(made), k=min(made, draw.randint(1, 3))))
        outputs = tuple(range(made, made + num_outputs))
        can_rerun = draw.random() < 0.9
        ops.append(Op(inputs=inputs, outputs=outputs, seconds=float(draw.randint(0, 9)), can_rerun=can_rerun))
        made += num_outputs
    value_bytes = tuple(draw.randint(1, 9) for _ in range(made))
    unseen = frozenset(v for v in range(made) if draw.random() < 0.1)
    reads = frozenset(draw.sample(range(made), k=draw.randint(1, made)))
    return Segment(value_bytes=value_bytes, ops=tuple(ops), reads=reads, unseen=unseen)


def _cost(segment: Segment, held: set[int]) -> tuple[int, float] | None:
    """Bytes and seconds if exactly `held` is held; None if a value that is read cannot be had."""
    maker = {v: i for i, op in enumerate(segment.ops) for v in op.outputs}
    if segment.unseen & held:
        return None
    wanted, rerun = list(segment.reads), set()
    while wanted:
        value = wanted.pop()
        if value in held or value not in maker or maker[value] in rerun:
            continue
        op = segment.ops[maker[value]]
        if not op.can_rerun:
            return None
        rerun.add(maker[value])
        wanted += op.inputs
    return sum(segment.value_bytes[v] for v in held), math.fsum(segment.ops[i].seconds for i in rerun)


def _all_costs(segment: Segment) -> list[tuple[int, float]]:
    made = [v for op in segment.ops for v in op.outputs]
    chosen = (set(c) for size in range(len(made) + 1) for c in itertools.combinations(made, size))
    return [cost for held in chosen if (cost := _cost(segment, held)) is not None]


@pytest.mark.parametrize("seed", range(40))
def test_held_values_are_the_cheapest_of_all(seed: int) -> None:
    draw = random.Random(seed)
    segment = _segment(draw)
    costs = _all_costs(segment)
    for price in (0.01, 0.5, 1.0, 3.0, 100.0):
        held = cheapest(segment, price)
        if not costs:
            assert held is None
            continue
        assert held is not None and _cost(segment, set(held.values)) == (held.nbytes, held.seconds)
        assert held.seconds + price * held.nbytes == pytest.approx(min(s + price * b for b, s in costs))


@pytest.mark.parametrize("seed", range(40))
def test_the_hull_has_every_corner(seed: int) -> None:
    segment = _segment(random.Random(seed))
    costs = _all_costs(segment)
    found = [(h.nbytes, h.seconds) for h in hull(segment, most=1000)]
    if not costs:
        assert found == []
        return
    assert found == sorted(set(found), key=lambda c: -c[0])
    least_seconds = min(s for _, s in costs)
    least_bytes = min(b for b, _ in costs)
    assert found[0] == (min(b for b, s in costs if s == least_seconds), least_seconds)
    assert found[-1] == (least_bytes, min(s for b, s in costs if b == least_bytes))
    for nbytes, seconds in costs:  # no choice lies below a line between two corners
        for (b0, s0), (b1, s1) in itertools.pairwise(found):
            if b1 <= nbytes <= b0:
                line = s0 + (s1 - s0) * (b0 - nbytes) / (b0 - b1)
                assert seconds >= line - 1e-9


@pytest.mark.parametrize("seed", range(60))
def test_one_value_more_or_less_is_what_evaluating_anew_finds(seed: int) -> None:
    draw = random.Random(seed)
    segment = _segment(draw)
    if draw.random() < 0.5:  # a mask, which nothing makes again
        first = segment.ops[0]
        segment = dataclasses.replace(segment, ops=(first._replace(draws=first.outputs[:1]), *segment.ops[1:]))
    evaluate = Evaluation(segment)
    made = [v for op in segment.ops for v in op.outputs if v not in segment.unseen]
    values = {v for v in made if draw.random() < 0.5}
    here = evaluate.of(values)
    for value in made if here.seconds < math.inf else ():
        found, anew = evaluate.switched(here, evaluate.readers(here), values, value), evaluate.of(values ^ {value})
        assert found.seconds == anew.seconds
        assert found.seconds == math.inf or found.nbytes == anew.nbytes


@pytest.mark.parametrize("seed", range(20))
def test_crossing_bytes_count_what_is_alive(seed: int) -> None:
    draw = random.Random(seed)
    segment = _segment(draw)
    sizes = [b or 0 for b in segment.value_bytes]
    results = sorted(segment.reads)
    crossing = crossing_bytes(segment.ops, sizes, results)
    maker = {v: i for i, op in enumerate(segment.ops) for v in op.outputs}
    for place in range(len(segment.ops) + 1):
        later = {v for op in segment.ops[place:] for v in op.inputs} | set(results)
        assert crossing[place] == sum(sizes[v] for v in later if maker.get(v, place) < place)


def test_waists_of_residual_layers_lie_between_their_halves() -> None:
    # Value 0 is the stream; a half makes a wide value from it and adds what comes of that to it.
    ops, sizes, stream = [Op(inputs=(), outputs=(0,), seconds=1.0)], [1], 0
    for _ in range(4):
        wide, narrow, added = len(sizes), len(sizes) + 1, len(sizes) + 2
        sizes += [4, 1, 1]
        ops += [
            Op(inputs=(stream,), outputs=(wide,), seconds=1.0),
            Op(inputs=(wide,), outputs=(narrow,), seconds=1.0),
            Op(inputs=(stream, narrow), outputs=(added,), seconds=0.0),
        ]
        stream = added
    assert waists(ops, sizes, [stream]) == [4, 7, 10]


def test_waists_are_the_narrowest_of_the_places_there_are() -> None:
    ops = [Op(inputs=(i,), outputs=(i + 1,), seconds=1.0) for i in range(9)]
    sizes = [4, 4, 4, 1, 4, 4, 4, 1, 4, 4]
    assert waists(ops, sizes, [9]) == [3, 5, 7]
    assert waists(ops, sizes, [9], allowed={2, 4, 5, 8}) == [2, 4, 8]  # of equal ones the first


def test_dense_connections_have_no_waist() -> None:
    ops = [Op(inputs=tuple(range(i)), outputs=(i,), seconds=1.0) for i in range(1, 8)]
    assert waists(ops, [1] * 8, [7]) == []


def test_a_loop_that_collects_results_has_waists() -> None:
    # Each step reads the state, makes something large for the next state, and a result that is read after the loop.
    ops, sizes, state, results = [], [4], 0, []
    for _ in range(16):
        large, following, result = len(sizes), len(sizes) + 1, len(sizes) + 2
        sizes += [4, 4, 1]
        ops += [
            Op(inputs=(state,), outputs=(large,), seconds=1.0),
            Op(inputs=(large,), outputs=(following,), seconds=1.0),
            Op(inputs=(following,), outputs=(result,), seconds=1.0),
        ]
        state, results = following, [*results, result]
    assert any(place > 36 for place in waists(ops, sizes, results))  # where twelve results cross
    found = waists(ops, sizes, results, in_loops=True)
    assert found[-1] > 40, found  # where all results but one cross
    assert {b - a for a, b in itertools.pairwise(found)} == {3}, found  # one a step, to the end


@pytest.mark.parametrize("seed", range(40))
def test_trade_offs_hold_all_corners_and_nothing_that_another_beats(seed: int) -> None:
    segment = _segment(random.Random(seed))
    found = [(h.nbytes, h.seconds) for h in trade_offs(segment, most=1000)]
    assert found == sorted(set(found), key=lambda f: (-f[0], f[1]))
    assert [seconds for _, seconds in found] == sorted(seconds for _, seconds in found)
    assert {(h.nbytes, h.seconds) for h in hull(segment, most=1000)} <= set(found)
    for held in trade_offs(segment, most=1000):  # what is held or rebuilt is all that backward and the rebuilds read
        made = {v for i in held.rerun for v in segment.ops[i].outputs} | set(held.values)
        makers = {v for op in segment.ops for v in op.outputs}
        read = set(segment.reads) | {v for i in held.rerun for v in segment.ops[i].inputs}
        assert read & makers <= made
        assert held.nbytes == sum(segment.value_bytes[v] or 0 for v in held.values)
        assert segment.unseen.isdisjoint(held.values)
    assert len(trade_offs(segment, most=3)) <= max(3, min(len(found), 3))
