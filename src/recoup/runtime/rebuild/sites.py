"""What the op at one place of a module's code was when it last ran: the same op again takes no second look.

A step runs the ops of the step before on tensors that lie as they did. A `Site` knows which of an op's arguments are
tensors, how they lie, and how its results do, so that recording the op (`lineage.py`) is one comparison of all of them
and the values of their storages. Scalars are taken from each step. An op that differs is recorded as if there were no
site, so that a site says nothing that the step at hand did not show; after a few such it is given up.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.runtime.rebuild.cheap_ops import OpFacts
from recoup.runtime.rebuild.lineage import PLAIN, Geometry, Made, Value, geometry_of
from recoup.thresholds import MOST_TRIES


class Site:
    """One op of a module's code.

    Attributes:
        overload: what ran there.
        call: runs it.
        kinds: the classes of its arguments, None where nothing is recorded.
        names: of its keyword arguments.
        tensors: picks the tensors out of its arguments, rest: what is beside them.
        positions: of the tensors, None if they come first.
        matches: whether tensors are like those it was handed.
        geometries: of the tensors.
        gives: whether results are like those it gave.
        bases: geometries of the results that are recorded, by position, or of the one result.
        is_single: it returns one tensor.
        gives_again: `gives` for when it runs again, where other dispatch keys are on; found on the first time.
    """

    __slots__ = (
        "bases",
        "call",
        "geometries",
        "gives",
        "gives_again",
        "is_single",
        "kinds",
        "matches",
        "misses",
        "names",
        "overload",
        "positions",
        "rest",
        "tensors",
    )

    def __init__(self, overload: Any, misses: int) -> None:
        self.overload = overload
        self.call = _torch.op_call(overload)
        self.misses = misses
        self.kinds: tuple[type[Any], ...] | None = None
        self.names: tuple[str, ...] = ()
        self.positions: tuple[int, ...] | None = None
        self.gives_again: Callable[..., bool] | None = None
        self.tensors: Callable[[Any], tuple[torch.Tensor, ...]]
        self.rest: Callable[[Any], Any]
        self.matches: Callable[..., bool]
        self.geometries: tuple[Geometry, ...]
        self.gives: Callable[..., bool]
        self.bases: tuple[tuple[int, Geometry], ...]
        self.is_single: bool

    def has_results(self, out: Any) -> bool:
        """Whether the op's results lie as they did."""
        if self.is_single:
            return type(out) is torch.Tensor and self.gives(out) and out.storage_offset() == self.bases[0][1][2]
        return (
            type(out) is tuple
            and self.gives(*out)
            and all([out[position].storage_offset() == base[2] for position, base in self.bases])
        )


class Noted(Made):
    """An op that was recorded by its site: `rest` is what of this step's arguments is no tensor."""

    def __init__(self, site: Site, values: tuple[Value, ...], rest: Any, kwargs: dict[str, Any], order: int) -> None:
        self.site = site
        self.values = values
        self.rest = rest
        self.kwargs = kwargs
        self.order = order

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """Runs the op again on tensors that lie as the first time."""
        site = self.site
        if site.positions is None:
            args = (*tensors, *self.rest)
        else:
            args = self.rest.copy()
            for position, tensor in zip(site.positions, tensors, strict=True):
                args[position] = tensor
        return site.call(*args, **self.kwargs) if self.kwargs else site.call(*args)

    def gave(self, out: Any) -> bool:
        """Whether results lie as they did the first time."""
        site = self.site
        outs = (out,) if site.is_single else out
        if site.gives_again is None:
            if not all([geometry_of(outs[position]) == base for position, base in site.bases]):
                return False
            site.gives_again = _torch.tensor_guard(outs)
        if site.gives_again is None or not site.gives_again(*outs):
            return False
        return all([outs[position].storage_offset() == base[2] for position, base in site.bases])


class Sites:
    """The sites of a plan, by module path, then by number of op in a call; all steps share them."""

    def __init__(self) -> None:
        self._by_path: dict[str, dict[int, Site | None]] = {}
        self._geometries: dict[Geometry, Geometry] = {}  # equal ones are one object, and so compared at once

    def of(self, path: str) -> dict[int, Site | None]:
        """Returns the sites of a module's code; None where one was given up."""
        return self._by_path.setdefault(path, {})

    def passing(self, known: dict[int, Site | None], ordinal: int, overload: Any) -> None:
        """Notes that nothing is recorded of an op."""
        misses = self._misses(known, ordinal)
        if misses is not None:
            known[ordinal] = Site(overload, misses)

    def learn(
        self,
        known: dict[int, Site | None],
        ordinal: int,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
        recorded: list[tuple[int, torch.Tensor]],
    ) -> None:
        """Notes an op that was recorded, unless its arguments are of kinds that take a closer look each time.

        Args:
            recorded: results whose making was recorded, with their positions.
        """
        misses = self._misses(known, ordinal)
        if misses is None:
            return
        known[ordinal] = None
        schema = facts.overload._schema.arguments
        positions = []
        for i, item in enumerate(args):
            if type(item) is torch.Tensor or type(item) is nn.Parameter:
                positions.append(i)
            elif type(item) in (list, tuple):
                if "Tensor" in str(schema[i].type) or any(type(x) not in PLAIN for x in item):
                    return
            elif type(item) not in PLAIN:
                return
        outs = out if type(out) is tuple else (out,)
        if not positions or not are_plain(kwargs) or not recorded or any(type(t) is not torch.Tensor for t in outs):
            return
        tensors = [args[i] for i in positions]
        matches, gives = _torch.tensor_guard(tensors), _torch.tensor_guard(outs)
        if matches is None or gives is None or not matches(*tensors) or not gives(*outs):
            return  # one tensor twice among them, say
        site = Site(facts.overload, misses)
        site.kinds = tuple(map(type, args))
        site.names = tuple(kwargs)
        num = len(positions)
        if positions == list(range(num)):
            site.tensors, site.rest = operator.itemgetter(slice(num)), operator.itemgetter(slice(num, None))
        else:
            site.positions = tuple(positions)
            site.tensors, site.rest = _picker(site.positions), _without(site.positions)
        site.matches, site.gives = matches, gives
        site.geometries = tuple([self._shared(t) for t in tensors])
        site.bases = tuple([(position, self._shared(t)) for position, t in recorded])
        site.is_single = type(out) is torch.Tensor
        known[ordinal] = site

    def _shared(self, tensor: torch.Tensor) -> Geometry:
        geometry = geometry_of(tensor)
        return self._geometries.setdefault(geometry, geometry)

    def _misses(self, known: dict[int, Site | None], ordinal: int) -> int | None:
        """Returns how often an op at a place differed from the one before; None: it was given up."""
        if ordinal not in known:
            return 0
        site = known[ordinal]
        if site is None or site.misses + 1 == MOST_TRIES:
            known[ordinal] = None
            return None
        return site.misses + 1


def are_plain(kwargs: Mapping[str, Any]) -> bool:
    """Whether there is no tensor among keyword arguments."""
    return all([type(item) in PLAIN for item in kwargs.values()]) if kwargs else True


def _without(positions: tuple[int, ...]) -> Callable[[Any], list[Any]]:
    def rest(args: Any) -> list[Any]:
        found = list(args)
        for position in positions:  # a record that held tensors would keep what the plan lets go
            found[position] = None
        return found

    return rest


def _picker(positions: tuple[int, ...]) -> Callable[[Any], tuple[torch.Tensor, ...]]:
    pick = operator.itemgetter(*positions)
    return pick if len(positions) > 1 else lambda args: (pick(args),)
