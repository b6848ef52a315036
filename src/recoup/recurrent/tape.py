"""A taped step, or several in a row: a piece of autograd graph from a state to the next one, and its backward.

[Note: sums in plain's order] A gradient that a plain loop sums over steps is summed by autograd from the last use to
the first, one addition at a time. Floating-point sums depend on the order, so a step's backward must continue the sum
where the later step left it: what was summed so far enters as one more root at the tensor itself, before the step's own
terms. That is done for captured tensors a tape uses more than once (for one use, `sum + term` is the same), and for
states that are stacked outputs too, whose loss term comes first. Inside of a tape of several steps the graph is
plain's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recoup import _torch
from recoup.errors import InternalError
from recoup.recurrent.captured import Captured
from recoup.runtime import execution_context, scan_bytes
from recoup.thresholds import SMALL_BYTES


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Tape:
    """Consecutive taped steps `step .. stop-1` in one graph.

    Attributes:
        step: the first step.
        stop: one past the last step.
        leaves: the state before them, where the graph begins; edges of the graph after `lighten` (None where no
            gradient is needed).
        inputs: their slices of the loop's inputs as leaves, step by step.
        states: the state after them, with its graph; edges after `lighten`.
        outputs: the outputs of each step, with their graph; edges after `lighten`.
        after: the state after them, detached, if it may be loaded from here.
    """

    step: int
    stop: int
    leaves: list[Any]
    inputs: list[torch.Tensor]
    states: list[Any]
    outputs: list[Any]
    after: Any = None

    def lighten(self) -> None:
        """Drops every tensor that the graph itself did not save."""
        self.leaves, self.states, self.outputs = (
            [_edge_of(item) for item in items] for items in (self.leaves, self.states, self.outputs)
        )

    def let_go(self) -> None:
        """Drops the graph; only the numbers of leaves, states and outputs remain."""
        self.leaves, self.states, self.outputs = (
            [None] * len(items) for items in (self.leaves, self.states, self.outputs)
        )
        self.inputs = []


def _edge_of(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return torch.autograd.graph.get_gradient_edge(item) if item.requires_grad else None


def needs_gradient(item: Any) -> bool:
    """Whether a tensor or an edge of a tape needs a gradient."""
    return item.requires_grad if isinstance(item, torch.Tensor) else item is not None


def is_same(left: Any, right: Any) -> bool:
    """Whether two entries of a tape are the same tensor or the same edge."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor) or left is None or right is None:
        return False
    return left.node is right.node and left.output_nr == right.output_nr


class _Begin(torch.autograd.Function):
    """The beginning of a graph: unlike a leaf's node, this one does not hold the tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, flags: list[bool], *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        found = tuple(t.detach() for t in state)
        ctx.mark_non_differentiable(*(t for t, flag in zip(found, flags, strict=True) if not flag))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        raise InternalError("recoup.recurrent: a backward went on beyond the beginning of a tape")


def begin(state: list[torch.Tensor], flags: list[bool]) -> list[torch.Tensor]:
    """Returns the tensors of a state; those whose flag is set begin a graph."""
    if True not in flags:
        return [t.detach() for t in state]
    anchor = torch.empty(0, requires_grad=True)
    with torch.enable_grad():
        return list(_Begin.apply(anchor, flags, *(t.detach() for t in state)))  # type: ignore[no-untyped-call]


class Sums:
    """Gradients of captured tensors, summed in plain's order ([Note: sums in plain's order]).

    Inside of the context, a hook on each captured tensor adds its gradient as soon as autograd has computed it, and
    frees it: the engine would hold the gradients of all captured tensors until the end of a step's backward. Where all
    of them are small no hooks are used, since hooks cost more than a small step.

    Attributes:
        totals: the sums so far; None where there is no gradient yet.
        seeded: indices of the tensors whose sum the running backward continues itself.
    """

    __slots__ = ("_handles", "_hooked", "_owned", "_tensors", "seeded", "totals")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._hooked = sum(t.numel() * t.element_size() for t in tensors) > SMALL_BYTES
        self.totals: list[torch.Tensor | None] = [None] * len(tensors)
        self.seeded = [False] * len(tensors)
        self._owned = [False] * len(tensors)
        self._tensors = tensors
        self._handles: list[Any] = []

    def __enter__(self) -> Sums:
        if not self._hooked:
            return self
        for index, tensor in enumerate(self._tensors):
            self._handles.append(tensor.register_hook(self._hook(index)))  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, index: int) -> Callable[[torch.Tensor], torch.Tensor | None]:
        totals, seeded, owned = self.totals, self.seeded, self._owned
        nothing: torch.Tensor | None = None

        def add(gradient: torch.Tensor) -> torch.Tensor | None:
            nonlocal nothing
            if seeded[index]:
                return None
            total = totals[index]
            if total is None:
                totals[index] = gradient.clone()  # autograd may hand the same tensor to other hooks
                owned[index] = True
                if gradient.layout is torch.strided:
                    nothing = gradient.new_zeros(()).expand_as(gradient)  # zeros of its shape in a few bytes
            elif owned[index]:
                total.add_(gradient)
            else:
                totals[index] = total + gradient
                owned[index] = True
            return nothing

        return add

    def begin_with_zeros(self) -> None:
        """Has every sum exist already, as in all backwards but the first."""
        self.totals[:] = [torch.zeros_like(t) for t in self._tensors]
        self._owned[:] = [True] * len(self._tensors)

    def take(self, found: Sequence[torch.Tensor | None]) -> None:
        """Takes a backward's gradients of all captured tensors."""
        totals, owned, seeded = self.totals, self._owned, self.seeded
        sums, terms = [], []
        for index, gradient in enumerate(found):
            if gradient is None:
                continue
            total = totals[index]
            if seeded[index]:
                self.replace(index, gradient)
            elif self._hooked:
                continue
            elif owned[index] and total is not None:
                sums.append(total)
                terms.append(gradient)
            else:
                totals[index] = gradient.clone() if total is None else total + gradient
                owned[index] = True
        if sums:
            torch._foreach_add_(sums, terms)

    def replace(self, index: int, total: torch.Tensor) -> None:
        """Sets a total that contains what was summed before."""
        self.totals[index] = total
        self._owned[index] = False


