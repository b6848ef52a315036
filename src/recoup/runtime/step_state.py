"""What the patched forwards of one model share while a plan by module is in place: calls of this step, counters."""

from __future__ import annotations

import copy
from typing import Any

from recoup._pytree import iterate_tensors
from recoup.ir.decision import LossInPlace
from recoup.runtime import execution_context
from recoup.runtime.offload.offloaded_saved_tensor import Offloading
from recoup.runtime.rebuild.rederive_steps import RederiveCalls
from recoup.runtime.recompute.object_state import Places
from recoup.runtime.step_log import Counts
from recoup.runtime.tile.module.tiled import Proofs


class StepState:
    """State that the patched forwards of one model share, such as the number of calls of each path in this step.

    A step begins with the model's own forward, or with the first call after a backward: it may call parts of the model
    alone.

    Attributes:
        calls: how many there were of each path in this step.
        is_over: whether backward has begun; noted where the model's own forward did not run.
    """

    def __init__(
        self,
        *,
        counts_calls: bool,
        offloading: Offloading | None = None,
        proofs: Proofs | None = None,
        only_rederives: bool = False,
        loss: LossInPlace | None = None,
    ) -> None:
        self.counts_calls = counts_calls
        self.loss = loss
        self.rederived_calls = RederiveCalls() if only_rederives else None
        self.offloading = offloading
        self.calls: dict[str, int] = {}
        self.is_over = False
        self.proofs = Proofs() if proofs is None else proofs
        self.counts = Counts()
        self.unwritten: dict[str, set[int]] = {}
        self.places: dict[str, Places] = {}
        self.suspended = False

    def count(self, path: str) -> int:
        """Counts a call; returns its number in the step."""
        self._begin_step()
        call = self.calls.get(path, 0)
        self.calls[path] = call + 1
        return call

    def next_call(self, path: str) -> int:
        """Returns the number that the next call of a path has."""
        self._begin_step()
        return self.calls.get(path, 0)

    def will_end(self, output: Any) -> Any:
        """Returns a call's output; with its backward the step is over, if the model's own forward is no part of it."""
        if self.counts_calls and "" not in self.calls and not execution_context.is_recomputing():
            node = next((t.grad_fn for t in iterate_tensors(output) if t.grad_fn is not None), None)
            if node is not None:
                node.register_prehook(self._end_step)
        return output

    def _end_step(self, gradients: Any) -> None:
        self.is_over = True

    def _begin_step(self) -> None:
        if self.is_over and not execution_context.is_recomputing():
            self.is_over = False
            self.calls.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> StepState:
        offloading = copy.deepcopy(self.offloading, memo)
        copied = _new_state(self.counts_calls, offloading, self.rederived_calls is not None, self.loss)
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> Any:
        return _new_state, (self.counts_calls, self.offloading, self.rederived_calls is not None, self.loss)


def _new_state(
    counts_calls: bool, offloading: Offloading | None, only_rederives: bool, loss: LossInPlace | None
) -> StepState:
    return StepState(counts_calls=counts_calls, offloading=offloading, only_rederives=only_rederives, loss=loss)
