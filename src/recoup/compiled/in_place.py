"""A model whose modules are called compiled, and the way back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from recoup import _torch
from recoup.compiled.recording import Calls


class CompiledModel:
    """A model compiled in place by a plan; `remove` has it run as before."""

    def __init__(self, model: nn.Module, calls: Calls) -> None:
        self.model = model
        self.calls = calls
        self._before = {module: _torch.compiled_call(module) for module in calls}
        self.put()

    def put(self) -> None:
        """Puts the compiled calls in place."""
        for module, call in self.calls.items():
            _torch.set_compiled_call(module, call)

    def remove(self) -> None:
        """Takes the compiled calls off; what was before is there again."""
        for module, call in self.calls.items():
            if _torch.compiled_call(module) is call:
                _torch.set_compiled_call(module, self._before[module])

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Runs the model as before inside the block."""
        with calling(self._before):
            yield


@contextlib.contextmanager
def calling(calls: Calls) -> Iterator[None]:
    """Has modules called by these calls inside the block."""
    with contextlib.ExitStack() as stack:
        for module, call in calls.items():
            stack.enter_context(_torch.calling(module, call))
        yield
