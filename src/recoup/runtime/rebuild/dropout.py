"""Dropout's result from its input and its mask, bit for bit, for the kernel that returns both.

`native_dropout`, which a GPU runs, draws its mask and scales by it in one kernel; its derivative multiplies by the same
mask and scale in the same order. So with the scale as the kernel has it, the derivative's kernel applied to the input
gives the result again, and a plan keeps the mask, which autograd saves anyway, instead of the result.

The kernels: `fused_dropout_kernel` and `masked_scale_kernel` in PyTorch's `aten/src/ATen/native/cuda/Dropout.cu` (both
`x * mask * scale` in the accumulation type, with `scale = 1.0 / p` of the probability in that type), and
`native_dropout_cpu` and `native_dropout_backward` in `native/Dropout.cpp`, which round in between: equal in float32 and
float64 alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

MADE_BY = torch.ops.aten.native_dropout_backward.default


def scale_of(dtype: torch.dtype, device_type: str, arguments: Sequence[Any]) -> float | None:
    """Returns the scale with which `MADE_BY` gives a dropout's result; None where that is not known.

    Args:
        dtype: of what it reads. device_type: where it runs. arguments: those of `native_dropout` after the first.
    """
    probability: float = arguments[0]
    is_training = len(arguments) < 2 or arguments[1] is not False
    if not is_training or not 0 < probability < 1 or not dtype.is_floating_point:
        return None
    kept = 1.0 - probability
    if dtype is torch.float64:
        return 1.0 / kept
    if device_type == "cuda":
        return float(np.float32(1.0 / float(np.float32(kept))))
    return 1.0 / kept if device_type == "cpu" and dtype is torch.float32 else None
