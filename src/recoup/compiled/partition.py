"""Divides a joint graph into forward and backward by a set of held values, each rebuild where backward needs it."""

from __future__ import annotations

from typing import Any

import torch

from recoup import _torch
from recoup.compiled.joint import JointView
from recoup.compiled.schedule import Timeline


def partition(module: Any, view: JointView, made: Timeline, *, num_forward_results: int) -> tuple[Any, Any]:
    """Returns forward and backward as `GraphModule`s.

    Args:
        module: the joint graph that `view` was read off. made: which of its values are held.
    """
    held = [view.holders[v] for v in sorted(made.held)]
    own = {n.name for n in view.nodes[view.step.num_forward :]}
    random = [view.nodes[at] for at in made.order if at < view.step.num_forward and view.step.ops[at].is_random]
    forward, backward = _torch.split_joint_graph(module, held, random, num_forward_results=num_forward_results)
    return _torch.finish_split(forward, late(backward, own))


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
