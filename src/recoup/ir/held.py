"""A plan by tensor: which results of ops are held for backward, and where one segment of the forward ends.

Everything else that backward asks for is rebuilt from what is held, by running the recorded ops again, a segment at a
time. An op is addressed by the module whose own code dispatches it, that module's call in the step, and the op's
ordinal in that call (ops of modules called inside do not count). The op's name is a check: in a step where another op
stands there, the address means nothing and more is held.
"""

from __future__ import annotations

import dataclasses

from recoup.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class OpAddress:
    """One op of the forward.

    Attributes:
        path: dotted path of the module whose own code it is ("" is the model). call: which call of that module in the
            step, from 0. ordinal: which op of that call, from 0. op: name with overload, for instance "aten.mm.default".
    """

    path: str
    call: int
    ordinal: int
    op: str

    def __post_init__(self) -> None:
        if not (isinstance(self.path, str) and isinstance(self.op, str)):
            raise UsageError(f"An op's address needs texts for path and op; found {self.path!r} and {self.op!r}.")
        if not (isinstance(self.call, int) and isinstance(self.ordinal, int)) or min(self.call, self.ordinal) < 0:
            raise UsageError(f"An op's address counts calls and ops from 0; found {self.call!r} and {self.ordinal!r}.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The op that a segment begins with.

    Attributes:
        saves: all that autograd saves in the segment is held; nothing of it is rebuilt.
    """

    address: OpAddress
    saves: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldPlan:
    """Which results are held and where segments begin.

    Attributes:
        held: ops all of whose results are held; those that autograd saves are shared with it.
        boundaries: in forward order.
    """

    held: tuple[OpAddress, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
