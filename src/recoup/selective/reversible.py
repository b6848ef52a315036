"""`ReversibleSequential`: activations of one block, whatever the depth, by inverting instead of keeping or recomputing.

Additive coupling of RevNet (Gomez et al., arXiv 1707.04585): with x = (a, b) along one dimension,

    c = a + f(b)        d = b + g(c)        and back:  b = d - g(c)        a = c - f(b)

so backward needs only the last output. Another model than a residual stack, not another way to run one.
`a + f(b) - f(b)` rounds, so gradients differ from the plain run of the same blocks by some 1e-6 relative in float32,
growing with depth; in float64 by some 1e-15. In half precision use checkpointing instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from recoup.errors import ReplayError, UsageError
from recoup.runtime.execution_context import recomputing
from recoup.runtime.recompute.rng_state import AutocastState, RandomState, statistics_buffers


class ReversibleSequential(nn.Module):
    """Blocks (f, g) with additive coupling; keeps one output for backward.

    Memory: two halves of one activation and one block's insides, independent of depth. Time: one more forward, as
    checkpointing every block. Random numbers are replayed; autocast too.

    Args:
        blocks: pairs of modules, each from a half to a half of the same shape; no running statistics (BatchNorm): a
            second forward would count them twice.
        dim: the dimension that is halved.

    Shape: input and output the same, of even size along `dim`.
    """

    def __init__(self, blocks: Iterable[tuple[nn.Module, nn.Module]], *, dim: int = -1) -> None:
        pairs = [tuple(pair) for pair in blocks]
        if not pairs:
            raise UsageError("ReversibleSequential needs at least one pair of modules (f, g).")
        for i, pair in enumerate(pairs):
            if len(pair) != 2 or not all(isinstance(m, nn.Module) for m in pair):
                raise UsageError(f"Block {i} of ReversibleSequential must be a pair of modules (f, g).")
            if any(statistics_buffers(m.named_modules()) for m in pair):
                raise UsageError(
                    f"Block {i} of ReversibleSequential holds running statistics (BatchNorm), which its second "
                    "forward would update again. Use GroupNorm or LayerNorm, or checkpointing."
                )
        super().__init__()
        self.f = nn.ModuleList(f for f, _ in pairs)
        self.g = nn.ModuleList(g for _, g in pairs)
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the stack's output, of x's shape."""
        if x.shape[self.dim] % 2:
            raise UsageError(
                f"ReversibleSequential halves dimension {self.dim}, which is {x.shape[self.dim]} of {list(x.shape)}; "
                "it must be even."
            )
        if not torch.is_grad_enabled():
            return self.plain_forward(x)
        output: torch.Tensor = _Reversible.apply(x, self, *self.parameters())  # type: ignore[no-untyped-call]
        return output

    def plain_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the same result with autograd's ordinary saved tensors, for comparison."""
        a, b = x.chunk(2, self.dim)
        for f, g in zip(self.f, self.g, strict=True):
            a = a + f(b)
            b = b + g(a)
        return torch.cat([a, b], self.dim)


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stack: ReversibleSequential, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.stack, ctx.autocast = stack, AutocastState([x.device.type])
        ctx.random = []
        ctx.versions = [p._version for p in parameters]
        a, b = x.chunk(2, stack.dim)
        for f, g in zip(stack.f, stack.g, strict=True):
            first = RandomState([x])
            a = a + f(b)
            first.settle()
            second = RandomState([x])
            b = b + g(a)
            second.settle()
            ctx.random.append((first, second))
        output = torch.cat([a, b], stack.dim)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        stack: ReversibleSequential = ctx.stack
        parameters = list(stack.parameters())
        if [p._version for p in parameters] != ctx.versions:
            raise ReplayError(
                "ReversibleSequential: a parameter was changed between forward and backward; the blocks cannot be "
                "inverted. Call backward before changing it.",
                code="E201",
            )
        (output,) = ctx.saved_tensors
        c, d = output.chunk(2, stack.dim)
        dc, dd = gradients[0].chunk(2, stack.dim)
        found: dict[int, torch.Tensor] = {}
        with ctx.autocast.replayed(), recomputing():
            for i in reversed(range(len(stack.f))):
                first, second = ctx.random[i]
                inside, into = _through(stack.g[i], c, dd, second, found)
                d, dc = d - inside, dc + into
                inside, into = _through(stack.f[i], d, dc, first, found)
                c, dd = c - inside, dd + into
        return torch.cat([dc, dd], stack.dim), None, *(found.get(id(p)) for p in parameters)


def _through(
    module: nn.Module, x: torch.Tensor, gradient: torch.Tensor, random: RandomState, found: dict[int, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a block's half again and back; adds its parameters' gradients to `found`."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    x = x.detach().requires_grad_()
    with torch.enable_grad(), random.replayed():
        output = module(x)
    into, *own = torch.autograd.grad(output, [x, *parameters], gradient.to(output.dtype), allow_unused=True)
    for parameter, one in zip(parameters, own, strict=True):
        if one is not None:
            before = found.get(id(parameter))
            found[id(parameter)] = one if before is None else before + one
    return output.detach(), into if into is not None else torch.zeros_like(x)
