"""Sets of numbers that grow together (union-find, with path halving)."""

from __future__ import annotations


class DisjointSets:
    """The numbers below `num`, each in a set of its own until two sets are joined."""

    def __init__(self, num: int) -> None:
        self._parent = list(range(num))

    def find(self, a: int) -> int:
        """Returns the number that stands for the set of `a`."""
        parent = self._parent
        while parent[a] != a:
            parent[a] = parent[parent[a]]
            a = parent[a]
        return a

    def join(self, a: int, b: int) -> None:
        """Makes the sets of `a` and `b` one, which the number for the set of `b` stands for."""
        self._parent[self.find(a)] = self.find(b)
