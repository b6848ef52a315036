"""Minimum s-t cut of a small directed graph, by Dinic's algorithm (Dinitz 1970).

Breadth-first levels, then a blocking flow along edges that go up one level, until the sink is out of reach. Capacities
are floats: each augmentation takes its bottleneck to exactly zero, so it ends as with integers. For graphs of some
thousand edges; no arrays, no dependencies.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence


class FlowNetwork:
    """A directed graph with capacities, built edge by edge.

    Args:
        num_nodes: nodes are 0 .. num_nodes - 1.
    """

    def __init__(self, num_nodes: int) -> None:
        self._edges_of: list[list[int]] = [[] for _ in range(num_nodes)]
        self._head: list[int] = []
        self._room: list[float] = []  # what an edge can still take; edge i ^ 1 is the reverse of edge i

    def add_edge(self, tail: int, head: int, capacity: float) -> None:
        """Adds an edge; `math.inf` is a capacity that no cut can pay."""
        for node, other, room in ((tail, head, capacity), (head, tail, 0.0)):
            self._edges_of[node].append(len(self._head))
            self._head.append(other)
            self._room.append(room)

    def priced(self, edges: Sequence[tuple[int, float]]) -> FlowNetwork:
        """Returns a copy in which some edges (by the number they were added as) have other capacities."""
        copied = FlowNetwork(0)
        copied._edges_of, copied._head, copied._room = self._edges_of, self._head, self._room.copy()
        for number, capacity in edges:
            copied._room[2 * number] = capacity
        return copied

    def source_side(self, source: int, sink: int) -> list[bool] | None:
        """Returns for each node whether it lies on the source's side of a minimum cut, the smallest such side.

        None if every cut is infinite. The network is used up: its capacities are those left by the flow.
        """
        while True:
            level = self._levels(source)
            if level[sink] < 0:
                return [found >= 0 for found in level]
            next_edge = [0] * len(self._edges_of)
            while pushed := self._augment(source, sink, level, next_edge):
                if pushed == math.inf:
                    return None

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self._edges_of)
        level[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            for edge in self._edges_of[node]:
                head = self._head[edge]
                if self._room[edge] > 0 and level[head] < 0:
                    level[head] = level[node] + 1
                    queue.append(head)
        return level

    def _augment(self, source: int, sink: int, level: list[int], next_edge: list[int]) -> float:
        """Sends flow along one path that rises level by level; returns how much, 0 if there is none left."""
        path: list[int] = []
        node = source
        while node != sink:
            edges = self._edges_of[node]
            while next_edge[node] < len(edges):
                edge = edges[next_edge[node]]
                if self._room[edge] > 0 and level[self._head[edge]] == level[node] + 1:
                    break
                next_edge[node] += 1
            else:
                if not path:
                    return 0.0
                edge = path.pop()
                node = self._head[edge ^ 1]
                next_edge[node] += 1
                continue
            path.append(edge)
            node = self._head[edge]
        pushed = min(self._room[edge] for edge in path)
        if pushed < math.inf:
            for edge in path:
                self._room[edge] -= pushed
                self._room[edge ^ 1] += pushed
        return pushed
