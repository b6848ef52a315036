"""The action *loss in place*: a cross entropy that keeps one copy of its logits, bit for bit the plain one.

[Note: loss in place]
1. Plainly `cross_entropy` keeps log-probabilities beside the logits; its backward makes zeros of that size, then the
   logits' gradient: three at a time, besides the logits that the model may still hold.
2. Here the forward takes the log-probabilities of some rows at a time and picks those of the labels; torch's own kernel
   sums the picked ones, in the order in which it sums them among all classes. The logits alone are kept.
3. Backward takes the same rows again, by torch's own kernels, and writes their gradient over the logits, unless another
   tensor lies over that memory (the user's, or one that somebody saved) or the graph is kept.
4. Each row's log-probabilities and gradient are its own, whatever rows it is computed with, so all bits are the plain
   loss's. What is not of the common form (class weights, label smoothing, probabilities as labels) is left to torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from recoup import _torch
from recoup.errors import ReplayError, UsageError
from recoup.ir.decision import LossInPlace
from recoup.runtime.recompute.scope import inside_region
from recoup.solver.tiles import FEWEST_ROWS
from recoup.thresholds import SAME_SHARE

_aten = torch.ops.aten
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


@contextlib.contextmanager
def losses_in_place(decision: LossInPlace | None) -> Iterator[None]:
    """Runs cross entropies inside as decided; None: as they are. Where compiled code runs it ends."""
    if decision is None:
        yield
        return
    mode = LossInPlaceMode(decision)
    with mode, _torch.on_compiled_calls(mode.put_off):
        yield


class LossInPlaceMode(_torch.function_mode_class()):  # type: ignore[misc]
    """The torch-function mode under which cross entropies run in place."""

    def __init__(self, decision: LossInPlace) -> None:
        super().__init__()
        self._rows = decision.rows

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        loss = _in_place(self._rows, *args, **(kwargs or {})) if func is F.cross_entropy else None
        if loss is not None:
            return loss
        return func(*args, **kwargs) if kwargs else func(*args)


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Returns `F.cross_entropy`, its gradients too bit for bit, with the logits once in memory instead of three times.

    Some rows are taken at a time, in forward and in backward, which writes the gradient over the logits if nobody else
    holds them: let go of the logits before backward. Plans do so by themselves inside of a model's own forward; this is
    for a loss in your own loop. Runs as torch's own where logits are not (N, C) and contiguous, labels are no classes
    (N,), or `weight` or `label_smoothing` is given.

    Args:
        input: logits, (N, C), floating.
        target: classes, (N,), int64.
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: as torch's own has them.

    Raises:
        ReplayError: in backward, if logits or labels were changed in place since (E203).
        UsageError: in backward with `create_graph=True`.

    Example:
        >>> hidden, head = torch.randn(512, 32), torch.nn.Linear(32, 1000)
        >>> recoup.cross_entropy(head(hidden), torch.randint(0, 1000, (512,))).backward()
    """
    rows = max(1, int(len(input) * SAME_SHARE) // FEWEST_ROWS) * FEWEST_ROWS if input.dim() else 0
    options = weight, size_average, ignore_index, reduce, reduction, label_smoothing
    loss = _in_place(rows, input, target, *options)
    return F.cross_entropy(input, target, *options) if loss is None else loss


def _in_place(
    rows: int,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Returns the loss with so many rows at a time; None where it is to run as it is."""
    if inside_region() or _torch.under_others_hooks():
        return None  # a region's second forward has no modes, nor has that of a checkpoint, which has hooks of its own
    if weight is not None or size_average is not None or reduce is not None or label_smoothing:
        return None
    if reduction not in _REDUCTIONS or not torch.is_grad_enabled() or not _is_common(input, target, rows):
        return None
    if torch.is_autocast_enabled(input.device.type) and input.dtype in (torch.float16, torch.bfloat16):
        input = input.float()  # as autocast has it for losses
    return _Loss.apply(input, target, _REDUCTIONS[reduction], ignore_index, rows)  # type: ignore[no-any-return, no-untyped-call]


def _is_common(logits: Any, target: Any, rows: int) -> bool:
    if not isinstance(logits, torch.Tensor) or not isinstance(target, torch.Tensor) or not logits.requires_grad:
        return False
    if not all(type(t) is torch.Tensor or _torch.is_fake(t) for t in (logits, target)) or _torch.inside_transform():
        return False
    if logits.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64 or len(logits) != len(target):
        return False
    return logits.is_contiguous() and logits.is_floating_point() and len(logits) > rows


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, reduction: int, ignore_index: int, rows: int
    ) -> torch.Tensor:
        is_ignored = target == ignore_index
        classes = target.masked_fill(is_ignored, 0).unsqueeze(1)
        with torch.autocast(logits.device.type, enabled=False):
            picked = [torch.log_softmax(logits[at], 1).gather(1, classes[at]) for at in _parts(logits, rows)]
        # Of the one class that is left; what is to be ignored has the next.
        loss, total = _aten.nll_loss_forward.default(torch.cat(picked), is_ignored.long(), None, reduction, 1)
        # What is written over has to be nobody else's: saved-tensor hooks, which may share it, do not see it.
        ctx.logits, ctx.target, ctx.total = logits.detach(), target, total
        ctx.versions = logits._version, target._version
        ctx.options = reduction, ignore_index, rows
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise UsageError(
                "Backward was called with create_graph=True, and a cross entropy that runs in place cannot be "
                "differentiated twice. Plan that step without it: actions=('rederive', 'recompute'). "
                "(recoup.runtime.loss_in_place)"
            )
        logits, target, total = ctx.logits, ctx.target, ctx.total
        if logits is None:
            raise UsageError(
                "Backward came to a cross entropy for the second time. Call the first one with retain_graph=True. "
                "(recoup.runtime.loss_in_place)"
            )
        if (logits._version, target._version) != ctx.versions:
            raise ReplayError(
                "The logits or the labels of a cross entropy were changed in place between forward and backward, which "
                "takes the gradient from them. Change a copy, or plan without `loss-in-place`: actions=('rederive', "
                "'recompute'). (recoup.runtime.loss_in_place)",
                code="E203",
            )
        keeps = _torch.backward_keeps_graph()
        if not keeps:
            ctx.logits = ctx.target = ctx.total = None
        is_own = not keeps and _torch.has_memory_alone(logits)
        gradient = logits if is_own else torch.empty_like(logits)
        reduction, ignore_index, rows = ctx.options
        with torch.autocast(logits.device.type, enabled=False):
            for at in _parts(logits, rows):
                log_probs = torch.log_softmax(logits[at], 1)
                options = None, reduction, ignore_index, total
                above = upstream[at] if reduction == _REDUCTIONS["none"] else upstream
                each = _aten.nll_loss_backward.default(above, log_probs, target[at], *options)
                _aten._log_softmax_backward_data.out(each, log_probs, 1, logits.dtype, out=gradient[at])
                del log_probs, each
        return gradient, None, None, None, None


def _parts(logits: torch.Tensor, rows: int) -> Iterator[slice]:
    """Yields where each part of so many rows lies."""
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)
