"""The engine of a scan: one loop over time, run by a schedule, forward and backward.

The first forward follows the schedule's actions up to its first "backward"; autograd's backward follows the rest.
Between the two the loop holds the states (`Moment`) and taped steps (`Tape`) that the schedule keeps. The engine is not
recursive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from recoup import _torch
from recoup.errors import InternalError, ReplayError, UsageError
from recoup.recurrent.leaves import flatten, rebuild
from recoup.recurrent.probing import ProbedSteps
from recoup.recurrent.schedules.actions import Action, Schedule
from recoup.recurrent.state_checkpoint import Moment
from recoup.recurrent.stepping import MAX_TAPED_STEPS
from recoup.recurrent.tape import Sums, Tape, backward, is_same, needs_gradient
from recoup.runtime import execution_context
from recoup.runtime.recompute.rng_state import RandomState, StreamState, version_of

_DRIFT = (
    "recoup.recurrent.scan: step {step}, run a second time, {what}, other than the first time. It depends on something "
    "that changed since (a flag, a counter outside of the step's reach); keep that fixed or hand it through the state."
)


class Loop(ProbedSteps):
    """A loop over time, run by a schedule.

    Attributes:
        last: the tensors of the last state, detached.
        last_flags: whether each tensor of the last state needs a gradient.
        output_flags: whether each output tensor needs a gradient.
        max_taped: the most steps that one tape may hold.

    Args:
        kwargs: those of `ProbedSteps`.
    """

    def __init__(self, *args: Any, derives: bool, **kwargs: Any) -> None:
        super().__init__(*args, derives=derives, **kwargs)
        self.max_taped = MAX_TAPED_STEPS if not derives else 1
        self.last: list[torch.Tensor] = []
        self.last_flags: list[bool] = []
        self.output_flags: list[bool] = []
        self._training = [(m, m.training) for m in self._reached.modules]
        self._frozen = [(p, p._version) for p in self._reached.parameters() if not p.requires_grad]
        self._held: dict[int, Moment] = {}
        self._tapes: list[Tape] = []
        self._actions: Iterator[Action] = iter(())
        self._schedule: Schedule | None = None
        self._last_template: Any = None
        self._pending: Action
        self._is_fresh = False

    def evaluations_of(self, schedule: Schedule) -> int:
        """Returns the step evaluations that following a schedule takes; call it before `forward`.

        More than `schedule.evaluations` if it tapes probed steps whose tapes were freed.
        """
        probed = self._num_probed
        for kind, start, stop in schedule.actions():
            if start >= probed or kind == "backward":
                break
            gone = self._first_gone(start, stop) if kind == "tape" else None
            if gone is not None:
                return schedule.evaluations + probed - gone
        return schedule.evaluations

    def forward(self, schedule: Schedule) -> None:
        """Follows the schedule up to its first "backward"."""
        self._schedule = schedule
        self._held[0] = self._first_moment
        self._actions = schedule.actions()
        for action in self._actions:
            if action.kind == "backward":
                self._pending = action
                break
            self._do_first(action)
        self._first_tapes = {}
        self._first = None, []
        self._covers = False
        self.outputs.finish()
        self._carried.check()
        self._first_random.settle()
        if not self._is_random and not self._first_random.is_settled():
            raise UsageError(
                "recoup.recurrent.scan: the step draws random numbers, but drew none in its first evaluations, so the "
                "streams' states were not kept. Draw in every step, or before the loop and hand them in as inputs."
            )
        if self._first_random.is_settled() and self._first_streams is None:
            self._is_random = False
            for moment in [*self._held.values(), *(t.after for t in self._tapes if t.after is not None)]:
                moment.random = None
        tensors, self._last_template = flatten((self._state, self._carried.read(whole=True)))
        self.last = [t.detach() for t in tensors]
        self.last_flags = [needs_gradient(t) for t in self._tapes[-1].states]
        num_outputs = len(self.outputs.results)
        self.output_flags = [needs_gradient(t) for t in self._tapes[-1].outputs[-num_outputs:]]
        self._state = None
        self._is_fresh = True

    def _do_first(self, action: Action) -> None:
        """Runs one action of the first forward; `probe` has evaluated the first steps already."""
        kind, start, stop = action
        probed = self._num_probed
        if kind == "save":
            after = self._first_tapes.get(start - 1)
            self._held[start] = self._moment() if after is None else after.after
        elif kind == "advance":
            if stop > probed:
                if start <= probed:
                    self._first_tapes.clear()
                self._advance(max(start, probed), stop)
        elif kind == "tape":
            gone = self._first_gone(start, stop)
            if gone is not None:
                self._return_to(gone)
            for step in range(start, min(stop, self._num_probed)):
                tape = self._first_tapes[step]
                if self.is_lean:
                    tape.lighten()
                    tape.after = tape.after if step + 1 == stop else None
                self._tapes.append(tape)
            self._tape_steps(max(start, self._num_probed), stop)
        else:
            raise InternalError(f"recoup.recurrent: {kind} before the end of the first forward")

    def _tape_steps(self, start: int, stop: int) -> None:
        assert self._schedule is not None
        while start < stop:
            end = min(start + self.max_taped, stop)
            keeps_after = self._schedule.reloads_tapes and end == stop < self.num_steps
            self._tapes.append(self._tape(start, end, keeps_after=keeps_after))
            start = self._tapes[-1].stop

    def shared_tape_bytes(self) -> int:
        """Returns a bound on the bytes that the backward of a tape of several steps needs beyond that of one step.

        A second copy of the gradients of captured tensors, and the gradients of several steps' inputs.
        """
        if self.max_taped == 1:
            return 0
        once = self.captured.seeded_bytes(of_all=True) - self.captured.seeded_bytes()
        pairs = zip(self._xs, self._x_flags, strict=True)
        return once + self.max_taped * sum(x.numel() * x.element_size() // len(x) for x, flag in pairs if flag)

    def finish(self, tensors: list[torch.Tensor] | None) -> Any:
        """Stores the last state, attributes included, and returns the state that `scan` returns."""
        state, values = rebuild(self._last_template, self.last if tensors is None else tensors)
        if tensors is not None:
            self._leave(values)
        self.last, self._last_template = [], None
        return state

    def backward(
        self, output_gradients: list[torch.Tensor | None], state_gradients: list[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Follows the schedule from its first "backward" to its end.

        Returns:
            The gradients of `start`, `inputs` and `captured.tensors`.
        """
        self._check_unchanged()
        if not self._is_fresh:  # a second backward over a retained graph: from the start again
            assert self._schedule is not None
            self._actions = self._schedule.actions()
            self._tapes = []
            self._held = {0: self._held[0]}
        is_fresh, self._is_fresh = self._is_fresh, False
        self._output_gradients = self.outputs.scaled(output_gradients)
        self._state_gradients = state_gradients
        self._input_gradients: list[torch.Tensor | None] = [
            torch.zeros_like(x) if flag else None for x, flag in zip(self._xs, self._x_flags, strict=True)
        ]
        self._sums = Sums(self.captured.tensors)
        random = RandomState(self.inputs) if self._is_random else None
        streams = StreamState(self._reached.streams) if random is not None and self._reached.streams else None
        present = self._carried.read(whole=True)
        self._is_replaying = True
        flipped = [(m, m.training) for m, training in self._training if m.training != training]
        try:
            for module, training in flipped:
                module.training = not training
            hooks_off = _torch.without_tensor_hooks([*self.captured.tensors, *self.start])
            with execution_context.recomputing(), hooks_off, self._sums:
                if is_fresh:
                    self._do(self._pending)
                else:
                    self._load(0)
                for action in self._actions:
                    self._do(action)
        finally:
            for module, training in flipped:
                module.training = training
            self._carried.write(present)
            self._state = None
            self._is_replaying = False
            if random is not None:
                random.put()
            if streams is not None:
                streams.restore()
        found = self._state_gradients, self._input_gradients, self._sums.totals
        self._state_gradients, self._input_gradients, self._output_gradients = [], [], []
        self._sums = Sums([])
        return found

    def _check_unchanged(self) -> None:
        for i, (x, version) in enumerate(zip(self._xs, self._x_versions, strict=True)):
            if version_of(x) != version:
                raise ReplayError(
                    f"recoup.recurrent.scan: input {i}, {list(x.shape)}, was changed in place between forward and "
                    "backward; steps that run again would read other values. Clone it before changing it.",
                    code="E202",
                )
        for parameter, version in self._frozen:
            if parameter._version != version:
                raise ReplayError(
                    f"recoup.recurrent.scan: a parameter {list(parameter.shape)} was changed between forward and "
                    "backward; steps that run again would read other values. Call backward before changing it.",
                    code="E201",
                )

    def _do(self, action: Action) -> None:
        kind, start, stop = action
        if kind == "backward":
            while self._tapes and self._tapes[-1].step >= start:
                self._backward(self._tapes.pop())
        elif kind == "tape":
            self._tape_steps(start, stop)
        elif kind == "load":
            self._load(start)
        elif kind == "advance":
            self._advance(start, stop)
        elif kind == "save":
            self._held[start] = self._moment()
        else:
            del self._held[start]

    def _load(self, step: int) -> None:
        moment = self._held.get(step)
        if moment is None:
            moment = next((t.after for t in reversed(self._tapes) if t.stop == step), None)
        if moment is None:
            raise InternalError(f"recoup.recurrent: the schedule asks for state {step}, which is not held")
        self._put(moment, step)

    def _backward(self, tape: Tape) -> None:
        outputs, first, last = self.outputs, tape.step, tape.stop - 1
        seeds: dict[int, torch.Tensor] = {}
        gradients: list[torch.Tensor | None] = []
        for step in range(first, tape.stop):
            gradients += outputs.gradients_of(step, self._output_gradients)
        # See [Note: sums in plain's order] in tape.py: a state that is also an output.
        if first > 0 and self._shared_of[first - 1]:
            earlier = outputs.gradients_of(first - 1, self._output_gradients)
            for j, i in self._shared[self._shared_of[first - 1]]:
                gradient = earlier[i]
                if gradient is not None:
                    seeds[j] = gradient if j not in seeds else seeds[j] + gradient
        if len(tape.states) != len(self._state_gradients) or len(gradients) != len(tape.outputs):
            raise ReplayError(_DRIFT.format(step=last, what=f"returned {len(tape.states)} state tensors"), code="E205")
        if last + 1 < self.num_steps and self._shared_of[last]:
            offset = len(gradients) - len(self._output_gradients)
            for j, i in self._shared[self._shared_of[last]]:
                if not is_same(tape.states[j], tape.outputs[offset + i]):
                    raise ReplayError(_DRIFT.format(step=last, what="returned other tensors"), code="E205")
                gradients[offset + i] = None
        self._state_gradients, found = backward(
            tape,
            state_gradients=self._state_gradients,
            output_gradients=gradients,
            seeds=seeds,
            captured=self.captured,
            sums=self._sums,
        )
        num_inputs = len(self._xs)
        for i, gradient in enumerate(found):
            total = self._input_gradients[i % num_inputs]
            if total is not None and gradient is not None:
                total[first + i // num_inputs].copy_(gradient)
