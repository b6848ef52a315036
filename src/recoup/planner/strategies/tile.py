"""Finding the head and the modules that can be tiled: tried on the captured step, never assumed from a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.errors import UsageError
from recoup.ir.decision import Decision, Tile, TileLoss, TileModule
from recoup.ir.trace import Trace
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions
from recoup.runtime.tile.module.rows import Tiling, tensors_of
from recoup.runtime.tile.module.tiled import is_tileable, proof_of, refuse_hooks
from recoup.solver.lm_head import HeadCall, heads, tile_bytes
from recoup.solver.tiles import TileKind, outermost, tile_kinds


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledHead:
    """A head that was tiled in a captured step.

    Attributes:
        head: which call, and its bytes.
        decision: what was applied.
        trace: of the step with it.
    """

    head: HeadCall
    decision: Decision
    trace: Trace


def find_tiled_head(spec: StepSpec, plain: Trace, *, peak_bytes: int) -> TiledHead | None:
    """Returns the head whose loss ran over tiles, its logits never made, in a capture of the step with it tiled.

    Args:
        plain: the trace of the step as it is.
        peak_bytes: its peak.
    """
    found = heads(plain, peak_bytes=peak_bytes)
    for head in (*found, *_with_adapters(found)):
        tokens = head.tile_tokens(tile_bytes(peak_bytes))
        decision = TileLoss(path=head.path, tile_tokens=tokens)
        before = execution_context.thread_log()
        try:
            applied = apply_decisions(spec.model, (decision,))
        except UsageError:
            continue  # the module around two products is no head with adapters
        with applied:
            trace = capture(spec)
        ran = execution_context.thread_log() - before
        if trace.source == "fake" and ran.num_tiled and not ran.num_logits_made:
            return TiledHead(head=head, decision=decision, trace=trace)
    return None


def _with_adapters(found: Sequence[HeadCall]) -> list[HeadCall]:
    """Returns the module around two products of the same size, as a head: a base layer and its low-rank adapter."""
    if len(found) < 2 or found[0].output_bytes != found[1].output_bytes:
        return []
    shared = []
    for a, b in zip(found[0].path.split("."), found[1].path.split("."), strict=False):
        if a != b:
            break
        shared.append(a)
    return [dataclasses.replace(found[0], path=".".join(shared))] if shared else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledModules:
    """Modules that were proved position-wise in a captured step.

    Attributes:
        kinds: the outermost ones, by what they need for a moment.
        tokens: of the call, by path.
        refused: why others are not, by path.
    """

    kinds: tuple[TileKind, ...]
    tokens: dict[str, int]
    refused: dict[str, str]

    def decisions(self, kinds: Sequence[TileKind]) -> tuple[Decision, ...]:
        """Returns decisions that tile every call of some kinds, each tile taking the bytes of the call's input."""
        found = []
        for kind in kinds:
            tokens = kind.tile_tokens(self.tokens[kind.paths[0]])
            found += [TileModule(path=p, tile_tokens=tokens) for p in kind.paths]
        return tuple(found)


def find_tiled_modules(spec: StepSpec, plain: Trace, *, peak_bytes: int) -> TiledModules:
    """Returns the modules worth tiling whose forward was proved position-wise on the step's own inputs.

    Args:
        plain: the trace of the step as it is.
        peak_bytes: its peak.
    """
    kinds = tile_kinds(plain, peak_bytes=peak_bytes)
    modules = dict(spec.model.named_modules(remove_duplicate=False))
    tokens: dict[str, int] = {}
    refused: dict[str, str] = {}
    removers = []
    for kind in kinds:
        path = kind.paths[0]
        try:
            for each in kind.paths:
                refuse_hooks(each, modules[each], below=True)
        except UsageError as error:
            refused[path] = str(error)
            continue
        hook = _Judge(kind, tokens, refused)
        removers.append(modules[path].register_forward_pre_hook(hook, with_kwargs=True))
    try:
        if removers:
            capture(spec, known=plain)
    finally:
        for remover in removers:
            remover.remove()
    proved = {path for path in tokens if path not in refused}
    return TiledModules(kinds=tuple(outermost(kinds, proved)), tokens=tokens, refused=refused)


class _Judge:
    """A forward pre-hook: notes whether a module that is called now is position-wise.

    An object of ours: what a capture notes and puts back of everything that hooks reach is not its.
    """

    def __init__(self, kind: TileKind, tokens: dict[str, int], refused: dict[str, str]) -> None:
        self.kind = kind
        self.tokens = tokens
        self.refused = refused

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        path = self.kind.paths[0]
        if execution_context.is_in_tile() or path in self.tokens or path in self.refused:
            return
        if not is_tileable(args, kwargs):
            self.refused[path] = "it is not given positions and features"
            return
        num = tensors_of((args, kwargs))[0].shape[:-1].numel()
        tiling = Tiling(path, module.forward, args, kwargs, tile_rows=self.kind.tile_tokens(num))
        reason = proof_of(tiling, module).reason
        if reason:
            self.refused[path] = reason
        else:
            self.tokens[path] = num


def retile(decisions: Sequence[Decision], tile_tokens: int) -> tuple[Decision, ...]:
    """Returns the decisions with another tile size for the loss."""
    return tuple(dataclasses.replace(d, tile_tokens=tile_tokens) if isinstance(d, TileLoss) else d for d in decisions)


def halve_module_tiles(decisions: Sequence[Decision], *, fewest: int) -> tuple[Decision, ...]:
    """Returns the decisions with modules' tiles of half the size, not below `fewest` tokens."""
    return tuple(
        dataclasses.replace(d, tile_tokens=max(d.tile_tokens // 2, fewest))
        if isinstance(d, TileModule) and d.tile_tokens > fewest
        else d
        for d in decisions
    )


def loss_tokens(decisions: Sequence[Decision]) -> int:
    """Returns the tokens in one tile of the loss, 0 if it is not tiled."""
    return next((d.tile_tokens or 1 for d in decisions if isinstance(d, TileLoss)), 0)


def with_tiles(chosen: Sequence[Decision], tiles: Sequence[Decision]) -> tuple[Decision, ...]:
    """Returns the decisions with `tiles` added, without those about modules inside of a tiled call."""
    modules = {d.path for d in tiles if isinstance(d, TileModule)}
    prefixes = tuple(f"{d.path}." for d in tiles if isinstance(d, Tile))

    def stays(decision: Decision) -> bool:
        if f"{decision.path}.".startswith(prefixes):
            return decision.path in modules and len(decision.paths) > 1
        return True

    return (*(d for d in chosen if stays(d)), *tiles)


def is_tiled(decisions: Sequence[Decision]) -> bool:
    """Whether any decision tiles, so that sums round differently than in the plain step."""
    return not all(d.is_exact for d in decisions)
