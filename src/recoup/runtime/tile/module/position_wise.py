"""Whether a function treats each position by itself: proved from the ops that it runs, never assumed from a name.

The function is run once under fake tensors (nothing is allocated) and every op it dispatches is judged. A storage that
depends on the positions holds *rows*: one block of bytes for each position, in order. A view over it is geometry: it
may split, permute or cut what is inside a row, and its strides tell which of its dimensions are positions. An op is
let through if it is known to make each row of its result from the same row of what it reads and from what is the same
for all rows: pointwise ops, products with a right factor, norms, softmax and sums inside a row. Anything else, an op
that nobody listed here included, ends the proof, with the reason.

What autograd will do is checked as well: a backward of its own (`torch.autograd.Function`) may do anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from recoup import _torch
from recoup.runtime.tile.module.position_wise_ops import Judge, MixesPositions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Result of running a function under fake tensors.

    Attributes:
        reason: why it is not position-wise; "" if it is.
        leaves: the parameters, and other leaves, that a gradient flows to, what it was given left out.
        ops: the names of what it ran, pointwise ones with their numbers.
    """

    reason: str
    leaves: tuple[torch.Tensor, ...] = ()
    ops: tuple[str, ...] = ()


def prove(
    function: Callable[[list[torch.Tensor]], Any], tiled: Sequence[torch.Tensor], leading: tuple[int, ...]
) -> Proof:
    """Returns whether `function` treats each position of `tiled` by itself and returns one row for each.

    Args:
        function: takes stand-ins for `tiled`, a list, and returns a tensor.
        tiled: real or fake, (..., H).
        leading: the leading sizes of the stand-ins: the positions.
    """
    mode = next((_torch.mode_of_fake(t) for t in tiled if _torch.is_fake(t)), None) or _torch.fake_tensor_mode()
    hooks = _torch.saved_tensors_hooks(lambda t: None, lambda t: t)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # they come again when it runs
        for context in (_torch.without_dispatch_modes(), _torch.quiet_fake_errors(), mode, torch.enable_grad()):
            stack.enter_context(context)
        stack.enter_context(hooks)
        stack.enter_context(_without_autocast_cache())
        given = [_stand_in(t, leading) for t in tiled]
        first_node = _torch.next_node_number()
        judge = Judge(given, leading)
        try:
            with judge:
                output = function(given)
        except MixesPositions:
            return Proof(reason=judge.reason)
        except Exception as error:  # the user's code runs here, without data: whatever it raises ends the proof
            text = str(error).strip().splitlines()
            return Proof(reason=f"it cannot be run without data ({type(error).__name__}: {text[0] if text else ''})")
        reason = judge.reason or judge.judge_output(output)
        leaves: tuple[torch.Tensor, ...] = ()
        if not reason:
            reason, leaves = _judge_graph(output, given, first_node)
    return Proof(reason=reason, leaves=leaves, ops=tuple(judge.ops))


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Keeps a fake cast of a weight from being found by the real forward."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _stand_in(tensor: torch.Tensor, leading: tuple[int, ...]) -> torch.Tensor:
    device = _torch.fake_device(tensor) if _torch.is_fake(tensor) else tensor.device
    made = torch.empty((*leading, tensor.shape[-1]), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def _judge_graph(output: torch.Tensor, given: list[torch.Tensor], first: int) -> tuple[str, tuple[torch.Tensor, ...]]:
    """Returns why the graph rules tiles out ("" if it does not), and the leaves that are not among `given`."""
    leaves: list[torch.Tensor] = []
    for node in graph_nodes(output):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return f"{type(node).__name__.removesuffix('Backward')} has a backward of its own", ()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if not any(leaf is g for g in given):
                leaves.append(leaf)
        elif _torch.node_number(node) < first:
            return "it reads a tensor that needs a gradient and is neither its argument nor a parameter", ()
    return "", tuple(leaves)


def graph_nodes(output: torch.Tensor) -> list[Any]:
    """Returns the autograd nodes behind a tensor."""
    seen: dict[Any, None] = {}
    stack = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen[node] = None
        stack += [below for below, _ in node.next_functions]
    return list(seen)
