"""The labels that move something to the host, added to a problem: regions' inputs, and what a call saves.

What a copy costs depends on what else is copied, which labels that add up cannot say. So a problem is made under one
of three assumptions, and the simulation of the plans decides between their answers:

- "hidden": all copies hide behind compute. True as long as little is moved.
- "window": copies hide as long as the link keeps up. Walking the calls of one depth in order, each that begins when
  the link is free has its copy for nothing; the link is then busy for as long as the copy takes, and the calls that
  begin meanwhile are not moved. Of equal layers this leaves every second or third, as the ratio of copy to compute
  says. Inputs of regions are few bytes: they hide if their copy takes no longer than the region.
- "exposed": nothing hides. True where there are no copy engines.

Where the host's memory is scarce, only so many calls get such labels as together fit there, the first ones of a step
before all: what they save waits longest. What a call saves takes more of the host than what of it cannot be rederived,
and that more than a region's inputs, so a problem then has labels of one kind beside inputs, or inputs alone.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from recoup.ir.decision import Ambient
from recoup.solver.problem import Block, Leaf, Offload, Option, Problem
from recoup.thresholds import SAME_SHARE

ALL_KINDS: tuple[Ambient, ...] = ("rederive", "save")
Assumption = Literal["hidden", "window", "exposed"]
FEWEST_LAYERS = 3  # of a kind at one depth that make it a stack of layers


@dataclasses.dataclass(slots=True, kw_only=True)
class _Link:
    """The link while calls are walked in forward order: `free_at` is when it is free again, for calls at `depth`."""

    out_seconds: float
    back_seconds: float
    overlaps: bool
    assumption: Assumption
    depth: int
    host_bytes: float = float("inf")
    kinds: tuple[Ambient, ...] = ALL_KINDS
    free_at: float = 0.0

    def price(self, nbytes: int, *, hides: bool) -> float:
        out, back = nbytes * self.out_seconds, nbytes * self.back_seconds
        if not self.overlaps:
            return out + back
        return max(out, back) * (SAME_SHARE if hides else 1.0)

    def inputs(self, nbytes: int, seconds: float) -> float:
        """Returns the price of moving a region's inputs while the region runs."""
        hides = self.assumption == "window" and nbytes * max(self.out_seconds, self.back_seconds) <= seconds
        return self.price(nbytes, hides=hides or self.assumption == "hidden")

    def saves(self, depth: int, nbytes: int, starts: float) -> float | None:
        """Returns the price of moving what a call saves, None if it is not to be moved."""
        if self.assumption != "window":
            return self.price(nbytes, hides=self.assumption == "hidden")
        if depth != self.depth or self.free_at > starts:
            return None
        self.free_at = starts + nbytes * max(self.out_seconds, self.back_seconds)
        return self.price(nbytes, hides=True)


def with_offload(
    problem: Problem,
    *,
    out_seconds: float,
    back_seconds: float,
    overlaps: bool,
    assumption: Assumption,
    min_bytes: int,
    depth: int = 0,
    host_bytes: float = float("inf"),
    kinds: tuple[Ambient, ...] = ALL_KINDS,
) -> Problem:
    """Returns the problem with labels that move regions' inputs, and what calls save, to the host.

    Args:
        out_seconds, back_seconds: of moving one byte.
        overlaps: whether copies run beside compute.
        min_bytes: calls that would move less get no such label.
        depth: of the calls that a window is for; the outermost ones have depth 0.
        host_bytes: that the labels, taken by all calls that have one, may move.
        kinds: of labels for what calls save: all of it, or what cannot be rederived.
    """
    link = _Link(
        out_seconds=out_seconds,
        back_seconds=back_seconds,
        overlaps=overlaps,
        assumption=assumption,
        depth=depth,
        host_bytes=host_bytes,
        kinds=kinds,
    )
    parts, _ = _walk(problem.parts, link, 0, 0.0, min_bytes)
    return dataclasses.replace(problem, parts=parts)


def _walk(
    parts: tuple[Leaf | Block, ...], link: _Link, depth: int, now: float, min_bytes: int
) -> tuple[tuple[Leaf | Block, ...], float]:
    """Returns the parts with labels, and the forward seconds at their end."""
    found: list[Leaf | Block] = []
    for part in parts:
        if isinstance(part, Leaf):
            found.append(part)
            continue
        region = part.region
        if region is None:
            inner, now = _walk(part.parts, link, depth + 1, now, min_bytes)
            found.append(dataclasses.replace(part, parts=inner))
            continue
        seconds = region.seconds + region.tail_seconds
        left = link.host_bytes
        has_room = min_bytes <= region.saved_bytes <= left
        inputs = link.inputs(region.saved_bytes, seconds) if has_room else None
        offloads = _offloads(part, link, depth, now, min_bytes)
        taken = list(offloads.values()) or [region.saved_bytes] * has_room
        inner, _ = _walk(part.parts, link, depth + 1, now, min_bytes)
        if taken:  # labels of calls inside stand in the place of the call's own
            link.host_bytes = left - max(taken)
        found.append(
            dataclasses.replace(
                part,
                parts=inner,
                region=dataclasses.replace(region, offload_seconds=inputs),
                offloads=tuple(offloads),
            )
        )
        now += seconds
    return tuple(found), now


def _offloads(block: Block, link: _Link, depth: int, now: float, min_bytes: int) -> dict[Offload, int]:
    """Returns the ways to move what a block saves, and the bytes that each moves."""
    leaves = list(_leaves(block))
    found: dict[Offload, int] = {}
    for inside in link.kinds:
        options = [_option(leaf, inside) for leaf in leaves]
        if inside == "rederive" and all(o.ambient != inside for o in options):
            continue
        level, forward = 0, 0
        for option in options:
            forward = max(forward, level + option.forward_bytes)
            level += option.saved_bytes
        if min_bytes <= level <= link.host_bytes:
            price = link.saves(depth, level, now)
            if price is not None:
                found[Offload(inside=inside, saved_bytes=0, forward_bytes=forward, seconds=price)] = level
    return found


def depths(problem: Problem) -> list[int]:
    """Returns the depths at which three calls or more of one kind save something, the outermost first, two at most."""
    counts: dict[tuple[int, str], int] = {}

    def count(parts: tuple[Leaf | Block, ...], depth: int) -> None:
        for part in parts:
            if isinstance(part, Block):
                counts[depth, part.kind] = counts.get((depth, part.kind), 0) + (part.region is not None)
                count(part.parts, depth + 1)

    count(problem.parts, 0)
    return sorted({depth for (depth, _), number in counts.items() if number >= FEWEST_LAYERS})[:2]


def _option(leaf: Leaf, action: str) -> Option:
    return next((o for o in leaf.options if o.ambient == action and o.rung is None), leaf.options[0])


def _leaves(block: Block) -> list[Leaf]:
    return [leaf for part in block.parts for leaf in ([part] if isinstance(part, Leaf) else _leaves(part))]
