"""What a compiled graph will store, by the compiler's own plan: its code is run on fake tensors, its kernels left out.

Inductor decides late what is fused, in which order kernels run and which buffer lies where another lay. All of that is
in the Python code that it writes around its kernels, which allocates, calls and deletes. That code is run here as it
is, forward and then backward on what forward returns, before any kernel has run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from recoup import _torch
from recoup._pytree import argument_tensors
from recoup.compiled.schedule import Timeline
from recoup.cost.measured import MeasuredCost
from recoup.cost.signature import make_signature
from recoup.ir.trace import Signature


@dataclasses.dataclass(frozen=True, slots=True)
class GraphCode:
    """A graph's code.

    Attributes:
        inputs, results: the graph's names of them. examples: fake inputs. source: what inductor wrote.
    """

    inputs: tuple[str, ...]
    results: tuple[str, ...]
    examples: tuple[Any, ...]
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedLevels:
    """The levels of a graph by its code, above what was there before, as those of a `Timeline`.

    Attributes:
        forward, backward: bytes at each allocation, with the op that may have workspace of its own.
        held_bytes, held_result_bytes: at the end of forward, as those of a `Timeline`.
    """

    forward: tuple[tuple[int, Signature | None], ...]
    backward: tuple[tuple[int, Signature | None], ...]
    held_bytes: int
    held_result_bytes: int


PlannedChoices = Mapping[tuple[str, Timeline], PlannedLevels]
"""By graph and choice."""


def planned_levels(forward: GraphCode, backward: GraphCode, num_results: int) -> PlannedLevels:
    """Returns the levels of a graph's forward and backward.

    Args:
        num_results: how many of forward's results are the user's; the others are what backward reads.
    """
    with _torch.fake_tensor_mode():
        given = {name: _alike(example) for name, example in zip(forward.inputs, forward.examples, strict=True)}
        meter = _Meter(list(argument_tensors(tuple(given.values()))))
        held = dict(zip(forward.results, meter.run(forward.source, list(given.values())), strict=True))
        forward_levels = meter.take()
        returned, kept = list(held.values())[:num_results], dict(list(held.items())[num_results:])
        del held
        left_out = meter.nbytes(list(argument_tensors(tuple(returned))))
        held_bytes = meter.level() - left_out
        del returned
        held_result_bytes = meter.level() - held_bytes
        arguments = [
            kept[n] if n in kept else _alike(e) for n, e in zip(backward.inputs, backward.examples, strict=True)
        ]
        tangents = [a for n, a in zip(backward.inputs, arguments, strict=True) if n not in kept]
        if not _torch.keeps_tangents():
            tangents.clear()
        del kept, given
        meter.note(list(argument_tensors(tuple(arguments))))
        meter.run(backward.source, arguments)
        return PlannedLevels(forward_levels, meter.take(), held_bytes, held_result_bytes)


def as_planned(made: Timeline, planned: PlannedLevels, cost: MeasuredCost) -> Timeline:
    """Returns a choice with the levels that the compiler planned, workspace of ops that run alone included."""

    def levels(of: Sequence[tuple[int, Signature | None]]) -> tuple[int, ...]:
        found = iter(cost.measured([signature for _, signature in of if signature is not None]))
        extra = [next(found) if signature is not None else None for _, signature in of]
        return tuple(level + (e.workspace_bytes if e else 0) for (level, _), e in zip(of, extra, strict=True))

    forward, backward = levels(planned.forward), levels(planned.backward)
    return dataclasses.replace(
        made,
        forward_levels=forward,
        backward_levels=backward,
        held_bytes=planned.held_bytes,
        held_result_bytes=planned.held_result_bytes,
    )


def _alike(example: Any) -> Any:
    """Returns a new fake tensor laid out as one, symbolic sizes by their hints; a number for a symbolic one."""
    if not isinstance(example, torch.Tensor):
        return _torch.size_hint(example) if isinstance(example, torch.SymInt) else example
    size, stride = ([_torch.size_hint(n) for n in ns] for ns in (example.shape, example.stride()))
    return torch.empty_strided(size, stride, dtype=example.dtype, device=example.device)


class _Meter(_torch.dispatch_mode_class()):  # type: ignore[misc]
    """Follows the memory of fake tensors; `outside` is memory that is not counted."""

    def __init__(self, outside: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._sizes: dict[Any, int] = {_torch.storage_reference(t): 0 for t in outside}
        self._levels: list[tuple[int, Signature | None]] = []

    def run(self, source: str, arguments: list[Any]) -> list[Any]:
        """Runs a graph's code on arguments, which are let go as the code does; returns its results."""
        call: Callable[[list[Any]], Any] = _torch.inductor_host_code(source)
        with self:
            return list(call(arguments))

    def take(self) -> tuple[tuple[int, Signature | None], ...]:
        """Returns the levels noted so far, and forgets them."""
        levels, self._levels = tuple(self._levels), []
        return levels

    def level(self) -> int:
        """Returns the bytes that are there."""
        self._sizes = {at: nbytes for at, nbytes in self._sizes.items() if not at.expired()}
        return sum(self._sizes.values())

    def nbytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Returns the bytes of tensors' memory, each once; none for what is not counted."""
        return sum(self._sizes.get(at, 0) for at in {_torch.storage_reference(t) for t in tensors})

    def note(self, tensors: Sequence[torch.Tensor], signature: Signature | None = None) -> None:
        """Notes the level with tensors that may be new."""
        for tensor in tensors:
            self._sizes.setdefault(_torch.storage_reference(tensor), tensor.untyped_storage().nbytes())
        self._levels.append((self.level(), signature))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op, and notes the level with its results."""
        out = func(*args, **(kwargs or {}))
        signature = None
        if func.namespace == "aten" and "out" not in (kwargs or {}):
            signature = make_signature(func, args, kwargs or {}, out)
        self.note(list(argument_tensors((out,))), signature)
        return out
