"""A model's layers, and modules by name: found from its structure, nothing is run.

The *layers* are the members of the list (`nn.ModuleList`, `nn.Sequential`, or siblings of one class) that together hold
the most parameters, those with repeated classes first: a transformer's blocks, a ResNet's stages. They may differ.
"""

from __future__ import annotations

import collections
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

from torch import nn

_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_FEED_FORWARD = re.compile(r"^(mlp|ffn|feed_?forward|ff|.*mlp|.*feedforward|.*ffn)$", re.IGNORECASE)
_NORM = re.compile(r"norm", re.IGNORECASE)


def find_layers(model: nn.Module) -> list[str]:
    """Returns the dotted paths of the model's layers, in order; empty if no list of modules is found."""
    best: tuple[tuple[bool, int], list[str]] = ((False, 0), [])
    for path, module in model.named_modules():
        children = [(name, child) for name, child in module.named_children()]
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        kinds = collections.Counter(type(c) for _, c in children if _size(c))
        groups = [children] if is_list else [[(n, c) for n, c in children if type(c) is kind] for kind in kinds]
        for group in groups:
            repeats = max((kinds[type(c)] for _, c in group), default=0)
            rank = (repeats > 1, sum(_size(c) for _, c in group))
            if len(group) > 1 and rank > best[0]:
                best = (rank, [f"{path}.{name}" if path else name for name, _ in group])
    return best[1]


def partition(model: nn.Module) -> list[str]:
    """Returns paths that cover the model without overlap: its layers, and the largest modules beside them."""
    layers = find_layers(model)
    above = {""} | {path[:i] for path in layers for i in range(len(path)) if path[i] == "."}
    found = [
        path
        for path, module in model.named_modules()
        if path not in above and path.rpartition(".")[0] in above and not isinstance(module, nn.ModuleList)
    ]
    return found or [""]


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _attention(model: nn.Module) -> list[str]:
    return _outermost(p for p, m in _below(model) if _is_attention(p, m))


def _is_attention(path: str, module: nn.Module) -> bool:
    name = path.rpartition(".")[2]
    kind = type(module).__name__
    return bool(_ATTENTION.search(kind) or _ATTENTION.search(name)) and not (
        _NORM.search(kind) or isinstance(module, (nn.Dropout, nn.Linear, nn.ModuleList))
    )


def _feed_forward(model: nn.Module) -> list[str]:
    return _outermost(p for p, m in _below(model) if _is_feed_forward(p, m) and not isinstance(m, nn.ModuleList))


def _is_feed_forward(path: str, module: nn.Module) -> bool:
    """Whether its name or its class's says so, or it is linear layers in a row, wider inside than at both ends."""
    if _FEED_FORWARD.match(path.rpartition(".")[2]) or _FEED_FORWARD.match(type(module).__name__):
        return True
    if not isinstance(module, nn.Sequential):
        return False
    parts = [m for m in module if _size(m) and not _NORM.search(type(m).__name__)]
    linear = [m for m in parts if isinstance(m, nn.Linear)]
    return len(linear) == len(parts) > 1 and linear[-1].out_features == linear[0].in_features < linear[0].out_features


def _norms(model: nn.Module) -> list[str]:
    return [p for p, m in _below(model) if _NORM.search(type(m).__name__)]


def _embeddings(model: nn.Module) -> list[str]:
    return _outermost(
        p for p, m in _below(model) if isinstance(m, nn.Embedding) or type(m).__name__.lower().endswith("embeddings")
    )


def _first(model: nn.Module) -> list[str]:
    return find_layers(model)[:1]


def _last(model: nn.Module) -> list[str]:
    return find_layers(model)[-1:]


# Name -> the modules it stands for.
PRESETS: dict[str, Callable[[nn.Module], list[str]]] = {
    "attention": _attention,
    "ffn": _feed_forward,
    "norms": _norms,
    "embeddings": _embeddings,
    "layers": find_layers,
    "first": _first,
    "last": _last,
}


def match(model: nn.Module, patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the paths that the patterns name, in model order, and the patterns that name none.

    Args:
        patterns: each a preset's name or an fnmatch pattern of a dotted path.
    """
    paths = [p for p, _ in _below(model)]
    known = set(paths)
    found: set[str] = set()
    unmatched = []
    for pattern in patterns:
        preset = PRESETS.get(pattern)
        if preset is not None and pattern not in known:
            here = preset(model)
        else:
            here = [p for p in paths if fnmatch.fnmatchcase(p, pattern)]
        if not here:
            unmatched.append(pattern)
        found.update(here)
    return [p for p in paths if p in found], unmatched


def explain_unmatched(model: nn.Module, patterns: Sequence[str], *, what: str) -> str:
    """Returns the sentence for patterns that match nothing."""
    examples = ", ".join(partition(model)[:4]) or "none"
    presets = ", ".join(name for name, find in PRESETS.items() if find(model)) or "none"
    return (
        f"{what}: {', '.join(map(repr, patterns))} match{'es' if len(patterns) == 1 else ''} no module of "
        f"{type(model).__name__} (it has for instance {examples}; presets that match are {presets})"
    )


def outermost(paths: Iterable[str]) -> list[str]:
    """Returns the paths that lie below no other of them, in the same order."""
    return _outermost(paths)


def _outermost(paths: Iterable[str]) -> list[str]:
    listed = list(paths)
    every = set(listed)
    return [p for p in listed if not any(p[:i] in every for i in range(len(p)) if p[i] == ".")]


def _below(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(p, m) for p, m in model.named_modules() if p]
