"""The code by which a step follows one call of its program, see [Note: step programs].

A step makes hundreds of calls, each of which is held against the program's. What there is to compare differs from call
to call: how many arguments, which of them are tensors, whether something is held for a rebuild. So the comparison is
written out as a function, without loops, look-ups or checks that this call does not need. Calls that differ only in
slots and scalars share one text, which is compiled once; what they differ in are the defaults of its last arguments.
"""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from recoup import _torch
from recoup.runtime.rebuild.call_forms import SCALARS, SEQUENCES
from recoup.runtime.rebuild.dynamic_shapes import AnyOf

if TYPE_CHECKING:
    from recoup.runtime.rebuild.step_program import ProgramCall

OTHER = object()
"""What it returns instead of running a call that is another than the program's."""

Follow = Callable[[Any, Any, tuple[Any, ...], dict[str, Any] | None], Any]
"""Runs the call if it is the program's; given the `CallWatch`, the `StepRun` and what the call is handed."""


class Place:
    """Stands for a tensor among a call's arguments: its number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Nest:
    """Stands for a list or tuple with tensors, lists or tuples in it."""

    __slots__ = ("kind", "parts")

    def __init__(self, kind: type, parts: list[Any]) -> None:
        self.kind = kind
        self.parts = parts


def items_of(handed: Sequence[Any], tensors: Sequence[Any]) -> list[Any] | None:
    """Returns what a call is handed, places and nests where there are tensors; None if it is not all plain.

    Args:
        handed: the arguments. tensors: those among them, each once.
    """
    places = {id(tensor): i for i, tensor in enumerate(tensors)}
    try:
        return [_item_of(item, places) for item in handed]
    except KeyError:
        return None


def _item_of(item: Any, places: dict[int, int]) -> Any:
    kind = type(item)
    if isinstance(item, torch.Tensor):
        return Place(places[id(item)])
    if kind in SCALARS or (kind is slice and SCALARS.issuperset(map(type, (item.start, item.stop, item.step)))):
        return item
    if kind not in SEQUENCES:
        raise KeyError(kind)
    parts = [_item_of(part, places) for part in item]
    if not all([type(part) in SCALARS or type(part) is slice for part in parts]):
        return Nest(kind, parts)
    return parts if kind is list else item


def follow_code(call: ProgramCall) -> Follow | None:
    """Returns the code of a call of a program; None where that takes a closer look."""
    if call.is_loose:
        return functools.partial(_follow_loosely, call)
    return None if call.items is None or call.form is None else _Writer(call).written()


def _follow_loosely(
    call: ProgramCall, watch: Any, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    """Runs a call of which only the function is compared."""
    if watch.hooks.is_on and not watch.hook(run, call):
        return OTHER
    for slot in call.leaves:
        run.slots[slot] = None
    run.call = call.then
    return call.func(*args, **kwargs) if kwargs else call.func(*args)


def is_like(item: Any, want: Any) -> bool:
    """Whether two plain arguments are equal to the last bit."""
    kind = type(item)
    if kind is not type(want):
        return False
    if kind in SEQUENCES:
        if [*map(type, item)] != [*map(type, want)] or item != want:  # so that there is no tensor in it
            return False
        return 0.0 not in item or repr(item) == repr(want)  # zero has two signs
    if kind is slice:
        return bool(item == want)
    return kind in SCALARS and bool(item == want) and (kind is not float or item != 0 or repr(item) == repr(want))


class _Writer:
    """Writes the code of one call."""

    def __init__(self, call: ProgramCall) -> None:
        self._call = call
        self._names: dict[str, Any] = {"call": call, "func": call.func, "then": call.then}
        self._enters = dict(call.enters)
        self._shapes: list[str] = []  # each is true of another call
        self._has_new = False
        self._new: list[str] = []
        self._checks: list[str] = []
        self._tensors: dict[int, str] = {}  # by number: in words

    def written(self) -> Follow:
        """Returns the code."""
        call, form = self._call, self._call.form
        assert call.items is not None and form is not None
        words = [f"a{i}" for i in range(len(call.items))]
        num = len(words) - len(call.names)
        for word, item in zip(words, call.items, strict=True):
            self._compare(word, item)
        tensors = f"({''.join(f'{self._tensors[n]}, ' for n in range(len(call.reads)))})"
        dtype, _, autocast, _ = form.state
        if self._has_new:
            self._checks.append(f"not run.meets(call, {tensors})")
        self._checks += [
            f"has_grad() is not {call.has_grad}",
            "num_dispatch_modes()",
            f"default_dtype() is not {self._named('dtype', dtype)}",
            "is_autocast()" if autocast is None else f"autocast_state() != {self._named('autocast', autocast)}",
            "watch.recorder.paused",
        ]
        if form.attention_flags is not None:
            self._checks.append(f"attention_flags() != {self._named('flags', form.attention_flags)}")
        for position, number in call.reads_constants:
            name, word = self._named("number", number), self._tensors[position]
            self._checks.append(f"{name} not in run.constants and not run.reads_constant({name}, {word})")
        if call.looks_at_choice:
            choice = self._named("choice", form.attention_choice)
            self._checks.append(f"attention_choice(args, kwargs) != {choice}")
        for layout in call.layouts:
            self._checks.append(f"not run.lies({self._named('layout', layout)}, {self._tensors[layout.position]})")
        for position, number in call.keeps:
            self._checks.append(f"not run.keeps({self._named('number', number)}, {self._tensors[position]})")
        lines = [f"if {'not kwargs' if call.names else 'kwargs'} or len(args) != {num}: return OTHER"]
        if call.names:
            lines.append(f"if tuple(kwargs) != {self._named('names', call.names)}: return OTHER")
        if words:
            lines.append(f"{', '.join(words)}, = {'(*args, *kwargs.values())' if call.names else 'args'}")
        if self._shapes:
            lines.append(f"if {' or '.join(self._shapes)}: return OTHER")
        lines += ["slots = run.slots", *self._new, f"if {' or '.join(self._checks)}: return OTHER", *self._run()]
        text = "\n    ".join([f"def follow(watch, run, args, kwargs, {', '.join(self._names)}):", *lines])
        return types.FunctionType(_compiled(text), _ASKED, "follow", tuple(self._names.values()))

    def _run(self) -> list[str]:
        """Returns the lines that run the call once it is known to be the program's."""
        call = self._call
        first, end, last = (self._named("at", at) for at in (call.first_save, call.end_save, call.last_save))
        lines = ["hooks = watch.hooks"]
        if call.is_hooked:
            lines += [
                f"if run.num_saved != {first} if hooks.is_on else not hooks.put_on(): return OTHER",
                f"run.num_saved = {first}",
                f"run.end = {end}",
            ]
        else:
            lines += [
                "if hooks.is_on:",
                f"    if run.num_saved != {first}: return OTHER",
                f"    run.end = {end}",
                "    hooks.put_off()",
            ]
        lines += [f"slots[{self._named('s', slot)}] = None" for slot in call.leaves]
        for number in call.numbers:
            word = "".join([f"a{number.place[0]}", *[f"[{i}]" for i in number.place[1:]]])
            lines.append(f"run.noted[{self._named('number', number.index)}] = {word}")
        run = f"func(*args{', **kwargs' if call.names else ''})"
        if call.draws:
            run = "watch.sees(run, call, args, kwargs)"
        lines += ["run.call = then", f"out = {run}", "if run.is_on:"]
        for position, slot in call.gives:
            result = "out" if position < 0 else f"out[{position}]"
            lines.append(f"    slots[{self._named('s', slot)}] = {result}")
        if call.keeps_results:
            lines.append("    run.keep_results(call, out)")
        if call.is_hooked:
            lines.append(f"    run.end = {last}")
            if not call.stays_hooked:
                lines.append(f"    if run.num_saved == {end} and hooks.is_on: hooks.put_off()")
        else:
            lines.append(f"    if hooks.is_on: run.end = {last}")  # could not be put off
        return [*lines, "return out"]

    def _compare(self, word: str, item: Any) -> None:
        """Adds what there is to compare of an argument."""
        if type(item) is Place:
            self._compare_tensor(word, item.number)
        elif type(item) is Nest:
            kind = self._named("kind", item.kind)
            self._shapes.append(f"type({word}) is not {kind} or len({word}) != {len(item.parts)}")
            for i, part in enumerate(item.parts):
                self._compare(f"{word}[{i}]", part)
        elif isinstance(item, AnyOf):
            self._checks.append(f"type({word}) is not {self._named('kind', item.kind)}")
        else:
            want = self._named("want", item)
            if type(item) is slice or (type(item) is tuple and _is_index(item)):
                self._checks.append(f"type({word}) is not {type(item).__name__} or {word} != {want}")
            else:
                self._checks.append(f"({word} is not {want} and not is_like({word}, {want}))")

    def _compare_tensor(self, word: str, number: int) -> None:
        slot, before = self._call.reads[number], self._tensors.get(number)
        if before is not None:
            self._checks.append(f"{word} is not {before}")
            return
        self._tensors[number] = word
        if slot >= 0:
            self._checks.append(f"{word} is not slots[{self._named('s', slot)}]")
            return
        self._has_new = True
        if number in self._enters:
            self._new.append(f"slots[{self._named('s', self._enters[number])}] = {word}")

    def _named(self, prefix: str, value: Any) -> str:
        name = f"{prefix}{len(self._names)}"
        self._names[name] = value
        return name


def _is_index(items: tuple[Any, ...]) -> bool:
    """Whether there are only slices, None and `...` in it, which are equal to nothing of another type."""
    return all([type(item) in (slice, type(None), type(Ellipsis)) for item in items])


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> types.CodeType:
    """Returns the code of a text's function; what is bound to its names are the defaults of its last arguments."""
    module = compile(text, "<a call of a program>", "exec")
    return next(constant for constant in module.co_consts if isinstance(constant, types.CodeType))


_ASKED: dict[str, Any] = {
    "__builtins__": builtins,
    "OTHER": OTHER,
    "is_like": is_like,
    "has_grad": torch.is_grad_enabled,
    "num_dispatch_modes": _torch.num_dispatch_modes,
    "default_dtype": torch.get_default_dtype,
    "is_autocast": _torch.is_autocast,
    "autocast_state": _torch.autocast_state,
    "attention_choice": _torch.attention_choice,
    "attention_flags": _torch.attention_flags,
}
