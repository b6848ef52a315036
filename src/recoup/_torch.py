"""Every private torch API recoup touches, one function each, with the versions it was seen working on.

Whatever is not here is public API. Each function says what would free us from it. Torch's type stubs leave most of
these names out, or have them without types: that is what `type: ignore` stands for in this file.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import operator
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.modules.module as nn_module
import torch.profiler
from torch.nn.utils import parametrize


def current_backward_node() -> Any | None:
    """Returns the autograd node that runs now, or None outside backward (torch 2.11, 2.13).

    Freed by: a public `torch.autograd.graph.current_node()`.
    """
    return torch._C._current_autograd_node()


current_backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""Returns a number that names the backward pass that runs now, -1 outside one (torch 2.11, 2.13).

Freed by: a public graph-task handle.
"""


def run_backward(
    roots: list[Any], gradients: list[torch.Tensor], inputs: list[Any], *, keeps_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients of `inputs`, as `torch.autograd.grad` without its checks of shapes (torch 2.11, 2.13).

    Roots and inputs are tensors or `torch.autograd.graph.GradientEdge`s.

    Those take longer than a small step's backward. Freed by: a cheaper `torch.autograd.grad`.
    """
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    found: tuple[torch.Tensor | None, ...] = engine.run_backward(
        tuple(roots), tuple(gradients), keeps_graph, False, tuple(inputs), True, False
    )
    return found


@contextlib.contextmanager
def without_tensor_hooks(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Takes the hooks of `Tensor.register_hook` off for the time being (torch 2.11, 2.13).

    Freed by: a way to ask for gradients below a leaf's hooks.
    """
    hooks = [(t, t._backward_hooks) for t in tensors if t._backward_hooks]
    for tensor, _ in hooks:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, found in hooks:
            tensor._backward_hooks = found


def is_node_of(node: Any, function: type[torch.autograd.Function]) -> bool:
    """Whether a node of a graph was made by the custom function (torch 2.11, 2.13).

    Freed by: a node that names its function.
    """
    return isinstance(node, function._backward_cls)  # type: ignore[attr-defined]  # made by torch's metaclass


def node_number(node: Any) -> int:
    """Returns the position of a node in the order nodes were made on its thread (torch 2.11, 2.13).

    Leaf accumulators have the largest unsigned 64-bit number. Freed by: public `Node.sequence_nr`.
    """
    return int(node._sequence_nr())


@functools.cache
def _names_saved_by(node_type: type) -> frozenset[str]:
    return frozenset(name.removeprefix("_saved_") for name in dir(node_type) if name.startswith("_saved_"))


def saved_names(node: Any) -> frozenset[str] | None:
    """Returns the names of what a node saves, inputs and results; None where it does not say (torch 2.11, 2.13).

    A `Function`'s node, in Python or C++, does not say. Freed by: public names of the tensors a `Node` saves.
    """
    custom = isinstance(node, torch.autograd.function.BackwardCFunction) or type(node).__name__ == "CppFunction"
    node_type: Any = type(node)  # a class has no `__hash__` to mypy
    return None if custom else _names_saved_by(node_type)


def next_node_number() -> int:
    """Returns the number the next node of this thread will get (torch 2.11, 2.13).

    Freed by: public `torch.autograd.graph` sequence numbers.
    """
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def inside_transform() -> bool:
    """Whether a `torch.func` transform runs, which refuses saved-tensor hooks, or forward-mode AD (torch 2.11, 2.13).

    Freed by: a public `torch.func.is_active()` and `torch.autograd.forward_ad` level.
    """
    if torch._C._functorch.maybe_current_level() is not None:  # type: ignore[attr-defined]
        return True
    return bool(torch.autograd.forward_ad._current_level >= 0)


class grad_enabled:
    """Context manager: `torch.enable_grad` in a third of its time, for each replay of a region (torch 2.11, 2.13).

    Freed by: an `enable_grad` that is entered without Python.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)

    def __exit__(self, *exc: Any) -> None:
        torch._C._set_grad_enabled(self._before)


class below_autocast_and_autograd:
    """Context manager: aten ops run as they ran when they were recorded: no autocast, no graph (torch 2.11, 2.13).

    A class, not a generator: it is entered once for each rederived tensor.
    Freed by: a public guard that excludes the autocast dispatch keys for every device.
    """

    __slots__ = ("_guard", "_had_grad")

    def __enter__(self) -> None:
        self._had_grad = torch.is_grad_enabled()
        if self._had_grad:
            torch._C._set_grad_enabled(False)
        self._guard = None
        if torch._C._is_any_autocast_enabled():
            self._guard = torch._C._DisableAutocast()  # type: ignore[attr-defined]
            self._guard.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        if self._guard is not None:
            self._guard.__exit__(*exc)
        if self._had_grad:
            torch._C._set_grad_enabled(True)


def is_below_autocast_and_autograd() -> bool:
    """Whether `below_autocast_and_autograd` would change nothing: so it is in most backwards. Freed by: as that."""
    return not (torch.is_grad_enabled() or torch._C._is_any_autocast_enabled())


@contextlib.contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Runs real ops from inside a dispatch mode, past every mode on the stack (torch 2.11, 2.13).

    Freed by: a public way to leave FakeTensorMode for one op.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def fake_tensor_mode() -> Any:
    """Returns a new FakeTensorMode that accepts real tensors beside fake ones (torch 2.11, 2.13).

    Freed by: FakeTensorMode in `torch.testing` or any public name.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def no_backward_left() -> Iterator[None]:
    """Has an exception out of a backward leave no tensors in autograd's queue (torch 2.11, 2.13).

    The engine keeps what it had not run, until a node that is older than those comes to this thread's queue: here is
    one. Freed by: an engine that empties the queue when a backward raises.
    """
    with torch.inference_mode(False), torch.enable_grad(), without_dispatch_modes():
        older = torch.zeros((), requires_grad=True).clone()
    try:
        yield
    except BaseException:
        with torch.inference_mode(False), without_dispatch_modes():
            older.backward()  # type: ignore[no-untyped-call]
        raise


def fake_empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Returns a tensor of the same shape, strides and dtype of the fake mode that is on, past the others (torch 2.13).

    Freed by: as `fake_tensor_mode`; by the dispatcher it takes ten times as long.
    """
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)  # type: ignore[attr-defined]
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        part = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        made: torch.Tensor = _fake_tensor_class()(mode, part, torch.device(device))
    return made


@functools.cache
def _decomposition(func: Any) -> Callable[..., Any] | None:
    """Returns what a fake mode answers an op with, if that is other ops."""
    from torch._decomp import decomposition_table, meta_table
    from torch._subclasses.fake_tensor import torch_decomp_decompositions

    if func in meta_table or func not in decomposition_table or not torch_decomp_decompositions(func):
        return None
    if func.is_view or any(argument.name == "device" for argument in func._schema.arguments):
        return None
    found: Callable[..., Any] = decomposition_table[func]
    return found


@functools.cache
def depends_on_device(func: Any) -> bool:
    """Whether what a fake mode decomposes an op to may depend on the kind of device (torch 2.11, 2.13)."""
    decomposition = _decomposition(func)
    return decomposition is not None and _asks_for_kind_of_device(decomposition, set())


def _asks_for_kind_of_device(function: Any, seen: set[Any]) -> bool:
    """Whether a decomposition, or one of its module's functions that it names, has `device.type` in it, or the like."""
    function = inspect.unwrap(function)
    if function in seen or not isinstance(function, types.FunctionType):
        return False
    seen.add(function)
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    if {"device", "type"} <= names or not names.isdisjoint({"is_cpu", "is_cuda"}):
        return True
    named = [function.__globals__.get(name) for name in names]
    named += [cell.cell_contents for cell in function.__closure__ or ()]
    return any(
        _asks_for_kind_of_device(each, seen)
        for each in named
        if isinstance(each, types.FunctionType) and each.__module__ == function.__module__
    )


def answered_on_meta(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any, *, is_view: bool
) -> Any | None:
    """Returns what the fake mode answers an op with, in a sixth of its time or less (torch 2.11, 2.13).

    Calls what the mode would call in the end, a decomposition or the op itself, with tensors on the meta device; views
    lie in the memory that their argument has. None where the mode does something else, tensors lie on several devices,
    or a result is not new. Freed by: as `fake_tensor_mode`.

    Args:
        is_view: whether the results are to lie in the memory of the one tensor among the arguments.
    """
    run = func if is_view or torch.Tag.pointwise in func.tags else _decomposition(func)
    if run is None or mode is None or (run is not func and mode.cpp_meta_supports_symint(func)):
        return None
    leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    kind = _fake_tensor_class()
    if not all(type(t) is kind and t.layout is torch.strided for t in tensors):
        return None
    if len({fake_device(t) for t in tensors}) != 1:
        return None
    # The strides of views of nothing are a matter of taste.
    if is_view and (len(tensors) > 1 or not tensors[0].numel() or may_alias(func)):
        return None
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        stand_in = _in_its_memory if is_view else _on_meta
        stand_ins = [stand_in(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = torch.utils._pytree.tree_unflatten(stand_ins, spec)
        try:
            out = run(*args, **kwargs)
        except Exception:  # the mode itself answers, or says what is wrong
            return None
        several = out if isinstance(out, (tuple, list)) else (out,)
        parts = [part for part in several if isinstance(part, torch.Tensor)]
        owned = {t.untyped_storage()._cdata for t in (*parts, *stand_ins) if isinstance(t, torch.Tensor)}
        if len(owned) != (1 if is_view else len(parts) + len(tensors)):
            return None
        device = fake_device(tensors[0])
        made = [kind(mode, part, device) if isinstance(part, torch.Tensor) else part for part in several]
    return made[0] if isinstance(out, torch.Tensor) else made if isinstance(out, list) else tuple(made)


def _in_its_memory(tensor: torch.Tensor) -> torch.Tensor:
    part = torch.empty(0, dtype=tensor.dtype, device="meta")
    return part.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def as_fake_parameter(tensor: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """Returns a fake tensor that was just made as a parameter: `nn.Parameter` would dispatch twice (torch 2.13)."""
    if not is_fake(tensor):
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor.requires_grad_(requires_grad)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a fake one (torch 2.11, 2.13). Freed by: as `fake_tensor_mode`."""
    return isinstance(tensor, _fake_tensor_class())


@functools.cache
def is_wrapper_type(kind: type[Any]) -> bool:
    """Whether tensors of the type are made of others, strided ones, that its ops run on: a DTensor (torch 2.11, 2.13).

    Freed by: a public question for `__tensor_flatten__`, the protocol that they are opened by.
    """
    from torch.nested._internal.nested_tensor import NestedTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

    return is_traceable_wrapper_subclass_type(kind) and not issubclass(kind, (NestedTensor, _fake_tensor_class()))


def parts_of_wrapper(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors that one of a wrapper type is made of (torch 2.11, 2.13)."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for part in (getattr(tensor, name) for name in names) if isinstance(part, torch.Tensor)]


def rewrapped(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns a tensor like one of a wrapper type, made of what `make` returns for its parts (torch 2.11, 2.13)."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(tensor, name) for name in names}  # torch 2.13: a DTensor's mesh too
    parts = {name: make(part) if isinstance(part, torch.Tensor) else part for name, part in parts.items()}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())  # type: ignore[attr-defined]
    return made


def fakes_among(objects: list[Any], mode: Any) -> list[Any]:
    """Returns the fake tensors of a mode among any objects at all (torch 2.13). Freed by: as `fake_tensor_mode`."""
    fake = _fake_tensor_class()
    return [o for o in [o for o in objects if type(o) is fake] if o.fake_mode is mode]


@functools.cache
def _fake_tensor_class() -> Any:
    """Returns FakeTensor; kept, since it is asked for with each tensor of each op (torch 2.11, 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def fake_device(tensor: Any) -> torch.device:
    """Returns the device that a fake tensor stands for, without dispatching the question (torch 2.11, 2.13).

    Freed by: a cheap public `FakeTensor.device`.
    """
    device: torch.device = tensor.fake_device
    return device


_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_plain_disable = torch.autograd.graph.disable_saved_tensors_hooks
_hooks_lock = threading.Lock()
_hooks_on: list[tuple[int, Any]] = []  # thread and hooks, of all that are on, outermost first


class saved_tensors_hooks(torch.autograd.graph.saved_tensors_hooks):
    """Our saved-tensor hooks, which step aside for `torch.func` transforms inside a forward (torch 2.11, 2.13).

    `torch.func.grad`, `vjp`, `jacrev` and `hessian` refuse to run where hooks are on. While ours are, and only then,
    the context manager by which they refuse takes ours off for the time of the transform, whose tensors autograd then
    keeps as it does without us. Hooks of others it refuses as ever.
    Freed by: transforms that let saved-tensor hooks be.

    Attributes:
        is_on: whether autograd asks them now; inside of their block they may be put off and on again.
        may_switch: whether they may be: no others were on when they came.
    """

    is_on = True
    may_switch = False

    def __init__(self, pack_hook: Callable[[torch.Tensor], Any], unpack_hook: Callable[[Any], torch.Tensor]) -> None:
        self.pack_hook = pack_hook
        self.unpack_hook = unpack_hook

    def __enter__(self) -> None:
        with _hooks_lock:
            _hooks_on.append((threading.get_ident(), self))
            torch.autograd.graph.disable_saved_tensors_hooks = _disable_around_ours
        self.may_switch = _top_hooks(True) is None
        self.is_on = True
        try:
            _push_hooks(self.pack_hook, self.unpack_hook)
        except BaseException:
            _take_off([self])
            raise

    def __exit__(self, *args: object) -> None:
        if not self.may_switch or (self.is_on and _top_hooks(True) is not None):
            _pop_hooks()
        _take_off([self])

    def put_off(self) -> bool:
        """Has autograd keep what it saves from now on; returns whether it does: others may have come on top."""
        top = _top_hooks(True)
        if not self.may_switch or top is None or top[0] is not self.pack_hook:
            return False
        _pop_hooks()
        self.is_on = False  # after: what is marked as on and is not is left alone, should this be interrupted
        return True

    def put_on(self) -> bool:
        """Undoes `put_off`; returns whether they are on: not where others came since, or are refused."""
        if self.is_on:
            return True
        if _top_hooks(True) is not None:
            return False
        self.is_on = True
        try:
            _push_hooks(self.pack_hook, self.unpack_hook)
        except RuntimeError:
            self.is_on = False
        return self.is_on


def saves_plainly() -> bool:
    """Whether no saved-tensor hooks are on, so that autograd keeps what it saves as it is (torch 2.11, 2.13).

    Freed by: a public question for the hooks that are on.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def _own_hooks() -> list[Any]:
    """Returns this thread's hooks that are on, outermost first."""
    here = threading.get_ident()
    return [hooks for thread, hooks in _hooks_on.copy() if thread == here]


def under_others_hooks() -> bool:
    """Whether tensors that are saved now go to hooks of others: a checkpoint's, offload's (torch 2.11, 2.13).

    Freed by: as `saves_plainly`.
    """
    top = _top_hooks(True)
    return top is not None and not any(hooks.pack_hook is top[0] for hooks in _own_hooks())


def _take_off(gone: list[Any]) -> None:
    with _hooks_lock:
        if _hooks_on and len(gone) == 1 and _hooks_on[-1][1] is gone[0]:
            _hooks_on.pop()
        else:
            _hooks_on[:] = [entry for entry in _hooks_on if not any(entry[1] is hooks for hooks in gone)]
        if not _hooks_on:
            torch.autograd.graph.disable_saved_tensors_hooks = _plain_disable


@contextlib.contextmanager
def _disable_around_ours(error_message: str) -> Iterator[None]:
    graph = torch._C._autograd
    taken: list[Any] = []
    for hooks in reversed(_own_hooks()):
        top = graph._top_saved_tensors_default_hooks(True)
        if top is None or top[0] is not hooks.pack_hook:
            break
        graph._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    try:
        with _plain_disable(error_message):
            yield
    finally:
        for hooks in reversed(taken):
            graph._push_saved_tensors_default_hooks(hooks.pack_hook, hooks.unpack_hook)


def is_higher_order(func: Any) -> bool:
    """Whether what comes to a dispatch mode is a higher-order operator, which has no schema (torch 2.11, 2.13).

    Freed by: a public name of `torch._ops.HigherOrderOperator`.
    """
    return not isinstance(func, torch._ops.OpOverload)


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors that an op says it writes, of those it was given.

    Private: `_schema` of an op. Seen working with 2.7 to 2.13.
    """
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            item = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [t for t in (item if isinstance(item, (list, tuple)) else (item,)) if isinstance(t, torch.Tensor)]
    return found


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a `torch.func` transform stands around the tensor, which has no storage then (torch 2.11, 2.13).

    Freed by: a public `torch.func.is_wrapped`.
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))  # type: ignore[attr-defined]


def device_type(tensor: torch.Tensor) -> str:
    """Returns "cpu", "cuda" and so on, of a fake tensor what it stands for, without dispatching the question.

    Seen working on torch 2.11 and 2.13. Freed by: as `fake_device`.
    """
    return (fake_device(tensor) if is_fake(tensor) else tensor.device).type


def keep_gpu_busy(cycles: int) -> None:
    """Has the current CUDA stream do nothing for so many clock cycles, while the host goes on (torch 2.11).

    Freed by: a public `torch.cuda.sleep`.
    """
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@functools.cache
def dispatch_mode_class() -> type[Any]:
    """Returns the base of our dispatch modes, which `user_modes` leaves out (torch 2.11, 2.13).

    TorchDispatchMode is documented but kept under a private module name.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class OwnMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """Compiled code stays compiled: else Dynamo would skip it, and `torch.cond`, for good."""
            return True

    return OwnMode


@functools.cache
def function_mode_class() -> type[Any]:
    """Returns the base of our torch-function modes, which `user_modes` leaves out (torch 2.11, 2.13).

    Freed by: as `user_modes`.
    """
    from torch.overrides import TorchFunctionMode

    class OwnFunctionMode(TorchFunctionMode):  # type: ignore[no-untyped-call]
        is_off = False

        def __enter__(self) -> Any:
            self._num_below = torch._C._len_torch_function_stack()
            return super().__enter__()  # type: ignore[no-untyped-call]

        def put_off(self) -> bool:
            """Turns it off inside of its block; returns whether it is: others may have been put on since."""
            if not self.is_off and self._is_top():
                torch._C._pop_torch_function_stack()
                self.is_off = True
            return self.is_off

        def put_on(self) -> bool:
            """Undoes `put_off`; returns whether it is on: not on top of others."""
            if self.is_off and torch._C._len_torch_function_stack() == self._num_below:
                self.is_off = False
                torch._C._push_on_torch_function_stack(self)
            return not self.is_off

        def put_back(self) -> None:
            """Undoes `put_off` also where others were put on since: it is below them again."""
            if self.is_off:
                others = torch._C._len_torch_function_stack() - self._num_below
                above = [torch._C._pop_torch_function_stack() for _ in range(others)]
                for mode in (self, *reversed(above)):
                    torch._C._push_on_torch_function_stack(mode)
                self.is_off = False

        def _is_top(self) -> bool:
            num = torch._C._len_torch_function_stack()
            return bool(num) and torch._C._get_function_stack_at(num - 1) is self

        def __exit__(self, *exc: Any) -> None:
            if self._is_top():  # whatever `is_off` says, should switching have been interrupted
                super().__exit__(*exc)  # type: ignore[no-untyped-call]

    return OwnFunctionMode


@contextlib.contextmanager
def on_compiled_calls(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` before compiled code runs inside of the block (torch 2.11, 2.13).

    Code that is compiled for the first time in this process there is not seen. Freed by: a function mode that Dynamo
    leaves alone; it traces those that are on into what it compiles.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(dynamo, "cached_backends", {})
    if all(backend is None for backend in backends.values()):  # None: that of what is not to be compiled
        yield
        return
    with _hooks_lock:
        told = dynamo._maybe_set_eval_frame = _Told(tell, dynamo._maybe_set_eval_frame)
    try:
        yield
    finally:
        told.is_on = False
        with _hooks_lock:  # other threads put theirs on and off in any order
            while isinstance(dynamo._maybe_set_eval_frame, _Told) and not dynamo._maybe_set_eval_frame.is_on:
                dynamo._maybe_set_eval_frame = dynamo._maybe_set_eval_frame.real


class _Told:
    """`_maybe_set_eval_frame` for the time of a block, which tells the block's thread.

    Dynamo hands it None where a function is not to be compiled: one that it leaves alone, or all of them.
    """

    def __init__(self, tell: Callable[[], None], real: Callable[[Any], Any]) -> None:
        self.real = real
        self.is_on = True
        self._tell = tell
        self._thread = threading.get_ident()

    def __call__(self, callback: Any) -> Any:
        if callback is not None and self.is_on and threading.get_ident() == self._thread:
            self._tell()
        return self.real(callback)


def user_modes() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the torch-function modes and the dispatch modes that are on, without ours and torch's own (torch 2.13).

    Torch's own are those it keeps apart: fake tensors, tracing. Freed by: public stacks of modes.
    """
    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return (), ()
    functions = tuple(m for m in _function_modes() if not isinstance(m, function_mode_class()))
    return functions, tuple(m for m in dispatch_modes() if not isinstance(m, dispatch_mode_class()))


def has_user_modes(modes: tuple[Any, ...]) -> bool:
    """Whether the user's dispatch modes are these. Freed by: as `user_modes`."""
    if not torch._C._len_torch_dispatch_stack():
        return not modes
    return _are_same(user_modes()[1], modes)


def user_modes_below(mode: Any) -> tuple[Any, ...]:
    """Returns the user's dispatch modes that ops reach after one of ours. Freed by: as `user_modes`."""
    if torch._C._len_torch_dispatch_stack() < 2:
        return ()
    found = []
    for other in dispatch_modes():
        if other is mode:
            break
        if not isinstance(other, dispatch_mode_class()):
            found.append(other)
    return tuple(found)


def dispatch_modes() -> list[Any]:
    num = torch._C._len_torch_dispatch_stack()
    modes = map(torch._C._get_dispatch_stack_at, range(num))
    return [m for m in modes if getattr(m, "_mode_key", None) is None]


def _function_modes() -> list[Any]:
    return list(map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack())))


@contextlib.contextmanager
def under_modes(modes: tuple[tuple[Any, ...], tuple[Any, ...]]) -> Iterator[None]:
    """Runs what is inside under these modes of the user and no others, without entering them (torch 2.11, 2.13).

    Args:
        modes: as `user_modes` returned them. Freed by: as `user_modes`.
    """
    functions, dispatches = modes
    before = user_modes()
    if _are_same(before[0], functions) and _are_same(before[1], dispatches):
        yield
        return
    stack, function_stack = dispatch_modes(), _function_modes()
    wanted_functions = [*(m for m in function_stack if isinstance(m, function_mode_class())), *functions]
    wanted = [*(m for m in stack if isinstance(m, dispatch_mode_class())), *dispatches]
    push, pop = torch._C._push_on_torch_dispatch_stack, torch._C._pop_torch_dispatch_stack
    push_function, pop_function = torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack
    for _ in stack:
        pop(None)
    for _ in function_stack:
        pop_function()
    for mode in wanted:
        push(mode)
    for mode in wanted_functions:
        push_function(mode)
    try:
        yield
    finally:
        for _ in wanted:
            pop(None)
        for _ in wanted_functions:
            pop_function()
        for mode in stack:
            push(mode)
        for mode in function_stack:
            push_function(mode)


def has_user_function_modes() -> bool:
    """Whether torch-function modes of the user's are on. Freed by: as `user_modes`."""
    return any(not isinstance(mode, function_mode_class()) for mode in _function_modes())


num_function_modes = torch._C._len_torch_function_stack
"""How many torch-function modes are on (torch 2.11, 2.13). Freed by: as `user_modes`."""
function_modes_are_on = torch._C._is_torch_function_mode_enabled
"""Whether a torch-function mode would see a call made now (torch 2.11, 2.13). Freed by: as `user_modes`."""
num_dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are on, torch's own among them (torch 2.11, 2.13). Freed by: as `user_modes`."""
past_dispatch_modes = torch._C._DisableTorchDispatch  # type: ignore[attr-defined]
"""A context in which ops on plain tensors reach no dispatch mode (torch 2.11, 2.13). Freed by: as `user_modes`."""


def past_function_modes() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which the user's torch-function modes do not see what we do ourselves (torch 2.11, 2.13).

    Freed by: a public guard that leaves them all.
    """
    if torch._C._len_torch_function_stack():
        return torch._C.DisableTorchFunction()
    return _nothing


_nothing = contextlib.nullcontext()


def _are_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def set_deterministic_mode(state: tuple[bool, bool]) -> None:
    """Sets what `deterministic_mode` returned."""
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


_LEAST_NORMAL = torch.finfo(torch.float64).tiny
# Of each flag that chooses a kernel or what one computes: how it is read, how it is set (torch 2.11, 2.13).
_CPU_FLAGS: tuple[tuple[Any, Any], ...] = (
    (lambda: _LEAST_NORMAL * 0.5 == 0.0, torch.set_flush_denormal),
    (torch.get_num_threads, torch.set_num_threads),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (
        lambda: (torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()),
        set_deterministic_mode,
    ),
)
_FLAGS: tuple[tuple[Any, Any], ...] = (
    *_CPU_FLAGS,
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch._C._get_flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch._C._get_mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch._C._get_math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch._C._get_cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (
        torch._C._get_math_sdp_allow_fp16_bf16_reduction,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
)


def backend_flags(*, cpu_only: bool = False) -> tuple[Any, ...]:
    """Returns torch's global flags that choose kernels; with `cpu_only` those that elementwise CPU kernels obey.

    Freed by: one public snapshot of `torch.backends`.
    """
    return tuple([get() for get in (_GET_CPU_FLAGS if cpu_only else _GET_FLAGS)])


_GET_CPU_FLAGS = tuple([get for get, _ in _CPU_FLAGS])
_GET_FLAGS = tuple([get for get, _ in _FLAGS])


def attention_flags() -> tuple[Any, ...]:
    """Returns the flags that choose a kernel of `scaled_dot_product_attention` (torch 2.11, 2.13).

    Freed by: as `backend_flags`.
    """
    flags = (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
    )
    return (*flags, torch._C._get_cudnn_sdp_enabled(), *torch._C._get_sdp_priority_order())


def attention_choice(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> int | None:
    """Returns which kernel `scaled_dot_product_attention` takes for these arguments (torch 2.11, 2.13); None: unknown.

    Freed by: a public function that says it.
    """
    choice = getattr(torch, "_fused_sdp_choice", None)
    try:
        return None if choice is None else int(choice(*args, **(kwargs or {})))
    except (TypeError, RuntimeError):
        return None


def call_state() -> tuple[torch.dtype, bool, tuple[Any, ...] | None, bool]:
    """Returns what of this thread decides, beside its arguments, which ops a call runs and saves (torch 2.11, 2.13).

    The default dtype, whether gradients are on, autocast's settings (None where it is off), and whether what is saved
    goes to the hooks of others.

    Freed by: as `is_autocast`.
    """
    return torch.get_default_dtype(), torch.is_grad_enabled(), autocast_state(), under_others_hooks()


_apply_code = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def inside_custom_function() -> bool:
    """Whether the forward of a user's `autograd.Function` runs on this thread, by the frames below (torch 2.11, 2.13).

    Freed by: a public question for it.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _apply_code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


sequence_number = torch._C._autograd._get_sequence_nr
"""Returns the number that this thread's next autograd node gets (torch 2.11, 2.13). Freed by: a public one."""


def made_since(tensor: torch.Tensor, number: int) -> bool:
    """Whether the op that made a tensor of a leaf ran since `sequence_number` was `number`; True without gradients.

    Views are looked through (torch 2.11, 2.13). Freed by: a public number of nodes.
    """
    node: Any = tensor.grad_fn
    if node is None:
        return True
    while (ahead := node.next_functions[0][0]) is not None and ahead.next_functions:
        node = ahead
    return int(node._sequence_nr()) >= number


def autocast_state() -> tuple[Any, ...] | None:
    """Returns autocast's settings in this thread, None where it is off (torch 2.11, 2.13).

    Freed by: as `is_autocast`.
    """
    if not is_autocast():
        return None
    states = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return *states, torch.is_autocast_cache_enabled()


is_autocast = torch._C._is_any_autocast_enabled
"""Whether autocast is on for some device (torch 2.11, 2.13). Freed by: `torch.is_autocast_enabled` for any device."""


@contextlib.contextmanager
def under_flags(flags: tuple[Any, ...]) -> Iterator[None]:
    """Runs what is inside under the flags that `backend_flags` returned. Freed by: as `backend_flags`."""
    changes = []
    for (get, change), wanted in zip(_FLAGS, flags, strict=False):
        now = get()
        if now != wanted:
            changes.append((change, wanted, now))
    try:
        for change, wanted, _ in changes:
            change(wanted)
        yield
    finally:
        for change, _, now in changes:
            change(now)


_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
)


def global_forward_hooks() -> tuple[dict[int, Any], ...]:
    """Returns copies of the hooks on the forwards of all modules (torch 2.11, 2.13).

    Freed by: a public list of what `register_module_forward_hook` registered.
    """
    return tuple([hooks.copy() for hooks in _GET_GLOBAL_HOOKS(nn_module)])


_GET_GLOBAL_HOOKS = operator.attrgetter(*_GLOBAL_HOOKS)


@contextlib.contextmanager
def under_global_forward_hooks(hooks: tuple[dict[int, Any], ...]) -> Iterator[None]:
    """Runs what is inside with those hooks on the forwards of all modules. Freed by: as `global_forward_hooks`."""
    before = global_forward_hooks()
    if before == hooks:
        yield
        return
    _put_global_forward_hooks(hooks)
    try:
        yield
    finally:
        _put_global_forward_hooks(before)


def _put_global_forward_hooks(hooks: tuple[dict[int, Any], ...]) -> None:
    for name, wanted in zip(_GLOBAL_HOOKS, hooks, strict=True):
        table = getattr(nn_module, name)
        table.clear()
        table.update(wanted)


def parametrization_cache() -> tuple[int, dict[Any, Any]]:
    """Returns how deep in `parametrize.cached()` we are, and what is cached (torch 2.11, 2.13).

    Freed by: a public `parametrize.is_cached`.
    """
    depth = int(parametrize._cache_enabled)
    return depth, parametrize._cache.copy() if depth else {}


@contextlib.contextmanager
def under_parametrization_cache(state: tuple[int, dict[Any, Any]]) -> Iterator[None]:
    """Runs what is inside with that cache of parametrized tensors. Freed by: as `parametrization_cache`."""
    before = parametrize._cache_enabled, parametrize._cache
    if not state[0] and not before[0]:
        yield
        return
    parametrize._cache_enabled, parametrize._cache = state[0], dict(state[1])
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = before


def without_dynamo_wrapper(mode: type[Any]) -> type[Any]:
    """Class decorator of a dispatch mode: has Dynamo skip its frames by their code, not by a wrapper around each call.

    The wrapper costs 4 us an op. Seen working on torch 2.11 and 2.13; where it does not, the mode is left as it is.
    Freed by: a public way to mark code that Dynamo never compiles.
    """
    wrapped = mode.__dict__["__torch_dispatch__"]
    raw = getattr(wrapped, "__wrapped__", None)
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    except ImportError:
        return mode
    if raw is not None:
        set_code_exec_strategy(raw.__code__, skip)
        mode.__torch_dispatch__ = raw  # type: ignore[attr-defined]
    return mode


def detach_past_modes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor.detach()` without telling the dispatch modes that are on (torch 2.11, 2.13).

    A fake tensor's is a fake tensor too, and counts changes in place together with it (torch 2.13).
    Freed by: a `detach` that is free under a dispatch mode.
    """
    if not num_dispatch_modes() and type(tensor) is torch.Tensor:
        return tensor.detach()
    is_plain = type(tensor) is torch.Tensor
    is_fake = not is_plain and type(tensor) is _fake_tensor_class() and tensor.layout is torch.strided
    if not is_plain and not is_fake:  # is what it is by its dispatch alone
        return tensor.detach()
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        found = tensor.detach()
        return FakeTemplate(tensor).like(found, mode_of_fake(tensor)) if is_fake else found


def alias_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor.detach()` inside a dispatch mode; both count changes in place together (torch 2.11, 2.13).

    Freed by: version counters that are shared by views made below autograd.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # type: ignore[attr-defined]
        return tensor.detach()


def op_call(overload: Any) -> Any:
    """Returns what an overload runs when it is called, without the Python around it (torch 2.11, 2.13).

    Freed by: an overload that is called without Python.
    """
    return getattr(overload, "_op", overload)


def functions_named(overload: Any) -> list[Callable[..., Any]]:
    """Returns the compiled functions of torch's Python API that have the name of an aten op (torch 2.11, 2.13).

    Freed by: `op_call`'s; `torch._C._nn` is where those of `torch.nn.functional` come from.
    """
    namespace, name = overload._schema.name.split("::")
    if namespace != "aten":
        return []
    found = [getattr(holder, name, None) for holder in (torch._C._VariableFunctions, torch._C._nn, torch.Tensor)]
    return [f for f in found if isinstance(f, (types.BuiltinFunctionType, types.MethodDescriptorType))]


def tensor_guard(tensors: Sequence[torch.Tensor], *, any_size: bool = False) -> Callable[..., bool] | None:
    """Returns a function that says whether other tensors are like these, None where there is none (torch 2.11, 2.13).

    Like these are those of the same class, dtype, device, size, strides and dispatch keys (layout, autograd, lazy
    negation and conjugation), no tensor twice. It holds none of them. Freed by: one public call that compares metadata.

    Args:
        any_size: of sizes and strides only how many there are is compared.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    free: Any = [[None] * tensor.dim() for tensor in tensors] if any_size else None
    guards = TensorGuards(*tensors, dynamic_dims_sizes=free, dynamic_dims_strides=free)
    check: Callable[..., bool] = guards.check
    return check


def fake_tensor_errors() -> tuple[type[BaseException], ...]:
    """Returns the errors that say a fake tensor cannot answer what the model asked (torch 2.11, 2.13)."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
        GuardOnDataDependentSymNode,
    )


class MemoryProfiler(torch.profiler.profile):
    """`torch.profiler.profile` of allocators' events, a GPU's too, without the lines that kineto writes to stderr.

    Kineto reads `KINETO_LOG_LEVEL` when the first profile of a process begins (seen in 2.13); its lines at start and
    stop have the highest level of its own.
    """

    def __init__(self) -> None:
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        """Begins."""
        before = os.environ.get("KINETO_LOG_LEVEL")
        os.environ["KINETO_LOG_LEVEL"] = before or "99"
        try:
            super().start()
        finally:
            if before is None:
                del os.environ["KINETO_LOG_LEVEL"]


def _memory_changes(profiler: Any, device: torch.device) -> list[tuple[int, int]]:
    """Returns an allocator's changes as (ns, bytes) in time order, from a finished `profile(profile_memory=True)`.

    On the CPU what is freed without having been allocated under the profiler is left out: of some of it, garbage of
    what was profiled before, the profiler knows the size. On a GPU it is told of nothing that is freed outside of ops:
    the allocator's own account, which comes with each event, has it right after the event before (torch 2.11).

    Seen working on torch 2.11 and 2.13. Freed by: a public event list with sizes and addresses.
    """
    found, stack = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    allocation, kind, index = torch._C._profiler._EventType.Allocation, device.type, device.index
    while stack:
        event = stack.pop()
        if event.tag != allocation:
            stack += event.children
            continue
        fields = event.extra_fields
        of = fields.device
        if of.type == kind and index in (None, of.index):
            found.append((int(event.start_time_ns), fields))
    found.sort(key=lambda change: change[0])
    live: set[int] = set()
    changes: list[tuple[int, int]] = []
    account: int | None = None
    for ns, fields in found:
        size = int(fields.alloc_size)
        if device.type != "cpu":
            if account is not None and (untold := fields.total_allocated - size - account):
                changes.append((changes[-1][0], untold))
            account = int(fields.total_allocated)
        elif size > 0:
            live.add(fields.ptr)
        elif fields.ptr not in live:
            continue
        else:
            live.remove(fields.ptr)
        changes.append((ns, size))
    return changes


def cpu_memory_events(profiler: Any) -> list[int]:
    """Returns the CPU allocator's changes in bytes, in time order, from a finished `profile(profile_memory=True)`."""
    return [change for _, change in _memory_changes(profiler, torch.device("cpu"))]


def timed_memory_events(
    profiler: Any, prefix: str, device: torch.device | None = None
) -> tuple[list[tuple[int, int]], list[tuple[str, int, int]]]:
    """Returns an allocator's changes as (ns, bytes) in time order, and marks as (name, begin ns, end ns).

    Args:
        prefix: marks are the `record_function` ranges whose names begin with it; it is left out of the name.
        device: whose allocator; a device without an index stands for all of its type, None for the CPU.

    Seen working on torch 2.11 and 2.13. Freed by: a public event list with sizes.
    """
    marks = []
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name.startswith(prefix):
            begin = int(event.start_ns())
            marks.append((name.removeprefix(prefix), begin, begin + int(event.duration_ns())))
    marks.sort(key=lambda mark: mark[1])
    return _memory_changes(profiler, torch.device("cpu") if device is None else device), marks


def compiled_backwards(profiler: Any) -> tuple[list[tuple[int, int]], list[tuple[str, int, int]]]:
    """Returns `timed_memory_events` with a mark for the backward of each compiled graph (torch 2.11, 2.13)."""
    return timed_memory_events(profiler, "autograd::engine::evaluate_function: CompiledFunctionBackward")


def cuda_is_initialized() -> bool:
    """Whether this process has touched CUDA; `torch.cuda.is_initialized` is public but untyped (torch 2.11, 2.13)."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def quiet_fake_errors() -> Iterator[None]:
    """Keeps fake tensors from logging a traceback for an error that is reported anyway (torch 2.11, 2.13).

    Freed by: fake tensors that only raise.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def is_said(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(is_said)  # a level would clear what all loggers know of theirs: 15 ms, twice
    try:
        yield
    finally:
        logger.removeFilter(is_said)


def backward_keeps_graph() -> bool:
    """Whether the backward that runs now was called with `retain_graph` (torch 2.11, 2.13).

    Freed by: a public way for a custom backward to know that it will run again.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def has_memory_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor, and no array or view, lies over a tensor's memory (torch 2.11, 2.13).

    Freed by: a public way to know that memory is nobody else's.
    """
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) <= 2)  # the tensor, and Python's object


def tensor_without_data(cls: type[Any], like: Any, shape: Any, dtype: Any, requires_grad: bool) -> Any:
    """Returns an instance of a Tensor subclass that has a shape and no memory (torch 2.11, 2.13).

    Freed by: a public constructor of wrapper subclasses.
    """
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, shape, dtype=dtype, device=like.device, requires_grad=requires_grad
    )


def without_torch_function() -> Any:
    """Returns a context in which a tensor subclass is asked as the plain tensor it is (torch 2.11, 2.13).

    Freed by: a public name for the guard the documentation tells to use.
    """
    return torch._C.DisableTorchFunctionSubclass()


def is_fsdp_pre_backward(hook: Any) -> bool:
    """Whether a tensor's hook is FSDP2's, which gathers a unit and gives the gradient back as it is (torch 2.11, 2.13).

    Freed by: a public way for a module's output to say when its backward begins.
    """
    owner = getattr(hook, "__self__", None)
    return type(owner).__name__ == "FSDPState" and getattr(hook, "__name__", "") == "_pre_backward"


def is_sharded_parameter(tensor: torch.Tensor) -> bool:
    """Whether FSDP or ZeRO-3 owns the parameter, its name and its memory (torch 2.11, 2.13).

    By name, for importing them is slow. Freed by: a public mark on such parameters.
    """
    kind = type(tensor)
    if kind is torch.Tensor:
        return False
    if "ds_id" in tensor.__dict__ or "_fsdp_flattened" in tensor.__dict__:
        return True
    return kind is not torch.nn.Parameter and any(base.__name__ == "DTensor" for base in kind.__mro__)


def are_sharded(parameters: Sequence[torch.Tensor]) -> list[bool] | None:
    """Returns `is_sharded_parameter` of each; None if it is True of none, which takes a third as long to see."""
    marks = {mark for p in parameters if type(p) is not torch.Tensor for mark in p.__dict__}
    if marks.isdisjoint(("ds_id", "_fsdp_flattened")) and _PLAIN.issuperset(map(type, parameters)):
        return None
    found = list(map(is_sharded_parameter, parameters))
    return found if any(found) else None


_PLAIN = frozenset([torch.Tensor, torch.nn.Parameter])


@functools.cache
def dict_version() -> Callable[[dict[Any, Any]], int] | None:
    """Returns a function that gives a dictionary a new number whenever it was changed; None without it (torch 2.13).

    By it Dynamo sees that what it compiled for has changed. No two states of dictionaries have one number. Freed by: a
    public count of a dictionary's changes (PEP 509 was withdrawn).
    """
    from torch._C._dynamo import guards

    return getattr(guards, "dict_version", None)


def is_fsdp_unit(module: Any) -> bool:
    """Whether `fully_shard` was called on the module itself; by name, for importing FSDP is slow (torch 2.11, 2.13)."""
    return is_fsdp_unit_type(type(module))


def is_fsdp_unit_type(kind: type[Any]) -> bool:
    """Whether modules of a class are units of `fully_shard`. Freed by: as `is_fsdp_unit`."""
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the indices and values of a sparse tensor, as they are; none for other layouts (torch 2.11, 2.13).

    Freed by: public indices of a tensor that is not coalesced.
    """
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


storage_address = torch._C._storage_address  # type: ignore[attr-defined]
"""Returns `untyped_storage()._cdata`, which names the storage, without an object for it (torch 2.13).

Freed by: a public name of a storage.
"""


def storage_reference(tensor: torch.Tensor) -> Any:
    """Returns a weak reference to the tensor's storage, equal for tensors that share it (torch 2.11, 2.13).

    Freed by: weak references to storages that end when no tensor has them.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory of its own to be asked about (torch 2.11, 2.13). Freed by: a public question."""
    return bool(torch._C._has_storage(tensor))


def pytree_node(kind: type[Any]) -> Any:
    """Returns what opens a container of a type registered with torch's pytrees, None for others (torch 2.11, 2.13).

    It takes the container and returns its children and how to make one of other children. Those that torch registers
    by itself (lists, dicts) are left out. Freed by: a public `torch.utils.pytree.register_pytree_node`.
    """
    from torch.utils import _pytree

    node = _pytree.SUPPORTED_NODES.get(kind)
    if node is None or kind.__module__ in ("builtins", "collections"):
        return None

    def open_node(nest: Any) -> tuple[list[Any], Any]:
        children, context = node.flatten_fn(nest)
        return children, lambda items: node.unflatten_fn(list(items), context)

    return open_node


def mode_of_fake(tensor: Any) -> Any:
    """Returns the mode that a fake tensor belongs to (torch 2.13). Freed by: as `fake_tensor_mode`."""
    return tensor.fake_mode


def fake_traits(tensor: Any) -> tuple[Any, ...] | None:
    """Returns what an op's result takes of a fake tensor; None for another tensor or one with a value (torch 2.13).

    Where in its memory a tensor begins is not among it: results are new, or views that begin relative to it.
    Freed by: as `fake_tensor_mode`.
    """
    if type(tensor) is not _fake_tensor_class() or tensor.constant is not None or tensor.layout is not torch.strided:
        return None
    if tensor.is_neg() or tensor.is_conj() or tensor.is_inference():
        return None
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.fake_device,
        tensor.requires_grad,
    )


def may_alias(func: Any) -> bool:
    """Whether an op says it returns a view and may return something new (torch 2.13).

    Freed by: a public flag of such ops.
    """
    return bool(func.is_view) and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd)
    )


def has_same_dispatch(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ops on both tensors take the same way through the dispatcher (torch 2.13)."""
    return bool(torch._C._dispatch_key_set(a) == torch._C._dispatch_key_set(b))


class FakeTemplate:
    """Makes fake tensors with the metadata of one, inside a dispatch mode and past all others (torch 2.13).

    They belong to the mode that is asked for, whatever the one's was. A view begins where `base` does, as far on as the
    one did from its own base. Freed by: a cheap public way to make a fake tensor.
    """

    __slots__ = ("_attributes", "_cls", "_device", "_dtype", "_offset", "_shape", "_stride")

    def __init__(self, tensor: Any, base: Any = None) -> None:
        self._cls = type(tensor)
        self._attributes = {k: v for k, v in tensor.__dict__.items() if k != "fake_mode"}
        self._device = tensor.fake_device
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset() - (base.storage_offset() if base is not None else 0)

    def new(self, mode: Any) -> torch.Tensor:
        """Returns one with memory of its own."""
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            part = torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device="meta")
            return self.like(part, mode)

    def view_of(self, mode: Any, base: torch.Tensor, away: int = 0) -> torch.Tensor:
        """Returns one in the memory of `base`, `away` elements further on."""
        storage, offset = base.untyped_storage(), base.storage_offset() + self._offset + away
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            part = torch.empty(0, dtype=self._dtype, device="meta")
            return self.like(part.set_(storage, offset, self._shape, self._stride), mode)

    def like(self, part: torch.Tensor, mode: Any) -> torch.Tensor:
        """Returns one over the plain tensor `part`, which has no memory."""
        made: torch.Tensor = torch.Tensor._make_subclass(  # type: ignore[attr-defined]
            self._cls, part, False, dispatch_device=True, device_for_backend_keys=self._device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)  # type: ignore[attr-defined]
        made.__dict__.update(self._attributes, fake_mode=mode)
        return made


def deterministic_mode() -> tuple[bool, bool]:
    """Whether kernels have to be deterministic, and whether those that cannot only warn (see `_FLAGS`)."""
    return torch.are_deterministic_algorithms_enabled(), deterministic_warns_only()


def deterministic_warns_only() -> bool:
    """Whether `use_deterministic_algorithms` only warns (torch 2.11, 2.13); public, but without a type."""
    return bool(torch.is_deterministic_algorithms_warn_only_enabled())


@contextlib.contextmanager
def cpu_kernels(kernels: dict[Any, Any], *, key: str) -> Iterator[None]:
    """Has ops run these kernels at a key of the dispatcher, in this process, while the block lasts (torch 2.11, 2.13).

    Freed by: a mode that sees ops above autograd.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns where a kernel is put over another
            for op, kernel in kernels.items():
                library.impl(op.name().removeprefix("aten::"), kernel, key)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def registered(key: str) -> set[str]:
    """Returns the names of aten's ops with a kernel at a key of the dispatcher (torch 2.11, 2.13).

    Freed by: public autocast lists.
    """
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name for name in names if name.startswith("aten::")}


def overload(name: str) -> Any | None:
    """Returns the op of a registered name ("aten::sum.dim_IntList"); None if Python has none (torch 2.11, 2.13)."""
    packet, _, which = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), which or "default", None)


def is_composite(op: Any) -> bool:
    """Whether the op is made of other ops above autograd (torch 2.11, 2.13). Freed by: a public flag of such ops."""
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.CompositeImplicitAutograd)
    )


def composite(op: Any) -> Any:
    """Returns a composite op's own kernel, which calls its parts (torch 2.11, 2.13).

    `OpOverload.decompose` takes Python's decomposition where there is one. Freed by: a public name for this one.
    """
    return functools.partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)


def without_cpu_autocast() -> Any:
    """Returns a guard below which the CPU's autocast is past (torch 2.11, 2.13); autocast's own kernels use it.

    Freed by: a public guard that excludes a dispatch key.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)  # type: ignore[attr-defined]


def below_autograd() -> Any:
    """Returns a guard below which ops go to their kernels past autograd (torch 2.11, 2.13).

    Freed by: a public `torch.library` way to redispatch below autograd.
    """
    return torch._C._AutoDispatchBelowAutograd()  # type: ignore[attr-defined]


@contextlib.contextmanager
def cuda_autocast_on_cpu() -> Iterator[None]:
    """Has `torch.autocast("cuda")` of this thread enter the CPU's, with CUDA's default dtype (torch 2.11, 2.13).

    A build without CUDA would leave it disabled. Freed by: autocast for fake tensors of a device that is not there.
    """
    original, owner = torch.amp.autocast_mode.autocast.__init__, threading.get_ident()

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and threading.get_ident() == owner:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *args, **kwargs)

    torch.amp.autocast_mode.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.amp.autocast_mode.autocast.__init__ = original  # type: ignore[method-assign]


def enabled_attention() -> frozenset[str]:
    """Returns the fused attention kernels that are not turned off; public, but without types (torch 2.11, 2.13)."""
    cuda = torch.backends.cuda
    found = {
        "cudnn": cuda.cudnn_sdp_enabled,
        "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled,
    }
    return frozenset(name for name, is_enabled in found.items() if is_enabled())  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def without_global_optimizer_hooks() -> Iterator[None]:
    """Takes the step hooks that are registered for all optimizers off for the time being (torch 2.11, 2.13).

    Freed by: an optimizer that can be stepped without them.
    """
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    hooks = [(d, dict(d)) for d in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)]
    for registered, _ in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, before in hooks:
            registered.update(before)  # type: ignore[arg-type]


