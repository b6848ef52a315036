"""The code that rebuilds some values of a segment: one line an op, written once and run in every step.

[Note: rebuild code]
Between two kernels on small tensors a loop over recorded ops takes longer than the kernels do. So the ops are written
out as a function, without loops, look-ups or checks: `v7 = op3(v5, w2_0, op3_0)`. Names begin with `v` for the tensors
that fill a value's storage, `w` for views of them, `op` for overloads and their scalars.

Results lie as in the forward when the same op runs on tensors that lie as they did. The first run checks that, result
by result; those that did not are copied into place from then on. It also settles what each op is called by
(`op_function.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from recoup.runtime.rebuild.dynamic_shapes import Lay, Layout, Number, Regrouped, Reshaped, Varied
from recoup.runtime.rebuild.kept import laid
from recoup.runtime.rebuild.op_forms import TENSOR
from recoup.runtime.rebuild.op_function import OpFunction
from recoup.runtime.rebuild.rederived import fitted
from recoup.runtime.rebuild.values import Geometry

_Code = Callable[..., dict[int, torch.Tensor]]
_NOTHING: Mapping[int, Any] = {}


class RunsAgain(Protocol):
    """What is called to run an op again: see `OpForm`."""

    op: OpFunction
    over: OpFunction | None
    first: bool
    rest: Any
    kwargs: dict[str, Any]
    is_single: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Rerun:
    """One op that runs again.

    Attributes:
        form: of the op. reads: numbers of what it reads, each with the geometry to lay it out in: None where it lies so
            already, a `Layout` where that is another in each step. gives: position and number of results that are read
            or wanted. drops: numbers to let go after it.
        writes: place of the tensor that it writes over, -1 for none. at: its place among the ops of the segment.
    """

    form: RunsAgain
    reads: tuple[tuple[int, Geometry | Lay], ...]
    gives: tuple[tuple[int, int], ...]
    drops: tuple[int, ...]
    writes: int
    at: int = 0


class RebuildCode:
    """Rebuilds some values of a segment.

    Args:
        reruns: what leads to them, in order. wanted: their numbers. starts: numbers of what a piece starts from.
        bases: geometry of what fills a value's storage. narrow: numbers of what may be kept in a smaller dtype.
    """

    __slots__ = ("_bases", "_narrow", "_reruns", "_starts", "_steady", "_wanted")

    def __init__(
        self,
        reruns: Sequence[Rerun],
        wanted: Collection[int],
        *,
        starts: Collection[int],
        bases: Mapping[int, Geometry | Varied],
        narrow: Collection[int],
    ) -> None:
        self._reruns = reruns
        self._wanted = wanted
        self._starts = starts
        self._bases = bases
        self._narrow = narrow
        self._steady: _Code | None = None

    def run(
        self,
        start: Callable[[int], torch.Tensor],
        begun: dict[int, torch.Tensor],
        is_compact: Callable[[int], bool],
        noted: Mapping[int, Any] = _NOTHING,
    ) -> dict[int, torch.Tensor]:
        """Returns the values by number; those that are held by themselves may be missing.

        Args:
            start: returns a held value or a parameter. begun: what a piece starts from, taken out when it is read.
            is_compact: whether a held value is kept in a smaller dtype, and so was made anew when it was read.
            noted: layouts and numbers of this step, by index.
        """
        if self._steady is not None:
            return self._steady(start, begun, is_compact, noted)
        unlike: set[int] = set()

        def lay(number: int, result: torch.Tensor) -> torch.Tensor:
            base = self._bases[number]
            found = base.laid_like(result) if isinstance(base, Varied) else fitted(result, base)
            if found is not result:
                unlike.add(number)
            return found

        first = self._written({number for rerun in self._reruns for _, number in rerun.gives}, lay)
        found = first(start, begun, is_compact, noted)
        self._steady = self._written(unlike, lay)
        return found

    def _written(self, laid_anew: Collection[int], lay: Callable[..., torch.Tensor]) -> _Code:
        """Returns the function; results in `laid_anew` are checked, and copied into place if they lie otherwise."""
        names: dict[str, Any] = {"laid": laid, "lay": lay}
        lines = ["def rebuild(start, begun, is_compact, noted):"]
        here: set[int] = set()
        made: set[int] = set()
        views: dict[tuple[int, Geometry | Lay], str] = {}
        for i, rerun in enumerate(self._reruns):
            tensors = []
            for number, geometry in rerun.reads:
                if number not in here:
                    here.add(number)
                    lines.append(f"v{number} = {'begun.pop' if number in self._starts else 'start'}({number})")
                if geometry is None:
                    tensors.append(f"v{number}")
                    continue
                view = views.get((number, geometry))
                if view is None:
                    view = views[number, geometry] = f"w{i}_{len(tensors)}"
                    if isinstance(geometry, Regrouped | Reshaped):
                        names[f"r{i}_{len(tensors)}"] = geometry.of
                        lines.append(f"{view} = r{i}_{len(tensors)}(v{number})")
                        tensors.append(view)
                        continue
                    if isinstance(geometry, Layout):
                        lines.append(f"{view} = laid(v{number}, noted[{geometry.index}])")
                        tensors.append(view)
                        continue
                    size, stride, offset, dtype = names[f"g{i}_{len(tensors)}"] = geometry
                    of = f"v{number}"
                    if number in made and dtype is _dtype_of(self._bases[number]):
                        names[f"s{i}_{len(tensors)}"], names[f"t{i}_{len(tensors)}"] = size, stride
                        lines.append(f"{view} = {of}.as_strided(s{i}_{len(tensors)}, t{i}_{len(tensors)}, {offset})")
                    else:
                        lines.append(f"{view} = laid({of}, g{i}_{len(tensors)})")
                tensors.append(view)
            lines += self._op(i, rerun, tensors, names, laid_anew)
            here.update(number for _, number in rerun.gives)
            made.update(number for _, number in rerun.gives)
            gone = [number for number in rerun.drops if number in here]
            here.difference_update(gone)
            seen = [key for key in views if key[0] in gone]
            dropped = [f"v{number}" for number in gone] + [views.pop(key) for key in seen]
            if dropped:
                lines.append(f"del {', '.join(dropped)}")
        lines.append(f"return {{{', '.join(f'{n}: v{n}' for n in sorted(here.intersection(self._wanted)))}}}")
        exec(compile("\n    ".join(lines), "<the rebuild of a segment>", "exec"), names)
        written: _Code = names["rebuild"]
        return written

    def _op(
        self, i: int, rerun: Rerun, tensors: list[str], names: dict[str, Any], laid_anew: Collection[int]
    ) -> list[str]:
        """Returns the lines that run an op on tensors of these names."""
        form, at = rerun.form, rerun.writes
        call = _call(f"op{i}", form.op.call, form, tensors, names)
        if at >= 0:
            assert form.over is not None
            over = _call(f"over{i}", form.over.call, form, tensors if at == 0 else tensors[::-1], names)
            number = rerun.reads[at][0]
            call = f"{over} if is_compact({number}) else {call}" if number in self._narrow else over
        lines = []
        if form.is_single:
            results = [(call, number) for _, number in rerun.gives]
        else:
            lines.append(f"out = {call}")
            results = [(f"out[{position}]", number) for position, number in rerun.gives]
        for result, number in results:
            lines.append(f"v{number} = lay({number}, {result})" if number in laid_anew else f"v{number} = {result}")
        return lines if form.is_single else [*lines, "del out"]


def _dtype_of(base: Geometry | Varied) -> torch.dtype:
    return base.dtype if isinstance(base, Varied) else base[3]


def _call(name: str, func: Any, form: RunsAgain, tensors: Sequence[str], names: dict[str, Any]) -> str:
    """Returns a call in words; `names` is told what its names stand for."""
    names[name] = func
    each = iter(tensors)
    args = [*tensors] if form.first else []
    args += [_word(f"{name}_{j}", item, each, names) for j, item in enumerate(form.rest)]
    args += [f"{key}={_word(f'{name}_{key}', item, each, names)}" for key, item in form.kwargs.items()]
    return f"{name}({', '.join(args)})"


def _word(name: str, item: Any, tensors: Iterator[str], names: dict[str, Any]) -> str:
    """Returns an argument in words, the next of the tensors' names in each tensor's place."""
    if item is TENSOR:
        return next(tensors)
    if isinstance(item, Number):
        return f"noted[{item.index}]"
    if isinstance(item, (list, tuple)):
        parts = [_word(f"{name}_{j}", part, tensors, names) for j, part in enumerate(item)]
        return f"[{', '.join(parts)}]"
    names[name] = item
    return name
