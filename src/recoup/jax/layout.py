"""What a plan says of a program: segments in order, each saved by JAX itself or run again around held values.

Plain data, JSON. Segments cover a program's units from the first to the last. A scan is said something of by the
segment it lies in: its steps come in pieces, each with a layout of the body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

EVERYTHING = "*"
"""Stands among held names for all that backward reads, as JAX itself picks it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some consecutive steps of a scan.

    Attributes:
        num_steps: how many. chunk: so many of them at a time run again as one before their backward, which then holds
            what `body` says for these alone; 0: no chunks. body: segments of the body.
    """

    num_steps: int
    chunk: int = 0
    body: tuple[Segment, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """A scan: its unit, and its steps in pieces, in the order they run."""

    unit: int
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Units [first, last) of a program.

    Attributes:
        recompute: run again in backward, from what enters and what is held; else JAX saves what backward reads.
        held: names of values inside that are held, or `EVERYTHING` alone. offloaded: of those, the ones held in host
            memory.
        parts: segments inside, in order, which cover it; () where there are none.
        scans: for scans among its units that do not run as written.
    """

    first: int
    last: int
    recompute: bool = False
    held: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    parts: tuple[Segment, ...] = ()
    scans: tuple[Scan, ...] = ()

    def walk(self) -> Iterator[Segment]:
        """Yields it, then all segments inside, scans' bodies included."""
        yield self
        for part in self.parts:
            yield from part.walk()
        for scan in self.scans:
            for piece in scan.pieces:
                for segment in piece.body:
                    yield from segment.walk()


Layout = tuple[Segment, ...]


def segment_from_json(data: dict[str, Any]) -> Segment:
    """Returns the segment that `dataclasses.asdict` made `data` of."""
    return Segment(
        first=data["first"],
        last=data["last"],
        recompute=data["recompute"],
        held=tuple(data["held"]),
        offloaded=tuple(data["offloaded"]),
        parts=tuple(map(segment_from_json, data["parts"])),
        scans=tuple(Scan(unit=s["unit"], pieces=tuple(map(_piece, s["pieces"]))) for s in data["scans"]),
    )


def _piece(data: dict[str, Any]) -> Piece:
    body = tuple(map(segment_from_json, data["body"]))
    return Piece(num_steps=data["num_steps"], chunk=data["chunk"], body=body)
