"""Position-wise modules over tiles, in people's own loops and for plans: proved first, then run.

The proof (`position_wise.py`) runs the forward under fake tensors, on the whole call and on one tile of it, which must
run the same ops. For a module it is made once for each shape, mode and state of its plain attributes; then a first real
tile is compared with what half of it gives alone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._pytree import map_tensors
from recoup.errors import UsageError
from recoup.runtime import execution_context
from recoup.runtime.recompute.module_state import walk
from recoup.runtime.tile.module.facts import Facts
from recoup.runtime.tile.module.position_wise import Proof, prove
from recoup.runtime.tile.module.rows import Tiling, run_tiles, tensors_of
from recoup.thresholds import MOST_REMEMBERED_ANSWERS

_WHERE = "(recoup.runtime.tile.module.tiled)"
_SKIPPED = frozenset({"forward"})
_CONTAINERS = (list, dict, set)


def tiled(
    function: Callable[..., Any],
    *args: Any,
    num_tiles: int | None = None,
    tile_tokens: int | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Returns `function(*args, **kwargs)` run over tiles of positions: what it needs for a moment is a tile's.

    Positions are all dimensions of the first tensor but its last. Every tensor among the arguments with the same
    leading sizes is cut with it; other tensors go whole to each tile. Backward runs each tile's forward again: it
    costs one more forward, and keeps nothing but the arguments. Parameters' gradients are sums over tiles, which round
    differently (in float32 where the parameters have fewer bits); the result and the gradients of what is cut are
    those of the plain call as far as the kernels give a row the same bits in a tile of another height. A call of one
    position is the plain one.

    Args:
        function: a module or function that treats each position by itself and returns one tensor, a row a position.
            This is proved on fake tensors before anything runs (some ten milliseconds): for a function at each call,
            for a module once for each shape and mode, and again after an attribute or a module in it was replaced.
        num_tiles: number of tiles; give this or `tile_tokens`.
        tile_tokens: positions of a tile; give this or `num_tiles`.

    Raises:
        UsageError: if it is not position-wise, with the op that is not; if it draws random numbers, or changes a
            buffer, an attribute or an input; if the arguments hold no tensor of two or more dimensions.

    Example:
        >>> layer, x = torch.nn.Linear(64, 256), torch.randn(8, 128, 64)
        >>> recoup.tiled(layer, x, num_tiles=4).shape
        torch.Size([8, 128, 256])
    """
    if torch.compiler.is_compiling():  # runs whole: what a compiler fuses needs no tiles
        whole: torch.Tensor = function(*args, **kwargs)
        return whole
    if (num_tiles is None) == (tile_tokens is None):
        raise UsageError(f"Give one of num_tiles and tile_tokens; got {num_tiles} and {tile_tokens}. {_WHERE}")
    given = num_tiles if num_tiles is not None else tile_tokens
    if not isinstance(given, int) or given < 1:
        raise UsageError(f"num_tiles and tile_tokens are whole numbers of at least 1; got {given!r}. {_WHERE}")
    if not is_tileable(args, kwargs):
        raise UsageError(
            "The first tensor among the arguments has to have two or more dimensions, positions first and features "
            f"last, and some positions. {_WHERE}"
        )
    rows = tensors_of((args, kwargs))[0].shape[:-1].numel()
    tile_rows = -(-rows // num_tiles) if num_tiles is not None else given
    name = type(function).__name__ if isinstance(function, nn.Module) else getattr(function, "__name__", "function")
    if isinstance(function, nn.Module):
        refuse_hooks(name, function, below=False)
        return _proofs.setdefault(function, Proofs()).run(name, function, function, args, kwargs, tile_rows)
    tiling = Tiling(name, function, args, kwargs, tile_rows=tile_rows)
    if tiling.num_rows == 1:
        plain: torch.Tensor = function(*args, **kwargs)
        return plain
    proof = proof_of(tiling, None)
    if proof.reason:
        raise UsageError(f"`{name}` cannot be run over tiles of positions: {proof.reason}. {_WHERE}")
    return run_tiles(tiling, proof.leaves)


def is_tileable(args: Any, kwargs: Any) -> bool:
    """Whether a call's first tensor has positions and features."""
    tensors = tensors_of((args, kwargs))
    return bool(tensors) and tensors[0].dim() > 1 and tensors[0].numel() > 0 and tensors[0].layout is torch.strided


def refuse_hooks(path: str, module: nn.Module, *, below: bool) -> None:
    """Raises UsageError if a hook would run once a tile: one of a module inside, or with `below` False of itself."""
    for name, child in module.named_modules():
        if below and child is module:
            continue
        if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
            where = ".".join(part for part in (path, name) if part)
            raise UsageError(f"`{where}` has a hook, which would run once for each tile of `{path}`. {_WHERE}")


def proof_of(tiling: Tiling, module: nn.Module | None) -> Proof:
    """Returns the proof for the whole call and for a tile of it; the module is as it was afterwards.

    Args:
        module: whose forward runs, if it is one: its attributes are watched.
    """
    pairs = list(zip(tiling.tensors, tiling.is_tiled, strict=True))
    others = {id(t): t.detach().requires_grad_(t.requires_grad) for t, is_tiled in pairs if not is_tiled}
    cut = [t for t, is_tiled in pairs if is_tiled]

    def run(given: list[torch.Tensor]) -> Any:
        return tiling.call({**others, **{id(t): g for t, g in zip(cut, given, strict=True)}})

    changed: list[str] = []
    with execution_context.in_tile(), _restored(module, changed):
        # A single position is told from none by nothing: such a tile is one of two.
        tile_shape = (*(1,) * (len(tiling.leading) - 1), max(tiling.tile_rows, 2))
        proof = prove(run, cut, tiling.leading)
        if not proof.reason:
            tile = prove(run, cut, tile_shape)
            if tile.reason or tile.ops != proof.ops:
                proof = Proof(reason=tile.reason or "it runs other ops on a tile than on the whole")
    if not proof.reason and changed:
        proof = Proof(reason=f"its forward changes `{changed[0]}`")
    if proof.reason:
        return proof
    given = [id(t) for t in others.values()]
    return Proof(reason="", leaves=tuple(p for p in proof.leaves if id(p) not in given), ops=proof.ops)


@contextlib.contextmanager
def _restored(module: nn.Module | None, changed: list[str]) -> Iterator[None]:
    """Puts the attributes of a module and of those in it back as they were, and notes which were changed."""
    if module is None:
        yield
        return
    before = []
    for path, child in walk(module):
        attributes = {k: v for k, v in child.__dict__.items() if k not in _SKIPPED}
        copies = {k: v.copy() for k, v in attributes.items() if isinstance(v, _CONTAINERS)}
        before.append((path, child, attributes, copies))
    try:
        yield
    finally:
        for path, child, attributes, copies in before:
            now = child.__dict__
            for key in [k for k in now if k not in attributes and k not in _SKIPPED]:
                changed.append(f"{path}.{key}" if path else key)
                del now[key]
            for key, value in attributes.items():
                if now.get(key) is not value:
                    changed.append(f"{path}.{key}" if path else key)
                    now[key] = value
            for key, copy in copies.items():
                held: Any = attributes[key]
                if not _same(held, copy):
                    changed.append(f"{path}.{key}" if path else key)
                    held.clear()
                    held.extend(copy) if isinstance(held, list) else held.update(copy)


def _same(held: Any, copy: Any) -> bool:
    if isinstance(held, dict):
        return list(held) == list(copy) and all(held[k] is copy[k] for k in held)
    if isinstance(held, list):
        return len(held) == len(copy) and all(a is b for a, b in zip(held, copy, strict=True))
    return bool(held == copy)


class Proofs:
    """Proofs about the tiled modules of a plan, or about one module: names of parameters, by shape and mode.

    On fake tensors a proof is made once too; on real ones a first tile is compared besides.
    """

    def __init__(self) -> None:
        self._leaves: dict[Any, tuple[str, ...]] = {}

    def run(
        self, path: str, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any, rows: int
    ) -> torch.Tensor:
        """Runs a module's forward over tiles and returns its output.

        Args:
            run: the forward.
            rows: positions of a tile.

        Raises:
            UsageError: if the module is not position-wise.
        """
        tiling = Tiling(path, run, args, kwargs, tile_rows=rows)
        if tiling.num_rows == 1:
            plain: torch.Tensor = run(*args, **kwargs)
            return plain
        parameters = dict(module.named_parameters(remove_duplicate=False))
        is_fake = _torch.is_fake(tiling.tensors[0])
        key = (path, is_fake, _mode_of(tiling, module, parameters))
        names = self._leaves.get(key)
        if names is None:
            names = self._prove(path, module, tiling, parameters)
            if not is_fake:
                _compare(tiling)
            if len(self._leaves) == MOST_REMEMBERED_ANSWERS:
                self._leaves.clear()
            self._leaves[key] = names
        return run_tiles(tiling, [parameters[name] for name in names])

    def _prove(
        self, path: str, module: nn.Module, tiling: Tiling, parameters: dict[str, nn.Parameter]
    ) -> tuple[str, ...]:
        proof = proof_of(tiling, module)
        named = {id(p): name for name, p in parameters.items()}
        reason = proof.reason
        if not reason and any(id(leaf) not in named for leaf in proof.leaves):
            reason = "it reads a parameter that is not its own"
        if reason:
            raise UsageError(
                f"`{path}`, a {type(module).__name__}, cannot be run over tiles of positions: {reason}. Leave it out. "
                f"{_WHERE}"
            )
        return tuple(named[id(leaf)] for leaf in proof.leaves)


def _mode_of(tiling: Tiling, module: nn.Module, parameters: dict[str, nn.Parameter]) -> Any:
    """Returns the key of a proof: shapes, what its modules are, plain arguments, what needs gradients, autocast."""
    tensors = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tiling.tensors)
    device = tiling.tensors[0].device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    plain = repr(map_tensors(lambda t: None, (tiling.args, tiling.kwargs)))
    trained = tuple((name, p.requires_grad) for name, p in parameters.items())
    return tensors, tiling.tile_rows, Facts().of(module), plain, trained, autocast


def _compare(tiling: Tiling) -> None:
    """Raises UsageError if the first half of a tile alone is not what it is in the tile."""
    half = min(tiling.tile_rows, tiling.num_rows) // 2
    if not half:
        return
    with torch.no_grad(), execution_context.in_tile():
        rows = tiling.tiled_rows()
        whole, part = (
            tiling.call({id(t): r.narrow(-2, 0, size) for t, r in rows}).detach() for size in (2 * half, half)
        )
        furthest = float((whole.narrow(-2, 0, half).double() - part.double()).abs().max())
        # Further apart than rounding takes them, nearer than mixing positions does.
        allowed = torch.finfo(whole.dtype).eps ** 0.5 * float(part.abs().max())
    if furthest > allowed:
        raise UsageError(
            f"`{tiling.path}` gives other values for {half} positions alone than among {2 * half} (up to "
            f"{furthest:.3g} apart, of {float(part.abs().max()):.3g}); it is not position-wise. {_WHERE}"
        )


_proofs: weakref.WeakKeyDictionary[nn.Module, Proofs] = weakref.WeakKeyDictionary()  # facts, proved again if lost
