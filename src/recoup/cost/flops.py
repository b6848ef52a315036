"""Floating point operations of one op, from its name and the shapes of its tensors. No torch.

What is counted, and how:

- *matmul* (`mm`, `addmm`, `bmm`, `linear`, ...): 2 for each multiply-add; the bias costs nothing.
- *convolution*: 2 x elements of the weight x batch x positions, where the positions are those of the output, or of the
  input when transposed. An element of the weight belongs to one group, so groups need no more care. Backward: as much
  again for the gradient of the input and for that of the weight, each only if `output_mask` asks for it.
- *attention*: two matmuls forward; five backward (the fused kernels make the scores again). Causal masks are not
  counted as half: what a kernel skips depends on the kernel.
- everything else: 1 for each element of its largest argument or result, whichever has more
  (a list of tensors, as of the foreach ops, counts as one); ops that only move data, and views, 0.

For matmul, convolution of one group and attention these are the figures of `torch.utils.flop_counter` (a test holds
them equal). That counter charges a grouped convolution's weight gradient for all pairs of channels; here it costs what
it multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from recoup.ir.trace import Signature, TensorSpec

Kind = Literal["matmul", "convolution", "attention", "other"]

# Position of the two matrices in the arguments.
_MATRIX_PRODUCTS: dict[str, tuple[int, int]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "vdot": (0, 1),
    "matmul": (0, 1),
    "_int_mm": (0, 1),
    "_scaled_mm": (0, 1),
    "addmm": (1, 2),
    "_addmm_activation": (1, 2),
    "addmv": (1, 2),
    "baddbmm": (1, 2),
    "addbmm": (1, 2),
}
_LINEAR = frozenset({"linear", "mkldnn_linear", "_mkldnn_linear"})
_LINEAR_BACKWARD = frozenset({"linear_backward"})
_RECURRENT = frozenset({"mkldnn_rnn_layer", "_cudnn_rnn", "lstm_mps"})
_RECURRENT_BACKWARD = frozenset({"mkldnn_rnn_layer_backward", "_cudnn_rnn_backward"})
_CONVOLUTIONS = frozenset({
    "convolution",
    "_convolution",
    "convolution_overrideable",
    "cudnn_convolution",
    "cudnn_convolution_relu",
    "miopen_convolution",
    "mkldnn_convolution",
    "_slow_conv2d_forward",
    "slow_conv3d_forward",
    "_conv_depthwise2d",
    "conv_depthwise3d",
    "slow_conv_dilated2d",
    "slow_conv_dilated3d",
})  # fmt: skip
_CONVOLUTIONS_WITH_FLAG = frozenset({"convolution", "_convolution", "convolution_overrideable"})
_TRANSPOSED_CONVOLUTIONS = frozenset({
    "cudnn_convolution_transpose",
    "miopen_convolution_transpose",
    "slow_conv_transpose2d",
    "slow_conv_transpose3d",
})  # fmt: skip
_CONVOLUTIONS_BACKWARD = frozenset({"convolution_backward", "convolution_backward_overrideable"})
# Shapes are (batch, heads, length, width).
_ATTENTION = frozenset({
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_attention_math_for_mps",
})  # fmt: skip
# Shapes are (batch, length, heads, width), or (all lengths, heads, width) with offsets: the position of the first one.
_PACKED_ATTENTION: dict[str, int] = {
    "_flash_attention_forward": 3,
    "_efficient_attention_forward": 4,
    "_flash_attention_backward": 6,
    "_efficient_attention_backward": 6,
}

# Ops that compute nothing: copies, fills, gathers, allocations, shape changes.
_DATA_MOVEMENT = frozenset({
    "_cat", "_foreach_copy", "_foreach_zero", "_index_put_impl", "_local_scalar_dense", "_pin_memory", "_reshape_copy",
    "_to_copy", "_to_dense", "_unsafe_view", "alias", "arange", "as_strided_scatter", "cat", "clone", "constant_pad_nd",
    "contiguous", "copy", "detach", "diagonal_scatter", "embedding", "empty", "empty_like", "empty_permuted",
    "empty_strided", "eye", "fill", "flip", "full", "full_like", "gather", "index", "index_copy", "index_put",
    "index_select", "lift", "lift_fresh", "lift_fresh_copy", "masked_fill", "new_empty", "new_empty_strided",
    "new_full", "new_ones", "new_zeros", "ones", "ones_like", "pixel_shuffle", "pixel_unshuffle", "repeat", "resize",
    "roll", "scalar_tensor", "scatter", "select_backward", "select_scatter", "set", "slice_backward", "slice_scatter",
    "split_with_sizes_copy", "stack", "tril", "triu", "unfold_copy", "where", "zero", "zeros", "zeros_like",
})  # fmt: skip


def num_elements(spec: TensorSpec) -> int:
    """Returns how many elements the tensor shows."""
    return math.prod(spec.shape)


def tensor_specs(nest: Any) -> Iterator[TensorSpec]:
    """Yields every tensor of a nest of arguments, in order."""
    if isinstance(nest, TensorSpec):
        yield nest
    elif isinstance(nest, (tuple, list)):
        for item in nest:
            yield from tensor_specs(item)


def op_name(name: str) -> str:
    """Returns the name without namespace, overload and the underscore of in-place ops: `aten.add_.Tensor` -> `add`."""
    parts = name.split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).rstrip("_")


def kind(name: str) -> Kind:
    """Returns which kind of work an op is, by its name (`"aten.mm.default"`)."""
    base = op_name(name)
    if base in _MATRIX_PRODUCTS or base in _LINEAR or base in _LINEAR_BACKWARD:
        return "matmul"
    if base in _RECURRENT or base in _RECURRENT_BACKWARD:
        return "matmul"
    if base in _CONVOLUTIONS or base in _TRANSPOSED_CONVOLUTIONS or base in _CONVOLUTIONS_BACKWARD:
        return "convolution"
    if base.removesuffix("_backward") in _ATTENTION or base in _PACKED_ATTENTION:
        return "attention"
    return "other"


def product_flops(signatures: Iterable[Signature]) -> list[int]:
    """Returns the FLOPs of each product, convolution and attention, as `torch.utils.flop_counter` has them; else 0.

    What else an op computes is small beside what it reads and writes: its seconds say it all.
    """
    return [0 if kind(s.name) == "other" else s.flops for s in signatures]


def result_label(name: str, args: Sequence[Any]) -> str:
    """Returns the name, in plans, of an op whose result a region may keep; "" for one that is too cheap for that.

    Args:
        name: of the op, `"aten.mm.default"`.
        args: its positional arguments, tensors or `TensorSpec`s among them. The label names the shape of the right
            factor or the weight, so that a last, smaller batch is treated alike.
    """
    what = kind(name)
    if what == "other" or "backward" in name:
        return ""
    if what == "attention":
        return what
    position = _MATRIX_PRODUCTS.get(op_name(name), (0, 1))[1]
    shape = getattr(args[position], "shape", None) if position < len(args) else None
    if not shape:
        return ""
    return f"{what}:{'x'.join(str(int(n)) for n in (shape[-2:] if what == 'matmul' else shape))}"


def count_flops(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, outputs: tuple[Any, ...] = ()
) -> int:
    """Returns the floating point operations of one op.

    Args:
        name: with namespace and overload, as in `Signature.name`.
        args: nest of `TensorSpec` and plain values, as in `Signature.args`.
        kwargs: as in `Signature.kwargs`, as a mapping.
        outputs: its results as `TensorSpec`; a tensor list is a tuple in it.

    Returns:
        Floating point operations, 2 for a multiply-add.
    """
    kwargs = kwargs or {}
    base = op_name(name)
    if base in _MATRIX_PRODUCTS:
        left, right = _MATRIX_PRODUCTS[base]
        return _matrix_product_flops(base, args, left, right)
    if base in _LINEAR:
        return int(2 * num_elements(args[0]) * args[1].shape[0])
    if base in _LINEAR_BACKWARD:
        wanted = args[3] if len(args) > 3 else kwargs.get("output_mask", (True, True))
        return int(2 * num_elements(args[1]) * args[2].shape[-1] * (bool(wanted[0]) + bool(wanted[1])))
    if base in _RECURRENT or base in _RECURRENT_BACKWARD:
        return _recurrent_flops(args) * (2 if base in _RECURRENT_BACKWARD else 1)
    if base in _CONVOLUTIONS or base in _TRANSPOSED_CONVOLUTIONS:
        transposed = base in _TRANSPOSED_CONVOLUTIONS or (
            base in _CONVOLUTIONS_WITH_FLAG and bool(_argument(args, kwargs, 6, "transposed"))
        )
        positions = args[0] if transposed else next(tensor_specs(outputs))
        return _convolution_flops(args[1], args[0].shape[0], positions)
    if base in _CONVOLUTIONS_BACKWARD:
        grad_output, inputs, weight = args[:3]
        wanted = _argument(args, kwargs, 10, "output_mask")
        positions = inputs if _argument(args, kwargs, 7, "transposed") else grad_output
        return _convolution_flops(weight, inputs.shape[0], positions) * (bool(wanted[0]) + bool(wanted[1]))
    if base in _ATTENTION:
        return _attention_flops(args[0].shape, args[1].shape, args[2].shape, backward=False)
    if base.removesuffix("_backward") in _ATTENTION:
        return _attention_flops(args[1].shape, args[2].shape, args[3].shape, backward=True)
    if base in _PACKED_ATTENTION:
        return _packed_attention_flops(base, args)
    if base in _DATA_MOVEMENT:
        return 0
    return _most_elements(args, kwargs, outputs)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs[name]


def _matrix_product_flops(base: str, args: tuple[Any, ...], left: int, right: int) -> int:
    first, second = args[left], args[right]
    columns = second.shape[-1] if len(second.shape) > 1 else 1
    if base == "matmul" and len(second.shape) > 2:
        batch = math.prod(_broadcast(first.shape[:-2], second.shape[:-2]))
        rows = first.shape[-2] if len(first.shape) > 1 else 1
        return int(2 * batch * rows * first.shape[-1] * columns)
    return int(2 * num_elements(first) * columns)


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> list[int]:
    length = max(len(first), len(second))
    left, right = (1,) * (length - len(first)) + first, (1,) * (length - len(second)) + second
    return [max(a, b) for a, b in zip(left, right, strict=True)]


def _recurrent_flops(args: tuple[Any, ...]) -> int:
    # One layer: each matrix (biases are vectors) multiplies every position of the sequence once.
    steps = math.prod(args[0].shape[:-1])
    weights = args[1] if isinstance(args[1], (tuple, list)) else args[1:5]
    return int(2 * steps * sum(num_elements(spec) for spec in tensor_specs(tuple(weights)) if len(spec.shape) == 2))


def _convolution_flops(weight: TensorSpec, batch: int, positions: TensorSpec) -> int:
    # Unbatched inputs have one dimension less than the weight and are not dispatched as such.
    return 2 * num_elements(weight) * batch * math.prod(positions.shape[2:])


def _attention_flops(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *, backward: bool) -> int:
    # Queries' heads count: grouped keys and values are shared, not multiplied less often.
    rows = math.prod(query[:-1])
    scores, mixed = 2 * rows * query[-1] * key[-2], 2 * rows * key[-2] * value[-1]
    # Backward: scores again, and the gradients of query and key (as large); those of value and of the scores.
    return 3 * scores + 2 * mixed if backward else scores + mixed


def _packed_attention_flops(base: str, args: tuple[Any, ...]) -> int:
    backward = base.endswith("_backward")
    query, key, value = args[1:4] if backward else args[:3]
    first_offset = _PACKED_ATTENTION[base]
    offsets = args[first_offset]
    *_, heads, width = query.shape
    if isinstance(offsets, TensorSpec):
        # The lengths are data; every sequence is taken to be as long as the longest.
        batch = offsets.shape[0] - 1
        length, key_length = args[first_offset + 2], args[first_offset + 3]
    else:
        batch, length, key_length = query.shape[0], query.shape[1], key.shape[1]
    return _attention_flops(
        (batch, heads, length, width),
        (batch, heads, key_length, width),
        (batch, heads, key_length, value.shape[-1]),
        backward=backward,
    )


def _most_elements(args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: tuple[Any, ...]) -> int:
    counts = [sum(num_elements(spec) for spec in tensor_specs(item)) for item in (*args, *kwargs.values(), *outputs)]
    return max(counts, default=0)
