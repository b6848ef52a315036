"""Tracks the readers of a result without keeping them alive and without a Python finaliser.

A signal handler may run inside of a finaliser (`__del__`, a weak reference's callback) that is written in Python: the
`KeyboardInterrupt` that it raises is printed and lost, and the rest of the finaliser does not run. Here the callback is
`set.discard` or `list.append`, so that no Python code runs when a reader is freed; a result held for it is freed too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any


class Ticket(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to one reader: its turn, and the result held for it."""

    __slots__ = ("held", "turn")
    held: Any
    turn: int
    __hash__ = object.__hash__  # a weak reference's own fails if it was not asked before its object died
    __eq__ = object.__eq__


class Waiting:
    """The readers of one result, and the result while it is held for one of them."""

    __slots__ = ("_result", "_tickets")

    def __init__(self) -> None:
        self._tickets: set[Ticket] = set()
        self._result: weakref.ref[Any] | None = None

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def add(self, who: Any, turn: int = 0) -> Ticket:
        """Adds `who`, referenced weakly, as a reader; returns its ticket."""
        ticket = Ticket(who, self._tickets.discard)
        ticket.turn = turn
        ticket.held = None
        self._tickets.add(ticket)
        return ticket

    def serve(self, ticket: Ticket) -> None:
        """Removes a ticket; does nothing if it was removed before."""
        self._tickets.discard(ticket)
        ticket.held = None

    def result(self) -> Any | None:
        """Returns the held result; None if there is none."""
        return None if self._result is None else self._result()

    def hold(self, result: Any, *, since: int | None = None) -> None:
        """Holds the result for all readers, or for those whose turn is `since` or later."""
        found = False
        for ticket in tuple(self._tickets):
            if since is None or ticket.turn >= since:
                ticket.held = result
                found = True
        self._result = weakref.ref(result) if found else None

    def let_go(self) -> None:
        """Holds the result for nobody."""
        for ticket in tuple(self._tickets):
            ticket.held = None


class Gone:
    """Values left by objects that were freed since the last `take`."""

    __slots__ = ("_died", "_tickets")

    def __init__(self) -> None:
        self._died: list[Ticket] = []
        self._tickets: set[Ticket] = set()

    def watch(self, who: Any, left: Any) -> None:
        """Registers `left` as the value that `who`, referenced weakly, leaves when it is freed."""
        ticket = Ticket(who, self._died.append)
        ticket.held = left
        self._tickets.add(ticket)

    def take(self) -> Iterator[Any]:
        """Yields the values left since the last call, each once."""
        while self._died:
            ticket = self._died.pop()
            self._tickets.discard(ticket)
            yield ticket.held
