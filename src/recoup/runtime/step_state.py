"""What the patched forwards of one model share while a plan by module is in place: calls of this step, counters."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any

from recoup import _torch
from recoup._pytree import iterate_tensors
from recoup.ir.decision import LossInPlace
from recoup.runtime.offload.offloaded_saved_tensor import Offloading
from recoup.runtime.rebuild.rederive_steps import RederiveCalls
from recoup.runtime.recompute.object_state import Places
from recoup.runtime.step_log import Counts
from recoup.runtime.tile.module.tiled import Proofs


class _Alive:
    """Object that a node of a graph holds, so that its end shows the graph's."""


class StepState:
    """State that the patched forwards of one model share, such as the number of calls of each path in this step.

    A step begins with the model's own forward. It may call parts of the model alone, too: then with the first call
    after a backward, or after the graphs of all calls from outside are gone.

    Attributes:
        calls: how many there were of each path in this step.
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
        self._is_over = False  # backward has begun
        self._num_inside = 0  # own forwards of the model that run now
        self._graphs: list[weakref.ref[_Alive]] = []  # of calls from outside
        self.proofs = Proofs() if proofs is None else proofs
        self.counts = Counts()
        self.unwritten: dict[str, set[int]] = {}
        self.places: dict[str, Places] = {}
        self.suspended = False

    def count(self, path: str) -> int:
        """Counts a call; returns its number in the step."""
        call = self.next_call(path)
        self.calls[path] = call + 1
        return call

    def next_call(self, path: str) -> int:
        """Returns the number that the next call of a path has."""
        if self._is_outside() and self._has_ended():
            self.begin_step()
        return self.calls.get(path, 0)

    def begin_step(self) -> None:
        """Begins to count."""
        self._is_over = False
        self.calls.clear()
        self._graphs.clear()

    def _is_outside(self) -> bool:
        """Whether a call that runs now is the step's own: neither the model's, nor run again in backward."""
        return not self._num_inside and _torch.current_backward_id() == -1

    def _has_ended(self) -> bool:
        """Whether a call from outside is no part of the step before: the model itself, without a graph, is none."""
        began = bool(self._graphs) or "" in self.calls
        return self._is_over or (began and not any(alive() is not None for alive in self._graphs))

    @contextlib.contextmanager
    def inside_model(self) -> Iterator[None]:
        """Inside are the calls of the model's own forward."""
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1

    def will_end(self, output: Any) -> Any:
        """Returns a call's output; if it is from outside, the step ends with its backward, or with its graph."""
        if self.counts_calls and self._is_outside():
            node = next((t.grad_fn for t in iterate_tensors(output) if t.grad_fn is not None), None)
            if node is not None:
                alive = _Alive()
                node.metadata["recoup step"] = alive  # type: ignore[index]  # a property, which the hints take for a method
                self._graphs.append(weakref.ref(alive))
                node.register_prehook(self._end)
        return output

    def _end(self, gradients: Any) -> None:
        self._is_over = True

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
