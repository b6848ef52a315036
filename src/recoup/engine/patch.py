"""Changing what a module's forward does, in place and undoably.

An instance attribute `forward` shadows the class's method. The attribute is a callable object that holds its module
weakly (no reference cycle: the model is freed by reference count) and follows the module through `deepcopy` and
`pickle` - a closure there would silently run the original module from the copy. `state_dict`, `named_modules`,
`isinstance` and hooks see the module they knew; hooks of the module itself run once, outside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

Runner = Callable[["PatchedForward", tuple[Any, ...], dict[str, Any]], Any]


_FUNCTION_ATTRIBUTES = frozenset(["__code__", "__defaults__", "__func__", "__globals__", "__kwdefaults__", "__name__"])


class PatchedForward:
    """A module's forward, run by `runner`.

    Attributes:
        settings: plain data for the runner; copied with the module.
        previous: an instance-level `forward` that was there before (accelerate's hooks put one), chained.
    """

    def __init__(self, module: nn.Module, runner: Runner, settings: Any, previous: Any = None) -> None:
        self._module = weakref.ref(module)
        self.runner = runner
        self.settings = settings
        self.previous = previous

    @property
    def module(self) -> nn.Module:
        """The module this forward belongs to."""
        module = self._module()
        assert module is not None, "a module's forward outlived it"
        return module

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What forward was before."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        module = self.module
        return type(module).forward(module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward the planned way."""
        return self.runner(self, args, kwargs)

    @property
    def __wrapped__(self) -> Any:
        if self.previous is not None:
            return self.previous
        module = self.module
        return type(module).forward.__get__(module)

    def __getattr__(self, name: str) -> Any:
        if name in _FUNCTION_ATTRIBUTES:  # torch.export and fx look at forward as at the method it stands for
            return getattr(self.__wrapped__, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedForward:
        module = memo.get(id(self.module))
        if module is None:  # copied apart from its module: stays with the one it has
            return self
        import copy

        return PatchedForward(
            module, self.runner, copy.deepcopy(self.settings, memo), copy.deepcopy(self.previous, memo)
        )

    def __reduce__(self) -> Any:
        return PatchedForward, (self.module, self.runner, self.settings, self.previous)


def patch(module: nn.Module, runner: Runner, settings: Any) -> PatchedForward:
    """Puts a `PatchedForward` in place and returns it."""
    patched = PatchedForward(module, runner, settings, module.__dict__.get("forward"))
    module.__dict__["forward"] = patched
    return patched


def unpatch(patched: PatchedForward) -> None:
    """Restores what was there before; only if `patched` is still the one in place."""
    module = patched.module
    if module.__dict__.get("forward") is patched:
        if patched.previous is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = patched.previous
