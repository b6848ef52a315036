"""Outputs of a loop's steps besides the state: stacked over time, or reduced while the loop runs."""

from __future__ import annotations

from typing import Any, Literal

import torch

from recoup.errors import UsageError
from recoup.recurrent.leaves import flatten, rebuild

Mode = Literal["stack", "sum", "mean", "last", "none"]
MODES = ("stack", "sum", "mean", "last", "none")


class Outputs:
    """Collects the steps' outputs; each is collected once, however often its step is evaluated.

    Attributes:
        mode: "stack", "sum", "mean", "last" or "none".
        results: one tensor for each output leaf, stacked or reduced over time.
        num_collected: steps whose output was collected so far.
    """

    def __init__(self, mode: Mode, num_steps: int) -> None:
        self.mode = mode
        self.results: list[torch.Tensor] = []
        self.num_collected = 0
        self._num_steps = num_steps
        self._template: Any = None
        self._is_tensor = False

    def collect(self, output: Any) -> list[torch.Tensor]:
        """Adds the next step's output; returns its tensors."""
        step = self.num_collected
        self.num_collected += 1
        if self._is_tensor and isinstance(output, torch.Tensor):
            tensors = [output]
        else:
            tensors, template = flatten(output)
            if step == 0:
                self._template = template
                self._is_tensor = isinstance(output, torch.Tensor)
                self._start(tensors)
        if self.mode == "none":
            return tensors
        if len(tensors) != len(self.results):
            raise UsageError(
                f"recoup.recurrent.scan: step {step} returned {len(tensors)} output tensors, step 0 "
                f"{len(self.results)}; every step must return the same nest of outputs."
            )
        for i, tensor in enumerate(tensors):
            self._take(i, step, tensor)
        return tensors

    def _start(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if self.mode == "stack":
                self.results.append(tensor.new_empty((self._num_steps, *tensor.shape)))
            elif self.mode != "none":
                self.results.append(tensor.detach())

    def _take(self, index: int, step: int, tensor: torch.Tensor) -> None:
        mode, result = self.mode, self.results[index]
        expected = result.shape[1:] if mode == "stack" else result.shape
        if tensor.shape != expected and mode != "last":
            raise UsageError(
                f"recoup.recurrent.scan: step {step} returned an output of shape {list(tensor.shape)}, step 0 of "
                f"{list(expected)}; with outputs={mode!r} all must have the same shape. Return it in the state, or "
                "use outputs='last'."
            )
        with torch.no_grad():
            if mode == "stack":
                result[step].copy_(tensor)
            elif mode == "last":
                self.results[index] = tensor.detach()
            elif step == 1:
                self.results[index] = result + tensor
            elif step > 1:
                result.add_(tensor.detach())

    def finish(self) -> None:
        """Completes the results; call it after the last step."""
        if self.mode == "mean":
            self.results = [result / self._num_steps for result in self.results]

    def adds_first(self, step: int) -> bool:
        """Whether the plain loop's backward adds the loss term of an output that is a state before the next step's.

        A stack is differentiated before any step. In a running sum the first addition follows step 1, every later one
        precedes the step after it.
        """
        return self.mode == "stack" or (self.mode in ("sum", "mean") and step == 0)

    def takes(self, step: int) -> bool:
        """Whether this step's output gets a gradient."""
        return self.mode != "none" and (self.mode != "last" or step == self._num_steps - 1)

    def gradients_of(self, step: int, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the gradients of one step's output tensors, given the gradients of the results."""
        if not self.takes(step):
            return []
        if self.mode == "stack":
            return [None if g is None else g[step] for g in gradients]
        return gradients

    def scaled(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the gradients of a step's outputs in the modes in which every step has the same."""
        if self.mode == "mean":
            return [None if g is None else g / self._num_steps for g in gradients]
        return gradients

    def nest(self, tensors: list[torch.Tensor]) -> Any:
        """Returns the pytree of a step's output with the results as leaves."""
        return None if self.mode == "none" else rebuild(self._template, tensors)