def register_first_post_hook(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> Any:
    """Registers a hook that runs after an optimizer's step and before its other hooks (torch 2.13).

    Freed by: `prepend=` for step hooks, which hooks of `state_dict` have.
    """
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Runs the step of an optimizer of torch's as its class has it, without hooks (torch 2.13).

    Freed by: a public name for the step inside of its hooks.
    """
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def clear_cublas_workspaces() -> None:
    """Gives the workspaces of cuBLAS back to the caching allocator; the next product makes new ones (torch 2.11, 2.13).

    Freed by: a public name for it.
    """
    torch._C._cuda_clearCublasWorkspaces()


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no storage of its own, as DTensor (torch 2.11, 2.13). Freed by: a public name for it."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(tensor))


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Sets how often a tensor counts as changed in place, its values being those of then (torch 2.11, 2.13).

    Freed by: a public way to undo a change in place.
    """
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def cuda_peak_bytes(device: torch.device) -> int:
    """Returns `max_memory_allocated` without a flat dictionary of every statistic (torch 2.11, 2.13)."""
    return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"])


def cuda_reserved_bytes(device: torch.device) -> int:
    """Returns `memory_reserved` without a flat dictionary of every statistic (torch 2.11, 2.13)."""
    return int(torch.cuda.memory_stats_as_nested_dict(device)["reserved_bytes"]["all"]["current"])


def grow_cuda_cache(nbytes: int) -> None:
    """Has the current card's allocator cache a block of so many bytes: no tensor, no kernel, no user's mode sees it.

    Freed by: hints for `caching_allocator_delete` (torch 2.11, 2.13).

    Raises:
        torch.OutOfMemoryError: if the card or the process's limit does not have them.
    """
    delete: Callable[[int], None] = torch.cuda.caching_allocator_delete
    delete(torch.cuda.caching_allocator_alloc(nbytes))


def has_expandable_segments() -> bool:
    """Whether the CUDA allocator of this process grows its segments, as it was told by whom- and however.

    Private: `torch.cuda.memory._snapshot`, seen working with 2.11. False where it does not say.
    """
    return bool(torch.cuda.memory._snapshot().get("allocator_settings", {}).get("expandable_segments", False))


def _partitioners() -> Any:
    from torch._functorch import partitioners

    return partitioners


def joint_graph_facts(graph: Any, num_forward_results: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns what a joint graph's forward and backward return (nodes), and its placeholders of tangents (torch 2.13).

    Freed by: a documented form of joint graphs.
    """
    partitioners = _partitioners()

    results = [n for out in graph.find_nodes(op="output") for n in torch.utils._pytree.arg_tree_leaves(*out.args)]
    tangents = [n for n in graph.find_nodes(op="placeholder") if partitioners._is_tangent(n)]
    return results[:num_forward_results], results[num_forward_results:], tangents


def keeps_tangents() -> bool:
    """Whether what a compiled backward is given stays until it ends, whoever reads it: so until torch 2.11.

    Later a backward takes it in a list that it empties (torch 2.13). Freed by: a torch before that being too old.
    """
    return not hasattr(torch.autograd.Function, "boxed_grads_call")


def tidy_joint_graph(module: Any) -> None:
    """Takes what nobody reads and what is there twice out of a joint graph; marks what torch has to save (torch 2.13).

    Marks are `node.meta["recompute"]`: results of collectives, of ops with effects, and sources of changes in place.
    Freed by: a partitioner of torch that is told what to save.
    """
    from torch._functorch import config

    partitioners = _partitioners()

    module.graph.eliminate_dead_code()
    if config.cse:
        module.graph = partitioners.fx_graph_cse(module.graph)
    partitioners.force_save_collectives(module)
    partitioners.force_save_effectful_ops(module)
    partitioners.force_save_bw_mutation_src(module)


def must_be_saved(node: Any) -> bool:
    """Whether torch marked a node's result as one to save (torch 2.13)."""
    from torch.utils.checkpoint import CheckpointPolicy

    return bool(node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE)


@functools.cache
def overwriting(op: Any) -> tuple[Any, str | None] | None:
    """Returns the overload of an op of one result that writes it over what it is given, and the argument to write over.

    None for the argument: its first. None at all if there is no such overload, or torch makes up one of the op itself
    and a copy (torch 2.13). Freed by: a public list of structured kernels.
    """
    if not isinstance(op, torch._ops.OpOverload) or len(op._schema.returns) != 1 or op._schema.is_mutable:
        return None

    def alike(packet: Any, is_written: Callable[[Any], bool]) -> Any | None:
        asked = [(a.name, str(a.type)) for a in op._schema.arguments]
        for overload in (getattr(packet, name) for name in packet.overloads()):
            arguments = overload._schema.arguments
            found = [(a.name, str(a.type)) for a in arguments if not a.is_out]
            if found == asked and any(map(is_written, arguments)):
                return overload
        return None

    out = alike(op.overloadpacket, lambda a: a.is_out)
    if out is not None and torch._C._dispatch_has_kernel_for_dispatch_key(out.name(), "CPU"):
        return out, next(a.name for a in out._schema.arguments if a.is_out)
    packet = getattr(getattr(torch.ops, op.namespace), f"{op._schema.name.split('::')[-1]}_", None)
    in_place = None if packet is None else alike(packet, lambda a: a.is_write and a.name == "self")
    return None if in_place is None else (in_place, None)


def belongs_to_backward(node: Any) -> bool:
    """Whether a node of a joint graph changes something in place and has to do so in backward (torch 2.13)."""
    partitioners = _partitioners()

    return bool(partitioners._must_be_in_backward(node))


def split_joint_graph(
    module: Any, held: list[Any], rerun_random: list[Any], *, num_forward_results: int
) -> tuple[Any, Any]:
    """Returns forward and backward of a tidied joint graph of which `held` nodes are saved (torch 2.11, 2.13).

    What backward needs of the rest is in it once more. Sizes are always saved, and so are parameters and inputs. torch
    2.11 has neither opaque values nor symbols that only an assertion reads.

    Args:
        rerun_random: nodes that draw random numbers and run again: both runs start from the same state.

    Freed by: a partitioner of torch that is told what to save.
    """
    partitioners = _partitioners()
    from torch.utils.checkpoint import CheckpointPolicy

    for node in module.graph.nodes:
        node.meta.pop("recompute", None)
    for node in rerun_random:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    placeholders = [n for n in module.graph.find_nodes(op="placeholder") if not partitioners._is_tangent(n)]
    placeholders = [n for n in placeholders if not partitioners._is_bwd_seed_offset(n)]
    symbols = [
        n
        for n in module.graph.nodes
        if partitioners.is_sym_node(n)
        and not n.meta.get("reads_tangents")
        and not getattr(partitioners, "_is_assert_only_symbool", _never)(n)
    ]
    is_opaque = getattr(partitioners, "is_opaque_node", _never)
    opaque = {} if is_opaque is _never else {"saved_opaque_nodes": [n for n in placeholders if is_opaque(n)]}
    tensors = [n for n in placeholders if not partitioners.is_sym_node(n) and not is_opaque(n)]
    forward, backward = partitioners._extract_fwd_bwd_modules(
        module,
        [*tensors, *held],
        saved_sym_nodes=symbols,
        num_fwd_outputs=num_forward_results,
        **opaque,
    )
    backward.graph.eliminate_dead_code(
        is_impure_node=lambda n: n.op in ("placeholder", "output") or belongs_to_backward(n)
    )
    if rerun_random:
        from torch._functorch import config

        before = set(backward.graph.nodes)
        # On a GPU torch would have each draw from a generator of its own, for CUDA graphs: other masks than plain's.
        with config.patch(graphsafe_rng_functionalization=False):
            forward, backward = partitioners.functionalize_rng_ops(module, forward, backward, len(symbols))
        # Each runs from a state that it is given, by another name, where it stood: it gets its own name back.
        again = [n for n in backward.graph.nodes if n.op == "call_function" and n not in before]
        gone = before.difference(backward.graph.nodes)
        names = [n.name for n in module.graph.nodes if n.name in {g.name for g in gone}]
        for node, name in zip(again, names, strict=True):
            node._rename(name)
    return forward, backward


def _never(node: Any) -> bool:
    """What torch 2.11 cannot ask of a node is not so (torch 2.11, 2.13)."""
    return False


def finish_split(forward: Any, backward: Any) -> tuple[Any, Any]:
    """Returns the two graphs with results of one op taken apart early and generators passed in (torch 2.13).

    Freed by: as `split_joint_graph`.
    """
    partitioners = _partitioners()

    forward, backward = partitioners.raise_getitems(forward), partitioners.raise_getitems(backward)
    return (
        partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False),
        partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True),
    )


