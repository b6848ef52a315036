"""A joint graph of AOTAutograd as a `JointStep`: values are storages, views are the value they look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from recoup import _torch
from recoup.compiled.joint_step import JointOp, JointStep
from recoup.compiled.partition import (
    divide_ops,
    graph_fingerprint,
    is_mutable,
    is_random,
    is_view,
    overwritable,
    tensors,
)
from recoup.compiled.schedule import Timeline, run_again
from recoup.cost.flops import kind
from recoup.cost.model import NOMINAL_FLOPS
from recoup.cost.signature import make_signature
from recoup.ir.compiled_plan import GraphChoice
from recoup.ir.trace import Signature

# FLOPs that a byte counts for. Only ratios matter: a choice is by the least sum. FLOPs come first, as at the widths
# that people train, where a product takes thousands an element: a byte is a fortieth of what it is on a CPU.
_BYTE_FLOPS = 0.125  # of what an op reads and writes; where it runs inside of another kernel, of its result alone
_UNKNOWN_BYTE_FLOPS = 5.0  # of one that is not torch's own, which may do any work
_NOT_AGAIN = ("_c10d_functional", "c10d", "c10d_functional", "fsdp")
# Made element by element, though torch does not tag them so.
_FUSIBLE = (
    *("convert_element_type", "full", "iota", "where", "clone", "_to_copy", "constant_pad_nd", "embedding", "index"),
    *("scalar_tensor", "repeat", "rev", "_unsafe_index", "_unsafe_masked_index", "gather"),
    *("slice_scatter", "select_scatter", "diagonal_scatter"),
)
# The position of the flag that says if it trains, None if it does; running statistics are at 3 and 4.
_STATISTICS = {"_native_batch_norm_legit_functional": 5, "_batch_norm_with_update_functional": None}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JointView:
    """A joint graph and the step that was read off it.

    Attributes:
        step: plain data. nodes: the graph's node of each op. holders: of each value that can be held the node to hold.
        values: by a node's name the value that it is, or looks at. fingerprint: tells the graph
            from others.
    """

    step: JointStep
    nodes: tuple[Any, ...]
    holders: dict[int, Any]
    values: dict[str, int]
    fingerprint: str

    def coarsest_dtype(self) -> torch.dtype | None:
        """Returns the dtype of an op's result that rounds most; None if there are none of floating point."""
        found = {t.dtype for node in self.nodes for t in tensors(node) if t.is_floating_point()}
        return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=None)

    def signatures(self) -> list[Signature | None]:
        """Returns the signature of each op that is a kernel of its own."""
        fuses = self.step.fused_reads > 0
        ops = zip(self.nodes, self.step.ops, strict=True)
        return [None if fuses and op.reads_fusible else _signature(node) for node, op in ops]


