"""Ops that run again in backward, in steps of one size or of all: [Note: dynamic shapes] in `dynamic_program.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from recoup.runtime.rebuild.dynamic_shapes import Lay, Varied
from recoup.runtime.rebuild.rebuild_code import RebuildCode, Rerun, RunsAgain
from recoup.runtime.rebuild.values import Geometry


class VariedForm:
    """An op that runs again, with a `Number` in the place of each argument that varies: see `OpForm`."""

    __slots__ = ("first", "is_single", "kwargs", "op", "over", "rest")

    def __init__(self, form: RunsAgain, rest: Any, kwargs: dict[str, Any]) -> None:
        self.op, self.over = form.op, form.over
        self.first, self.is_single = form.first, form.is_single
        self.rest, self.kwargs = rest, kwargs


class VariedOps:
    """Ops of a program that run again.

    Attributes:
        ops: in the order of the forward: form, numbers of what it reads, position and number of each result.
        calls: of the program, in which each op runs. bases: geometry of what fills a value's storage.
        twins: the same of earlier steps with other sizes.
    """

    __slots__ = ("_codes", "_forms", "_kinds", "_layouts", "bases", "calls", "ops", "twins")

    def __init__(self) -> None:
        self.ops: list[tuple[Any, tuple[int, ...], tuple[tuple[int, int], ...]]] = []
        self.calls: list[Any] = []
        self.bases: dict[int, Geometry] = {}
        self.twins: tuple[Any, ...] = ()
        self._kinds: dict[int, Any] = {}
        self._layouts: dict[tuple[int, int], Lay] = {}
        self._forms: dict[int, VariedForm] = {}
        self._codes: dict[Any, RebuildCode] = {}

    def vary(
        self,
        layouts: dict[tuple[int, int], Lay],
        kinds: dict[int, Any],
        forms: dict[int, VariedForm],
        twins: tuple[Any, ...],
    ) -> None:
        """Has them run in steps of other sizes, too.

        Args:
            layouts: how ops read what varies, by op and place; None: as it lies. kinds: as `bases`.
            forms: of the ops that have arguments which vary. twins: the same of earlier steps.
        """
        self._layouts, self._kinds, self._forms, self.twins = layouts, kinds, forms, twins
        self._codes.clear()

    def form_of(self, at: int) -> Any:
        """Returns an op, by its place, as it runs in all the steps that it is of."""
        return self._forms.get(at, self.ops[at][0])

    def lies_as_kept(self, key: tuple[int, int]) -> bool:
        """Whether an op, by its place, reads a tensor, by its, as it lies in steps of all sizes."""
        return self._layouts.get(key, key) is None

    def base_of(self, number: int) -> Geometry | Varied:
        """Returns the geometry of what fills a value's storage, in all the steps that it is of."""
        found: Geometry | Varied = self._kinds.get(number, self.bases[number])
        return found

    def picks(self, at: int) -> Sequence[int]:
        """Returns the numbers of the values that an op read in its call: see `CallForm.ops`."""
        form = self.ops[at][0]
        return next((picks for each, picks in self.calls[at].form.ops if each is form), ())

    def _of_all_sizes(self, reruns: Sequence[Rerun], others: Sequence[Sequence[Rerun]]) -> Sequence[Rerun]:
        """Returns what runs again in steps of all sizes.

        Args:
            reruns: in steps like this one. others: the same of the twins.
        """
        if not others:
            return reruns
        found = []
        for i, rerun in enumerate(reruns):
            reads: list[tuple[int, Geometry | Lay]] = []
            for place, (number, geometry) in enumerate(rerun.reads):
                known = {geometry, *[other[i].reads[place][1] for other in others]}
                static = None if known == {None} else self.ops[rerun.at][0].geometries[place]
                reads.append((number, self._layouts.get((rerun.at, place), static)))
            writes = rerun.writes if all([other[i].writes == rerun.writes for other in others]) else -1
            form = self.form_of(rerun.at) if rerun.at in self._forms else rerun.form
            found.append(dataclasses.replace(rerun, form=form, reads=tuple(reads), writes=writes))
        return found
