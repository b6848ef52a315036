"""Tile: views of the step with its head, or position-wise modules, over tiles, and tiles of other sizes."""

from __future__ import annotations

from typing import ClassVar, Self

from recoup import progress
from recoup.ir.decision import Decision, TileModule
from recoup.planner.incumbents import Allowance, Candidate, Incumbents
from recoup.planner.repair import repaired
from recoup.planner.simulator import EVERYWHERE
from recoup.planner.step import PlannedStep
from recoup.planner.strategies.base import Decisions, Proposals, Strategy
from recoup.planner.strategies.by_hand import whole_kinds
from recoup.planner.strategies.offload import moving_views
from recoup.planner.strategies.tile import (
    TiledHead,
    TiledModules,
    find_tiled_head,
    find_tiled_modules,
    halve_module_tiles,
    loss_tokens,
    retile,
)
from recoup.planner.views import View, ViewSet
from recoup.solver.tiles import FEWEST_ROWS, sets_to_try
from recoup.thresholds import MOST_TRIES, NEGLIGIBLE_SHARE

_FEWEST_TILE_ROWS = FEWEST_ROWS // 2  # where no larger tile fits: slow, but within the budget
_MAX_TILE_COPIES = 2  # of a tile's logits, at worst, when tiles are made larger


class TileStrategy(Strategy):
    """The loss over tiles of the head's logits, position-wise modules over tiles of positions.

    What can be tiled is found, by capturing the step with it tiled, when it is first asked for.
    """

    actions: ClassVar[tuple[str, ...]] = ("tile", "tile-modules")
    is_exact: ClassVar[bool] = False

    def __init__(self, step: PlannedStep) -> None:
        self._step = step
        self._found: _Found | None = None

    @classmethod
    def make(cls, step: PlannedStep) -> Self | None:
        """Returns the strategy if tiles were asked for and fake tensors can follow the step."""
        is_asked = "tile" in step.actions or "tile-modules" in step.actions
        return cls(step) if is_asked and step.simulator.trace.source == "fake" else None

    @property
    def found(self) -> _Found:
        """The heads and modules that can be tiled, and the views with them."""
        if self._found is None:
            self._found = _Found(self._step)
        return self._found

    def propose(self, budget_bytes: int, incumbents: Incumbents) -> Proposals:
        """Yields plans with each set of tiles, and the fastest of them with fewer modules tiled."""
        num_repairs = MOST_TRIES if self._step.scans is None else 1
        if self._step.is_content(incumbents, budget_bytes):
            return
        for tiles, views, moving in self.found.sets:
            if self._step.scans is None:
                yield tiles.tiles
                if "rederive" in self._step.actions:
                    yield (*EVERYWHERE, *tiles.tiles)
            for some in (views, moving):
                allowance = self._step.allowance(incumbents)
                for view in some:
                    yield from repaired(view, budget_bytes, incumbents, allowance, num_repairs=num_repairs)
            yield from _with_fewer_tiles(tiles.tiles, budget_bytes, incumbents, self._step.allowance(incumbents))

    def shrink(self, incumbents: Incumbents) -> Proposals:
        """Yields the leanest plan with each set of tiles, then the leanest of all with ever smaller tiles."""
        for tiles, views, moving in self.found.sets:
            yield from self._step.leanest_of((*views, *moving), incumbents)
            yield from whole_kinds(self._step, incumbents, tiles.tiles)
        while True:
            least = incumbents.least()
            smaller = _smaller_tiles(least.decisions)
            peaks = []
            for decisions in smaller:
                candidate = yield decisions
                peaks.append(candidate.peak_bytes)
                if peaks[-1] <= (1 - NEGLIGIBLE_SHARE) * least.peak_bytes:
                    break
            if not peaks or peaks[-1] > (1 - NEGLIGIBLE_SHARE) * least.peak_bytes:
                return

    def improve(self, budget_bytes: int, best: Candidate) -> Proposals:
        """Yields the plan with tiles of the loss as large as the budget leaves room for."""
        tokens = loss_tokens(best.decisions)
        if not tokens or self.found.head is None:
            return
        head = self.found.head.head
        room = (budget_bytes - best.peak_bytes) // _MAX_TILE_COPIES
        larger = head.tile_tokens(tokens * head.token_bytes + room)
        if larger >= 2 * tokens:
            yield retile(best.decisions, larger)

    def why_not_tried(self) -> dict[str, str]:
        """Returns why there is no head, or no module, to tile."""
        return self.found.missing if self._found is not None else {}


