"""The action *recompute*: a region keeps its inputs and runs its forward again in backward.

[Note: regions]
1. The first forward runs under saved-tensor hooks that keep nothing but numbered `Slot`s (`frame.py`).
2. The first slot that backward unpacks replays the forward from the kept inputs. The k-th tensor that the replay saves
   fills the k-th slot; the replay stops when the last slot is filled.
3. Inputs are saved through autograd (`inputs.py`), so the saved-tensor hooks around a region see them: those of an
   outer region, which makes slots of them, or a user's own. So regions nest, and an input can be rederived.
4. A region inside a region is opened in the outer region's first forward and in each replay of it, so that both save
   the same tensors in the same order. A replay opens frames of its own.
5. The replay saves through `saved_tensor.pack`: with rederive inside, it keeps only what cheap ops cannot rebuild.
6. A *span* is one region over consecutive calls. A call joins the open span if its first argument is the very tensor
   that the call before returned; no user code changes. Its calls may be regions and spans again.
7. A *chunk* is one region over consecutive calls of one module, as a loop over time makes them. Outputs of one call
   that the next one takes are not kept. The module's attributes are noted when the chunk begins; the replay runs the
   calls in a row, so state passes from call to call as it did.

Example: `outer` computes `relu(inner(x))`, `inner` saves a and b, both are regions. The first forward makes slots
outer: [x as an input of inner, result of relu], inner: [a, b], and keeps x alone. Backward of relu unpacks outer's
second slot: outer is replayed, which runs inner again and fills both of outer's slots. Backward of inner unpacks a:
inner is replayed from x, which is outer's first slot, filled by now. So inner ran three times, outer twice.

Compared with `torch.utils.checkpoint` (non-reentrant, whose slot-filling idea this follows): rederive inside, spans,
buffers and foreign random streams handled, errors that name the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recoup import _torch
from recoup._pytree import iterate_tensors
from recoup.errors import ReplayError
from recoup.runtime.recompute.frame import Frame
from recoup.runtime.recompute.region_step import Member
from recoup.runtime.recompute.scope import scope


def continues(span: object, paths: Sequence[str], path: str, args: Any) -> bool:
    """Whether a call is the next one of an open span: the right module, given the output of the span's last call.

    A module may be called several times in a step, and several times in a span; this tells its calls apart.

    Args:
        span: identifies the span.
        paths: module paths of the span's calls after the first.
        path: module path of the call.
        args: positional arguments of the call.
    """
    frame = scope.open_frame(span)
    if frame is None or not 0 < len(frame.steps) <= len(paths) or paths[len(frame.steps) - 1] != path:
        return False
    previous = frame.previous()
    return bool(previous) and previous[0] is not None and next(iterate_tensors(args), None) is previous[0]


def run_region(
    member: Member,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    span: object | None = None,
    begins_chunk: bool | None = None,
) -> Any:
    """Runs a module's forward as a region.

    Args:
        forward: what to run, now and in each replay.
        span: identifies the span or chunk that the call is part of. In a span, a call joins the open frame if its first
            argument is the tensor that the last call returned, and opens a new frame otherwise.
        begins_chunk: whether the call is the first of its chunk; None if it is in no chunk.
    """
    if not torch.is_grad_enabled() or _torch.inside_transform():
        return forward(*args, **kwargs)
    frame: Frame | None = None
    previous: list[torch.Tensor | None] = []
    if span is not None and not begins_chunk:
        frame = scope.open_frame(span)
        previous = frame.previous() if frame is not None else []
        is_handed_on = bool(previous) and previous[0] is not None and next(iterate_tensors(args), None) is previous[0]
        if begins_chunk is None and not is_handed_on:
            frame, previous = None, []
    if frame is None:
        frame = Frame(member, is_chunk=begins_chunk is not None)
        if span is not None:
            scope.open_span(span, frame)
    try:
        output = frame.run(member, forward, args, kwargs, previous)
        if span is not None and not frame.slots and isinstance(output, torch.Tensor):
            scope.hold_open(span, frame, output)
        return output
    except ReplayError as error:
        error.region = error.region or member.path
        raise
