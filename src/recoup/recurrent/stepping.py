"""The steps of a loop: evaluated plainly or taped from the current state, which can be held and restored.

The user's step function is called in this file only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from recoup import _torch
from recoup.errors import ReplayError, UsageError
from recoup.recurrent.captured import Captured
from recoup.recurrent.closure_inspection import Reached
from recoup.recurrent.dead_state import Watch
from recoup.recurrent.leaves import checked, flatten, is_differentiable, rebuild
from recoup.recurrent.lifted_state import Carried
from recoup.recurrent.outputs import Outputs
from recoup.recurrent.state_checkpoint import Moment
from recoup.recurrent.tape import Tape, begin
from recoup.runtime.rebuild import saved_tensor
from recoup.runtime.rebuild.lineage import Recorder
from recoup.runtime.recompute.rng_state import RandomState, StreamState, version_of

# Steps of one tape, whose backward is one call of autograd's engine, and steps whose inputs are sliced by one call. The
# state's structure is looked at once a tape.
MAX_TAPED_STEPS = 64


class Steps:
    """The steps of a loop, and its current state.

    Attributes:
        num_steps: T.
        evaluations: step evaluations so far.
        outputs: the steps' outputs, stacked or reduced.
        inputs: the tensors of the loop's inputs, time first.
        captured: parameters and other tensors that steps use.
        is_lean: whether a tape holds only the tensors that its graph saved.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], tuple[Any, Any]],
        inputs: Any,
        state: Any,
        *,
        num_steps: int,
        outputs: Outputs,
        derives: bool,
        extra: list[torch.Tensor],
    ) -> None:
        self.num_steps = num_steps
        self.evaluations = 0
        self.outputs = outputs
        self.inputs, self._inputs_template = flatten(inputs)
        self._xs = [x.detach() for x in self.inputs]
        self._x_flags = [x.requires_grad for x in self.inputs]
        self._any_x_flag = any(self._x_flags)
        self._x_versions = [version_of(x) for x in self._xs]
        self._one_input = isinstance(inputs, torch.Tensor)
        self._step = step
        self._derives = derives
        self._state = state
        self._at = 0
        self._reached = Reached(step)
        self._carried = Carried(self._reached)
        self._covers = False
        self._watch: Watch | None = None
        self.captured = Captured([*self._reached.parameters(), *self._reached.tensors, *extra])
        self._flags: list[list[bool]] = []
        self._shared: list[tuple[tuple[int, int], ...]] = [()]
        self._shared_of = bytearray()
        self.is_lean = False
        self._is_random = True
        self._is_probing = self._is_replaying = False

    def _x(self, step: int) -> Any:
        if self._one_input:
            return self._xs[0][step]
        return rebuild(self._inputs_template, [x[step] for x in self._xs])

    def _advance(self, start: int, stop: int) -> None:
        collected = max(start, min(stop, self.outputs.num_collected))
        with torch.no_grad():
            for first in range(start, stop, MAX_TAPED_STEPS):
                end = min(first + MAX_TAPED_STEPS, stop)
                self._advance_slices(first, min(end, collected), collects=False)
                self._advance_slices(max(first, collected), end, collects=True)
        self._at = stop
        self.evaluations += stop - start

    def _advance_slices(self, start: int, stop: int, *, collects: bool) -> None:
        if start >= stop:
            return
        run, state = self._step, self._state
        slices: Iterable[Any]
        if self._one_input:
            slices = self._xs[0][start:stop].unbind()
        else:
            slices = (self._x(t) for t in range(start, stop))
        covers = self._covers
        for x in slices:
            if covers:
                self._carried.cover()
            result = run(state, x)
            if type(result) is not tuple or len(result) != 2:
                result = checked(result)
            state = result[0]
            if collects:
                self._state = state
                self._collect(result[1])
        self._state = state

    def _collect(self, y: Any) -> None:
        ys = self.outputs.collect(y)
        adds_first = bool(ys) and self.outputs.adds_first(self.outputs.num_collected - 1)
        shared = self._shared_with(ys) if adds_first else ()
        if not shared:
            self._shared_of.append(0)
            return
        if shared not in self._shared and len(self._shared) < 256:
            self._shared.append(shared)
        self._shared_of.append(self._shared.index(shared) if shared in self._shared else 0)

    def _shared_with(self, ys: list[torch.Tensor]) -> tuple[tuple[int, int], ...]:
        """Returns (index in the current state, index in the outputs) of tensors that are both."""
        state = self._state
        if not self._carried.places:
            if isinstance(state, torch.Tensor):
                return tuple((0, i) for i, tensor in enumerate(ys) if tensor is state)
            if type(state) is tuple and all(isinstance(t, torch.Tensor) for t in state):
                ids = [id(tensor) for tensor in state]
                if not any(id(tensor) in ids for tensor in ys):
                    return ()
        at = {id(tensor): i for i, tensor in enumerate(flatten((state, self._carried.read()))[0])}
        return tuple((at[id(tensor)], i) for i, tensor in enumerate(ys) if id(tensor) in at)

    def _tape(self, start: int, stop: int, *, keeps_after: bool) -> Tape:
        """Evaluates steps `start .. stop-1`, or the first of them, with their graph, from the current state."""
        given, values = self._state, self._carried.read(whole=start == 0)
        tensors, template = flatten((given, values))
        flags = self._flags_at(start, tensors)
        if self.is_lean:
            leaves = begin(tensors, flags)
        else:
            leaves = [
                t.detach().requires_grad_() if flag else t.detach() for t, flag in zip(tensors, flags, strict=True)
            ]
        self._state, entered = rebuild(template, leaves)
        self._enter(entered)
        tape = Tape(step=start, stop=stop, leaves=leaves, inputs=[], states=[], outputs=[])
        with torch.enable_grad():
            for step in range(start, stop):
                if self._covers and step > start:
                    self._carried.cover()
                ys = self._evaluate_taped(step, tape)
                # See [Note: sums in plain's order] in tape.py: a running sum adds its term after the next step's.
                if self.outputs.mode in ("sum", "mean") and step + 1 < stop and self._shared_with(ys):
                    tape.stop = step + 1
                    break
        if self._is_probing:
            self._learn(tape, (given, values))
        whole = self._is_probing or tape.stop == self.num_steps
        tape.states, template = flatten((self._state, self._carried.read(whole=whole)))
        if self._is_replaying:
            self._check_flags(tape)
        detached = [t.detach() for t in tape.states]
        self._state, left = rebuild(template, detached)
        self._leave(left)
        self._at = tape.stop
        if keeps_after and tape.stop == stop:
            tape.after = self._moment()
        if self.is_lean and not self._is_probing:
            tape.lighten()
        return tape

    def _evaluate_taped(self, step: int, tape: Tape) -> list[torch.Tensor]:
        """Evaluates one step, adds it to a tape and returns its output tensors."""
        inputs = [x[step] for x in self._xs]
        if self._any_x_flag:
            for x, flag in zip(inputs, self._x_flags, strict=True):
                if flag:
                    x.requires_grad_()
            tape.inputs += inputs
        x = inputs[0] if self._one_input else rebuild(self._inputs_template, inputs)
        is_due = self._is_probing or step % MAX_TAPED_STEPS == 0 or step == self.num_steps - 1
        # Listed before the step runs: it may change the state's own lists (norse's sequential module does).
        entered = flatten((self._state, self._carried.read()))[0] if is_due or not self._is_replaying else []
        first_node_number = _torch.next_node_number()
        modes = [mode for mode in (self._watch, self._carried.writes) if mode is not None]
        if self._derives or modes:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._taping())
                for mode in modes:
                    stack.enter_context(mode)
                state, y = checked(self._step(self._state, x))
        else:
            state, y = checked(self._step(self._state, x))
        num_nodes = _torch.next_node_number() - first_node_number
        self.evaluations += 1
        self._state = state
        if is_due or not self.captured.is_checked(num_nodes):
            returned = flatten((state, self._carried.read(), y))[0]
            self._check_graph(step, returned, [*entered, *inputs, *tape.leaves], num_nodes, first_node_number)
        if step == self.outputs.num_collected:
            self._collect(y)
        ys = [y] if type(y) is torch.Tensor else flatten(y)[0]
        if self.outputs.takes(step):
            tape.outputs += ys
        return ys

    def _check_graph(
        self,
        step: int,
        returned: list[torch.Tensor],
        entered: list[torch.Tensor],
        num_nodes: int,
        first_node_number: int,
    ) -> None:
        unknown = self.captured.walk(
            returned,
            entered,
            num_nodes=num_nodes,
            first_node_number=None if self._is_replaying else first_node_number,
        )
        if unknown:
            raise (ReplayError if self._is_replaying else UsageError)(
                f"recoup.recurrent.scan: step {step} uses a tensor ({unknown}) that takes part in autograd but is "
                "not handed to the step and could not be found in what the step closes over. Hand it over: "
                "`scan(..., captured=[tensor])`, or through the state."
            )

    def _check_flags(self, tape: Tape) -> None:
        flags = self._flags_at(tape.stop, tape.states)
        for tensor, flag in zip(tape.states, flags, strict=True):
            if tensor.requires_grad and not flag and tape.stop < self.num_steps and is_differentiable(tensor):
                raise ReplayError(
                    f"recoup.recurrent.scan: a state tensor {list(tensor.shape)} begins to need a gradient only at "
                    f"step {tape.stop - 1}. Let it need one from the start: `state.requires_grad_()`.",
                    code="E203",
                )

    def _flags_at(self, step: int, tensors: list[torch.Tensor]) -> list[bool]:
        """Returns which leaves of a state need a gradient: those that did in the first steps."""
        if step == 0 and not self._flags:
            return [t.requires_grad for t in tensors]
        flags = self._flags[min(step, len(self._flags) - 1)]
        if len(flags) != len(tensors):
            return [is_differentiable(t) for t in tensors]
        return flags

    def _enter(self, values: list[Any]) -> None:
        for place, value, in_place in zip(self._carried.places, values, self._carried.in_place, strict=True):
            if not in_place:
                place.put(value)
            elif isinstance(value, torch.Tensor) and value.requires_grad:
                place.put(value.clone())

    def _leave(self, values: list[Any]) -> None:
        for place, value, in_place in zip(self._carried.places, values, self._carried.in_place, strict=True):
            if not in_place or (isinstance(value, torch.Tensor) and place.get().requires_grad):
                place.put(value)

    @contextlib.contextmanager
    def _taping(self) -> Iterator[None]:
        if not self._derives:
            yield
            return
        hooks = _torch.saved_tensors_hooks(saved_tensor.pack, saved_tensor.unpack)
        with torch.enable_grad(), Recorder(), hooks:
            yield

    def _moment(self) -> Moment:
        """Returns the current state, detached, to be held."""
        values = self._carried.read()
        for i, in_place in enumerate(self._carried.in_place):
            if in_place and isinstance(values[i], torch.Tensor):
                values[i] = values[i].detach().clone()
        tensors, template = flatten((self._state, values))
        moment = Moment([t.detach() for t in tensors], template)
        if self._is_random:
            moment.random = RandomState(tensors)
            moment.streams = StreamState(self._reached.streams) if self._reached.streams else None
        return moment

    def _put(self, moment: Moment, step: int) -> None:
        """Makes a held state the current one."""
        self._state, values = moment.nest(step)
        for i, in_place in enumerate(self._carried.in_place):
            if in_place and isinstance(values[i], torch.Tensor):
                values[i] = values[i].clone()
        self._carried.write(values)
        self._at = step
        if moment.random is not None:
            moment.random.put()
        if moment.streams is not None:
            moment.streams.restore()

    def _learn(self, tape: Tape, given: tuple[Any, list[Any]]) -> None:
        """Hook that is called after each of the first steps; `given` is the (state, carried values) before it."""
