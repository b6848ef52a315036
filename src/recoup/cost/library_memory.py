"""Bytes that CUDA libraries keep of this machine's card once a step runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from recoup import _torch

_ROUND_BYTES = 1 << 16  # to which a measurement is rounded down: tiny tensors vanish, workspaces do not


def library_bytes(device: torch.device) -> int:
    """Returns the bytes of the workspaces of cuBLAS, for the thread of forward and for that of backward.

    Measured by the forward and backward of one tiny linear layer, after the workspaces there are were let go: torch
    makes new ones when they are next needed. No random number is drawn. Rounded down to 64 KiB: the thread of backward
    may let go of the tiny layer's gradients a little later than it tells that it is done.
    """
    _torch.clear_cublas_workspaces()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    weight = torch.zeros(16, 16, device=device, requires_grad=True)
    bias = torch.zeros(16, device=device, requires_grad=True)
    out = F.linear(torch.zeros(16, 16, device=device, requires_grad=True), weight, bias)
    torch.autograd.grad(out, (weight, bias), torch.zeros_like(out))
    del out, weight, bias
    torch.cuda.synchronize(device)
    return (int(torch.cuda.memory_allocated(device)) - before) // _ROUND_BYTES * _ROUND_BYTES
