"""Random problems, and every choice there is, for the solver's tests."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from recoup.ir.decision import Ambient
from recoup.solver.problem import Block, Keep, Leaf, Option, Problem, Region
from recoup.solver.sequence import Call, Choice, Line, Pick, region_of
from recoup.solver.ways import Replay, Run

UNIT = 1000


def random_option(rng: random.Random, ambient: Ambient, saved_units: int, seconds: float) -> Option:
    """Returns an option whose peaks are at least what it leaves saved."""
    return Option(
        ambient=ambient,
        saved_bytes=saved_units * UNIT,
        forward_bytes=(saved_units + rng.randrange(6)) * UNIT,
        backward_bytes=(saved_units + rng.randrange(8)) * UNIT,
        extra_seconds=seconds,
        extra_flops=int(seconds * 100),
    )


def random_leaf(
    rng: random.Random, owner: tuple[str, int], *, rederive_share: float = 0.5, group_share: float = 0.0
) -> Leaf:
    """Returns a leaf that may have a second option."""
    saved = rng.randrange(1, 12)
    options = [random_option(rng, "save", saved, 0.0)]
    if rng.random() < rederive_share:
        options.append(random_option(rng, "rederive", rng.randrange(saved + 1), rng.randrange(1, 9) / 4))
    return Leaf(
        owner=owner,
        options=tuple(options),
        gradient_bytes=rng.randrange(4) * UNIT,
        group=rng.randrange(3) if rng.random() < group_share else -1,
    )


def random_region(rng: random.Random, seconds: float) -> Region:
    """Returns the price of a region that takes `seconds` once more."""
    return Region(
        saved_bytes=rng.randrange(4) * UNIT,
        forward_bytes=rng.randrange(4, 14) * UNIT,
        replay_bytes=rng.randrange(4) * UNIT,
        seconds=seconds,
        flops=int(seconds * 100),
        entry_seconds=rng.choice([0.0, 0.25]),
        tail_seconds=rng.choice([0.0, 0.5]),
        is_alone=rng.random() < 0.8,
        begins=rng.random() < 0.9,
        keeps=random_keeps(rng, seconds),
    )


def random_keeps(rng: random.Random, seconds: float) -> tuple[Keep, ...]:
    """Returns up to two ways to keep results inside a region that takes `seconds`."""
    found = []
    for labels in (("a",), ("a", "b"))[: rng.choice([0, 0, 1, 2])]:
        inside = rng.randrange(2)
        found.append(
            Keep(
                labels=labels,
                nbytes=(inside + rng.randrange(1, 4)) * UNIT,
                saved_inside_bytes=inside * UNIT,
                seconds=seconds * rng.choice([0.25, 0.5]),
                flops=0,
            )
        )
    return tuple(found)


def random_problem(
    seed: int, *, num_blocks: int = 4, depth: int = 2, chained_share: float = 0.6, group_share: float = 0.0
) -> Problem:
    """Returns a tree of at most `num_blocks` blocks below the root, nested `depth` levels."""
    rng = random.Random(seed)
    left = [num_blocks]

    def parts(path: str, level: int) -> tuple[Leaf | Block, ...]:
        found: list[Leaf | Block] = []
        for i in range(rng.randrange(1, 5)):
            if level < depth and left[0] > 0 and rng.random() < 0.65:
                left[0] -= 1
                name = f"{path}.{i}" if path else str(i)
                inside = parts(name, level + 1)
                region = random_region(rng, rng.randrange(1, 12)) if rng.random() < 0.85 else None
                found.append(
                    Block(
                        path=name,
                        call=0,
                        kind="Block",
                        parts=inside,
                        region=region,
                        chained=rng.random() < chained_share,
                    )
                )
            else:
                found.append(random_leaf(rng, (path, 0), group_share=group_share))
        return tuple(found)

    root = Block(path="", call=0, kind="Model", parts=parts("", 0), region=None)
    return Problem(
        parts=(root, random_leaf(rng, ("", 0), rederive_share=0.2)),
        fixed_bytes=rng.randrange(50) * UNIT,
        optimizer_peak_bytes=rng.choice([0, 60 * UNIT]),
        plain_seconds=100.0,
        plain_flops=10_000,
    )


def random_chain(seed: int, num_stages: int, *, gradients: bool = True) -> Problem:
    """Returns a chain of different stages, each one leaf that may be a region; later stages save less, as in a CNN."""
    rng = random.Random(seed)
    blocks = []
    inputs = rng.randrange(20, 60)
    for i in range(num_stages):
        outputs = max(int(inputs * rng.uniform(0.8, 1.15)), 2)
        saved = outputs * rng.randrange(1, 7) + rng.randrange(10)
        seconds = rng.uniform(0.5, 4.0)
        leaf = Leaf(
            owner=(str(i), 0),
            options=(random_option(rng, "save", saved, 0.0),),
            gradient_bytes=rng.randrange(4) * UNIT if gradients else 0,
        )
        region = Region(
            saved_bytes=inputs * UNIT,
            forward_bytes=(outputs + rng.randrange(5)) * UNIT,
            replay_bytes=rng.randrange(outputs) * UNIT,
            seconds=seconds,
            flops=int(seconds * 100),
        )
        blocks.append(Block(path=str(i), call=0, kind="Stage", parts=(leaf,), region=region, chained=i > 0))
        inputs = outputs
    root = Block(path="", call=0, kind="Chain", parts=tuple(blocks), region=None)
    return Problem(parts=(root,), fixed_bytes=0, optimizer_peak_bytes=0, plain_seconds=1.0, plain_flops=1)


def repeat(problem_block: Block, count: int) -> Problem:
    """Returns a model of `count` equal blocks, named 0, 1, ..."""

    def rename(part: Leaf | Block, name: str) -> Leaf | Block:
        if isinstance(part, Leaf):
            return dataclasses.replace(part, owner=(f"{name}{part.owner[0]}", part.owner[1]))
        inside = tuple(rename(p, name) for p in part.parts)
        return dataclasses.replace(part, path=f"{name}{part.path}", parts=inside)

    blocks = tuple(rename(problem_block, str(i)) for i in range(count))
    root = Block(path="", call=0, kind="Model", parts=blocks, region=None)
    return Problem(parts=(root,), fixed_bytes=10 * UNIT, optimizer_peak_bytes=0, plain_seconds=1.0, plain_flops=1)


def all_choices(line: Line) -> Iterator[Choice]:
    """Yields every choice of a line: regions nest, the calls of a span may be regions and spans, units act together.

    A unit saves, or rederives with all its leaves in the same region (or in none).
    """
    for choice, _ in _suffixes(line, list(line.root.parts), {}, 0, ()):
        yield choice


_Fixed = dict[int, tuple[str, tuple[int, ...]]]


def _suffixes(
    line: Line, parts: list[Leaf | Call], fixed: _Fixed, at: int, around: tuple[int, ...], whole: int = 0
) -> Iterator[tuple[Choice, _Fixed]]:
    """Yields the choices of `parts`, with what they fix; `around` names the regions they are in by first leaves.

    `whole`: a span over this many calls is the one they are in already.
    """
    if not parts:
        yield (), fixed
        return
    start = around[-1] if around else 0
    part, rest = parts[0], parts[1:]
    if isinstance(part, Leaf):
        unit = line.unit_of[start + at]
        for option in part.options:
            decided = fixed
            if unit >= 0:
                decision = (option.ambient, around if option.ambient == "rederive" else ())
                if fixed.get(unit, decision) != decision:
                    continue
                decided = {**fixed, unit: decision}
            for choice, final in _suffixes(line, rest, decided, at + 1, around):
                yield (Pick(first=at, last=at + 1, way=Run(option.ambient, option.rung)), *choice), final
        return
    yield from _suffixes(line, [*part.parts, *rest], fixed, at, around)
    if part.block.region is None:
        return
    calls = [part]
    while True:
        length = calls[-1].last - part.first
        inside = list(calls) if len(calls) > 1 else list(part.parts)
        nested = _suffixes(line, inside, fixed, 0, (*around, start + at), len(calls) if len(calls) > 1 else 0)
        allowed = len(calls) != whole and region_of(tuple(calls)).is_alone
        for inner, decided in nested if allowed else ():
            ways = [Replay()]
            if not around:  # inside a region nothing is kept
                ways += [Replay(keep=keep.labels) for keep in region_of(tuple(calls)).keeps]
            for way in ways:
                pick = Pick(first=at, last=at + length, way=way, inner=inner, rank=part.rank, num_calls=len(calls))
                for choice, final in _suffixes(line, parts[len(calls) :], decided, at + length, around):
                    yield (pick, *choice), final
        following = calls[-1].following
        if following is None or len(calls) == len(parts) or parts[len(calls)] is not following:
            return
        calls.append(following)
