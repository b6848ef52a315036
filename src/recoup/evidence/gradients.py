"""One step's results, taken down and compared: loss, gradients, buffers, random streams."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from recoup._allocation import HostRoom
from recoup._storages import dense_parts
from recoup.capture.snapshot import Snapshot, random_state
from recoup.evidence.noise import NOISE_FACTOR
from recoup.thresholds import ASIDE_ELEMENTS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results of a step.

    `buffers` are the tensors whose values it changed, `attributes` what it changed in anything else that it can reach,
    in words. `random_state` is torch's CPU stream, the device's, python's, numpy's.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    attributes: dict[str, Any]
    random_state: tuple[Any, ...]


def take_result(
    model: nn.Module, loss: torch.Tensor, before: Snapshot, outside: Mapping[str, torch.Tensor]
) -> StepResult:
    """Returns loss, gradients (moved, not copied) and copies of buffers and random state after a step.

    Args:
        before: the state that it began with.
        outside: parameters that are not the model's, by name.
    """
    gradients = {}
    for name, parameter in [*model.named_parameters(), *outside.items()]:
        gradients[name] = parameter.grad
        parameter.grad = None
    changed = before.changes()
    return StepResult(
        loss=loss.detach().clone(),
        gradients=gradients,
        buffers={name: value for name, value in changed.items() if isinstance(value, torch.Tensor)},
        attributes={name: value for name, value in changed.items() if not isinstance(value, torch.Tensor)},
        random_state=random_state(),
    )


def on_host(result: StepResult, room: HostRoom) -> StepResult:
    """Returns the result with its gradients in host memory: on a device they would be in the next step's peak.

    Raises:
        HostMemoryError: if there is no room for them.
    """
    moved = [g for g in result.gradients.values() if g is not None and g.device.type != "cpu"]
    room.check(sum(g.nbytes for g in moved), "a copy of the gradients")
    gradients = {name: g if g is None else g.to("cpu") for name, g in result.gradients.items()}
    return dataclasses.replace(result, gradients=gradients)


def same_random_state(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two results of `random_state` are the same."""
    if (a[3] is None) != (b[3] is None):
        return False
    numpy_equal = a[3] is None or (a[3][2:] == b[3][2:] and bool((a[3][1] == b[3][1]).all()))
    devices_equal = len(a[1] or ()) == len(b[1] or ()) and all(map(torch.equal, a[1] or (), b[1] or ()))
    return numpy_equal and devices_equal and torch.equal(a[0], b[0]) and bool(a[2] == b[2])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How two steps' results differ; `differences` in words, model order.

    Attributes:
        plain_repeats: whether the plain step gives the same bits twice; asked only where a planned one differed.
    """

    loss_equal: bool
    gradients_equal: bool
    same_gradient_set: bool
    buffers_equal: bool
    rng_equal: bool
    max_gradient_error: float
    differences: tuple[str, ...]
    loss_error: float = 0.0
    error_bound: float = 0.0
    plain_repeats: bool = True

    @property
    def is_exact(self) -> bool:
        """Whether everything is equal bit for bit."""
        same = self.loss_equal and self.gradients_equal and self.buffers_equal
        return same and self.same_gradient_set and self.rng_equal

    @property
    def holds(self) -> bool:
        """Whether loss and gradients are equal bit for bit or within the bound, and everything else is equal."""
        within = 0 < self.error_bound >= max(self.max_gradient_error, self.loss_error)
        values = within or (self.loss_equal and self.gradients_equal)
        return values and self.same_gradient_set and self.buffers_equal and self.rng_equal


def rounding_bound(result: StepResult, coarsest: torch.dtype | None, noise: float, *, is_random: bool = True) -> float:
    """Returns how far gradients may be from plain's, relative, where sums are taken in another order.

    By the lowest precision that the step computes in: float32 1e-6, float64 1e-12, a few roundings of the type itself
    below that. As wide as the noise where that is more; ten times as wide at most where it may be more than rounding: a
    step that draws random numbers, or is not deterministic, proves nothing.

    Args:
        coarsest: the lowest precision of an op's result in the step, which autocast hides from gradients and loss;
            None: not known.
        noise: measured between two plain steps that round differently.
        is_random: whether these may differ by more than rounding.
    """
    dtypes = {t.dtype for t in (result.loss, *result.gradients.values()) if t is not None} | {coarsest}
    least = max((_BOUNDS[d] for d in dtypes if d in _BOUNDS), default=_BOUNDS[torch.float32])
    return min(max(least, noise), _MAX_NOISE_FACTOR * least) if is_random else max(least, noise)


_BOUNDS: dict[torch.dtype | None, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}


_MAX_NOISE_FACTOR = 10.0  # factor on the bound of a dtype that measured rounding may widen it by


def not_finite(result: StepResult) -> str:
    """Returns in words what of a plain step's loss and gradients holds NaNs or infinities; "" if nothing does."""
    given = {name: g for name, g in result.gradients.items() if g is not None}
    bad = [f"`{name}`" for name, g in given.items() if not _is_finite(g)]
    loss = "" if _is_finite(result.loss) else "the loss"
    names = ", ".join([*bad[:3], *(["..."] if len(bad) > 3 else [])])
    some = f"{len(bad)} of {len(given)} gradients ({names})" if bad else ""
    what = " and ".join(text for text in (loss, some) if text)
    return what and (
        f"{what} hold{'s' if what == loss else ''} NaNs or infinities without a plan too: that they are equal with it "
        "proves little. Verify with a batch and weights whose step is finite"
    )


