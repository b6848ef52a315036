"""Methods other than `forward` that a step calls on the model or its parts, from outside of any call.

Found where an op runs, or a module is called, outside of all calls: the outermost function on the stack that is a
method of one of the model's modules. Then the step is captured once more, with a note of where their calls begin and
end.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from recoup.capture import step
from recoup.runtime.patch import LikeMethod

_LOOKS_AT_VARIABLES = frozenset({"locals", "vars", "eval", "exec"})
Method = tuple[str, str]
"""Dotted path of a module, and the method's name."""


class MethodFinder:
    """Looks out for methods that ops run in, outside of all calls.

    Args:
        found: those that were found, which it adds to.
    """

    def __init__(self, model: nn.Module, found: dict[Method, None]) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._methods: dict[Any, frozenset[str]] = {
            kind: _methods_of(kind) for kind in {type(m) for m in model.modules()}
        }
        self._names = {name for names in self._methods.values() for name in names}
        self._found = found

    def look(self) -> None:
        """Called where an op runs, or a module is called, outside of all calls."""
        outermost = None
        for frame in _frames():
            name = frame.f_code.co_name
            module = _first_argument(frame) if name in self._names else None
            path = self._paths.get(id(module))
            if path is not None and name in self._methods.get(type(module), ()):
                outermost = path, name
        if outermost is not None:
            self._found[outermost] = None


def _frames() -> Iterator[types.FrameType]:
    """Yields the frames on the stack, the innermost first, up to where the step was called."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != step.__file__:
        yield frame
        frame = frame.f_back


def _first_argument(frame: types.FrameType) -> Any:
    """Returns what a function was handed first; None if it takes nothing, or looks at its variables itself."""
    code = frame.f_code
    if not code.co_argcount or not _LOOKS_AT_VARIABLES.isdisjoint(code.co_names):
        return None
    variables = frame.f_locals
    found = variables.get(code.co_varnames[0])
    if type(variables) is dict and code.co_flags & inspect.CO_OPTIMIZED:
        variables.clear()  # a copy, which would keep the function's tensors alive (before Python 3.13)
    return found


def _methods_of(kind: type[nn.Module]) -> frozenset[str]:
    """Returns the names of the plain methods that a class of modules has besides forward."""
    own = itertools.takewhile(lambda base: base is not nn.Module, kind.__mro__)
    names = {name for base in own for name, value in vars(base).items() if isinstance(value, types.FunctionType)}
    return frozenset(name for name in names if name != "forward" and not hasattr(nn.Module, name))


class NotedMethod(LikeMethod):
    """A method while it is noted when its calls begin and end."""

    def __init__(self, method: Callable[..., Any], begin: Callable[..., Any], end: Callable[[Any], None]) -> None:
        self.__wrapped__ = self._method = method
        self._begin = begin
        self._end = end

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method."""
        call = self._begin(args, kwargs)
        try:
            return self._method(*args, **kwargs)
        finally:
            if call is not None:
                self._end(call)
