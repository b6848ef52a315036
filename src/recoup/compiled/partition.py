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
    """Returns what tells a tidied joint graph from others: ops, what they read, sizes, and the nodes' names."""
    facts: list[Any] = [num_forward_results]
    for node in graph.nodes:
        tensors = [t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
        sizes = [(str(t.dtype), [_torch.size_hint(n) for n in t.shape]) for t in tensors]
        facts.append((node.name, str(node.target), [n.name for n in node.all_input_nodes], sizes))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def partition(module: Any, *, held: Sequence[str], rerun: Sequence[str], num_forward_results: int) -> tuple[Any, Any]:
    """Returns forward and backward as `GraphModule`s.

    Args:
        module: a tidied joint graph. held: names of nodes that are kept. rerun: of those that run again, in order.
    """
    results, _, tangents = _torch.joint_graph_facts(module.graph, num_forward_results)
    own = {node.name for node in divide_ops(module.graph, results, tangents)[1] if not is_view(node)}
    nodes = {node.name: node for node in module.graph.nodes}
    random = [nodes[name] for name in rerun if is_random(nodes[name])]
    kept = [nodes[name] for name in held]
    forward, backward = _torch.split_joint_graph(module, kept, random, num_forward_results=num_forward_results)
    return _torch.finish_split(forward, late(backward, own))


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
    """Whether a node changes in place what it is given."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def is_view(node: Any) -> bool:
    """Whether a node only looks at what it is given: a view, or one of an op's results."""
    target = node.target
    return target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and target.is_view)


def is_random(node: Any) -> bool:
    """Whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def late(module: Any, own: set[str]) -> Any:
    """Returns a backward whose `own` ops run in their order, and every other right before the first that needs it."""
    nodes = list(module.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    graph = torch.fx.Graph()
    copies: dict[Any, Any] = {}
    for node in nodes:
        if node.op not in ("placeholder", "output") and node.name not in own:
            continue
        left, needed = [node], set[Any]()
        while left:
            at = left.pop()
            if at not in copies and at not in needed:
                needed.add(at)
                left += at.all_input_nodes
        for at in sorted(needed, key=place.__getitem__):
            copies[at] = graph.node_copy(at, copies.__getitem__)
    return torch.fx.GraphModule(module, graph)
