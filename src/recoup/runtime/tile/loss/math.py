"""One tile of tokens: from its logits to its loss and back to the gradient of its logits, in as few buffers as can be.

The loss is taken by the kernel that the plain loss uses, so it rounds alike, some rows at a time where its result may
take the logits' place; there it turns into the gradient. That is one buffer of the tile's size and an eighth of it for
a moment. Low precision adds its own copy, soft-capping what tanh needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch

Step = tuple[str, Any]
"""An op between logits and loss: ("mul", c), ("div", c), ("tanh", None) or ("to", dtype)."""


class Tile(Protocol):
    """A tile's logits on their way to a loss and back. T tokens, V classes, K numbers a token."""

    def rows(self) -> torch.Tensor:
        """Returns the loss of each token, (T,) or (T, K)."""

    def gradient(self, scale_T: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the head's output, (T, V); the last thing asked of a tile.

        Args:
            scale_T: gradient of what `rows` returned, or one number for all of it.
        """


class Spec(Protocol):
    """How a tile becomes its loss: a frozen dataclass.

    Attributes:
        steps: from the head's output to the logits.
        reduction: "mean" over the tokens that count, "sum" or "none".
        tile_tokens: rows of a tile.
        num_cut: how many of the tensors beside the logits have a row a token.
        num_columns: numbers a token, K; 0 for a plain (N,).
    """

    @property
    def steps(self) -> tuple[Step, ...]: ...  # noqa: D102
    @property
    def reduction(self) -> str: ...  # noqa: D102
    @property
    def tile_tokens(self) -> int: ...  # noqa: D102
    @property
    def num_cut(self) -> int: ...  # noqa: D102
    @property
    def num_columns(self) -> int: ...  # noqa: D102

    def counts(self, others: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns which tokens count, (N,) of bool; `others` as given to `tiled_loss`."""

    def tile(self, output_TV: torch.Tensor, others: Sequence[torch.Tensor], *, needs_gradient: bool) -> Tile:
        """Returns the tile of the head's output, which may be overwritten."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """How the cross entropy of a tile is taken.

    Attributes:
        steps: from the head's output to the logits.
        ignore_index: labels that count for nothing.
        label_smoothing: share of the target spread over all classes.
        z_loss: weight of logsumexp squared.
        reduction: "mean" over the labels that count, "sum" or "none".
        tile_tokens: rows of a tile.
    """

    steps: tuple[Step, ...] = ()
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "mean"
    tile_tokens: int = 1024
    num_cut: ClassVar[int] = 1  # the labels
    num_columns: ClassVar[int] = 0

    def counts(self, others: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns which labels are not ignored."""
        return others[0] != self.ignore_index

    def tile(self, output_TV: torch.Tensor, others: Sequence[torch.Tensor], *, needs_gradient: bool) -> Tile:
        """Returns the cross entropy of a tile, taken where its logits lie."""
        return CrossEntropyTile(output_TV, others[0], self)


_NUM_PARTS = 8  # of a tile, whose log-softmax is taken one by one


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which the loss of logits of this dtype is computed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _without_last_cast(dtype: torch.dtype, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Returns the steps without a cast at the end that the loss does by itself."""
    for kind, value in steps[:-1]:
        dtype = value if kind == "to" else dtype
    return steps[:-1] if steps and steps[-1] == ("to", wide(dtype)) else steps


def _log_softmax_in_place(logits_TV: torch.Tensor) -> torch.Tensor:
    """Writes the log-softmax of each row over the row: the bits of the kernel, a few rows at a time."""
    size = max(-(-len(logits_TV) // _NUM_PARTS), 1)
    for start in range(0, len(logits_TV), size):
        part_TV = logits_TV[start : start + size]
        part_TV.copy_(part_TV.log_softmax(1))
    return logits_TV


class CrossEntropyTile:
    """The logits of one tile; `rows` takes the loss, `gradient` turns them into the gradient of the head's output.

    Shapes: T tokens, V classes. The tensor handed in is overwritten.
    """

    def __init__(self, output_TV: torch.Tensor, labels_T: torch.Tensor, spec: LossSpec) -> None:
        self.spec = spec
        self._tape: list[tuple[str, Any, torch.Tensor]] = []
        logits = output_TV
        for kind, value in _without_last_cast(output_TV.dtype, spec.steps):
            logits = self._step(logits, kind, value)
        dtype = wide(logits.dtype)
        if dtype != logits.dtype:
            self._tape.append(("to", dtype, logits))
        most_T = logits.amax(1).to(dtype) if spec.z_loss else None
        if dtype != logits.dtype or self._on_tape(logits):
            self._buffer = logits.log_softmax(1, dtype=dtype)
        else:
            self._buffer = _log_softmax_in_place(logits)
        self._lse_T = most_T - self._buffer.amax(1) if most_T is not None else None
        self.counts_T = labels_T != spec.ignore_index
        self._target_T1 = labels_T.masked_fill(~self.counts_T, 0).unsqueeze(1)

    def _step(self, logits: torch.Tensor, kind: str, value: Any) -> torch.Tensor:
        if kind == "to":
            if value == logits.dtype:
                return logits
            self._tape.append((kind, value, logits))
            return logits.to(value)
        if kind == "tanh":
            logits = logits.tanh_() if not self._on_tape(logits) else logits.tanh()
            self._tape.append((kind, None, logits))
            return logits
        self._tape.append((kind, value, logits))
        if self._on_tape(logits):
            return torch.mul(logits, value) if kind == "mul" else torch.div(logits, value)
        return logits.mul_(value) if kind == "mul" else logits.div_(value)

    def _on_tape(self, logits: torch.Tensor) -> bool:
        return any(kind == "tanh" and saved is logits for kind, _, saved in self._tape)

    def rows(self) -> torch.Tensor:
        """Returns the loss of each token, 0 where its label is ignored."""
        spec, logp_TV = self.spec, self._buffer
        loss_T = -logp_TV.gather(1, self._target_T1).squeeze(1)
        if spec.label_smoothing:
            loss_T = loss_T * (1 - spec.label_smoothing) - logp_TV.mean(1) * spec.label_smoothing
        if self._lse_T is not None:
            loss_T = loss_T + spec.z_loss * self._lse_T.square()
        return loss_T.masked_fill(~self.counts_T, 0)

    def gradient(self, scale_T: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the head's output (T, V); the last thing asked of a tile.

        Args:
            scale_T: gradient of each token's loss.
        """
        spec, d_TV = self.spec, self._buffer.exp_()
        scale_T = scale_T.to(d_TV.dtype) * self.counts_T
        factor_T = scale_T
        if self._lse_T is not None:
            factor_T = scale_T * (1 + 2 * spec.z_loss * self._lse_T)
        d_TV.mul_(factor_T.unsqueeze(1))
        smoothing = spec.label_smoothing
        if smoothing:
            d_TV.sub_((scale_T * (smoothing / d_TV.shape[1])).unsqueeze(1))
        d_TV.scatter_add_(1, self._target_T1, (scale_T * (smoothing - 1)).unsqueeze(1))
        for kind, value, saved in reversed(self._tape):
            if kind == "to":
                d_TV = d_TV.to(saved.dtype) if self._on_tape(saved) else saved.copy_(d_TV)
            elif kind == "tanh":
                d_TV = torch.ops.aten.tanh_backward(d_TV, saved)
            else:
                d_TV = d_TV.mul_(value) if kind == "mul" else d_TV.div_(value)
        return d_TV
