"""A held state of the loop, from which steps can be evaluated again."""

from __future__ import annotations

from typing import Any

import torch

from recoup.errors import ReplayError
from recoup.recurrent.leaves import rebuild
from recoup.runtime.recompute.rng_state import RandomState, StreamState, version_of


class Moment:
    """A held state: detached tensors, states of random streams, and the template to restore them by."""

    __slots__ = ("random", "streams", "template", "tensors", "versions")

    def __init__(self, tensors: list[torch.Tensor], template: Any) -> None:
        self.tensors = tensors
        self.template = template
        self.versions = [version_of(t) for t in tensors]
        self.random: RandomState | None = None
        self.streams: StreamState | None = None

    def nest(self, step: int) -> Any:
        """Returns (state, carried values).

        Raises:
            ReplayError: if a tensor was changed in place since.
        """
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if version_of(tensor) != version:
                raise ReplayError(
                    f"recoup.recurrent.scan: a state tensor {list(tensor.shape)} of step {step} was changed in place, "
                    "so the steps after it cannot be run again. Bind a new tensor instead (`h = h + ...`), or clone "
                    "the state on entry of the step.",
                    code="E203",
                )
        return rebuild(self.template, self.tensors)
