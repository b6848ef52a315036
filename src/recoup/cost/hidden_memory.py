"""Workspace that CUDA kernels take from the allocator while they run. No torch.

For a card that is not here nothing can be metered, so the sizes are worked out as the kernels do: copies of arguments
that a kernel wants contiguous, accumulators of attention's backward, partial sums of reductions that are split over
thread blocks, sorted indices of an embedding's backward. Tests on the stub GPU compare them with PyTorch's allocator.
Not known here: what cuDNN asks for a convolution or a batch norm; that depends on its choice of algorithms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from recoup.cost.caching_allocator import MIN_BLOCK_BYTES
from recoup.cost.devices import Device
from recoup.cost.flops import op_name
from recoup.ir.trace import Signature, TensorSpec

_SIZES = {"float64": 8, "int64": 8, "complex64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "bool": 1, "uint8": 1}

# Positions of arguments that are made contiguous first.
_CONTIGUOUS: dict[str, tuple[int, ...]] = {
    "_log_softmax": (0,),
    "_log_softmax_backward_data": (0, 1),
    "_softmax": (0,),
    "_fused_rms_norm": (0,),
    "_fused_rms_norm_backward": (0, 1),
    "embedding_dense_backward": (0, 1),
    "native_group_norm": (0,),
    "native_group_norm_backward": (0, 1),
    "native_layer_norm": (0,),
    "native_layer_norm_backward": (0, 1),
    "nll_loss2d_forward": (0, 1),
    "nll_loss_forward": (0, 1),
    "upsample_bilinear2d_backward": (0,),
    "upsample_nearest1d_backward": (0,),
    "upsample_nearest2d_backward": (0,),
    "upsample_nearest3d_backward": (0,),
    "max_pool2d_with_indices": (0,),
    "max_pool2d_with_indices_backward": (0, 1),
}
# Ops that make these copies before their results; of the others ATen allocates the results before it calls the kernel.
_COPIES_FIRST = frozenset(
    [
        *("convolution", "convolution_backward", "embedding_dense_backward", "_fused_rms_norm"),
        *("_fused_rms_norm_backward", "native_group_norm", "native_group_norm_backward", "native_layer_norm"),
        "native_layer_norm_backward",
    ]
)
_PRODUCTS: dict[str, tuple[int, int]] = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
# Bytes of what a reduction accumulates for each result; 0: as the input.
_REDUCTIONS: dict[str, int] = {
    **dict.fromkeys(("sum", "mean", "nansum", "linalg_vector_norm", "norm", "prod"), 4),
    **dict.fromkeys(("amax", "amin", "all", "any"), 0),
    **dict.fromkeys(("var_mean", "var", "std", "std_mean", "argmax", "argmin", "max", "min"), 16),
}
LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")


def hidden_blocks(
    signature: Signature, device: Device, *, in_order: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the bytes of blocks that the op holds beside its results on a CUDA device, all until its end.

    Args:
        in_order: attention's backward adds in a fixed order (`torch.use_deterministic_algorithms(True)`).

    Returns:
        Those that it takes before its results, and those after.
    """
    name = op_name(signature.name)
    args = signature.args
    copies = [_bytes(a) for a in _copied(name, args)]
    blocks: list[int] = []
    special = (_SPECIAL_IN_ORDER if in_order and name in _SPECIAL_IN_ORDER else _SPECIAL).get(name)
    if special is not None:
        blocks += special(args, device)
    elif name in _REDUCTIONS and args and isinstance(args[0], TensorSpec):
        blocks += _reduction(args[0], _dims(signature), device, _REDUCTIONS[name] or _itemsize(args[0]))
    before, after = (copies, blocks) if name in _COPIES_FIRST else ([], copies + blocks)
    return tuple(filter(None, before)), tuple(filter(None, after))


