"""Divides a joint graph into forward and backward by a set of held values, each rebuild where backward needs it.

What is below the imports is also what `recoup export --to compile` writes: plain names of nodes, nothing of ours.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from recoup import _torch


def graph_fingerprint(graph: Any, num_forward_results: int) -> str:
    """Returns the identity of a tidied joint graph: a hash of ops, their inputs, sizes, and the nodes' names."""
    facts: list[Any] = [num_forward_results]
    for node in graph.nodes:
        tensors = [t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
        sizes = [(str(t.dtype), [_torch.size_hint(n) for n in t.shape]) for t in tensors]
        facts.append((node.name, str(node.target), [n.name for n in node.all_input_nodes], sizes))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def partition(
    module: Any,
    *,
    held: Sequence[str],
    rerun: Sequence[str],
    order: Sequence[str],
    overwrites: bool,
    num_forward_results: int,
) -> tuple[Any, Any]:
    """Returns forward and backward as `GraphModule`s.

    Args:
        module: a tidied joint graph. held: names of nodes that are kept. rerun: of those that run again. order: of all
            that run in backward. overwrites: whether the graphs run op by op, so that results have to be written over
            what is read for the last time.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    random = [nodes[name] for name in rerun if is_random(nodes[name])]
    kept = [nodes[name] for name in held]
    divide_ops(module.graph, *_torch.joint_graph_facts(module.graph, num_forward_results)[::2])
    forward, backward = _torch.split_joint_graph(module, kept, random, num_forward_results=num_forward_results)
    forward, backward = _torch.finish_split(forward, ordered(backward, order))
    if overwrites:
        for half in (forward, backward):
            overwrite(half)
            _torch.draw_from_own_card(half)
    else:
        keep_products(backward)
    return forward, backward


def divide_ops(graph: Any, results: list[Any], tangents: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns forward's and backward's ops, each in the graph's order."""
    behind = set(tangents)
    for node in graph.nodes:
        if behind.intersection(node.all_input_nodes) or _torch.belongs_to_backward(node):
            behind.add(node)
    needed: set[Any] = set()
    left = [n for n in results if isinstance(n, torch.fx.Node)]
    left += [n for n in graph.nodes if is_mutable(n) and n not in behind]
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    forward: list[Any] = []
    backward: list[Any] = []
    for node in graph.nodes:
        node.meta["reads_tangents"] = node in behind
        if node.op in ("placeholder", "output"):
            continue
        is_forward = node in needed or (node not in behind and node.meta.get("partitioner_tag") == "is_forward")
        (forward if is_forward else backward).append(node)
    return forward, backward


def is_mutable(node: Any) -> bool:
    """Whether a node changes an argument in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_view(node: Any) -> bool:
    """Whether a node is a view of its input, or selects one of an op's results."""
    target = node.target
    if target in (operator.getitem, torch.ops.aten._unsafe_view.default):
        return True
    return isinstance(target, torch._ops.OpOverload) and target.is_view


def tensors(node: Any) -> list[torch.Tensor]:
    """Returns a node's tensors that have memory."""
    found = pytree.tree_leaves(node.meta.get("val"))
    return [t for t in found if isinstance(t, torch.Tensor) and _torch.has_storage(t)]


def is_random(node: Any) -> bool:
    """Whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def overwritable(node: Any) -> list[Any]:
    """Returns the nodes whose memory a node's result may take: elementwise results, laid out alike."""
    way = _torch.overwriting(node.target)
    if way is None or torch.Tag.pointwise not in node.target.tags:
        return []
    made = node.meta.get("val")

    def is_alike(tensor: Any) -> bool:
        return (
            isinstance(tensor, torch.Tensor)
            and (tensor.dtype, tensor.device, tensor.layout) == (made.dtype, made.device, made.layout)
            and (tensor.shape, tensor.stride()) == (made.shape, made.stride())
            and tensor.storage_offset() == 0
            and made.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
        )

    read = node.all_input_nodes if way[1] is not None else node.args[:1]
    return [n for n in read if isinstance(n, torch.fx.Node) and is_alike(n.meta.get("val"))]


def overwrite(module: Any) -> None:
    """Lets elementwise ops write over an input that nothing reads later, if the graph itself made it."""
    nodes = list(module.graph.nodes)
    root: dict[Any, Any] = {}
    last: dict[Any, int] = {}
    for place, node in enumerate(nodes):
        own = {t.untyped_storage()._cdata for t in tensors(node)}
        seen = [n for n in node.all_input_nodes if own & {t.untyped_storage()._cdata for t in tensors(n)}]
        # One of several results of an op has memory of its own, unless the op only looks at what it is given.
        is_part = node.target is operator.getitem and seen and root[seen[0]] is seen[0]
        root[node] = root[seen[0]] if seen and not is_part else node
        for read in node.all_input_nodes:
            last[root[read]] = place
    for place, node in enumerate(nodes):
        dying = [n for n in overwritable(node) if root[n].op == "call_function" and last[root[n]] == place]
        way = _torch.overwriting(node.target) if dying else None
        if way is not None:
            node.target, name = way
            if name is not None:
                node.kwargs = {**node.kwargs, name: dying[0]}
    module.recompile()


def keep_products(module: Any) -> None:
    """Has each product run where it is, though its result is added to another only after other ops have run.

    A compiler that joins the two (`addmm`) runs the product at the sum, and stores what it reads until then.
    """
    nodes = [node for node in module.graph.nodes if not is_view(node)]
    place = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
            continue
        one, other = (n.meta.get("val") for n in node.args)
        if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
            continue
        if any(n.target is torch.ops.aten.mm.default and place[n] < place[node] - 1 for n in node.args):
            node.target = torch.ops.prims.add.default  # the same, by a name that is not joined
    module.recompile()


def ordered(module: Any, order: Sequence[str]) -> Any:
    """Returns a backward that runs ops in `order`, by name and as often as they are named; views come where needed."""
    nodes = list(module.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    named = {node.name: node for node in nodes if node.op == "call_function"}
    graph = torch.fx.Graph()
    copies: dict[Any, Any] = {}
    ends = [node for node in nodes if node.op == "output"]
    for node in (*(n for n in nodes if n.op == "placeholder"), *(named[n] for n in order if n in named), *ends):
        old = [node]  # what an op made before is not read any more, nor are views of it
        while old:
            if copies.pop(at := old.pop(), None) is not None:
                old += [user for user in at.users if is_view(user)]
        left, needed = [node], set[Any]()
        while left:
            at = left.pop()
            if at not in copies and at not in needed:
                needed.add(at)
                left += at.all_input_nodes
        for at in sorted(needed, key=place.__getitem__):
            copies[at] = graph.node_copy(at, copies.__getitem__)
    return torch.fx.GraphModule(module, graph)
