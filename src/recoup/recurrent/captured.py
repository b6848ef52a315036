"""Tensors that a step's graph uses but that are neither its state nor its inputs: found by walking the graph."""

from __future__ import annotations

import sys
from typing import Any

import torch

from recoup import _torch


class Captured:
    """Tensors that the steps' graphs use besides state and inputs: mostly parameters.

    Attributes:
        tensors: the captured tensors, in a fixed order.
        uses: number of edges of a step's graph that lead to each; at least 2 where unknown.
    """

    def __init__(self, candidates: list[torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.uses: list[int] = []
        self._index: dict[int, int] = {}
        self._edges: dict[tuple[Any, int], torch.Tensor] = {}
        self._nodes: set[Any] = set()
        self._leaves = {id(t) for t in candidates}
        self._checked: set[int] = set()
        for tensor in candidates:
            if not tensor.requires_grad:
                continue
            if tensor.grad_fn is None:
                self._add(tensor)
            else:
                edge = torch.autograd.graph.get_gradient_edge(tensor)
                self._edges[edge.node, edge.output_nr] = tensor
                self._nodes.add(edge.node)

    def _add(self, tensor: torch.Tensor) -> int:
        index = self._index.get(id(tensor))
        if index is None:
            index = self._index[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.uses.append(0)
        return index

    def seeded_bytes(self, *, of_all: bool = False) -> int:
        """Returns the bytes of the tensors that a step uses more than once, or of all with `of_all`.

        The gradients of these are not summed in place.
        """
        pairs = zip(self.tensors, self.uses, strict=True)
        return sum(t.numel() * t.element_size() for t, count in pairs if of_all or count > 1)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the graph of a walked step uses the tensor."""
        return id(tensor) in self._index

    def is_checked(self, num_nodes: int) -> bool:
        """Whether a graph with this many nodes was walked before."""
        return num_nodes in self._checked

    def walk(
        self,
        returned: list[torch.Tensor],
        entered: list[torch.Tensor],
        *,
        num_nodes: int,
        first_node_number: int | None,
    ) -> str:
        """Counts the uses of captured tensors in one step's graph.

        Args:
            returned: tensors that the step returned.
            entered: tensors of its state and inputs; the walk ends at these.
            num_nodes: approximate number of nodes of its graph.
            first_node_number: nodes with smaller sequence numbers are older than the step; None where numbers do not
                tell (another thread), in which case only known tensors are looked for.

        Returns:
            The name of a node that cannot be attributed, or "".
        """
        own = {id(t) for t in entered}
        uses: dict[int, int] = {}
        todo = list({t.grad_fn for t in returned if t.grad_fn is not None})
        seen = {t.grad_fn for t in entered}
        todo = [node for node in todo if node not in seen]
        seen.update(todo)
        unknown = ""
        while todo:
            for node, output_nr in todo.pop().next_functions:
                if node is None or node in seen:
                    continue
                variable = getattr(node, "variable", None)
                if variable is None:
                    variable = self._edges.get((node, output_nr))
                    if variable is None:
                        is_outside = node in self._nodes or (
                            first_node_number is not None and _torch.node_number(node) < first_node_number
                        )
                        if is_outside:
                            unknown = node.name()
                        else:
                            seen.add(node)
                            todo.append(node)
                        continue
                if id(variable) in self._leaves or (id(variable) not in own and _is_held(variable)):
                    if first_node_number is None and id(variable) not in self._index:
                        unknown = f"leaf {list(variable.shape)}"
                        continue
                    index = self._add(variable)
                    uses[index] = uses.get(index, 0) + 1
        for index, count in uses.items():
            self.uses[index] = max(self.uses[index], count)
        self._checked.add(num_nodes)
        return unknown


def _is_held(leaf: torch.Tensor) -> bool:
    """Whether Python code holds the leaf; a leaf that a step made for itself is held by its graph alone."""
    return sys.getrefcount(leaf) > _OWN_REFERENCES


def _count_own_references() -> int:
    leaf = torch.zeros((), requires_grad=True)
    graph = leaf * 1.0
    del leaf
    assert graph.grad_fn is not None
    found: list[int] = []

    def count(leaf: torch.Tensor) -> None:
        found.append(sys.getrefcount(leaf))

    variable = graph.grad_fn.next_functions[0][0].variable  # type: ignore[union-attr]
    count(variable)
    return found[0]


_OWN_REFERENCES = _count_own_references()