def draw_from_own_card(module: Any) -> None:
    """Has a graph's ops that run from a kept state take it from, and put it into, their own card's generator.

    torch's ops for that use the current card's: a model on another one would draw other masks in backward. Inductor
    makes a graph's card the current one by itself (torch 2.11, 2.13). Freed by: `run_and_save_rng_state` that looks at
    the device of what it runs.
    """
    from torch._prims import rng_prims

    kept = (rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state)
    for node in module.graph.nodes:
        if node.target in kept:
            node.args, node.target = (node.target, *node.args), _on_own_card
    module.recompile()


def _on_own_card(run: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what a call returns; the card of its first tensor on a GPU is the current one meanwhile (public)."""
    cards = [t.device for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.is_cuda]
    if not cards and (device := kwargs.get("device")) is not None and torch.device(device).type == "cuda":
        cards = [device]
    with torch.cuda.device(cards[0]) if cards else contextlib.nullcontext():
        return run(*args, **kwargs)


def torch_partition(module: Any, inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Returns forward and backward as torch itself divides a joint graph (torch 2.13).

    Public as `functorch.compile.min_cut_rematerialization_partition`.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found: tuple[Any, Any] = min_cut_rematerialization_partition(module, inputs, **kwargs)
    return found


def inductor_fused_reads() -> int:
    """Returns from how many stored values inductor makes a value again for each of its readers (torch 2.11, 2.13).

    Freed by: a documented `realize_reads_threshold`.
    """
    from torch._inductor import config

    return int(config.realize_reads_threshold)


def inductor_reads_anything(target: Any) -> bool:
    """Whether inductor makes an op as loops that compute on the way what they read (torch 2.11, 2.13).

    Not so: kernels of libraries and templates (products, convolutions, attention), whose inputs are stored first.
    Freed by: a tag of ops that inductor lowers to loops.
    """
    from torch._inductor import lowering

    is_loop = target in lowering.lowerings and target not in lowering.fallbacks
    return is_loop and target not in lowering.needs_realized_inputs


def _inductor_order(key: str) -> Any:
    """Returns a pass for inductor's scheduler that has kernels of libraries run in the graph's order (torch 2.13).

    What is made element by element between two of them stays there: fused with what ran before, it would be stored
    all the time until it is read. None where this torch has no such passes. `key`: its identity in torch's caches.
    Freed by: an order of a graph's ops that inductor keeps.
    """
    from torch._inductor import custom_graph_pass
    from torch._inductor.dependencies import WeakDep

    if not hasattr(custom_graph_pass, "CustomSchedulerPass"):
        return None

    class Order(custom_graph_pass.CustomSchedulerPass):
        def __call__(self, nodes: Any) -> Any:
            last = None
            for node in nodes:
                is_kernel, names = node.is_extern() or node.is_template(), list(node.get_buffer_names())
                if last is not None and names and (is_kernel or not node.is_reduction()):
                    node.add_fake_dep(WeakDep(last, mutating_buf=node.get_name(), is_fake=True))
                if is_kernel and names:
                    last = names[0]
            if nodes:
                nodes[0].scheduler.compute_ancestors()
            return nodes

        def uuid(self) -> Any:
            return f"{key} in order"

        def __reduce__(self) -> tuple[Any, ...]:
            return str, (self.uuid(),)

    return Order()


def inductor_backend(
    partition: Any, key: str, options: dict[str, Any], wrote: Any = None, *, runs: bool = True, keeps_order: bool = True
) -> Any:
    """Returns a backend for `torch.compile`: inductor, dividing joint graphs by `partition` (torch 2.13).

    Args:
        key: names what `partition` does, in inductor's cache of graphs. options: of inductor. wrote: called for each
            forward and each backward, when it is compiled: with a number that both have, the names of its inputs and
            results, examples of its inputs, and the Python code that inductor wrote for it. runs: whether that code
            runs; if not, no kernel is compiled, and the graphs run op by op. keeps_order: whether kernels run in the
            graphs' order.

    Freed by: a public `custom_partitioner_fn` in `torch.compile(options=...)`, with torch's caches keyed by it, and a
    public way to what was compiled.
    """
    from unittest import mock

    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import IRNode
    from torch._inductor.virtualized import V

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
            return partition(gm, joint_inputs, **kwargs)  # type: ignore[no-any-return]

        def uuid(self) -> Any:
            return key

        def __reduce__(self) -> tuple[Any, ...]:
            return str, (key,)  # all that the cache's key needs

    patches = {**options, "custom_partitioner_fn": Partitioner()}
    if keeps_order and (order := _inductor_order(key)) is not None:
        patches["_pre_fusion_custom_pass"] = order

    def strides(result: Any) -> tuple[int, ...] | None:
        if not isinstance(result, IRNode) or not result.has_tensor_output():
            return None
        return tuple(V.graph.sizevars.optimization_hint(n) for n in result.get_layout().stride)

    def compile_inner(module: Any, inputs: Any, **kwargs: Any) -> Any:
        names = tuple(n.name for n in module.graph.find_nodes(op="placeholder"))
        (output,) = module.graph.find_nodes(op="output")
        results = tuple(getattr(n, "name", "") for n in output.args[0])
        number, codes = kwargs["graph_id"], list[str]()

        def stop(code: str) -> None:
            if not isinstance(V.graph, GraphLowering):
                return  # from the cache: it is compiled
            codes.append(code)
            context = torch._guards.TracingContext.try_get()
            if context is not None and context.output_strides is not None:
                # Backward is compiled for values as forward lays them out.
                context.output_strides.extend(map(strides, V.graph.graph_outputs or ()))
            raise RuntimeError("the code is written, and is not to run")

        with contextlib.ExitStack() as stack:
            made: Any
            own: Any = None if runs else copy.deepcopy(module)
            if not runs:
                stack.enter_context(mock.patch.object(GraphLowering, "save_output_code", stop))
            try:
                made = compile_fx_inner(module, inputs, **kwargs)
                codes = [getattr(made, "source_code", "")]
            except Exception:
                if not codes:
                    raise
                made = make_boxed_func(own)
        if wrote is not None:
            wrote(number, names, results, tuple(inputs), codes[0])
        return made

    def compile_graph(module: Any, inputs: Any) -> Any:
        # The cache of autograd graphs would answer without asking the partitioner.
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(module, inputs, inner_compile=compile_inner, config_patches=patches)

    return compile_graph


def inductor_host_code(source: str) -> Any:
    """Returns what the Python code that inductor wrote for a graph calls, its kernels doing nothing (torch 2.13).

    It takes a list of inputs, lets them go as it uses them, and returns the results. Fake tensors will do.
    Freed by: a public plan of a compiled graph's memory.
    """
    from unittest import mock

    from torch._inductor import async_compile

    class Idle:
        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

    def empty(device: str) -> Any:
        return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)

    def reinterpret(base: Any, size: Any, stride: Any, offset: int = 0) -> Any:
        return base.as_strided(size, stride, base.storage_offset() + offset)

    scope: dict[str, Any] = {"__name__": "host_code"}
    with mock.patch.object(async_compile, "AsyncCompile", Idle):
        exec(compile(source, "<inductor>", "exec"), scope)
    scope |= {f"empty_strided_{device}": empty(device) for device in ("cpu", "cuda")}
    scope |= {"reinterpret_tensor": reinterpret, "assert_size_stride": Idle(), "assert_alignment": Idle()}
    return scope["call"]


def aot_eager_backend(partition: Any) -> Any:
    """Returns a backend for `torch.compile`: `aot_eager`, dividing joint graphs by `partition` (torch 2.13).

    Freed by: a public way to build on `aot_eager`.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    return aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True
    )


