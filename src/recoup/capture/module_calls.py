"""Which call of a module, or of a method from outside, an op belongs to: hooks on every module while it is captured."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from recoup._pytree import iterate_tensors
from recoup.capture.method_calls import Method, MethodFinder, NotedMethod
from recoup.capture.tracker import Tracker
from recoup.runtime import execution_context
from recoup.runtime.saved_counter import precision_of
from recoup.runtime.tile.loss.lazy_logits import is_lazy


class CallRecord:
    """A call while it is recorded; becomes an `ir.trace.Call`."""

    def __init__(self, path: str, index: int, kind: str, parent: int, first_op: int) -> None:
        self.path = path
        self.index = index
        self.kind = kind
        self.parent = parent
        self.first_op = first_op
        self.last_op = first_op
        self.children: list[int] = []
        self.inputs: tuple[int, ...] = ()
        self.outputs: tuple[int, ...] = ()
        self.input_numel = 0
        self.input_grad_bytes = 0
        self.output_grad_bytes = 0
        self.chained = False
        self.refusal = ""
        self.last_child_output: weakref.ref[torch.Tensor] | None = None


class MethodRecord:
    """A method's call while it is recorded; becomes an `ir.trace.MethodCall`."""

    def __init__(self, method: Method, first_op: int, input_numel: int, num_calls_before: int) -> None:
        self.method = method
        self.first_op = self.last_op = first_op
        self.input_numel = input_numel
        self.num_calls_before = num_calls_before

    def renumber(self, new_op: Sequence[int], new_call: Sequence[int]) -> None:
        """Takes over new numbers of ops and calls, by the old."""
        self.first_op, self.last_op = new_op[self.first_op], new_op[self.last_op]
        self.num_calls_before = new_call[self.num_calls_before]


class CallRecorder:
    """Follows module calls through the forward; a context manager that leaves no hook behind.

    Args:
        methods: whose calls from outside are recorded too; others are added as they are found. None: not looked for.
    """

    def __init__(self, model: nn.Module, tracker: Tracker, methods: dict[Method, None] | None = None) -> None:
        self.calls: list[CallRecord] = []
        self.method_calls: list[MethodRecord] = []
        self._methods = methods
        self._finder = None if methods is None else MethodFinder(model, methods)
        self._method: MethodRecord | None = None
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
        self._model = model
        self._tracker = tracker
        self._stack: list[int] = []
        self._counts: dict[str, int] = {}
        self._removers: list[Any] = []
        self.watcher: Callable[[str, int], None] | None = None
        self.precisions: dict[str, None] = {}

    def __enter__(self) -> CallRecorder:
        for path, module in self._model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks; what runs inside belongs to the call around it
            self._removers.append(module.register_forward_pre_hook(_Enter(self, path), with_kwargs=True))
            self._removers.append(
                module.register_forward_hook(_Leave(self), with_kwargs=True, always_call=True, prepend=True)
            )
        for path, name in self._methods or ():
            module = self._model.get_submodule(path)
            attributes = module.__dict__
            self._replaced.append((attributes, name, attributes.get(name)))
            begin = functools.partial(self.begin_method, (path, name))
            attributes[name] = NotedMethod(getattr(module, name), begin, self.end_method)
        if self._finder is not None:
            self._tracker.on_outside = self.look_outside
        return self

    def __exit__(self, *exc: object) -> None:
        self._tracker.on_outside = None
        while self._replaced:
            attributes, name, before = self._replaced.pop()
            if before is None:
                attributes.pop(name, None)
            else:
                attributes[name] = before
        for remover in self._removers:
            remover.remove()
        self._removers.clear()

    def listens(self) -> bool:
        """Whether calls are recorded now: in the first forward, not in a replay, nor where Dynamo traces."""
        if torch.compiler.is_compiling():
            return False
        return (
            self._tracker.phase == "forward"
            and not execution_context.is_recomputing()
            and not execution_context.is_in_tile()
        )

    def look_outside(self) -> None:
        """Called where an op runs, or a module is called, outside of all calls of modules."""
        if self._method is None and self._finder is not None:
            self._finder.look()

    def begin_method(self, method: Method, args: Any, kwargs: Any) -> MethodRecord | None:
        """Notes that a method's call begins; None if it is inside of another call."""
        if not self.listens() or self._stack or self._method is not None:
            return None
        tensors = [t for t in iterate_tensors((args, kwargs)) if t.layout is torch.strided]
        numel = sum(t.numel() for t in tensors)
        self._method = MethodRecord(method, len(self._tracker.ops), numel, len(self.calls))
        self.method_calls.append(self._method)
        return self._method

    def end_method(self, call: MethodRecord) -> None:
        """Notes that it ends."""
        call.last_op = len(self._tracker.ops)
        self._method = None

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Notes that a call begins."""
        if not self.listens():
            return
        if not self._stack:
            self.look_outside()
        if precision := precision_of(module):
            self.precisions[precision] = None
        tracker = self._tracker
        index = self._counts.get(path, 0)
        self._counts[path] = index + 1
        parent = self._stack[-1] if self._stack else -1
        call = CallRecord(path, index, type(module).__name__, parent, len(tracker.ops))
        tensors = [t for t in iterate_tensors((args, kwargs)) if t.layout is torch.strided]
        call.inputs = tuple(dict.fromkeys(i for i in map(tracker.find, tensors) if i is not None))
        call.input_numel = sum(t.numel() for t in tensors)
        differentiable = [t for t in tensors if t.requires_grad]
        call.input_grad_bytes = sum(_num_bytes(t) for t in differentiable)
        if parent >= 0:
            before = self.calls[parent].last_child_output
            first = next(iterate_tensors(args), None)
            call.chained = (
                before is not None
                and first is not None
                and before() is first
                and all(t is first for t in differentiable)
            )
            self.calls[parent].children.append(len(self.calls))
        self._stack.append(len(self.calls))
        tracker.call = len(self.calls)
        self.calls.append(call)
        if self.watcher is not None:
            self.watcher(path, parent)

    def leave(self, output: Any) -> None:
        """Notes that the innermost call ends."""
        if not self.listens() or not self._stack:
            return
        tracker = self._tracker
        call = self.calls[self._stack.pop()]
        call.last_op = len(tracker.ops)
        tensors = [t for t in iterate_tensors(output) if t.layout is torch.strided and not is_lazy(t)]
        call.outputs = tuple(dict.fromkeys(i for i in map(tracker.find, tensors) if i is not None))
        call.output_grad_bytes = sum(_num_bytes(t) for t in tensors if t.requires_grad)
        tracker.call = self._stack[-1] if self._stack else -1
        if call.parent >= 0:
            whole = output if isinstance(output, torch.Tensor) else None
            self.calls[call.parent].last_child_output = weakref.ref(whole) if whole is not None else None


class _Enter:
    def __init__(self, recorder: CallRecorder, path: str) -> None:
        self.recorder = recorder
        self.path = path

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.recorder.enter(self.path, module, args, kwargs)


class _Leave:
    def __init__(self, recorder: CallRecorder) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.recorder.leave(output)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
