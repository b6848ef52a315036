"""Which ops may be run again to rebuild a saved tensor, and how.

An op is *cheap* when it is deterministic, draws no random number, changes no buffer, and costs about one pass over
its tensors. Same kernel, same inputs, same strides: the same bits. Matmuls, convolutions, attention and random ops
are never cheap. Reductions are in the list because a norm's statistics need them; the work bound in `rederive`
decides whether one pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recoup.runtime.rebuild.again import AGAIN

_ELEMENTWISE = [
    "abs",
    "add",
    "addcdiv",
    "addcmul",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "ceil",
    "clamp",
    "clamp_max",
    "clamp_min",
    "cos",
    "div",
    "elu",
    "eq",
    "erf",
    "exp",
    "expm1",
    "floor",
    "ge",
    "gelu",
    "gt",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "le",
    "leaky_relu",
    "lerp",
    "log",
    "log1p",
    "log2",
    "logical_and",
    "logical_not",
    "logical_or",
    "lt",
    "masked_fill",
    "maximum",
    "minimum",
    "mish",
    "mul",
    "ne",
    "neg",
    "pow",
    "reciprocal",
    "relu",
    "round",
    "rsqrt",
    "rsub",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "softplus",
    "sqrt",
    "square",
    "sub",
    "tanh",
    "threshold",
    "where",
]
# Of these, those with an in-place form that computes the same bits, and those that give them in either order.
_OVER = {
    *("abs", "add", "clamp", "clamp_max", "clamp_min", "cos", "div", "elu", "erf", "exp", "expm1", "gelu", "hardtanh"),
    *("leaky_relu", "log", "mul", "neg", "pow", "reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "sub"),
    *("tanh", "hardswish", "hardsigmoid", "mish", "clone"),
}
_COMMUTES = {"add", "mul"}
_MOVES = ["_to_copy", "cat", "clone", "constant_pad_nd", "embedding", "flip", "repeat", "roll", "stack"]
_FACTORIES = ["arange", "full", "full_like", "ones", "ones_like", "scalar_tensor", "zeros", "zeros_like"]
_NORMS = [
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "cudnn_batch_norm",
    "_native_batch_norm_legit",
    "_fused_rms_norm",
    "_softmax",
    "_log_softmax",
    "mean",
    "sum",
    "amax",
]
_POOLS = [
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "upsample_bilinear2d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_trilinear3d",
]
_MAX_POOLS = {"max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3}
CHEAP_NAMES = frozenset([*_ELEMENTWISE, *_MOVES, *_FACTORIES, *_NORMS, *_POOLS])
# Ops that change buffers they are handed without saying so in their schema, with the positions of those arguments.
SILENT_WRITERS = {
    "native_batch_norm": (3, 4),
    "cudnn_batch_norm": (3, 4),
    "miopen_batch_norm": (3, 4),
    "_batch_norm_with_update": (3, 4),
    "_native_batch_norm_legit": (3, 4),
    "batch_norm_gather_stats_with_counts": (3, 4),
}
# Their schemas say that they write: they tell the allocator who reads, or mark the tensor.
_WRITES_NOTHING = frozenset({"record_stream", "requires_grad_", "retain_grad"})

HOLD = "aten.alias.default"  # what `recoup.hold` dispatches; no torch function does so by itself
OPAQUE, CHEAP, IN_PLACE, VIEW, WRITES = range(5)
DETACH = "aten.detach.default"  # not counted: where fake tensors are kept, the engine dispatches some of its own


class OpFacts:
    """Facts about an overload that the recorder needs, computed once.

    Attributes:
        kind: OPAQUE, CHEAP, IN_PLACE (a cheap op written over its first argument), VIEW or WRITES (anything else that
            changes an argument).
        is_inert: OPAQUE or VIEW.
        label: the name as traces have it, "aten.mm.default".
        overload: itself.
        function: the overload to run again (for IN_PLACE the functional one).
        over: the in-place overload that computes what `function` does, if there is one.
        again: what computes it for less where it runs again, if there is such (`again.py`).
        commutes: the two tensors it reads may change places.
        pooled_dims: how many dimensions a max-pooling with indices pools, 0 for other ops.
        can_rerun: it computes new tensors from its arguments alone, dear or cheap: run again it gives the same bits.
        can_rewrite: it changes its first argument alone, and does so again on a copy.
        changes_size: it changes how its first argument lies.
        has_dynamic_shape: how large its result is may depend on contents.
        gathers: it does only where it is handed a mask.
        dropout_at: position of the share that it drops, of an op that may run again where that is 0; -1: none.
        draws: it fills its first argument with random numbers.
        is_dropout: its first result follows from its input and its second, the mask (`dropout.py`).
        is_counted: it has a number among the ops of a module's call.
        written: positions of positional arguments that are changed.
        written_names: of keyword ones.
        allocates: its result is there to be written to: a buffer of zeros, a copy.
    """

    __slots__ = (
        "again",
        "allocates",
        "can_rerun",
        "can_rewrite",
        "changes_size",
        "commutes",
        "draws",
        "dropout_at",
        "function",
        "gathers",
        "has_dynamic_shape",
        "is_batch_norm",
        "is_counted",
        "is_dropout",
        "is_inert",
        "is_random_mask",
        "kind",
        "label",
        "over",
        "overload",
        "pooled_dims",
        "written",
        "written_names",
    )

    def __init__(self, overload: Any) -> None:
        schema = overload._schema
        name = schema.name.rsplit("::", 1)[-1]
        namespace = schema.name.split("::", 1)[0]
        arguments = schema.arguments
        if name in _WRITES_NOTHING:
            arguments = ()
        self.written = tuple(
            i
            for i, a in enumerate(arguments)
            if not a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
        )
        self.written_names = tuple(
            a.name for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
        )
        self.is_batch_norm = name in ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit")
        self.pooled_dims = _MAX_POOLS.get(name, 0)
        self.is_random_mask = name == "bernoulli_"
        self.draws = self.written == (0,) and _DRAWS in overload.tags
        self.gathers = name in _GATHERS
        self.changes_size = name in _CHANGES_SIZE
        self.has_dynamic_shape = torch.Tag.dynamic_output_shape in overload.tags
        self.label = f"{schema.name.replace('::', '.')}.{overload._overloadname}"
        self.is_dropout = self.label == "aten.native_dropout.default"
        self.is_counted = self.label != DETACH and namespace != "prim"
        self.function = self.overload = overload
        self.over = _in_place(name, overload) if namespace == "aten" and name in _OVER else None
        self.again = AGAIN.get(self.label)
        self.commutes = name in _COMMUTES
        self.allocates = name in ALLOCATES
        if self.is_batch_norm and namespace == "aten":
            self.kind = CHEAP
            self.written = ()
        elif self.written or self.written_names:
            self.kind = WRITES
            functional = _functional(name, overload) if namespace == "aten" else None
            if functional is not None and self.written == (0,):
                self.kind, self.function = IN_PLACE, functional
        elif any(a.alias_info is not None for a in arguments):
            self.kind = VIEW
        elif namespace == "aten" and name in CHEAP_NAMES:
            self.kind = CHEAP
        else:
            self.kind = OPAQUE
        self.is_inert = self.kind in (OPAQUE, VIEW)
        self.can_rewrite = (
            self.kind in (IN_PLACE, WRITES)
            and self.written == (0,)
            and not self.written_names
            and not self.changes_size
            and _can_rerun(name, namespace, overload)
        )
        self.can_rerun = self.kind == CHEAP or (self.kind == OPAQUE and _can_rerun(name, namespace, overload))
        names = [a.name for a in arguments]
        self.dropout_at = -1
        if self.kind == OPAQUE and "dropout_p" in names and _can_rerun(name, namespace, overload, draws=True):
            self.dropout_at = names.index("dropout_p")

    def runs_again(self, args: Sequence[Any]) -> bool:
        """Whether a call of it may run again: it writes nothing, and an attention drops nothing."""
        if self.can_rerun:
            return not self.updates(args)
        at = self.dropout_at
        return at >= 0 and (at >= len(args) or args[at] == 0)

    def updates(self, args: Sequence[Any]) -> bool:
        """Whether it is a BatchNorm in training, which writes to its running statistics."""
        return self.is_batch_norm and len(args) > 5 and bool(args[5])

    def written_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Returns the tensors that a call of the op changes, said by its schema or not."""
        found = list(args[3:5]) if self.updates(args) else []
        if self.written or self.written_names:
            for item in self.written_arguments(args, kwargs):
                found += item if isinstance(item, (list, tuple)) else (item,)
        return [item for item in found if isinstance(item, torch.Tensor)]

    def written_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Returns those arguments of a call that the op changes: tensors, or lists of tensors."""
        found = [args[i] for i in self.written if i < len(args)]
        return found + [kwargs[name] for name in self.written_names if name in kwargs]


ALLOCATES = frozenset(
    f"{before}{name}{after}"
    for name in ("zeros", "ones", "full")
    for before, after in (("", ""), ("", "_like"), ("new_", ""))
) | {"clone"}
_CHANGES_SIZE = frozenset(
    ["resize_", "resize_as_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"]
)
_EFFECTS = frozenset(["c10d", "_c10d_functional", "_dtensor", "prim", "profiler"])
_UNINITIALISED = ("empty", "new_empty")
_DRAWS = torch.Tag.nondeterministic_seeded
_KEEPS_FOR_BACKWARD = frozenset(["mkldnn_rnn_layer"])  # without gradients on, they return no workspace
_GATHERS = frozenset(["index", "_unsafe_index"])  # their result's shape depends on values for masks of booleans only


def _can_rerun(name: str, namespace: str, overload: Any, *, draws: bool = False) -> bool:
    """Whether an op that writes nothing and returns no view may run again: no random numbers, no communication.

    Args:
        draws: whether it may draw random numbers.
    """
    if namespace in _EFFECTS or name.lstrip("_").startswith(_UNINITIALISED) or name in _KEEPS_FOR_BACKWARD:
        return False
    if torch.Tag.data_dependent_output in overload.tags or (_DRAWS in overload.tags and not draws):
        return False
    if torch.Tag.dynamic_output_shape in overload.tags and name not in _GATHERS:
        return False  # a device would be waited for
    returns = overload._schema.returns
    return bool(returns) and all("Tensor" in str(r.type) for r in returns)


def _functional(name: str, overload: Any) -> Any | None:
    """Returns the overload that computes what the in-place one writes, if it is cheap."""
    if not name.endswith("_") or name.endswith("__") or name[:-1] not in CHEAP_NAMES:
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, overload._overloadname, None) if packet is not None else None


def _itself(tensor: torch.Tensor, **_: Any) -> torch.Tensor:
    """Returns the copy of a tensor that nobody else reads any more."""
    return tensor


def _in_place(name: str, overload: Any) -> Any | None:
    if name == "clone":
        return _itself
    packet = getattr(torch.ops.aten, f"{name}_", None)
    return getattr(packet, overload._overloadname, None) if packet is not None else None


_facts: dict[int, OpFacts] = {}  # a cache of pure facts about overloads, never invalid: each is held by its facts
known_facts = _facts.get
"""The facts of the overload with this `id`, None if nobody asked before: an overload's own hash runs Python."""


def op_facts(overload: Any) -> OpFacts:
    """Returns the facts of an overload."""
    facts = _facts.get(id(overload))
    if facts is None:
        facts = _facts[id(overload)] = OpFacts(overload)
    return facts


def written_by(facts: OpFacts | None, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[torch.Tensor]:
    """Returns the tensors that a call of an op may change: any, where there are no facts about it."""
    if facts is not None:
        return facts.written_tensors(args, kwargs or {})
    return [item for item in (*args, *(kwargs or {}).values()) if isinstance(item, torch.Tensor)]


def has_history(tensor: torch.Tensor) -> bool:
    """Whether it can be noted how it was made: sparse ones have no memory of their own, inference ones no version."""
    return tensor.layout is torch.strided and not tensor.is_inference()