@contextlib.contextmanager
def compiling_again() -> Iterator[None]:
    """Has Dynamo compile code that it compiled before for other backends, however often (torch 2.13).

    A frame behind a graph break is compiled for each plan, and after eight Dynamo would run it eagerly without a word.
    Freed by: a limit that counts by backend.
    """
    from torch._dynamo import config

    with config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
        yield


_DYNAMIC_MARKS = ("_dynamo_weak_dynamic_indices", "_dynamo_propagated_dynamic_indices")


def dynamic_marks(tensor: torch.Tensor) -> dict[str, set[int]]:
    """Returns which sizes of a tensor are marked as ones that change, by the names of the marks (torch 2.11, 2.13).

    A compiled step marks what it saves for backward, a batch's own tensors too. Torch compiles otherwise for these.
    Freed by: marks that are kept beside a tensor.
    """
    return {name: set(getattr(tensor, name)) for name in _DYNAMIC_MARKS if hasattr(tensor, name)}


def set_dynamic_marks(tensor: torch.Tensor, marks: dict[str, set[int]]) -> None:
    """Gives a tensor the marks that it had; see `dynamic_marks`."""
    for name in _DYNAMIC_MARKS:
        if name in marks:
            setattr(tensor, name, set(marks[name]))
        elif hasattr(tensor, name):
            delattr(tensor, name)


