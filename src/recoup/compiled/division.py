"""Compiles a step by a plan: joint graphs divided as it says, equal modules by as few variants as it has choices.

A variant is compiled code that the modules of one kind share which make the same choice for each graph. It has code and
a backend of its own, so Dynamo holds as many entries for it as for a module that is compiled alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from recoup import _torch, progress
from recoup.compiled.frontier import choices
from recoup.compiled.joint import divided, view_joint_graph
from recoup.compiled.partition import partition
from recoup.compiled.planned import PlannedLevels
from recoup.compiled.recording import (
    Calls,
    CompiledCall,
    CompileOptions,
    compiled_call,
    kind_of,
    planning_backend,
)
from recoup.compiled.schedule import Timeline, timeline_key
from recoup.errors import OverBudgetWarning
from recoup.units import format_bytes

Choices = Mapping[str, Timeline]
"""What each graph holds."""


class Variant:
    """Divides joint graphs, each by one choice.

    Attributes:
        chosen: what each graph holds. planned: by graph, its levels by the compiler's own plan. new: graphs that were
            not in the plan.
    """

    def __init__(
        self, options: CompileOptions, chosen: dict[str, Timeline], budget_bytes: int, *, above: int, runs: bool
    ) -> None:
        self.options = options
        self.chosen = chosen
        self.budget_bytes = budget_bytes
        self.above = above
        self.new: list[str] = []
        self.planned: dict[str, PlannedLevels] = {}
        key = hashlib.sha256(repr([(n, timeline_key(t)) for n, t in chosen.items()]).encode()).hexdigest()
        self.backend = planning_backend(
            options, self.divide, key=f"recoup {key}", called=None, planned=self.planned, runs=runs
        )
        self.shared: dict[Any, CompiledCall] = {}

    def call(self, module: nn.Module) -> Any:
        """Returns a compiled call of a module."""
        if (kind := kind_of(module)) not in self.shared:
            self.shared[kind] = compiled_call(module, self.options, self.backend)
        return self.shared[kind].of(module)

    def divide(self, module: Any, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> tuple[Any, Any, str]:
        """Returns forward and backward with what the plan holds between them, and the graph's name."""
        progress.advance("dividing a compiled graph")
        _torch.tidy_joint_graph(module)
        view = view_joint_graph(module, num_forward_results=num_fwd_outputs, fuses=self.options.fuses)
        name = view.fingerprint
        made = self.chosen.get(name)
        if made is None:
            self.new.append(name)
            found = choices(view.step, enough_bytes=self.budget_bytes - self.above)
            fitting = [t for t in found if self.above + t.peak_bytes <= self.budget_bytes]
            made = self.chosen[name] = min(fitting, key=lambda t: t.seconds) if fitting else found[-1]
            if not fitting:
                warnings.warn(
                    f"A compiled graph of {view.step.num_forward} ops is estimated at "
                    f"{format_bytes(self.above + made.peak_bytes)}, more than the budget of "
                    f"{format_bytes(self.budget_bytes)}: it holds as little as it can. Use a larger budget, or "
                    "`recoup.fit(..., compiled=True)`, which measures.",
                    OverBudgetWarning,
                    stacklevel=2,
                )
        forward, backward = partition(
            module,
            **dataclasses.asdict(divided(view, made)),
            overwrites=not self.options.fuses,
            num_forward_results=num_fwd_outputs,
        )
        return forward, backward, name


class Division:
    """A plan's compiled calls.

    Args:
        chosen: what each graph holds, by the module whose calls run it. budget_bytes: what the step of a graph that is
            new (another shape) may take. above: the bytes that are there beside a graph's step and its inputs that are
            not the model's own. runs: whether compiled code is to run; if not, the compiler only plans it, and the step
            runs op by op. compiled: variants that are there already; gets those that are new.
    """

    def __init__(
        self,
        options: CompileOptions,
        chosen: Mapping[nn.Module, Choices],
        budget_bytes: int,
        *,
        above: int,
        runs: bool = True,
        compiled: dict[Any, Variant] | None = None,
    ) -> None:
        self.options = options
        self.chosen = chosen
        self.budget_bytes = budget_bytes
        self.above = above
        self.runs = runs
        self._compiled = {} if compiled is None else compiled
        self._used: dict[Any, Variant] = {}

    def compile(self, model: nn.Module) -> Calls:
        """Returns compiled calls of the model, or of modules inside."""
        # A module that runs a graph which another one ran when it was planned makes one of that graph's choices.
        others = {name: made for chosen in self.chosen.values() for name, made in chosen.items()}
        calls: Calls = {}
        for module in self.options.find_modules(model):
            own = self.chosen.get(module, {})
            key = frozenset((n, timeline_key(t)) for n, t in own.items()), self.budget_bytes, self.runs
            if key not in self._compiled:
                self._compiled[key] = Variant(
                    self.options, {**others, **own}, self.budget_bytes, above=self.above, runs=self.runs
                )
            self._used[key] = self._compiled[key]
            calls[module] = self._used[key].call(module)
        return calls

    @property
    def planned(self) -> dict[tuple[str, Timeline], PlannedLevels]:
        """The levels of each graph by each choice, by the compiler's own plan."""
        used = self._used.values()
        return {(name, of.chosen[name]): levels for of in used for name, levels in of.planned.items()}

    @property
    def num_new(self) -> int:
        """How many graphs were not in the plan."""
        return len({name for of in self._used.values() for name in of.new})


def by_module(
    calls: Sequence[str], callers: Sequence[nn.Module], chosen: Sequence[Timeline]
) -> dict[nn.Module, dict[str, Timeline]]:
    """Returns what each graph holds, by the module whose calls run it.

    Args:
        calls, callers, chosen: for each call its graph, its module, and its choice.
    """
    found: dict[nn.Module, dict[str, Timeline]] = {}
    for name, module, made in zip(calls, callers, chosen, strict=True):
        found.setdefault(module, {})[name] = made
    return found
