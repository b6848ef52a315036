"""The action `tile` on a model.

Its head returns logits that are not there, and the loss runs over tiles; a position-wise module runs over tiles itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.errors import UsageError
from recoup.ir.decision import Decision, Tile, TileLoss, TileModule
from recoup.runtime.ambient import run_under
from recoup.runtime.patch import PatchedForward
from recoup.runtime.recompute.scope import inside_region
from recoup.runtime.tile.loss.arguments import default_tile_tokens
from recoup.runtime.tile.loss.lazy_logits import Head, lazy_logits
from recoup.runtime.tile.module.tiled import Proofs, is_tileable, refuse_hooks


def check_tiled(modules: Mapping[str, nn.Module], decisions: Sequence[Decision]) -> None:
    """Raises unless every module that `tile` names can be a tiled head, or be run over tiles itself.

    Whether a module is position-wise is proved when it runs: only then is it known what it is given.

    Raises:
        UsageError: if a head is not a `torch.nn.Linear`, or something inside a tiled module has
            a hook or a decision of its own.
    """
    for decision in decisions:
        if not isinstance(decision, Tile):
            continue
        module = modules[decision.path]
        if isinstance(decision, TileModule):
            _check_module(decision, module, decisions)
        elif not _linears(module):
            raise UsageError(
                f"The plan tiles `{decision.path}`, a {type(module).__name__}; tiling needs the torch.nn.Linear that "
                "makes the logits. Name that one. (recoup.runtime.tile.apply)"
            )


def _check_module(decision: TileModule, module: nn.Module, decisions: Sequence[Decision]) -> None:
    path = decision.path
    prefix = f"{path}." if path else ""
    inside = [p for d in decisions for p in d.paths if p != path and p.startswith(prefix)]
    if inside:
        raise UsageError(
            f"The plan runs `{path}` over tiles and decides about `{inside[0]}` inside it, which could have no effect. "
            "Leave one of the two out. (recoup.runtime.tile.apply)"
        )
    refuse_hooks(path, module, below=True)


def _linears(module: nn.Module) -> list[str]:
    """Returns the paths, below a head, of the products that make its logits: one, or those of its adapters too."""
    found = [(name, m) for name, m in module.named_modules() if isinstance(m, nn.Linear)]
    if isinstance(module, nn.Linear) and len(found) == 1:
        return [""]
    base = getattr(module, "base_layer", None)
    if not isinstance(base, nn.Linear):
        return []
    return [name for name, m in found if m is not module and m.out_features == base.out_features]


def spread_tiled(modules: Mapping[str, nn.Module], decisions: Sequence[Decision]) -> list[Decision]:
    """Returns the decisions with a tiled head that has adapters (PEFT's LoRA) replaced by its products, each tiled."""
    found: list[Decision] = []
    for decision in decisions:
        is_head = isinstance(decision, TileLoss)
        names = _linears(modules[decision.path]) if is_head else [""]
        for name in names:
            path = ".".join(part for part in (decision.path, name) if part)
            found.append(dataclasses.replace(decision, path=path) if name else decision)
    return found


def prepare_tiles(modules: Mapping[str, nn.Module], decisions: Sequence[Decision]) -> Sequence[Decision]:
    """Returns a plan's decisions with tiled heads spread over adapters, all tiles checked.

    Raises:
        UsageError: see `check_tiled`.
    """
    check_tiled(modules, decisions)
    return spread_tiled(modules, decisions)


def run_module_call(
    decision: TileModule, patched: PatchedForward, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns a position-wise module's output, computed over tiles where the call allows it."""
    if not is_tileable(args, kwargs):
        return patched.original(*args, **kwargs)
    proofs: Proofs = patched.settings.state.proofs
    return proofs.run(decision.path, patched.module, patched.original, args, kwargs, decision.tile_tokens)


def run_loss_call(
    decision: TileLoss, patched: PatchedForward, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns a head's lazy logits, or its own output where its call does not allow it.

    Inside a region it runs whole: logits that are not there cannot leave one.
    """
    if inside_region():
        return run_under(decision, patched, forward, args, kwargs)
    module = patched.module
    hidden = args[0] if len(args) == 1 and not kwargs else None
    plain_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    plain_linear &= not _torch.is_fsdp_unit(module)  # its weight is there in its own forward only
    if not isinstance(hidden, torch.Tensor) or not plain_linear or patched.previous is not None or hidden.dim() < 2:
        return patched.original(*args, **kwargs)
    assert isinstance(module, nn.Linear)
    tokens = decision.tile_tokens or default_tile_tokens(hidden.view(-1, hidden.shape[-1]), module.weight)
    return lazy_logits(Head(hidden, module.weight, module.bias, tokens, patched.original))
