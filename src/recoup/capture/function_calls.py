"""Which ops one call of a torch function runs: the code that makes the call tells, and how far it has come.

`torch.gru_cell` runs sixteen ops, attention with dropout on a CPU a dozen. What they hand each other nobody outside of
the call ever sees.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

from torch import _jit_internal, _ops, _tensor, functional, overrides
from torch.nn import functional as nn_functional

from recoup import _torch
from recoup.ir.trace import Phase
from recoup.runtime.rebuild import saved_tensor

_MODULES = (functional, nn_functional, _tensor, _jit_internal, _ops, overrides)
_REBUILD = Path(saved_tensor.__file__).parent.glob("*.py")  # hooks that are called while a call runs
_INSIDE = frozenset(
    [str(Path(__file__).with_name("tracker.py")), *(str(m.__file__) for m in (*_MODULES, _torch)), *map(str, _REBUILD)]
)


class FunctionCalls:
    """Tells the first op of each call from the others."""

    def __init__(self) -> None:
        self._last: tuple[int, tuple[CodeType, int] | None] | None = None

    def begins(self, phase: Phase, call: int) -> bool:
        """Returns whether the op that runs now is the first of a call of a torch function; in backward it always is.

        Two calls in a row by one instruction, as in a loop, are taken for one.

        Args:
            phase: of the step. call: the module call that the op belongs to.
        """
        if phase == "backward":
            return True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_inside(frame.f_code):
            frame = frame.f_back
        here = call, None if frame is None else (frame.f_code, frame.f_lasti)
        before, self._last = self._last, here
        return here != before


def _is_inside(code: CodeType) -> bool:
    """Whether code makes no calls of its own: it hands on what it was called for, as a torch-function mode does."""
    return code.co_filename in _INSIDE or code.co_name == "__torch_function__"
