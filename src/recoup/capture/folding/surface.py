"""Interface of a call: metadata of arguments, state and results, to compare two calls and to replace one."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._pytree import flatten, open_nest
from recoup.capture.island import TINY_ELEMENTS

PLAIN_TYPES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size, slice}
)
_MAX_DEPTH = 3  # levels of attributes inside an argument that is no container


class Unlike(Exception):
    """No tensor like this one can be created (another layout, a subclass)."""


class _Slot:
    """Placeholder of the i-th result tensor in a call's return value, or in an attribute that it sets."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclasses.dataclass(slots=True)
class Result:
    """One result tensor of a call: the input that it is identical to, or the metadata to make one like it.

    `storage`: its index, counted from the first storage that the call made.
    """

    traits: tuple[Any, ...]
    source: int
    storage: int
    template: _torch.FakeTemplate | None


@dataclasses.dataclass(frozen=True, slots=True)
class Lineage:
    """Changes of a rederive plan's recorder over a call.

    Attributes:
        turns: number of saved tensors that the call counted.
        inputs, results: indices of those that are kept from this call on.
        derived: indices of results that are not kept and may be rebuilt.
    """

    turns: int = 0
    inputs: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    derived: tuple[int, ...] = ()


@dataclasses.dataclass(slots=True)
class Surface:
    """Interface of an executed call, with all that is needed to replace another one by a mark."""

    description: Any
    values: Any
    results: list[Result]
    output: Any
    changes: list[tuple[dict[str, Any], str, Any]]
    flows: tuple[int, ...]
    gradients: list[_torch.FakeTemplate]
    num_calls: dict[str, int]
    shapes: Any
    held: tuple[tuple[int, ...], tuple[int, ...]]
    lineage: Lineage
    looks_at_values: bool = False

    def fits(self, description: Any, values: Any) -> bool:
        """Whether a call with this description and these values may be replaced by this one."""
        return bool(self.description == description and (values == self.values or not self.looks_at_values))

    def looks(self) -> Any:
        """Returns the parts that have to be equal for two executed calls."""
        return (
            self.description,
            self.values if self.looks_at_values else None,
            [(r.traits, r.source, r.storage) for r in self.results],
            [(id(table), name) for table, name, _ in self.changes],
            self.flows,
            self.num_calls,
            self.shapes,
            self.held,
            self.lineage,
        )


def traits_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a tensor's metadata as ops see it.

    Raises:
        Unlike: if no tensor like it can be created.
    """
    traits = _torch.fake_traits(tensor)
    if traits is None:
        if _torch.is_fake(tensor):
            raise Unlike
        return (tensor.shape, tensor.stride(), tensor.dtype, "real", tensor.requires_grad)
    return (*traits, tensor.grad_fn is None)


def values_of(tensor: torch.Tensor) -> Any:
    """Returns the values of a real tensor; of one with more than `TINY_ELEMENTS` elements its identity."""
    if tensor.numel() > TINY_ELEMENTS:
        return id(tensor)
    with _torch.without_dispatch_modes():
        return tuple(tensor.detach().flatten().tolist())


def describe(value: Any, tensors: list[torch.Tensor], seen: dict[int, int], depth: int = 0) -> Any:
    """Returns a description of a value, each distinct tensor by its number; the tensors are added to the list."""
    kind = type(value)
    if kind in PLAIN_TYPES:
        return kind, value if kind is not slice else (value.start, value.stop, value.step)
    if isinstance(value, torch.Tensor):
        number = seen.get(id(value))
        if number is None:
            number = seen[id(value)] = len(tensors)
            tensors.append(value)
        return "tensor", number
    if isinstance(value, dict):
        return kind, tuple((key, describe(item, tensors, seen, depth)) for key, item in value.items())
    opened = open_nest(value)
    if opened is not None:
        return kind, tuple(describe(item, tensors, seen, depth) for item in opened[0])
    if isinstance(value, (nn.Module, type)) or callable(value) or depth >= _MAX_DEPTH or not hasattr(value, "__dict__"):
        return kind, id(value)
    inside = tuple((k, describe(v, tensors, seen, depth + 1)) for k, v in vars(value).items())
    return kind, id(value), inside


def skeleton_of(value: Any, seen: dict[int, int]) -> Any:
    """Returns a pytree with placeholders for its tensors."""
    leaves, structure = flatten((value,))
    return structure, [_Slot(seen[id(leaf)]) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def fill(skeleton: Any, results: list[torch.Tensor]) -> Any:
    """Returns the pytree of a skeleton with tensors in place of the placeholders."""
    structure, leaves = skeleton
    return structure.unflatten([results[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in leaves])[0]


def edge_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Returns the autograd edge of a tensor: the number of its node and its index among the node's results.

    None if it needs no gradient or is a leaf.
    """
    node = tensor.grad_fn
    return None if node is None else (_torch.node_number(node), tensor.output_nr)


def flows_of(edges: list[tuple[int, int] | None], results: list[torch.Tensor], first_node: int) -> tuple[int, ...]:
    """Returns which of the inputs with these edges the results' gradients flow to, through nodes since `first_node`.

    Inputs that are the same tensor in every call get their gradients from the calls that are run.
    """
    wanted = {edge: i for i, edge in enumerate(edges) if edge is not None}
    found: set[int] = set()
    stack = [t.grad_fn for t in results if t.grad_fn is not None]
    visited: set[int] = set()
    while stack:
        node = stack.pop()
        number = _torch.node_number(node)
        if number in visited:
            continue
        visited.add(number)
        for following, result in node.next_functions:
            if following is None:
                continue
            at = _torch.node_number(following)
            if (at, result) in wanted:
                found.add(wanted[at, result])
            if first_node <= at < 2**63:
                stack.append(following)
    return tuple(sorted(found))