def backward(
    tape: Tape,
    *,
    state_gradients: list[torch.Tensor | None],
    output_gradients: list[torch.Tensor | None],
    seeds: dict[int, torch.Tensor],
    captured: Captured,
    sums: Sums,
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Runs the backward of a tape; adds the captured tensors' gradients to `sums`.

    Args:
        tape: the tape.
        state_gradients: gradients of `tape.states`.
        output_gradients: gradients of `tape.outputs`.
        seeds: gradients that the leaves have already.

    Returns:
        The gradients of the tape's leaves and of its inputs.
    """
    roots: list[Any] = []
    gradients: list[torch.Tensor] = []
    wanted = [i for i, leaf in enumerate(tape.leaves) if needs_gradient(leaf)]
    inputs = [tape.leaves[i] for i in wanted]
    for index, seed in seeds.items():
        if needs_gradient(tape.leaves[index]):
            roots.append(tape.leaves[index])
            gradients.append(seed)
    tensors, seeded = captured.tensors, sums.seeded
    num_steps = tape.stop - tape.step
    for index, count in enumerate(captured.uses):
        total = sums.totals[index]
        seeded[index] = count * num_steps > 1
        if total is not None and seeded[index]:
            roots.append(tensors[index])
            gradients.append(total)
    num_seeds = len(roots)
    for tensor, gradient in zip(tape.states, state_gradients, strict=True):
        if gradient is not None and needs_gradient(tensor):
            roots.append(tensor)
            gradients.append(gradient)
    for tensor, gradient in zip(tape.outputs, output_gradients, strict=True):
        if gradient is not None and needs_gradient(tensor):
            roots.append(tensor)
            gradients.append(gradient)
    leaf_gradients: list[torch.Tensor | None] = [None] * len(tape.leaves)
    input_gradients: list[torch.Tensor | None] = [None] * len(tape.inputs)
    for index, seed in seeds.items():
        leaf_gradients[index] = seed
    if len(roots) == num_seeds:
        return leaf_gradients, input_gradients
    wanted_inputs = [i for i, x in enumerate(tape.inputs) if x.requires_grad]
    inputs += [tape.inputs[i] for i in wanted_inputs]
    inputs += tensors
    scan_bytes.count_tape()
    with execution_context.first_run():
        found = _torch.run_backward(roots, gradients, inputs)
    del roots, gradients
    for index, gradient in zip(wanted, found):
        leaf_gradients[index] = gradient
    offset = len(wanted)
    for index, gradient in zip(wanted_inputs, found[offset:]):
        input_gradients[index] = gradient
    offset += len(wanted_inputs)
    sums.take(found[offset:])
    return leaf_gradients, input_gradients
