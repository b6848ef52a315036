"""Replaces a module's forward, or another of its methods, in place, undoably.

An instance attribute `forward` shadows the class's method. The attribute is a callable object that refers to its module
weakly (no reference cycle: the model is freed by reference count) and follows it through `deepcopy` and `pickle`; a
closure would silently run the original module from the copy. `state_dict`, `named_modules`, `isinstance` and hooks are
unaffected; hooks of the module itself run once, outside of the patched forward.
"""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Runner = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a call of a `PatchedForward`, or a `PatchedMethod`, with these arguments."""


_FUNCTION_ATTRIBUTES = frozenset(["__code__", "__defaults__", "__globals__", "__kwdefaults__", "__name__"])


class PatchedForward:
    """Replacement of a module's forward, run by `runner`.

    Attributes:
        settings: plain data for the runner; copied with the module. Its `state` says whether calls are numbered.
        previous: the instance-level `forward` that was in place before (accelerate's hooks set one), or None.
        removed: whether it was unpatched; a wrapper that somebody put around it may still call it.
        prepared: what the runner has worked out for all calls, if anything, without a reference to this patch; a copy
            works it out for itself.
        kind: the module's class, if a forward is a call of the class's function with the module, as usual.
    """

    name = "forward"

    def __init__(self, module: nn.Module, runner: Runner, settings: Any, previous: Any = None) -> None:
        self._module = weakref.ref(module)
        self.runner = runner
        self.settings = settings
        self.previous = previous
        self.removed = False
        self.prepared: Any = None
        is_function = isinstance(inspect.getattr_static(type(module), "forward", None), types.FunctionType)
        self.kind = type(module) if is_function and previous is None else None
        self._copies: weakref.WeakKeyDictionary[nn.Module, PatchedForward] = weakref.WeakKeyDictionary()

    @property
    def module(self) -> nn.Module:
        """The module that this forward belongs to."""
        module = self._module()
        assert module is not None, "a module's forward outlived it"
        return module

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward that was in place before."""
        module = self._module()
        if type(module) is self.kind:
            return self.kind.forward(module, *args, **kwargs)  # type: ignore[union-attr]
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return class_forward(self.module)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward as planned; without grad mode, runs the previous forward, calls numbered or not."""
        if not self.removed and (torch.is_grad_enabled() or self.settings.state.counts_calls):
            return self.runner(self, args, kwargs)
        module = self._module()  # from here on generation's hot path: `original` without its call
        if type(module) is self.kind:
            return self.kind.forward(module, *args, **kwargs)  # type: ignore[union-attr]
        return self.original(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        return class_forward(self.module) if self.previous is None else self.previous

    @property
    def __func__(self) -> Callable[..., Any]:
        """This forward as a function of the module and its arguments.

        accelerate wraps `forward.__func__` and binds the result to the module again; with the class's function the plan
        would be lost at this module. It has a signature and no `__wrapped__`, so that unwrapping stops here.
        """

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.of(module)(*args, **kwargs)

        own = inspect.signature(class_forward(self.module))
        first = inspect.Parameter("module", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = own.replace(parameters=[first, *own.parameters.values()])  # type: ignore[attr-defined]
        forward._patched = self  # type: ignore[attr-defined]
        return forward

    def of(self, module: nn.Module) -> PatchedForward:
        """Returns itself for its own module; for a deep copy of the module, a patch that shares the copy's state."""
        own = self._module()
        if module is own:
            return self
        found = self._copies.get(module)
        if found is None:
            memo: dict[int, Any] = {} if own is None else {id(own): module}
            inside = (m.__dict__.get("forward") for m in module.modules())
            states = (
                f.settings.state for f in inside if isinstance(f, PatchedForward) and hasattr(f.settings, "state")
            )
            state = next(states, None)
            if state is not None and hasattr(self.settings, "state"):
                memo[id(self.settings.state)] = state
            settings, previous = copy.deepcopy((self.settings, self.previous), memo)
            found = self._copies[module] = PatchedForward(module, self.runner, settings, previous)
            found.removed = self.removed
        return found

    def __getattr__(self, name: str) -> Any:
        if name in _FUNCTION_ATTRIBUTES:  # torch.export and fx inspect forward as a method
            return getattr(self.__wrapped__, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedForward:
        module = memo.get(id(self.module))
        if module is None:  # copied without its module: keeps the one it has
            return self
        return PatchedForward(
            module, self.runner, copy.deepcopy(self.settings, memo), copy.deepcopy(self.previous, memo)
        )

    def __reduce__(self) -> Any:
        return PatchedForward, (self.module, self.runner, self.settings, self.previous)


class LikeMethod:
    """What is asked of a method, its name say, is answered by the one that `__wrapped__` is."""

    def __getattr__(self, name: str) -> Any:
        if name in _FUNCTION_ATTRIBUTES or name in ("__qualname__", "__self__", "__func__"):
            return getattr(self.__wrapped__, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class PatchedMethod(LikeMethod):
    """Replacement of another method of a module, run by `runner`; follows its module through `deepcopy` and `pickle`.

    Attributes:
        name: of the method.
        settings, previous, removed: as those of `PatchedForward`.
    """

    kind = None

    def __init__(self, module: nn.Module, runner: Runner, settings: Any, name: str, previous: Any = None) -> None:
        self._module = weakref.ref(module)
        self.runner = runner
        self.settings = settings
        self.name = name
        self.previous = previous
        self.removed = False

    @property
    def module(self) -> nn.Module:
        """The module that this method belongs to."""
        module = self._module()
        assert module is not None, "a module's method outlived it"
        return module

    @property
    def __wrapped__(self) -> Any:
        return getattr(type(self.module), self.name).__get__(self.module) if self.previous is None else self.previous

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method that was in place before."""
        return self.__wrapped__(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method as planned; without grad mode, as it was."""
        if self.removed or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        return self.runner(self, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedMethod:
        module = memo.get(id(self.module))
        if module is None:  # copied without its module: keeps the one it has
            return self
        settings, previous = copy.deepcopy((self.settings, self.previous), memo)
        return PatchedMethod(module, self.runner, settings, self.name, previous)

    def __reduce__(self) -> Any:
        return PatchedMethod, (self.module, self.runner, self.settings, self.name, self.previous)


Patched = PatchedForward | PatchedMethod


def class_forward(module: nn.Module) -> Callable[..., Any]:
    """Returns the forward of the module's class, bound as attribute access binds it.

    `type(module).forward(module, ...)` would pass the module to a `staticmethod` or `classmethod` as an argument.
    """
    kind = type(module)
    for base in kind.__mro__:
        if "forward" in base.__dict__:
            found = base.__dict__["forward"]
            return found.__get__(module, kind) if hasattr(found, "__get__") else found  # type: ignore[no-any-return]
    raise AttributeError(f"{kind.__name__} has no forward")


def patch_all(
    forwards: Iterable[tuple[nn.Module, Runner, Any]], methods: Iterable[tuple[nn.Module, Runner, Any, str]] = ()
) -> list[Patched]:
    """Patches forwards and other methods of modules, with runner and settings (and name): all, or none if one fails."""
    patched: list[Patched] = []
    try:
        for module, runner, settings in forwards:
            patched.append(PatchedForward(module, runner, settings, module.__dict__.get("forward")))
            module.__dict__["forward"] = patched[-1]
        for module, runner, settings, name in methods:
            patched.append(PatchedMethod(module, runner, settings, name, module.__dict__.get(name)))
            module.__dict__[name] = patched[-1]
    except BaseException:
        while patched:
            unpatch(patched.pop())
        raise
    return patched


def find_patch(module: nn.Module) -> PatchedForward | None:
    """Returns a module's patched forward, also if it was wrapped since (accelerate); None once it was removed."""
    forward = module.__dict__.get("forward")
    while forward is not None and not isinstance(forward, PatchedForward):
        patched = getattr(forward, "_patched", None)
        forward = patched.of(module) if patched is not None else getattr(forward, "__wrapped__", None)
    return None if forward is None or forward.removed else forward


def patched_methods(module: nn.Module) -> list[PatchedMethod]:
    """Returns the patched methods of a module, but for its forward."""
    found = [value for value in module.__dict__.values() if isinstance(value, PatchedMethod)]
    return [method for method in found if not method.removed]


def unpatch(patched: Patched) -> None:
    """Restores the previous forward or method; one that was wrapped since stays in place and calls the previous.

    If the module was freed, there is nothing to restore.
    """
    module = patched._module()
    if module is not None and module.__dict__.get(patched.name) is patched:
        if patched.previous is None:
            del module.__dict__[patched.name]
        else:
            module.__dict__[patched.name] = patched.previous
    patched.removed = True  # last: a patch that is marked is not found again, and this may be interrupted


def repatch(patched: PatchedForward) -> None:
    """Undoes `unpatch`."""
    patched.removed = False
    if find_patch(patched.module) is not patched:
        patched.module.__dict__["forward"] = patched
