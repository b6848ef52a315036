"""Minimum s-t cut of a small directed graph, by Dinic's algorithm (Dinitz 1970).

A blocking flow along edges that rise in one order of all nodes first, which takes paths of every length at once, those
past a single node before the others; then
breadth-first levels and a blocking flow along edges that go up one level, until the sink is out of reach. Capacities
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
        self._orders: dict[int, list[int]] = {}  # by source
        self._past_one: dict[tuple[int, int], list[tuple[int, int]]] = {}  # pairs of edges, by source and sink

    def add_edge(self, tail: int, head: int, capacity: float) -> None:
        """Adds an edge; `math.inf` is a capacity that no cut can pay."""
        self._orders.clear()
        self._past_one.clear()
        for node, other, room in ((tail, head, capacity), (head, tail, 0.0)):
            self._edges_of[node].append(len(self._head))
            self._head.append(other)
            self._room.append(room)

    def priced(self, edges: Sequence[tuple[int, float]]) -> FlowNetwork:
        """Returns a copy in which some edges (by the number they were added as) have other capacities."""
        copied = FlowNetwork(0)
        copied._edges_of, copied._head, copied._room = self._edges_of, self._head, self._room.copy()
        copied._orders, copied._past_one = self._orders, self._past_one
        for number, capacity in edges:
            copied._room[2 * number] = capacity
        return copied

    def source_side(self, source: int, sink: int) -> list[bool] | None:
        """Returns for each node whether it lies on the source's side of a minimum cut, the smallest such side.

        None if every cut is infinite. The network is used up: its capacities are those left by the flow.
        """
        order = self._order(source)
        if order[sink] >= 0 and not (self._push_past_one(source, sink) and self._block(source, sink, order)):
            return None
        while True:
            level = self._levels(source, sink)
            if level[sink] < 0:
                return [found >= 0 for found in level]
            if not self._block(source, sink, level):
                return None

    def _order(self, source: int) -> list[int]:
        """Returns numbers of the nodes that edges lead to from the source, rising along all that close no cycle."""
        known = self._orders.get(source)
        if known is not None:
            return known
        edges_of, heads = self._edges_of, self._head
        order = self._orders[source] = [-1] * len(edges_of)
        order[source], left = 0, len(edges_of)
        path = [(source, iter(edges_of[source]))]
        while path:
            node, edges = path[-1]
            for edge in edges:
                head = heads[edge]
                if order[head] < 0 and not edge & 1:
                    order[head] = 0
                    path.append((head, iter(edges_of[head])))
                    break
            else:
                left -= 1
                order[node] = left
                path.pop()
        return order

    def _push_past_one(self, source: int, sink: int) -> bool:
        """Sends flow along paths of two edges, which need no search; False if one has no limit."""
        heads, room = self._head, self._room
        known = self._past_one.get((source, sink))
        if known is None:
            known = self._past_one[source, sink] = [
                (first, second)
                for first in self._edges_of[source]
                for second in self._edges_of[heads[first]]
                if heads[second] == sink
            ]
        for first, second in known:
            pushed = min(room[first], room[second])
            if pushed == math.inf:
                return False
            for edge in (first, second):
                room[edge] -= pushed
                room[edge ^ 1] += pushed
        return True

    def _levels(self, source: int, sink: int) -> list[int]:
        """Returns how many edges away from the source nodes are; -1: out of reach, or no nearer than the sink."""
        edges_of, heads, room = self._edges_of, self._head, self._room
        level = [-1] * len(edges_of)
        level[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            above = level[node] + 1
            for edge in edges_of[node]:
                head = heads[edge]
                if level[head] < 0 and room[edge] > 0:
                    level[head] = above
                    if head == sink:
                        return level
                    queue.append(head)
        return level

    def _block(self, source: int, sink: int, level: list[int]) -> bool:
        """Sends flow along paths whose levels rise, until there is none left; False if one has no limit."""
        edges_of, heads, room = self._edges_of, self._head, self._room
        next_edge = [0] * len(edges_of)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                pushed = min([room[edge] for edge in path])
                if pushed == math.inf:
                    return False
                for edge in path:
                    room[edge] -= pushed
                    room[edge ^ 1] += pushed
                # The next path begins like this one, up to the first edge that is full.
                full = next(at for at, edge in enumerate(path) if not room[edge] > 0)
                node = heads[path[full] ^ 1]
                del path[full:]
            edges, here = edges_of[node], level[node]
            at, num_edges = next_edge[node], len(edges)
            while at < num_edges and not (level[heads[edges[at]]] > here and room[edges[at]] > 0):
                at += 1
            next_edge[node] = at
            if at < num_edges:
                path.append(edges[at])
                node = heads[edges[at]]
            elif path:
                node = heads[path.pop() ^ 1]
                next_edge[node] += 1
            else:
                return True
