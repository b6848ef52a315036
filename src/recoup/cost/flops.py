"""FLOPs of an op from its shapes.

Matmuls count 2 per multiply-add, as torch's own counter does; convolutions and attention likewise. Any other op that
computes counts one FLOP per element of its largest tensor: enough to tell work from none.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from recoup.ir.trace import TensorSpec

Kind = Literal["matmul", "convolution", "attention", "other"]
_MATMULS = frozenset(
    (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",
        "mkldnn_linear",
        "_scaled_mm",
        "mv",
        "addmv",
        "dot",
        "_int_mm",
        "addbmm",
    )
)


def op_name(name: str) -> str:
    """Returns `"mm"` for `"aten.mm.default"`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else name


def kind(name: str) -> Kind:
    """Returns what sort of op a signature's name is."""
    short = op_name(name)
    if short in _MATMULS:
        return "matmul"
    if "convolution" in short or short.startswith("conv"):
        return "convolution"
    if "scaled_dot_product" in short or short in ("_flash_attention_forward", "_flash_attention_backward"):
        return "attention"
    return "other"


def is_heavy(name: str) -> bool:
    """Whether the op is a matmul, a convolution or attention: never rederived."""
    return kind(name) != "other"


def count_flops(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[TensorSpec, ...]) -> int:
    """Returns the FLOPs of one run of the op; `args` and `kwargs` as in `Signature`, tensors as `TensorSpec`."""
    short = op_name(name)
    shapes = [a.shape for a in args if isinstance(a, TensorSpec)]
    which = kind(name)
    if which == "matmul":
        return _matmul(short, shapes)
    if which == "convolution":
        return _convolution(short, args, outputs)
    if which == "attention":
        return _attention(short, args)
    largest = max((math.prod(s.shape) for s in [*_specs(args), *outputs]), default=0)
    return largest if outputs else 0


def _specs(items: Any) -> list[TensorSpec]:
    result = []
    for item in items:
        if isinstance(item, TensorSpec):
            result.append(item)
        elif isinstance(item, (list, tuple)):
            result += _specs(item)
    return result


def _matmul(short: str, shapes: list[tuple[int, ...]]) -> int:
    if short in ("addmm", "baddbmm", "addmv", "addbmm"):
        shapes = shapes[1:]
    if len(shapes) < 2:
        return 0
    first, second = shapes[0], shapes[1]
    if short == "linear":
        return 2 * math.prod(first) * second[0]
    columns = second[-1] if len(second) > 1 else 1
    return 2 * math.prod(first) * columns


def _convolution(short: str, args: tuple[Any, ...], outputs: tuple[TensorSpec, ...]) -> int:
    if "backward" in short:
        grad, inputs, weight = args[0].shape, args[1].shape, args[2].shape
        transposed = bool(args[7]) if len(args) > 7 else False
        mask = args[10] if len(args) > 10 else (True, True, False)
        spatial = math.prod((inputs if transposed else grad)[2:])
        once = 2 * grad[0] * spatial * math.prod(weight)
        return int(once * (int(bool(mask[0])) + int(bool(mask[1]))))
    inputs, weight = args[0].shape, args[1].shape
    transposed = bool(args[6]) if len(args) > 6 else False
    out = outputs[0].shape
    spatial = math.prod((inputs if transposed else out)[2:])
    return int(2 * inputs[0] * spatial * math.prod(weight))


def _attention(short: str, args: tuple[Any, ...]) -> int:
    tensors = [a for a in args if isinstance(a, TensorSpec)]
    backward = "backward" in short
    query, key, value = tensors[1:4] if backward else tensors[0:3]
    rows, columns = query.shape[-2], key.shape[-2]
    batch = math.prod(query.shape[:-2])
    forward = 2 * batch * rows * columns * (query.shape[-1] + value.shape[-1])
    if not backward:
        return forward
    # dV, dP, and the recomputed scores, dQ, dK: five products for forward's two.
    return 2 * batch * rows * columns * (3 * query.shape[-1] + 2 * value.shape[-1])