def hidden_bytes(signature: Signature, device: Device, *, in_order: bool = False) -> int:
    """Returns the sum of `hidden_blocks`, each rounded as the allocator rounds."""
    blocks = itertools.chain(*hidden_blocks(signature, device, in_order=in_order))
    return sum(-(-block // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES for block in blocks)


def _itemsize(spec: TensorSpec) -> int:
    return _SIZES.get(spec.dtype, 4)


def _bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * _itemsize(spec)


def _is_contiguous(spec: TensorSpec, order: Sequence[int] | None = None) -> bool:
    expected = 1
    for i in reversed(range(len(spec.shape)) if order is None else order):
        if spec.shape[i] != 1 and spec.stride[i] != expected:
            return False
        expected *= spec.shape[i]
    return True


def _copied(name: str, args: Sequence[object]) -> Iterator[TensorSpec]:
    """Yields arguments that the kernel copies because it cannot read their strides."""
    for position in _CONTIGUOUS.get(name, ()):
        spec = args[position] if position < len(args) else None
        if isinstance(spec, TensorSpec) and not _is_contiguous(spec):
            yield spec
    if name in _PRODUCTS:
        for position in _PRODUCTS[name]:
            spec = args[position]
            if isinstance(spec, TensorSpec) and not _is_matrix(spec):
                yield spec
    if name in ("convolution", "convolution_backward"):
        images = args[: 2 if name == "convolution" else 3]
        is_last = any(_has_channels_last(spec) for spec in images[-2:])  # input and weight choose for all
        for spec in images:
            if isinstance(spec, TensorSpec) and not _is_contiguous(spec, _channels_last(spec) if is_last else None):
                yield spec


def _is_matrix(spec: TensorSpec) -> bool:
    """Whether cuBLAS can read the last two dimensions, as they are or transposed."""
    (rows, columns), (down, right) = spec.shape[-2:], spec.stride[-2:]
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


def _channels_last(spec: TensorSpec) -> tuple[int, ...]:
    return (0, *range(2, len(spec.shape)), 1)


def _has_channels_last(spec: object) -> bool:
    return isinstance(spec, TensorSpec) and not _is_contiguous(spec) and _is_contiguous(spec, _channels_last(spec))


# -- attention ----------------------------------------------------------------------------------------------------


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _flash_backward(args: Sequence[object], device: Device) -> list[int]:
    """Yields float32 accumulators of the query's gradient and row sums, keys and values expanded to query heads."""
    gradient, query, key, _, out = (a for a in args[:5] if isinstance(a, TensorSpec))
    batch, heads, length, width = query.shape
    rows, columns = _round_up(length, 128), _round_up(width, 32 if width <= 128 else 64)
    blocks = [4 * batch * heads * rows, 4 * batch * rows * heads * columns]
    if key.shape[1] != heads:
        blocks += 2 * [batch * key.shape[2] * heads * width * _itemsize(key)]
    return blocks + [_bytes(t) for t in (gradient, out) if not _is_contiguous(t, (0, 2, 1, 3))]


def _flash_backward_in_order(args: Sequence[object], device: Device) -> list[int]:
    """The query's gradient is accumulated once for each group of thread blocks that run side by side."""
    query = args[1]
    assert isinstance(query, TensorSpec)
    sums, accumulator, *others = _flash_backward(args, device)
    return [sums, -(-device.num_sms // (query.shape[0] * query.shape[1])) * accumulator, *others]


def _efficient_backward(args: Sequence[object], device: Device) -> list[int]:
    """Row sums and, in float32, gradients that are added to in pieces: the query's, wide heads' keys and values too."""
    gradient, query, key, value = (a for a in args[:4] if isinstance(a, TensorSpec))
    batch, heads, length, width = query.shape
    sums = 4 * batch * heads * length
    blocks = [sums, sums] if query.dtype == "float32" and length % 64 == 0 else [sums]
    if not _is_contiguous(gradient, (0, 2, 1, 3)):
        blocks.append(_bytes(gradient))
    if query.dtype == "float32":  # it adds to the result itself, but for pieces that run side by side
        pieces = -(-length // 64) * -(-width // 64) * (64 * 64 + 4)
    else:
        pieces = -(-length // 128) * -(-width // 64) * (128 * 64 + 4)
        if max(width, value.shape[3]) > 128:
            splits = max(1, min(-(-key.shape[2] // 64), 200 // (batch * heads)))
            pieces += splits * 64 * (_round_up(width, 128) + _round_up(value.shape[3], 128))
    return [*blocks, 4 * batch * heads * pieces]


# -- reductions ---------------------------------------------------------------------------------------------------


def _dims(signature: Signature) -> tuple[int, ...]:
    """Returns the dimensions that a reduction sums over."""
    spec = signature.args[0]
    position = 2 if op_name(signature.name) in ("linalg_vector_norm", "norm") else 1
    given = signature.args[position] if len(signature.args) > position else dict(signature.kwargs).get("dim")
    everything = tuple(range(len(spec.shape)))
    if isinstance(given, bool) or given is None or given == ():
        return everything
    dims = given if isinstance(given, tuple) else (given,)
    return tuple(d % max(len(spec.shape), 1) for d in dims) if all(isinstance(d, int) for d in dims) else everything


def _merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns (size, stride) of dimensions, the fastest first, with contiguous neighbours merged."""
    result: list[tuple[int, int]] = []
    for size, stride in sorted(dims, key=lambda d: d[1]):
        if result and result[-1][0] * result[-1][1] == stride:
            result[-1] = (result[-1][0] * size, result[-1][1])
        else:
            result.append((size, stride))
    return result


def _power_of_two(number: int) -> int:
    """Returns the largest power of two that is not above a positive number."""
    return 1 << (max(number, 1).bit_length() - 1)


def _reduction(spec: TensorSpec, dims: tuple[int, ...], device: Device, element: int = 4) -> list[int]:
    """Partial results and counters of a reduction split over thread blocks, as `setReduceConfig` splits it."""
    axes = [(s, t) for s, t in zip(spec.shape, spec.stride, strict=True)]
    reduced = _merged([a for i, a in enumerate(axes) if i in dims and a[0] != 1])
    kept = _merged([a for i, a in enumerate(axes) if i not in dims and a[0] != 1])
    num_inputs, num_outputs = math.prod(s for s, _ in reduced), math.prod(s for s, _ in kept)
    if not num_inputs or not num_outputs or not reduced:
        return []
    along = not kept or reduced[0][1] < kept[0][1]  # the fastest dimension is reduced
    width, height = (num_inputs, num_outputs) if along else (num_outputs, num_inputs)
    vector = 1
    if (reduced if along else kept)[0][1] == 1:
        if along and width >= 128 and len(reduced) == 1:
            width //= 4
        elif not along:
            strides = [t for _, t in (*reduced, *kept[1:])]
            vector = next(v for v in (4, 2, 1) if kept[0][0] % v == 0 and all(t % v == 0 for t in strides))
            width //= vector
    threads = 512 // vector
    x, y = (_power_of_two(min(n, threads)) for n in (width, height))
    block_x = min(x, 32)
    block_y = min(y, threads // block_x)
    block_x = min(x, threads // block_y)
    step_in, step_out = (block_x, 1) if along else (1, block_x)
    splits = -(-num_inputs // step_in) >= min(block_y * 16, 256)
    if not splits:
        return []
    step_in *= block_y
    values = -(-num_inputs // step_in)
    grid = -(-(num_outputs // vector) // step_out)
    wanted = device.num_sms * (device.threads_per_sm // (block_x * block_y))
    if values < 256 or grid > wanted:
        return []
    ctas = max(min(-(-wanted // grid), -(-values // 16)), -(-values // 256))
    if ctas <= 1:
        return []
    element *= 2 if element == 4 and spec.dtype in ("float64", "int64") else 1
    partial = element * num_outputs * ctas * (1 if along else block_x * vector)
    return [partial, 4 * grid]


# -- others -------------------------------------------------------------------------------------------------------


def _softmax_backward(args: Sequence[object], device: Device) -> list[int]:
    """The product of gradient and result."""
    return [_bytes(args[0])] if isinstance(args[0], TensorSpec) else []


def _embedding_backward(args: Sequence[object], device: Device) -> list[int]:
    """Sorted indices, and sums of segments in float32; as many segments as there are indices, at most."""
    gradient, indices, rows = args[:3]
    assert isinstance(gradient, TensorSpec) and isinstance(indices, TensorSpec) and isinstance(rows, int)
    count, width = math.prod(indices.shape), gradient.shape[-1]
    if count <= 3072:
        return []
    segments = min(count, rows)
    partial = segments + count // 10
    return [
        8 * count,
        8 * count,
        8 * count,
        8 * segments,
        8 * segments,
        8 * segments,
        4 * partial * _round_up(width, 32),
    ]


def _layer_norm_backward(args: Sequence[object], device: Device) -> list[int]:
    """Sums of rows for the gradients of weight and bias, where there are many short rows."""
    gradient, wanted = args[0], args[-1]
    shape = args[2]
    assert isinstance(gradient, TensorSpec) and isinstance(shape, tuple) and isinstance(wanted, tuple)
    width = math.prod(shape)
    rows = math.prod(gradient.shape) // max(width, 1)
    if rows <= 64 * 1024 or width // 32 >= device.num_sms // 2 or not any(wanted[1:]):
        return []
    part = TensorSpec(shape=(-(-rows // 32), width), stride=(width, 1), dtype=gradient.dtype)
    return [_bytes(part)] * sum(map(bool, wanted[1:])) + _reduction(part, (0,), device)


def _group_norm(args: Sequence[object], device: Device) -> list[int]:
    """A scale and a shift for each image and channel."""
    batch, channels = args[3:5]
    assert isinstance(batch, int) and isinstance(channels, int)
    return [4 * batch * channels, 4 * batch * channels]


def _group_norm_backward(args: Sequence[object], device: Device) -> list[int]:
    batch, channels, _, groups = args[5:9]
    assert isinstance(batch, int) and isinstance(channels, int) and isinstance(groups, int)
    return [*3 * [4 * batch * channels], *2 * [4 * batch * groups]]


def _loss(args: Sequence[object], device: Device) -> list[int]:
    """The loss of each element, and the sum of them."""
    first = args[0]
    if not isinstance(first, TensorSpec) or 0 in args[1:]:  # no reduction
        return []
    return [_bytes(first), *_reduction(first, tuple(range(len(first.shape))), device)]


def _index_put(args: Sequence[object], device: Device) -> list[int]:
    """Indices sorted, where values are added up."""
    indices = args[1]
    if not (len(args) > 3 and args[3]) or not isinstance(indices, tuple):
        return []
    return 6 * [8 * max((math.prod(i.shape) for i in indices if isinstance(i, TensorSpec)), default=0)]


_SPECIAL: dict[str, Callable[[Sequence[object], Device], list[int]]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_softmax_backward_data": _softmax_backward,
    "embedding_dense_backward": _embedding_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "index_put": _index_put,
    "_index_put_impl": _index_put,
    **dict.fromkeys(LOSSES, _loss),
}
_SPECIAL_IN_ORDER: dict[str, Callable[[Sequence[object], Device], list[int]]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward_in_order,
}
