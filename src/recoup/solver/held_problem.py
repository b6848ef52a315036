"""A forward as plans by tensor see it, and one way to run a segment of it. Plain numbers."""

from __future__ import annotations

import dataclasses

from recoup.solver.held import Op


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldProblem:
    """A forward by its ops, and what the plain step says of its intervals.

    Attributes:
        ops: in forward order.
        value_bytes: of each value; 0: held anyway.
        saves: for each op the values that autograd saves with it.
        unseen: values that no code but the op's own call ever has: they cannot be held.
        self_saved: values that are saved with the op that made them, besides with others, which `saves` has.
        places: the ops that intervals begin with, the first op included.
        saved_bytes, forward_bytes, backward_bytes, gradient_bytes: of each interval: what it leaves saved, its peaks in
            forward and backward above the level before it, and the gradients that exist while its backward runs.
        fixed_bytes: there all the time.
        entering_bytes: of each interval, the gradients of activations that are there when its backward begins.
        after_bytes: peak of what follows the model (the loss), above `fixed + held`.
        bare_bytes: for each op the bytes alive above `fixed_bytes` if autograd kept nothing, its workspace included.
        released: for each value the last op at which its storage would be alive then: the model's own code has it until
            there. Without these two forward's peak is bounded by what a segment holds and its ops need besides.
    """

    ops: tuple[Op, ...]
    value_bytes: tuple[int, ...]
    saves: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    fixed_bytes: int
    self_saved: frozenset[int] = frozenset()
    unseen: frozenset[int] = frozenset()
    entering_bytes: tuple[int, ...] = ()
    after_bytes: int = 0
    bare_bytes: tuple[int, ...] = ()
    released: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One way to run a segment.

    Attributes:
        held: values held (None: what autograd saves, nothing is run again).
        held_bytes: theirs, with those of earlier segments that this one needs.
        forward: (bytes, what code has alive of them): forward's peak above what segments before it hold is the largest
            of the bytes, each without the values that those hold, as (bit, bytes); see `AliveInCode`.
        holds: bits of the values that it holds and that code has alive after it.
        backward_bytes: peak above what segments before it hold.
        seconds: run again.
        shares: earlier values that code has alive and that it needs, as (bit, bytes): more than `held_bytes` where no
            segment before holds them.
        shared_bytes: of other earlier segments' values, that the segment before it may hold already: more than
            `held_bytes` by where that begins, empty for nothing.
        after_saved_bytes: the same if that one holds what autograd saves.
        pieces: if it is nested, the first op of each piece and the values held for it once the first rebuild has run.
    """

    held: tuple[int, ...] | None
    held_bytes: int
    forward: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    backward_bytes: int
    seconds: float
    holds: int = 0
    shares: tuple[tuple[int, int], ...] = ()
    shared_bytes: tuple[int, ...] = ()
    after_saved_bytes: int = 0
    pieces: tuple[tuple[int, tuple[int, ...]], ...] = ()