def compiled_call(module: Any) -> Any | None:
    """Returns what `nn.Module.compile` put in place of a module's call, None if nothing (torch 2.11, 2.13)."""
    return getattr(module, "_compiled_call_impl", None)


@contextlib.contextmanager
def calling(module: Any, call: Any | None) -> Iterator[None]:
    """Has a module called by `call` inside the block; None: by itself (torch 2.11, 2.13)."""
    before = compiled_call(module)
    set_compiled_call(module, call)
    try:
        yield
    finally:
        set_compiled_call(module, before)


def set_compiled_call(module: Any, call: Any | None) -> None:
    """Puts `call` where `nn.Module.compile` puts what it compiled; None takes it away (torch 2.11, 2.13).

    Freed by: `nn.Module.compile` that takes a callable.
    """
    module._compiled_call_impl = call


def own_module_call(name: str) -> Any:
    """Returns a function that calls a module with its hooks, past what `nn.Module.compile` put in place (torch 2.13).

    It is `nn.Module._call_impl` by another code of this name, without a frame around it: at a graph break each frame is
    broken and compiled by itself. Freed by: `nn.Module.compile` that compiles anew each time.
    """
    return _with_own_code(torch.nn.Module._call_impl, name, co_filename=__file__)


def own_module_forward(module: Any, name: str) -> Any | None:
    """Returns the `forward` of a module's class by another code of this name; None if the module's is another.

    Torch compiles no frame of its own around it, so neither may we: each would be broken once more at a graph break.
    """
    from types import FunctionType

    forward = getattr(type(module), "forward", None)
    if not isinstance(forward, FunctionType) or "forward" in vars(module) or forward.__module__.startswith("torch."):
        return None
    return _with_own_code(forward, name)