def _is_finite(tensor: torch.Tensor) -> bool:
    parts = [tensor] if tensor.layout is torch.strided else dense_parts(tensor)
    return all(bool(piece.isfinite().all()) for part in parts for piece in pieces(part.detach()))


def rounding_noise(plain: StepResult, scaled: StepResult) -> float:
    """Returns the largest relative difference of a gradient between two plain steps that only round differently.

    Two results with independent roundings; how much of it there is depends on the model's depth and on its data, so it
    is measured, not known.

    Args:
        scaled: of the same step with its loss times `NOISE_FACTOR`.
    """
    smallest = _SMALL_SHARE * _norm_of_all(plain.gradients)
    worst = 0.0
    for name, gradient in plain.gradients.items():
        other = scaled.gradients.get(name)
        if gradient is not None and other is not None and _may_be_nan(gradient):
            other = other.to(gradient.device)
            worst = max(worst, _relative_error(gradient, other, smallest, times=NOISE_FACTOR))
    return worst


def compare(plain: StepResult, planned: StepResult, *, bound: float = 0.0) -> Comparison:
    """Compares bit for bit; NaNs in the same places count as equal.

    Args:
        bound: how far loss and gradients may differ, relative; 0: not at all. With a bound, a gradient's error is
            relative to its norm, or to a thousandth of the norm of all gradients where that is more: some gradients are
            nothing but rounding (that of a key's bias, which softmax ignores).
    """
    smallest = _SMALL_SHARE * _norm_of_all(plain.gradients) if bound else 0.0
    differences: list[str] = []
    loss_equal = equal_values(plain.loss, planned.loss)
    if not loss_equal:
        differences.append(f"loss {plain.loss.item():.9g} became {planned.loss.item():.9g}")
    same_set, gradients_equal, worst = True, True, 0.0
    for name, gradient in plain.gradients.items():
        other = planned.gradients.get(name)
        if (gradient is None) != (other is None):
            same_set = gradients_equal = False
            differences.append(f"`{name}` {'got a gradient' if other is not None else 'lost its gradient'}")
        elif gradient is not None and other is not None:
            other = other.to(gradient.device)
            if not equal_values(gradient, other):
                gradients_equal = False
                error = _relative_error(gradient, other, smallest)
                worst = max(worst, error)
                differences.append(f"gradient of `{name}` differs by {error:.2e} (relative)")
    buffers_equal = True
    for name in dict.fromkeys([*plain.buffers, *planned.buffers]):
        one, other = plain.buffers.get(name), planned.buffers.get(name)
        if one is None or other is None or not equal_values(one, other):
            buffers_equal = False
            differences.append(f"buffer `{name}` differs")
    for name in dict.fromkeys([*plain.attributes, *planned.attributes]):
        value, found = plain.attributes.get(name, "unchanged"), planned.attributes.get(name, "unchanged")
        if value != found and value == value:  # a NaN is no difference
            buffers_equal = False
            differences.append(f"attribute `{name}` is {found!r}, {value!r} without the plan")
    rng_equal = same_random_state(plain.random_state, planned.random_state)
    if not rng_equal:
        differences.append("the random number streams ended elsewhere")
    return Comparison(
        loss_equal=loss_equal,
        gradients_equal=gradients_equal,
        same_gradient_set=same_set,
        buffers_equal=buffers_equal,
        rng_equal=rng_equal,
        max_gradient_error=worst,
        differences=tuple(differences),
        error_bound=bound,
        loss_error=0.0 if loss_equal else _relative_error(plain.loss, planned.loss, 0.0),
    )


