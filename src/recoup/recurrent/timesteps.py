"""Time loops that are not rewritten: the module that a loop calls once a step is recomputed in chunks of steps.

The calls of that module are grouped, `chunk` at a time. A group keeps its calls' arguments and the attributes as of its
beginning; tensors that the calls save for backward are not kept. When backward unpacks the first of them, the group's
calls run again in order, with graph, and all saved tensors of the group are filled in. The loop's own graph is the
plain one, so that sums, hooks and further losses are those of the plain loop. It takes more memory than `scan` (the
graph's nodes and the calls' arguments stay) and always evaluates a step twice; use `scan` where the loop can be
rewritten.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import weakref
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.errors import ReplayError, UsageError
from recoup.recurrent.closure_inspection import Reached
from recoup.recurrent.leaves import flatten, is_differentiable, rebuild
from recoup.recurrent.lifted_state import Carried
from recoup.runtime import execution_context
from recoup.runtime.recompute.rng_state import AutocastState, RandomState, StreamState

_REWRITE = (
    "Write the loop as a scan instead, two lines:\n"
    "    step = lambda state, x: (state, self.block(x))  # all that one step does; modules may keep their own state\n"
    "    _, outputs = recoup.recurrent.scan(step, inputs, None, chunk={chunk})"
)


class Timesteps:
    """Handle of `checkpoint_timesteps`: `remove()` restores the module."""

    def __init__(self, path: str, module: nn.Module, chunk: int) -> None:
        self.path = path
        self._module = weakref.ref(module)
        self._before = module.__dict__.get("forward")
        module.forward = _Steps(module, chunk, path)

    def remove(self) -> None:
        """Restores the module's own forward."""
        module = self._module()
        if module is None or not isinstance(module.__dict__.get("forward"), _Steps):
            return
        if self._before is None:
            del module.__dict__["forward"]
        else:
            module.forward = self._before


