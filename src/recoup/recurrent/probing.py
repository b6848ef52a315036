"""The first steps of a loop: evaluated taped, to find the state that attributes carry and to measure a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.recurrent.dead_state import Watch, left_in
from recoup.recurrent.leaves import flatten, rebuild
from recoup.recurrent.meter import StepMeter
from recoup.recurrent.state_checkpoint import Moment
from recoup.recurrent.stepping import Steps
from recoup.recurrent.tape import Sums, Tape, backward
from recoup.runtime.recompute.rng_state import RandomState, StreamState


class ProbedSteps(Steps):
    """Steps of which the first few are probed.

    Attributes:
        start: the tensors of the initial state, as given.

    Args:
        holds_unread: whether dead state (`dead_state.py`) is held like any other.
        kwargs: those of `Steps`.
    """

    def __init__(self, *args: Any, holds_unread: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.start: list[torch.Tensor] = []
        self._holds_unread = holds_unread
        self._first: tuple[Any, list[Any]] = (self._state, [])
        self._first_moment: Moment
        self._first_tapes: dict[int, Tape] = {}
        self._num_probed = 0
        self._gone: set[int] = set()  # probed steps whose tapes were freed in order to measure one of them
        self._copies: dict[int, torch.Tensor] = {}  # by id of the original that they replace in a measured step

    def probe(self, meter: StepMeter | None = None, *, keeps: Callable[[int], bool] = lambda tape_bytes: False) -> None:
        """Evaluates the first steps taped until the attributes that carry state, and the gradient flags, are known.

        Args:
            meter: measures the last probed step; None: nothing is measured.
            keeps: from the bytes of one tape, whether the other probed steps' tapes are kept.
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
                # States that begin as None exist only from the second step on.
                settled = step > 0 and known == len(self._carried.places) and flags == self._flags[-1]
                self._flags.append(flags)
                self._first_tapes[step] = tape
                if settled and watch is not None and self._at < self.num_steps:
                    self._drop_unread(entered, tape, watch)
                entered = []
                if meter is not None and (settled or self._at == self.num_steps):
                    self._meter(tape, meter)
                    self._let_go(step)
                elif meter is not None and not keeps(meter.level_bytes):
                    self._let_go(step)
        self._num_probed = self._at
        self._is_probing, self._watch = False, None
        self.start, template = flatten(self._first)
        num_given = len(flatten(self._first[0])[0])
        first = Moment([t.detach() for t in self.start], template)
        first.random, first.streams = self._first_random, self._first_streams
        self._first_moment = first
        # An attribute's old value that no step read (the end of another sequence) has no edge to this loop.
        self.start[num_given:] = [t if self.captured.has(t) else t.detach() for t in self.start[num_given:]]
        self._first_random.settle()
        draws = any(isinstance(m, nn.modules.dropout._DropoutNd) for m in self._reached.modules)
        self._is_random = draws or self._first_streams is not None or not self._first_random.is_settled()
        self._carried.watch(copies=False)

    def _learn(self, tape: Tape, given: tuple[Any, list[Any]]) -> None:
        before = self._carried.learn()
        self._learned(before)
        tape.leaves += _more(given, [self._copies.get(id(value), value) for value in before])
        self._copies = {}

    def _learned(self, before: list[Any]) -> None:
        """Adds the places just found to the states of earlier steps, in which they held `before`."""
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
        """Frees the dead state of all steps so far."""
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
        """Restores the state before the first step, so that another loop can be run instead of this one."""
        self._put_back(self._first[1], self._first_random, self._first_streams)

    def _put_back(self, values: list[Any], random: RandomState | None, streams: StreamState | None) -> None:
        """Restores carried values during the first forward; tensors changed in place are restored in place."""
        for place, value, in_place in zip(self._carried.places, values, self._carried.in_place, strict=True):
            if in_place:
                place.get().data.copy_(value)  # `.data`: the version counter must not invalidate graphs that saved it
            else:
                place.put(value)
        if random is not None:
            random.put()
        if streams is not None:
            streams.restore()

    def _let_go(self, step: int) -> None:
        self._first_tapes[step].let_go()
        self._gone.add(step)

    def _first_gone(self, start: int, stop: int) -> int | None:
        """Returns the first of the steps `start .. stop-1` whose tape was freed; None if there is none."""
        return next((step for step in range(start, min(stop, self._num_probed)) if step in self._gone), None)

    def _return_to(self, step: int) -> None:
        """Makes the state before a probed step current again; that step and later ones count as not evaluated."""
        moment = self._first_moment if step == 0 else self._first_tapes[step - 1].after
        self._state, values = rebuild(moment.template, moment.tensors)
        self._put_back(values, moment.random, moment.streams)
        self._at = self._num_probed = step
        self._first_tapes = {at: tape for at, tape in self._first_tapes.items() if at < step}

    def abandon(self) -> None:
        """Removes every `Unread` from attributes after an error."""
        self._carried.uncover(self._first[1])

    def _copy_state(self) -> list[torch.Tensor]:
        """Replaces the tensors of the current state by copies, except those changed in place; returns the state."""
        values = self._carried.read()
        tensors, template = flatten((self._state, values))
        fixed = {id(v) for v, in_place in zip(values, self._carried.in_place, strict=True) if in_place}
        copies = [t if id(t) in fixed or t.layout is not torch.strided else t.detach().clone() for t in tensors]
        self._copies = {id(t): copy for t, copy in zip(tensors, copies, strict=True)}
        self._state, values = rebuild(template, copies)
        self._carried.write(values)
        return copies

    def _meter(self, tape: Tape, meter: StepMeter) -> None:
        """Measures a tape and its backward, which consumes it, and replaces the state after it by copies."""
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
        with _torch.without_tensor_hooks(self.captured.tensors), Sums(self.captured.tensors) as sums:
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


def _maker(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Returns a function that makes zeros with a tensor's shape, strides and dtype, without holding the tensor."""
    size, stride, dtype, device = like.size(), like.stride(), like.dtype, like.device
    return lambda: torch.empty_strided(size, stride, dtype=dtype, device=device).zero_()


def _more(nest: tuple[Any, list[Any]], values: list[Any]) -> list[torch.Tensor]:
    """Returns detached stand-ins for the tensors that `values` add to (state, carried values)."""
    state, carried = nest
    before = len(flatten(nest)[0])
    return [t.detach() for t in flatten((state, carried + values))[0][before:]]