def equal_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and values; NaNs in the same places count as equal."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        return all(map(equal_values, dense_parts(a), dense_parts(b)))
    if torch.equal(a, b):
        return True
    return _may_be_nan(a) and bool(((a == b) | (a.isnan() & b.isnan())).all())


_SMALL_SHARE = 1e-3  # of the norm of all gradients: errors of smaller ones are relative to that


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields views of about `ASIDE_ELEMENTS` elements of a dense tensor; equal shapes give equal pieces."""
    if tensor.numel() <= ASIDE_ELEMENTS:
        yield tensor
        return
    dim = max(range(tensor.dim()), key=lambda d: tensor.shape[d])
    yield from torch.split(tensor, max(tensor.shape[dim] * ASIDE_ELEMENTS // tensor.numel(), 1), dim)


def in_host_memory(tensor: torch.Tensor, room: HostRoom) -> torch.Tensor:
    """Returns a contiguous copy of a dense tensor in host memory; copied in pieces, so that the device needs little.

    Raises:
        HostMemoryError: if there is no room for it.
    """
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    room.check(tensor.nbytes, "a tensor saved for backward")
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    for to, piece in zip(pieces(host), pieces(tensor), strict=True):
        to.copy_(piece)
    return host


def _norm_of_all(gradients: dict[str, torch.Tensor | None]) -> float:
    return math.sqrt(sum(_norm(g) ** 2 for g in gradients.values() if g is not None and _may_be_nan(g)))


def _may_be_nan(tensor: torch.Tensor) -> bool:
    """Whether its dtype has NaNs."""
    return tensor.is_floating_point() or tensor.is_complex()


def _relative_error(a: torch.Tensor, b: torch.Tensor, smallest: float, *, times: float = 1.0) -> float:
    """Returns ||a - b / times|| / ||a||, or over `smallest` where that is more.

    NaNs and infinities in the same places are no difference; infinity if there are others. The norm is that of what is
    finite.
    """
    return _norm(a, b, times=times) / max(_norm(a), smallest, 1e-300)


def _norm(a: torch.Tensor, b: torch.Tensor | None = None, *, times: float = 1.0) -> float:
    """Returns ||a||, or ||a - b / times||, in double precision."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    chunks = torch.split(_flat(a), ASIDE_ELEMENTS)
    others = [None] * len(chunks) if b is None else torch.split(_flat(b), ASIDE_ELEMENTS)
    total = 0.0
    for x, y in zip(chunks, others, strict=True):
        x = x.to(wide)
        if y is None:
            x = torch.where(x.isfinite(), x, 0)
        else:
            y = y.to(wide) / times
            x = torch.where((x == y) | (x.isnan() & y.isnan()), 0, x - y)
        total += float(x.abs().square().sum())
    return math.inf if math.isnan(total) else math.sqrt(total)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).reshape(-1)
