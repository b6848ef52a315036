"""A region's arguments, kept for its replay.

Where saved-tensor hooks are on around the region, tensors are saved through autograd (`_SaveInputs`), so that those see
them. Without any, autograd would keep the tensor and its version, and so do we. Lists and dicts are copied, so that the
replay does not find what the first forward wrote into them. Iterators of lists, tuples and ranges are copied; any other
iterator can be consumed only once and is refused.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from recoup import _torch
from recoup._pytree import flatten
from recoup.errors import ReplayError
from recoup.runtime.rebuild.lineage import current_recorder
from recoup.runtime.recompute.rng_state import version_of, versions_of


class _Input:
    """Placeholder of the i-th saved input tensor in a step's arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Iterator:
    """Placeholder of an iterator in a step's arguments: holds a copy at the position where the forward found it."""

    __slots__ = ("start",)

    def __init__(self, start: Any) -> None:
        self.start = start


_ATOMS = frozenset([int, float, bool, str, type(None), torch.dtype, torch.device])
_COPYABLE_ITERATORS = frozenset([type(iter([])), type(iter(())), type(iter(range(0)))])


class _Previous:
    """Placeholder of the i-th output of the previous step."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _empty() -> torch.Tensor:
    """Returns a tensor of no bytes, which is no op of the step: captures would take longer for it than for the call."""
    with _torch.past_dispatch_modes():
        return torch.empty((0,))


class _SaveInputs(torch.autograd.Function):
    """Saves tensors through autograd, and so through the saved-tensor hooks that are on."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors[1:])  # no `setup_context`: each call would inspect our signature
        return _empty()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("nothing flows through the saver of a region's inputs")


class Inputs:
    """The arguments of one call.

    Attributes:
        tensors: the tensors to save, until `forget()`.
        others: other objects among the arguments, until `forget()`.
    """

    __slots__ = (
        "_kept",
        "_leaves",
        "_path",
        "_references",
        "_requires_grad",
        "_saver",
        "_structure",
        "_versions",
        "others",
        "tensors",
    )

    def __init__(
        self,
        path: str,
        args: Any,
        kwargs: Any,
        previous: Sequence[torch.Tensor | None],
        *,
        offloads: bool = False,
    ) -> None:
        self._path = path
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        if not kwargs and all([type(a) is torch.Tensor or type(a) in _ATOMS for a in args]):
            leaves, self._structure = args, None
        else:
            leaves, self._structure = flatten((args, kwargs))
        outputs = {id(t): i for i, t in enumerate(previous) if t is not None} if previous else {}
        indices: dict[int, int] = {}  # one tensor given twice is one tensor again: models ask `query is key`
        self._leaves = [leaf if type(leaf) in _ATOMS else self._keep(leaf, outputs, indices) for leaf in leaves]
        tensors = self.tensors
        self._versions = versions_of(tensors)
        self._references = list(map(weakref.ref, tensors))
        self._requires_grad = [t.requires_grad for t in tensors]  # a weight among them may be frozen later
        self._kept: list[torch.Tensor] = []
        self._saver: torch.Tensor | None = None
        if _torch.saves_plainly() and not any([t.is_inference() for t in tensors]):
            self._kept = tensors.copy()  # what autograd would do, in a tenth of the time
            return
        dummy = _empty().requires_grad_()
        with _deriving(offloads=offloads):  # whatever is decided around: what can be rebuilt need not be kept
            # The (empty) output, not its node: torch 2.11 forgets what a node saved when its output is gone.
            self._saver = _SaveInputs.apply(dummy, *tensors)  # type: ignore[no-untyped-call]

    def _keep(self, leaf: Any, outputs: dict[int, int], indices: dict[int, int]) -> Any:
        """Returns what stands for a leaf until the replay."""
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in outputs:
                return _Previous(outputs[id(leaf)])
            if id(leaf) not in indices:
                indices[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf)
            return _Input(indices[id(leaf)])
        if type(leaf) in _COPYABLE_ITERATORS:
            return _Iterator(copy.copy(leaf))
        if isinstance(leaf, Iterator):
            raise ReplayError(
                f"Region `{self._path}`: its argument of type {type(leaf).__name__} is an iterator, which its second "
                "forward would find used up. Pass a list, or leave this module out of the plan.",
                code="E204",
            )
        self.others.append(leaf)
        return leaf

    def forget(self) -> None:
        """Drops the references to tensors that autograd has saved."""
        self.tensors, self.others = [], []

    def check(self) -> None:
        """Raises ReplayError if an argument that is still alive was changed in place since the call."""
        for i, (ref, version) in enumerate(zip(self._references, self._versions, strict=True)):
            tensor = ref()
            if tensor is not None and version_of(tensor) != version:
                raise self.refusal(f"tensor {i} of its arguments, {list(tensor.shape)},")

    def refusal(self, what: str) -> ReplayError:
        """Returns the ReplayError for `what`, which was changed in place."""
        return ReplayError(
            f"Region `{self._path}`: {what} was changed in place by the region itself or before backward. Change a "
            f"copy (`inplace=False`, `x = x + ...`), or leave this module out of the plan with a `save` decision for "
            f"{self._path!r}.",
            code="E202",
        )

    def rebuild(self, previous: list[torch.Tensor]) -> tuple[Any, Any]:
        """Returns (args, kwargs) with tensors detached from the first forward's graph.

        Args:
            previous: outputs of the previous step.
        """
        saved = self._kept if self._saver is None else self._unpacked()
        tensors = [
            t.detach().requires_grad_() if flag else t.detach()
            for t, flag in zip(saved, self._requires_grad, strict=True)
        ]
        leaves = []
        for leaf in self._leaves:
            kind = type(leaf)
            if kind is _Input:
                leaf = tensors[leaf.index]
            elif kind is _Previous:
                leaf = previous[leaf.index]
            elif kind is _Iterator:
                leaf = copy.copy(leaf.start)
            leaves.append(leaf)
        if self._structure is None:
            return tuple(leaves), {}
        args, kwargs = self._structure.unflatten(leaves)
        return args, kwargs

    def _unpacked(self) -> Sequence[torch.Tensor]:
        assert self._saver is not None
        try:
            return self._saver.grad_fn.saved_tensors  # type: ignore[union-attr,no-any-return,attr-defined]
        except ReplayError:
            raise  # of a region around this one
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise self.refusal("a tensor of its arguments, or one it is rebuilt from,") from error


@contextlib.contextmanager
def _deriving(*, offloads: bool) -> Iterator[None]:
    recorder = current_recorder()
    if recorder is None:
        yield
        return
    before = recorder.deriving, recorder.offloading
    recorder.deriving, recorder.offloading = True, offloads
    if offloads and recorder.offloader is not None:
        recorder.offloader.begin_group()
    try:
        yield
    finally:
        recorder.deriving, recorder.offloading = before
