"""The action *recompute*: a region keeps its inputs and runs its forward again in backward.

The first forward runs under saved-tensor hooks that keep nothing but numbered `Slot`s. The first slot that backward
asks for replays the forward from the kept inputs; the k-th tensor saved in the replay fills the k-th slot, and the
replay stops at the last one. Inputs are saved through autograd (`inputs.py`), so hooks around the region, a
region around the region, or a user's own, see them: regions nest, and an input can be rederived. The replay saves
through `saved_tensor.pack`, so a region may hold only what cheap ops cannot rebuild.

A *span* is one region over several calls that follow each other, each one's first argument being exactly what the one
before returned. No user code changes: a call joins the open span when it is handed that very tensor. The calls of a
span may be regions and spans again: the first forward opens them too, so that it and the replay save alike.

A *chunk* is one region over several calls of the same module, as a loop over time makes them. What a call is handed of
the outputs of the call before is not kept, and the module's attributes are noted once, when the chunk begins: its
replay runs the calls in a row, and state goes from call to call as it did.

Compared with `torch.utils.checkpoint` (non-reentrant, whose slot-filling idea this follows): rederive inside, spans,
buffers and foreign random streams handled, errors that name the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recoup import _torch
from recoup._pytree import iterate_tensors
from recoup.errors import ReplayError
from recoup.runtime.recompute.frame import Frame
from recoup.runtime.recompute.region_step import Member
from recoup.runtime.recompute.scope import scope


def continues(span: object, paths: Sequence[str], path: str, args: Any) -> bool:
    """Whether a call is the next of a span that is open: the right module, handed what the call before it returned.

    A module may be called several times in a step, and several times in a span; only this tells its calls apart.

    Args:
        paths: the calls of the span after its first.
    """
    frame = scope.spans.get(id(span))
    if frame is None or not 0 < len(frame.steps) <= len(paths) or paths[len(frame.steps) - 1] != path:
        return False
    previous = frame.previous()
    return bool(previous) and previous[0] is not None and next(iterate_tensors(args), None) is previous[0]


def run_region(
    member: Member, args: Any, kwargs: Any, *, span: object | None = None, begins_chunk: bool | None = None
) -> Any:
    """Runs a module's forward as a region.

    Args:
        span: says which span or chunk the call is part of. In a span it joins the open frame if it is handed the very
            tensor that the call before returned, and opens a new one otherwise.
        begins_chunk: whether it is the first of its chunk; None: it is in none.
    """
    if not torch.is_grad_enabled() or _torch.inside_transform():
        return member.forward(*args, **kwargs)
    frame: Frame | None = None
    previous: list[torch.Tensor | None] = []
    if span is not None and not begins_chunk:
        frame = scope.spans.get(id(span))
        previous = frame.previous() if frame is not None else []
        is_handed_on = bool(previous) and previous[0] is not None and next(iterate_tensors(args), None) is previous[0]
        if begins_chunk is None and not is_handed_on:
            frame, previous = None, []
    if frame is None:
        frame = Frame(member, is_chunk=begins_chunk is not None)
        if span is not None:
            scope.spans[id(span)] = frame
    try:
        return frame.run(member, args, kwargs, previous)
    except ReplayError as error:
        error.region = error.region or member.path
        raise