def checkpoint_timesteps(module: nn.Module, *, chunk: int = 1, path: str | None = None) -> Timesteps:
    """Recomputes the steps of the time loop in `module.forward`, `chunk` at a time, without rewriting the loop.

    Args:
        module: its forward has a loop over time that calls one submodule a step.
        chunk: steps that are recomputed together.
        path: path of that submodule below `module`; if left out, it is read off the source of `forward`.

    Raises:
        UsageError: if `chunk` is no positive integer, or no loop calls exactly one submodule; the message shows how to
            write it as a scan. Nothing was changed.

    Example:
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.cell = torch.nn.GRUCell(4, 8)
        ...     def forward(self, inputs):
        ...         state = torch.zeros(inputs.shape[1], 8)
        ...         for x in inputs:
        ...             state = self.cell(x, state)
        ...         return state
        >>> model = Net()
        >>> handle = recoup.recurrent.checkpoint_timesteps(model, chunk=4)
        >>> model(torch.randn(16, 2, 4)).sum().backward()
        >>> handle.remove()
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise UsageError(f"recoup.recurrent: snn_chunk_size must be a whole number from 1 up; got {chunk!r}.")
    if path is None:
        path = _find_step(module, chunk)
    try:
        step = module.get_submodule(path)
    except AttributeError as error:
        raise UsageError(f"recoup.recurrent: {type(module).__name__} has no submodule {path!r}.") from error
    if isinstance(step.__dict__.get("forward"), _Steps):
        raise UsageError(f"recoup.recurrent: the steps of {path!r} are recomputed already; remove that first.")
    return Timesteps(path, step, chunk)


def _find_step(module: nn.Module, chunk: int) -> str:
    name = type(module).__name__
    rewrite = _REWRITE.format(chunk=chunk)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(module).forward)))
    except (OSError, TypeError, SyntaxError) as error:
        raise UsageError(
            f"recoup.recurrent: the source of `{name}.forward` cannot be read, so its time loop cannot be found. Give "
            f"the submodule it calls each step as `path`. {rewrite}"
        ) from error
    found: dict[str, None] = {}
    for loop in ast.walk(tree):
        if not isinstance(loop, (ast.For, ast.While, ast.ListComp, ast.GeneratorExp)):
            continue
        for node in ast.walk(loop):
            if isinstance(node, ast.Call):
                path = _path_of(node.func)
                if path is not None and _is_module(module, path):
                    found[path] = None
    if len(found) != 1:
        what = "calls none of its submodules in a loop" if not found else f"calls {', '.join(found)} in its loop"
        raise UsageError(f"recoup.recurrent: `{name}.forward` {what}; it must be one. {rewrite}")
    return next(iter(found))


def _path_of(node: ast.expr) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed(parts)) if isinstance(node, ast.Name) and node.id == "self" and parts else None


def _is_module(module: nn.Module, path: str) -> bool:
    try:
        return isinstance(module.get_submodule(path), nn.Module) and not isinstance(
            module.get_submodule(path), nn.ModuleList
        )
    except AttributeError:
        return False


class _Steps:
    """Replaces the `forward` of the module that is called once a step."""

    def __init__(self, module: nn.Module, chunk: int, path: str) -> None:
        self._module = weakref.ref(module)
        self._forward = module.__dict__.get("forward", None)
        self._chunk = chunk
        self._path = path
        self._group: weakref.ref[_Group] | None = None
        self.__wrapped__ = type(module).forward

    def __deepcopy__(self, memo: dict[int, Any]) -> _Steps:
        module = self._module()
        copied = memo.get(id(module))
        if copied is None:
            raise UsageError(f"recoup.recurrent: copy the module of {self._path!r}, not its forward.")
        return _Steps(copied, self._chunk, self._path)

    def run(self, args: Any, kwargs: Any) -> Any:
        """Runs the module's own forward."""
        module = self._module()
        assert module is not None
        if self._forward is not None:
            return self._forward(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or _torch.inside_transform() or execution_context.is_recomputing():
            return self.run(args, kwargs)
        group = self._group() if self._group is not None else None
        if group is None or not group.continues():
            module = self._module()
            assert module is not None
            group = _Group(self, module, self._path, self._chunk)
            self._group = weakref.ref(group)
        return group.call(args, kwargs)


class _Slot:
    """A tensor saved in a group's call: filled in when the group has run again."""

    __slots__ = ("__weakref__", "dtype", "filled", "group", "shape")

    def __init__(self, group: _Group, tensor: torch.Tensor) -> None:
        self.group = group
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.filled: torch.Tensor | None = None

    def unpack(self) -> torch.Tensor:
        if self.filled is None:
            self.group.replay()
        filled, self.filled = self.filled, None
        if filled is None:
            raise ReplayError(self.group.drift("did not save a tensor again"), code="E205")
        return filled


class _Call:
    """One call of a group: random streams and arguments; results of earlier calls of the group stand by number."""

    __slots__ = ("links", "random", "template", "tensors")

    def __init__(self, links: dict[int, tuple[int, int]], tensors: list[Any], template: Any, random: RandomState):
        self.links = links
        self.tensors = tensors
        self.template = template
        self.random = random


class _Group:
    """Up to `chunk` calls that are recomputed together."""

    def __init__(self, steps: _Steps, module: nn.Module, path: str, chunk: int) -> None:
        self._steps = steps
        self._path = path
        self._left = chunk
        self._calls: list[_Call] = []
        self._outputs: dict[int, tuple[weakref.ref[torch.Tensor], tuple[int, int]]] = {}
        self._slots: list[weakref.ref[_Slot]] = []
        self._reached = Reached(module)
        self._carried = Carried(self._reached)
        self._first: list[Any] = []
        self._autocast = AutocastState([])
        self._streams = StreamState(self._reached.streams)
        self._versions = [(p, p._version) for p in module.parameters()]
        self._end: list[Any] = []

    def continues(self) -> bool:
        """Whether the next call belongs to this group: it is not full, and its last call's state is unchanged."""
        if self._left == 0:
            return False
        now = self._carried.read()
        return all(a is b or (not isinstance(a, torch.Tensor) and a == b) for a, b in zip(now, self._end, strict=True))

    def call(self, args: Any, kwargs: Any) -> Any:
        """Runs a call for the first time, without keeping what it saves."""
        number = len(self._calls)
        self._left -= 1
        tensors, template = flatten((args, kwargs))
        links = {}
        for i, tensor in enumerate(tensors):
            known = self._outputs.get(id(tensor))
            if known is not None and known[0]() is tensor:
                links[i] = known[1]
        random = RandomState(tensors)
        if number:
            self._carried.watch(copies=True)
        with _torch.saved_tensors_hooks(self._pack, _Slot.unpack), self._carried.writes or contextlib.nullcontext():
            output = self._steps.run(args, kwargs)
        random.settle()
        kept = [None if i in links else t.detach() for i, t in enumerate(tensors)]
        flags = [t.requires_grad for t in tensors]
        self._first += [_plain_value(v) for v in self._carried.learn()]
        self._end = self._carried.read()
        for i, tensor in enumerate(flatten(output)[0]):
            self._outputs[id(tensor)] = weakref.ref(tensor), (number, i)
        self._calls.append(_Call(links, list(zip(kept, flags, strict=True)), template, random))
        return output

    def _pack(self, tensor: torch.Tensor) -> Any:
        slot = _Slot(self, tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def replay(self) -> None:
        """Runs the calls again and fills every slot that is still alive."""
        for parameter, version in self._versions:
            if parameter._version != version:
                raise ReplayError(
                    self.drift(f"would read a parameter {list(parameter.shape)} that was changed since"), code="E201"
                )
        position = 0

        def fill(tensor: torch.Tensor) -> None:
            nonlocal position
            if position >= len(self._slots):
                raise ReplayError(self.drift("saved more tensors"), code="E205")
            slot = self._slots[position]()
            position += 1
            if slot is not None:
                if slot.shape != tensor.shape or slot.dtype != tensor.dtype:
                    raise ReplayError(
                        self.drift(f"saved {list(tensor.shape)} in place of {list(slot.shape)}"), code="E205"
                    )
                slot.filled = tensor.detach()

        present = self._carried.read()
        first = [
            v.clone() if isinstance(v, torch.Tensor) and in_place else v
            for v, in_place in zip(self._first, self._carried.in_place, strict=True)
        ]
        random = RandomState([])
        outputs: list[list[torch.Tensor]] = []
        hooks = _torch.saved_tensors_hooks(fill, _gone)
        try:
            with (
                execution_context.recomputing(),
                self._autocast.replayed(),
                self._streams.replayed(),
                torch.enable_grad(),
                hooks,
            ):
                self._carried.write(first)
                for call in self._calls:
                    call.random.put()
                    args, kwargs = rebuild(call.template, _arguments(call, outputs))
                    outputs.append(flatten(self._steps.run(args, kwargs))[0])
        finally:
            self._carried.write(present)
            random.put()
        if position != len(self._slots):
            raise ReplayError(self.drift(f"saved {position} tensors in place of {len(self._slots)}"), code="E205")

    def drift(self, what: str) -> str:
        """Returns the error message for a replay that differs from the first run."""
        return (
            f"recoup.recurrent: the steps of {self._path!r}, run a second time, {what}. Their forward depends on "
            "something that changed since; keep it fixed, or write the loop as a `recoup.recurrent.scan`."
        )


def _plain_value(value: Any) -> Any:
    """Returns the contents of a place, detached."""
    tensors, template = flatten(value)
    return rebuild(template, [_leaf(t.detach(), t.requires_grad) for t in tensors])


def _leaf(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.requires_grad_() if requires_grad and is_differentiable(tensor) else tensor


def _arguments(call: _Call, outputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    found = []
    for i, (tensor, flag) in enumerate(call.tensors):
        if i in call.links:
            number, position = call.links[i]
            found.append(outputs[number][position])
        else:
            found.append(_leaf(tensor.detach(), flag))
    return found


def _gone(packed: Any) -> torch.Tensor:
    raise ReplayError(
        "recoup.recurrent: the graph of a second run was differentiated; only the first one's may be.", code="E205"
    )
