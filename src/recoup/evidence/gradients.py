"""One step's results, taken down and compared: loss, gradients, buffers, random streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup._storages import dense_parts
from recoup.capture.snapshot import random_state


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step left behind.

    `buffers` are those of the model and the tensors among its modules' attributes; `attributes` the numbers and
    strings, and the lengths of lists and dicts. `random_state` is torch's CPU stream, the device's, python's, numpy's.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    attributes: dict[str, Any]
    random_state: tuple[Any, ...]


def take_result(model: nn.Module, loss: torch.Tensor) -> StepResult:
    """Returns copies of what the step that just ran left in the model; gradients are handed over, not copied."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = parameter.grad
        parameter.grad = None
    return StepResult(
        loss=loss.detach().clone(),
        gradients=gradients,
        buffers={name: t.detach().clone() for name, t in [*model.named_buffers(), *_tensor_attributes(model)]},
        attributes=dict(_plain_attributes(model)),
        random_state=random_state(),
    )


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if not name.startswith("_") and name != "forward":
                yield f"{path}.{name}" if path else name, value


def _tensor_attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in _attributes(model) if isinstance(value, torch.Tensor))


def _plain_attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in _attributes(model):
        if isinstance(value, (bool, int, float, str)):
            yield name, value
        elif type(value) in (list, dict, set):
            yield name, len(value)


def same_random_state(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two results of `random_state` are the same."""
    if (a[3] is None) != (b[3] is None):
        return False
    numpy_equal = a[3] is None or (a[3][2:] == b[3][2:] and bool((a[3][1] == b[3][1]).all()))
    devices_equal = len(a[1] or ()) == len(b[1] or ()) and all(map(torch.equal, a[1] or (), b[1] or ()))
    return numpy_equal and devices_equal and torch.equal(a[0], b[0]) and bool(a[2] == b[2])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How two steps' results differ; `differences` in words, model order."""

    loss_equal: bool
    gradients_equal: bool
    same_gradient_set: bool
    buffers_equal: bool
    rng_equal: bool
    max_gradient_error: float
    differences: tuple[str, ...]
    loss_error: float = 0.0
    error_bound: float = 0.0


def rounding_bound(result: StepResult) -> float:
    """Returns how far gradients may be from plain's, relative, where sums are taken in another order.

    In float32 1e-6, in float64 1e-12, in lower precision a few roundings of the type itself; by the lowest precision
    among the loss (transformers takes it in float32 whatever the model is in) and the gradients.
    """
    tensors = [result.loss, *(g for g in result.gradients.values() if g is not None)]
    return max(_BOUNDS.get(t.dtype, 1e-6) for t in tensors)


_BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}


NOISE_FACTOR = 1.1
"""No power of two: a loss multiplied by it has its gradients rounded anew at every step of backward."""
_MOST_NOISE = 10.0


def rounding_noise(plain: StepResult, scaled: StepResult) -> float:
    """Returns how far apart two plain steps are that only round differently: the worst gradient, relative.

    Two results with independent roundings; how much of it there is depends on the model's depth and on its data, so it
    is measured, not known.

    Args:
        scaled: of the same step with its loss times `NOISE_FACTOR`.
    """
    smallest = _SMALL_SHARE * _norm_of_all(plain.gradients)
    worst = 0.0
    for name, gradient in plain.gradients.items():
        other = scaled.gradients.get(name)
        if gradient is not None and other is not None and gradient.is_floating_point():
            worst = max(worst, _relative_error(gradient, other.double() / NOISE_FACTOR, smallest))
    return worst


def compare(
    plain: StepResult, planned: StepResult, *, rounds_differently: bool = False, noise: float = 0.0
) -> Comparison:
    """Compares bit for bit; NaNs in the same places count as equal.

    Args:
        noise: between two plain steps that round differently: the bound is as wide where that is more than the bound of
            the dtype, ten times as wide at most (a step that is not deterministic has more, and proves nothing).
        rounds_differently: sums are taken in another order. A gradient's error is then relative to its norm, or to a
            thousandth of the norm of all gradients where that is more: some gradients are nothing but rounding (that of
            a key's bias, which softmax ignores).
    """
    smallest = _SMALL_SHARE * _norm_of_all(plain.gradients) if rounds_differently else 0.0
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
        elif gradient is not None and other is not None and not equal_values(gradient, other):
            gradients_equal = False
            error = _relative_error(gradient, other, smallest)
            worst = max(worst, error)
            differences.append(f"gradient of `{name}` differs by {error:.2e} (relative)")
    buffers_equal = True
    for name, buffer in plain.buffers.items():
        other = planned.buffers.get(name)
        if other is None or not equal_values(buffer, other):
            buffers_equal = False
            differences.append(f"buffer `{name}` differs")
    for name, value in plain.attributes.items():
        if planned.attributes.get(name) != value and value == value:  # a NaN is no difference
            buffers_equal = False
            differences.append(f"attribute `{name}` is {planned.attributes.get(name)!r}, {value!r} without the plan")
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
        error_bound=_bound(plain, noise) if rounds_differently else 0.0,
        loss_error=0.0 if loss_equal else _relative_error(plain.loss, planned.loss, 0.0),
    )


def _bound(plain: StepResult, noise: float) -> float:
    least = rounding_bound(plain)
    return min(max(least, noise), _MOST_NOISE * least)


def equal_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and values; NaNs in the same places count as equal."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        return all(map(equal_values, dense_parts(a), dense_parts(b)))
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())


_SMALL_SHARE = 1e-3


def _norm_of_all(gradients: dict[str, torch.Tensor | None]) -> float:
    found = [part for g in gradients.values() if g is not None for part in dense_parts(g)]
    floating = [g.detach() for g in found if g.is_floating_point()]
    return float(sum(float(g.double().square().sum()) for g in floating) ** 0.5)


def _relative_error(a: torch.Tensor, b: torch.Tensor, smallest: float) -> float:
    wide = torch.float64 if not a.is_complex() else torch.complex128
    a, b = (t.detach().to_dense() if t.layout is not torch.strided else t.detach() for t in (a, b))
    a, b = a.to(wide), b.to(wide)
    return float((a - b).norm() / a.norm().clamp_min(max(smallest, 1e-300)))