def _with_own_code(function: Any, name: str, **changes: Any) -> Any:
    """Returns a function with a code of its own, of this name."""
    from types import FunctionType

    code = function.__code__.replace(co_name=name, **changes)
    own = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    own.__dict__.update(vars(function))
    return own


def has_call_hooks(module: Any) -> bool:
    """Whether calling a module runs more than its forward (torch 2.11, 2.13)."""
    from torch.nn.modules import module as modules

    names = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
    return any(getattr(module, n) or getattr(modules, f"_global{n}") for n in names)


def size_hint(size: Any) -> int:
    """Returns a number for a size of a graph's value that may be symbolic (torch 2.13).

    Freed by: a public hint of a `torch.SymInt`.
    """
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if hint is not None else 1


def flop_formula(target: Any) -> Any | None:
    """Returns torch's count of FLOPs for an overload, a function of its arguments (torch 2.11, 2.13)."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(getattr(target, "_overloadpacket", None))


def _stack_of_modes() -> tuple[Any, ...]:
    return tuple(map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack())))


def _set_stack_of_modes(modes: tuple[Any, ...]) -> None:
    for mode in reversed(_stack_of_modes()):
        torch._C._pop_torch_dispatch_stack(getattr(mode, "_mode_key", None))
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


def put_on_below(mode: Any) -> None:
    """Puts a dispatch mode on, below those that are on. Freed by: as `user_modes`."""
    _set_stack_of_modes((mode, *_stack_of_modes()))


def put_off(mode: Any) -> None:
    """Takes off a dispatch mode that `put_on_below` has put on, wherever it stands. Freed by: as `user_modes`."""
    stack = _stack_of_modes()
    if stack and stack[-1] is mode:
        torch._C._pop_torch_dispatch_stack(None)
    else:
        _set_stack_of_modes(tuple([m for m in stack if m is not mode]))


def _set_function_modes(modes: tuple[Any, ...]) -> None:
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def _set_saved_tensors_hooks(top: Any) -> None:
    graph = torch._C._autograd
    while (now := graph._top_saved_tensors_default_hooks(True)) is not None and now != top:
        graph._pop_saved_tensors_default_hooks()


def _set_refusal_of_hooks(message: str | None) -> None:
    graph = torch._C._autograd
    graph._saved_tensors_hooks_enable() if message is None else graph._saved_tensors_hooks_disable(message)


def _autocast_nesting() -> int:
    both = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    depth, _ = map(operator.methodcaller("__call__"), both)  # in C: no interrupt comes between the two
    return int(depth)


def _set_autocast_nesting(depth: int) -> None:
    torch.clear_autocast_cache()
    for _ in range(_autocast_nesting() - depth):
        torch.autocast_decrement_nesting()


def _stop_profiler(was_on: bool) -> None:
    if not was_on:
        torch._C._autograd._disable_profiler()
        torch.autograd.profiler._run_on_profiler_stop()  # type: ignore[no-untyped-call]


def _attribute(owner: Any, name: str) -> tuple[Any, Any]:
    return functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)


def _of_device(get: Any, change: Any) -> Iterator[tuple[Any, Any]]:
    for device_type in ("cpu", "cuda"):
        yield functools.partial(get, device_type), functools.partial(change, device_type)


@functools.cache
def _thread_settings() -> tuple[tuple[Any, Any], ...]:
    """Returns how to read and how to set each thing that a context manager of torch or of this file sets."""
    from torch.utils import _python_dispatch

    graph = torch._C._autograd
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    mode_flags = [name for name in vars(_python_dispatch) if name.startswith("_is_in_") and name.endswith(_MODE_FLAGS)]
    return (
        (graph._profiler_enabled, _stop_profiler),
        (_stack_of_modes, _set_stack_of_modes),
        *(_attribute(_python_dispatch, name) for name in mode_flags),
        (lambda: user_modes()[0], _set_function_modes),
        (torch._C._get_torch_function_state, torch._C._set_torch_function_state),  # type: ignore[attr-defined]
        (
            lambda: (_own_hooks(), torch.autograd.graph.disable_saved_tensors_hooks),
            lambda noted: _take_off([h for h in _own_hooks() if h not in noted[0]]),
        ),
        (lambda: graph._top_saved_tensors_default_hooks(True), _set_saved_tensors_hooks),
        (graph._saved_tensors_hooks_get_disabled_error_message, _set_refusal_of_hooks),
        (torch.is_grad_enabled, torch._C._set_grad_enabled),
        *_of_device(torch.is_autocast_enabled, torch.set_autocast_enabled),
        *_of_device(torch.get_autocast_dtype, torch.set_autocast_dtype),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (_autocast_nesting, _set_autocast_nesting),
        _attribute(torch.amp.autocast_mode.autocast, "__init__"),
        (global_forward_hooks, _put_global_forward_hooks),
        _attribute(parametrize, "_cache_enabled"),
        _attribute(parametrize, "_cache"),
        (lambda: logger.level, logger.setLevel),
        *_FLAGS,
    )


_MODE_FLAGS = ("torch_dispatch_mode", "mode_without_ignore_compile_internals")


def thread_settings() -> tuple[Any, ...]:
    """Returns what torch's context managers set, on this thread and in torch's modules, as it is now (torch 2.13).

    An exception may come between `__enter__` and the block, or between the block and `__exit__`: then nobody leaves it.
    Guards that live in C++ and generators end when they are forgotten; what is here does not.
    Freed by: context managers of torch that do.
    """
    return tuple([get() for get, _ in _thread_settings()])


def restore_thread_settings(settings: tuple[Any, ...]) -> None:
    """Has everything as `thread_settings` returned it. Freed by: as that."""
    for (get, change), wanted in zip(_thread_settings(), settings, strict=True):
        if get() != wanted:
            change(wanted)


@contextlib.contextmanager
def settings_put_back_on_error() -> Iterator[None]:
    """Has an error leave no mode, hook or flag that was set inside, for who goes on after it. Freed by: as those."""
    before = thread_settings()
    try:
        yield
    except BaseException:
        restore_thread_settings(before)
        raise
