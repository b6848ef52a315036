"""Any function of a token's logits over tiles: its gradient is taken inside the tile, by autograd.

`CrossEntropyTile` writes its gradient by hand where the logits lie. What else is asked of logits (log-probabilities,
entropy, divergences) is a function of a tile's logits here, and the tile holds what autograd keeps of it: some five
times its logits for a moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from recoup import _torch
from recoup.runtime.tile.inside import inside_tile
from recoup.runtime.tile.loss.math import Step, Tile, wide

PerToken = Callable[..., torch.Tensor]
"""(logits_TV, *others) -> (T,) or (T, K): treats each token by itself."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """How a tile becomes what a function makes of its logits; see `Spec`.

    Attributes:
        function: of the logits, in float32 at least, and of the other tensors but the first, which says what counts.
    """

    function: PerToken
    steps: tuple[Step, ...] = ()
    reduction: str = "none"
    tile_tokens: int = 1024
    num_cut: int = 1
    num_columns: int = 0

    def counts(self, others: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns which tokens count: the first of `others`."""
        return others[0]

    def tile(self, output_TV: torch.Tensor, others: Sequence[torch.Tensor], *, needs_gradient: bool) -> Tile:
        """Returns what the function makes of a tile, with its graph if somebody needs gradients."""
        return _FunctionTile(output_TV, others, self, needs_gradient)


class _FunctionTile:
    def __init__(
        self, output_TV: torch.Tensor, others: Sequence[torch.Tensor], spec: FunctionSpec, needs_gradient: bool
    ) -> None:
        self._output_TV = output_TV.detach().requires_grad_(needs_gradient)
        counts_T = others[0]
        with inside_tile(keeps=needs_gradient):
            rows = spec.function(apply_steps(self._output_TV, spec.steps), *others[1:])
            self._rows = rows.masked_fill(~(counts_T if rows.dim() == 1 else counts_T.unsqueeze(1)), 0)

    def rows(self) -> torch.Tensor:
        return self._rows.detach()

    def gradient(self, scale_T: torch.Tensor) -> torch.Tensor:
        scale = scale_T.to(self._rows.dtype).expand(self._rows.shape)
        with inside_tile(keeps=True):
            found = _torch.run_backward([self._rows], [scale], [self._output_TV])[0]
        return torch.zeros_like(self._output_TV) if found is None else found


def apply_steps(output_TV: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
    """Returns the logits, in float32 at least, of a head's output; differentiable."""
    logits = output_TV
    for kind, value in steps:
        if kind == "to":
            logits = logits.to(value)
        elif kind == "tanh":
            logits = logits.tanh()
        else:
            logits = logits * value if kind == "mul" else logits / value
    return logits.to(wide(logits.dtype))
