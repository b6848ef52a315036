"""The engine of a scan: one loop over time, run by a schedule, forward and backward.

The first forward follows the schedule's actions up to its first backward; autograd's backward follows the rest. Between
the two the loop holds what the schedule says: states (`Moment`) and taped steps (`Tape`). Nothing is recursive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from recoup import _compat
from recoup.engine import activity, rederive
from recoup.engine.lineage import Recorder
from recoup.engine.state import RandomState, StreamState, version_of
from recoup.errors import InternalError, ReplayError, UsageError
from recoup.recurrent.carried import Carried
from recoup.recurrent.leaves import checked, flatten, is_differentiable, rebuild
from recoup.recurrent.meter import StepMeter
from recoup.recurrent.moment import Moment
from recoup.recurrent.outputs import Outputs
from recoup.recurrent.reach import Reached
from recoup.recurrent.schedules.actions import Action, Schedule
from recoup.recurrent.tape import Captured, Sums, Tape, backward, begin, is_same, needs_gradient
from recoup.recurrent.unread import Watch, left_in

_PROBED = 2
_WALKED = 32
_MAX_TAPED = 64  # steps in one tape: one call of autograd's engine serves them all
_SLICED = 1024
_DRIFT = (
    "recoup.recurrent.scan: step {step}, run a second time, {what}, other than the first time. It depends on something "
    "that changed since (a flag, a counter outside of the step's reach); keep that fixed or hand it through the state."
)


class Loop:
    """A loop over time.

    Attributes:
        num_steps: T. evaluations: step evaluations so far. outputs: what steps returned. captured: parameters and
            other tensors of the graph. start: the tensors of the first state, as given. last: those of the last state,
            without a graph. last_flags, output_flags: whether they, and the outputs, need a gradient. max_taped: how
            many steps one tape may hold. is_lean: whether tapes hold no tensor but what their graph keeps.
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
        holds_unread: bool = False,
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
        self._held: dict[int, Moment] = {}
        self._tapes: list[Tape] = []
        self._actions: Iterator[Action] = iter(())
        self._schedule: Schedule | None = None
        self._reached = Reached(step)
        self._training = [(m, m.training) for m in self._reached.modules]
        self._carried = Carried(self._reached)
        self._holds_unread = holds_unread
        self._covers = False
        self._watch: Watch | None = None
        self.captured = Captured([*self._reached.parameters(), *self._reached.tensors, *extra])
        self._frozen = [(p, p._version) for p in self._reached.parameters() if not p.requires_grad]
        self._flags: list[list[bool]] = []
        self._shared: list[tuple[tuple[int, int], ...]] = [()]
        self._shared_of = bytearray()
        self.max_taped = _MAX_TAPED if not derives else 1
        self.is_lean = False
        self._is_random = True
        self._is_probing = self._is_replaying = self._is_fresh = False
        self._first: tuple[Any, list[Any]] = (state, [])
        self._first_tapes: dict[int, Tape] = {}
        self._spent: int | None = None
        self._copies: dict[int, torch.Tensor] = {}  # by identity of what they stand for in a measured step
        self._last_template: Any = None
        self._pending: Action
        self.start: list[torch.Tensor] = []
        self.last: list[torch.Tensor] = []
        self.last_flags: list[bool] = []
        self.output_flags: list[bool] = []

    # -- steps --------------------------------------------------------------------------------------------------

    def _x(self, step: int) -> Any:
        if self._one_input:
            return self._xs[0][step]
        return rebuild(self._inputs_template, [x[step] for x in self._xs])

    def _advance(self, start: int, stop: int) -> None:
        collected = max(start, min(stop, self.outputs.num_collected))
        with torch.no_grad():
            for first in range(start, stop, _SLICED):
                end = min(first + _SLICED, stop)
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
        """Returns where tensors of the state at hand are outputs too: (which of the state's, which output)."""
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
        """Evaluates steps `start .. stop-1`, or the first of them, with their graph, from the state at hand."""
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
            before = self._carried.learn()
            self._learned(before)
            leaves += _more((given, values), [self._copies.get(id(value), value) for value in before])
            self._copies = {}
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
        """Evaluates one step onto a tape and returns its output tensors."""
        inputs = [x[step] for x in self._xs]
        if self._any_x_flag:
            for x, flag in zip(inputs, self._x_flags, strict=True):
                if flag:
                    x.requires_grad_()
            tape.inputs += inputs
        x = inputs[0] if self._one_input else rebuild(self._inputs_template, inputs)
        is_due = self._is_probing or step % _WALKED == 0 or step == self.num_steps - 1
        # Listed before the step runs: it may change the state's own lists (norse's sequential module does).
        entered = flatten((self._state, self._carried.read()))[0] if is_due or not self._is_replaying else []
        first_node_number = _compat.next_node_number()
        if self._derives or self._watch is not None:
            with self._taping(), self._watch or contextlib.nullcontext():
                state, y = checked(self._step(self._state, x))
        else:
            state, y = checked(self._step(self._state, x))
        num_nodes = _compat.next_node_number() - first_node_number
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
        """Returns which leaves of a state need a gradient: what plain's do, as seen in the first steps."""
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
        hooks = torch.autograd.graph.saved_tensors_hooks(rederive.pack, rederive.unpack)
        with torch.enable_grad(), Recorder(), hooks:
            yield

    # -- states -------------------------------------------------------------------------------------------------

    def _moment(self) -> Moment:
        """Returns the state at hand, to be held."""
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

    def _load(self, step: int) -> None:
        moment = self._held.get(step)
        if moment is None:
            moment = next((t.after for t in reversed(self._tapes) if t.stop == step), None)
        if moment is None:
            raise InternalError(f"recoup.recurrent: the schedule asks for state {step}, which is not held")
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

    # -- forward ------------------------------------------------------------------------------------------------

    def probe(self, meter: StepMeter | None = None) -> None:
        """Evaluates the first steps taped, until it is known which attributes carry state and what needs a gradient.

        Args:
            meter: measures the last of these steps, if given.
        """
        self._first = self._state, []
        self._first_random = RandomState(self.inputs)
        self._first_streams = StreamState(self._reached.streams) if self._reached.streams else None
        self._is_probing = True
        settled = False
        while self._at < self.num_steps and not settled:
            step = self._at
            if step:
                self._carried.watch(copies=True)
            known = len(self._carried.places)
            watch = self._watch = Watch() if step and known and not self._holds_unread else None
            with meter if meter is not None else contextlib.nullcontext():
                if meter is not None and step:
                    meter.entered(self._copy_state())
                entered = self._carried.read()
                tape = self._tape(step, step + 1, keeps_after=True)
                flags = [t.requires_grad for t in tape.states]
                settled = step + 1 >= _PROBED and known == len(self._carried.places) and flags == self._flags[-1]
                self._flags.append(flags)
                self._first_tapes[step] = tape
                if settled and watch is not None and self._at < self.num_steps:
                    self._drop_unread(entered, tape, watch)
                entered = []
                if meter is not None and (settled or self._at == self.num_steps):
                    self._meter(tape, meter)
        self._is_probing, self._watch = False, None
        self.start, template = flatten(self._first)
        num_given = len(flatten(self._first[0])[0])
        first = Moment([t.detach() for t in self.start], template)
        first.random, first.streams = self._first_random, self._first_streams
        self._held[0] = first
        # What an attribute held before and no step read (the end of another sequence) has no edge to this loop.
        self.start[num_given:] = [t if self.captured.has(t) else t.detach() for t in self.start[num_given:]]
        self._first_random.settle()
        draws = any(isinstance(m, nn.modules.dropout._DropoutNd) for m in self._reached.modules)
        self._is_random = draws or self._first_streams is not None or not self._first_random.is_settled()
        self._carried.watch(copies=False)

    def _learned(self, before: list[Any]) -> None:
        """Adds places found just now to what is known of the steps before, where they held `before`."""
        state, values = self._first
        self._first = state, values + before
        if not self._flags:
            self._flags.append([t.requires_grad for t in flatten(self._first)[0]])
            return
        if not before:
            return
        self._flags[0] = [t.requires_grad for t in flatten(self._first)[0]]
        for step, tape in self._first_tapes.items():
            state, values = rebuild(tape.after.template, tape.after.tensors)
            tensors, template = flatten((state, values + before))
            more = _more((state, values), before)
            tape.leaves += more
            tape.states += more
            flags = self._flags[step + 1]
            flags += [t.requires_grad for t in tensors[len(flags) :]]
            after = Moment([t.detach() for t in tensors], template)
            after.random, after.streams = tape.after.random, tape.after.streams
            tape.after = after

    def _drop_unread(self, entered: list[Any], tape: Tape, watch: Watch) -> None:
        """Lets go what attributes hold that no step reads, of all steps so far."""
        passed_on = flatten((self._state, self._carried.read(), tape.outputs))[0]
        if not self._carried.find_unread(entered, passed_on, watch):
            return
        unread, position = self._carried.unread, {}
        for step, taped in self._first_tapes.items():
            kept, template = left_in(taped.after.template, len(taped.states), unread)
            taped.states = [taped.states[i] for i in kept]
            after = Moment([taped.after.tensors[i] for i in kept], template)
            after.random, after.streams = taped.after.random, taped.after.streams
            taped.after = after
            following = self._first_tapes.get(step + 1)
            if following is not None:
                following.leaves = [following.leaves[i] for i in kept]
            self._flags[step + 1] = [self._flags[step + 1][i] for i in kept]
            position = {old: new for new, old in enumerate(kept)}
        for at, pairs in enumerate(self._shared):
            self._shared[at] = tuple((position[j], i) for j, i in pairs if j in position)
        self._carried.cover()
        self._covers = True

    def rewind(self) -> None:
        """Goes back to before the first step, so that another loop can be run instead of this one."""
        self._put_back(self._first[1], self._first_random, self._first_streams)

    def _put_back(self, values: list[Any], random: RandomState | None, streams: StreamState | None) -> None:
        """Puts carried values back as they were, in the first forward: what is changed in place stays in its place."""
        for place, value, in_place in zip(self._carried.places, values, self._carried.in_place, strict=True):
            if in_place:
                place.get().data.copy_(value)  # graphs that saved it need not know
            else:
                place.put(value)
        if random is not None:
            random.put()
        if streams is not None:
            streams.restore()

    def _tape_spent(self, step: int) -> Tape:
        """Returns a tape of a step whose own was used up: it is evaluated again,."""
        moment = self._held[0] if step == 0 else self._first_tapes[step - 1].after
        self._state, values = rebuild(moment.template, moment.tensors)
        self._put_back(values, moment.random, moment.streams)
        self._at = step
        return self._tape(step, step + 1, keeps_after=True)

    def evaluations_of(self, schedule: Schedule) -> int:
        """Returns the step evaluations of a schedule: one more if it tapes the step whose tape was used up."""
        first = next(schedule.actions())
        return schedule.evaluations + int(self._spent is not None and first.kind == "tape" and first.stop > self._spent)

    def abandon(self) -> None:
        """Leaves nothing in attributes that cannot be used, after an error."""
        self._carried.uncover(self._first[1])

    def _copy_state(self) -> list[torch.Tensor]:
        """Puts copies in the place of the state at hand, but not of what is changed in place, and returns it."""
        values = self._carried.read()
        tensors, template = flatten((self._state, values))
        fixed = {id(v) for v, in_place in zip(values, self._carried.in_place, strict=True) if in_place}
        copies = [t if id(t) in fixed or t.layout is not torch.strided else t.detach().clone() for t in tensors]
        self._copies = {id(t): copy for t, copy in zip(tensors, copies, strict=True)}
        self._state, values = rebuild(template, copies)
        self._carried.write(values)
        return copies

    def _meter(self, tape: Tape, meter: StepMeter) -> None:
        """Measures a tape and its backward, which uses it up, and parts it from the state it came to."""
        tensors, template = tape.after.tensors, tape.after.template
        at_hand = {id(v) for v, in_place in zip(self._carried.read(), self._carried.in_place, strict=True) if in_place}
        meter.taped(tensors, self.captured.tensors)
        makers = [_maker(t) if t.requires_grad else None for t in (*tape.states, *tape.outputs)]
        num_states = len(tape.states)
        tape.lighten()
        meter.lightened()
        random, streams, tape.after = tape.after.random, tape.after.streams, None
        copies = self._copy_state()
        self._copies = {}
        tensors = [old if id(new) in at_hand else new for old, new in zip(tensors, copies, strict=True)]
        tape.after = Moment(tensors, template)
        tape.after.random, tape.after.streams = random, streams
        del tensors, copies
        with _compat.without_tensor_hooks(self.captured.tensors), Sums(self.captured.tensors) as sums:
            sums.begin_with_zeros()
            meter.parted()
            gradients = [make() if make is not None else None for make in makers]
            backward(
                tape,
                state_gradients=gradients[:num_states],
                output_gradients=gradients[num_states:],
                seeds={},
                captured=self.captured,
                sums=sums,
            )
        self._spent = tape.step

    def forward(self, schedule: Schedule) -> None:
        """Follows the schedule to its first backward."""
        self._schedule = schedule
        self._actions = schedule.actions()
        probed = self._at
        for action in self._actions:
            if action.kind == "backward":
                self._pending = action
                break
            self._do_first(action, probed)
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

    def _do_first(self, action: Action, probed: int) -> None:
        """Does an action of the first forward, whose first `probed` steps were evaluated by `probe` already."""
        kind, start, stop = action
        if kind == "save":
            after = self._first_tapes.get(start - 1)
            self._held[start] = self._moment() if after is None else after.after
        elif kind == "advance":
            if stop > probed:
                if start <= probed:
                    self._first_tapes.clear()
                self._advance(max(start, probed), stop)
        elif kind == "tape":
            if self._spent is not None and start <= self._spent < stop:
                self._first_tapes[self._spent] = self._tape_spent(self._spent)
            for step in range(start, min(stop, probed)):
                tape = self._first_tapes[step]
                if self.is_lean:
                    tape.lighten()
                    tape.after = tape.after if step + 1 == stop else None
                self._tapes.append(tape)
            self._tape_steps(max(start, probed), stop)
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
        """Returns what the backward of a tape of several steps takes more than that of a single one's, at most.

        A second copy of the gradients of captured tensors, and the gradients of several steps' inputs.
        """
        if self.max_taped == 1:
            return 0
        once = self.captured.seeded_bytes(of_all=True) - self.captured.seeded_bytes()
        pairs = zip(self._xs, self._x_flags, strict=True)
        return once + self.max_taped * sum(x.numel() * x.element_size() // len(x) for x, flag in pairs if flag)

    def finish(self, tensors: list[torch.Tensor] | None) -> Any:
        """Puts the last state in place, attributes included, and returns what the caller gets of it."""
        state, values = rebuild(self._last_template, self.last if tensors is None else tensors)
        if tensors is not None:
            self._leave(values)
        self.last, self._last_template = [], None
        return state

    # -- backward -----------------------------------------------------------------------------------------------

    def backward(
        self, output_gradients: list[torch.Tensor | None], state_gradients: list[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Follows the rest of the schedule.

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
            hooks_off = _compat.without_tensor_hooks([*self.captured.tensors, *self.start])
            with activity.recomputing(), hooks_off, self._sums:
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


def _maker(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Returns what makes zeros in the layout of a tensor, without holding that."""
    size, stride, dtype, device = like.size(), like.stride(), like.dtype, like.device
    return lambda: torch.empty_strided(size, stride, dtype=dtype, device=device).zero_()


def _more(nest: tuple[Any, list[Any]], values: list[Any]) -> list[torch.Tensor]:
    """Returns stand-ins for the tensors that `values` add to (state, carried values): no gradient goes through them."""
    state, carried = nest
    before = len(flatten(nest)[0])
    return [t.detach() for t in flatten((state, carried + values))[0][before:]]
