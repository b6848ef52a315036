"""Steps of a choice as plain data: how a leaf runs, what a region keeps, what a call moves to the host."""

from __future__ import annotations

import dataclasses

from recoup.ir.decision import Ambient


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RungOf:
    """The rung on which a leaf's scans run: the ladder's number in the problem, and the rung's on it."""

    ladder: int
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """How a leaf runs.

    Attributes:
        ambient: what it does with what autograd would save.
        rung: of a leaf that is a scan; None: all steps taped.
    """

    ambient: Ambient
    rung: RungOf | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A region: its forward runs again.

    Attributes:
        keep: labels of the ops whose results it keeps.
        offload: whether its inputs go to the host.
    """

    keep: tuple[str, ...] = ()
    offload: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """A call whose saved tensors go to the host, all its leaves running under `inside`."""

    inside: Ambient


Way = Run | Replay | Move
