"""The tiled loss against `F.cross_entropy`: values, gradients, FLOPs, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import recoup
from recoup.errors import UsageError
from recoup.evidence.memory import measure_peak, storage_bytes

OPTIONS = st.fixed_dictionaries({
    "reduction": st.sampled_from(["mean", "sum", "none"]),
    "label_smoothing": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    "z_loss": st.sampled_from([0.0, 0.0, 1e-2]),
    "softcap": st.sampled_from([None, None, 2.0]),
    "logit_scale": st.sampled_from([None, None, 0.25, -3.0]),
    "shift": st.booleans(),
    "ignore_index": st.sampled_from([-100, 0, 2]),
})  # fmt: skip


def plain(hidden: Any, weight: Any, labels: Any, *, bias: Any = None, **options: Any) -> torch.Tensor:
    """The definition, with all logits there."""
    logits = F.linear(hidden, weight, bias)
    if options["logit_scale"] is not None:
        logits = logits * options["logit_scale"]
    if options["softcap"] is not None:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    ignore, reduction = options["ignore_index"], options["reduction"]
    if options["shift"]:
        labels = F.pad(labels, (0, 1), value=ignore)[..., 1:]
    flat, target = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    rows = F.cross_entropy(
        flat, target, ignore_index=ignore, reduction="none", label_smoothing=options["label_smoothing"]
    )
    counts = target != ignore
    rows = rows + options["z_loss"] * flat.logsumexp(1).square() * counts
    if reduction == "none":
        return rows.view(labels.shape)
    if reduction == "sum":
        return rows.sum()
    mean = rows.sum() / counts.sum().clamp(min=1)
    return mean.masked_fill(~counts.any(), torch.nan)  # of none it is NaN, and has no gradient: so it is in torch


def problem(seed: int, shape: tuple[int, ...], hidden_size: int, classes: int, dtype: torch.dtype) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, hidden_size, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(classes, hidden_size, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(classes, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, classes, shape, generator=generator)
    return [hidden, weight, bias, labels]


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    options=OPTIONS,
    seed=st.integers(0, 2**20),
    rows=st.integers(1, 3),
    length=st.integers(1, 9),
    hidden_size=st.integers(1, 6),
    classes=st.integers(3, 11),
    has_bias=st.booleans(),
    grads=st.tuples(st.booleans(), st.booleans()),
    tile_tokens=st.integers(1, 30),
    ignored=st.floats(0, 0.6),
)
@pytest.mark.slow
def test_equals_cross_entropy(
    options: dict[str, Any],
    seed: int,
    rows: int,
    length: int,
    hidden_size: int,
    classes: int,
    has_bias: bool,
    grads: tuple[bool, bool],
    tile_tokens: int,
    ignored: float,
) -> None:
    hidden, weight, bias, labels = problem(seed, (rows, length), hidden_size, classes, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = options["ignore_index"]
    hidden.requires_grad_(grads[0] or not grads[1])
    weight.requires_grad_(grads[1])
    bias.requires_grad_(grads[1] and has_bias)
    inputs = [t for t in (hidden, weight, bias) if t.requires_grad]
    shared = {"bias": bias if has_bias else None, **options}
    expected = plain(hidden, weight, labels, **shared)
    found = recoup.tiled_cross_entropy(hidden, weight, labels, tile_tokens=tile_tokens, **shared)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    given_back = torch.autograd.grad(found, inputs, upstream)
    for mine, theirs in zip(given_back, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)


def flops(run: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_flops_equal_to_plain(has_bias: bool, frozen: bool, reduction: str) -> None:
    hidden, weight, bias, labels = problem(0, (37,), 16, 50, torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_(not frozen)

    def plain_step() -> None:
        F.cross_entropy(F.linear(hidden, weight, bias if has_bias else None), labels, reduction=reduction).backward()

    def tiled_step() -> None:
        recoup.tiled_cross_entropy(
            hidden, weight, labels, bias=bias if has_bias else None, reduction=reduction, tile_tokens=8
        ).backward()

    assert flops(tiled_step) == flops(plain_step)


def test_recompute_form_runs_one_matmul_more() -> None:
    hidden, weight, _, labels = problem(0, (37,), 16, 50, torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    tiled = flops(lambda: recoup.tiled_cross_entropy(hidden, weight, labels, reduction="none").sum().backward())
    assert tiled == 4 * 2 * 37 * 16 * 50


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_low_precision_against_plain_in_float32(dtype: torch.dtype, bound: float, softcap: float | None) -> None:
    hidden, weight, _, labels = problem(1, (96,), 64, 200, dtype)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    logits = F.linear(hidden, weight)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits.float(), labels)
    found = recoup.tiled_cross_entropy(hidden, weight, labels, tile_tokens=10, softcap=softcap)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for mine, theirs in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine.double() - theirs.double()).norm() <= bound * theirs.double().norm()


def test_float16_gradients_survive_a_loss_scale() -> None:
    hidden, weight, _, labels = problem(1, (4096,), 8, 64, torch.float16)
    hidden = (hidden * 0.1).requires_grad_()
    (gradient,) = torch.autograd.grad(recoup.tiled_cross_entropy(hidden, weight, labels) * 2**12, hidden)
    wide = hidden.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(wide @ weight.float().t(), labels) * 2**12, wide)
    assert (gradient.float() - expected).norm() <= 2e-3 * expected.norm()


def test_autocast_computes_as_plain_does() -> None:
    hidden, weight, _, labels = problem(2, (40,), 32, 90, torch.float32)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(F.linear(hidden, weight), labels)
        found = recoup.tiled_cross_entropy(hidden, weight, labels, tile_tokens=16)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for mine, theirs in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() <= 1e-2 * theirs.norm()


def test_tied_weight_sums_both_gradients() -> None:
    torch.manual_seed(0)
    weight = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    ids, labels = torch.randint(0, 30, (2, 12))
    (expected,) = torch.autograd.grad(
        F.cross_entropy(F.linear(F.embedding(ids, weight).tanh(), weight), labels), weight
    )
    hidden = F.embedding(ids, weight).tanh()
    (found,) = torch.autograd.grad(recoup.tiled_cross_entropy(hidden, weight, labels, num_tiles=4), weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_backward_twice_and_accumulation() -> None:
    hidden, weight, _, labels = problem(3, (20,), 8, 30, torch.float64)
    weight.requires_grad_()
    loss = recoup.tiled_cross_entropy(hidden, weight, labels, tile_tokens=6)
    (first,) = torch.autograd.grad(3 * loss, weight, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(5 * loss, weight)
    torch.testing.assert_close(first, kept, rtol=0, atol=0)
    torch.testing.assert_close(second / 5, first / 3)
    for _ in range(2):
        recoup.tiled_cross_entropy(hidden, weight, labels, tile_tokens=6).backward()
    torch.testing.assert_close(weight.grad, 2 * first / 3)


_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross entropy": lambda h, w: recoup.tiled_cross_entropy(h, w, torch.zeros(len(h)).long()),
    "each token": lambda h, w: recoup.tiled_cross_entropy(h, w, torch.zeros(len(h)).long(), reduction="none"),
    "soft targets": lambda h, w: recoup.tiled_soft_cross_entropy(h, w, torch.full((len(h), len(w)), 1 / len(w))),
    "divergence": lambda h, w: recoup.tiled_kl(h, w, torch.zeros(len(h), len(w)), reduction="mean"),
}


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("loss", _LOSSES.values(), ids=_LOSSES)
def test_an_evaluation_takes_no_gradients(loss: Any, without: Any) -> None:
    hidden, weight = torch.randn(16, 64), torch.randn(2000, 64)

    def evaluate() -> torch.Tensor:
        with without():
            return loss(hidden, weight)

    expected = loss(hidden, weight)
    detached = measure_peak(evaluate, device=torch.device("cpu"), held_bytes=0)
    hidden.requires_grad_()
    weight.requires_grad_()
    assert torch.equal(evaluate(), expected)
    assert measure_peak(evaluate, device=torch.device("cpu"), held_bytes=0) <= detached


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_labels_that_are_all_ignored_give_no_gradient(dtype: torch.dtype) -> None:
    hidden = torch.randn(4, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 8, dtype=dtype, requires_grad=True)
    loss = recoup.tiled_cross_entropy(hidden, weight, torch.full((4,), -100), tile_tokens=3)
    loss.backward()
    assert loss.isnan()
    assert hidden.grad is not None and weight.grad is not None
    assert not hidden.grad.any() and not weight.grad.any()


def test_second_derivative_raises() -> None:
    hidden, weight, _, labels = problem(3, (20,), 8, 30, torch.float64)
    hidden.requires_grad_()
    loss = recoup.tiled_cross_entropy(hidden, weight, labels)
    with pytest.raises(UsageError, match="create_graph"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_never_holds_all_logits(reduction: str) -> None:
    tokens, size, classes, tile = 1024, 32, 2048, 64
    hidden, weight, _, labels = problem(4, (tokens,), size, classes, torch.float32)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    held = storage_bytes([*leaves, labels])

    def step() -> None:
        recoup.tiled_cross_entropy(hidden, weight, labels, reduction=reduction, tile_tokens=tile).sum().backward()
        hidden.grad = weight.grad = None

    peak = measure_peak(step, device=torch.device("cpu"), held_bytes=held)
    gradients = held - labels.numel() * 8
    small = tokens * 8 * 6  # a few numbers a token
    assert peak <= held + gradients + 2 * 4 * tile * classes + small
    assert peak < 4 * tokens * classes  # the logits alone


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reduction": "max"}, "reduction"),
        ({"softcap": 0.0}, "softcap"),
        ({"tile_tokens": 2, "num_tiles": 2}, "not both"),
        ({"tile_tokens": 0}, "tile_tokens"),
        ({"num_tiles": 0}, "num_tiles"),
        ({"label_smoothing": 2.0}, "label_smoothing"),
        ({"bias": torch.zeros(3)}, "bias"),
    ],
)
def test_bad_options_are_refused(change: dict[str, Any], says: str) -> None:
    hidden, weight, _, labels = problem(0, (5,), 4, 7, torch.float32)
    with pytest.raises(UsageError, match=says):
        recoup.tiled_cross_entropy(hidden, weight, labels, **change)
    with pytest.raises(UsageError, match="one entry a token"):
        recoup.tiled_cross_entropy(hidden, weight, labels[:3])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("ignore_index", [-100, 1 << 20])
def test_labels_of_any_integer_dtype_are_shifted_alike(dtype: torch.dtype, ignore_index: int) -> None:
    hidden, weight, _, labels = problem(5, (2, 4), 8, 50, torch.float64)
    options: dict[str, Any] = {"ignore_index": ignore_index, "shift": True}
    for loss in (recoup.tiled_cross_entropy, recoup.tiled_log_probs):
        assert torch.equal(
            loss(hidden, weight, labels.to(dtype), **options),
            loss(hidden, weight, labels, **options),
        )
