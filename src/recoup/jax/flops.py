"""FLOPs and bytes of equations: products and convolutions exactly, one FLOP an element for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from recoup.jax._jax import is_on_host, num_shards, open_jaxpr


def words(text: str) -> frozenset[str]:
    """Returns the words of a text, for long lists of primitives."""
    return frozenset(text.split())


# Results that are no arithmetic: copies, layouts, constants.
_MOVES = words(
    """broadcast_in_dim reshape squeeze expand_dims transpose slice dynamic_slice dynamic_update_slice concatenate pad
    rev gather iota copy copy_p convert_element_type bitcast_convert_type stop_gradient name reduce_precision split
    optimization_barrier device_put sharding_constraint random_wrap random_unwrap create_token"""
)
_REDUCTIONS = ("reduce_", "argmax", "argmin", "scatter", "select_and_scatter", "select_and_gather", "sort", "cum")


def nbytes(aval: Any) -> int:
    """Returns the bytes of a value on the device; 0 for non-arrays (tokens, references) and arrays on the host."""
    return 0 if is_on_host(aval) else array_bytes(aval)


def array_bytes(aval: Any) -> int:
    """Returns the bytes of a value, wherever it lies."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    try:
        itemsize = np.dtype(dtype).itemsize
    except TypeError:  # keys of random numbers: two words on most generators
        itemsize = getattr(dtype, "itemsize", 8)
    return math.prod(int(d) for d in shape) * int(itemsize)


def result_bytes(eqn: Any) -> list[int]:
    """Returns the bytes on a device of each result of an equation."""
    return [nbytes(v.aval) // shards for v, shards in zip(eqn.outvars, num_shards(eqn), strict=True)]


def sub_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yields the jaxprs among an equation's parameters: the bodies that it runs."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "body_jaxpr"):
        if eqn.params.get(key) is not None:
            yield eqn.params[key]
            return
    yield from eqn.params.get("branches", ())


def jaxpr_flops(jaxpr: Any) -> int:
    """Returns the FLOPs of all equations of a jaxpr, a scan's body as often as it runs, a `while`'s once."""
    return sum(eqn_flops(eqn) for eqn in open_jaxpr(jaxpr)[0].eqns)


def eqn_flops(eqn: Any) -> int:
    """Returns the FLOPs of one equation."""
    name = eqn.primitive.name
    inside = [jaxpr_flops(j) for j in sub_jaxprs(eqn)]
    if inside and name != "pallas_call":
        return max(inside) * (int(eqn.params["length"]) if name == "scan" else 1)
    if name in _MOVES or not eqn.outvars:
        return 0
    out: int = sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape"))
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * int(math.prod(eqn.invars[0].aval.shape[d] for d in contracted))
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return int(2 * out * math.prod(kernel) // max(out_features, 1))
    if name.startswith(_REDUCTIONS):
        return int(max(math.prod(v.aval.shape) for v in eqn.invars if hasattr(v.aval, "shape")))
    return out


def bytes_moved(eqn: Any) -> int:
    """Returns the bytes one equation reads and writes."""
    return sum(nbytes(v.aval) for v in (*eqn.invars, *eqn.outvars))
