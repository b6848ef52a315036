"""The action *tile* on a position-wise module: its forward runs over tiles of positions, in forward and in backward.

Forward runs tile by tile and keeps nothing but the arguments, through autograd (`inputs.py`), so that a region around
the module or rederive sees them as any saved tensor. Backward takes each tile again: its forward, its backward, the
tile's share of the inputs' gradients written where it belongs, the parameters' shares summed (in float32 where the
parameter has fewer bits). So a tiled module costs what a region costs, one more forward, and what it needs for a moment
is what a tile needs. A replay of a region that ends with it stops before it: there it costs only what a replay leaves
out, the ops after the last saved tensor (an MLP's last product).

A row of the result has the bits that it has without tiles wherever the kernels compute a row alike in tiles of any
height; matmul kernels may choose another blocking for another height. Sums over tiles round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recoup import _torch
from recoup._pytree import iterate_tensors, map_tensors
from recoup.errors import ReplayError, UsageError
from recoup.runtime import execution_context
from recoup.runtime.recompute.inputs import Inputs
from recoup.runtime.recompute.rng_state import AutocastState, version_of
from recoup.runtime.tile.inside import each_tile, inside_tile
from recoup.runtime.tile.loss.math import wide
from recoup.runtime.tile.module.position_wise import graph_nodes

# Shapes: ... any number of dimensions, whose product is N positions; T positions of a tile; H, F features.


class Tiling:
    """How one call is cut into tiles of positions.

    Args:
        path: module path, for messages.
        run: the forward.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        tile_rows: positions of a tile.

    Attributes:
        tensors: tensors of the arguments, each once.
        is_tiled: for each, whether it is cut: those with the leading sizes of the first.
        leading: the leading sizes.
    """

    def __init__(self, path: str, run: Callable[..., Any], args: Any, kwargs: Any, *, tile_rows: int) -> None:
        self.path = path
        self.run = run
        self.args, self.kwargs = args, kwargs
        self.tensors = tensors_of((args, kwargs))
        self.leading = tuple(self.tensors[0].shape[:-1])
        self.is_tiled = [tuple(t.shape[:-1]) == self.leading and t.dim() > 1 for t in self.tensors]
        self.num_rows = self.tensors[0].shape[:-1].numel()
        self.tile_rows = max(1, min(tile_rows, self.num_rows))

    def starts(self) -> range:
        """Returns where each tile begins."""
        return range(0, self.num_rows, self.tile_rows)

    def cut(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        """Returns a tile, (1, ..., T, H), of (1, ..., N, H)."""
        return rows.narrow(-2, start, min(self.tile_rows, self.num_rows - start))

    def tiled_rows(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each tensor that is cut, and it with its positions in a row: a copy if it is not contiguous."""
        pairs = zip(self.tensors, self.is_tiled, strict=True)
        return [(t, self.in_a_row(t.detach())) for t, is_tiled in pairs if is_tiled]

    def in_a_row(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns (..., H) as (1, ..., N, H)."""
        return tensor.reshape((*(1,) * (tensor.dim() - 2), self.num_rows, tensor.shape[-1]))

    def call(self, swaps: dict[int, torch.Tensor]) -> Any:
        """Runs the forward with some tensors, named by identity, replaced."""
        args, kwargs = map_tensors(lambda t: swaps.get(id(t), t), (self.args, self.kwargs))
        return self.run(*args, **kwargs)


def tensors_of(nest: Any) -> list[torch.Tensor]:
    """Returns the tensors of a nest, each once."""
    return list({id(t): t for t in iterate_tensors(nest)}.values())


def run_tiles(tiling: Tiling, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Runs the forward over tiles and returns its output; differentiable.

    Args:
        leaves: the parameters that it reads.
    """
    if not any(t.requires_grad for t in (*tiling.tensors, *leaves)):
        with torch.no_grad():
            return _forward(tiling)
    # First: a replay that wants no more than the arguments ends here.
    inputs = Inputs(tiling.path, tiling.args, tiling.kwargs, [])
    call = _TiledCall(tiling, inputs, leaves)
    return call.apply(tiling)


def _forward(tiling: Tiling) -> torch.Tensor:
    """Returns the result, (..., F), tile by tile."""
    output_NF: torch.Tensor | None = None
    rows_NF: torch.Tensor | None = None
    tiled_rows = tiling.tiled_rows()
    for start in each_tile(tiling.starts()):
        swaps = {id(t): tiling.cut(rows, start) for t, rows in tiled_rows}
        with inside_tile():
            made_TF = tiling.call(swaps).detach()
        del swaps
        if output_NF is None:
            output_NF = made_TF.new_empty((*tiling.leading, made_TF.shape[-1]))
            rows_NF = tiling.in_a_row(output_NF)
        assert rows_NF is not None
        rows_NF.narrow(-2, start, made_TF.shape[-2]).copy_(made_TF)
        del made_TF
    assert output_NF is not None
    execution_context.count("num_tiled", execution_context.current_counts())
    return output_NF


class _TiledCall:
    """One tiled call, from its forward to the end of its backward."""

    def __init__(self, tiling: Tiling, inputs: Inputs, leaves: Sequence[torch.Tensor]) -> None:
        self.inputs = inputs
        self.leaves = list(leaves)
        self.autocast = AutocastState(t.device.type for t in tiling.tensors)
        self.versions = [version_of(leaf) for leaf in leaves]
        self.needs = [t.requires_grad for t in tiling.tensors]
        self.path, self.run, self.tile_rows = tiling.path, tiling.run, tiling.tile_rows
        inputs.forget()

    def apply(self, tiling: Tiling) -> torch.Tensor:
        return _Tiled.apply(self, tiling, *tiling.tensors, *self.leaves)  # type: ignore[no-any-return, no-untyped-call]

    def backward(self, grad: torch.Tensor) -> list[torch.Tensor | None]:
        """Returns the gradients of the arguments' tensors and of the leaves."""
        for leaf, version in zip(self.leaves, self.versions, strict=True):
            if version_of(leaf) != version:
                raise ReplayError(
                    f"Tiled module `{self.path}`: a parameter {list(leaf.shape)} was changed between forward and "
                    "backward; its tiles would not give the same gradients. Call backward before changing it.",
                    code="E201",
                )
        self.inputs.check()
        args, kwargs = self.inputs.rebuild([])
        tiling = Tiling(self.path, self.run, args, kwargs, tile_rows=self.tile_rows)
        whole = [
            None if tiled or not needs else t.requires_grad_()
            for t, tiled, needs in zip(tiling.tensors, tiling.is_tiled, self.needs, strict=True)
        ]
        written = [
            torch.empty_like(t, memory_format=torch.contiguous_format) if tiled and needs else None
            for t, tiled, needs in zip(tiling.tensors, tiling.is_tiled, self.needs, strict=True)
        ]
        into = [w if w is None else tiling.in_a_row(w) for w, t in zip(written, tiling.is_tiled, strict=True) if t]
        sums = _Sums([*(t for t in whole if t is not None), *self.leaves])
        grad_rows, tiled_rows = tiling.in_a_row(grad), tiling.tiled_rows()
        with self.autocast.replayed(), _torch.without_tensor_hooks(self.leaves):
            for start in each_tile(tiling.starts()):
                self._tile(tiling, start, tiled_rows, grad_rows, into, sums)
        totals = sums.finish()
        found = [w if t is None else totals.pop(0) for t, w in zip(whole, written, strict=True)]
        return [*found, *totals]

    def _tile(
        self,
        tiling: Tiling,
        start: int,
        tiled_rows: Sequence[tuple[torch.Tensor, torch.Tensor]],
        grad_rows: torch.Tensor,
        into: Sequence[torch.Tensor | None],
        sums: _Sums,
    ) -> None:
        """Runs one tile forward and backward, writes its share of the inputs' gradients and adds the others'."""
        swaps: dict[int, torch.Tensor] = {}
        cuts: list[torch.Tensor] = []
        for (tensor, rows), target in zip(tiled_rows, into, strict=True):
            swaps[id(tensor)] = cut = tiling.cut(rows, start)
            if target is not None:
                cuts.append(cut.requires_grad_())
        with execution_context.recomputing(), inside_tile(keeps=True):
            made_TF = tiling.call(swaps)
        swaps.clear()
        self._check(made_TF, [*cuts, *sums.tensors])
        found = list(
            _torch.run_backward(
                [made_TF],
                [tiling.cut(grad_rows, start)],
                [*cuts, *sums.tensors],
                keeps_graph=False,
            )
        )
        del made_TF
        for target in into:
            if target is not None:
                share = found.pop(0)
                tiling.cut(target, start).zero_() if share is None else tiling.cut(target, start).copy_(share)
                del share
        sums.add(found)

    def _check(self, made: torch.Tensor, known: Sequence[torch.Tensor]) -> None:
        ids = {id(t) for t in known}
        for node in graph_nodes(made):
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in ids:
                raise ReplayError(
                    f"Tiled module `{self.path}`: its second forward reads a parameter {list(leaf.shape)} that the "
                    "first one did not. Leave it out of the plan.",
                    code="E205",
                )


class _Sums:
    """Gradients summed over tiles, in float32 where the tensor has fewer bits."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self._sums: list[torch.Tensor | None] = [None] * len(self.tensors)

    def add(self, shares: list[torch.Tensor | None]) -> None:
        """Adds a tile's shares, which are let go one by one."""
        for index, tensor in enumerate(self.tensors):
            share = shares.pop(0)
            if share is None:
                continue
            total = self._sums[index]
            if total is None:
                total = self._sums[index] = torch.zeros_like(tensor, dtype=wide(tensor.dtype), requires_grad=False)
            total.add_(share)
            del share

    def finish(self) -> list[torch.Tensor | None]:
        """Returns the sums in the dtypes of their tensors; None where no tile had a share."""
        found: list[torch.Tensor | None] = []
        for tensor in self.tensors:
            total = self._sums.pop(0)
            found.append(None if total is None else total.to(tensor.dtype))
        return found


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _TiledCall, tiling: Tiling, *tensors: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.call = call
        return _forward(tiling)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        call: _TiledCall | None = ctx.call
        if torch.is_grad_enabled():
            raise UsageError(
                "A second derivative through a tiled module was asked for (create_graph=True); its tiles are gone by "
                "then. Leave that module out of the plan. (recoup.runtime.tile.module.rows)"
            )
        if call is None:
            raise RuntimeError(
                "Trying to backward through a tiled module a second time: what it kept is gone. Pass "
                "retain_graph=True to the first backward."
            )
        if not _torch.backward_keeps_graph():
            ctx.call = None
        return (None, None, *call.backward(grad))