class _Found:
    """The heads and modules of a step that can be tiled.

    Attributes:
        head: the head of a language model.
        modules: position-wise ones.
        sets: what is tiled together, with the views of the step with it, and those in which something is offloaded too.
        missing: by action, why there is nothing to tile.
    """

    def __init__(self, step: PlannedStep) -> None:
        simulator = step.simulator
        self.head: TiledHead | None = None
        self.modules: TiledModules | None = None
        self.sets: list[tuple[ViewSet, tuple[View, ...], tuple[View, ...]]] = []
        self.missing: dict[str, str] = {}
        peak_bytes = simulator.plain.peak_bytes
        if "tile" in step.actions:
            progress.advance("capturing the step with its head tiled")
            self.head = find_tiled_head(simulator.spec, simulator.trace, peak_bytes=peak_bytes)
            if self.head is not None:
                self._add(step, step.views.tiled((self.head.decision,), trace=self.head.trace))
            else:
                self.missing["tile"] = "no head was found whose loss can run over tiles"
        if "tile-modules" in step.actions:
            progress.advance("proving which modules are position-wise")
            self.modules = find_tiled_modules(simulator.spec, simulator.trace, peak_bytes=peak_bytes)
            for tiles in self._module_sets(self.modules):
                progress.advance(f"capturing the step with {len(tiles)} modules tiled")
                self._add(step, step.views.tiled(tiles))
            if not self.modules.kinds:
                refused = "; ".join(f"`{path}`: {why}" for path, why in self.modules.refused.items())
                self.missing["tile-modules"] = refused or "no module holds twice as much inside as it is given"

    def _module_sets(self, modules: TiledModules) -> list[Decisions]:
        head: Decisions = (self.head.decision,) if self.head is not None else ()
        around_head = [h.path for h in head]  # tiled with the loss, it is in no other module's tiles
        found: list[Decisions] = []
        for kinds in sets_to_try(modules.kinds):
            chosen: list[Decision] = [
                d for d in modules.decisions(kinds) if not any(f"{h}.".startswith(f"{d.path}.") for h in around_head)
            ]
            if chosen:
                found.append((*chosen, *head))
        return found

    def _add(self, step: PlannedStep, tiles: ViewSet) -> None:
        link = step.simulator.link
        moving = () if link is None else moving_views(step, tiles, link)
        self.sets.append((tiles, tiles.views, moving))


def _with_fewer_tiles(tiles: Decisions, budget_bytes: int, incumbents: Incumbents, allowance: Allowance) -> Proposals:
    """Yields the fastest plan with these tiles, and everything rederived, with as few modules tiled as needed.

    Those that backward comes to first stay.
    """
    fitting = [c for c in incumbents.fitting(budget_bytes) if c.decisions[-len(tiles) :] == tiles]
    if not fitting or not any(isinstance(d, TileModule) for d in tiles):
        return
    starts = [min(fitting, key=lambda c: c.step_seconds)]
    starts += [c for c in fitting if c.decisions == (*EVERYWHERE, *tiles) and c is not starts[0]]
    for candidate in starts:
        modules = [d for d in candidate.decisions if isinstance(d, TileModule)]
        fewest, most = 0, len(modules)
        while fewest < most and not allowance.is_spent(incumbents):
            kept = (fewest + most) // 2
            dropped = modules[: len(modules) - kept]
            tried = yield tuple(d for d in candidate.decisions if d not in dropped)
            if tried.peak_bytes <= budget_bytes and tried.step_seconds <= candidate.step_seconds:
                candidate, most = tried, kept
            else:
                fewest = kept + 1


def _smaller_tiles(decisions: Decisions) -> list[Decisions]:
    """Returns the plan with tiles of half the size: the modules', the loss's, both."""
    tokens = loss_tokens(decisions)
    smaller = [halve_module_tiles(decisions, fewest=_FEWEST_TILE_ROWS)]
    if tokens > _FEWEST_TILE_ROWS:
        smaller += [retile(decisions, tokens // 2), retile(smaller[0], tokens // 2)]
    return [d for d in dict.fromkeys(smaller) if d != decisions]
