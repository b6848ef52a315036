"""Lazy logits, which a tiled head returns: a tensor without memory that is computed only if an op needs its values.

The tensor has the shape of the logits. Ops on the way to the loss (reshape, shift by slicing, cast, scale, soft cap)
are recorded, and `cross_entropy` on the result runs over tiles. Any other op (metrics, sampling, another loss) computes
the logits once, as the head would have, and runs on them. So the model's own loss function runs, and nothing of it is
copied here.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from recoup import _torch
from recoup._pytree import iterate_tensors, map_tensors
from recoup.errors import UsageError
from recoup.runtime import execution_context
from recoup.runtime.tile.loss import lazy_classes, lazy_ops
from recoup.runtime.tile.loss.function import tiled_loss
from recoup.runtime.tile.loss.math import LossSpec, Step, wide


class Head:
    """Sources of the logits, shared by all lazy tensors made of them.

    Attributes:
        hidden: (..., H), the head's argument.
        weight: (V, H).
        bias: (V,).
        tile_tokens: rows of a tile.
        logits: the head's own forward, which computes the logits whole.
        hooks: FSDP2's hooks that run when the logits' backward begins.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tile_tokens: int,
        forward: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.hidden = hidden
        self.weight = weight
        self.bias = bias
        self.tile_tokens = tile_tokens
        self._forward = forward
        kind = hidden.device.type
        self.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._versions = self._current_versions()
        self.family: list[weakref.ref[LazyLogits]] = []
        self.hooks: dict[int, Callable[[torch.Tensor], torch.Tensor]] = OrderedDict()

    def _current_versions(self) -> list[int]:
        return [t._version for t in (self.hidden, self.weight, self.bias) if t is not None]

    def check(self) -> None:
        """Raises if the hidden states or the weights were changed since the head was called."""
        if self._current_versions() != self._versions:
            raise UsageError(
                "The logits of a tiled head were asked for after its input or weight was changed in place (by an "
                "optimizer step, usually). Read them before, or leave `tile` out of the plan's actions. "
                "(recoup.runtime.tile.loss.lazy_logits)"
            )
        if self.weight.numel() and not self.weight.untyped_storage().nbytes():
            raise UsageError(
                f"The weight {list(self.weight.shape)} of a tiled head was taken away after its forward, as FSDP does "
                "with a unit. Keep the head in the root unit, and the loss inside the model's forward, or leave "
                "`tile` out of the plan's actions. (recoup.runtime.tile.loss.lazy_logits)"
            )

    def when_backward_begins(self, tensor: torch.Tensor) -> torch.Tensor:
        """Registers `hooks` on a tensor that the loss depends on; returns it."""
        if tensor.requires_grad:
            for hook in self.hooks.values():
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return tensor

    def logits(self) -> torch.Tensor:
        """Returns the logits, with their graph, as the head computes them."""
        self.check()
        execution_context.count("num_logits_made", execution_context.current_counts())
        kind = self.hidden.device.type
        with torch.enable_grad(), torch.autocast(kind, dtype=self.autocast, enabled=self.autocast is not None):
            return self.when_backward_begins(self._forward(self.hidden))


