"""From a configuration and a model to the engine's decisions: structure and a profile in, plain data out."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from torch import nn

from recoup.errors import UsageError
from recoup.ir.decision import Decision, Recompute
from recoup.selective.config import CheckpointConfig
from recoup.selective.layers import explain_unmatched, find_layers, match, outermost
from recoup.selective.profile_report import ProfileReport


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Paths of consecutive layers that become regions, each group one region. `warnings`: sentences for the user."""

    groups: tuple[tuple[str, ...], ...]
    warnings: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        """Every layer that is recomputed, in model order."""
        return [path for group in self.groups for path in group]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The same for the engine."""
        return tuple(Recompute(path=g[0], span=g[1:]) for g in self.groups)


def choose(config: CheckpointConfig, model: nn.Module, report: ProfileReport | None) -> Chosen:
    """Returns the regions that `config` asks for on this model ("budget" is not decided here).

    Raises:
        UsageError: if the strategy finds nothing to work on: no list of layers, or no profile.
    """
    excluded, lost = match(model, config.exclude_patterns)
    warnings = [explain_unmatched(model, lost, what="exclude_patterns")] if lost else []
    included, lost = match(model, config.include_patterns)
    if lost:
        warnings.append(explain_unmatched(model, lost, what="include_patterns"))
    clash = [p for p in included if _under(p, excluded)]
    if clash:
        warnings.append(
            f"{', '.join(f'`{p}`' for p in clash[:3])}{' and more' if len(clash) > 3 else ''}: matched by "
            "include_patterns and by exclude_patterns; exclude wins"
        )
    groups = _by_strategy(config, model, report)
    groups = [part for group in groups for part in _without(model, group, excluded)]
    taken = {path for group in groups for path in group}
    extra = [p for p in outermost(_callable(model, included)) if not _under(p, taken)]
    extra = [part[0] for p in extra for part in _without(model, (p,), excluded)]
    # A region around another would replay it twice: what a pattern names takes the place of what lies inside it.
    groups = [g for g in groups if not any(_under(p, extra) for p in g)]
    order = {path: i for i, (path, _) in enumerate(model.named_modules())}
    groups = sorted([*groups, *((p,) for p in extra)], key=lambda g: order[g[0]])
    return Chosen(groups=tuple(groups), warnings=tuple(warnings))


def _by_strategy(config: CheckpointConfig, model: nn.Module, report: ProfileReport | None) -> list[tuple[str, ...]]:
    if config.strategy == "none":
        return []
    if config.strategy == "selective":
        if report is None:
            if config.include_patterns and not config.profile_before_apply:
                return []
            raise UsageError(
                "strategy='selective' chooses by measured activations and has no profile. Give "
                "SelectiveCheckpointer(config, profiler) a MemoryProfiler that has profiled a batch, pass a "
                "profile_report to apply, or set include_patterns with profile_before_apply=False."
            )
        known = dict(model.named_modules())
        unknown = [layer.path for layer in report.layers if layer.path not in known]
        if unknown:
            raise UsageError(
                f"The profile report names `{unknown[0]}`, which {type(model).__name__} does not have. Profile this "
                "model."
            )
        return [(path,) for path in report.over(config.memory_threshold_mb)]
    layers = find_layers(model)
    if not layers:
        raise UsageError(
            f"strategy={config.strategy!r} needs a list of layers, and {type(model).__name__} has none (no "
            "ModuleList, Sequential or repeated class). Use include_patterns, or strategy='budget'."
        )
    units = _units(model, layers)
    if config.strategy == "full":
        return units[:: config.every]
    return _segments(units, config.sequential_segments)


def _units(model: nn.Module, layers: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the layers, those without parameters together with the one before: alone they would free nothing."""
    modules = dict(model.named_modules())
    if any(next(modules[path].children(), None) is not None for path in layers):
        return [(path,) for path in layers]
    units: list[tuple[str, ...]] = []
    for path in layers:
        if units and next(modules[path].parameters(), None) is None:
            units[-1] = (*units[-1], path)
        else:
            units.append((path,))
    return units


def _segments(units: Sequence[tuple[str, ...]], num_segments: int | None) -> list[tuple[str, ...]]:
    """Returns all segments but the last, which backward replays first: keeping it costs nothing at the peak."""
    if num_segments is not None and num_segments > len(units):
        raise UsageError(f"sequential_segments={num_segments} is more than the {len(units)} layers. Use at most that.")
    wanted = num_segments if num_segments is not None else max(1, round(math.sqrt(len(units))))
    bounds = [round(i * len(units) / wanted) for i in range(wanted + 1)]
    segments = [sum(units[a:b], ()) for a, b in itertools.pairwise(bounds)]
    return segments[:-1] if len(segments) > 1 else segments


def _under(path: str, others: Sequence[str] | set[str]) -> bool:
    return any(path == other or path.startswith(other + ".") for other in others)


def _above(path: str, others: Sequence[str]) -> bool:
    return any(other.startswith(path + ".") for other in others)


def _callable(model: nn.Module, paths: Sequence[str]) -> list[str]:
    """Returns the paths with each plain list of modules, which has no forward, replaced by its members."""
    found: list[str] = []
    modules = dict(model.named_modules())
    for path in paths:
        if isinstance(modules[path], (nn.ModuleList, nn.ModuleDict)):
            found += [f"{path}.{name}" for name, _ in modules[path].named_children()]
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def _without(model: nn.Module, group: tuple[str, ...], excluded: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the group cut at excluded modules; a layer that holds one is taken apart into the rest of it."""
    parts: list[list[str]] = [[]]
    for path in group:
        if _under(path, excluded):
            parts.append([])
        elif _above(path, excluded):
            parts += [*([inner] for inner in _rest_of(model, path, excluded)), []]
        else:
            parts[-1].append(path)
    return [tuple(part) for part in parts if part]


def _rest_of(model: nn.Module, path: str, excluded: Sequence[str]) -> list[str]:
    """Returns the modules below `path` that are not excluded, without single ops, which alone would free nothing."""
    found: list[str] = []
    for name, child in model.get_submodule(path).named_children():
        inner = f"{path}.{name}"
        if _under(inner, excluded):
            continue
        if _above(inner, excluded) or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _rest_of(model, inner, excluded)
        elif next(child.children(), None) is not None:
            found.append(inner)
    return found
