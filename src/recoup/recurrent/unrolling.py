"""`unroll`: a module that keeps its own state, called once a step."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from recoup.recurrent.api import scan


def unroll(module: nn.Module, inputs: Any, **options: Any) -> Any:
    """Calls `module(inputs[t])` for every time step and returns its outputs, in the memory of a few steps.

    The module or its submodules keep state in attributes (membrane potentials). These end as after the plain loop, with
    their graph: reset or detach them between sequences as always.

    Args:
        module: called once a time step.
        inputs: a pytree of tensors whose first dimension is time.
        options: those of `scan`.

    Returns:
        The outputs, stacked over time or as `outputs=` says.

    Raises:
        UsageError, InfeasibleBudget, ReplayError: as `scan`.

    Example:
        >>> recoup.recurrent.unroll(torch.nn.Linear(4, 8), torch.randn(16, 2, 4), outputs="mean").shape
        torch.Size([2, 8])
    """
    return scan(functools.partial(_step, module), inputs, None, **options)[1]


def _step(module: nn.Module, state: None, x: Any) -> tuple[None, Any]:
    return state, module(x)
