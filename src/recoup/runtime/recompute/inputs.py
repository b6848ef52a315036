"""A region's arguments, kept for its replay.

Tensors are kept through autograd (`_SaveInputs`), so hooks around the region see them; lists and dicts are copied, so
what the forward writes into them is not there the second time. An iterator is copied where Python can copy one (of a
list, a tuple, a range); any other can be read once only and is refused.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from recoup._pytree import flatten
from recoup.errors import ReplayError
from recoup.runtime.rebuild.lineage import current_recorder
from recoup.runtime.recompute.rng_state import version_of, versions_of


class _Input:
    """Stands for the i-th saved tensor input in a step's arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Iterator:
    """Stands for an iterator in a step's arguments: holds one that stays where the forward found it."""

    __slots__ = ("start",)

    def __init__(self, start: Any) -> None:
        self.start = start


_ATOMS = frozenset([int, float, bool, str, type(None), torch.dtype, torch.device])
_COPYABLE_ITERATORS = frozenset([type(iter([])), type(iter(())), type(iter(range(0)))])


class _Previous:
    """Stands for the i-th output of the step before."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _SaveInputs(torch.autograd.Function):
    """Lets autograd keep tensors, through whatever saved-tensor hooks are on."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors[1:])  # here: with a `setup_context` each call would look up our signature
        return torch.empty((0,))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("nothing flows through the saver of a region's inputs")


class Inputs:
    """The arguments of one call.

    Attributes:
        tensors: those to keep and `others`: what else the arguments hold; both only until `forget()`.
    """

    __slots__ = ("_leaves", "_path", "_requires_grad", "_saver", "_structure", "_versions", "others", "tensors")

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
        outputs = {id(t): i for i, t in enumerate(previous) if t is not None}
        indices: dict[int, int] = {}  # one tensor given twice is one tensor again: models ask `query is key`

        def keep(leaf: Any) -> Any:
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
                    f"Region `{path}`: its argument of type {type(leaf).__name__} is an iterator, which its second "
                    "forward would find used up. Pass a list, or leave this module out of the plan.",
                    code="E204",
                )
            if type(leaf) not in _ATOMS:
                self.others.append(leaf)
            return leaf

        leaves, self._structure = flatten((args, kwargs))
        self._leaves = [keep(leaf) for leaf in leaves]
        dummy = torch.empty((0,), requires_grad=True)
        with _deriving(offloads=offloads):  # whatever is decided around: what can be rebuilt need not be kept
            # The (empty) output, not its node: torch 2.11 forgets what a node saved when its output is gone.
            self._saver = _SaveInputs.apply(dummy, *self.tensors)  # type: ignore[no-untyped-call]
        self._versions = list(zip(map(weakref.ref, self.tensors), versions_of(self.tensors), strict=True))
        self._requires_grad = [t.requires_grad for t in self.tensors]  # a weight among them may be frozen by then

    def forget(self) -> None:
        """Lets go of the tensors that are kept through autograd now."""
        self.tensors, self.others = [], []

    def check(self) -> None:
        """Raises if a tensor was changed in place since the call, as far as it is still there to be asked."""
        for i, (ref, version) in enumerate(self._versions):
            tensor = ref()
            if tensor is not None and version_of(tensor) != version:
                raise self.refusal(f"tensor {i} of its arguments, {list(tensor.shape)},")

    def refusal(self, what: str) -> ReplayError:
        """Returns the error that says that `what` was changed in place."""
        return ReplayError(
            f"Region `{self._path}`: {what} was changed in place by the region itself or before backward. Change a "
            f"copy (`inplace=False`, `x = x + ...`), or leave this module out of the plan with a `save` decision for "
            f"{self._path!r}.",
            code="E202",
        )

    def rebuild(self, previous: list[torch.Tensor]) -> tuple[Any, Any]:
        """Returns the arguments, tensors detached from the first forward's graph.

        Args:
            previous: outputs of the step before.
        """
        try:
            saved = self._saver.grad_fn.saved_tensors
        except ReplayError:
            raise  # of a region around this one
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise self.refusal("a tensor of its arguments, or one it is rebuilt from,") from error
        tensors = [t.detach().requires_grad_(flag) for t, flag in zip(saved, self._requires_grad, strict=True)]

        def restore(leaf: Any) -> Any:
            if isinstance(leaf, _Input):
                return tensors[leaf.index]
            if isinstance(leaf, _Iterator):
                return copy.copy(leaf.start)
            return previous[leaf.index] if isinstance(leaf, _Previous) else leaf

        args, kwargs = self._structure.unflatten([restore(leaf) for leaf in self._leaves])
        return args, kwargs


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