def view_joint_graph(
    module: Any, *, num_forward_results: int, fuses: bool, static_inputs: Sequence[int] | None = None
) -> JointView:
    """Returns a tidied joint graph as a step.

    Args:
        module: a `GraphModule`. num_forward_results: how many of its results are forward's.
        fuses: whether what compiles it fuses kernels. static_inputs: which of its inputs are the model's own; None:
            all.
    """
    graph = module.graph
    results, gradients, tangents = _torch.joint_graph_facts(graph, num_forward_results)
    forward, backward = divide_ops(graph, results, tangents)
    value_of: dict[int, int] = {}
    value_bytes: list[int] = []
    holders: dict[int, Any] = {}

    def value(tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in value_of:
            value_of[key] = len(value_bytes)
            value_bytes.append(_torch.size_hint(storage.nbytes()))
            alive.append(storage)
        return value_of[key]

    alive: list[Any] = []  # so that no other storage gets the same number
    values: dict[str, int] = {}
    made: set[int] = set()
    changed: set[int] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            made.update(value(t) for t in tensors(node))
        elif is_mutable(node) and node.args and isinstance(node.args[0], torch.fx.Node):
            changed.update(value(t) for t in tensors(node.args[0]))
    ops, nodes = [], []
    num_forward = 0
    for number, node in enumerate((*forward, *backward)):
        inputs = tuple(dict.fromkeys(value(t) for n in node.all_input_nodes for t in tensors(n)))
        outputs = tuple(v for v in dict.fromkeys(value(t) for t in tensors(node)) if v not in made)
        made.update(outputs)
        for tensor in tensors(node):
            at = values[node.name] = value(tensor)
            if isinstance(node.meta.get("val"), torch.Tensor) and at not in holders and _covers(tensor):
                holders[at] = node
        if is_view(node) and not outputs:
            continue
        num_forward += number < len(forward)
        read = {value(t) for n in _read_for_results(node) for t in tensors(n)}
        flops = _flops(node)
        reads_fusible = _is_fusible(node) or (flops is None and _torch.inductor_reads_anything(node.target))
        ops.append(
            JointOp(
                inputs=inputs,
                outputs=outputs,
                seconds=_seconds(node, flops, outputs, inputs, value_bytes, fuses=fuses),
                flops=flops or 0,
                can_rerun=_can_rerun(node) and not changed & read,
                is_fusible=_is_fusible(node),
                reads_fusible=reads_fusible,
                is_random=is_random(node),
                keeps_place=is_random(node) or is_mutable(node),
                overwritable=tuple(dict.fromkeys(value(n.meta["val"]) for n in overwritable(node))),
                state_bytes=_generator_bytes(node) if is_random(node) else 0,
            )
        )
        nodes.append(node)
    given = [n for n in graph.find_nodes(op="placeholder") if n not in tangents]
    handed = [
        n
        for i, (n, gradient) in enumerate(zip(given, gradients, strict=False))
        if static_inputs is not None and i not in static_inputs and isinstance(gradient, torch.fx.Node)
    ]
    step = JointStep(
        value_bytes=tuple(value_bytes),
        ops=tuple(ops),
        num_forward=num_forward,
        results=frozenset(value(t) for n in results if isinstance(n, torch.fx.Node) for t in tensors(n)),
        gradients=frozenset(value(t) for n in gradients if isinstance(n, torch.fx.Node) for t in tensors(n)),
        tangents=frozenset(value(t) for n in tangents for t in tensors(n)),
        keeps_tangents=_torch.keeps_tangents(),
        activations=frozenset(value(t) for n in handed for t in tensors(n)),
        fused_reads=_torch.inductor_fused_reads() if fuses else 0,
    )
    return JointView(
        step=step,
        nodes=tuple(nodes),
        holders=holders,
        values=values,
        fingerprint=graph_fingerprint(graph, num_forward_results),
    )


def divided(view: JointView, made: Timeline) -> GraphChoice:
    """Returns a choice by the names of the graph's nodes; views left out."""
    step = view.step
    ran = [at for at in made.order if at >= step.num_forward or step.ops[at].outputs]
    return GraphChoice(
        held=tuple(view.holders[v].name for v in sorted(made.held)),
        rerun=tuple(dict.fromkeys(view.nodes[at].name for at in run_again(step, ran))),
        order=tuple(view.nodes[at].name for at in ran),
    )


def _covers(tensor: torch.Tensor) -> bool:
    """Whether a tensor covers all of its storage: a view of a part cannot represent the whole."""
    nbytes = _torch.size_hint(tensor.numel()) * tensor.element_size()
    return nbytes >= _torch.size_hint(tensor.untyped_storage().nbytes())


def _can_rerun(node: Any) -> bool:
    target = node.target
    if _torch.must_be_saved(node) or is_mutable(node):
        return False
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "aten" if is_random(node) else target.namespace not in _NOT_AGAIN
    return not isinstance(target, torch._ops.HigherOrderOperator)


def _read_for_results(node: Any) -> list[Any]:
    """Returns the nodes that what backward needs of a node depends on: all that it reads, but for running statistics.

    Batch normalisation in training reads those only to make the next ones, which no backward asks for.
    """
    flag = _STATISTICS.get(_name(node), -1)
    trains = flag is None or (flag >= 0 and node.args[flag] is True)
    return [n for n in node.all_input_nodes if not (trains and n in node.args[3:5])]


def _signature(node: Any) -> Signature | None:
    """Returns an op's signature, symbolic sizes by their hints; None if it is no op of aten."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return None

    def plain(item: Any) -> Any:
        item = item.meta.get("val") if isinstance(item, torch.fx.Node) else item
        if isinstance(item, torch.Tensor) and item.layout is torch.strided:
            sizes, strides = ([_torch.size_hint(n) for n in ns] for ns in (item.shape, item.stride()))
            return torch.empty_strided(sizes, strides, dtype=item.dtype, device="meta")
        return _torch.size_hint(item) if isinstance(item, torch.SymInt) else item

    args, kwargs = pytree.tree_map(plain, (tuple(node.args), dict(node.kwargs)))
    outputs = pytree.tree_map(plain, node.meta.get("val"))
    return make_signature(node.target, args, kwargs, outputs)


def _generator_bytes(node: Any) -> int:
    """Returns the bytes of the state of the generator that an op draws from."""
    device = next((t.device for t in tensors(node)), torch.device("cpu"))
    return 0 if device.type == "cuda" else torch.get_rng_state().numel()  # a GPU's is given to the graph


def _is_fusible(node: Any) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True  # parts of results, sizes
    return torch.Tag.pointwise in target.tags or _name(node) in _FUSIBLE or target.is_view


def _name(node: Any) -> str:
    return node.target._schema.name.split("::")[-1] if isinstance(node.target, torch._ops.OpOverload) else ""


def _seconds(
    node: Any,
    flops: int | None,
    outputs: tuple[int, ...],
    inputs: tuple[int, ...],
    value_bytes: list[int],
    *,
    fuses: bool,
) -> float:
    """Returns an estimate for running an op again: its FLOPs, or the bytes it moves. Views take none."""
    if not outputs:
        return 0.0
    if flops is not None:
        return flops / NOMINAL_FLOPS
    if fuses and _is_fusible(node):
        return sum(value_bytes[v] for v in outputs) * _BYTE_FLOPS / NOMINAL_FLOPS
    is_known = not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace in ("aten", "prims")
    byte_flops = _BYTE_FLOPS if is_known else _UNKNOWN_BYTE_FLOPS
    return sum(value_bytes[v] for v in (*outputs, *inputs)) * byte_flops / NOMINAL_FLOPS


def _flops(node: Any) -> int | None:
    """Returns the FLOPs of a product, a convolution or attention, None for other ops."""
    formula = _torch.flop_formula(node.target)
    if formula is None:  # torch counts no attention on a CPU
        signature = _signature(node) if kind(str(node.target)) != "other" else None
        return signature.flops if signature is not None else None
    args, kwargs = pytree.tree_map_only(torch.fx.Node, lambda n: n.meta.get("val"), (node.args, node.kwargs))
    return _torch.size_hint(formula(*args, **kwargs, out_val=node.meta.get("val")))
