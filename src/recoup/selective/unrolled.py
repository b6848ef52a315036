"""`snn_timestep_checkpoint`: the one place that asks `recoup.recurrent` to checkpoint an unrolled model over time."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

from torch import nn

from recoup.errors import UsageError

MODULE, FUNCTION = "recoup.recurrent", "checkpoint_timesteps"


def checkpoint_timesteps(model: nn.Module, *, chunk_size: int) -> Callable[[], None]:
    """Checkpoints the model's time loop in segments of `chunk_size` steps, in place; returns what undoes it.

    Raises:
        UsageError: if this version has no support for unrolled time; the model is unchanged then.
    """
    found = importlib.import_module(MODULE) if importlib.util.find_spec(MODULE) is not None else None
    function = getattr(found, FUNCTION, None)
    if function is None:
        raise UsageError(
            f"snn_timestep_checkpoint=True with snn_chunk_size={chunk_size} needs {MODULE}.{FUNCTION}, which this "
            "version of recoup does not have. Use strategy='full' on what runs inside a step, or strategy='budget'."
        )
    undo: Callable[[], None] = function(model, chunk=chunk_size).remove
    return undo