class LazyLogits(torch.Tensor):
    """A tensor with a shape and a recipe; see the module."""

    head: Head
    rows: torch.Tensor
    bias: torch.Tensor | None
    steps: tuple[Step, ...]
    more: tuple[tuple[torch.Tensor, Head], ...]
    after: lazy_classes.Classwise | None
    _make: Callable[[], torch.Tensor]
    _real: torch.Tensor | None
    _parent: LazyLogits | None

    def made(self) -> torch.Tensor:
        """Returns the logits, computed now if they were not before."""
        if self._real is None:
            self._real = self._make()
        return self._real

    def is_made(self) -> bool:
        """Whether it, or what it was made of, has been computed: then changes in place may have touched it."""
        return self._real is not None or (self._parent is not None and self._parent.is_made())

    def follow(self, func: Any) -> lazy_ops.Follow | None:
        """Returns what an op makes of these values while they are not there, None if it needs them."""
        found = lazy_classes.OPS.get(func)
        if found is None and self.after is None:
            return lazy_ops.OPS.get(func)
        return found or lazy_classes.AFTER.get(func) or lazy_ops.MOVES.get(func)

    def operands(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Returns rows (N, H), weight, bias, and (rows, weight) of the products added; in the head's autocast dtype."""
        low = self.head.autocast

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if low is None else tensor.to(low)

        def flat(rows: torch.Tensor) -> torch.Tensor:
            return cast(rows.reshape(-1, rows.shape[-1]))

        more = [(flat(added), cast(other.weight)) for added, other in self.more]
        bias = None if self.bias is None else cast(self.bias)
        return flat(self.rows), cast(self.head.weight), bias, more

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in lazy_ops.QUESTIONS:
            with _torch.without_torch_function():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and not first.is_made():
            if func is functional.cross_entropy:
                loss = _cross_entropy(*args, **kwargs)
                if loss is not None:
                    return loss
            elif func is torch.Tensor.register_hook and len(args) == 2 and _torch.is_fsdp_pre_backward(args[1]):
                handle = RemovableHandle(first.head.hooks)
                first.head.hooks[handle.id] = args[1]
                return handle
            elif (follow := first.follow(func)) is not None:
                made = follow(first, args[1:], kwargs)
                if made is not None:
                    return made
        if lazy_ops.writes(func, kwargs):
            for lazy in _all_lazy((args, kwargs)):
                for member in list(lazy.head.family):
                    alive = member()
                    if alive is not None:
                        alive.made()
        return func(*_made(args), **_made(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_made(args), **_made(kwargs or {}))


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a tiled head's logits, there or not."""
    return isinstance(tensor, LazyLogits)


def where_backward_enters(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor; for logits that are not there, the hidden states that the loss's gradient reaches first."""
    return tensor.rows if isinstance(tensor, LazyLogits) and not tensor.is_made() else tensor


def lazy_logits(head: Head) -> LazyLogits:
    """Returns the stand-in for `head(hidden)`."""
    dtype = head.autocast or head.hidden.dtype
    requires_grad = any(t is not None and t.requires_grad for t in (head.hidden, head.weight, head.bias))
    return _new(head, head.hidden, head.bias, (), dtype, requires_grad, head.logits, None, ())


def derive(
    source: LazyLogits,
    rows: torch.Tensor,
    step: Step | None,
    make: Callable[[torch.Tensor], torch.Tensor],
    bias: torch.Tensor | None = None,
    more: tuple[tuple[torch.Tensor, Head], ...] | None = None,
    *,
    after: lazy_classes.Classwise | None = None,
    dtype: torch.dtype | None = None,
) -> LazyLogits:
    """Applies an op to `source` and returns its result.

    Args:
        rows: the hidden states of the result.
        step: what happens to the values.
        make: the op on real logits.
        bias: replaces the one of `source`.
        more: (rows, head) of products that are added, in the place of `source`'s.
        after: what is made of the logits along the classes, in the place of `source`'s.
        dtype: of the result.
    """
    steps = source.steps if step is None else (*source.steps, step)
    if dtype is None:
        dtype = step[1] if step is not None and step[0] == "to" else source.dtype

    def run() -> torch.Tensor:
        with torch.enable_grad():
            return make(source.made())

    bias = source.bias if bias is None else bias
    more = source.more if more is None else more
    requires_grad = source.requires_grad or any(t.requires_grad for r, h in more for t in (r, h.weight))
    after = source.after if after is None else after
    return _new(source.head, rows, bias, steps, dtype, requires_grad, run, source, more, after)


def _new(
    head: Head,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    steps: tuple[Step, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    make: Callable[[], torch.Tensor],
    parent: LazyLogits | None,
    more: tuple[tuple[torch.Tensor, Head], ...],
    after: lazy_classes.Classwise | None = None,
) -> LazyLogits:
    shape = (*rows.shape[:-1], head.weight.shape[0])
    lazy: LazyLogits = _torch.tensor_without_data(LazyLogits, head.hidden, shape, dtype, requires_grad)
    lazy.head, lazy.rows, lazy.bias, lazy.steps = head, rows, bias, steps
    lazy._make, lazy._real, lazy._parent = make, None, parent
    lazy.more, lazy.after = more, after
    head.family.append(weakref.ref(lazy))
    return lazy


def _all_lazy(nest: Any) -> list[LazyLogits]:
    return [t for t in iterate_tensors(nest) if isinstance(t, LazyLogits)]


def _made(nest: Any) -> Any:
    return map_tensors(lambda t: t.made() if isinstance(t, LazyLogits) else t, nest)


def _cross_entropy(
    lazy: LazyLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Returns the loss over tiles; None where it is asked in a way that tiles do not cover."""
    head = lazy.head
    fits = (
        lazy.after is None
        and lazy.dim() == 2
        and target.dim() == 1
        and len(target) == len(lazy)
        and target.dtype == torch.int64
    )
    plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if not (fits and plain) or isinstance(target, LazyLogits) or not torch.is_grad_enabled():
        return None
    for each in (head, *(other for _, other in lazy.more)):
        each.check()
    execution_context.count("num_tiled", execution_context.current_counts())
    spec = LossSpec(
        steps=lazy.steps,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
        tile_tokens=head.tile_tokens,
    )
    rows, matrix, bias, more = lazy.operands()
    loss = head.when_backward_begins(tiled_loss(rows, matrix, bias, [target], spec, more))
    in_autocast = torch.is_autocast_enabled(rows.device.type)
    return loss.to(wide(lazy.dtype) if in_autocast else lazy.dtype)


def same_rows(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape a view asks for if it leaves the classes (the last dimension) together, else None."""
    known = math.prod(size for size in wanted if size != -1)
    total = math.prod(shape)
    if wanted.count(-1) > 1 or (-1 in wanted and (known == 0 or total % known)):
        return None
    resolved = tuple(total // known if size == -1 else size for size in wanted)
    if not resolved or math.prod(resolved) != total or resolved[-1] != shape[-1] or not total:
        return None
    return resolved
